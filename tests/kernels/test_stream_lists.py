# SPDX-License-Identifier: Apache-2.0
"""The lists that drive the data plane, against a restatement of their definition in Python."""

from __future__ import annotations

import ctypes
import functools
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoep
from tests.emulation.harness import SCHEDULES, Emulator
from tests.kernels.plans import KINDS, TOPOLOGIES, PlanTables, plan_tables, random_plan
from tests.kernels.relays import MAX_RELAYS, relays_by_definition

FIELDS = (
    "pair_index", "out_order", "in_order", "out_begin", "out_entry", "in_begin", "in_entry",
    "staged", "guests", "relays",
)  # fmt: skip


@functools.cache
def emulator() -> Emulator:
    return Emulator([Path(__file__).with_name("stream_lists_unit.cpp")])


def lists_by_kernel(
    plan: PlanTables, rank: int, schedule=SCHEDULES[0], max_relays: int = MAX_RELAYS
) -> dict[str, list[int]]:
    """Every field, with the entries that mean something."""
    unit = emulator()
    topology = plan.topology
    sizes = (topology.num_ranks, topology.num_nodes, plan.num_experts, plan.spare_slots)
    size = unit.library.lists_size(*[ctypes.c_longlong(s) for s in sizes])
    memory = np.full(size, -7, np.int32)
    starts = np.zeros(len(FIELDS), np.int64)
    table = topology.table().numpy()
    tables = {
        "table": table,
        "slot_expert": plan.slot_expert,
        "copy_offsets": plan.copy_offsets,
        "copy_slots": plan.copy_slots,
    }
    unit.use(schedule)
    with unit.memory(**tables), unit.memory(initialised=False, lists=memory):
        unit.call("run_stream_lists", *sizes, rank, max_relays, *tables.values(), memory, starts)
    assert unit.take_reports() == []
    raw = {
        name: memory[start:end].tolist()
        for name, start, end in zip(FIELDS, starts, [*starts[1:], size], strict=True)
    }
    num_out, num_in = raw["out_begin"][-1], raw["in_begin"][-1]
    return {
        "pair_index": raw["pair_index"][: plan.copy_offsets[-1]],
        "out_order": raw["out_order"][:num_out],
        "in_order": raw["in_order"][:num_in],
        "out_begin": raw["out_begin"],
        "out_entry": raw["out_entry"][:num_out],
        "in_begin": raw["in_begin"],
        "in_entry": raw["in_entry"][:num_in],
        "staged": raw["staged"][1 : 1 + raw["staged"][0]],
        "guests": raw["guests"][1 : 1 + 3 * raw["guests"][0]],
        "relays": raw["relays"][1 : 1 + raw["relays"][0]],
    }


def lists_by_definition(plan: PlanTables, rank: int) -> dict[str, list[int]]:
    """From the sets of pairs, without looking at the order in which the kernel works."""
    nodes = range(plan.topology.num_nodes)
    node = plan.node(rank)
    pairs = plan.pairs()
    home_node = {e: plan.node(plan.home(e)) for e in range(plan.num_experts)}
    stream = {
        (m, n): [e for e, to in pairs if to == n and home_node[e] == m]
        for m in nodes
        for n in nodes
    }

    relayed = relays_by_definition(plan, node)

    def leading_entry(expert: int, to: int) -> int:
        order = [r for n in nodes for r in plan.topology.ranks_of_node(n)]
        holders = [r for r in order if plan.slot(r, expert) is not None]
        return int(plan.copy_offsets[expert]) + holders.index(plan.holders(expert, to)[0])

    pair_index = [-1] * int(plan.copy_offsets[-1])
    for expert, to in pairs:
        if node in (to, home_node[expert]):
            index = stream[home_node[expert], to].index(expert)
            pair_index[leading_entry(expert, to)] = index
    out = [[leading_entry(e, n) for e in stream[node, n]] for n in nodes]
    into = [[leading_entry(e, node) for e in stream[m, node]] for m in nodes]
    guests = sorted(
        (home_node[e], (stream[home_node[e], node] if home_node[e] != node else relayed).index(e),
         slot)
        for slot, e in enumerate(plan.slot_expert[rank].tolist())
        if e >= 0 and (home_node[e] != node or e in relayed)
    )  # fmt: skip
    return {
        "pair_index": pair_index,
        "out_order": sorted(chain(*out)),
        "in_order": sorted(chain(*into)),
        "out_begin": [sum(map(len, out[:n])) for n in range(len(nodes) + 1)],
        "out_entry": list(chain(*out)),
        "in_begin": [sum(map(len, into[:m])) for m in range(len(nodes) + 1)],
        "in_entry": list(chain(*into)),
        "staged": sorted({e for n in nodes for e in stream[node, n]}),
        "guests": [value for m, index, slot in guests for value in (slot, m, index)],
        "relays": [leading_entry(e, node) for e in relayed],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_lists_of_every_rank(name, kind):
    rng = np.random.default_rng(len(name) + 10 * len(kind))
    plan = random_plan(rng, TOPOLOGIES[name], 2, 3, kind)
    for rank in range(plan.topology.num_ranks):
        schedule = SCHEDULES[rank % len(SCHEDULES)]
        assert lists_by_kernel(plan, rank, schedule) == lists_by_definition(plan, rank)


@settings(max_examples=10)
@given(st.data())
def test_lists_of_random_plans(data):
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    topology = topoep.Topology(node_of_rank=nodes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    spare = data.draw(st.integers(1, 4))
    plan = random_plan(rng, topology, data.draw(st.integers(1, 3)), spare, "random")
    rank = data.draw(st.integers(0, len(nodes) - 1))
    assert lists_by_kernel(plan, rank) == lists_by_definition(plan, rank)


def test_lists_beyond_one_block_of_entries():
    """More copies than the kernel has threads, and more nodes than a warp has lanes."""
    topology = topoep.Topology(num_nodes=48, ranks_per_node=2)
    plan = random_plan(np.random.default_rng(1), topology, 4, 8, "full")
    assert plan.copy_offsets[-1] > 512
    assert lists_by_kernel(plan, 5) == lists_by_definition(plan, 5)


def test_one_expert_everywhere():
    topology = TOPOLOGIES["4x2"]
    slot_expert = np.full((8, 2), -1, np.int32)
    slot_expert[:, 1] = 3
    slot_expert[3] = -1  # its home
    plan = plan_tables(topology, 8, slot_expert)
    lists = lists_by_kernel(plan, 2)
    assert lists == lists_by_definition(plan, 2)
    assert lists["staged"] == [3]
    assert lists["out_begin"] == [0, 1, 1, 2, 3]
