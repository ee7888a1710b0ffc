# SPDX-License-Identifier: Apache-2.0
"""ECHO, the two assigners of Megatron-LM's draft pull request 2368.

Certain: read there and restated. Both move the excess of each rank's largest experts (see
``spill_and_spare``) into ranks below the mean, without looking at nodes. The original's sort is not
declared stable; ties go to the lower id here.
"""

from __future__ import annotations

import numpy as np

from topoep.simulator.planners.base import (
    IntArray,
    Quota,
    home_of,
    home_quota,
    move,
    spill_and_spare,
)
from topoep.topology import Topology

_BUCKETS = 8


def plan_one_shot(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """Two number lines; see :class:`topoep.simulator.planners.base.Planner`.

    Spilled experts and spare ranks, largest first, are laid end to end on two lines. Where an
    interval of one lies over an interval of the other, tokens flow. A rank keeps the S largest
    flows into it; the others are not moved at all.
    """
    ranks, experts = counts.shape
    spill, spare, _ = spill_and_spare(counts)
    by_spill = np.argsort(-spill, kind="stable")
    by_spare = np.argsort(-spare, kind="stable")
    spill_end, spare_end = spill[by_spill].cumsum(), spare[by_spare].cumsum()
    begin = np.maximum.outer(spill_end - spill[by_spill], spare_end - spare[by_spare])
    flow = np.maximum(np.minimum.outer(spill_end, spare_end) - begin, 0)
    quota = home_quota(counts)
    home = home_of(experts, ranks)
    kept = np.argsort(-flow, axis=0, kind="stable")[:spare_slots]
    for column, target in enumerate(by_spare):
        for row in kept[:, column]:
            expert = by_spill[row]
            move(quota, expert, home[expert], target, flow[row, column])
    return quota


def plan_bin_packing(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """One copy per rank, whatever S is; see :class:`topoep.simulator.planners.base.Planner`.

    Ranks from the most spare on take one chunk each of an expert from the first bucket that is not
    empty, which is about the largest rest; the rest goes to the end of its new bucket.
    """
    ranks, experts = counts.shape
    spill, spare, mean = spill_and_spare(counts)
    width = max(mean // (_BUCKETS - 1), 1)

    def bucket(tokens: int) -> int:
        return 0 if tokens >= mean else min(max((mean - tokens) // width + 1, 0), _BUCKETS - 1)

    buckets: list[list[int]] = [[] for _ in range(_BUCKETS)]
    for expert in np.argsort(-spill, kind="stable"):
        if spill[expert] > 0:
            buckets[bucket(spill[expert])].append(expert)
    quota = home_quota(counts)
    home = home_of(experts, ranks)
    first = 0
    for target in np.argsort(-spare, kind="stable"):
        while first < _BUCKETS and not buckets[first]:
            first += 1
        if first == _BUCKETS or spare[target] == 0:
            break
        expert = buckets[first].pop(0)
        tokens = min(spill[expert], spare[target])
        move(quota, expert, home[expert], target, tokens)
        spill[expert] -= tokens
        if spill[expert] > 0:
            buckets[bucket(spill[expert])].append(expert)
    return quota
