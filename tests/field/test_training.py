# SPDX-License-Identifier: Apache-2.0
"""Faults in gradients, recomputation, microbatches in flight, and stale copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import topoep
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import dense_layer
from tests.distributed.test_experts import Setup, check
from tests.distributed.test_transports import collectives_of_a_recomputation
from topoep import Topology

RANKS, EXPERTS, HIDDEN = 4, 8, 6


def make_layer(**options) -> topoep.BalancedExperts:
    torch.manual_seed(0)
    return topoep.BalancedExperts(
        EXPERTS, HIDDEN, 5, topology=Topology(2, 2), dtype=torch.float64, **options
    )


def batch(seed: int, tokens: int = 12) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs, ids, weights = [], [], []
    for _ in range(RANKS):
        first = torch.randint(0, 2, (tokens, 1), generator=generator)
        second = torch.randint(2, EXPERTS, (tokens, 1), generator=generator)
        ids.append(torch.cat([first, second], 1))
        weights.append(torch.rand(tokens, 2, generator=generator, dtype=torch.float64))
        xs.append(torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64))
    return xs, ids, weights


class WritesMainGrad(torch.autograd.Function):
    """A linear layer whose weight gradient goes to ``main_grad``; autograd sees zeros."""

    @staticmethod
    def forward(ctx, x, weight, main_grad):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.main_grad += grad.t() @ x
        return grad @ weight, torch.zeros_like(weight), None


# https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6009
# https://github.com/NVIDIA/Megatron-LM/issues/7318
# https://github.com/NVIDIA/Megatron-LM/issues/565
def test_fused_wgrad_dummy_grad():
    """Gradients that bypass autograd come home through reduce_grads."""
    balancer = topoep.Balancer(Topology(2, 2), EXPERTS, 2)
    xs, ids, _ = batch(0)
    ids = [i[:, :1] for i in ids]
    plan = balancer.plan(ids)
    assert int(plan.stats()["copies"]) > 0
    weights = torch.randn(EXPERTS, 3, HIDDEN, dtype=torch.float64)
    home = [(w,) for w in weights.split(2)]
    guests = balancer.replicate(home, plan)
    main = [torch.zeros(2, 3, HIDDEN, dtype=torch.float64) for _ in range(RANKS)]
    extra = [torch.zeros(2, 3, HIDDEN, dtype=torch.float64) for _ in range(RANKS)]
    for rank in range(RANKS):
        physical = balancer.reroute(ids, plan)[rank][:, 0]
        for token, place in enumerate(physical.tolist()):
            owner, slot = divmod(place, plan.config.slots_per_rank)
            own = home[owner][0] if slot < 2 else guests[owner][0]
            into = main[owner] if slot < 2 else extra[owner]
            x = xs[rank][token : token + 1].clone().requires_grad_()
            weight = own[slot % 2].clone().requires_grad_()
            WritesMainGrad.apply(x, weight, into[slot % 2]).sum().backward()
    assert any(bool(e.any()) for e in extra)
    balancer.reduce_grads([(e,) for e in extra], plan, out=[(m,) for m in main])
    expected = torch.zeros_like(weights)
    for rank in range(RANKS):
        for token, expert in enumerate(ids[rank][:, 0].tolist()):
            expected[expert] += torch.ones(3, 1, dtype=torch.float64) * xs[rank][token]
    torch.testing.assert_close(torch.cat(main), expected, rtol=1e-12, atol=1e-12)
    assert not any(bool(e.any()) for e in extra), "the slots are ready for the next microbatch"


# https://github.com/invergent-ai/surogate/pull/65
# https://github.com/huggingface/transformers/issues/48205
def test_missing_expert_grads():
    """Finite differences of the whole layer: inputs, router weights and expert weights."""
    layer = make_layer()
    xs, ids, weights = batch(1, tokens=2)

    def run(*tensors):
        x, w = tensors[:RANKS], tensors[RANKS : 2 * RANKS]
        state = {"gate_up_proj": tensors[-2], "down_proj": tensors[-1]}
        y = torch.func.functional_call(layer, state, (list(x), ids, list(w)))
        return torch.cat(y)

    inputs = [*xs, *weights, layer.gate_up_proj.detach(), layer.down_proj.detach()]
    inputs = [t.clone().requires_grad_() for t in inputs]
    assert int(layer.balancer.plan(ids).stats()["copies"]) > 0
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


# https://github.com/databricks/megablocks/pull/20
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_grad_scaling(ranks):
    """Gradients are sums over tokens, whatever the number of ranks: scaling is the framework's."""
    torch.manual_seed(0)
    layer = topoep.BalancedExperts(4, 4, 3, topology=Topology(1, ranks), dtype=torch.float64)
    x = torch.ones(8, 4, dtype=torch.float64)
    ids = torch.zeros(8, 1, dtype=torch.int64)
    parts = [t.chunk(ranks) for t in (x, ids, torch.ones(8, 1, dtype=torch.float64))]
    torch.autograd.backward([y.sum() for y in layer(*map(list, parts))])
    one = topoep.BalancedExperts(4, 4, 3, topology=Topology(1, 1), dtype=torch.float64)
    one.load_state_dict(layer.state_dict())
    one([x[:1]], [ids[:1]], [torch.ones(1, 1, dtype=torch.float64)])[0].sum().backward()
    torch.testing.assert_close(layer.down_proj.grad, 8 * one.down_proj.grad, rtol=1e-12, atol=0)


# https://github.com/NVIDIA/Megatron-LM/pull/5916
# https://github.com/NVIDIA/Megatron-LM/pull/6470
# https://github.com/deepspeedai/DeepSpeed/pull/8478
def test_grad_norm_counts_replicas():
    layer = make_layer()
    xs, ids, weights = batch(2)
    torch.autograd.backward([y.sum() for y in layer(xs, ids, weights)])
    norm = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
    dense = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    for x, i, w in zip(xs, ids, weights, strict=True):
        dense_layer(x, i, w, *dense).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in dense])
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    assert [name for name, _ in layer.named_parameters()] == ["gate_up_proj", "down_proj"]


# https://github.com/NVIDIA-NeMo/Automodel/issues/3140
# https://github.com/NVIDIA-NeMo/Automodel/issues/3156
# https://github.com/NVIDIA-NeMo/Automodel/issues/2635
def test_recompute_topk_flip():
    """A router that chooses otherwise the second time is an error that says so."""
    balancer = topoep.Balancer(Topology(2, 2), EXPERTS, 2)
    _, ids, _ = batch(3)
    calls = []

    def noisy(x):
        calls.append(1)
        balancer.plan(ids if len(calls) == 1 else [i.flip(0) for i in ids])
        return x.sin()

    y = checkpoint(noisy, torch.ones(2, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="routes tokens as no forward pass in flight did"):
        y.sum().backward()


# https://github.com/invergent-ai/surogate/pull/65
def test_replan_in_recompute():
    for plain, recomputed in run_ranks(4, collectives_of_a_recomputation):
        assert recomputed.count("all_gather_single") == plain.count("all_gather_single") == 1


# https://github.com/NVIDIA-NeMo/Automodel/pull/3247
def test_double_count_on_recompute():
    """A recomputed layer sees the plan of its forward: statistics are those of one pass."""
    layer = make_layer()
    xs, ids, weights = batch(4)
    plans = []
    make_plan = layer.balancer.plan

    def counting(topk_ids, **options):
        plans.append(make_plan(topk_ids, **options))
        return plans[-1]

    layer.balancer.plan = counting
    y = checkpoint(lambda: torch.cat(layer(xs, ids, weights)), use_reentrant=False)
    y.sum().backward()
    assert len(plans) == 2
    assert plans[0].token == plans[1].token
    assert int(plans[1].stats()["tokens"]) == sum(i.numel() for i in ids)


# https://github.com/areal-project/AReaL/pull/1166
@pytest.mark.parametrize("policy", ["refetch", "keep"])
def test_microbatch_slot_wrap(policy):
    """Five microbatches in flight; no maximum is configured, so none can be exceeded."""
    check(Setup([0, 0, 1, 1], 8, [18, 25, 0, 9], microbatches=5, policy=policy))


# https://github.com/deepseek-ai/EPLB/issues/10
# https://github.com/InternLM/xtuner/pull/2050
@pytest.mark.parametrize("policy", ["refetch", "keep"])
def test_stale_replica_in_backward(policy):
    """Backward of the first layer, whose copies the second one has overwritten."""
    check(Setup([0, 0, 1, 1], 8, [18, 25, 0, 9], layers=2, policy=policy))


# https://github.com/deepseek-ai/EPLB/issues/10: the same without release() is refused.
def test_stale_replica_without_release():
    balancer = topoep.Balancer(Topology(2, 2), EXPERTS, 2)
    weights = [(torch.randn(2, 3, requires_grad=True),) for _ in range(RANKS)]
    kept = balancer.replicate(weights, balancer.plan(batch(5)[1]))
    with pytest.raises(RuntimeError, match="still hold the copies of another plan"):
        balancer.replicate(weights, balancer.plan(batch(6)[1]))
    assert len(kept) == RANKS


# https://github.com/PaddlePaddle/PaddleFormers/issues/3010
# https://github.com/NVIDIA-NeMo/Automodel/pull/3680
def test_empty_breaks_autograd():
    layer = make_layer()
    xs = [torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(RANKS)]
    ids = [torch.zeros(0, 2, dtype=torch.int64)] * RANKS
    ys = layer(xs, ids, [torch.zeros(0, 2, dtype=torch.float64)] * RANKS)
    assert all(y.grad_fn is not None and y.shape == (0, HIDDEN) for y in ys)
    torch.autograd.backward([y.sum() for y in ys])
    assert all(x.grad is not None and x.grad.shape == x.shape for x in xs)
    assert all(not p.grad.any() for p in layer.parameters())


# https://github.com/vllm-project/vllm/issues/28377
def test_shared_expert_overlap():
    """A shared expert computed between the routed ones' forward and backward changes nothing."""
    layer = make_layer()
    shared = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    xs, ids, weights = batch(7)
    xs = [x.requires_grad_() for x in xs]
    routed = layer(xs, ids, weights)
    torch.autograd.backward([(y + shared(x)).sum() for x, y in zip(xs, routed, strict=True)])
    for x, i, w in zip(xs, ids, weights, strict=True):
        alone = x.detach().clone().requires_grad_()
        (dense_layer(alone, i, w, *layer.parameters()) + shared(alone)).sum().backward()
        torch.testing.assert_close(x.grad, alone.grad, rtol=1e-10, atol=1e-10)
