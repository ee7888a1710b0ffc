# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's AutoEP layers with TopoEP and without, on forked ranks."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import topoep
from tests.distributed.ranks import run_ranks
from tests.frameworks import plans
from tests.frameworks.comparison import check_equal, gradients
from tests.frameworks.environment import require

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = require("deepspeed")
transformers = require("transformers")

# Imported before forking: the ranks would each import it again.
from deepspeed.module_inject.auto_ep import AutoEP  # noqa: E402
from deepspeed.module_inject.auto_ep_config import AutoEPConfig  # noqa: E402
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer  # noqa: E402
from deepspeed.moe import ep_experts  # noqa: E402
from deepspeed.moe.ep_router import TokenChoiceTopKRouter  # noqa: E402

from topoep.adapters import deepspeed as adapter  # noqa: E402

EXPERTS, TOP_K, WIDTH = 8, 2, 32
HIDDEN = 64  # a multiple of the vector length: the last rows' silu would be rounded in another way


def by_rows(
    w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor, *activation: Any
) -> Tensor:
    """Experts that compute every row on its own, in place of DeepSpeed's loop over experts."""
    padding = len(x) - int(num_tokens_per_expert.sum())
    slots = torch.arange(len(w1)).repeat_interleave(num_tokens_per_expert)
    rows = x[: len(slots), None]
    h = F.silu((w1[slots] * rows).sum(-1)) * (w3[slots] * rows).sum(-1)
    return F.pad((w2[slots] * h[:, None]).sum(-1), (0, 0, 0, padding))


def build(balanced: bool, *, grouped_mm: bool = False, layers: int = 2, **options: Any) -> Any:
    """A Qwen3-MoE whose MoE layers AutoEP has replaced, the same weights every time."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    deepspeed.init_distributed("gloo", verbose=False)
    ep_experts._run_experts_for_loop = by_rows
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=96,
            hidden_size=WIDTH,
            moe_intermediate_size=HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
        )
    )
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:
            parameter.data.mul_(20)
    config = AutoEPConfig(
        enabled=True, autoep_size=dist.get_world_size(), use_grouped_mm=grouped_mm
    )
    auto_ep = AutoEP(model, config)
    # What records router logits for transformers does not go with transformers 5.24.
    auto_ep._retarget_transformers_output_recorders = lambda spec, replacement: None
    auto_ep.replace_moe_layers(auto_ep.ep_parser(), dist.get_world_size(), dist.get_rank())
    for layer in moe_layers(model):
        layer.set_deepspeed_parallelism()
    if balanced:
        options.setdefault("topology", topoep.Topology(2, dist.get_world_size() // 2))
        assert adapter.enable(model, **options) == layers
    return model


def moe_layers(model: Any) -> list[AutoEPMoELayer]:
    return [module for module in model.modules() if isinstance(module, AutoEPMoELayer)]


def balancer_of(model: Any) -> topoep.Balancer:
    found = set(adapter.balancers(model))
    assert len(found) == 1
    return found.pop()


def run(model: Any, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of the embedded input, after forward and backward."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    ids = torch.randint(96, (2, 12), generator=generator)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    out = model(inputs_embeds=embedded, labels=ids)
    out.loss.backward()
    return out.logits.detach(), embedded.grad


def check_model(rank: int, grouped_mm: bool) -> list[int]:
    """Equal to the untouched model with every kind of plan; returns the copies of each plan."""
    expected_model = build(False, grouped_mm=grouped_mm)
    expected = run(expected_model, rank), gradients(expected_model)
    used = [layer.tokens_per_expert for layer in moe_layers(expected_model)]
    model = build(True, grouped_mm=grouped_mm)
    assert model.state_dict().keys() == expected_model.state_dict().keys()
    copies = []
    for choose in (plans.no_copies, plans.random_copies(1), plans.random_copies(2)):
        made = plans.force(balancer_of(model), choose)
        model.zero_grad()
        for layer in moe_layers(model):
            layer.tokens_per_expert.zero_()
        check_equal(
            (run(model, rank), gradients(model)),
            expected,
            weights=choose is plans.no_copies,
            rows=not grouped_mm,
            tolerance=2e-2 if grouped_mm else 1e-6,  # the grouped GEMM is in bfloat16
        )
        copies.append(sum(int((plan.slot_tokens > 0).sum()) for plan in made))
        for layer, tokens in zip(moe_layers(model), used, strict=True):
            assert torch.equal(layer.tokens_per_expert, tokens)
            assert (layer.num_experts, layer.num_local_experts) == (
                EXPERTS,
                EXPERTS // dist.get_world_size(),
            )
    return copies


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("grouped_mm", [False, True], ids=["by_rows", "grouped_mm"])
def test_equals_the_untouched_model_with_any_plan(ranks, grouped_mm):
    for copies in run_ranks(ranks, check_model, grouped_mm):
        assert copies[0] == 0
        assert min(copies[1:]) > 0


def check_training(rank: int) -> tuple[list[float], list[float], float]:
    seen, losses = [], []
    for balanced in (False, True):
        options = (
            {"spare_slots": 1, "on_plan": lambda layer, plan: seen.append(plan.stats())}
            if balanced
            else {}
        )
        model = build(balanced, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for step in range(10):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            ids = torch.randint(96, (2, 12), generator=generator)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            for name, parameter in model.named_parameters():
                if ".experts." not in name:
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            losses.append(float(loss))
    return losses[:10], losses[10:], float(sum(stats["copies"] for stats in seen))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_optimizer_steps_give_equal_losses(ranks):
    for expected, got, copies in run_ranks(ranks, check_training):
        assert copies > 0
        assert got == pytest.approx(expected, rel=1e-5)
        assert abs(expected[-1] - expected[0]) > 1e-3, "the model does not train"


def check_layers(rank: int) -> None:
    """One layer alone: microbatches in flight, checkpointing, evaluation, frozen experts."""
    results = []
    for balanced in (False, True):
        layer = moe_layers(build(balanced, layers=1))[0]
        if balanced:
            plans.force(layer.topoep.layer.balancer, plans.random_copies(4))
        generator = torch.Generator().manual_seed(rank)
        xs = [torch.randn(1, 9, WIDTH, generator=generator).requires_grad_() for _ in range(3)]
        ys = [layer(x) for x in xs[:2]] + [checkpoint(layer, xs[2], use_reentrant=False)]
        ys = [y[0] if isinstance(y, tuple) else y for y in ys]
        for y in ys:
            y.square().sum().backward()
        tensors = [t.detach() for pair in zip(ys, [x.grad for x in xs], strict=True) for t in pair]
        grads = gradients(layer)
        with torch.no_grad():
            y = layer(xs[0])
            tensors.append(y[0] if isinstance(y, tuple) else y)
        layer.experts.requires_grad_(False)
        x = xs[0].detach().requires_grad_()
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        tensors.append(x.grad)
        results.append((tensors, grads))
    check_equal(results[1], results[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_microbatches_checkpoints_evaluation_and_frozen_experts(ranks):
    run_ranks(ranks, check_layers)


def check_refusals(rank: int) -> None:
    model = build(True, layers=1)
    with pytest.raises(ValueError, match=r"mlp is balanced already"):
        adapter.enable(model)
    model = build(False, layers=1)
    moe_layers(model)[0].comm_backend = "deepep"
    with pytest.raises(ValueError, match="comm_backend='deepep'"):
        adapter.enable(model)
    with pytest.raises(ValueError, match="0 AutoEP layers"):
        adapter.enable(torch.nn.Linear(2, 2))


def test_models_that_cannot_be_balanced_are_refused():
    run_ranks(2, check_refusals)


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.18.0")
    with pytest.raises(ImportError, match=r"deepspeed >= 0\.19\.8, < 0\.20; deepspeed 0\.18\.0 is"):
        adapter.enable(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("cls", [AutoEPMoELayer, TokenChoiceTopKRouter, ep_experts.GroupedExperts])
def test_a_changed_signature_is_noticed_at_once(monkeypatch, cls):
    def changed(self, x, capacity):
        raise AssertionError("not called")

    monkeypatch.setattr(cls, "forward", changed)
    with pytest.raises(ImportError, match="capacity"):
        adapter.enable(torch.nn.Linear(2, 2))
