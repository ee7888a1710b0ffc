# SPDX-License-Identifier: Apache-2.0
"""Expert ids become physical ids in token order, exactly as the quotas of the plan say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topoep
from tests import strategies
from tests.oracle.reroute import reroute as oracle
from tests.strategies import LAYOUTS, Case, examples, expert_of_physical, ids_of_counts, in_layout
from topoep import Even, Plan, ops

COPIES = strategies.cases(
    kinds=strategies.SKEWED_KINDS[:-1],  # not "huge": its ids would not fit into memory
    nodes=strategies.node_tables(min_ranks=2, max_ranks=6, max_nodes=3),
    home_slots=st.integers(1, 4),
    spare_slots=st.integers(1, 3),
)


def solved(case: Case, rank: int | None = None) -> Plan:
    return topoep.solve(case.tensor, case.topology, case.spare_slots, Even(), rank=rank)


def rerouted(ids: torch.Tensor, plan: Plan) -> torch.Tensor:
    assert plan.send is not None
    return ops.reroute(ids, plan.send, plan.copy_offsets, plan.copy_slots, plan.config.num_ranks)


def expected(ids: torch.Tensor, plan: Plan) -> list[list[int]]:
    assert plan.send is not None
    return oracle(
        ids.tolist(),
        plan.send.tolist(),
        plan.copy_offsets.tolist(),
        plan.copy_slots.tolist(),
        plan.config.num_ranks,
    )


def check(ids: torch.Tensor, plan: Plan) -> torch.Tensor:
    before = ids.clone()
    physical = rerouted(ids, plan)
    assert physical.tolist() == expected(before, plan)
    assert physical.dtype == ids.dtype
    assert physical.shape == ids.shape
    assert torch.equal(ids, before), "the ids were changed"
    assert physical.numel() == 0 or physical.data_ptr() != ids.data_ptr()
    return physical


@settings(max_examples=examples(1000))
@given(COPIES, st.data())
def test_any_ids_are_rerouted_in_token_order(case: Case, data: st.DataObject) -> None:
    # The ids have nothing to do with the counts: some quotas stay open, others run out.
    plan = solved(case, rank=data.draw(st.integers(0, case.num_ranks - 1)))
    check(data.draw(strategies.routed_ids(case.num_experts)), plan)


@settings(max_examples=examples(300))
@given(
    COPIES,
    st.integers(1, 64),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**32 - 1),
)
def test_quotas_are_filled_exactly(
    case: Case, top_k: int, dtype: torch.dtype, layout: str, seed: int
) -> None:
    plan = solved(case)
    received = np.zeros(plan.config.num_physical_experts, np.int64)
    for rank in range(case.num_ranks):
        ids = in_layout(ids_of_counts(case.counts[rank], top_k, seed + rank, dtype), layout)
        row = plan.for_rank(rank)
        physical = rerouted(ids, row).numpy().reshape(-1)
        placed = np.bincount(physical[physical >= 0], minlength=len(received))
        np.testing.assert_array_equal(placed, row.send.numpy())
        np.testing.assert_array_equal(
            expert_of_physical(plan)[physical[physical >= 0]], ids.numpy()[ids.numpy() >= 0]
        )
        received += placed
    loads = received.reshape(case.num_ranks, -1).sum(1)
    assert loads.max(initial=0) == int(plan.stats()["max_load"])


def first_with_copies(kind: str = "one_node", rank: int = 0) -> tuple[Case, Plan]:
    case = strategies.make_case(kind, 2, node_of_rank=[0, 0, 1, 1], home_slots=3, spare_slots=2)
    plan = solved(case, rank=rank)
    assert int(plan.stats()["copies"]) > 1
    return case, plan


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("top_k", [1, 2, 8, 63, 64])
def test_many_tokens_are_rerouted(top_k: int, dtype: torch.dtype) -> None:
    counts = np.random.default_rng(top_k).multinomial(40_000, [0.6] + [0.1 / 7] * 7 + [0.3 / 8] * 8)
    case = strategies.written_case([counts] * 4, node_of_rank=[0, 1, 1, 0], spare_slots=2)
    plan = solved(case, rank=2)
    assert int(plan.stats()["copies"]) >= 3
    ids = ids_of_counts(counts, top_k, seed=3, dtype=dtype)
    one = check(ids, plan)
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(one, rerouted(ids, plan))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_tokens_are_fine(dtype: torch.dtype) -> None:
    _, plan = first_with_copies()
    for top_k in (1, 8, 64):
        physical = check(torch.empty(0, top_k, dtype=dtype), plan)
        assert tuple(physical.shape) == (0, top_k)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strides_are_honoured(layout: str, dtype: torch.dtype) -> None:
    case, plan = first_with_copies()
    ids = in_layout(ids_of_counts(case.counts[0], 6, 1, dtype), layout)
    assert ids.is_contiguous() == (layout == "contiguous")
    check(ids, plan)


def test_only_the_rerouted_columns_of_a_larger_tensor_are_read() -> None:
    case, plan = first_with_copies()
    ids = ids_of_counts(case.counts[0], 4, 1, torch.int64)
    big = torch.full((ids.shape[0], 8), 2**40)
    big[:, ::2] = ids
    assert torch.equal(rerouted(big[:, ::2], plan), rerouted(ids, plan))
    assert (big[:, 1::2] == 2**40).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_are_no_expert_are_passed_through(dtype: torch.dtype) -> None:
    case, plan = first_with_copies()
    experts = case.num_experts
    odd = [-1, experts, experts + 5, 2**30, 2**31 - 1, -2, -(2**31)]
    if dtype == torch.int64:
        odd += [2**32, 2**32 + 1, 2**33 - 1, 2**62, -(2**32), -(2**63)]
    without = ids_of_counts(case.counts[0], 2, 1, dtype)
    mixed = torch.stack([torch.tensor(odd, dtype=dtype)[torch.arange(len(without)) % len(odd)]] * 2)
    ids = torch.stack([mixed[0], without[:, 0], without[:, 1], mixed[1]], dim=1)
    physical = check(ids, plan)
    assert torch.equal(physical[:, [0, 3]], ids[:, [0, 3]])
    assert torch.equal(physical[:, 1:3], rerouted(without, plan)), "others are routed differently"


def test_padding_does_not_change_the_others() -> None:
    _, plan = first_with_copies()
    physical = check(torch.tensor([[-1, 3], [2, -1], [-1, -1]]), plan)
    assert physical[0, 0] == physical[1, 1] == -1
    assert physical[2].tolist() == [-1, -1]
    assert physical[0, 1] == rerouted(torch.tensor([[3]]), plan)[0, 0]


def hot_plan() -> Plan:
    """Expert 0 on ranks 0, 1 and 2; rank 0 sends 4, 3 and 2 tokens to them."""
    case = strategies.written_case(
        [[9, 0, 0], [9, 0, 0], [9, 0, 0]], node_of_rank=[0, 0, 0], spare_slots=1
    )
    plan = solved(case, rank=0)
    assert plan.slot_expert.tolist() == [[-1], [0], [0]]
    return plan


def test_the_home_is_filled_first_then_the_copies_in_list_order() -> None:
    plan = hot_plan()
    send = torch.tensor([4, 0, 0, 3, 0, 2], dtype=torch.int32)
    ids = torch.zeros(9, 1, dtype=torch.int32)
    physical = ops.reroute(ids, send, plan.copy_offsets, plan.copy_slots, 3)
    assert physical.flatten().tolist() == [0] * 4 + [3] * 3 + [5] * 2


def test_a_holder_without_quota_is_skipped() -> None:
    plan = hot_plan()
    send = torch.tensor([0, 0, 0, 0, 0, 2], dtype=torch.int32)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    physical = ops.reroute(ids, send, plan.copy_offsets, plan.copy_slots, 3)
    assert physical.flatten().tolist() == [5, 5]


def test_tokens_beyond_the_quotas_go_home() -> None:
    plan = hot_plan()
    send = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.int32)
    ids = torch.zeros(3, 2, dtype=torch.int64)
    physical = ops.reroute(ids, send, plan.copy_offsets, plan.copy_slots, 3)
    assert physical.tolist() == [[0, 3], [5, 0], [0, 0]]


def test_an_expert_twice_in_a_row_uses_two_places_of_its_quota() -> None:
    plan = hot_plan()
    send = torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.int32)
    physical = ops.reroute(
        torch.tensor([[0, 0], [2, 2]]), send, plan.copy_offsets, plan.copy_slots, 3
    )
    assert physical.tolist() == [[0, 3], [4, 4]]


@settings(max_examples=examples(300))
@given(COPIES, st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_distinct_experts_of_a_token_stay_distinct(case: Case, top_k: int, seed: int) -> None:
    top_k = min(top_k, case.num_experts)
    rng = np.random.default_rng(seed)
    popular = case.counts.sum(0) + 0.1
    keys = rng.exponential(size=(50, case.num_experts)) / popular
    ids = torch.from_numpy(np.argsort(keys, axis=1)[:, :top_k])
    plan = solved(case, rank=0)
    physical = check(ids, plan).numpy()
    assert all(len(set(row)) == top_k for row in physical.tolist())
    np.testing.assert_array_equal(expert_of_physical(plan)[physical], ids.numpy())


@settings(max_examples=examples(200))
@given(COPIES, st.integers(0, 2**32 - 1))
def test_later_tokens_never_change_earlier_ones(case: Case, seed: int) -> None:
    plan = solved(case, rank=0)
    ids = ids_of_counts(case.counts[0], 4, seed, torch.int64)
    whole = rerouted(ids, plan)
    for rows in {0, 1, ids.shape[0] // 2, max(ids.shape[0] - 1, 0)}:
        assert torch.equal(rerouted(ids[:rows], plan), whole[:rows])


@settings(max_examples=examples(200))
@given(COPIES, st.data())
def test_the_empty_plan_only_renumbers(case: Case, data: st.DataObject) -> None:
    plan = topoep.solve(case.tensor, case.topology, case.spare_slots, candidates=[], rank=0)
    ids = data.draw(strategies.routed_ids(case.num_experts))
    physical = check(ids, plan)
    expert = (ids >= 0) & (ids < case.num_experts)
    renumbered = ids // case.home_slots * case.width + ids % case.home_slots
    assert torch.equal(physical, torch.where(expert, renumbered, ids))


def test_without_spare_slots_ids_stay_as_they_are() -> None:
    case = strategies.make_case("lognormal", 1, node_of_rank=[0, 1], home_slots=3, spare_slots=0)
    plan = solved(case, rank=1)
    ids = ids_of_counts(case.counts[1], 3, 0, torch.int64)
    assert torch.equal(check(ids, plan), ids)


@pytest.mark.parametrize("kind", strategies.SKEWED_KINDS[:-1])
def test_repeated_calls_are_identical(kind: str) -> None:
    case = strategies.make_case(kind, 4, node_of_rank=[0, 0, 1], home_slots=4, spare_slots=2)
    plan = solved(case, rank=1)
    ids = ids_of_counts(case.counts[1], 5, 9, torch.int32)
    first = rerouted(ids, plan)
    for _ in range(20):
        assert torch.equal(first, rerouted(ids, plan))


# ---- through a Balancer --------------------------------------------------------------------------


def ids_of_ranks(case: Case, top_k: int, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    return [
        ids_of_counts(case.counts[rank], top_k, rank, dtypes[rank % len(dtypes)])
        for rank in range(case.num_ranks)
    ]


@pytest.mark.parametrize("dtypes", [(torch.int32,), (torch.int64,), (torch.int64, torch.int32)])
@pytest.mark.parametrize("kind", ["one_expert", "uneven_nodes", "zeros", "silent_ranks"])
def test_a_balancer_reroutes_what_it_planned(kind: str, dtypes: Sequence[torch.dtype]) -> None:
    case = strategies.make_case(kind, 8, node_of_rank=[0, 1, 1, 0, 1], home_slots=2, spare_slots=2)
    balancer = topoep.Balancer(
        case.topology, case.num_experts, case.spare_slots, transport="local", objective=Even()
    )
    ids = ids_of_ranks(case, 3, dtypes)
    plan = balancer.plan(ids)
    assert (plan.counts.numpy() == case.counts).all()
    received = np.zeros(plan.config.num_physical_experts, np.int64)
    for rank, physical in enumerate(balancer.reroute(ids, plan)):
        row = plan.for_rank(rank)
        assert physical.dtype == ids[rank].dtype
        assert physical.tolist() == expected(ids[rank], row)
        placed = np.bincount(physical[physical >= 0].numpy(), minlength=len(received))
        np.testing.assert_array_equal(placed, row.send.numpy())
        received += placed
    loads = received.reshape(case.num_ranks, -1).sum(1)
    assert loads.max() == int(plan.stats()["max_load"])


def test_a_balancer_takes_ranks_without_tokens() -> None:
    balancer = topoep.Balancer(topoep.Topology(1, 2), 4, 1, transport="local")
    ids = [torch.empty(0, 2, dtype=torch.int64), torch.tensor([[0, 1]] * 30)]
    plan = balancer.plan(ids)
    nothing, some = balancer.reroute(ids, plan)
    assert tuple(nothing.shape) == (0, 2)
    assert some.tolist() == expected(ids[1], plan.for_rank(1))
