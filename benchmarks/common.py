# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: timing, loads, tables and result files."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import topoep

RESULTS = Path(__file__).resolve().parent / "results"


def parse_arguments(description: str) -> argparse.Namespace:
    """--device and --json, with torch set to one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--json", type=Path, help="where to write the results (default: benchmarks/results)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    return arguments


def time_us(function: Callable[[], object], device: str, budget_s: float = 0.5) -> float:
    """Median time of one call in microseconds: of the processor, or by events on a GPU.

    Processor time is that of the one thread, whatever else the machine is doing.
    """
    function()
    times = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times) < 5:
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
        else:
            begin = time.process_time()
            function()
            times.append((time.process_time() - begin) * 1e6)
    return sorted(times)[len(times) // 2]


def lognormal_counts(ranks: int, experts: int, seed: int, sigma: float = 1.0) -> torch.Tensor:
    """Counts int32 [R, E] of 8192 tokens a rank, top-8, with lognormal expert popularity."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.randn(experts, generator=generator).mul(sigma).exp()
    share = popularity / popularity.sum() * 8192 * 8
    return torch.poisson(share.expand(ranks, -1), generator=generator).to(torch.int32)


def skewed_ids(tokens: int, top_k: int, experts: int, seed: int) -> torch.Tensor:
    """Distinct ids int64 [T, K] with lognormal expert popularity."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.randn(experts, generator=generator).exp()
    noise = torch.rand(tokens, experts, generator=generator).log().neg()
    return (noise / popularity).topk(top_k, largest=False).indices


def machine(device: str) -> str:
    """Where the figures were taken, in words."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":")[1].strip()
            break
    return f"one core of {model}"


def target_of(name: str, arguments: argparse.Namespace) -> Path:
    """The result file."""
    given: Path | None = arguments.json
    return given or RESULTS / f"{name}_{arguments.device}.json"


def report(name: str, arguments: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    """Prints the rows as a table and writes them as JSON. Every row has a ``#wrong`` column."""
    assert all("#wrong" in row for row in rows)
    columns = list(rows[0])
    cells = [[_text(row[column]) for column in columns] for row in rows]
    widths = [max(len(c), *(len(r[i]) for r in cells)) for i, c in enumerate(columns)]
    place = machine(arguments.device)
    print(f"{name} on {place}, torch {torch.__version__}, topoep {topoep.__version__}")
    for line in [columns, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    target = target_of(name, arguments)
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": name,
        "machine": place,
        "torch": torch.__version__,
        "topoep": topoep.__version__,
        "rows": rows,
    }
    target.write_text(json.dumps(content, indent=1) + "\n")


def _text(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
