# SPDX-License-Identifier: Apache-2.0
"""Draws one plan: rank loads before and after, coloured by how a rank came to its experts.

The picture of docs/algorithm.md: ``python benchmarks/plot_plan.py docs/images/plan.png``.
"""

from __future__ import annotations

import sys

import matplotlib
import torch
from common import lognormal_counts

import topoep

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NODES, RANKS_PER_NODE, EXPERTS, SLOTS = 4, 8, 128, 2


def main() -> None:
    topology = topoep.Topology(NODES, RANKS_PER_NODE)
    ranks = topology.num_ranks
    counts = lognormal_counts(ranks, EXPERTS, sigma=1.0, seed=3)
    plan = topoep.solve(counts, topology, SLOTS)
    stats = plan.stats()
    node = torch.arange(ranks) // RANKS_PER_NODE
    home_node = plan.slot_expert.long() // (EXPERTS // ranks) // RANKS_PER_NODE
    in_node = (home_node == node[:, None]) & (plan.slot_expert >= 0)
    across = (home_node != node[:, None]) & (plan.slot_expert >= 0)
    before = counts.sum(0).view(ranks, -1).sum(1)
    loads = plan.split().sum(0).view(ranks, -1).sum(1)
    parts = {
        "copies of experts of another node": (plan.slot_tokens * across).sum(1),
        "copies of experts of the own node": (plan.slot_tokens * in_node).sum(1),
    }
    parts = {"home experts": loads - sum(parts.values()), **parts}

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True)
    where = torch.arange(ranks) + node  # a gap between nodes
    left.bar(where, before, color="#4c78a8")
    left.set_title(f"before: fullest rank {stats['imbalance_before']:.2f} x the mean")
    bottom = torch.zeros(ranks)
    for (label, part), color in zip(parts.items(), ("#4c78a8", "#e45756", "#f2a541"), strict=True):
        right.bar(where, part, bottom=bottom, label=label, color=color)
        bottom = bottom + part
    right.set_title(
        f"after: {stats['imbalance']:.2f} x, {stats['in_node_copies']} copies inside nodes, "
        f"{stats['cross_node_copies']} experts across"
    )
    for axis in (left, right):
        axis.axhline(float(before.float().mean()), color="black", linewidth=0.8, linestyle=":")
        axis.set_xticks(where[::RANKS_PER_NODE] + RANKS_PER_NODE / 2 - 0.5)
        axis.set_xticklabels([f"node {n}" for n in range(NODES)])
        axis.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("tokens of a rank")
    right.legend(frameon=False, fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
