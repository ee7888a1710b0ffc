# SPDX-License-Identifier: Apache-2.0
"""The kernels that move and sum rows equal their CPU forms bit for bit, under every schedule."""

from __future__ import annotations

import pytest
import torch

from tests.emulation.harness import SCHEDULES
from tests.kernels.kernels import Kernels
from topoep import ops

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SOME_SCHEDULES = SCHEDULES[::4]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def random_maps(tokens: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps between rows and (token, k) pairs, shuffled; some of both have no partner."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randperm(tokens * top_k, generator=generator)
    used = pairs[: tokens * top_k * 4 // 5]
    pair_of_row = torch.cat([used, torch.full((3,), -1)])
    pair_of_row = pair_of_row[torch.randperm(len(pair_of_row), generator=generator)]
    row_of_pair = torch.full((tokens * top_k,), -1)
    rows = torch.nonzero(pair_of_row >= 0).flatten()
    row_of_pair[pair_of_row[rows]] = rows
    return pair_of_row, row_of_pair.view(tokens, top_k)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element beyond an aligned address."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("schedule", SOME_SCHEDULES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 20, 64, 300])
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "unaligned"])
def test_expand(schedule, width, shift):
    pair_of_row, row_of_pair = random_maps(9, 3, schedule.seed)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        x = (torch.randn(9, width) * 50).to(dtype)
        x = unaligned(x) if shift else x
        expected = ops.expand(x, pair_of_row, row_of_pair)
        assert same_bits(Kernels(schedule).expand(x, pair_of_row, 3), expected)


@pytest.mark.parametrize("schedule", SOME_SCHEDULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 8, 13, 264, 2100])
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "unaligned"])
def test_combine_and_its_gradients(schedule, dtype, width, shift):
    tokens, top_k = 5, 3
    torch.manual_seed(schedule.seed)
    pair_of_row, row_of_pair = random_maps(tokens, top_k, schedule.seed)
    rows = torch.randn(len(pair_of_row), width).to(dtype)
    grad_y = torch.randn(tokens, width).to(dtype)
    if shift:
        rows, grad_y = unaligned(rows), unaligned(grad_y)
    weights = torch.rand(tokens, top_k, dtype=accumulator(dtype))
    kernels = Kernels(schedule)
    expected = ops.combine(rows, pair_of_row, row_of_pair, weights)
    assert same_bits(kernels.combine(rows, row_of_pair, weights), expected)
    arguments = (grad_y, rows, pair_of_row, row_of_pair, weights)
    for got, wanted in zip(
        kernels.combine_backward(*arguments),
        torch.ops.topoep.combine_backward(*arguments),
        strict=True,
    ):
        assert same_bits(got, wanted)


def some_weights(shift: bool) -> list[torch.Tensor]:
    """Tensors of an expert: rows of whole vectors, of odd bytes, of one byte, and of many tiles."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(6, 4, 16),
        torch.randn(6, 7).to(torch.bfloat16),
        torch.randint(0, 255, (6, 1), dtype=torch.uint8),
        torch.randn(6, 5000),
        torch.randn(6, 3, dtype=torch.float64),
    ]
    return [unaligned(t) if shift else t for t in tensors]


@pytest.mark.parametrize("schedule", SOME_SCHEDULES, ids=str)
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("index", [[], [4], [2, 0, 5, 5, 1]], ids=str)
def test_pack(schedule, shift, index):
    weights = some_weights(shift)
    rows = torch.tensor(index, dtype=torch.int64)
    assert same_bits(Kernels(schedule).pack_rows(weights, rows), ops.pack_rows(weights, rows))


@pytest.mark.parametrize("schedule", SOME_SCHEDULES, ids=str)
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "unaligned"])
def test_unpack_is_the_inverse_of_pack(schedule, shift):
    weights = some_weights(shift)
    source, target = torch.tensor([1, 5, 3]), torch.tensor([4, 0, 2])
    packed = ops.pack_rows(weights, source)
    by_kernel = [torch.zeros_like(w) for w in weights]
    by_kernel = [unaligned(t) if shift else t for t in by_kernel]
    by_cpu = [torch.zeros_like(w) for w in weights]
    Kernels(schedule).unpack_rows_(by_kernel, target, packed)
    ops.unpack_rows_(by_cpu, target, packed)
    for got, expected, weight in zip(by_kernel, by_cpu, weights, strict=True):
        assert same_bits(got, expected)
        assert same_bits(got[target], weight[source])
        assert not got[[1, 3, 5]].view(torch.uint8).any()  # other rows are not touched


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_grads(schedule, dtype):
    torch.manual_seed(schedule.seed)
    for width in (1, 37, 600):
        out = torch.randn(4, width).to(dtype)
        rows = torch.randn(7, width, dtype=accumulator(dtype)) * 100
        offsets = torch.tensor([0, 3, 3, 4, 7])
        order = torch.tensor([6, 0, 2, 1, 5, 3, 4])
        expected = out.clone()
        ops.reduce_grads_(expected, rows, offsets, order)
        Kernels(schedule).reduce_grads_(out, rows, offsets, order)
        assert same_bits(out, expected)
