# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks one after the other, and says how long each took.

    python benchmarks/run.py                      make bench: the quick modes, to build/bench
    python benchmarks/run.py --full               make bench-full: what the docs quote, to results
    python benchmarks/run.py bench_solve --full   one of them

What each measures is in README.md beside this file. Ends with status 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICK_RESULTS = HERE.parent / "build" / "bench"


@dataclass(frozen=True)
class Benchmark:
    """A script and its options.

    Args:
        script: without ``.py``.
        quick: its quick mode; None: it has none.
        full: what the docs quote; None: nothing, because it takes another machine.
        ranks: processes of torchrun; 0: it is started by itself.
        keeps: whether it takes ``--json``.
    """

    script: str
    quick: str | None = ""
    full: str | None = ""
    ranks: int = 0
    keeps: bool = True

    def command(self, full: bool) -> list[str]:
        """How it is started."""
        launch = [sys.executable]
        if self.ranks:
            launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        options = self.full if full else self.quick
        command = [*launch, str(HERE / f"{self.script}.py"), *(options or "").split()]
        if self.keeps and not full:
            command += ["--json", str(QUICK_RESULTS / f"{self.script}.json")]
        return command


BENCHMARKS = (
    Benchmark("bench_histogram"),
    Benchmark("bench_reroute"),
    Benchmark("bench_solve"),
    Benchmark("bench_simulator", full="--long"),
    Benchmark("bench_quality", "--quick", "--fresh 0 --seeds 1"),
    Benchmark(
        "bench_optimal", "--seeds 1 --slots 2 --limit 10 --search 0", "--seeds 1 --search 10"
    ),
    Benchmark("bench_ablation", "--ranks 16 --slots 2 --seeds 2000"),
    Benchmark("paper_setting", "--seeds 1"),
    Benchmark(
        "bench_cluster",
        "--experts 32 --hidden 256 --intermediate 128 --tokens 1024 --steps 5",
        None,
        ranks=2,
    ),
    Benchmark("bench_depth", None),
    Benchmark("kernel_resources", None, "--write", keeps=False),
)


def run(chosen: Sequence[Benchmark], full: bool) -> list[str]:
    """Runs them and returns those that failed."""
    if not full:
        QUICK_RESULTS.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    failed, times = [], []
    for benchmark in chosen:
        print(f"\n---- {benchmark.script} ----", flush=True)
        begin = time.perf_counter()
        done = subprocess.run(benchmark.command(full), env=environment, check=False)
        times.append(f"{time.perf_counter() - begin:7.1f} s  {benchmark.script}")
        if done.returncode:
            failed.append(benchmark.script)
            times[-1] += f"  failed with status {done.returncode}"
    print("\n" + "\n".join(times))
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [benchmark.script for benchmark in BENCHMARKS]
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(names)}")
    parser.add_argument("--full", action="store_true", help="what the docs quote; takes hours")
    given = parser.parse_args(argv)
    for name in given.scripts:
        if name not in names:
            parser.error(f"{name!r}; expected some of {', '.join(names)}")
    chosen = [
        benchmark
        for benchmark in BENCHMARKS
        if (benchmark.full if given.full else benchmark.quick) is not None
        and (not given.scripts or benchmark.script in given.scripts)
    ]
    if not chosen:
        parser.error(f"{', '.join(given.scripts)}: not with{'' if given.full else 'out'} --full")
    return int(bool(run(chosen, given.full)))


if __name__ == "__main__":
    sys.exit(main())
