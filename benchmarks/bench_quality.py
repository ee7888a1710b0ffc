# SPDX-License-Identifier: Apache-2.0
"""Quality of plans: TopoEP against the other planners on the same counts.

Every planner gets the same counts, and one program measures all plans. The rule: TopoEP, asked for
the imbalance that the other planner reached (``Balance(its imbalance - 1)``) with the same slots,
must not need more weighted copies, on average in every cell (load, shape, slots) and on every
single instance. Each failure is listed. "The same slots" are S; for a planner with slots of its own
(S is "own") those that it has, at most 16: H for MoonEP, and for LLEP, which has no limit, as many
as its fullest rank used, at least 2.

Columns: ``before``, imbalance without copies; ``imbalance`` and ``worst`` of the planner;
``copies``, weighted copies: copies + 2 x distinct (expert, remote node); ``published``, the same as
other papers count: 3 for every copy that crosses nodes; ``cross %``, tokens that cross nodes when
the nearest level is served first; each again for TopoEP. A cell is won if TopoEP needs fewer
weighted copies on average. #wrong counts plans that lose tokens, have negative quotas or use more
slots than there are.

EPLB plans from another microbatch of the same popularity, in sequences from the last full window of
steps; all others see the counts. It also moves the homes of nearly all experts, which no plan of
TopoEP may, and which is free in its count of copies here: the rule cannot be kept against that, so
where EPLB needs fewer copies is listed apart. ``re-homed`` in the JSON says how many experts moved.
What each baseline is, and how it is counted, is in its module.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from baselines import BASELINES
from baselines.compare import (
    SEVERE_SKEW,
    cell_row,
    curve_rows,
    duels_of,
    loss_row,
    sequence_lines,
    severe_rows,
)
from baselines.grid import KINDS, WINDOW, full_grid, quick_grid, trace_load
from baselines.plots import plot_sequences, plot_tradeoff
from baselines.tables import (
    Row,
    moved_homes_summary,
    print_table,
    summary,
    tolerance_table,
    write,
)
from common import RESULTS, machine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import topoep

MOVES_HOMES = tuple(b.name for b in BASELINES if b.moves_homes)


def show(result: dict[str, Any]) -> None:
    print(
        f"bench_quality on {result['machine']}, torch {result['torch']}, topoep "
        f"{result['topoep']}, seeds from {result['first seed']}, {result['seconds']:.0f} s"
    )
    print_table("Every planner, and TopoEP at the imbalance that it reached", result["planners"])
    print_table("Main grid with S = 2", result["planners per R"])
    print_table("Per group of loads", result["planners per group"])
    print_table("TopoEP alone: weighted copies for a tolerance, main grid", result["tolerances"])
    print_table(
        f"Skew {SEVERE_SKEW:g}: imbalance of TopoEP with Even(), a lower bound, and the others",
        result["severe"],
        digits=4,
    )
    lost_cells = [r for r in result["cells"] if r["topoep"] > r["copies"] + 1e-9]
    print_table("Cells lost", [r for r in lost_cells if r["planner"] not in MOVES_HOMES])
    print_table("Instances lost", result["losses"])
    print_table(
        "Instances in which EPLB, whose moved homes are free here, needs fewer copies",
        result["losses to moved homes"],
    )


def measure(
    quick: bool, fresh: int | None, trace: Path | None, most_seeds: int
) -> tuple[dict[str, Any], list[Row]]:
    """The result for the tables and the JSON, and the rows of the curve, for the plot."""
    begin = time.perf_counter()
    first_seed = 0 if fresh is None else 10_000 * (1 + fresh)
    grid = quick_grid() if quick else full_grid()
    grid = [dataclasses.replace(load, seeds=min(load.seeds, most_seeds)) for load in grid]
    if trace:
        grid.append(trace_load(trace))
    main_loads = [load for load in grid if load.group == "main"]
    severe = [(32, 128)] if quick else [(32, 128), (64, 256), (128, 256)]
    severe_seeds = range(first_seed, first_seed + min(2 if quick else 6, most_seeds))
    cells: list[Row] = []
    losses: list[Row] = []
    curve: list[Row] = []
    severe_result: list[Row] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        total = sum(load.seeds for load in (*grid, *main_loads)) + len(severe) * len(KINDS)
        task = progress.add_task("", total=total)

        def tick() -> None:
            progress.advance(task)

        for load in grid:
            progress.update(task, description=f"{load.group}: {load.name}, R = {load.ranks}")
            for (slots, name), duels in duels_of(load, first_seed, tick).items():
                cells.append(cell_row(load, slots, name, duels))
                losses += [loss_row(load, slots, name, duel) for duel in duels if duel.lost]
        for load in main_loads:
            progress.update(task, description=f"tolerances: {load.name}, R = {load.ranks}")
            curve += curve_rows(load, first_seed, tick)
        for (ranks, experts), kind in itertools.product(severe, KINDS):
            progress.update(task, description=f"severe: {kind}, R = {ranks}")
            severe_result += severe_rows(ranks, experts, kind, severe_seeds)
            tick()
    main_cells = [c for c in cells if c["group"] == "main" and c["S"] in (2, "own")]
    result = {
        "benchmark": "bench_quality",
        "machine": machine("cpu"),
        "torch": torch.__version__,
        "topoep": topoep.__version__,
        "first seed": first_seed,
        "seconds": round(time.perf_counter() - begin, 1),
        "planners": summary(cells, ["planner"]),
        "planners per R": summary(main_cells, ["R", "planner"]),
        "planners per group": summary(cells, ["group", "planner"]),
        "tolerances": tolerance_table(curve),
        "severe": severe_result,
        "losses": [row for row in losses if row["planner"] not in MOVES_HOMES],
        "losses to moved homes": moved_homes_summary(
            [row for row in losses if row["planner"] in MOVES_HOMES]
        ),
        "cells": cells,
    }
    return result, curve


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few cells, in under a minute")
    parser.add_argument(
        "--fresh", type=int, metavar="SEED", help="other seeds than the default; no pictures"
    )
    parser.add_argument("--seeds", type=int, default=12, help="at most so many per load")
    parser.add_argument("--trace", type=Path, help="also plan for a trace.npz of topoep.demo")
    parser.add_argument("--json", type=Path, help="where to write (default: benchmarks/results)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    result, curve = measure(arguments.quick, arguments.fresh, arguments.trace, arguments.seeds)
    show(result)
    name = "bench_quality" + ("_quick" if arguments.quick else "")
    name += "" if arguments.fresh is None else f"_fresh{arguments.fresh}"
    target = arguments.json or RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    if arguments.fresh is None:
        plot_tradeoff(result["cells"], curve, target.with_suffix(".png"))
        lines = sequence_lines(result["first seed"])
        plot_sequences(lines, WINDOW, target.with_name(f"{target.stem}_sequence.png"))
    write(result, target)


if __name__ == "__main__":
    main()
