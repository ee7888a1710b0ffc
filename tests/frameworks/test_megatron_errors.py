# SPDX-License-Identifier: Apache-2.0
"""What does not fit is found by enable, before anything is changed."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.ranks import run_ranks
from tests.frameworks import deepep_standin
from tests.frameworks import megatron_cpu as mc
from tests.frameworks.environment import require
from tests.frameworks.plans import force, random_copies

require("megatron.core.models.gpt.moe_module_specs")

from topoep.adapters import megatron as adapter  # noqa: E402
from topoep.adapters.megatron.checks import check_config, check_upstream  # noqa: E402


@pytest.mark.parametrize("found", ["0.18.1", "0.20.0"])
def test_versions(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    with pytest.raises(ImportError, match=rf"megatron-core >= 0.19, < 0.20; .* {found} is"):
        adapter.enable(nn.Linear(1, 1))


def test_changed_signatures(monkeypatch):
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    check_upstream()
    for cls, name in [
        (SequentialMLP, "forward"),
        (SequentialMLP, "backward_dw"),
        (MoEAlltoAllTokenDispatcher, "dispatch_preprocess"),
        (MoEAlltoAllTokenDispatcher, "__init__"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(cls, name, lambda self, something_new: None)
            with pytest.raises(ImportError, match="The framework has changed"):
                adapter.enable(nn.Linear(1, 1))


def test_a_model_without_moe_layers():
    with pytest.raises(ValueError, match="no MoE layer on this rank; pass allow_none=True"):
        adapter.enable([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert adapter.enable(nn.Linear(1, 1), allow_none=True) == 0


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("fp8", "hybrid", "quantized"),
        ("moe_pad_expert_input_to_capacity", True, "fixes the number of tokens"),
        ("moe_single_grouped_weight", True, "one parameter for all experts"),
        ("moe_paged_stash", True, "fixes the number of tokens"),
        ("use_transformer_engine_op_fuser", True, "own list of parameters"),
        ("transformer_impl", "inference_optimized", "inference kernels"),
        ("cuda_graph_impl", "local", "leave moe and moe_preprocess out"),
    ],
)
def test_options_of_megatron(name, value, reason):
    cfg = mc.config(1)
    check_config(cfg)
    setattr(cfg, name, value)
    with pytest.raises(ValueError, match=rf"{name}={value!r} does not work .*{reason}"):
        check_config(cfg)


def one_rank(rank: int) -> None:
    mc.start(1)
    layer = mc.moe_layer(mc.config(1))
    dispatcher = layer.token_dispatcher
    with pytest.raises(ValueError, match="all its experts on one rank"):
        adapter.enable(layer)
    assert layer.token_dispatcher is dispatcher


def test_experts_on_one_rank():
    run_ranks(1, one_rank)


def twice(rank: int) -> None:
    mc.start(2)
    layer = mc.moe_layer(mc.config(2))
    state = torch.get_rng_state()
    adapter.enable(layer)
    assert state.equal(torch.get_rng_state()), "random numbers are those of a run without TopoEP"
    with pytest.raises(ValueError, match="MoE layer 1 is balanced already"):
        adapter.enable(layer)


def test_twice():
    run_ranks(2, twice)


class OwnExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def unknown_experts(rank: int) -> None:
    mc.start(2)
    layer = mc.moe_layer(mc.config(2))
    layer.experts = OwnExperts()
    with pytest.raises(ValueError, match=r"OwnExperts are not known; .*register_weight_table"):
        adapter.enable(layer)


def test_unknown_experts():
    run_ranks(2, unknown_experts)


def routes_differently(rank: int) -> None:
    mc.start(2)
    layer = mc.moe_layer(mc.config(2))
    adapter.enable(layer)
    force(layer.token_dispatcher.topoep.balancer, random_copies(0))
    calls = []

    def forward(x):
        calls.append(x)
        return layer(x if len(calls) == 1 else x.flip(0))[0]

    y = checkpoint(forward, mc.tokens(rank).requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="routes tokens as no forward pass in flight"):
        y.sum().backward()


def test_a_recomputation_that_routes_differently():
    run_ranks(2, routes_differently)


def weights_change(rank: int) -> None:
    mc.start(2)
    layers = [mc.moe_layer(mc.config(2), number) for number in (1, 2)]
    model = nn.ModuleList(layers)
    adapter.enable(model)
    force(layers[0].token_dispatcher.topoep.balancer, lambda bal, counts: [[4], [0]])
    y, _ = layers[0](mc.tokens(rank))
    layers[1](mc.tokens(rank, 1))  # takes the slots
    with torch.no_grad():
        layers[0].experts.local_experts[0].linear_fc1.weight.add_(1)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        y.sum().backward()


def test_weights_that_change_before_backward():
    run_ranks(2, weights_change)


def beyond_deepep(rank: int) -> None:
    mc.start(2)
    deepep_standin.install()
    options = {
        "moe_token_dispatcher_type": "flex",
        "moe_router_dtype": "fp32",
        "num_moe_experts": 64,
        "moe_router_topk": 33,
    }
    layer = mc.moe_layer(mc.config(2, **options))
    with pytest.raises(ValueError, match="33 top_k for a dispatcher that takes 1 to 32"):
        adapter.enable(layer)
    assert not hasattr(layer.experts, "topoep")


def test_limits_of_deepep():
    run_ranks(2, beyond_deepep)


def sharded(rank: int) -> None:
    mc.start(2)
    early, late = (mc.moe_layer(mc.config(2)) for _ in range(2))
    adapter.enable(late)
    for layer in (early, late):
        layer.experts.local_experts[0].linear_fc1.weight.__fsdp_param__ = True
    with pytest.raises(ValueError, match="sharded by Megatron-FSDP cannot be copied"):
        adapter.enable(early)
    with pytest.raises(ValueError, match="sharded by Megatron-FSDP cannot be copied"):
        late(mc.tokens(rank))


def test_sharded_parameters():
    run_ranks(2, sharded)
