# SPDX-License-Identifier: Apache-2.0
"""Tokens are split over the holders of an expert so that as few as possible cross the network."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import topoep
from tests import strategies
from tests.strategies import Case, examples, expert_of_physical
from topoep import Even, Plan, ops

Holders = npt.NDArray[np.int64]


def fewest_cross_node_tokens(
    tokens: npt.NDArray[np.integer],
    holder_rank: npt.NDArray[np.integer],
    quotas: npt.NDArray[np.integer],
    node: npt.NDArray[np.integer],
) -> int:
    """Least tokens that leave their node, over all ways to fill the quotas of one expert.

    A transport problem: x[source, holder] >= 0, rows sum to the tokens, columns to the quotas. Its
    vertices are integers, so the linear program is exact.
    """
    sources, holders = len(tokens), len(quotas)
    cost = (node[:, None] != node[holder_rank][None, :]).astype(float).reshape(-1)
    rows = np.kron(np.eye(sources), np.ones(holders))
    columns = np.kron(np.ones(sources), np.eye(holders))
    solution = linprog(
        cost,
        A_eq=np.vstack([rows, columns]),
        b_eq=np.concatenate([tokens, quotas]),
        method="highs",
    )
    assert solution.success, solution.message
    fewest = round(solution.fun)
    assert abs(solution.fun - fewest) < 1e-4
    return fewest


def check_split_is_optimal(plan: Plan, split: npt.NDArray[np.int64]) -> int:
    """Compares every expert that has copies with the linear program; returns how many there are."""
    node = np.array(plan.config.topology.node_of_rank)
    holders = expert_of_physical(plan)
    copied = np.unique(plan.slot_expert.numpy())
    copied = copied[copied >= 0]
    for expert in copied:
        physical = np.flatnonzero(holders == expert)
        rank = physical // plan.config.slots_per_rank
        served = split[:, physical]
        cross = int(served[node[:, None] != node[rank][None, :]].sum())
        fewest = fewest_cross_node_tokens(served.sum(1), rank, served.sum(0), node)
        assert cross == fewest, f"expert {expert}: {cross} tokens cross, {fewest} are enough"
    return len(copied)


SMALL = strategies.cases(
    kinds=["near_sources", "uneven_nodes", "one_node", "one_expert", "few_values", "silent_ranks"],
    nodes=strategies.node_tables(min_ranks=2, max_ranks=8, max_nodes=4),
    home_slots=st.integers(1, 3),
    spare_slots=st.integers(1, 3),
)


@settings(max_examples=examples(150))
@given(SMALL)
def test_no_split_with_the_same_quotas_crosses_less(case: Case) -> None:
    plan = topoep.solve(case.tensor, case.topology, case.spare_slots, Even())
    check_split_is_optimal(plan, plan.split().numpy().astype(np.int64))


def test_plans_of_the_comparison_do_have_copies() -> None:
    compared = 0
    for seed in range(30):
        case = strategies.make_case(
            "near_sources", seed, node_of_rank=[0, 1, 2, 0, 1, 2], home_slots=2, spare_slots=2
        )
        plan = topoep.solve(case.tensor, case.topology, case.spare_slots, Even())
        compared += check_split_is_optimal(plan, plan.split().numpy().astype(np.int64))
    assert compared >= 60


@st.composite
def plans_with_any_copies(draw: st.DrawFn) -> Plan:
    """Slots and quotas that no planner chose: any expert anywhere, anything the home can give."""
    case = draw(SMALL)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    at_home = case.counts.sum(0, dtype=np.int64)
    slot_expert = np.full((case.num_ranks, case.spare_slots), -1, np.int32)
    slot_tokens = np.zeros_like(slot_expert)
    for rank in range(case.num_ranks):
        foreign = np.flatnonzero(np.arange(case.num_experts) // case.home_slots != rank)
        number = min(len(foreign), case.spare_slots)
        for slot, expert in enumerate(np.sort(rng.choice(foreign, number, replace=False))):
            slot_expert[rank, slot] = expert
            slot_tokens[rank, slot] = rng.integers(0, at_home[expert] + 1)
            at_home[expert] -= slot_tokens[rank, slot]
    empty = topoep.solve(case.tensor, case.topology, case.spare_slots, candidates=[])
    return with_slots(empty, slot_expert, slot_tokens)


def with_slots(
    plan: Plan, slot_expert: npt.NDArray[np.int32], slot_tokens: npt.NDArray[np.int32]
) -> Plan:
    return dataclasses.replace(
        plan,
        slot_expert=torch.from_numpy(slot_expert),
        slot_tokens=torch.from_numpy(slot_tokens),
    )


@settings(max_examples=examples(150))
@given(plans_with_any_copies())
def test_no_split_of_any_quotas_crosses_less(plan: Plan) -> None:
    check_split_is_optimal(plan, plan.split().numpy().astype(np.int64))


@settings(max_examples=examples(300))
@given(plans_with_any_copies())
def test_a_rank_serves_its_own_tokens_first(plan: Plan) -> None:
    split = plan.split().numpy().astype(np.int64)
    for physical, expert in enumerate(expert_of_physical(plan)):
        if expert >= 0:
            own = physical // plan.config.slots_per_rank
            quota = split[:, physical].sum()
            assert split[own, physical] == min(plan.counts[own, expert].item(), quota)


@settings(max_examples=examples(300))
@given(plans_with_any_copies())
def test_a_node_serves_its_own_tokens_before_others(plan: Plan) -> None:
    split = plan.split().numpy().astype(np.int64)
    node = np.array(plan.config.topology.node_of_rank)
    holders = expert_of_physical(plan)
    for expert in range(plan.config.num_experts):
        physical = np.flatnonzero(holders == expert)
        holder_node = node[physical // plan.config.slots_per_rank]
        for n in range(plan.config.topology.num_nodes):
            inside = split[node == n][:, physical[holder_node == n]].sum()
            tokens = plan.counts.numpy()[node == n, expert].sum(dtype=np.int64)
            quota = split[:, physical[holder_node == n]].sum()
            assert inside == min(tokens, quota)


@settings(max_examples=examples(300))
@given(plans_with_any_copies())
def test_holders_get_exactly_their_quotas(plan: Plan) -> None:
    received = plan.split().numpy().sum(0, dtype=np.int64).reshape(plan.config.num_ranks, -1)
    copies = received[:, plan.config.experts_per_rank :]
    np.testing.assert_array_equal(copies, plan.slot_tokens.numpy())
    total = plan.counts.numpy().sum(0, dtype=np.int64)
    np.add.at(total, plan.slot_expert.numpy().reshape(-1), -copies.reshape(-1))
    at_home = received[:, : plan.config.experts_per_rank].reshape(-1)
    np.testing.assert_array_equal(at_home, total)


@settings(max_examples=examples(300))
@given(strategies.cases(kinds=strategies.SKEWED_KINDS), st.one_of(st.none(), st.just([])))
def test_the_statistics_count_the_tokens_that_cross(case: Case, candidates: list | None) -> None:
    plan = topoep.solve(case.tensor, case.topology, case.spare_slots, candidates=candidates)
    node = np.array(case.node_of_rank)
    holder_node = np.repeat(node, case.width)
    split = plan.split().numpy().astype(np.int64)
    cross = split[node[:, None] != holder_node[None, :]].sum()
    assert int(plan.stats()["cross_node_tokens"]) == cross
    home_node = np.repeat(node, case.home_slots)
    before = case.counts.astype(np.int64)[node[:, None] != home_node[None, :]].sum()
    assert int(plan.stats()["cross_node_tokens_before"]) == before


def test_a_copy_near_the_sources_keeps_their_tokens_off_the_network() -> None:
    # Both nodes send 40 tokens to expert 0 in node 0; a copy in node 1 serves node 1.
    counts = torch.tensor([[20, 0, 0, 0], [20, 0, 0, 0], [20, 0, 0, 0], [20, 0, 0, 0]]).int()
    plan = topoep.solve(counts, topoep.Topology(2, 2), 1, Even())
    assert int(plan.stats()["cross_node_tokens_before"]) == 40
    assert int(plan.stats()["cross_node_tokens"]) == 0


def test_lines_are_laid_out_in_node_order_on_a_strided_topology() -> None:
    # Nodes {0, 2} and {1, 3}. Expert 0 lives on rank 0 (quota 5) and is copied to ranks 1 and 3
    # (quotas 4 and 9). Ranks 0 and 3 serve themselves, node 1 takes rank 1's tokens in the order
    # 1, 3, and what is left of rank 2 goes over the network in the order 0, 1, 3.
    counts = torch.tensor([[3, 0, 0, 0], [6, 0, 0, 0], [8, 0, 0, 0], [1, 0, 0, 0]]).int()
    topology = topoep.Topology(node_of_rank=[0, 1, 0, 1])
    split = ops.split(
        counts,
        topology.table(),
        torch.tensor([[-1], [0], [-1], [0]]).int(),
        torch.tensor([[0], [4], [0], [9]]).int(),
    )
    home, first, second = split[:, 0].tolist(), split[:, 3].tolist(), split[:, 7].tolist()
    assert home == [3, 0, 2, 0]
    assert first == [0, 4, 0, 0]
    assert second == [0, 2, 6, 1]


@pytest.mark.parametrize("total", [2**31 - 1, 2**31 - 2])
def test_totals_at_the_limit_are_split_exactly(total: int) -> None:
    counts = torch.zeros(3, 3, dtype=torch.int32)
    counts[:, 0] = torch.tensor([total // 3, total // 3, total - 2 * (total // 3)])
    plan = topoep.solve(counts, topoep.Topology(node_of_rank=[0, 1, 1]), 1, Even())
    split = plan.split().to(torch.int64)
    assert split.sum().item() == total
    assert split.sum(1).tolist() == counts.sum(1, dtype=torch.int64).tolist()
    assert int(plan.stats()["max_load"]) == -(-total // 3)
