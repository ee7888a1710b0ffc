# SPDX-License-Identifier: Apache-2.0
"""Whole GPT models of Megatron, with and without TopoEP: training, recomputation, schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import topoep
from tests.distributed.ranks import run_ranks
from tests.frameworks import megatron_cpu as mc
from tests.frameworks.environment import require
from tests.frameworks.plans import force, random_copies

require("megatron.core.models.gpt")

from topoep.adapters import megatron as adapter  # noqa: E402

RECOMPUTE = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def force_all(models, choose=None) -> None:
    """Copies chosen at random for all layers of the models."""
    for model in models:
        for layer in mc.moe_layers(model):
            force(layer.token_dispatcher.topoep.balancer, choose or random_copies(3))


def check_gradients(plain, balanced, exact: bool = False) -> None:
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    got = {n: p.grad for n, p in balanced.named_parameters()}
    assert wanted.keys() == got.keys()
    for name, grad in wanted.items():
        if exact or "experts" not in name:
            assert torch.equal(got[name], grad), name
        else:
            error = (got[name] - grad).abs().max() / grad.abs().max()
            assert error <= 1e-6, f"{name}: {error}"


def recompute(rank: int, ep: int, kind: str) -> None:
    mc.start(ep)
    cfg = mc.config(ep, num_layers=2, **RECOMPUTE[kind])
    plain, balanced = mc.gpt(cfg), mc.gpt(cfg)
    planned = []
    adapter.enable(balanced, on_plan=lambda layer, plan: planned.append(layer.layer_number))
    force_all([balanced])
    losses = {}
    for model in (plain, balanced):
        # Three microbatches in flight, as in the warm-up of a pipeline.
        flying = [model(**mc.text(rank, microbatch)).mean() for microbatch in range(3)]
        for loss in flying:
            loss.backward()
        losses[model] = [loss.item() for loss in flying]
    assert losses[plain] == losses[balanced]
    assert planned == [1, 2] * 3, "one plan per layer and microbatch, none for recomputations"
    check_gradients(plain, balanced)
    for layer in mc.moe_layers(balanced):
        assert not layer.token_dispatcher.topoep._open._kept


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("kind", RECOMPUTE)
def test_recomputation_repeats_the_plan_of_the_forward_pass(kind, ep):
    run_ranks(ep, recompute, ep, kind)


def ten_steps(rank: int, ep: int) -> None:
    mc.start(ep)
    cfg = mc.config(ep, num_layers=2)
    losses = []
    for balance in (False, True):
        model = mc.gpt(cfg)
        if balance:
            assert adapter.enable(model) == 2
            force_all([model])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        history = []
        for step in range(10):
            optimizer.zero_grad()
            loss = model(**mc.text(rank, step)).mean()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0][-1] < losses[0][0] - 0.05
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("ep", [2, 4])
def test_ten_steps_have_equal_losses(ep):
    run_ranks(ep, ten_steps, ep)


def evaluate_without_grad(rank: int) -> None:
    mc.start(2)
    cfg = mc.config(2, num_layers=2, **RECOMPUTE["full"])
    plain, balanced = mc.gpt(cfg), mc.gpt(cfg)
    adapter.enable(balanced)
    force_all([balanced])
    for mode in ("eval", "train"):
        for model in (plain, balanced):
            model.train(mode == "train")
        with torch.no_grad():
            batch = mc.text(rank, 0)
            assert torch.equal(plain(**batch), balanced(**batch))
        if mode == "eval":
            continue
        # And training goes on after it.
        for model in (plain, balanced):
            model(**mc.text(rank, 1)).mean().backward()
        check_gradients(plain, balanced)


def test_evaluation_between_steps():
    run_ranks(2, evaluate_without_grad)


def two_models(rank: int) -> None:
    mc.start(2)
    plain = [mc.gpt(mc.config(2, num_layers=n)) for n in (1, 2)]
    balanced = [mc.gpt(mc.config(2, num_layers=n)) for n in (1, 2)]
    assert adapter.enable(balanced[0], 1) == 1
    assert adapter.enable(balanced[1], 2) == 2
    force_all(balanced)
    for models in (plain, balanced):
        # A loss over both, so that their backward passes are one.
        sum(model(**mc.text(rank, 0)).mean() for model in models).backward()
    for a, b in zip(plain, balanced, strict=True):
        check_gradients(a, b)


def test_two_models_in_one_process():
    run_ranks(2, two_models)


def planned_by_itself(rank: int) -> float:
    """No forced plans: the planner sees the skew and removes it."""
    mc.start(4)
    cfg = mc.config(4, num_layers=2)
    plain, balanced = mc.gpt(cfg), mc.gpt(cfg)
    plans = []
    topology = topoep.Topology(num_nodes=2, ranks_per_node=2)
    adapter.enable(balanced, topology=topology, on_plan=lambda layer, plan: plans.append(plan))
    losses = [model(**mc.text(rank, 0)).mean() for model in (plain, balanced)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    check_gradients(plain, balanced)
    assert sum(int(plan.stats()["copies"]) for plan in plans) > 0
    for plan in plans:
        plan.validate()
        assert plan.stats()["imbalance"] <= plan.stats()["imbalance_before"]
    return float(plans[0].stats()["imbalance_before"])


def test_plans_of_the_planner():
    assert max(run_ranks(4, planned_by_itself)) > 1.1


def distributed_optimizer(rank: int) -> None:
    """Parameters that are gathered while forward runs are waited for before copies are sent."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    mc.start(2)
    losses = []
    for balance in (False, True):
        cfg = mc.config(2, num_layers=2)
        model = mc.gpt(cfg)
        if balance:
            adapter.enable(model)
            force_all([model])
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            bucket_size=3000,
        )
        model = DistributedDataParallel(cfg, ddp, model)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
                clip_grad=1.0,
            ),
            [model],
        )
        history = []
        for step in range(10):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            for microbatch in range(2):
                for group in model.bucket_groups + model.expert_parallel_bucket_groups:
                    group.is_last_microbatch = microbatch == 1
                loss = model(**mc.text(rank, 2 * step + microbatch)).mean()
                loss.backward()
                history.append(loss.item())
            finalize_model_grads([model])
            _, norm, _ = optimizer.step()
            history.append(float(norm))
        losses.append(history)
    assert losses[0][-3] < losses[0][0] - 0.05
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=0)


def test_distributed_optimizer():
    run_ranks(4, distributed_optimizer)


def one_backward_for_several_passes(rank: int) -> None:
    mc.start(2)
    plain, balanced = (mc.gpt(mc.config(2, num_layers=2)) for _ in range(2))
    adapter.enable(balanced)
    force_all([balanced])
    for model in (plain, balanced):
        sum(model(**mc.text(rank, microbatch)).mean() for microbatch in range(3)).backward()
    check_gradients(plain, balanced)


def test_layers_used_several_times_in_one_graph():
    run_ranks(2, one_backward_for_several_passes)


def multi_token_prediction(rank: int, repeated: bool, kind: str) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )

    mc.start(2)
    cfg = mc.config(
        2,
        num_layers=1,
        mtp_num_layers=2 if repeated else 1,
        mtp_use_repeated_layer=repeated,
        **({**RECOMPUTE["full"], "recompute_num_layers": 1} if kind == "full" else {}),
    )
    models = []
    for _ in range(2):
        spec = get_gpt_decoder_block_spec(
            cfg, use_transformer_engine=False, normalization="LayerNorm"
        )
        mtp = get_gpt_mtp_block_spec(cfg, spec, use_transformer_engine=False)
        torch.manual_seed(0)
        model = GPTModel(
            cfg, spec, mc.VOCABULARY, mc.LENGTH, mtp_block_spec=mtp, position_embedding_type="rope"
        )
        for layer in mc.moe_layers(model):
            mc.set_weights(layer, 3 + layer.is_mtp_layer)
        models.append(model)
    plain, balanced = models
    assert adapter.enable(balanced) == 2
    force_all([balanced])
    losses = {}
    for model in models:
        flying = [model(**mc.text(rank, microbatch)).mean() for microbatch in range(2)]
        for loss in flying:
            loss.backward()
        losses[model] = [loss.item() for loss in flying]
    assert losses[plain] == losses[balanced]
    for (name, one), (_, other) in zip(
        plain.named_parameters(), balanced.named_parameters(), strict=True
    ):
        error = (other.grad - one.grad).abs().max() / one.grad.abs().max()
        assert error <= 1e-6, f"{name}: {error}"


@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("repeated", [False, True], ids=["", "repeated"])
def test_multi_token_prediction(repeated, kind):
    run_ranks(2, multi_token_prediction, repeated, kind)


def backward_over_some_parameters(rank: int) -> None:
    mc.start(2)
    model = mc.gpt(mc.config(2))
    adapter.enable(model)
    layer = mc.moe_layers(model)[0]
    force(layer.token_dispatcher.topoep.balancer, lambda balancer, counts: [[4], [0]])
    only = layer.experts.local_experts[0].linear_fc1.weight
    model(**mc.text(rank, 0)).mean().backward(inputs=[only])
    with pytest.raises(RuntimeError, match="run backward over all parameters of the experts"):
        model(**mc.text(rank, 1))


def test_backward_over_some_parameters_is_noticed():
    run_ranks(2, backward_over_some_parameters)


def torch_checkpoint(rank: int) -> None:
    mc.start(2)
    plain, balanced = (nn.ModuleList(mc.moe_layer(mc.config(2), i) for i in (1, 2)) for _ in "ab")
    planned = []
    adapter.enable(balanced, on_plan=lambda layer, plan: planned.append(layer.layer_number))
    force_all([balanced])
    for layers in (plain, balanced):
        flying = []
        for microbatch in range(3):
            x = mc.tokens(rank, microbatch).requires_grad_()
            y = checkpoint(lambda x, layers=layers: layers[1](layers[0](x)[0])[0], x,
                           use_reentrant=False)  # fmt: skip
            flying.append(y.square().mean())
        for loss in flying:
            loss.backward()
    assert planned == [1, 2] * 3
    for (name, one), (_, other) in zip(
        plain.named_parameters(), balanced.named_parameters(), strict=True
    ):
        assert (other.grad - one.grad).abs().max() <= 1e-6 * one.grad.abs().max(), name


def test_checkpoints_of_torch():
    run_ranks(2, torch_checkpoint)
