# SPDX-License-Identifier: Apache-2.0
"""What the baselines share.

A planner takes counts ``[R, E]`` and gives quotas ``[R, E]``: tokens of expert e that rank r
serves. A rank other than the home rank that has a quota holds a copy; who sends which token is
left to one split for all planners, so that plans are compared and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from topoep.topology import Topology

IntArray = npt.NDArray[np.integer]
Quota = npt.NDArray[np.int64]


class Planner(Protocol):
    """Makes quotas int64 ``[R, E]``.

    Args:
        counts: ``[R, E]``, tokens that source rank r routes to expert e.
        topology: R ranks and their nodes.
        spare_slots: S; planners without a slot limit ignore it.
        history: ``[R, E]`` of earlier steps, for planners that work from it; the counts if None.
    """

    def __call__(
        self,
        counts: IntArray,
        topology: Topology,
        spare_slots: int,
        history: IntArray | None = None,
    ) -> Quota:
        """The quotas."""
        ...


@dataclass(frozen=True)
class Baseline:
    """A planner and what its plans may do.

    Args:
        name: for tables.
        plan: the planner.
        slots: copies that a rank may hold: ``spare`` S, ``one`` only planned with S = 1, ``home``
            as many as home experts, ``any`` without limit.
        moves_homes: experts have no fixed home; a rank holds at most H + S experts in all.
    """

    name: str
    plan: Planner
    slots: Literal["spare", "one", "home", "any"] = "spare"
    moves_homes: bool = False


def home_of(experts: int, ranks: int) -> npt.NDArray[np.int64]:
    """``[E]``: the home rank of every expert."""
    return np.arange(experts) // (experts // ranks)


def node_of(topology: Topology) -> npt.NDArray[np.int64]:
    """``[R]``: the node of every rank."""
    return np.asarray(topology.node_of_rank, dtype=np.int64)


def home_quota(counts: IntArray) -> Quota:
    """Everything is served at home."""
    ranks, experts = counts.shape
    quota = np.zeros((ranks, experts), dtype=np.int64)
    quota[home_of(experts, ranks), np.arange(experts)] = counts.sum(0, dtype=np.int64)
    return quota


def move(quota: Quota, expert: int, source: int, target: int, tokens: int) -> None:
    """Gives tokens of an expert from one rank to another."""
    quota[source, expert] -= tokens
    quota[target, expert] += tokens


def spill_and_spare(counts: IntArray) -> tuple[IntArray, IntArray, int]:
    """What ECHO (and TAOT, in other arithmetic) moves: ``spill [E]``, ``spare [R]`` and the mean.

    The experts of a rank stay home from the smallest to the largest until the mean (rounded down)
    is full, so its largest experts carry the whole excess and at most one of them is split.
    """
    ranks, experts = counts.shape
    total = counts.sum(0, dtype=np.int64).reshape(ranks, -1)
    load = total.sum(1)
    mean = int(load.sum()) // ranks
    order = np.argsort(total, axis=1, kind="stable")
    running = np.take_along_axis(total, order, 1).cumsum(1)
    over = np.maximum(running - mean, 0)
    spill = np.empty_like(total)
    np.put_along_axis(spill, order, np.diff(over, axis=1, prepend=0), 1)
    return spill.reshape(experts), np.maximum(mean - load, 0), mean
