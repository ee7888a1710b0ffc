# SPDX-License-Identifier: Apache-2.0
"""MoonEP's planner: every rank ends with exactly the mean.

Certain as far as its public contract goes: the rule was read and restated. Cold ranks are filled
one after another, each by the hottest rank alone, which may thereby become a cold one itself. As
every rank has one donor, it receives at most as many experts as a rank is home to, and MoonEP has
that many slots (S does not matter). The original runs inside one NVLink domain only; here it plans
for all ranks.
"""

from __future__ import annotations

import numpy as np

from topoep import Topology
from topoep.simulator.planners.base import IntArray, Quota, home_quota, move


def plan(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """See :class:`topoep.simulator.planners.base.Planner`."""
    ranks, experts = counts.shape
    home_slots = experts // ranks
    total = counts.sum(0, dtype=np.int64)
    load = total.reshape(ranks, -1).sum(1)
    mean, rest = divmod(int(load.sum()), ranks)
    surplus = load - mean - (np.arange(ranks) < rest)
    donated = np.zeros((ranks, ranks), dtype=np.int64)
    while surplus.max() > 0:
        hot, cold = int(surplus.argmax()), int(surplus.argmin())
        donated[hot, cold] = -surplus[cold]
        surplus[hot] += surplus[cold]
        surplus[cold] = 0

    quota = home_quota(counts)
    for hot in np.flatnonzero(donated.any(1)):
        wanted = donated[hot]
        left = total[hot * home_slots : (hot + 1) * home_slots].copy()
        while wanted.max() > 0:
            target, slot = int(wanted.argmax()), int(left.argmax())
            tokens = min(left[slot], wanted[target])
            move(quota, hot * home_slots + slot, hot, target, tokens)
            left[slot] -= tokens
            wanted[target] -= tokens
    return quota
