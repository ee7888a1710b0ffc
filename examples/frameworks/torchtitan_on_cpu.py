# SPDX-License-Identifier: Apache-2.0
"""A model of torchtitan on CPUs and gloo, for the example, the benchmark and the tests.

torchtitan asks for GPUs in a few places on the way to a model. Nothing here is needed on one.
"""

from __future__ import annotations

from typing import Any

import torch
import torchtitan.distributed.parallel_dims
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3 import _build_qwen3_moe_layers, _debugmodel_moe


def small_model(
    *,
    layers: int,
    width: int,
    expert_width: int,
    experts: int,
    top_k: int,
    head_dim: int = 16,
    vocabulary: int = 256,
    sequence: int = 64,
) -> Any:
    """The configuration of torchtitan's debugging Qwen3-MoE, of other sizes."""
    config = _debugmodel_moe("flex")
    config.vocab_size = config.tok_embeddings.num_embeddings = vocabulary
    config.dim = config.tok_embeddings.embedding_dim = config.norm.normalized_shape = width
    config.lm_head.in_features, config.lm_head.out_features = width, vocabulary
    config.layers = _build_qwen3_moe_layers(
        n_layers=layers,
        dim=width,
        n_heads=4,
        n_kv_heads=2,
        head_dim=head_dim,
        moe_hidden_dim=expert_width,
        num_experts=experts,
        top_k=top_k,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=sequence, theta=10000.0),
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # runs on the CPU
    return config


def dims_on_cpu(ranks: int, ep: int, backend: str = "partial_dtensor") -> ParallelDims:
    """Data over all ranks and experts over ``ep`` of them, in this process on the CPU."""
    torchtitan.distributed.parallel_dims.device_type = "cpu"
    set_spmd_backend(backend)
    return ParallelDims(
        dp_replicate=1,
        dp_shard=ranks,
        cp=1,
        tp=1,
        pp=1,
        ep=ep,
        world_size=ranks,
        spmd_backend=backend,
    )


def reduce_over_gloo(model: torch.nn.Module) -> None:
    """FSDP's reductions as plain sums: gloo cannot scale while it reduces."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
