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
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines import BASELINES
from baselines.grid import KINDS, SLOTS, WINDOW, Load, full_grid, nodes_of, quick_grid, trace_load
from baselines.plots import plot_sequences, plot_tradeoff
from baselines.score import Score, least_max_load, quota_of_plan, score
from common import RESULTS, machine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import topoep
from topoep.plan import MAX_SPARE_SLOTS
from topoep.simulator import workloads as loads
from topoep.simulator.planners.base import Baseline, IntArray

Row = dict[str, Any]
Tick = Callable[[], None]

TOLERANCES = (0.002, 0.005, 0.01, 0.02, 0.05)  # of the table
CURVE = (0.0, 0.0005, *TOLERANCES, 0.1, 0.2, 0.5)  # of the plot
SEVERE_SKEW = 8.0
MOVES_HOMES = tuple(b.name for b in BASELINES if b.moves_homes)
MAX_VALIDATED_RANKS = 64  # the check of every rule on the host takes long for larger plans


# ---- measuring -----------------------------------------------------------------------------------


def tolerance_for(max_load: int, tokens: int, ranks: int) -> float:
    """The least tolerance, in whole parts per million, whose cap is not below ``max_load``."""
    return max(-(-max_load * ranks * 10**6 // tokens) - 10**6, 0) / 10**6


def solved(
    counts: loads.Counts,
    topology: topoep.Topology,
    slots: int,
    objective: topoep.objective.Objective,
) -> Score:
    """TopoEP's plan with the default candidates, measured."""
    plan = topoep.solve(torch.from_numpy(counts), topology, slots, objective)
    result = score(counts, topology, quota_of_plan(plan), slots)
    if topology.num_ranks <= MAX_VALIDATED_RANKS:
        try:
            plan.validate()
        except ValueError as broken:
            result = dataclasses.replace(result, fault=str(broken))
    return result


def planned(
    baseline: Baseline,
    counts: loads.Counts,
    topology: topoep.Topology,
    slots: int,
    history: IntArray | None = None,
) -> Score:
    """A baseline's plan, measured."""
    ranks, experts = counts.shape
    limit = {"spare": slots, "one": 1, "home": experts // ranks, "any": None}[baseline.slots]
    quota = baseline.plan(counts, topology, slots, history)
    return score(counts, topology, quota, limit, baseline.moves_homes)


@dataclass(frozen=True)
class Duel:
    """A baseline's plan, and TopoEP's for the imbalance that the baseline reached."""

    instance: str
    before: Score
    theirs: Score
    ours: Score

    @property
    def lost(self) -> bool:
        """TopoEP did not reach that imbalance, or with more weighted copies."""
        reached = self.ours.max_load <= self.theirs.max_load
        return not reached or self.ours.weighted > self.theirs.weighted


def _slots_of(baseline: Baseline, load: Load, theirs: Score) -> int:
    has = load.experts // load.ranks if baseline.slots == "home" else max(theirs.slots_used, 2)
    return min(has, MAX_SPARE_SLOTS)


def duels_of(load: Load, first_seed: int, tick: Tick) -> dict[tuple[int | str, str], list[Duel]]:
    """All baselines on all instances of a load, by S and name."""
    result: dict[tuple[int | str, str], list[Duel]] = defaultdict(list)
    for seed in range(first_seed, first_seed + load.seeds):
        for number, (counts, history) in enumerate(load.instances(seed)):
            before = planned(BASELINES[0], counts, load.topology, 0)
            for slots, baseline in itertools.product(load.slots, BASELINES):
                own = baseline.slots in ("home", "any")  # S makes no difference: once is enough
                if (own and slots != 2) or (baseline.slots == "one" and slots != 1):
                    continue
                theirs = planned(baseline, counts, load.topology, slots, history)
                given = _slots_of(baseline, load, theirs) if own else slots
                tolerance = tolerance_for(theirs.max_load, theirs.tokens, load.ranks)
                ours = solved(counts, load.topology, given, topoep.Balance(tolerance))
                duel = Duel(f"{seed}.{number}", before, theirs, ours)
                result["own" if own else slots, baseline.name].append(duel)
        tick()
    return result


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def wrong(scores: Iterable[Score]) -> int:
    return sum(score.fault is not None for score in scores)


def shape_of(load: Load) -> Row:
    return {"group": load.group, "load": load.name, "R": load.ranks, "E": load.experts} | {
        "G": load.node_ranks
    }


def cell_row(load: Load, slots: int | str, name: str, duels: Sequence[Duel]) -> Row:
    theirs, ours = [duel.theirs for duel in duels], [duel.ours for duel in duels]
    before = [duel.before for duel in duels]
    return {
        **shape_of(load),
        "S": slots,
        "planner": name,
        "instances": len(duels),
        "before": mean(s.imbalance for s in before),
        "imbalance": mean(s.imbalance for s in theirs),
        "worst": max(s.imbalance for s in theirs),
        "copies": mean(s.weighted for s in theirs),
        "topoep": mean(s.weighted for s in ours),
        "published": mean(s.published for s in theirs),
        "topoep published": mean(s.published for s in ours),
        "cross % before": 100 * mean(s.cross_tokens / s.tokens for s in before),
        "cross %": 100 * mean(s.cross_tokens / s.tokens for s in theirs),
        "topoep cross %": 100 * mean(s.cross_tokens / s.tokens for s in ours),
        "re-homed": mean(s.moved_homes for s in theirs),
        "lost": sum(duel.lost for duel in duels),
        "#wrong": wrong((*theirs, *ours)),
    }


def loss_row(load: Load, slots: int | str, name: str, duel: Duel) -> Row:
    return {
        **shape_of(load),
        "S": slots,
        "instance": duel.instance,
        "planner": name,
        "imbalance": duel.theirs.imbalance,
        "max load": duel.theirs.max_load,
        "topoep max load": duel.ours.max_load,
        "copies": duel.theirs.weighted,
        "topoep": duel.ours.weighted,
        "#wrong": wrong((duel.theirs, duel.ours)),
    }


def curve_rows(load: Load, first_seed: int, tick: Tick) -> list[Row]:
    """TopoEP alone, for fixed tolerances: a row per instance."""
    rows = []
    for seed in range(first_seed, first_seed + load.seeds):
        for counts, _ in load.instances(seed):
            bound = {slots: least_max_load(counts, slots) for slots in load.slots}
            for slots, tolerance in itertools.product(load.slots, CURVE):
                ours = solved(counts, load.topology, slots, topoep.Balance(tolerance))
                least = -(-ours.tokens // load.ranks)
                cap = max(least, ours.tokens * (1 + tolerance) / load.ranks)
                rows.append(
                    {
                        "R": load.ranks,
                        "S": slots,
                        "tolerance": tolerance,
                        "imbalance": ours.imbalance,
                        "copies": ours.weighted,
                        "missed": ours.max_load > cap,
                        "impossible": bound[slots] > cap,
                        "#wrong": wrong([ours]),
                    }
                )
        tick()
    return rows


def severe_rows(ranks: int, experts: int, kind: str, seeds: Iterable[int]) -> list[Row]:
    """The least imbalance reached when one rank has eight times the mean, a row per S."""
    topology = nodes_of(ranks)
    others = [b for b in BASELINES if b.slots == "spare" and b.name != "no balancing"]
    pairs = [loads.skewed(kind, ranks, experts, SEVERE_SKEW, seed) for seed in seeds]
    rows = []
    for slots in SLOTS:
        ours = [solved(counts, topology, slots, topoep.Even()) for counts, _ in pairs]
        bound = [least_max_load(counts, slots) * ranks / counts.sum() for counts, _ in pairs]
        theirs = {
            b.name: [planned(b, counts, topology, slots, history) for counts, history in pairs]
            for b in others
        }
        rows.append(
            {
                "R": ranks,
                "E": experts,
                "load": kind,
                "S": slots,
                "bound": mean(bound),
                "topoep": mean(s.imbalance for s in ours),
                "worst": max(s.imbalance for s in ours),
                "copies": mean(s.weighted for s in ours),
                **{name: mean(s.imbalance for s in found) for name, found in theirs.items()},
                "#wrong": wrong(ours) + sum(wrong(found) for found in theirs.values()),
            }
        )
    return rows


def sequence_lines(seed: int, ranks: int = 32, steps: int = 40) -> dict[str, dict[str, Any]]:
    """Imbalance over the steps without balancing, with EPLB from history, and with TopoEP."""
    topology = nodes_of(ranks)
    chosen = [b for b in BASELINES if b.name in ("no balancing", "EPLB hierarchical")]
    result = {}
    for make in (loads.drifting, loads.bursty):
        lines: dict[str, list[float]] = defaultdict(list)
        for counts, history in loads.with_history(make(ranks, 256, 1.7, seed, steps), WINDOW):
            for b in chosen:
                lines[b.name].append(planned(b, counts, topology, 2, history).imbalance)
            ours = solved(counts, topology, 2, topoep.Balance())
            lines["TopoEP, tolerance 1 %"].append(ours.imbalance)
        result[f"{make.__name__}, R = {ranks}, S = 2"] = lines
    return result


# ---- tables --------------------------------------------------------------------------------------


def summary(cells: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Cells with the same values of ``keys`` as one row; means are over cells."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in cells:
        groups[tuple(row[key] for key in keys)].append(row)
    result = []
    for values, rows in groups.items():
        margin = [row["copies"] - row["topoep"] for row in rows]
        won, lost = sum(m > 1e-9 for m in margin), sum(m < -1e-9 for m in margin)
        columns = ("copies", "topoep", "published", "topoep published", "cross %", "topoep cross %")
        result.append(
            {
                **dict(zip(keys, values, strict=True)),
                "before": mean(row["before"] for row in rows),
                "imbalance": mean(row["imbalance"] for row in rows),
                "worst": max(row["worst"] for row in rows),
                **{column: mean(row[column] for row in rows) for column in columns},
                "cells": len(rows),
                "won": won,
                "tied": len(rows) - won - lost,
                "lost": lost,
                "instances": sum(row["instances"] for row in rows),
                "instances lost": sum(row["lost"] for row in rows),
                "#wrong": sum(row["#wrong"] for row in rows),
            }
        )
    return result


def tolerance_table(curve: Sequence[Row]) -> list[Row]:
    """Weighted copies per (R, S), and how many instances missed the tolerance.

    In brackets: how many of them cannot reach it, as the lower bound proves.
    """
    result = []
    for ranks, slots in sorted({(row["R"], row["S"]) for row in curve}):
        chosen = [row for row in curve if (row["R"], row["S"]) == (ranks, slots)]
        line: Row = {"R": ranks, "S": slots, "instances": len(chosen) // len(CURVE)}
        for tolerance in TOLERANCES:
            at = [row for row in chosen if row["tolerance"] == tolerance]
            line[f"{100 * tolerance:g} %"] = mean(row["copies"] for row in at)
            missed, impossible = (sum(row[key] for row in at) for key in ("missed", "impossible"))
            line[f"missed {100 * tolerance:g} %"] = f"{missed} ({impossible})"
        line["#wrong"] = sum(row["#wrong"] for row in chosen)
        result.append(line)
    return result


def moved_homes_summary(losses: Sequence[Row]) -> list[Row]:
    """How many instances are lost per group, R, S and planner."""
    keys = ("group", "R", "S", "planner")
    number = Counter(tuple(row[key] for key in keys) for row in losses)
    wrong_plans = sum(row["#wrong"] for row in losses)
    return [
        {**dict(zip(keys, values, strict=True)), "instances": n, "#wrong": wrong_plans}
        for values, n in number.items()
    ]


def print_table(title: str, rows: Sequence[Row], digits: int = 1) -> None:
    """Columns of imbalances get four digits."""
    print(f"\n{title}")
    if not rows:
        print("  none")
        return

    def text(column: str, value: object) -> str:
        if not isinstance(value, float):
            return str(value)
        precise = column in ("before", "imbalance", "worst", "bound")
        return f"{value:.{4 if precise else digits}f}"

    columns = list(rows[0])
    cells = [[text(column, row[column]) for column in columns] for row in rows]
    widths = [max(len(c), *(len(r[i]) for r in cells)) for i, c in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


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


COMPACT = (  # tables with many rows
    "planners per R",
    "planners per group",
    "severe",
    "losses",
    "losses to moved homes",
    "cells",
)


def compact(cells: Sequence[Row]) -> list[Row]:
    """The cells, those of a group, R and S as one."""
    keys = ("group", "R", "S", "planner")
    columns = (*keys, "imbalance", "copies", "topoep", "cells", "won", "lost", "instances lost")
    return [{column: row[column] for column in columns} for row in summary(cells, keys)]


def write(result: dict[str, Any], target: Path) -> None:
    """JSON with a row per line; long tables are lists of values behind their columns."""
    target.parent.mkdir(parents=True, exist_ok=True)

    def rounded(value: object) -> object:
        return round(value, 4 if abs(value) < 10 else 1) if isinstance(value, float) else value

    parts = []
    for name, value in {**result, "cells": compact(result["cells"])}.items():
        text = json.dumps(value)
        if isinstance(value, list):
            rows: list[Any] = [{key: rounded(v) for key, v in row.items()} for row in value]
            if name in COMPACT and rows:
                rows = [list(value[0]), *(list(row.values()) for row in rows)]
            text = (
                "[" + ",".join(f"\n{json.dumps(row, separators=(',', ':'))}" for row in rows) + "]"
            )
        parts.append(f" {json.dumps(name)}: {text}")
    target.write_text("{\n" + ",\n".join(parts) + "\n}\n")


# ---- all of it -----------------------------------------------------------------------------------


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
