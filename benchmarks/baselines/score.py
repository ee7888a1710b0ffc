# SPDX-License-Identifier: Apache-2.0
"""How good a plan is, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topoep import Plan, Topology
from topoep.simulator.planners.base import IntArray, Quota, home_of, node_of

CROSS_WEIGHT = 3


@dataclass(frozen=True)
class Score:
    """Measures of one plan.

    Args:
        tokens: all routed tokens.
        max_load: tokens of the fullest rank.
        imbalance: that over the mean; 1 is perfect.
        copies: experts held away from home.
        pairs: distinct (expert, node other than the home's).
        cross_copies: copies held in another node than the home's.
        cross_tokens: tokens that cross nodes when every rank's tokens go to the rank itself first,
            then to its node, then to the rest.
        slots_used: the most copies that one rank holds.
        moved_homes: experts whose home rank does not serve them (planners that move homes).
        fault: what rule the plan breaks, None if it keeps them.
    """

    tokens: int
    max_load: int
    imbalance: float
    copies: int
    pairs: int
    cross_copies: int
    cross_tokens: int
    slots_used: int
    moved_homes: int
    fault: str | None

    @property
    def weighted(self) -> int:
        """Weighted copies; more copies of an expert in one remote node are fanned out from one."""
        return self.copies + (CROSS_WEIGHT - 1) * self.pairs

    @property
    def published(self) -> int:
        """Weighted copies as other papers count: every copy that crosses nodes in full."""
        return self.copies + (CROSS_WEIGHT - 1) * self.cross_copies


def score(
    counts: IntArray,
    topology: Topology,
    quota: Quota,
    spare_slots: int | None,
    moves_homes: bool = False,
) -> Score:
    """Measures a plan; ``spare_slots`` None means without limit."""
    ranks, experts = counts.shape
    node = node_of(topology)
    total = counts.sum(0, dtype=np.int64)
    load = quota.sum(1)
    holds = quota > 0
    home = home_of(experts, ranks)
    at_home = holds[home, np.arange(experts)]
    if not moves_homes:
        holds[home, np.arange(experts)] = True
    holders = _per_node(holds.astype(np.int64), node)  # [N, E]
    # Where homes move, the node with most holders has the home, which is cheapest for the plan.
    home_node = holders.argmax(0) if moves_homes else node[home]
    home_holders = holders[home_node, np.arange(experts)]
    held = holds.sum(1)
    limit = None if spare_slots is None else experts // ranks + spare_slots
    fault = None
    if (quota < 0).any():
        fault = "negative quota"
    elif (quota.sum(0) != total).any():
        fault = "quotas do not sum to the counts"
    elif limit is not None and (held > limit).any():
        fault = "more copies than slots"
    return Score(
        tokens=int(total.sum()),
        max_load=int(load.max()),
        imbalance=float(load.max() * ranks / max(int(total.sum()), 1)) if total.any() else 1.0,
        copies=int(np.maximum(holds.sum(0) - 1, 0).sum()),
        pairs=int(np.maximum((holders > 0).sum(0) - 1, 0).sum()),
        cross_copies=int((holders.sum(0) - home_holders).sum()),
        cross_tokens=cross_tokens(counts, node, quota),
        slots_used=int(np.maximum(held - experts // ranks, 0).max()),
        moved_homes=int((~at_home & (total > 0)).sum()) if moves_homes else 0,
        fault=fault,
    )


def cross_tokens(counts: IntArray, node: IntArray, quota: Quota) -> int:
    """Tokens that cross nodes: per node and expert, what comes from it and is not served in it.

    Serving the nearest level first reaches this, and nothing can do better.
    """
    return int(np.maximum(_per_node(counts, node) - _per_node(quota, node), 0).sum())


def _per_node(values: IntArray, node: IntArray) -> IntArray:
    summed = np.zeros((int(node.max()) + 1, values.shape[1]), dtype=np.int64)
    np.add.at(summed, node, values)
    return summed


def quota_of_plan(plan: Plan) -> Quota:
    """The quotas of a TopoEP plan, from what its split really sends."""
    ranks, experts = plan.config.num_ranks, plan.config.num_experts
    home = np.arange(experts).reshape(ranks, -1)
    expert = np.concatenate([home, plan.slot_expert.numpy()], axis=1)  # [R, H + S], -1 empty
    received = plan.split().numpy().sum(0, dtype=np.int64).reshape(expert.shape)
    quota = np.zeros((ranks, experts), dtype=np.int64)
    rank, slot = np.nonzero(expert >= 0)
    np.add.at(quota, (rank, expert[rank, slot]), received[rank, slot])
    return quota


def least_max_load(counts: IntArray, spare_slots: int) -> int:
    """A lower bound on the largest load of any plan with S slots per rank.

    At least the mean. And a rank takes in no more than its room and than the S largest experts of
    others; all ranks together must take in what the full ones have too much.
    """
    ranks, experts = counts.shape
    total = counts.sum(0, dtype=np.int64)
    load = total.reshape(ranks, -1).sum(1)
    home = home_of(experts, ranks)
    largest = np.argsort(-total, kind="stable")
    intake = np.array(
        [total[largest[home[largest] != rank][:spare_slots]].sum() for rank in range(ranks)]
    )

    def feasible(target: int) -> bool:
        room = np.minimum(np.maximum(target - load, 0), intake)
        return int(np.maximum(load - target, 0).sum()) <= int(room.sum())

    low, high = -(-int(load.sum()) // ranks), int(load.max())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle + 1, high)
    return low
