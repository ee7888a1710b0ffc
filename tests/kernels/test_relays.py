# SPDX-License-Identifier: Apache-2.0
"""Which experts a node relays (core/relays.h): the kernel's choice against the reads it implies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulation.harness import SCHEDULES
from tests.kernels.plans import PlanTables, plan_tables, random_plan
from tests.kernels.relays import (
    MAX_RELAYS,
    link_loads,
    predicted_time,
    reads_in_node,
    relays_by_definition,
)
from tests.kernels.test_stream_lists import lists_by_kernel
from topoep import Topology


def relays_by_kernel(plan: PlanTables, rank: int, schedule=SCHEDULES[0]) -> list[int]:
    """The experts that a rank's lists say its node relays."""
    lists = lists_by_kernel(plan, rank, schedule)
    width = plan.experts_per_rank + plan.spare_slots
    entries = [int(plan.copy_slots[entry]) for entry in lists["relays"]]
    return [int(plan.slot_expert[e // width, e % width - plan.experts_per_rank]) for e in entries]


def one_node(num_ranks: int, copies: dict[int, list[int]], spare: int = 2) -> PlanTables:
    """A plan for one node with an expert per rank; copies: the holders of an expert."""
    slot_expert = np.full((num_ranks, spare), -1, np.int32)
    for expert, holders in copies.items():
        for rank in holders:
            slot_expert[rank, np.flatnonzero(slot_expert[rank] < 0)[0]] = expert
    topology = Topology(num_nodes=1, ranks_per_node=num_ranks)
    return plan_tables(topology, num_ranks, slot_expert)


@pytest.mark.parametrize(
    ("copies", "relayed", "before", "after"),
    [
        ({}, [], 0, 0),
        ({3: [5]}, [], 7, 7),
        ({3: [1, 5]}, [3], 14, 7),
        ({0: [1, 2, 3, 4, 5, 6, 7]}, [0], 49, 7),
        # Ranks 6 and 7 receive two copies anyway: two copies from rank 0 are no bound.
        ({0: [6, 7], 1: [6, 7]}, [], 14, 14),
        # One home with three experts of one copy each: nothing to pass on.
        ({0: [1], 2: [3], 4: [5]}, [], 7, 7),
        ({0: [1, 2, 3], 4: [5, 6, 7]}, [0, 4], 21, 10),
    ],
)
def test_by_hand(copies, relayed, before, after):
    """Eight ranks: a copy is seven shards."""
    plan = one_node(8, copies)
    assert relays_by_kernel(plan, 2) == relayed
    assert predicted_time(plan, 0, []) == before
    assert predicted_time(plan, 0, relayed) == after


def test_two_ranks_have_nothing_to_relay():
    assert relays_by_kernel(one_node(2, {0: [1], 1: [0]}), 0) == []


def test_relays_are_bounded():
    """More equally busy homes than may be relieved: relieving some would not help."""
    busy = MAX_RELAYS + 1
    copies = {home: [busy + 3 * home + i for i in range(3)] for home in range(busy)}
    assert relays_by_kernel(one_node(4 * busy, copies), 1) == []
    del copies[0]
    assert relays_by_kernel(one_node(4 * busy, copies), 1) == sorted(copies)


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_fewer_relays_may_be_allowed(allowed):
    plan = one_node(8, {0: [1, 2, 3, 4, 5], 6: [7, 1]})
    lists = lists_by_kernel(plan, 3, max_relays=allowed)
    assert len(lists["relays"]) == allowed
    assert (lists["guests"] != []) == (allowed > 0)


def check_choice(plan: PlanTables, node: int, relayed: list[int]) -> None:
    """What holds for every choice."""
    ranks = plan.topology.ranks_of_node(node)
    assert relayed == sorted(set(relayed))
    assert len(relayed) <= MAX_RELAYS
    before, after = (predicted_time(plan, node, chosen) for chosen in ([], relayed))
    if relayed:
        assert after <= before - (len(ranks) - 1)
    out, _ = link_loads(reads_in_node(plan, node, relayed))
    direct, _ = link_loads(reads_in_node(plan, node, []))
    for rank in ranks:
        assert out[rank] <= max(direct.values(), default=0)
    for expert in relayed:
        assert plan.node(plan.home(expert)) == node
        assert len(plan.holders(expert, node)) >= 2
        # Of the home: once, whoever holds it. Of a relay: its shard, at most once per holder.
        reads = reads_in_node(plan_of_one(plan, expert, node), node, [expert])
        sent, _ = link_loads(reads)
        assert sent.pop(plan.home(expert)) == len(ranks) - 1
        assert max(sent.values()) <= len(plan.holders(expert, node))


def plan_of_one(plan: PlanTables, expert: int, node: int) -> PlanTables:
    """The same plan without any copy but those of one expert in one node."""
    kept = np.where(plan.slot_expert == expert, expert, -1).astype(np.int32)
    for rank in range(plan.topology.num_ranks):
        if plan.node(rank) != node:
            kept[rank] = -1
    return plan_tables(plan.topology, plan.num_experts, kept)


@settings(max_examples=30)
@given(st.data())
def test_random_plans(data):
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=20))
    topology = Topology(node_of_rank=nodes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    kind = data.draw(st.sampled_from(["relayed", "relayed", "full", "hot", "random"]))
    spare = data.draw(st.integers(1, 4))
    plan = random_plan(rng, topology, data.draw(st.integers(1, 3)), spare, kind)
    rank = data.draw(st.integers(0, len(nodes) - 1))
    node = plan.node(rank)
    schedule = data.draw(st.sampled_from(SCHEDULES))
    relayed = relays_by_kernel(plan, rank, schedule)
    assert relayed == relays_by_definition(plan, node)
    check_choice(plan, node, relayed)
    # Every rank of the node chooses alike, and takes each guest from one place.
    other = topology.ranks_of_node(node)[-1]
    assert relays_by_kernel(plan, other) == relayed
    guests = lists_by_kernel(plan, other)["guests"]
    in_chunks = [plan.slot_expert[other, slot] for slot in guests[::3]]
    assert sorted(in_chunks) == sorted(
        e
        for e in plan.slot_expert[other].tolist()
        if e >= 0 and (plan.node(plan.home(e)) != node or e in relayed)
    )


def test_random_plans_relay_something():
    """The tests of relays are about something."""
    rng = np.random.default_rng(1)
    topology = Topology(num_nodes=2, ranks_per_node=8)
    plans = [random_plan(rng, topology, 2, 2, "relayed") for _ in range(20)]
    relaying = [p for p in plans if relays_by_definition(p, 0)]
    assert len(relaying) > 10
