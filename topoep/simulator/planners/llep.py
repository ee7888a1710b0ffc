# SPDX-License-Identifier: Apache-2.0
"""LLEP-like: the least-loaded expert parallelism of Salesforce (ICML 2026).

Certain: the published rule, restated. Experts from the largest on stay home as far as the capacity
goes; the rest goes to the least loaded ranks, in pieces of at least 1024 tokens, without a limit on
slots (S does not matter) and without looking at nodes. The original runs plain expert parallelism
below an imbalance of 1.3; here it always plans, since that threshold is the user's choice.
"""

from __future__ import annotations

import numpy as np

from topoep.simulator.planners.base import IntArray, Quota, home_of
from topoep.topology import Topology

_CAPACITY = 1.0
_MIN_TOKENS = 1024


def plan(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """See :class:`topoep.simulator.planners.base.Planner`."""
    ranks, experts = counts.shape
    total = counts.sum(0, dtype=np.int64)
    capacity = max(int(_CAPACITY * (int(total.sum()) // ranks)), 1)
    home = home_of(experts, ranks)
    load = total.reshape(ranks, -1).sum(1)  # assigned, and home experts that still wait
    quota = np.zeros((ranks, experts), dtype=np.int64)
    for expert in np.argsort(-total, kind="stable"):
        own = home[expert]
        load[own] -= total[expert]
        kept = int(np.clip(capacity - load[own], 0, total[expert]))
        quota[own, expert] += kept
        load[own] += kept
        left = int(total[expert]) - kept
        while left > 0 and ranks > 1:
            target, tokens = _next_piece(load, own, capacity, left)
            quota[target, expert] += tokens
            load[target] += tokens
            left -= tokens
        quota[own, expert] += left  # one rank alone
    return quota


def _next_piece(load: IntArray, own: int, capacity: int, left: int) -> tuple[int, int]:
    """The rank that takes the next piece of a spilled expert, and how many tokens."""
    order = [rank for rank in np.argsort(load, kind="stable") if rank != own]
    for rank in order:
        tokens = min(left, capacity - int(load[rank]))
        if tokens <= 0:
            break
        if tokens >= _MIN_TOKENS or tokens == left:
            return rank, tokens
    return order[0], left  # nobody has room for a piece: all of it to the least loaded
