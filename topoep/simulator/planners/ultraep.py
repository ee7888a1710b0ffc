# SPDX-License-Identifier: Apache-2.0
"""UltraEP's quota planner (github.com/Dots-Infra/UltraEP, version 1.0).

Certain: read in its source and restated. A greedy oracle says whether all ranks can be brought to a
given load; it is asked for 1 % above the mean first, and searched downwards from the fullest rank
if that fails. Copies stay inside one NVLink domain: with 8-rank nodes each node is a problem of its
own (``plan_per_node``); on a rack-scale NVLink machine all ranks are one (``plan_one_domain``, for
which the original has a limit of 72 ranks that is not kept here).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topoep.simulator.planners.base import IntArray, Quota, home_quota, move
from topoep.topology import Topology

_MARGIN_PERCENT = 1
_TRIES = 3
_MIN_TOKENS = 1024  # of a copy, when the first tries have failed

_Moves = list[tuple[int, int, int, int]]  # expert, source, target, tokens


def plan_one_domain(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """All ranks share one NVLink domain; see :class:`topoep.simulator.planners.base.Planner`."""
    return _plan_domains(counts, [range(counts.shape[0])], spare_slots)


def plan_per_node(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """Every node is a domain; see :class:`topoep.simulator.planners.base.Planner`."""
    nodes = [topology.ranks_of_node(node) for node in range(topology.num_nodes)]
    return _plan_domains(counts, nodes, spare_slots)


def _plan_domains(counts: IntArray, domains: Sequence[Sequence[int]], spare_slots: int) -> Quota:
    quota = home_quota(counts)
    for ranks in domains:
        for moved in _plan_domain(counts, np.asarray(ranks), spare_slots):
            move(quota, *moved)
    return quota


def _plan_domain(counts: IntArray, ranks: IntArray, spare_slots: int) -> _Moves:
    total = counts.sum(0, dtype=np.int64).reshape(counts.shape[0], -1)
    load = total[ranks].sum(1)
    low, high = -(-int(load.sum()) // len(ranks)), int(load.max())
    target = -(-low * (100 + _MARGIN_PERCENT) // 100)
    for _ in range(_TRIES):
        moves = _oracle(total, ranks, spare_slots, min(target, max(high, low)), None)
        if moves is not None:
            return moves
        target += max(-(-high // 100), 1)
    while low < high:
        middle = (low + high) // 2
        if _oracle(total, ranks, spare_slots, middle, _MIN_TOKENS) is None:
            low = middle + 1
        else:
            high = middle
    return _oracle(total, ranks, spare_slots, low, _MIN_TOKENS) or []


def _oracle(
    total: IntArray, ranks: IntArray, spare_slots: int, target: int, min_tokens: int | None
) -> _Moves | None:
    """The moves that bring every rank to the target, None if the greedy rule finds none.

    A copy takes at least ``min_tokens``, or, if that is None, an equal share of what its source
    still has to give away: few large copies.
    """
    load = total[ranks].sum(1)
    excess, room = np.maximum(load - target, 0), np.maximum(target - load, 0)
    if excess.sum() > room.sum():
        return None
    home_slots = total.shape[1]
    free = np.full(len(ranks), spare_slots)
    moves: _Moves = []
    for source in np.argsort(-load, kind="stable"):
        need = int(excess[source])
        rank = int(ranks[source])
        for slot in np.argsort(-total[rank], kind="stable"):
            available = max(int(total[rank, slot]) - 1, 0)  # one token stays home
            holds = np.zeros(len(ranks), dtype=bool)
            holds[source] = True
            while need > 0 and available > 0:
                candidates = (room > 0) & (free > 0) & ~holds
                if not candidates.any():
                    break
                least = min_tokens or max(-(-need // int(candidates.sum())), 1)
                tokens = np.minimum(room, min(need, available))
                candidates &= tokens >= least
                if not candidates.any():
                    break
                best = int(np.where(candidates, room, -1).argmax())
                amount = int(tokens[best])
                moves.append((rank * home_slots + int(slot), rank, int(ranks[best]), amount))
                holds[best] = True
                room[best] -= amount
                free[best] -= 1
                need -= amount
                available -= amount
            if need == 0:
                break
        if need > 0:
            return None
    return moves
