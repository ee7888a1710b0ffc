# SPDX-License-Identifier: Apache-2.0
"""What each rule of docs/algorithm.md that a policy can leave out is worth.

Every load of the main grid is solved by a family of policies with the cap exactly at the tolerance.
Then by the family without those that use a rule, and by one policy (H22112a) with and without it.

Columns: ``family %``, how many more weighted copies the best plan needs if no policy has the rule,
mean over the instances in which both meet the tolerance; ``missed``, instances in which only the
family with the rule does; ``one policy %`` and ``one missed``, the same for the one policy.
#wrong counts instances in which the smaller family is better, which cannot be.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines.grid import KINDS, SKEWS, nodes_of
from baselines.tables import print_table
from choose_portfolio import ALL_POLICIES, Problem
from common import RESULTS, machine

import topoep
from topoep import Balance, Candidate
from topoep.portfolio import default_candidates
from topoep.simulator import workloads as loads

Row = dict[str, Any]

TOLERANCES = (0.002, 0.01, 0.05)
BY_NODES = [policy for policy in ALL_POLICIES if policy.startswith("H")]
FAMILY = (*ALL_POLICIES, *(p + suffix for suffix in ("a", "w", "aw") for p in BY_NODES))
ONE = "H22112a"


def digit(position: int, value: str) -> Callable[[str], bool]:
    """Policies by nodes that leave a rule out, and all others."""
    return lambda policy: not policy.startswith("H") or policy[position] == value


# rule: (which policies do without it, the one policy without it)
RULES: dict[str, tuple[Callable[[str], bool], str]] = {
    "room threshold": (digit(1, "0"), "H02112a"),
    "cover-fit exporter": (digit(2, "0"), "H20112a"),
    "round-up": (digit(3, "0"), "H22012a"),
    "item order": (digit(4, "0"), "H22102a"),
    "pair fit": (digit(5, "0"), "H22110a"),
    "affinity": (lambda policy: "a" not in policy, "H22112"),
    "whole rooms": (lambda policy: "w" not in policy, ONE),
    "nodes first": (lambda policy: not policy.startswith("H"), "F"),
    "flat policies": (lambda policy: policy.startswith("H"), ONE),
    "more than one policy": (lambda policy: policy == ONE, ONE),
}


def problems(sizes: Sequence[int], slots: Sequence[int], seeds: Sequence[int]) -> list[Problem]:
    """Instances of the main grid."""
    result = []
    for ranks, kind, skew, seed in itertools.product(sizes, KINDS, SKEWS, seeds):
        counts = torch.from_numpy(loads.skewed(kind, ranks, 256, skew, seed, 1)[0])
        for spare in slots:
            cell = ("main", f"{kind} {skew}", ranks, spare)
            result.append(Problem(cell, counts, nodes_of(ranks), {}))
    return result


def weighted(problem: Problem, candidates: Sequence[Candidate], tolerance: float) -> float:
    """Fewest weighted copies within the tolerance; infinite if none is."""
    cap = problem.cap(tolerance)
    found = (problem.solve(candidate, tolerance) for candidate in candidates)
    return min((weighted for load, weighted, _ in found if load <= cap), default=np.inf)


def of_policies(todo: Sequence[Problem], policies: Sequence[str]) -> np.ndarray:
    """Fewest weighted copies ``[problems x tolerances]`` of policies exactly at the tolerance."""
    result = []
    for problem, tolerance in itertools.product(todo, TOLERANCES):
        candidates = [Candidate(f"mean+{100 * tolerance:.4f}%", policy) for policy in policies]
        result.append(weighted(problem, candidates, tolerance))
    return np.array(result)


def compare(full: np.ndarray, without: np.ndarray) -> tuple[float, int]:
    """Percent more weighted copies, and instances that only the first solves."""
    both = np.isfinite(full) & np.isfinite(without)
    more = 100 * float((without[both] / full[both] - 1).mean()) if both.any() else 0.0
    return more, int((np.isfinite(full) & np.isinf(without)).sum())


def measure(todo: Sequence[Problem]) -> list[Row]:
    """A row per rule, and one for the default list."""
    full, one = of_policies(todo, FAMILY), of_policies(todo, [ONE])
    rows = []
    for rule, (keeps, single) in RULES.items():
        without = of_policies(todo, [policy for policy in FAMILY if keeps(policy)])
        more, missed = compare(full, without)
        has_rule = of_policies(todo, [ONE + "w"]) if rule == "whole rooms" else one
        one_more, one_missed = compare(has_rule, of_policies(todo, [single]))
        rows.append(
            {
                "without": rule,
                "family %": more,
                "missed": missed,
                "one policy %": one_more,
                "one missed": one_missed,
                "instances": len(full),
                "#wrong": int((without < full).sum()),
            }
        )
    default = np.array(
        [
            weighted(problem, default_candidates(Balance(tolerance))[1:], tolerance)
            for problem, tolerance in itertools.product(todo, TOLERANCES)
        ]
    )
    more, missed = compare(full, default)
    rows.append(
        {
            "without": "(the default list instead)",
            "family %": more,
            "missed": missed,
            "one policy %": compare(one, default)[0],
            "one missed": compare(one, default)[1],
            "instances": len(full),
            "#wrong": 0,
        }
    )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[2000, 2001])
    parser.add_argument("--json", type=Path, default=RESULTS / "bench_ablation.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = measure(problems(arguments.ranks, arguments.slots, arguments.seeds))
    print_table(f"bench_ablation on {machine('cpu')}", rows, digits=2)
    result = {
        "benchmark": "bench_ablation",
        "machine": machine("cpu"),
        "topoep": topoep.__version__,
        "ranks": arguments.ranks,
        "slots": arguments.slots,
        "seeds": arguments.seeds,
        "tolerances": TOLERANCES,
        "rows": rows,
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
