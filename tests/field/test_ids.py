# SPDX-License-Identifier: Apache-2.0
"""Faults with routed ids, padding, dtypes and strides."""

from __future__ import annotations

import pytest
import torch

import topoep
from topoep import Topology, ops

EXPERTS, RANKS, SPARE = 8, 4, 2


@pytest.fixture
def balancer() -> topoep.Balancer:
    return topoep.Balancer(Topology(2, 2), EXPERTS, SPARE)


def hot_ids(rank: int, tokens: int = 60) -> torch.Tensor:
    """Top-2 with distinct experts; three hot ones."""
    generator = torch.Generator().manual_seed(rank)
    first = torch.randint(0, 2, (tokens,), generator=generator)
    second = torch.randint(2, EXPERTS, (tokens,), generator=generator)
    return torch.stack([first, second], 1)


def logical_of(physical: torch.Tensor, plan: topoep.Plan) -> torch.Tensor:
    """The expert that each physical id holds."""
    home = torch.arange(EXPERTS, dtype=torch.int32).view(RANKS, -1)
    table = torch.cat([home, plan.slot_expert], 1).flatten().long()
    return table[physical.long()]


# https://github.com/PaddlePaddle/PaddleFleet/pull/1611
# https://github.com/ROCm/aiter/issues/4636
# https://github.com/flashinfer-ai/flashinfer/issues/4756
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_minus_one_padding(balancer, dtype):
    ids = [hot_ids(rank).to(dtype) for rank in range(RANKS)]
    padded = [torch.cat([i, torch.full((7, 2), -1, dtype=dtype)]) for i in ids]
    for tensor in padded:
        tensor[3] = -1
        tensor[5, 1] = -1
    trimmed = [i.clone() for i in padded]
    plan = balancer.plan(padded)
    assert int(plan.stats()["invalid"]) == 0
    assert int(plan.stats()["tokens"]) == sum(int((i >= 0).sum()) for i in padded)
    for before, after in zip(trimmed, balancer.reroute(padded, plan), strict=True):
        assert torch.equal(after == -1, before == -1)
        assert torch.equal(logical_of(after[before >= 0], plan), before[before >= 0].long())


# https://github.com/sgl-project/sglang/issues/28378
# https://github.com/sgl-project/sglang/pull/24850
# https://github.com/NVIDIA/Megatron-LM/issues/6403
@pytest.mark.parametrize("garbage", [EXPERTS, EXPERTS + 5, 2**30, -7, -(2**31)])
def test_garbage_padded_rows(balancer, garbage):
    """Out-of-range ids are counted as invalid, passed through, and disturb nothing."""
    clean = [hot_ids(rank) for rank in range(RANKS)]
    dirty = [torch.cat([i, torch.full((5, 2), garbage)]) for i in clean]
    plan, plain = balancer.plan(dirty), balancer.plan(clean)
    assert int(plan.stats()["invalid"]) == RANKS * 10
    assert torch.equal(plan.slot_expert, plain.slot_expert)
    rerouted = balancer.reroute(dirty, plan)
    for got, expected in zip(rerouted, balancer.reroute(clean, plain), strict=True):
        assert torch.equal(got[:-5], expected)
        assert (got[-5:] == garbage).all()


# https://github.com/ISEEKYAN/Megatron-LM/pull/175
def test_duplicate_id_in_row():
    """Both choices of the same expert are routed, weighted and counted."""
    layer = topoep.BalancedExperts(4, 6, 5, topology=Topology(1, 2), dtype=torch.float64)
    x = [torch.randn(3, 6, dtype=torch.float64), torch.randn(0, 6, dtype=torch.float64)]
    ids = [torch.tensor([[3, 3], [1, 1], [0, 2]]), torch.zeros(0, 2, dtype=torch.int64)]
    weights = [torch.rand(3, 2, dtype=torch.float64), torch.zeros(0, 2, dtype=torch.float64)]
    y = layer(x, ids, weights)[0]
    once = layer(x, [ids[0][:, :1], ids[1][:, :1]], [w.sum(1, keepdim=True) for w in weights])[0]
    torch.testing.assert_close(y[:2], once[:2], rtol=1e-12, atol=1e-12)
    counts, _ = ops.histogram(ids[0], 4)
    assert counts.tolist() == [1, 2, 1, 2]


# https://github.com/vllm-project/vllm/issues/48740
# https://github.com/vllm-project/vllm/issues/43680
def test_replicas_in_one_row_trip_dispatcher():
    """Every token takes all eight experts, all hot ones are copied: ids of a row stay distinct."""
    balancer = topoep.Balancer(Topology(2, 4), 8, 8, objective=topoep.Even())
    generator = torch.Generator().manual_seed(1)
    ids = [torch.rand(64 * (1 + 3 * (r == 0)), 8, generator=generator).argsort(1) for r in range(8)]
    for tensor in ids:
        tensor[::2, 4:] = -1  # uneven, so that there is something to balance
    plan = balancer.plan(ids)
    assert int(plan.stats()["copies"]) > 0
    for tensor in balancer.reroute(ids, plan):
        for row in tensor.tolist():
            chosen = [i for i in row if i >= 0]
            assert len(chosen) == len(set(chosen))


# https://github.com/vllm-project/vllm/issues/18343
def test_int32_int64(balancer):
    ids = [hot_ids(rank) for rank in range(RANKS)]
    wide = balancer.reroute(ids, balancer.plan(ids))
    narrow_ids = [i.int() for i in ids]
    narrow = balancer.reroute(narrow_ids, balancer.plan(narrow_ids))
    for a, b in zip(wide, narrow, strict=True):
        assert (a.dtype, b.dtype) == (torch.int64, torch.int32)
        assert torch.equal(a, b.long())
    for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
        with pytest.raises(TypeError, match=r"int32 or int64"):
            balancer.plan([i.to(dtype) for i in ids])


# https://github.com/sgl-project/sglang/issues/25882
# https://github.com/sgl-project/sglang/issues/27635
def test_cpu_path_not_remapped(balancer):
    """Eager and compiled give the same physical ids (tests/kernels compares the CUDA kernel)."""
    ids = [hot_ids(rank) for rank in range(RANKS)]
    plan = balancer.plan(ids)
    eager = balancer.reroute(ids, plan)
    assert any(not torch.equal(a, b) for a, b in zip(eager, ids, strict=True))
    row = plan.for_rank(1)

    def reroute(tensor):
        return ops.reroute(tensor, row.send, plan.copy_offsets, plan.copy_slots, RANKS)

    assert torch.equal(torch.compile(reroute, fullgraph=True)(ids[1]), eager[1])


# https://github.com/sgl-project/sglang/issues/31947
# https://github.com/sgl-project/sglang/issues/32001
# https://github.com/vllm-project/vllm/issues/50641
def test_non_contiguous(balancer):
    wide = [torch.stack([hot_ids(rank), hot_ids(rank).flip(1)], 2) for rank in range(RANKS)]
    strided = [w[..., 0] for w in wide]
    assert not strided[0].is_contiguous()
    dense = [s.contiguous() for s in strided]
    plan = balancer.plan(strided)
    assert torch.equal(plan.counts, balancer.plan(dense).counts)
    for a, b in zip(balancer.reroute(strided, plan), balancer.reroute(dense, plan), strict=True):
        assert torch.equal(a, b)
    weights = torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match=r"contiguous"):
        balancer.replicate([(weights.transpose(1, 2),)] * RANKS, plan)
    with pytest.raises(ValueError, match=r"contiguous"):
        balancer.replicate([(torch.randn(4, 3, 5)[::2],)] * RANKS, plan)


# https://github.com/NVIDIA/TensorRT-LLM/issues/14862
# https://github.com/vllm-project/vllm/issues/43316
def test_quant_scales(balancer):
    """Whatever belongs to an expert moves with it, byte for byte, scalars too."""
    generator = torch.Generator().manual_seed(3)
    plan = balancer.plan([hot_ids(rank) for rank in range(RANKS)])
    weights = [
        (
            torch.randint(0, 256, (2, 9, 7), generator=generator, dtype=torch.uint8),
            torch.randint(0, 256, (2, 5), generator=generator, dtype=torch.uint8),
            torch.randn(2, generator=generator),
            torch.randn(2, 3, generator=generator).to(torch.float8_e4m3fn),
        )
        for _ in range(RANKS)
    ]
    guests = balancer.replicate(weights, plan)
    copied = 0
    for rank, slots in enumerate(plan.slot_expert.tolist()):
        for slot, expert in enumerate(slots):
            if expert < 0:
                continue
            copied += 1
            for got, home in zip(guests[rank], weights[expert // 2], strict=True):
                one, at = slice(slot, slot + 1), slice(expert % 2, expert % 2 + 1)
                assert torch.equal(got[one].view(torch.uint8), home[at].view(torch.uint8))
    assert copied > 0


# https://github.com/sgl-project/sglang/issues/32962
def test_per_rank_choice_with_allreduce(balancer):
    """Tokens that all ranks hold, without a dispatch: one rank's row of the plan for everybody."""
    ids = hot_ids(0)
    empty = ids[:0]
    plan = balancer.plan([ids, empty, empty, empty])
    row = plan.for_rank(0)
    chosen = [
        ops.reroute(ids, row.send, plan.copy_offsets, plan.copy_slots, RANKS) for _ in range(RANKS)
    ]
    width = plan.config.slots_per_rank
    computed = sum((chosen[rank] // width == rank).int() for rank in range(RANKS))
    assert (computed == 1).all()
