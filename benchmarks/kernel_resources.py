# SPDX-License-Identifier: Apache-2.0
"""Registers, shared memory and spills of every kernel, from nvcc; no GPU needed.

    python benchmarks/kernel_resources.py            prints the table
    python benchmarks/kernel_resources.py --write    also keeps it as results/kernel_resources.txt

The kept file is compared by tests/kernels/test_compile_gate.py, so that a regression shows. Every
file is compiled with warnings as errors for each architecture.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from toolchain import find_cuda_home, nvcc_version  # noqa: E402

CSRC = ROOT / "csrc"
KEPT = ROOT / "benchmarks" / "results" / "kernel_resources.txt"
CACHE = ROOT / "build" / "kernel_resources"
ARCHS = ("80", "90", "100")
FLAGS = ("-std=c++17", "-O3", "-Werror", "all-warnings", "-Xptxas", "-v")


@dataclass(frozen=True, order=True)
class Resources:
    """What one kernel takes on one architecture; the registers are per thread."""

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def compile_file(cuda_home: Path, source: Path, includes: tuple[Path, ...] = ()) -> str:
    """Compiles for all architectures and returns what ptxas says, from the cache if it can."""
    inputs = sorted(CSRC.glob("core/*.h")) + sorted(CSRC.glob("cuda/*.*h")) + [source]
    inputs += sorted(CSRC.glob("comm/*.*h")) if includes else []
    key = hashlib.sha256(repr((FLAGS, ARCHS, nvcc_version(cuda_home), includes)).encode())
    for path in inputs:
        key.update(path.name.encode() + path.read_bytes())
    kept = CACHE / f"{source.stem}-{key.hexdigest()[:16]}.txt"
    if kept.exists():
        return kept.read_text()
    CACHE.mkdir(parents=True, exist_ok=True)
    archs = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    output = CACHE / f"{source.stem}-{key.hexdigest()[:16]}.o"
    command = [str(cuda_home / "bin/nvcc"), *FLAGS, *archs, f"-I{CSRC}", "-c", str(source)]
    command += [f"-I{folder}" for folder in includes]
    result = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{source.name} does not compile:\n{result.stdout}{result.stderr}")
    output.unlink()
    kept.write_text(result.stderr)
    return result.stderr


_KERNEL = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for 'sm_(?P<arch>\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def parse(text: str) -> list[Resources]:
    """The kernels in the output of ptxas -v."""
    found = []
    for match in _KERNEL.finditer(text):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found.append(
            Resources(
                match["kernel"],
                match["arch"],
                int(match["registers"]),
                int(shared[1]) if shared else 0,
                int(match["stack"]),
                int(match["stores"]) + int(match["loads"]),
            )
        )
    return found


def demangle(names: list[str]) -> dict[str, str]:
    """Kernel names without parameters and namespace, such as ``combine_kernel<float>``."""
    text = "\n".join(names)
    result = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    short = []
    for name in result.stdout.splitlines():
        name = re.sub(r"topoep::|^void |\(topoep::PackDirection\)", "", name)
        short.append(re.sub(r"(?<=\w|>)\((?!.*>$).*\)$", "", name.replace("(PackDirection)", "")))
    return dict(zip(names, short, strict=True))


def measure(cuda_home: Path) -> list[Resources]:
    """All kernels on all architectures, sorted."""
    sources = sorted(CSRC.glob("cuda/*.cu"))
    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = list(pool.map(lambda source: compile_file(cuda_home, source), sources))
    found = [resources for text in texts for resources in parse(text)]
    names = demangle([resources.kernel for resources in found])
    return sorted(
        Resources(names[r.kernel], r.arch, r.registers, r.shared_bytes, r.stack_bytes,
                  r.spill_bytes)
        for r in found
    )  # fmt: skip


def table(cuda_home: Path, rows: list[Resources]) -> str:
    """The table as text; static shared memory, the dynamic part depends on the call."""
    lines = [
        f"nvcc {nvcc_version(cuda_home)}, -O3; registers / shared / stack / spilled bytes",
        f"{'kernel':<44}" + "".join(f"{'sm_' + arch:>22}" for arch in ARCHS),
    ]
    kernels = sorted({row.kernel for row in rows})
    by_place = {(row.kernel, row.arch): row for row in rows}
    for kernel in kernels:
        cells = []
        for arch in ARCHS:
            row = by_place[kernel, arch]
            numbers = (row.registers, row.shared_bytes, row.stack_bytes, row.spill_bytes)
            cells.append(f"{' / '.join(str(n) for n in numbers):>22}")
        lines.append(f"{kernel:<44}" + "".join(cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help=f"keep it as {KEPT.name}")
    arguments = parser.parse_args()
    cuda_home = find_cuda_home()
    if cuda_home is None:
        sys.exit("no nvcc with headers found; set CUDA_HOME")
    text = table(cuda_home, measure(cuda_home))
    print(text, end="")
    if arguments.write:
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(text)


if __name__ == "__main__":
    main()
