# SPDX-License-Identifier: Apache-2.0
"""Plans of several microbatches, as the time model takes them, whoever made them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from topoep.plan import Plan
from topoep.topology import Topology

Quota = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Placement:
    """Where experts are and who sends them what, for B microbatches.

    Args:
        split: int32 ``[B, R, R, W]``: routed pairs that a source rank sends to the W experts of a
            rank.
        experts: int32 ``[B, R, W]``: the expert in that place, -1 if none.
        sources: int32 ``[B, R, W]``: the rank that a copy is fetched from, -1 for what is not
            fetched.
        home_slots: the first so many of the W places are homes, the others copies.
    """

    split: npt.NDArray[np.int32]
    experts: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]
    home_slots: int

    @functools.cached_property
    def received(self) -> npt.NDArray[np.int32]:
        """Pairs for each place of each rank, int32 ``[B, R, W]`` (a plan has fewer than 2^31)."""
        received: npt.NDArray[np.int32] = np.add.reduce(self.split, axis=1, dtype=np.int32)
        return received

    @property
    def loads(self) -> npt.NDArray[np.int64]:
        """Pairs that each rank computes, int64 ``[B, R]``."""
        loads: npt.NDArray[np.int64] = self.received.sum(2, dtype=np.int64)
        return loads

    @property
    def groups(self) -> npt.NDArray[np.int64]:
        """Experts that a rank computes with, int64 ``[B, R]``: homes with tokens, and copies."""
        homes = np.count_nonzero(self.received[..., : self.home_slots], axis=2)
        copies = np.count_nonzero(self.experts[..., self.home_slots :] >= 0, axis=2)
        groups: npt.NDArray[np.int64] = homes + copies
        return groups

    def pairs(self) -> npt.NDArray[np.int32]:
        """Pairs that a source rank sends to a rank, int32 ``[B, R, R]``."""
        sent = self.split[..., 0].copy()
        for slot in range(1, self.split.shape[3]):  # faster than a sum over so short an axis
            sent += self.split[..., slot]
        return sent

    def check(self, counts: npt.NDArray[np.int32]) -> None:
        """Raises ValueError unless every routed pair of ``counts`` is sent exactly once.

        Args:
            counts: int32 ``[B, R, E]``.
        """
        batch, ranks, experts = counts.shape
        sent = np.zeros((batch, ranks, experts + 1), dtype=np.int64)
        for b in range(batch):
            place = np.where(self.experts[b] < 0, experts, self.experts[b]).ravel()
            np.add.at(sent[b].T, place, self.split[b].reshape(ranks, -1).T)
        wrong = np.argwhere(sent[..., :experts] != counts)
        if len(wrong):
            b, rank, expert = (int(i) for i in wrong[0])
            raise ValueError(
                f"microbatch {b}: rank {rank} routes {counts[b, rank, expert]} tokens to expert "
                f"{expert}, the plan sends {sent[b, rank, expert]}"
            )
        if sent[..., experts].any():
            raise ValueError("the plan sends tokens to an empty slot")

    @classmethod
    def of_plans(cls, plans: Sequence[Plan]) -> Placement:
        """Of plans of this package that share a configuration."""
        config = plans[0].config
        ranks, width, home = config.num_ranks, config.slots_per_rank, config.experts_per_rank
        batch = len(plans)
        split = np.stack([plan._split.numpy() for plan in plans]).reshape(
            batch, ranks, ranks, width
        )
        experts = np.empty((batch, ranks, width), dtype=np.int32)
        experts[:, :, :home] = np.arange(config.num_experts).reshape(ranks, home)
        experts[:, :, home:] = np.stack([plan.slot_expert.numpy() for plan in plans])
        sources = np.full((batch, ranks, width), -1, dtype=np.int32)
        sources[:, :, home:] = np.stack([plan.slot_source.numpy() for plan in plans])
        return cls(split, experts, sources, home)

    @classmethod
    def of_homes(cls, counts: npt.NDArray[np.int32]) -> Placement:
        """Every expert at home: plain expert parallelism.

        Args:
            counts: int32 ``[B, R, E]``.
        """
        batch, ranks, experts = counts.shape
        split = counts.reshape(batch, ranks, ranks, experts // ranks)
        home = np.arange(experts, dtype=np.int32).reshape(1, ranks, -1)
        shape = (batch, *home.shape[1:])
        return cls(
            split,
            np.broadcast_to(home, shape),
            np.full(shape, -1, dtype=np.int32),
            experts // ranks,
        )

    @classmethod
    def of_quotas(
        cls,
        counts: npt.NDArray[np.int32],
        quotas: Sequence[Quota],
        topology: Topology,
        moves_homes: bool = False,
    ) -> Placement:
        """Of plans that say how many tokens of each expert a rank serves.

        Tokens go to the rank itself first, then to its node, then to the rest, for all planners
        alike.

        Args:
            counts: int32 ``[B, R, E]``.
            quotas: for each microbatch int64 ``[R, E]``.
            topology: R ranks and their nodes.
            moves_homes: experts have been placed ahead, and nothing is fetched.
        """
        batch, ranks, experts = counts.shape
        home = experts // ranks
        places = [_places(quota, home, moves_homes) for quota in quotas]
        # Where nothing is routed, moved experts are nowhere; a rank has its home places even so.
        width = max(home, *(max(map(len, rows)) for rows in places))
        index = np.full((batch, ranks, width), -1, dtype=np.int32)
        for b, rows in enumerate(places):
            for rank, here in enumerate(rows):
                index[b, rank, : len(here)] = here
        split = np.zeros((batch, ranks, ranks, width), dtype=np.int32)
        for b, quota in enumerate(quotas):
            holders = np.count_nonzero(quota, axis=0)
            shared = np.flatnonzero(holders > 1)
            sent = split_by_level(counts[b][:, shared], quota[:, shared], topology)
            row = np.zeros(experts, dtype=np.int64)
            row[shared] = np.arange(len(shared))
            held_by, slot = np.nonzero(index[b] >= 0)
            expert = index[b, held_by, slot]
            alone = (quota[held_by, expert] > 0) & (holders[expert] == 1)
            split[b][:, held_by[alone], slot[alone]] = counts[b][:, expert[alone]]
            among = holders[expert] > 1
            served = sent[row[expert[among]], :, held_by[among]]
            split[b][:, held_by[among], slot[among]] = served.T
        sources = np.full_like(index, -1)
        if not moves_homes:
            for b in range(batch):
                sources[b, :, home:] = _sources(index[b, :, home:], home, topology)
        return cls(split, index, sources, home)


def _places(quota: Quota, home: int, moves_homes: bool) -> list[list[int]]:
    """The experts of each rank: homes first, then copies, ascending."""
    rows = []
    for rank, row in enumerate(quota):
        served = np.flatnonzero(row).tolist()
        own = [] if moves_homes else list(range(rank * home, (rank + 1) * home))
        rows.append(own + [e for e in served if e not in own])
    return rows


def _sources(copies: IntArray, home: int, topology: Topology) -> npt.NDArray[np.int32]:
    """Where copies ``[R, S]`` are fetched from: home, or the first holder in another node."""
    node = topology.node_of_rank
    sources = np.full(copies.shape, -1, dtype=np.int32)
    first: dict[tuple[int, int], int] = {}
    for rank, slot in np.argwhere(copies >= 0).tolist():
        expert = int(copies[rank, slot])
        origin = expert // home
        if node[origin] != node[rank]:
            holder = first.setdefault((node[rank], expert), rank)
            origin = origin if holder == rank else holder
        sources[rank, slot] = origin
    return sources


def split_by_level(
    counts: npt.NDArray[np.int32], quota: Quota, topology: Topology
) -> npt.NDArray[np.int32]:
    """Who serves whom: own rank, own node, then the rest (docs/algorithm.md, section 8).

    Args:
        counts: int32 ``[R, E]``.
        quota: int64 ``[R, E]``, with the sums over ranks of ``counts``.
        topology: R ranks and their nodes.

    Returns:
        int32 ``[E, R, R]``: tokens of a source rank that a holder serves.
    """
    ranks, experts = counts.shape
    nodes = np.asarray(topology.node_of_rank)
    by_position = np.argsort(nodes, kind="stable")
    left = counts.T.astype(np.int64)  # [E, R]
    room = quota.T.copy()
    sent = np.zeros((experts, ranks, ranks), dtype=np.int32)
    own = np.minimum(left, room)
    sent[:, np.arange(ranks), np.arange(ranks)] = own
    left, room = left - own, room - own
    groups = [by_position[nodes[by_position] == node] for node in range(topology.num_nodes)]
    for group in (*groups, by_position):
        source_end, holder_end = left[:, group].cumsum(1), room[:, group].cumsum(1)
        begin = np.maximum(
            (source_end - left[:, group])[:, :, None], (holder_end - room[:, group])[:, None]
        )
        overlap = np.maximum(np.minimum(source_end[:, :, None], holder_end[:, None]) - begin, 0)
        sent[np.ix_(np.arange(experts), group, group)] += overlap.astype(np.int32)
        left[:, group] -= overlap.sum(2)
        room[:, group] -= overlap.sum(1)
    return sent
