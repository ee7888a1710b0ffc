# SPDX-License-Identifier: Apache-2.0
"""Routed ids are counted exactly, whatever their type, layout and number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topoep
from tests import strategies
from tests.oracle.histogram import histogram as oracle
from tests.strategies import LAYOUTS, examples, in_layout
from topoep import ops

NUMBERS_OF_EXPERTS = st.one_of(
    st.integers(1, 16), st.sampled_from([31, 32, 33, 256, 1023, 1024, 1025, 2048, 4095, 4096])
)


def check(ids: torch.Tensor, num_experts: int) -> None:
    before = ids.clone()
    counts, invalid = ops.histogram(ids, num_experts)
    assert (counts.tolist(), invalid.item()) == oracle(before.tolist(), num_experts)
    assert counts.dtype == torch.int32
    assert tuple(counts.shape) == (num_experts,)
    assert invalid.dtype == torch.int32
    assert invalid.dim() == 0
    assert torch.equal(ids, before), "the ids were changed"


@settings(max_examples=examples(1000))
@given(st.data(), NUMBERS_OF_EXPERTS)
def test_any_ids_are_counted(data: st.DataObject, num_experts: int) -> None:
    check(data.draw(strategies.routed_ids(num_experts)), num_experts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_experts", [1, 2, 7, 64, 1025, 4096])
@pytest.mark.parametrize("top_k", [1, 2, 8, 33, 64])
def test_many_ids_are_counted(num_experts: int, top_k: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(num_experts * 100 + top_k)
    values = rng.integers(-3, num_experts + 3, (20_000 // top_k, top_k))
    check(torch.from_numpy(values).to(dtype), num_experts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strides_are_honoured(layout: str, dtype: torch.dtype) -> None:
    values = torch.from_numpy(np.random.default_rng(5).integers(-1, 9, (700, 6))).to(dtype)
    ids = in_layout(values, layout)
    assert ids.is_contiguous() == (layout == "contiguous")
    check(ids, 8)


def test_rows_repeated_without_memory_are_counted() -> None:
    check(torch.tensor([[3, 3, 0, -1, 9]]).expand(1000, 5), 8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_tokens_count_as_zeros(dtype: torch.dtype) -> None:
    check(torch.empty(0, 4, dtype=dtype), 6)


def test_padding_is_in_neither_number() -> None:
    counts, invalid = ops.histogram(torch.tensor([[-1, 3], [2, -1], [-1, -1]]), 4)
    assert counts.tolist() == [0, 0, 1, 1]
    assert invalid.item() == 0


def test_an_expert_twice_in_a_row_counts_twice() -> None:
    counts, invalid = ops.histogram(torch.tensor([[3, 3]]), 4)
    assert counts.tolist() == [0, 0, 0, 2]
    assert invalid.item() == 0


@pytest.mark.parametrize("odd", [4, 9, 2**30, 2**31 - 1, -2, -(2**31)])
def test_ids_out_of_range_are_counted_as_invalid(odd: int) -> None:
    counts, invalid = ops.histogram(torch.tensor([[odd, 0], [1, odd]], dtype=torch.int32), 4)
    assert counts.tolist() == [1, 1, 0, 0]
    assert invalid.item() == 2


@pytest.mark.parametrize("odd", [2**32, 2**32 + 1, 2**33 - 1, 2**62, -(2**32), -(2**63)])
def test_wide_ids_are_not_cut_to_32_bits(odd: int) -> None:
    # 2^32 + 1 and 2^33 - 1 would be expert 1 and padding in 32 bits.
    counts, invalid = ops.histogram(torch.tensor([[odd, 0]]), 4)
    assert counts.tolist() == [1, 0, 0, 0]
    assert invalid.item() == 1


def test_the_number_of_threads_does_not_matter() -> None:
    values = np.random.default_rng(1).integers(-2, 300, (50_000, 8))
    ids = torch.from_numpy(values)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ops.histogram(ids, 256))
    finally:
        torch.set_num_threads(before)
    expected = np.bincount(values[(values >= 0) & (values < 256)], minlength=256)
    for counts, invalid in results:
        np.testing.assert_array_equal(counts.numpy(), expected)
        assert invalid.item() == int(((values < -1) | (values >= 256)).sum())


def test_a_plan_counts_each_ranks_ids_and_all_invalid_ones() -> None:
    topology = topoep.Topology(node_of_rank=[0, 1])
    balancer = topoep.Balancer(topology, 4, 1)
    ids = [torch.tensor([[0, 4], [-1, 3]]), torch.tensor([[2, 2], [-7, 2**40]])]
    plan = balancer.plan(ids)
    assert plan.counts.tolist() == [[1, 0, 0, 1], [0, 0, 2, 0]]
    assert plan.num_invalid.item() == 3
    assert plan.stats()["invalid"].item() == 3
