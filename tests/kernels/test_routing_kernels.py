# SPDX-License-Identifier: Apache-2.0
"""The histogram and reroute kernels equal their CPU forms, under every schedule."""

from __future__ import annotations

import pytest
import torch

import topoep
from tests.emulation.harness import SCHEDULES
from tests.kernels.kernels import Kernels
from topoep import ops


def random_ids(tokens: int, top_k: int, experts: int, dtype: torch.dtype, seed: int):
    """Skewed ids with padding, duplicates in a row and ids out of range."""
    generator = torch.Generator().manual_seed(seed)
    skew = torch.rand(tokens, top_k, generator=generator) ** 3
    ids = (skew * experts).to(dtype)
    odd = torch.rand(tokens, top_k, generator=generator)
    ids[odd < 0.08] = -1
    ids[(odd > 0.08) & (odd < 0.1)] = experts
    ids[(odd > 0.1) & (odd < 0.11)] = -7
    ids[(odd > 0.11) & (odd < 0.12)] = 2**31 - 1
    if dtype == torch.int64 and tokens > 1:
        ids[0, 0], ids[1, 0] = 2**63 - 1, -(2**63)
    return ids


def check_histogram(kernels: Kernels, ids: torch.Tensor, experts: int) -> None:
    for got, expected in zip(
        kernels.histogram(ids, experts), ops.histogram(ids, experts), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_histogram_under_every_schedule(schedule, dtype):
    ids = random_ids(700, 4, 24, dtype, schedule.seed)
    check_histogram(Kernels(schedule), ids, 24)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(0, 1, 1), (1, 1, 1), (5, 3, 7), (3, 64, 128), (17, 2, 1024), (33, 5, 1025), (9, 2, 4096)],
)
def test_histogram_shapes(dtype, tokens, top_k, experts):
    check_histogram(Kernels(), random_ids(tokens, top_k, experts, dtype, 1), experts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_histogram_of_ids_that_are_not_aligned_to_a_vector(dtype, skipped):
    ids = random_ids(200, 1, 9, dtype, 5)[skipped:]
    check_histogram(Kernels(), ids, 9)


def make_plan(nodes: list[int], ids: torch.Tensor, experts: int, spare: int) -> topoep.Plan:
    """A plan for ids of rank 0 and random counts of the others."""
    generator = torch.Generator().manual_seed(11)
    counts = torch.randint(0, 60, (len(nodes), experts), generator=generator, dtype=torch.int32)
    counts[:, 0] += 500
    counts[0] = ops.histogram(ids, experts)[0]
    return topoep.solve(counts, topoep.Topology(node_of_rank=nodes), spare, rank=0)


def check_reroute(kernels: Kernels, ids: torch.Tensor, plan: topoep.Plan) -> None:
    before = ids.clone()
    expected = ops.reroute(
        ids, plan.send, plan.copy_offsets, plan.copy_slots, plan.config.num_ranks
    )
    assert torch.equal(kernels.reroute(ids, plan), expected)
    assert torch.equal(ids, before)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reroute_under_every_schedule(schedule, dtype):
    ids = random_ids(900, 3, 12, dtype, schedule.seed)
    plan = make_plan([0, 1, 0, 1], ids, 12, 2)
    assert plan.stats()["copies"] > 0
    check_reroute(Kernels(schedule), ids, plan)


@pytest.mark.parametrize(
    ("nodes", "tokens", "top_k", "experts", "spare"),
    [
        ([0, 1], 0, 2, 4, 1),
        ([0, 1], 1, 1, 2, 1),
        ([0, 0], 31, 1, 8, 2),
        ([0, 1, 2, 3], 40, 64, 64, 2),
        ([0], 50, 2, 6, 2),
        ([0, 1], 64, 2, 8, 0),
        ([0, 0, 1, 1], 300, 2, 2052, 3),
    ],
)
def test_reroute_shapes(nodes, tokens, top_k, experts, spare):
    ids = random_ids(tokens, top_k, experts, torch.int64, 3)
    check_reroute(Kernels(), ids, make_plan(nodes, ids, experts, spare))


def test_tokens_beyond_the_quotas_go_home():
    ids = random_ids(400, 2, 8, torch.int32, 7)
    plan = make_plan([0, 0, 1, 1], ids, 8, 2)
    check_reroute(Kernels(), torch.cat([ids, ids]), plan)


def test_one_block_and_many_give_the_same_ids():
    ids = random_ids(5000, 2, 8, torch.int64, 9)
    plan = make_plan([0, 0, 1, 1], ids, 8, 2)
    for num_sms in (1, 2, 7):
        check_reroute(Kernels(num_sms=num_sms), ids, plan)
