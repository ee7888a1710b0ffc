# SPDX-License-Identifier: Apache-2.0
"""Section 7b of docs/algorithm.md in plain Python and by no other source: predicted time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.oracle.planner import Copy, Layout, Solved

LARGEST_TIME = 2**61
NO_ROWS = 2**31 - 1


class Costs(NamedTuple):
    """The constants of docs/cost-model.md in nanoseconds; interference in parts per thousand."""

    token: int
    instance: int
    copy: int
    cross_copy: int
    grad: int
    cross_grad: int
    network_row: int
    hide_forward: int
    hide_backward: int
    hide_grads: int
    interference: int
    sharded: bool


class Transfers:
    """Who moves how many copies."""

    def __init__(self, copies: list[Copy], layout: Layout) -> None:
        self.layout = layout
        self.out: Counter[int] = Counter()
        self.into: Counter[int] = Counter()
        self.exports: Counter[int] = Counter()
        self.imports: Counter[int] = Counter()
        self.pairs_out: Counter[int] = Counter()
        self.pairs_in: Counter[int] = Counter()
        for c in copies:
            home, node = layout.home_position(c.expert), layout.node[c.position]
            if node == layout.home_node(c.expert):
                source = home
            else:
                source = min(
                    d.position
                    for d in copies
                    if d.expert == c.expert and layout.node[d.position] == node
                )
            if source != c.position:
                self.out[source] += 1
                self.into[c.position] += 1
            else:
                self.exports[home] += 1
                self.imports[c.position] += 1
                self.pairs_out[layout.home_node(c.expert)] += 1
                self.pairs_in[node] += 1

    def busiest(self, c: int, x: int, sharded: bool) -> int:
        times = []
        for p, node in enumerate(self.layout.node):
            edge = c - c // len(self.layout.positions_of_node[node]) if sharded else 0
            times.append(self.out[p] * c + self.exports[p] * edge)
            times.append(self.into[p] * c + self.imports[p] * edge)
        times += [max(self.pairs_out[n], self.pairs_in[n]) * x for n in self.layout.nodes]
        return max(times)


def token_time(solved: Solved, layout: Layout, costs: Costs) -> int:
    """Tokens across nodes, as the split makes them."""
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for (source, holder), tokens in solved.tokens_moved(layout):
        if layout.node[source] != layout.node[holder]:
            out[layout.node[source]] += tokens
            into[layout.node[holder]] += tokens
    return max(
        max(out[n], into[n]) // len(positions) * costs.network_row * 4
        for n, positions in layout.positions_of_node.items()
    )


def predicted_time(solved: Solved, layout: Layout, costs: Costs) -> int:
    held = Counter(c.position for c in solved.copies)
    compute = max(
        load * costs.token + held[p] * costs.instance for p, load in enumerate(solved.load)
    )
    transfers = Transfers(solved.copies, layout)
    weights = transfers.busiest(costs.copy, costs.cross_copy, costs.sharded)
    grads = transfers.busiest(costs.grad, costs.cross_grad, costs.sharded)
    rows = min((sum(solved.home[e] for e in layout.home_experts(p)) for p in held), default=NO_ROWS)
    exposed = (
        max(weights - rows * costs.hide_forward, 0)
        + max(weights - rows * costs.hide_backward, 0)
        + max(grads - costs.hide_grads, 0)
    )
    hidden = 2 * weights + grads - exposed
    total = (
        compute + token_time(solved, layout, costs) + exposed + hidden * costs.interference // 1000
    )
    return min(total, LARGEST_TIME)
