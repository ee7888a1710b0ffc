# SPDX-License-Identifier: Apache-2.0
"""TAOT, topology-aware balancing by entropy-regularised optimal transport (arXiv 2608.03676).

Certain: the paper's algorithm and its code in Loong-Megatron, restated; with two slots and 8-rank
nodes the restatement gives the weighted copies of the paper's tables. Its third phase splits tokens
over source ranks, which is not compared here. Float32 like the original. Nodes come from the
topology; the original takes rank // 8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from topoep import Topology
from topoep.simulator.planners.base import IntArray, Quota, home_of, home_quota, node_of

Floats = npt.NDArray[np.float32]

_CROSS_COST = np.float32(3)  # of a copy between nodes, in copies inside one
_SINKHORN_STEPS = 50
_TINY = np.float32(1e-8)


def plan(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """See :class:`topoep.simulator.planners.base.Planner`."""
    ranks, experts = counts.shape
    node, home = node_of(topology), home_of(experts, ranks)
    total = counts.sum(0).astype(np.float32).reshape(ranks, -1)
    load = total.sum(1)
    mean = load.mean()
    excess, spare = np.maximum(load - mean, 0), np.maximum(mean - load, 0)
    spill = _spill(total, mean)
    if excess.sum() == 0:
        return home_quota(counts)

    transport = _sinkhorn(excess, spare, node)
    hint = transport[home] / np.maximum(excess[home], 1)[:, None]
    near = np.where(node[home][:, None] == node, np.float32(1), 1 / _CROSS_COST)
    bonus = mean / np.float32(total.shape[1]) * (near + np.float32(0.1) * hint)
    moved = _match(spill, spare, bonus, home, spare_slots)

    quota = home_quota(counts)
    available = counts.sum(0, dtype=np.int64)[:, None]
    # Rounded down, like the original; float32 must not give away tokens that do not exist.
    until = np.minimum(moved.astype(np.int64).cumsum(1), available)
    tokens = np.diff(until, axis=1, prepend=0)
    quota[home, np.arange(experts)] -= tokens.sum(1)
    quota += tokens.T
    return quota


def _spill(total: Floats, mean: np.float32) -> Floats:
    """``spill_and_spare`` in float32 with the mean as it is."""
    order = np.argsort(total, axis=1, kind="stable")
    over = np.maximum(np.take_along_axis(total, order, 1).cumsum(1) - mean, 0)
    spill = np.empty_like(total)
    np.put_along_axis(spill, order, np.diff(over, axis=1, prepend=np.float32(0)), 1)
    return spill.ravel()


def _sinkhorn(excess: Floats, spare: Floats, node: npt.NDArray[np.int64]) -> Floats:
    """Phase 1: how much should flow between every two ranks, ``[R, R]``."""
    cost = np.where(node[:, None] == node, 1 / _CROSS_COST, np.float32(1))
    kernel = np.exp(-cost, dtype=np.float32)
    supply = excess * min(spare.sum() / excess.sum(), np.float32(1))
    row, column = np.ones_like(supply), np.ones_like(supply)
    for _ in range(_SINKHORN_STEPS):
        row = supply / np.maximum(kernel @ column, _TINY)
        column = spare / np.maximum(kernel.T @ row, _TINY)
    flow = row[:, None] * kernel * column
    capped: Floats = flow * np.minimum(spare / np.maximum(flow.sum(0), _TINY), 1)
    return capped


def _match(
    spill: Floats, spare: Floats, bonus: Floats, home: npt.NDArray[np.int64], rounds: int
) -> Floats:
    """Phase 2: tokens moved, ``[E, R]``; every round gives each rank at most one expert.

    In a round every unmatched rank proposes the expert with the best score to it, and every expert
    accepts the best of its proposers, until nobody proposes.
    """
    experts, ranks = bonus.shape
    moved = np.zeros((experts, ranks), dtype=np.float32)
    spill, spare = spill.copy(), spare.copy()
    for _ in range(rounds):
        unmatched = np.ones(ranks, dtype=bool)
        used = moved > 0
        for _ in range(ranks):
            rows, columns = np.flatnonzero(spill > 0), np.flatnonzero(unmatched & (spare > 0))
            if not len(rows) or not len(columns):
                break
            grid = np.ix_(rows, columns)
            amount = np.minimum.outer(spill[rows], spare[columns])
            allowed = ~used[grid] & (home[rows][:, None] != columns)
            score = np.where(allowed, amount + bonus[grid], -np.inf)
            proposed = score.argmax(0)
            best = score[proposed, np.arange(len(columns))]
            proposals = np.full(score.shape, -np.inf, dtype=np.float32)
            proposals[proposed, np.arange(len(columns))] = best
            accepted = proposals.argmax(1)
            for i in np.flatnonzero(proposals.max(1) > -np.inf):
                expert, rank = rows[i], columns[accepted[i]]
                tokens = amount[i, accepted[i]]
                moved[expert, rank] += tokens
                spill[expert] -= tokens
                spare[rank] -= tokens
                unmatched[rank] = False
            if best.max() == -np.inf:
                break
    return moved
