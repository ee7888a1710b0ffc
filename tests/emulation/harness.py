# SPDX-License-Identifier: Apache-2.0
"""Builds kernel units for the CPU and drives the emulation that runs them.

A kernel unit is a C++ file that includes kernel headers and has `extern "C"` entry points which
launch them. `Emulator` compiles it together with the emulation runtime into a shared library and
calls it through ctypes::

    emulator = Emulator([HERE / "histogram_unit.cpp"])
    emulator.configure(seed=2, order="warp_random", preempt=3)
    with emulator.memory(ids=ids, counts=counts):
        emulator.call("run_histogram", ids, ids.size, counts)
    assert emulator.take_reports() == []
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
CACHE = PROJECT / "build" / "emulation"

ORDERS = {"in_order": 0, "reverse": 1, "random": 2, "warp_random": 3}

_INCLUDES = [f"-I{PROJECT / 'csrc'}", f"-I{HERE / 'include'}"]
_COMMON_FLAGS = ["-std=c++17", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror"]
# The runtime must not be instrumented itself, nor show its functions to other libraries.
_RUNTIME_FLAGS = [*_COMMON_FLAGS, "-O2", "-fvisibility=hidden", f"-I{HERE / 'include'}"]
# What device code promises: integers wrap, and floats are computed as written. Without sibling
# calls every return address names the line that called. Without unique symbols two units in one
# process, which may hold the same kernels, do not share the places of shared variables.
_UNIT_FLAGS = [
    *_COMMON_FLAGS,
    "-DTOPOEP_EMULATE",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-optimize-sibling-calls",
    "-fno-gnu-unique",
    *_INCLUDES,
]
_INSTRUMENTED_FLAGS = ["-O1", "-fsanitize=thread,alignment"]
_FAST_FLAGS = ["-O2"]

Array = npt.NDArray[Any]


class BuildError(RuntimeError):
    """A unit or the runtime does not compile; the text is the compiler's."""


class LaunchError(RuntimeError):
    """A launch was refused, or the kernel did not live to its end (see the reports)."""


@dataclass(frozen=True)
class Report:
    """One finding of the checkers.

    Attributes:
        kind: race, bounds, uninitialised, misaligned, barrier, warp, deadlock, livelock, trap or
            limit.
        count: How often it was found, over all threads.
        places: The one or two source lines, as "file.cuh:12", or "?" where they are not known.
        message: The whole story, with blocks and threads.
    """

    kind: str
    count: int
    places: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"[{self.kind} x{self.count}] {self.message}"


@dataclass(frozen=True)
class Stats:
    """Counters since the library was loaded; subtract two of them for what lies between.

    Attributes:
        switches: Changes from one thread to another.
        barriers: Barriers of a block or grid that were completed.
        warp_ops: Warp collectives that were completed.
        accesses: Accesses to memory other than a thread's own stack (instrumented builds only).
        atomics: Atomic operations, relaxed loads and stores included.
        chain: Barriers and collectives that had to follow one another: the longest chain of each
            launch, summed over launches.
    """

    switches: int
    barriers: int
    warp_ops: int
    accesses: int
    atomics: int
    chain: int

    def __sub__(self, earlier: Stats) -> Stats:
        names = [field.name for field in fields(self)]
        return Stats(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


@dataclass(frozen=True)
class Schedule:
    """One way to interleave the threads; the same schedule always gives the same run."""

    seed: int
    order: str
    preempt: int

    def __str__(self) -> str:
        return f"seed{self.seed}-{self.order}-preempt{self.preempt}"


SCHEDULES = tuple(
    Schedule(seed, order, preempt)
    for seed in (1, 2, 3)
    for order in ("random", "warp_random")
    for preempt in (0, 3, 40)
)


class Emulator:
    """A kernel unit, built and loaded.

    The state of the emulation belongs to the loaded library, so two objects for the same unit share
    it. Use one thread at a time.
    """

    def __init__(
        self,
        sources: Sequence[Path],
        *,
        instrumented: bool = True,
        flags: Sequence[str] = (),
    ) -> None:
        """Builds the unit, or takes it from the cache.

        Args:
            sources: C++ files; may include headers beside them, under csrc/ and the emulation's.
            instrumented: Whether accesses are checked. The fast variant finds only faults of
                barriers, collectives and limits, and needs no memory registered.
            flags: More compiler flags, such as -I and -D.
        """
        self.instrumented = instrumented
        self.library = ctypes.CDLL(str(build(tuple(sources), instrumented, tuple(flags))))
        self.library.emu_take_reports.restype = ctypes.c_char_p
        self.library.emu_read_stats.restype = ctypes.c_size_t
        self.configure()

    def configure(self, **options: int | bool | str) -> None:
        """Sets options for the launches that follow; those not named go back to their defaults.

        Args:
            **options: seed (1), order ("random"; see ORDERS), preempt (0: threads switch where they
                wait only; n: also by force after about n accesses), resident (1 block at a time;
                cooperative launches are always resident as a whole), stack_bytes (65536),
                max_shared_bytes (232448), max_polls (300000), max_switches (10**9), check_races,
                check_bounds, check_initialised (True).

        Raises:
            ValueError: For a name that is no option, an unknown order, or a negative number.
        """
        self.library.emu_reset_options()
        for name, value in options.items():
            if name == "order" and isinstance(value, str):
                if value not in ORDERS:
                    raise ValueError(f"order is {value!r}, but may be one of {sorted(ORDERS)}")
                value = ORDERS[value]
            if int(value) < 0:
                raise ValueError(f"{name} is {value}, but must not be negative")
            if self.library.emu_set_option(name.encode(), ctypes.c_int64(int(value))) != 0:
                raise ValueError(f"{name!r} is no option of the emulation")

    def use(self, schedule: Schedule, **options: int | bool | str) -> None:
        """Configures a schedule, with further options."""
        self.configure(
            seed=schedule.seed, order=schedule.order, preempt=schedule.preempt, **options
        )

    @contextlib.contextmanager
    def register(
        self, memory: Array | tuple[int, int], name: str, initialised: bool = True
    ) -> Iterator[None]:
        """Lets kernels touch an array while the context lasts.

        Args:
            memory: A contiguous array, or (address, bytes).
            name: What reports call it.
            initialised: False when a kernel must write before it reads.

        Raises:
            ValueError: When the array is not contiguous, or overlaps one that is registered.
        """
        address, size = _extent(memory, name)
        if size == 0:
            yield
            return
        pointer = ctypes.c_void_p(address)
        if self.library.emu_register(
            pointer, ctypes.c_size_t(size), name.encode(), int(initialised)
        ):
            raise ValueError(f"{name} overlaps memory that is registered already")
        try:
            yield
        finally:
            self.library.emu_unregister(pointer)

    @contextlib.contextmanager
    def memory(self, *, initialised: bool = True, **arrays: Array) -> Iterator[None]:
        """Lets kernels touch these arrays, under their keyword names, while the context lasts."""
        with contextlib.ExitStack() as stack:
            for name, array in arrays.items():
                stack.enter_context(self.register(array, name, initialised))
            yield

    def call(self, entry: str, *arguments: Array | int | str | None) -> None:
        """Calls an entry point that returns nullptr or an error text.

        Args:
            entry: Name of an `extern "C"` function. Whole numbers must be `long long` there.
            *arguments: Arrays become pointers to their data, None a null pointer.

        Raises:
            LaunchError: With the error text. A kernel that failed also leaves a report.
        """
        function = self.library[entry]
        function.restype = ctypes.c_char_p
        error = function(*[_argument(argument) for argument in arguments])
        if error is not None:
            raise LaunchError(f"{entry}: {error.decode()}")

    def take_reports(self) -> list[Report]:
        """Everything found since the last call."""
        lines = self.library.emu_take_reports().decode().splitlines()
        reports = []
        for line in lines:
            kind, count, places, message = line.split("\t")
            reports.append(Report(kind, int(count), tuple(places.split("|")), message))
        return reports

    def stats(self) -> Stats:
        """Counters since the library was loaded."""
        names = [field.name for field in fields(Stats)]
        values = (ctypes.c_uint64 * len(names))()
        self.library.emu_read_stats(values, ctypes.c_size_t(len(names)))
        return Stats(**dict(zip(names, values, strict=True)))


def aligned_array(shape: int | tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> Array:
    """An array of zeros whose address is `offset` bytes beyond a multiple of 256.

    Device allocations are aligned to 256 bytes; numpy's arrays often only to 16.
    """
    wanted = np.dtype(dtype)
    count = int(np.prod(shape))
    size = count * wanted.itemsize
    raw = np.zeros(size + 512, dtype=np.uint8)
    start = -raw.ctypes.data % 256 + offset
    return raw[start : start + size].view(wanted).reshape(shape)


def has_line_numbers() -> bool:
    """Whether reports about memory accesses can name source lines on this machine."""
    return shutil.which("addr2line") is not None


@functools.cache
def build(sources: tuple[Path, ...], instrumented: bool, flags: tuple[str, ...] = ()) -> Path:
    """Builds a shared library from kernel units and the runtime, or finds it in the cache.

    Returns:
        The library's path, whose name depends on the content of everything that goes into it.

    Raises:
        BuildError: When something does not compile.
    """
    compiler = os.environ.get("CXX", "g++")
    unit_flags = [*_UNIT_FLAGS, *(_INSTRUMENTED_FLAGS if instrumented else _FAST_FLAGS), *flags]
    own = [*_files(HERE, "src/*.cpp"), *_files(HERE, "src/*.h"), *_files(HERE, "include/**/*.h")]
    headers = [*_files(PROJECT / "csrc", "**/*.h"), *_files(PROJECT / "csrc", "**/*.cuh")]
    beside = [path for source in sources for path in _files(source.parent, "*.*h")]
    runtime_key = _digest(compiler, _RUNTIME_FLAGS, own)
    key = _digest(compiler, [runtime_key, *unit_flags], [*sources, *headers, *beside])
    library = CACHE / f"{sources[0].stem}-{'checked' if instrumented else 'fast'}-{key}.so"
    with _only_one_process(library):
        if not library.exists():
            runtime = _build_runtime(compiler, runtime_key)
            with _scratch() as scratch:
                units = _compile(compiler, unit_flags, sources, scratch)
                # The runtime comes first: of a template that both instantiate, the linker keeps the
                # first copy, and the runtime must not get an instrumented one.
                # No symbol may be left open: the loader would only notice at the first call.
                output = str(scratch / "out.so")
                link = [compiler, "-shared", "-Wl,-z,defs", "-o", output, *runtime, *units, "-ldl"]
                _run(link)
                os.replace(scratch / "out.so", library)
    return library


def _build_runtime(compiler: str, key: str) -> list[str]:
    """The runtime's object files, which all units share."""
    folder = CACHE / f"runtime-{key}"
    with _only_one_process(folder):
        if not folder.exists():
            with _scratch() as scratch:
                objects = scratch / "objects"
                objects.mkdir()
                _compile(compiler, _RUNTIME_FLAGS, _files(HERE, "src/*.cpp"), objects)
                os.replace(objects, folder)
    return [str(path) for path in _files(folder, "*.o")]


def _compile(
    compiler: str, flags: Sequence[str], sources: Iterable[Path], folder: Path
) -> list[str]:
    def compile_one(source: Path) -> str:
        output = folder / f"{source.stem}.o"
        _run([compiler, *flags, "-c", str(source), "-o", str(output)])
        return str(output)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


@contextlib.contextmanager
def _only_one_process(target: Path) -> Iterator[None]:
    """Test processes that start together build once: the others wait for the first."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder beside the results, so that a finished file can be moved there in one step."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        yield Path(folder)


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout


def _digest(compiler: str, flags: Sequence[str], paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for text in [_compiler_version(compiler), *flags]:
        digest.update(text.encode() + b"\0")
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _extent(memory: Array | tuple[int, int], name: str) -> tuple[int, int]:
    if isinstance(memory, tuple):
        return memory
    if not memory.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    return memory.ctypes.data, memory.nbytes


def _argument(argument: Array | int | str | None) -> Any:
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, str):
        return ctypes.c_char_p(argument.encode())
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_longlong(int(argument))
