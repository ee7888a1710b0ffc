# SPDX-License-Identifier: Apache-2.0
"""Megatron's own MoE layer, with and without TopoEP, on forked ranks."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import topoep
from tests.distributed.ranks import run_ranks
from tests.frameworks import megatron_cpu as mc
from tests.frameworks.environment import require
from tests.frameworks.plans import force, no_copies, random_copies

require("megatron.core.models.gpt.moe_module_specs")

from topoep.adapters import megatron as adapter  # noqa: E402

CHOOSERS = {"none": lambda: no_copies, "random": lambda: random_copies(7)}


def balancer_of(layer) -> topoep.Balancer:
    return layer.token_dispatcher.topoep.balancer


def count_guest_rows(layer) -> list[list[int]]:
    """For every forward pass from now on the rows that each spare slot of this rank computes."""
    rows: list[list[int]] = []
    guests = layer.experts.topoep._guests
    guests.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[1].tolist()))
    return rows


def gradients(layer) -> dict[str, torch.Tensor]:
    """Of the logical parameters: what an optimizer would use."""
    return {
        name: p.grad if getattr(p, "main_grad", None) is None else p.main_grad
        for name, p in layer.named_parameters()
    }


def pair(rank: int, ep: int, plan: str, spare: int, **options):
    """Two equal layers, one of them balanced with the plans of a chooser."""
    nodes = topoep.Topology(node_of_rank=[r * 2 // ep for r in range(ep)])
    plain, balanced = (mc.moe_layer(mc.config(ep, **options)) for _ in range(2))
    assert adapter.enable(balanced, spare, topology=nodes) == 1
    if spare:
        force(balancer_of(balanced), CHOOSERS[plan]())
    return plain, balanced


def run(layer, x: torch.Tensor, grad_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    y.backward(grad_y)
    return y.detach(), x.grad


def compare(plain, balanced, exact: bool) -> None:
    """Gradients: equal bits, or copies summed in another order than one GEMM does."""
    wanted, got = gradients(plain), gradients(balanced)
    assert wanted.keys() == got.keys()
    for name in wanted:
        if exact or "expert" not in name:
            assert torch.equal(wanted[name], got[name]), name
        else:
            error = (got[name] - wanted[name]).abs().max() / wanted[name].abs().max()
            assert error <= 1e-6, f"{name}: {error}"


def layer_steps(rank: int, ep: int, dispatcher: str, plan: str, spare: int) -> None:
    mc.start(ep)
    plain, balanced = pair(rank, ep, plan, spare, moe_token_dispatcher_type=dispatcher)
    planned = force(balancer_of(balanced), CHOOSERS[plan]()) if spare else []
    computed = count_guest_rows(balanced) if spare else []
    for microbatch in range(3):
        x = mc.tokens(rank, microbatch)
        grad_y = torch.randn(x.shape, generator=torch.Generator().manual_seed(microbatch + rank))
        (y0, dx0), (y1, dx1) = (run(layer, x, grad_y) for layer in (plain, balanced))
        assert torch.equal(y0, y1)
        assert torch.equal(dx0, dx1)
    compare(plain, balanced, exact=plan == "none")
    assert computed == [p.slot_tokens[rank].tolist() for p in planned], "copies serve their tokens"
    assert any(p.slot_tokens.any() for p in planned) == (plan == "random")


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize(("plan", "spare"), [("none", 0), ("none", 2), ("random", 2)])
def test_layer_equals_the_untouched_one(ep, dispatcher, plan, spare):
    run_ranks(ep, layer_steps, ep, dispatcher, plan, spare)


def data_parallel(layer: torch.nn.Module, cfg, overlap: bool):
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        bucket_size=1000 if overlap else None,  # several buckets
    )
    return DistributedDataParallel(cfg, ddp, layer)


def main_grads(rank: int, ep: int, plan: str, overlap: bool, after_wrapping: bool) -> None:
    mc.start(ep)
    cfg = mc.config(ep)
    plain, balanced = (mc.moe_layer(cfg) for _ in range(2))
    topology = topoep.Topology(num_nodes=1, ranks_per_node=ep)
    if not after_wrapping:
        adapter.enable(balanced, topology=topology)
    models = [data_parallel(layer, cfg, overlap) for layer in (plain, balanced)]
    if after_wrapping:
        adapter.enable(models[1], topology=topology)
    force(balancer_of(balanced), CHOOSERS[plan]())
    for _ in range(2):
        for model in models:
            model.zero_grad_buffer()
            inputs = [mc.tokens(rank, microbatch) for microbatch in range(3)]
            with model.no_sync():
                for x in inputs[:-1]:
                    run(model, x, x.flip(0) / x.numel())
            run(model, inputs[-1], inputs[-1].flip(0) / inputs[-1].numel())
            if not overlap:
                model.start_grad_sync()
            model.finish_grad_sync()
            assert all(p.grad is None for p in model.parameters())
        compare(plain, balanced, exact=plan == "none")


@pytest.mark.parametrize("after_wrapping", [False, True], ids=["enabled-first", "wrapped-first"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("plan", CHOOSERS)
def test_main_grads_hold_the_gradients_of_copies_before_they_are_reduced(
    plan, overlap, after_wrapping
):
    run_ranks(4, main_grads, 2, plan, overlap, after_wrapping)


ROUTERS = {
    "aux-loss": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.1, 0.1],
        "moe_z_loss_coeff": 0.01,
    },
    "expert-bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.1,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "group-limited": {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "dropping": {"moe_expert_capacity_factor": 1.0},
    "one-expert": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
    },
    "bias": {"add_bias_linear": True},
}


def routers(rank: int, ep: int, kind: str, dispatcher: str) -> None:
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    mc.start(ep)
    options = {"moe_token_dispatcher_type": dispatcher, **ROUTERS[kind]}
    plain, balanced = pair(rank, ep, "random", 2, **options)
    for microbatch in range(3):
        x = mc.tokens(rank, microbatch)
        outputs = [run(layer, x, x.flip(0) / x.numel()) for layer in (plain, balanced)]
        assert all(one.equal(other) for one, other in zip(*outputs, strict=True))
        if kind == "expert-bias":
            counts = [layer.router.local_tokens_per_expert for layer in (plain, balanced)]
            assert counts[1].sum() == 2 * x.shape[0] * x.shape[1]
            assert counts[0].equal(counts[1])
            for layer, count in zip((plain, balanced), counts, strict=True):
                bias = layer.router.expert_bias
                bias.copy_(get_updated_expert_bias(count, bias, 0.1))
                count.zero_()
    assert plain.state_dict().keys() == balanced.state_dict().keys()
    for one, other in zip(plain.buffers(), balanced.buffers(), strict=True):
        assert one.equal(other)
    compare(plain, balanced, exact=False)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("kind", ROUTERS)
def test_routers_see_logical_experts(kind, dispatcher):
    run_ranks(4, routers, 4, kind, dispatcher)


def route_nothing() -> None:
    """Lets Megatron's router run without tokens, which one line of it cannot."""
    from megatron.core.transformer.moe import router

    router.router_gating_linear = lambda x, weight, bias, dtype: F.linear(x, weight, bias)


def ragged(rank: int, lengths: list[int]) -> None:
    """Ranks with other numbers of tokens, and without any."""
    mc.start(4)
    route_nothing()
    plain, balanced = pair(rank, 4, "random", 2)
    for microbatch in range(2):
        x = mc.tokens(rank, microbatch, length=lengths[(rank + microbatch) % 4])
        (y0, dx0), (y1, dx1) = (run(layer, x, x.cos()) for layer in (plain, balanced))
        assert torch.equal(y0, y1)
        assert torch.equal(dx0, dx1)
    compare(plain, balanced, exact=False)


@pytest.mark.parametrize("lengths", [[200, 0, 120, 160], [300, 0, 0, 0]])
def test_ranks_without_tokens(lengths):
    run_ranks(4, ragged, lengths)


def no_tokens_at_all(rank: int) -> None:
    mc.start(2)
    route_nothing()
    _, balanced = pair(rank, 2, "random", 2)
    x = mc.tokens(rank, 0, length=0).requires_grad_()
    y, _ = balanced(x)
    y.sum().backward()
    assert all(not p.grad.any() for p in balanced.experts.parameters())


def test_no_tokens_on_any_rank():
    run_ranks(2, no_tokens_at_all)


def idle_experts(rank: int) -> None:
    """A rank none of whose experts is used, by any rank."""
    mc.start(4)
    plain, balanced = pair(rank, 4, "random", 2, **ROUTERS["expert-bias"])
    for layer in (plain, balanced):
        layer.router.expert_bias[2:4] = -10
    x = mc.tokens(rank)
    (y0, dx0), (y1, dx1) = (run(layer, x, x.cos()) for layer in (plain, balanced))
    assert torch.equal(y0, y1)
    assert torch.equal(dx0, dx1)
    assert not plain.router.local_tokens_per_expert[2:4].any()
    for name, grad in gradients(plain).items():
        assert (gradients(balanced)[name] - grad).abs().max() <= 1e-6 * grad.abs().max()


def test_a_rank_whose_experts_are_not_used():
    run_ranks(4, idle_experts)


def many_experts_per_token(rank: int) -> None:
    """More than two: Megatron adds a token's outputs in the order of the physical experts."""
    mc.start(4)
    plain, balanced = pair(rank, 4, "random", 2, moe_router_topk=4)
    x = mc.tokens(rank)
    (y0, dx0), (y1, dx1) = (run(layer, x, x.cos() / x.numel()) for layer in (plain, balanced))
    torch.testing.assert_close(y1, y0, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx1, dx0, rtol=1e-5, atol=1e-7)
    assert not torch.equal(y1, y0), "if this fails, docs/integration.md promises too little"


def test_more_than_two_experts_per_token_are_added_in_another_order():
    run_ranks(4, many_experts_per_token)


def frozen(rank: int, which: str) -> None:
    mc.start(4)
    plain, balanced = pair(rank, 4, "random", 2)
    for layer in (plain, balanced):
        for name, parameter in layer.named_parameters():
            if which in name:
                parameter.requires_grad_(False)
    x = mc.tokens(rank)
    (y0, dx0), (y1, dx1) = (run(layer, x, x.cos() / x.numel()) for layer in (plain, balanced))
    assert torch.equal(y0, y1)
    assert torch.equal(dx0, dx1)
    for (name, one), (_, other) in zip(
        plain.named_parameters(), balanced.named_parameters(), strict=True
    ):
        assert (one.grad is None) == (other.grad is None) == (which in name)
        if one.grad is not None:
            assert (one.grad - other.grad).abs().max() <= 1e-6 * one.grad.abs().max()


@pytest.mark.parametrize("which", ["experts", "linear_fc1", "router"])
def test_frozen_parameters(which):
    run_ranks(4, frozen, which)


def some_frozen(rank: int) -> str:
    mc.start(2)
    _, balanced = pair(rank, 2, "random", 2)
    balanced.experts.local_experts[1].linear_fc1.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="weight of some experts of a layer is frozen"):
        balanced(mc.tokens(rank))


def test_some_experts_frozen_is_an_error():
    run_ranks(2, some_frozen)


def options(rank: int, changes: dict) -> None:
    """Options of the balancer reach it, and results stay the same."""
    mc.start(2)
    plain, balanced = (mc.moe_layer(mc.config(2)) for _ in range(2))
    adapter.enable(balanced, 1, **changes)
    assert balancer_of(balanced).spare_slots == 1
    force(balancer_of(balanced), random_copies(2))
    flying = []
    for layer in (plain, balanced):
        flying.append([layer(mc.tokens(rank, i).requires_grad_())[0] for i in range(2)])
        for y in reversed(flying[-1]):
            (y.cos().sum() / y.numel()).backward()
    assert all(one.equal(other) for one, other in zip(*flying, strict=True))
    compare(plain, balanced, exact=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"replica_policy": "keep"},
        {"slot_buffers": 2},
        {"solver": "taot"},
        {"objective": topoep.Balance(0.2)},
    ],
    ids=str,
)
def test_options_of_the_balancer(changes):
    run_ranks(2, options, changes)


def lower_precision(rank: int) -> None:
    """bf16 parameters, fp32 main_grad; enabled in fp32, as when a model is converted later."""
    mc.start(2)
    cfg = mc.config(2)
    plain, balanced = (mc.moe_layer(cfg) for _ in range(2))
    adapter.enable(balanced)
    force(balancer_of(balanced), random_copies(2))
    for layer in (plain, balanced):
        run(layer, mc.tokens(rank), mc.tokens(rank, 1))
        layer.zero_grad()
        layer.bfloat16()
    models = [data_parallel(layer, cfg, True) for layer in (plain, balanced)]
    x = mc.tokens(rank).bfloat16()
    for model in models:
        model.zero_grad_buffer()
    outputs = [run(model, x, x.flip(0) / x.numel()) for model in models]
    assert all(one.equal(other) for one, other in zip(*outputs, strict=True))
    for model in models:
        model.finish_grad_sync()
    for (name, one), (_, other) in zip(
        plain.named_parameters(), balanced.named_parameters(), strict=True
    ):
        assert other.main_grad.dtype == torch.float32
        error = (other.main_grad - one.main_grad).abs().max() / one.main_grad.abs().max()
        assert error <= 4e-3, f"{name}: {error}"  # half a unit in the last place of bf16


def test_lower_precision():
    run_ranks(4, lower_precision)


def shared_experts(rank: int, overlap: bool) -> None:
    mc.start(2)
    options = {
        "moe_shared_expert_intermediate_size": mc.WIDTH,
        "moe_shared_expert_overlap": overlap,
    }
    plain, balanced = pair(rank, 2, "random", 2, **options)
    for (_, one), (_, other) in zip(
        plain.shared_experts.named_parameters(),
        balanced.shared_experts.named_parameters(),
        strict=True,
    ):
        other.data.copy_(one.data)
    x = mc.tokens(rank)
    outputs = [run(layer, x, x.cos() / x.numel()) for layer in (plain, balanced)]
    assert all(one.equal(other) for one, other in zip(*outputs, strict=True))
    compare(plain, balanced, exact=False)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_shared_experts(overlap):
    run_ranks(2, shared_experts, overlap)


def one_expert_per_rank(rank: int) -> None:
    mc.start(4)
    plain, balanced = pair(rank, 4, "random", 2, num_moe_experts=4)
    x = mc.tokens(rank)
    outputs = [run(layer, x, x.cos() / x.numel()) for layer in (plain, balanced)]
    assert all(one.equal(other) for one, other in zip(*outputs, strict=True))
    compare(plain, balanced, exact=False)


def test_one_expert_per_rank():
    run_ranks(4, one_expert_per_rank)


def plans_are_let_go(rank: int) -> None:
    """Nothing keeps a plan, and with it a graph, once its backward has run."""
    mc.start(2)
    layer = mc.moe_layer(mc.config(2))
    plans = []
    adapter.enable(layer, on_plan=lambda layer, plan: plans.append(weakref.ref(plan)))
    for microbatch in range(3):
        run(layer, mc.tokens(rank, microbatch), mc.tokens(rank, microbatch))
    gc.collect()
    assert len(plans) == 3
    assert [ref() for ref in plans] == [None] * 3


def test_plans_are_let_go():
    run_ranks(2, plans_are_let_go)


def plan_on_the_device(rank: int, plan: str) -> None:
    """What is done where the host does not know the plan: all home experts are staged."""
    from topoep.adapters.megatron import slots

    slots.HOST_TRANSPORTS = ()
    mc.start(2)
    plain, balanced = pair(rank, 2, plan, 2)
    for microbatch in range(2):
        x = mc.tokens(rank, microbatch)
        outputs = [run(layer, x, x.cos() / x.numel()) for layer in (plain, balanced)]
        assert all(one.equal(other) for one, other in zip(*outputs, strict=True))
    compare(plain, balanced, exact=plan == "none")


@pytest.mark.parametrize("plan", CHOOSERS)
def test_transports_that_leave_the_plan_on_the_device(plan):
    run_ranks(2, plan_on_the_device, plan)
