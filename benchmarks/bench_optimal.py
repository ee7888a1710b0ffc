# SPDX-License-Identifier: Apache-2.0
"""How far plans are from the optimum: exact plans of small instances, bounds for large ones.

Small instances (R = 8 as 2 nodes of 4, E = 32) are solved exactly by HiGHS: the smallest max load
against ``Even()``, then the fewest weighted copies at a tolerance against ``Balance(tolerance)``.
For large ones a simple lower bound, and what a search finds that solves random parts of TopoEP's
plan anew exactly until time is over. The optimum is between these two.

Columns: ``proved``, instances that HiGHS solved to the end (the others are left out); ``optimum``
and ``topoep``, mean weighted copies; ``more %``, how much larger the second mean is; ``worst``, the
most copies above the optimum of an instance; ``at mean``, smallest max loads that equal the mean
rounded up, by proof and by TopoEP. #wrong counts plans that break a rule or are better than a
proved optimum.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import local_search
import numpy as np
import optimal
import torch
from baselines.grid import KINDS, nodes_of
from baselines.tables import print_table
from common import RESULTS, machine

import topoep
from topoep.objective import Objective
from topoep.simulator import workloads as loads

Row = dict[str, Any]

TOLERANCES = (0.002, 0.01, 0.05)
SKEWS = (1.3, 1.7, 3.0)
SMALL = (8, 32, 4)  # R, E, G
LARGE = ((16, 256), (32, 256), (64, 256))  # R, E


def copies_for(
    counts: loads.Counts, topology: topoep.Topology, slots: int, objective: Objective
) -> optimal.Copies:
    """The copies of TopoEP's plan."""
    return optimal.copies_of(topoep.solve(torch.from_numpy(counts), topology, slots, objective))


def small_rows(slots: int, kind: str, skew: float, seed: int, time_limit: float) -> list[Row]:
    """One instance: a row for the smallest max load, and one per tolerance."""
    ranks, experts, node_ranks = SMALL
    topology = nodes_of(ranks, node_ranks)
    counts = loads.skewed(kind, ranks, experts, skew, seed, 1, node_ranks)[0]
    problem = optimal.from_counts(counts, topology, slots)
    instance = {"S": slots, "load": kind, "skew": skew, "seed": seed}
    even = copies_for(counts, topology, slots, topoep.Even())
    found = int(optimal.loads(problem, even).max())
    best = optimal.lowest_max_load(problem, time_limit=time_limit)
    rows: list[Row] = [
        {
            **instance,
            "tolerance": None,
            "optimum": best.value,
            "topoep": found,
            "mean": problem.ceil_mean,
            "proved": best.proved,
            "#wrong": int(optimal.broken_rule(problem, even) is not None or found < best.bound),
        }
    ]
    for tolerance in TOLERANCES:
        cap = optimal.cap_within(problem, tolerance)
        copies = copies_for(counts, topology, slots, topoep.Balance(tolerance))
        cost = optimal.weighted_copies(problem, copies)
        missed = bool(optimal.loads(problem, copies).max() > cap)
        best = optimal.fewest_copies(problem, cap, time_limit=time_limit)
        broken = optimal.broken_rule(problem, copies) is not None
        rows.append(
            {
                **instance,
                "tolerance": tolerance,
                "optimum": best.value,
                "topoep": cost,
                "missed": missed,
                "proved": bool(best.proved and np.isfinite(best.value)),
                "#wrong": int(broken or (not missed and cost < best.bound)),
            }
        )
    return rows


def small_tables(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Max loads per S, and weighted copies per S and tolerance."""
    groups: dict[tuple[int, float | None], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["S"], row["tolerance"]].append(row)
    by_load, by_copies = [], []
    for (slots, tolerance), of_group in groups.items():
        proved = [row for row in of_group if row["proved"]]
        head = {"S": slots, "instances": len(of_group), "proved": len(proved)}
        wrong = {"#wrong": sum(row["#wrong"] for row in of_group)}
        if tolerance is None:
            by_load.append(
                {
                    **head,
                    "at mean, proved": sum(row["optimum"] == row["mean"] for row in of_group),
                    "at mean, topoep": sum(row["topoep"] == row["mean"] for row in of_group),
                    "above optimum": sum(row["topoep"] > row["optimum"] for row in proved),
                    **wrong,
                }
            )
            continue
        reached = [row for row in proved if not row["missed"]]
        best, ours = (
            float(np.mean([row[key] for row in reached])) for key in ("optimum", "topoep")
        )
        by_copies.append(
            {
                **head,
                "tolerance %": 100 * tolerance,
                "missed": len(proved) - len(reached),
                "optimum": best,
                "topoep": ours,
                "more %": 100 * (ours / best - 1),
                "equal": sum(row["topoep"] == row["optimum"] for row in reached),
                "worst": max(row["topoep"] - row["optimum"] for row in reached),
                **wrong,
            }
        )
    return by_load, by_copies


def large_row(ranks: int, experts: int, kind: str, seeds: Sequence[int], seconds: float) -> Row:
    """Means over seeds, at skew 1.7, S = 2 and 1 % tolerance."""
    topology = nodes_of(ranks)
    bounds, better, ours = [], [], []
    wrong = 0
    for seed in seeds:
        counts = loads.skewed(kind, ranks, experts, 1.7, seed, 1)[0]
        problem = optimal.from_counts(counts, topology, 2)
        cap = optimal.cap_within(problem, 0.01)
        copies = copies_for(counts, topology, 2, topoep.Balance(0.01))
        bound = optimal.lower_bound(problem, cap)
        improved = local_search.search(
            problem, cap, copies, seed=seed, time_limit=seconds, enough=bound
        )
        wrong += sum(optimal.broken_rule(problem, c, cap) is not None for c in (copies, improved))
        bounds.append(bound)
        better.append(optimal.weighted_copies(problem, improved))
        ours.append(optimal.weighted_copies(problem, copies))
    return {
        "R": ranks,
        "E": experts,
        "load": kind,
        "instances": len(ours),
        "bound": float(np.mean(bounds)),
        "search": float(np.mean(better)),
        "topoep": float(np.mean(ours)),
        "above search %": 100 * (sum(ours) / sum(better) - 1),
        "#wrong": wrong,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="per load and skew")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of HiGHS per program")
    parser.add_argument("--search", type=float, default=20.0, help="seconds per large instance")
    parser.add_argument("--json", type=Path, default=RESULTS / "bench_optimal.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    rows: list[Row] = []
    for slots, kind, skew, seed in itertools.product(arguments.slots, KINDS, SKEWS, seeds):
        rows += small_rows(slots, kind, skew, seed, arguments.limit)
    by_load, by_copies = small_tables(rows)
    large = [
        large_row(*shape, kind, seeds[:2], arguments.search)
        for shape, kind in itertools.product(LARGE, KINDS)
        if arguments.search > 0
    ]
    print(f"bench_optimal on {machine('cpu')}, {time.perf_counter() - begin:.0f} s")
    shape = "R = {}, E = {}, {} ranks per node".format(*SMALL)
    print_table(f"Smallest max load, {shape}", by_load)
    print_table(f"Weighted copies within a tolerance, {shape}", by_copies)
    print_table("Large instances, skew 1.7, S = 2, tolerance 1 %", large)
    result = {
        "benchmark": "bench_optimal",
        "machine": machine("cpu"),
        "topoep": topoep.__version__,
        "first seed": arguments.first_seed,
        "max load": by_load,
        "weighted copies": by_copies,
        "large": large,
        "above optimum": [r for r in rows if r["proved"] and r["topoep"] > r["optimum"]],
    }
    lines = []
    for name, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[" + ",".join(f"\n  {json.dumps(row)}" for row in value) + "]"
        lines.append(f" {json.dumps(name)}: {text}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
