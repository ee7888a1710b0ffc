# SPDX-License-Identifier: Apache-2.0
"""Tables of arbitrary plans, no planner asked, for tests of what moves data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topoep import Topology

TOPOLOGIES = {
    "2x4": Topology(num_nodes=2, ranks_per_node=4),
    "4x2": Topology(num_nodes=4, ranks_per_node=2),
    "1x8": Topology(num_nodes=1, ranks_per_node=8),
    "8x1": Topology(num_nodes=8, ranks_per_node=1),
    "2x4-strided": Topology(node_of_rank=[0, 1] * 4),
    "3x2-mixed": Topology(node_of_rank=[2, 0, 1, 1, 0, 2]),
}


@dataclass(frozen=True)
class PlanTables:
    """The tables of a plan that say where copies are; see ``PlanCopies`` in core/stream_lists.h."""

    topology: Topology
    num_experts: int
    slot_expert: np.ndarray  # [R, S]
    copy_offsets: np.ndarray  # [E + 1]
    copy_slots: np.ndarray  # [R * S]

    @property
    def spare_slots(self) -> int:
        return self.slot_expert.shape[1]

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.topology.num_ranks

    def home(self, expert: int) -> int:
        return expert // self.experts_per_rank

    def node(self, rank: int) -> int:
        return self.topology.node_of_rank[rank]

    def slot(self, rank: int, expert: int) -> int | None:
        """The spare slot in which a rank holds an expert."""
        found = np.flatnonzero(self.slot_expert[rank] == expert)
        return int(found[0]) if len(found) else None

    def holders(self, expert: int, node: int) -> list[int]:
        """The ranks of a node that hold a copy, ascending."""
        ranks = self.topology.ranks_of_node(node)
        return [rank for rank in ranks if self.slot(rank, expert) is not None]

    def pairs(self) -> list[tuple[int, int]]:
        """(expert, node) that cross the network, by expert, then node."""
        return [
            (expert, node)
            for expert in range(self.num_experts)
            for node in range(self.topology.num_nodes)
            if node != self.node(self.home(expert)) and self.holders(expert, node)
        ]


def plan_tables(topology: Topology, num_experts: int, slot_expert: np.ndarray) -> PlanTables:
    """Fills in the list of copies as the planner does: by expert, node by node."""
    ranks, spare = slot_expert.shape
    width = num_experts // ranks + spare
    order = [r for node in range(topology.num_nodes) for r in topology.ranks_of_node(node)]
    offsets = np.zeros(num_experts + 1, np.int32)
    slots = np.full(ranks * spare, -1, np.int32)
    count = 0
    for expert in range(num_experts):
        for rank in order:
            for slot in np.flatnonzero(slot_expert[rank] == expert):
                slots[count] = rank * width + num_experts // ranks + slot
                count += 1
        offsets[expert + 1] = count
    return PlanTables(topology, num_experts, slot_expert, offsets, slots)


KINDS = ("random", "hot", "full", "sparse", "empty", "relayed")


def random_plan(
    rng: np.random.Generator, topology: Topology, experts_per_rank: int, spare: int, kind: str
) -> PlanTables:
    """A plan of one of KINDS; no rank holds an expert twice, or a copy of its own.

    ``"relayed"``: most ranks of every node hold a copy of one of their node's experts.
    """
    ranks = topology.num_ranks
    experts = ranks * experts_per_rank
    slot_expert = np.full((ranks, spare), -1, np.int32)
    hot = int(rng.integers(experts))
    hot_in_node = [
        experts_per_rank * int(rng.choice(topology.ranks_of_node(node)))
        for node in range(topology.num_nodes if kind == "relayed" else 0)
    ]
    for rank in range(ranks):
        others = [e for e in rng.permutation(experts) if e // experts_per_rank != rank]
        if kind == "relayed":
            own_hot = hot_in_node[topology.node_of_rank[rank]]
            if own_hot in others and rng.random() < 0.8:
                others.remove(own_hot)
                others.insert(0, own_hot)
        if kind == "hot" and hot in others:
            others = [hot]
        count = {
            "random": int(rng.integers(spare + 1)),
            "hot": int(rng.random() < 0.7 and hot in others),
            "full": spare,
            "sparse": int(rng.random() < 0.3),
            "empty": 0,
            "relayed": 1 + int(rng.integers(spare)),
        }[kind]
        count = min(count, len(others))
        slot_expert[rank, rng.permutation(spare)[:count]] = others[:count]
    return plan_tables(topology, experts, slot_expert)
