# SPDX-License-Identifier: Apache-2.0
"""Megatron's TEGroupedMLP: weight gradients that bypass autograd, or come after backward."""

from __future__ import annotations

import contextlib
import types

import pytest

import topoep
from tests.distributed.ranks import run_ranks
from tests.frameworks import megatron_cpu as mc
from tests.frameworks import te_standin
from tests.frameworks.environment import require
from tests.frameworks.plans import force
from tests.frameworks.test_megatron import CHOOSERS, balancer_of, compare, run

require("megatron.core.transformer.moe.moe_layer")

from topoep.adapters import megatron as adapter  # noqa: E402


def data_parallel(layer, cfg, delayed: bool):
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        bucket_size=1000,
        delay_wgrad_compute=delayed,
    )
    return DistributedDataParallel(cfg, ddp, layer)


def layers(ep: int, fused: bool, bias: bool, delay: str, **options):
    cfg = mc.config(ep, add_bias_linear=bias, gradient_accumulation_fusion=fused, **options)
    # Megatron wants these together with options that need a GPU; the layer reads them one by one.
    cfg.delay_wgrad_compute = delay == "called"
    cfg.overlap_dispatch_backward_with_experts_wgrad = delay == "overlapped"
    pair = [te_standin.grouped_moe_layer(cfg) for _ in range(2)]
    for layer in pair:
        mc.set_weights(layer, 1)
    return cfg, pair


def first_microbatch(model) -> None:
    """What Megatron's schedules do at the start of a step."""
    for module in model.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = True


def train(rank: int, ep: int, plan: str, fused: bool, bias: bool, delay: str, ddp: bool) -> None:
    mc.start(ep)
    cfg, (plain, balanced) = layers(ep, fused, bias, delay)
    adapter.enable(balanced, topology=topoep.Topology(num_nodes=1, ranks_per_node=ep))
    force(balancer_of(balanced), CHOOSERS[plan]())
    models = [plain, balanced]
    if ddp:
        models = [data_parallel(layer, cfg, delay != "no") for layer in models]
    inputs = [mc.tokens(rank, microbatch) for microbatch in range(3 if ddp else 1)]
    for _ in range(2):
        outputs = []
        for model in models:
            first_microbatch(model)
            if ddp:
                model.zero_grad_buffer()
            else:
                for parameter in model.parameters():
                    parameter.grad = None
            for i, x in enumerate(inputs):
                if ddp:
                    for group in model.bucket_groups + model.expert_parallel_bucket_groups:
                        group.is_last_microbatch = i == len(inputs) - 1
                outputs.append(run(model, x, x.flip(0) / x.numel()))
                if delay == "called":
                    (model.module if ddp else model).backward_dw()
            if ddp:
                model.finish_grad_sync()
        half = len(outputs) // 2
        for one, other in zip(outputs[:half], outputs[half:], strict=True):
            assert one[0].equal(other[0])
            assert one[1].equal(other[1])
        compare(plain, balanced, exact=plan == "none")


@pytest.mark.parametrize("plan", CHOOSERS)
@pytest.mark.parametrize("delay", ["no", "called", "overlapped"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_under_data_parallel(plan, fused, delay):
    run_ranks(4, train, 2, plan, fused, False, delay, True)


@pytest.mark.parametrize("delay", ["no", "called"])
def test_without_data_parallel(delay):
    run_ranks(4, train, 4, "random", False, False, delay, False)


@pytest.mark.parametrize("delay", ["no", "called"])
def test_biases_of_experts(delay):
    run_ranks(2, train, 2, "random", True, True, delay, True)


def without_fp8() -> None:
    """Megatron asks TransformerEngine whether fp8 is on, even where it is not installed."""
    from megatron.core.tensor_parallel import random

    random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    random.FP8GlobalStateManager.get_fp8_recipe = lambda: None
    random.fp8_autocast = random.activation_recompute_forward = lambda **options: (
        contextlib.nullcontext()
    )


def activations_recomputed(rank: int) -> None:
    mc.start(2)
    without_fp8()
    selective = {
        "moe_grouped_gemm": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    }
    _, (plain, balanced) = layers(2, False, False, "no", **selective)
    assert plain.experts.activation_recompute
    adapter.enable(balanced)
    force(balancer_of(balanced), CHOOSERS["random"]())
    x = mc.tokens(rank)
    outputs = [run(layer, x, x.flip(0) / x.numel()) for layer in (plain, balanced)]
    assert all(one.equal(other) for one, other in zip(*outputs, strict=True))
    compare(plain, balanced, exact=False)


def test_recomputed_activations():
    run_ranks(2, activations_recomputed)


def enabled_too_late(rank: int) -> None:
    mc.start(2)
    cfg, (layer, _) = layers(2, True, False, "called")
    dispatcher = layer.token_dispatcher
    model = data_parallel(layer, cfg, delayed=True)
    with pytest.raises(ValueError, match="call enable before the model is wrapped"):
        adapter.enable(model)
    assert layer.token_dispatcher is dispatcher


def test_delayed_weight_gradients_need_enable_before_wrapping():
    run_ranks(2, enabled_too_late)
