# SPDX-License-Identifier: Apache-2.0
"""One command that says whether TopoEP works on this GPU, and how fast.

    python benchmarks/gpu_check.py                 everything, within 8 minutes
    python benchmarks/gpu_check.py --stages tests timings --json FILE

Stages, in order: ``build`` (in place, unless the library has kernels already), ``tests`` (marker
``gpu``: ops, data plane over simulated ranks, graph capture, no synchronisation; with two GPUs also
``nccl``), ``sanitizer`` (compute-sanitizer memcheck and racecheck on the small cases) and
``timings``. Each gets what is left of the time. What cannot run is left out and said so; without a
GPU that is everything but the timings of the CPU forms. Prints one table with a ``#wrong`` column,
writes JSON, and ends with status 1 if anything failed or was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "tools")]

STAGES = ("build", "tests", "sanitizer", "timings")
BUDGET_S = 480.0
# One small case of every kind of kernel: under the sanitizer each takes a hundred times as long. It
# may also run kernels one at a time, so none of the cases has ranks that wait for each other.
SANITIZED = (
    "tests/gpu/test_ops.py::test_planning_and_rerouting[2x4-257-torch.int64]",
    "tests/gpu/test_ops.py::test_rows[torch.float32]",
    "tests/gpu/test_ops.py::test_transfers_between_simulated_ranks",
    "tests/gpu/test_data_plane.py::test_counts[1x1]",
    "tests/gpu/test_data_plane.py::test_weights_of_several_dtypes[1x1]",
)


@dataclass
class Row:
    """One line of the table."""

    stage: str
    what: str
    result: str
    time_us: float | None = None
    target_us: float | None = None
    note: str = ""
    wrong: int = 0


@dataclass
class Report:
    """What ran, and what did not and why."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, *arguments: object, **options: object) -> None:
        self.rows.append(Row(*arguments, **options))  # type: ignore[arg-type]
        row = self.rows[-1]
        print(f"  {row.what}: {row.result}{f' ({row.note})' if row.note else ''}", flush=True)

    def leave_out(self, what: str, why: str) -> None:
        self.left_out.append(f"{what}: {why}")
        print(f"  left out: {what}: {why}", flush=True)

    def failed(self) -> bool:
        return any(row.wrong for row in self.rows)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, default=list(STAGES), help="what to run"
    )
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help=f"seconds in all (default {BUDGET_S:g})"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=HERE / "results" / "gpu_check.json",
        help="where to write the results",
    )
    parsed = parser.parse_args(arguments)
    if not 0 < parsed.budget_s <= 86400:
        parser.error(f"--budget-s {parsed.budget_s:g}: expected more than 0, and up to 86400")
    return parsed


def environment() -> dict[str, str]:
    """For the processes started here: this checkout, and what simulated ranks need of CUDA."""
    from simulated_cluster import prepare_environment

    prepare_environment()
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": str(ROOT) + (os.pathsep + path if path else "")}


class Clock:
    """The time that is left."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)


def run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Status (None: took too long) and the last lines of the output."""
    started = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = started.communicate(timeout=seconds)
        status: int | None = started.returncode
    except subprocess.TimeoutExpired:
        started.kill()
        output, _ = started.communicate()
        status = None
    return status, "\n".join(output.splitlines()[-12:])


def run_stage(report: Report, stage: str, what: str, command: list[str], seconds: float) -> bool:
    """Runs a command as one row; whether it succeeded."""
    if seconds < 5:
        report.leave_out(what, "no time is left (--budget-s)")
        return False
    begin = time.monotonic()
    status, tail = run(command, seconds)
    took = f"{time.monotonic() - begin:.0f} s"
    if status == 0:
        report.add(stage, what, "ok", note=f"{took}; {tail.splitlines()[-1] if tail else ''}")
    else:
        reason = f"no end within {seconds:.0f} s" if status is None else f"status {status}"
        report.add(stage, what, "FAILED", note=f"{reason}, {took}", wrong=1)
        print(tail, flush=True)
    return status == 0


def check_build(report: Report, seconds: float) -> None:
    """Builds in place for this GPU, unless the library that is here has kernels for it."""
    from toolchain import find_cuda_home

    facts = run([sys.executable, "-c", _FACTS], 120)
    known = json.loads(facts[1].splitlines()[-1]) if facts[0] == 0 else {}
    if known.get("arch") is None and known:
        report.leave_out("build", "no GPU to build for; the library here is used as it is")
        return
    if known and known["arch"] in known["built"]:
        report.add("build", "library with kernels", "ok", note=f"carried, sm_{known['arch']}")
        return
    if find_cuda_home() is None:
        report.leave_out("build", "no CUDA toolkit (bin/nvcc, include/cuda_runtime.h) is found")
        return
    os.environ["TOPOEP_CUDA"] = "1"
    if known:
        os.environ["TOPOEP_CUDA_ARCH"] = known["arch"]
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    run_stage(report, "build", "library with kernels", command, seconds)


# Prints the SM version of the GPU (null: none) and those that the library has kernels for.
_FACTS = """
import json, torch
from topoep._library import BUILD_INFO
arch = None
if torch.cuda.is_available():
    arch = "".join(map(str, torch.cuda.get_device_capability()))
print(json.dumps({"arch": arch, "built": BUILD_INFO["cuda_arch"].split(",")}))
"""


def what_is_missing() -> str:
    """Why the GPU stages cannot run; empty if they can."""
    import torch

    from topoep._library import BUILD_INFO

    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if not BUILD_INFO["cuda"]:
        return f"topoep was built without CUDA kernels: {BUILD_INFO['cuda_reason']}"
    return ""


def check_tests(report: Report, seconds: float) -> None:
    import torch

    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/gpu"]
    run_stage(report, "tests", "gpu tests", [*command, "-m", "gpu and not nccl"], seconds)
    if torch.cuda.device_count() > 1:
        run_stage(report, "tests", "nccl tests", [*command, "-m", "nccl"], seconds)
    else:
        report.leave_out("tests of transport nccl between GPUs", "one GPU; they need two")


def check_sanitizer(report: Report, clock: Clock, keep_s: float) -> None:
    """memcheck and racecheck; leaves ``keep_s`` seconds for what follows."""
    from toolchain import find_cuda_home

    home = find_cuda_home()
    beside = home / "bin" / "compute-sanitizer" if home else None
    tool = shutil.which("compute-sanitizer")
    if tool is None and beside is not None and beside.exists():
        tool = str(beside)
    if tool is None:
        report.leave_out("sanitizer", "no compute-sanitizer on the PATH or in the toolkit")
        return
    for name in ("memcheck", "racecheck"):
        command = [tool, "--tool", name, "--error-exitcode", "9", "--target-processes", "all"]
        command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        seconds = min(90.0, clock.left() - keep_s)
        run_stage(report, "sanitizer", name, [*command, *SANITIZED], seconds)


def write(report: Report, path: Path, seconds: float) -> None:
    """The table on the screen and the JSON."""
    import torch

    import topoep

    place = "no GPU"
    if torch.cuda.is_available():
        place = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    columns = ("stage", "what", "result", "time_us", "target_us", "#wrong", "note")
    cells = [
        [
            row.stage,
            row.what,
            row.result,
            "" if row.time_us is None else f"{row.time_us:.1f}",
            "" if row.target_us is None else f"{row.target_us:g}",
            str(row.wrong),
            row.note,
        ]
        for row in report.rows
    ]
    widths = [max(len(column), *(len(c[i]) for c in cells)) if cells else len(column)
              for i, column in enumerate(columns)]  # fmt: skip
    print(f"\ngpu_check on {place}, torch {torch.__version__}, topoep {topoep.__version__}")
    for line in [list(columns), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))
    for text in report.left_out:
        print(f"left out: {text}")
    content = {
        "benchmark": "gpu_check",
        "machine": place,
        "torch": torch.__version__,
        "topoep": topoep.__version__,
        "seconds": round(seconds, 1),
        "rows": [
            {("#wrong" if key == "wrong" else key): value for key, value in asdict(row).items()}
            for row in report.rows
        ],
        "left_out": report.left_out,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse_arguments(arguments)
    clock = Clock(chosen.budget_s)
    begin = time.monotonic()
    report = Report()

    def stage(name: str, action: Callable[[], None]) -> None:
        if name in chosen.stages:
            print(f"{name}:", flush=True)
            action()

    environment()
    # The build comes first and in another process: the library must not be loaded before it.
    stage("build", lambda: check_build(report, clock.left()))
    missing = what_is_missing()
    keep_s = 60.0 if "timings" in chosen.stages else 0.0
    for name, action in (
        ("tests", lambda: check_tests(report, clock.left() - keep_s)),
        ("sanitizer", lambda: check_sanitizer(report, clock, keep_s)),
    ):
        if missing and name in chosen.stages:
            report.leave_out(name, missing)
        elif not missing:
            stage(name, action)
    if "timings" in chosen.stages:
        from gpu_timings import time_cpu, time_gpu

        print("timings:", flush=True)
        if missing:
            report.leave_out("timings on a GPU", missing)
            time_cpu(report.add)
        else:
            time_gpu(report.add, report.leave_out, clock.left)
    write(report, chosen.json, time.monotonic() - begin)
    return int(report.failed())


if __name__ == "__main__":
    sys.exit(main())
