# SPDX-License-Identifier: Apache-2.0
"""Trains a small Qwen3-MoE of torchtitan, with TopoEP and without.

torchtitan's own trainer needs GPUs; this does what it does with a model: override, build,
parallelize, FSDP. With the trainer the override is a word on the command line. The experts of
torchtitan compute in bfloat16, so the losses agree to about three digits.

python examples/frameworks/train_torchtitan.py
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
import torchtitan.distributed.parallel_dims
from common import (
    RANKS,
    SEQUENCE,
    STEPS,
    TOPOLOGY,
    VOCABULARY,
    Recorder,
    batch,
    launch,
    mean_over_ranks,
    report,
)
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3 import _build_qwen3_moe_layers, _debugmodel_moe
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

WIDTH = 64
# Without it, TopoEP finds the nodes by their names.
OVERRIDE = ("topoep.adapters.torchtitan.balance", {"topology": TOPOLOGY})


def model_config() -> Any:
    """torchtitan's debugging model, smaller, and with an attention that runs on the CPU."""
    config = _debugmodel_moe("flex")
    config.vocab_size = config.tok_embeddings.num_embeddings = VOCABULARY
    config.dim = config.tok_embeddings.embedding_dim = config.norm.normalized_shape = WIDTH
    config.lm_head.in_features, config.lm_head.out_features = WIDTH, VOCABULARY
    config.layers = _build_qwen3_moe_layers(
        n_layers=2,
        dim=WIDTH,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        moe_hidden_dim=64,
        num_experts=16,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=16, max_seq_len=SEQUENCE, theta=10000.0),
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
    return config


def build(overrides: list[tuple[str, dict[str, Any]]]) -> Any:
    config = model_config()
    apply_overrides(OverrideConfig(imports=overrides), config)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=RANKS,
        cp=1,
        tp=1,
        pp=1,
        ep=RANKS,
        world_size=RANKS,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    model.parallelize(dims)
    apply_fsdp_to_decoder(
        model,
        dims.get_mesh(["fsdp"]),
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        ep_degree=RANKS,
        edp_mesh=dims.get_optional_mesh(["efsdp"]),
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces
    return model


def train(rank: int, overrides: list[tuple[str, dict[str, Any]]]) -> list[float]:
    model = build(overrides)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(STEPS):
        ids = batch(rank, step)
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        (loss / RANKS).backward()  # torchtitan's FSDP sums gradients
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def main(rank: int) -> None:
    torchtitan.distributed.parallel_dims.device_type = "cpu"
    set_spmd_backend("partial_dtensor")
    recorder = Recorder()
    plain = train(rank, [])
    target, options = OVERRIDE
    balanced = train(rank, [(target, {**options, "on_plan": recorder})])
    if rank == 0:
        report("torchtitan, Qwen3-MoE", plain, balanced, recorder)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", message="(?s).*CPU autocast")  # torchtitan's router
    launch(main)
