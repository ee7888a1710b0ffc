# SPDX-License-Identifier: Apache-2.0
"""Time of one solve against R, E and S; a table, JSON and a plot.

#wrong counts plans that break a rule or that differ from a second solve of the same counts.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import lognormal_counts, parse_arguments, report, target_of, time_us

import topoep
from topoep.portfolio import default_candidates

SEEDS = range(3)
NODE = 8  # ranks
SHAPES = [
    # R, E, S, ranks of a node
    (8, 64, 2, NODE),
    (16, 128, 2, NODE),
    (32, 128, 2, NODE),
    (32, 256, 2, NODE),
    (64, 128, 2, NODE),
    (64, 256, 1, NODE),
    (64, 256, 2, NODE),
    (64, 256, 4, NODE),
    (64, 256, 8, NODE),
    (64, 256, 16, NODE),
    (64, 512, 2, NODE),
    (128, 256, 2, NODE),
    (128, 512, 2, NODE),
    (256, 512, 2, NODE),
    (256, 1024, 2, NODE),
    (512, 1024, 2, NODE),
    (1024, 1024, 2, NODE),
    (72, 288, 2, 72),
    (128, 512, 2, 128),
    (256, 512, 2, 256),
]


def measure(ranks: int, experts: int, spare: int, node: int, device: str) -> dict[str, object]:
    """One row: the default candidates, and a single one, at 1 % tolerance."""
    topology = topoep.Topology(num_nodes=ranks // node, ranks_per_node=node)
    wrong = 0
    times: dict[str, list[float]] = {"all": [], "one": []}
    lists = {"all": None, "one": [topoep.Candidate("mean+1%", "H22112")]}
    imbalance = []
    for seed in SEEDS:
        counts = lognormal_counts(ranks, experts, seed).to(device)
        for name, candidates in lists.items():

            def solve(counts=counts, candidates=candidates):
                return topoep.solve(counts, topology, spare, candidates=candidates)

            plan, again = solve(), solve()
            wrong += not torch.equal(plan.slot_tokens, again.slot_tokens)
            if ranks <= 128:  # the check on the host takes long for large plans
                try:
                    plan.validate()
                except ValueError:
                    wrong += 1
            times[name].append(time_us(solve, device, budget_s=0.3))
            if name == "all":
                imbalance.append(float(plan.stats()["imbalance"]))
    return {
        "R": ranks,
        "E": experts,
        "S": spare,
        "ranks of a node": node,
        "candidates": len(default_candidates(topoep.Balance(), topology.num_nodes)),
        "one of them us": sum(times["one"]) / len(SEEDS),
        "all us": sum(times["all"]) / len(SEEDS),
        "imbalance": f"{max(imbalance):.4f}",
        "#wrong": wrong,
    }


def plot(rows: list[dict[str, object]], device: str, target: Path) -> None:
    """Time against R, a line per E, and against S."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["ranks of a node"] == NODE]
    figure, (axes, by_slots) = plt.subplots(
        1, 2, figsize=(9.5, 4.2), layout="constrained", width_ratios=(2, 1)
    )
    for experts in sorted({row["E"] for row in rows}):
        line = [row for row in rows if row["E"] == experts and row["S"] == 2]
        if len(line) > 1:
            axes.plot(
                [row["R"] for row in line],
                [row["all us"] / 1e3 for row in line],
                marker="o",
                label=f"E = {experts}",
            )
    axes.set(
        xscale="log", yscale="log", xlabel="ranks R", ylabel="milliseconds",
        title=f"One solve, S = 2, {rows[0]['candidates']} candidates ({device})",
    )  # fmt: skip
    axes.set_xticks(sorted({row["R"] for row in rows}), labels=sorted({row["R"] for row in rows}))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    line = [row for row in rows if (row["R"], row["E"]) == (64, 256)]
    by_slots.plot([row["S"] for row in line], [row["all us"] / 1e3 for row in line], marker="o")
    by_slots.set(xlabel="spare slots S", ylabel="milliseconds", title="R = 64, E = 256", ylim=0)
    by_slots.grid(alpha=0.3)
    figure.savefig(target, dpi=120)


def main() -> None:
    arguments = parse_arguments(__doc__)
    rows = [measure(*shape, arguments.device) for shape in SHAPES]
    report("bench_solve", arguments, rows)
    target = target_of("bench_solve", arguments).with_suffix(".png")
    plot(rows, arguments.device, target)


if __name__ == "__main__":
    main()
