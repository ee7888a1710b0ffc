# SPDX-License-Identifier: Apache-2.0
"""The two stages of the paper "TopoEP" (arXiv 2609.35481), as far as they are known.

Second-hand: rebuilt from a public summary of the paper, not from the paper, of which only the
abstract was read. Stage 1, for traffic: a node gets a copy of an expert that lives elsewhere if the
node's tokens of it are worth more bytes, there and back, than the weights; on its rank with the
fewest slots used. Stage 2, for balance: again and again the busiest rank of a node gives tokens of
one of its experts to another rank of the node, half of the difference in load or all it has.

Our choices where the summary is silent: experts with the most benefit first; the copy serves all
tokens of its node; the pair (expert, rank) that moves most, among ties one that needs no new copy;
until nothing moves. The bytes are those of experts of width I = 2048 (DeepSeek-V3): three matrices
of hidden size times I against two vectors of hidden size per token.
"""

from __future__ import annotations

import numpy as np

from topoep import Topology
from topoep.simulator.planners.base import IntArray, Quota, home_of, home_quota, node_of

FFN_WIDTH = 2048


def plan(
    counts: IntArray,
    topology: Topology,
    spare_slots: int,
    history: IntArray | None = None,
    ffn_width: int = FFN_WIDTH,
) -> Quota:
    """See :class:`topoep.simulator.planners.base.Planner`."""
    ranks, experts = counts.shape
    node, home = node_of(topology), home_of(experts, ranks)
    quota = home_quota(counts)
    holds = np.zeros((ranks, experts), dtype=bool)
    holds[home, np.arange(experts)] = True
    used = np.zeros(ranks, dtype=np.int64)
    _copy_for_traffic(counts, node, home, spare_slots, 3 * ffn_width, quota, holds, used)
    for number in range(topology.num_nodes):
        _balance_inside(np.flatnonzero(node == number), spare_slots, quota, holds, used)
    return quota


def _copy_for_traffic(
    counts: IntArray,
    node: IntArray,
    home: IntArray,
    spare_slots: int,
    copy_rows: int,
    quota: Quota,
    holds: IntArray,
    used: IntArray,
) -> None:
    from_node = np.zeros((node.max() + 1, counts.shape[1]), dtype=np.int64)
    np.add.at(from_node, node, counts)
    benefit = 2 * from_node - copy_rows
    benefit[node[home], np.arange(counts.shape[1])] = 0
    for index in np.argsort(-benefit, axis=None, kind="stable"):
        number, expert = np.unravel_index(index, benefit.shape)
        if benefit[number, expert] <= 0:
            break
        free = np.flatnonzero((node == number) & (used < spare_slots))
        if len(free):
            target = free[used[free].argmin()]
            holds[target, expert] = True
            used[target] += 1
            quota[target, expert] += from_node[number, expert]
            quota[home[expert], expert] -= from_node[number, expert]


def _balance_inside(
    members: IntArray, spare_slots: int, quota: Quota, holds: IntArray, used: IntArray
) -> None:
    for _ in range(1000):  # halving settles long before
        load = quota[members].sum(1)
        busiest = members[load.argmax()]
        half = (load.max() - load) // 2
        allowed = holds[members] | (used[members] < spare_slots)[:, None]
        tokens = np.where(allowed, np.minimum.outer(half, quota[busiest]), 0)
        if tokens.max() <= 0:
            return
        # twice the tokens, and one more where no new copy is needed: the latter breaks ties only
        index = (2 * tokens + (holds[members] & (tokens > 0))).argmax()
        row, expert = np.unravel_index(index, tokens.shape)
        target = members[row]
        used[target] += not holds[target, expert]
        holds[target, expert] = True
        quota[busiest, expert] -= tokens[row, expert]
        quota[target, expert] += tokens[row, expert]
