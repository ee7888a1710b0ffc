# SPDX-License-Identifier: Apache-2.0
"""Plain expert parallelism: every expert is served at home."""

from __future__ import annotations

from topoep.simulator.planners.base import IntArray, Quota, home_quota
from topoep.topology import Topology


def plan(
    counts: IntArray, topology: Topology, spare_slots: int, history: IntArray | None = None
) -> Quota:
    """No copies; see :class:`topoep.simulator.planners.base.Planner`."""
    return home_quota(counts)
