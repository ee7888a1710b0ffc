# SPDX-License-Identifier: Apache-2.0
"""Small models of Megatron-Core, on CPU tensors and gloo.

Every function here runs in a forked rank, so what it changes in torch stays there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from examples.frameworks.megatron_on_cpu import use_cpu

EXPERTS, HIDDEN, WIDTH = 8, 16, 24


def start(
    ep: int,
    tp: int = 1,
    etp: int | None = None,
    pp: int = 1,
    vpp: int | None = None,
    cp: int = 1,
) -> None:
    """Makes Megatron's process groups; the world is running already."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    use_cpu()
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    random.model_parallel_cuda_manual_seed(1)


def config(ep: int, **options: Any):
    """A TransformerConfig of small MoE layers in fp32."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": WIDTH,
        "moe_ffn_hidden_size": WIDTH,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": ep,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "moe_permute_fusion": False,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**{**defaults, **options})


def moe_layer(cfg, layer_number: int = 1) -> nn.Module:
    """Megatron's MoELayer with weights that depend on the layer and the experts' numbers only."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    build = get_moe_module_spec(
        use_te=False, num_experts=cfg.num_moe_experts, moe_grouped_gemm=False
    )
    layer = build(config=cfg, layer_number=layer_number)
    set_weights(layer, layer_number)
    return layer


def set_weights(layer: nn.Module, seed: int) -> None:
    """Weights of the layer's place in the model, not of the rank."""
    from megatron.core import parallel_state

    shard = parallel_state.get_expert_tensor_parallel_rank()
    with torch.no_grad():
        router = torch.Generator().manual_seed(seed)
        for parameter in layer.router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=router) * 0.5)
        for local, expert in enumerate(layer.local_expert_indices):
            generator = torch.Generator().manual_seed(1000 * seed + 10 * expert + shard)
            for _, parameter in expert_parameters(layer, local):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def expert_parameters(layer: nn.Module, local: int) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of one local expert, in an order that all experts share."""
    if hasattr(layer.experts, "local_experts"):
        yield from layer.experts.local_experts[local].named_parameters()
        return
    for name in ("linear_fc1", "linear_fc2"):
        linear = getattr(layer.experts, name)
        for prefix in ("weight", "bias"):
            parameter = getattr(linear, f"{prefix}{local}", None)
            if isinstance(parameter, nn.Parameter):
                yield f"{name}.{prefix}", parameter


def tokens(rank: int, microbatch: int = 0, length: int = 96, batch: int = 2) -> torch.Tensor:
    """Hidden states [length, batch, HIDDEN] of one rank and microbatch, skewed in their routing.

    Enough that no expert and no copy gets fewer than four rows: there the CPU multiplies by another
    method, whose rows are not the same bits as those of larger products.
    """
    shared = torch.Generator().manual_seed(11)
    own = torch.Generator().manual_seed(100 * microbatch + rank)
    direction = torch.randn(HIDDEN, generator=shared)
    return torch.randn(length, batch, HIDDEN, generator=own) + 0.5 * direction


VOCABULARY, LENGTH = 32, 32


def gpt(cfg, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None):
    """Megatron's GPTModel with MoE layers, and weights that depend on their names only."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(
        cfg, use_transformer_engine=False, normalization="LayerNorm", vp_stage=vp_stage
    )
    model = GPTModel(
        cfg,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
        vp_stage=vp_stage,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" not in name and parameter.dim() == 2:
                seed = sum(ord(c) * (i + 1) for i, c in enumerate(name.split("layers.")[0]))
                generator = torch.Generator().manual_seed(seed)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    for layer in moe_layers(model):
        set_weights(layer, layer.layer_number)
    return model


def moe_layers(model: nn.Module) -> list[nn.Module]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return [module for module in model.modules() if isinstance(module, MoELayer)]


def text(rank: int, microbatch: int, batch: int = 16) -> dict[str, torch.Tensor]:
    """A batch of token ids, as GPTModel takes it."""
    generator = torch.Generator().manual_seed(1000 * microbatch + rank)
    ids = torch.randint(0, VOCABULARY, (batch, LENGTH + 1), generator=generator) ** 2 // VOCABULARY
    return {
        "input_ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "position_ids": torch.arange(LENGTH).expand(batch, -1),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
    }
