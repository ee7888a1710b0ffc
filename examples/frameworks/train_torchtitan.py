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
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan_on_cpu import dims_on_cpu, reduce_over_gloo, small_model

# Without it, TopoEP finds the nodes by their names.
OVERRIDE = ("topoep.adapters.torchtitan.balance", {"topology": TOPOLOGY})


def build(overrides: list[tuple[str, dict[str, Any]]]) -> Any:
    dims = dims_on_cpu(RANKS, ep=RANKS)
    config = small_model(
        layers=2,
        width=64,
        expert_width=64,
        experts=16,
        top_k=2,
        vocabulary=VOCABULARY,
        sequence=SEQUENCE,
    )
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
    apply_overrides(OverrideConfig(imports=overrides), config)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
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
    reduce_over_gloo(model)
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
