# SPDX-License-Identifier: Apache-2.0
"""Section 5b of docs/algorithm.md in plain Python and by no other source: policy ``T``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.oracle.planner import State

ONE = 2**24
K1, K2 = 12021399, 6171992
ITERATIONS = 50
SCORE = 2**10


def times(a: int, b: int) -> int:
    return a * b // ONE


def inverse(a: int) -> int:
    return ONE * ONE // max(a, 1)


class Hints(NamedTuple):
    """Row and column factors by node, and all room."""

    row: dict[int, int]
    column: dict[int, int]
    all_room: int


def spill_of(state: State) -> list[int]:
    """5b.1: the tokens of each expert that its rank wants to give away."""
    spill = [0] * state.layout.num_experts
    for p in range(state.layout.num_ranks):
        left = max(state.excess(p), 0)
        for e in sorted(state.layout.home_experts(p), key=lambda e: (-state.home[e], e)):
            spill[e] = min(left, max(state.home[e] - 1, 0))
            left -= spill[e]
    return spill


def spread(weight: dict[int, int]) -> dict[int, int]:
    """1 / (K1 of the own node's and K2 of the other nodes' weight)."""
    everything = sum(weight.values())
    return {n: inverse(times(K1, w) + times(K2, everything - w)) for n, w in weight.items()}


def transport(state: State) -> Hints:
    """5b.1 and 5b.2: Sinkhorn iterations between nodes."""
    nodes = state.layout.positions_of_node
    excess = {n: sum(max(state.excess(p), 0) for p in nodes[n]) for n in nodes}
    room = {n: sum(max(-state.excess(p), 0) for p in nodes[n]) for n in nodes}
    all_excess, all_room = max(sum(excess.values()), 1), max(sum(room.values()), 1)
    supply = {n: ONE * excess[n] // all_excess for n in nodes}
    demand = {n: ONE * room[n] // all_room for n in nodes}
    row: dict[int, int] = {}
    column = dict.fromkeys(nodes, ONE)
    for _ in range(ITERATIONS):
        row = spread({n: times(demand[n], column[n]) for n in nodes})
        column = spread({n: times(supply[n], row[n]) for n in nodes})
    return Hints(row, column, all_room)


def score(state: State, hints: Hints, mean: int, expert: int, p: int, tokens: int) -> int:
    home_node, node = state.layout.home_node(expert), state.layout.node[p]
    share = ONE * (state.cap - state.load[p]) // hints.all_room
    k = K1 if node == home_node else K2
    hint = times(times(times(hints.row[home_node], k), hints.column[node]), share)
    near = mean if node == home_node else mean // 3
    return SCORE * tokens + near + times(mean, min(hint, ONE)) // 10


def usable_slack(state: State) -> int:
    ranks = range(state.layout.num_ranks)
    return sum(state.room(p) for p in ranks) - sum(max(state.excess(p), 0) for p in ranks)


def proposal(
    state: State, hints: Hints, mean: int, spill: Sequence[int], slack: int, p: int
) -> tuple[int, int] | None:
    """(score, expert) that position p proposes to."""
    scored = []
    for e in range(state.layout.num_experts):
        tokens = min(spill[e], state.cap - state.load[p])
        wasteful = state.free[p] == 1 and state.room(p) - tokens > max(slack, 0)
        if tokens > 0 and not state.holds(p, e) and not wasteful:
            scored.append((score(state, hints, mean, e, p, tokens), e))
    return min(scored, key=lambda one: (-one[0], one[1]), default=None)


def match_transport(state: State) -> None:
    """5b.1 to 5b.3: copies by proposals and acceptances, S rounds."""
    layout = state.layout
    spill = spill_of(state)
    hints = transport(state)
    mean = SCORE * sum(state.load) // layout.num_experts
    for _ in range(layout.spare_slots):
        took: set[int] = set()
        while True:
            state.steps += 1
            slack = usable_slack(state)
            proposals: dict[int, list[tuple[int, int]]] = {}  # expert -> (score, position)
            for p in range(layout.num_ranks):
                if p in took or state.room(p) == 0:
                    continue
                best = proposal(state, hints, mean, spill, slack, p)
                if best is not None:
                    proposals.setdefault(best[1], []).append((best[0], p))
            if not proposals:
                break
            for e, from_ranks in proposals.items():
                _, p = min(from_ranks, key=lambda one: (-one[0], one[1]))
                tokens = min(spill[e], state.cap - state.load[p])
                state.take_from_home(e, tokens)
                state.place(e, p, tokens)
                spill[e] -= tokens
                took.add(p)
