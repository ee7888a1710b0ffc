# SPDX-License-Identifier: Apache-2.0
"""Which experts a node relays, restated: every read on the node's links is written down.

``core/relays.h`` keeps sums up to date step by step; here they are made anew from the reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.kernels.plans import PlanTables

MAX_RELAYS = 32  # kMaxRelays

Read = tuple[int, int, int]  # reader, source, shards


def reads_in_node(plan: PlanTables, node: int, relayed: Iterable[int]) -> list[Read]:
    """Reads between ranks of a node, in shards; a copy is one for each other rank."""
    ranks = plan.topology.ranks_of_node(node)
    relayed = set(relayed)
    reads: list[Read] = []
    for expert in range(plan.num_experts):
        home, holders = plan.home(expert), plan.holders(expert, node)
        relays = [rank for rank in ranks if rank != home]
        if plan.node(home) != node:  # every rank of the node has a shard from the network
            reads += [(rank, relay, 1) for rank in holders for relay in ranks if relay != rank]
            continue
        if any(at != node for e, at in plan.pairs() if e == expert):  # sent by every rank
            reads += [(relay, home, 1) for relay in relays]
        if expert in relayed:
            reads += [(relay, home, 1) for relay in relays]
            reads += [(rank, relay, 1) for rank in holders for relay in relays if relay != rank]
        else:
            reads += [(rank, home, len(relays)) for rank in holders]
    return reads


def link_loads(reads: Iterable[Read]) -> tuple[Counter[int], Counter[int]]:
    """Shards out of and into every rank."""
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for reader, source, shards in reads:
        out[source] += shards
        into[reader] += shards
    return out, into


def predicted_time(plan: PlanTables, node: int, relayed: Iterable[int]) -> int:
    """Of the copies inside a node: shards on the busiest link."""
    out, into = link_loads(reads_in_node(plan, node, relayed))
    return max([0, *out.values(), *into.values()])


def relays_by_definition(plan: PlanTables, node: int) -> list[int]:
    """The relayed experts of a node, ascending."""
    ranks = plan.topology.ranks_of_node(node)
    chosen: list[int] = []
    times = [predicted_time(plan, node, [])]
    while len(chosen) < MAX_RELAYS:
        out, into = link_loads(reads_in_node(plan, node, chosen))
        busiest = max(ranks, key=lambda rank: (out[rank], -ranks.index(rank)))
        if max(into.values(), default=0) >= out[busiest]:
            break
        candidates = [
            (-len(plan.holders(e, node)), e)
            for e in range(plan.num_experts)
            if plan.home(e) == busiest and e not in chosen and len(plan.holders(e, node)) > 1
        ]
        if not candidates:
            break
        chosen.append(min(candidates)[1])
        times.append(predicted_time(plan, node, chosen))
    best = times.index(min(times))
    return sorted(chosen[:best]) if times[best] <= times[0] - (len(ranks) - 1) else []
