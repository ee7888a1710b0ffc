# SPDX-License-Identifier: Apache-2.0
"""Faults with ranks and experts that get no tokens, subgroups, and single ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import topoep
from tests.distributed.ranks import run_ranks
from tests.distributed.test_experts import Setup, check, on_two_groups
from topoep import Topology


# https://github.com/sgl-project/sgl-kernel-npu/issues/69
# https://github.com/NVIDIA/Megatron-LM/issues/4851
# https://github.com/NVIDIA-NeMo/Automodel/pull/3680
@pytest.mark.parametrize("tokens", [[0, 24], [24, 0]], ids=str)
def test_rank_with_zero_tokens(tokens):
    """Forward and backward of two layers; equal to the dense model, nobody waits."""
    check(Setup([0, 1], 6, tokens, layers=2))


# https://github.com/pytorch/torchtitan/issues/1118
# https://github.com/pytorch/torchtitan/issues/1166
# https://github.com/pytorch/pytorch/issues/152668
def test_expert_with_zero_tokens():
    """Experts that nobody routes to, and empty slots, have zero gradients and no NaNs."""
    layer = topoep.BalancedExperts(8, 4, 4, topology=Topology(2, 2), spare_slots=2)
    ids = [torch.zeros(10 + r, 1, dtype=torch.int64) for r in range(4)]
    x = [torch.randn(len(i), 4, requires_grad=True) for i in ids]
    y = layer(x, ids, [torch.ones(i.shape) for i in ids])
    torch.autograd.backward([t.sum() for t in y])
    for parameter in layer.parameters():
        assert parameter.grad[0].abs().sum() > 0
        assert (parameter.grad[1:] == 0).all()
    assert all(bool(t.grad.isfinite().all()) for t in x)


# https://github.com/huggingface/transformers/issues/48205
# https://github.com/pytorch/pytorch/issues/193633
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_from_uninitialised_rows(dtype):
    """NaNs left in the spare slots reach neither outputs nor gradients: empty slots get no rows."""
    layer = topoep.BalancedExperts(8, 4, 4, topology=Topology(2, 2), spare_slots=2, dtype=dtype)
    ids = [torch.zeros(10 + r, 1, dtype=torch.int64) for r in range(4)]
    ids[2][::3] = -1
    x = [torch.randn(len(i), 4, dtype=dtype, requires_grad=True) for i in ids]
    weights = [torch.ones(i.shape) for i in ids]
    layer(x, ids, weights)
    for pool in layer.balancer._pools.values():
        for buffer in pool._buffers:
            for tensors in buffer.slots:
                for tensor in tensors:
                    tensor.fill_(float("nan"))
    for _ in range(2):
        y = layer(x, ids, weights)
        torch.autograd.backward([t.float().sum() for t in y])
        assert all(bool(t.isfinite().all()) for t in y)
    assert all(bool(t.grad.isfinite().all()) for t in x)
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


# https://github.com/vllm-project/vllm/issues/55804
# https://github.com/pytorch/pytorch/issues/187924
@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=str)
def test_subgroup_ranks(members):
    run_ranks(4, on_two_groups, members, Setup([0, 1], 4, [16, 20]))


def second_stage_only(rank: int) -> int:
    """Ranks 2 and 3 hold the MoE layers of a pipeline; 0 and 1 never hear of them."""
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank < 2:
        return 0
    layer = topoep.BalancedExperts(4, 4, 4, topology=Topology(1, 2), group=stages[1])
    ids = torch.zeros(8, 1, dtype=torch.int64)
    y = layer(torch.randn(8, 4), ids, torch.ones(8, 1))
    y.sum().backward()
    return len(y)


# https://github.com/vllm-project/vllm/issues/43339
# https://github.com/laekov/fastmoe/issues/58
# https://github.com/sgl-project/sglang/issues/6940
def test_pp_rank_without_moe():
    assert run_ranks(4, second_stage_only, timeout_s=30) == [0, 0, 8, 8]


# https://github.com/laekov/fastmoe/issues/110
@pytest.mark.parametrize("spare", [0, 1])
def test_one_expert_per_rank(spare):
    counts = torch.tensor([[9, 1, 1, 1]] * 4, dtype=torch.int32)
    plan = topoep.solve(counts, Topology(2, 2), spare, topoep.Even())
    plan.validate()
    assert int(plan.stats()["copies"]) == (0 if spare == 0 else 3)


def test_single_rank():
    layer = topoep.BalancedExperts(4, 4, 4, topology=Topology(1, 1), spare_slots=4)
    ids = torch.tensor([[0, 1], [0, 2]])
    plan = layer.balancer.plan([ids])
    assert int(plan.stats()["copies"]) == 0
    assert layer.balancer.reroute([ids], plan)[0].tolist() == ids.tolist()


# https://github.com/vllm-project/vllm/pull/52101
@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_full_capacity_dispatch(tokens):
    """Nothing is padded to a capacity: as many rows are computed as there are pairs."""
    layer = topoep.BalancedExperts(8, 4, 4, topology=Topology(2, 2), spare_slots=0)
    ids = [torch.arange(2 * tokens).view(tokens, 2) % 8 for _ in range(4)]
    computed = []
    layer.balancer.transport.all_to_all = _recording(layer.balancer.transport.all_to_all, computed)
    layer([torch.randn(tokens, 4)] * 4, ids, [torch.ones(tokens, 2)] * 4)
    assert computed == [4 * 2 * tokens] * 2  # dispatch and combine


def _recording(all_to_all, computed: list[int]):
    def recorded(rows, send, recv):
        computed.append(sum(len(part) for part in rows))
        return all_to_all(rows, send, recv)

    return recorded
