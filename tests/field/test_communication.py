# SPDX-License-Identifier: Apache-2.0
"""Faults in collectives: limits, order, disagreement, memory, and errors that get lost."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import topoep
from tests.distributed.ranks import RankError, run_ranks
from tests.distributed.test_transports import count_collectives
from topoep import Topology


# https://github.com/llnl/Aluminum/issues/75
# https://github.com/sgl-project/sglang/issues/7956
# https://github.com/sgl-project/sglang/issues/30829
def test_p2p_op_limit():
    """More copies than NCCL takes operations in one group: each arrives.

    Weights move in two all-to-alls of any size; no list of sends and receives is built. Every node
    routes to the experts of the next three nodes only, so each of those is copied to it.
    """
    node, home = torch.arange(256) // 8, torch.arange(1024) // 32
    distance = (home - node[:, None]) % 32
    counts = torch.where((distance > 0) & (distance < 4), 300, 0).to(torch.int32)
    cost = topoep.CostModel.from_model(4096, 64, "bfloat16", "H100")
    balancer = topoep.Balancer(
        Topology(32, 8),
        1024,
        16,
        objective=topoep.Time(cost),
        candidates=[topoep.Candidate("mean+0%", "H22112l")],
    )
    plan = balancer.plan_from_counts(counts)
    weights = [(torch.arange(4 * r, 4 * r + 4, dtype=torch.int32)[:, None],) for r in range(256)]
    guests = torch.stack([tensors[0] for tensors in balancer.replicate(weights, plan)])
    used = plan.slot_expert >= 0
    assert int(used.sum()) > 2048
    assert torch.equal(guests[used].flatten(), plan.slot_expert[used])


# https://github.com/deepseek-ai/DeepEP/issues/496
# https://github.com/NVIDIA/nccl/issues/195
# https://github.com/NVIDIA/nccl/issues/208
# https://github.com/vllm-project/vllm/issues/32860
# https://github.com/vllm-project/vllm/issues/44978
def test_two_communicators_order():
    """Every rank issues the same collectives in the same order whatever its tokens are."""
    by_rank = run_ranks(4, count_collectives, [0, 4, 9, 1])
    assert all(step == by_rank[0][0] for steps in by_rank for step in steps)


def corrupt_one_rank(rank: int, what: str) -> str:
    balancer = topoep.Balancer(Topology(2, 2), 8, 2, group=dist.group.WORLD)
    counts = torch.full((4, 8), 10, dtype=torch.int32)
    counts[:, 0] = 90
    if what == "counts" and rank == 2:
        counts[1, 3] += 1
    ids = torch.full((4, 1), 8 if what == "ids" and rank == 2 else 0)
    try:
        balancer.plan(ids) if what == "ids" else balancer.plan_from_counts(counts)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("counts", "ranks 0 and 2 have different token counts"),
        ("ids", r"4 routed ids of rank 2 are neither -1 nor an expert \(0 to 7\)"),
        ("nothing", "^$"),
    ],
)
def test_ranks_disagree(what, message, monkeypatch):
    """In debug mode every rank gets the error, before anything is sent by a wrong plan."""
    monkeypatch.setenv("TOPOEP_DEBUG", "1")
    for text in run_ranks(4, corrupt_one_rank, what, timeout_s=30):
        assert re.search(message, text)


class LostLinkError(Exception):
    pass


# https://github.com/vllm-project/vllm/issues/57883
@pytest.mark.parametrize("stage", ["exchange", "start_replicate", "start_all_to_all"])
def test_silently_stops(stage, monkeypatch):
    """A stage that fails is an error of the call; the step after it balances as before."""
    layer = topoep.BalancedExperts(8, 4, 4, topology=Topology(2, 2))
    ids = [torch.zeros(6, 1, dtype=torch.int64)] * 4
    arguments = ([torch.randn(6, 4)] * 4, ids, [torch.ones(6, 1)] * 4)
    before = layer.balancer.num_plans
    expected = layer(*arguments)

    def fail(*_):
        raise LostLinkError

    with monkeypatch.context() as patch:
        patch.setattr(layer.balancer.transport, stage, fail)
        with pytest.raises(LostLinkError):
            layer(*arguments)
    again = layer(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert layer.balancer.num_plans == before + (2 if stage == "exchange" else 3)


# https://github.com/vllm-project/vllm/issues/25597
# https://github.com/vllm-project/vllm/issues/24537
# https://github.com/vllm-project/vllm/issues/57894
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_oom_in_rearrange(spare):
    """Spare slots take the bytes that the README says, for any number of layers."""
    balancer = topoep.Balancer(Topology(2, 2), 8, spare)
    layers = [topoep.BalancedExperts(8, 16, 12, balancer=balancer) for _ in range(3)]
    ids = [torch.zeros(6, 1, dtype=torch.int64)] * 4
    for layer in layers:
        layer([torch.randn(6, 16)] * 4, ids, [torch.ones(6, 1)] * 4)
    bytes_of_expert = sum(p[0].numel() * p.element_size() for p in layers[0].parameters())
    held = sum(
        tensor.untyped_storage().nbytes()
        for pool in balancer._pools.values()
        for buffer in pool._buffers
        for tensors in buffer.slots
        for tensor in tensors
    )
    assert held == 4 * spare * bytes_of_expert  # of four simulated ranks


def one_rank_dies(rank: int) -> None:
    layer = topoep.BalancedExperts(8, 4, 4, topology=Topology(2, 2), group=dist.group.WORLD)
    ids = torch.zeros(6, 1, dtype=torch.int64)
    if rank == 3:
        raise MemoryError("the machine is full")
    layer(torch.randn(6, 4), ids, torch.ones(6, 1))


# https://github.com/vllm-project/vllm/issues/41204: a lost rank ends the job, with its reason.
def test_lost_rank():
    with pytest.raises(RankError):
        run_ranks(4, one_rank_dies, timeout_s=30)
