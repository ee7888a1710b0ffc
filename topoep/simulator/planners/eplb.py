# SPDX-License-Identifier: Apache-2.0
"""EPLB, DeepSeek's periodic balancer, in its hierarchical and its global form.

Source: the README of github.com/deepseek-ai/EPLB; certain. Every expert gets more replicas while
tokens per replica are largest, then replicas are packed onto ranks, largest first, each onto the
least loaded rank that still has a place. The hierarchical form first packs groups of experts to
nodes and does the rest inside each node.

How it is counted here:

- It plans from ``history``; tokens are split evenly over replicas, as it assumes.
- It packs experts anywhere. Homes are taken where that is cheapest for it: one replica of each
  expert, in the node with most of them, is the home and costs nothing. Moving a home (weights and
  optimizer state) costs a real trainer more than a copy; it is counted apart, not as a copy.
- Two replicas of one expert on one rank, which it may make, count as one.
- Groups exist for group-limited routing. One expert per group leaves the packing most freedom.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from topoep.simulator.planners.base import IntArray, Quota
from topoep.topology import Topology

Floats = npt.NDArray[np.float64]


def plan_global(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """All ranks as one node; see :class:`topoep.simulator.planners.base.Planner`."""
    ranks, experts = counts.shape
    load = _load(counts, history)
    replicas = _replicate_and_pack(load, ranks, experts // ranks + spare_slots)
    return _split_evenly(counts, replicas)


def plan_hierarchical(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """Experts to nodes, then inside each node; see :class:`topoep.simulator.planners.base.Planner`.

    Like the original it falls back to the global form where nodes differ in size.
    """
    ranks, experts = counts.shape
    nodes = topology.num_nodes
    members = [list(topology.ranks_of_node(node)) for node in range(nodes)]
    if len({len(ranks_of_node) for ranks_of_node in members}) > 1:
        return plan_global(counts, topology, spare_slots, history)
    load = _load(counts, history)
    node_of_expert = _pack(load, nodes)
    replicas = np.zeros((ranks, experts), dtype=np.int64)
    for node in range(nodes):
        chosen = np.flatnonzero(node_of_expert == node)
        inside = _replicate_and_pack(
            load[chosen], len(members[node]), experts // ranks + spare_slots
        )
        replicas[np.ix_(np.asarray(members[node]), chosen)] = inside
    return _split_evenly(counts, replicas)


def _load(counts: IntArray, history: IntArray | None) -> Floats:
    load: Floats = (counts if history is None else history).sum(0).astype(np.float64)
    return load


def _replicate_and_pack(load: Floats, ranks: int, slots: int) -> IntArray:
    """Replicas ``[ranks, experts]`` that fill all slots."""
    number = np.ones(len(load))
    for _ in range(ranks * slots - len(load)):
        number[np.argmax(load / number)] += 1
    expert_of_replica = np.repeat(np.arange(len(load)), number.astype(np.int64))
    rank_of_replica = _pack((load / number)[expert_of_replica], ranks)
    replicas = np.zeros((ranks, len(load)), dtype=np.int64)
    np.add.at(replicas, (rank_of_replica, expert_of_replica), 1)
    return replicas


def _pack(weight: Floats, packs: int) -> IntArray:
    """The pack of every item: equally many items each, weights as even as greedy gets them."""
    free = np.full(packs, len(weight) // packs)
    filled = np.zeros(packs)
    pack = np.empty(len(weight), dtype=np.int64)
    for item in np.argsort(-weight, kind="stable"):
        target = np.argmin(np.where(free > 0, filled, np.inf))
        pack[item] = target
        free[target] -= 1
        filled[target] += weight[item]
    return pack


def _split_evenly(counts: IntArray, replicas: IntArray) -> Quota:
    """Tokens per rank where each replica takes the same share, rounded by rank order."""
    total = counts.sum(0, dtype=np.int64)
    until = replicas.cumsum(0)
    served: Quota = total * until // until[-1] - total * (until - replicas) // until[-1]
    return served
