# SPDX-License-Identifier: Apache-2.0
"""Trains a small Qwen3-MoE of Hugging Face transformers, with TopoEP and without.

python examples/frameworks/train_transformers.py
"""

from __future__ import annotations

import tempfile

import torch
import transformers
from common import (
    RANKS,
    STEPS,
    TOPOLOGY,
    VOCABULARY,
    Recorder,
    batch,
    launch,
    mean_over_ranks,
    report,
)
from transformers.distributed import DistributedConfig

import topoep.adapters.transformers

CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=16,
    num_experts_per_tok=2,
)


def train(rank: int, folder: str, implementation: str) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(
            fsdp_size=RANKS, ep_size=RANKS, ep_implementation=implementation
        ),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(STEPS):
        ids = batch(rank, step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def main(rank: int) -> None:
    recorder = Recorder()
    topoep.adapters.transformers.register(topology=TOPOLOGY, on_plan=recorder)  # that is all
    plain = train(rank, FOLDER, "all_to_all")
    balanced = train(rank, FOLDER, "topoep")
    if rank == 0:
        report("transformers, Qwen3-MoE", plain, balanced, recorder)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as FOLDER:
        transformers.Qwen3MoeForCausalLM(CONFIG).save_pretrained(FOLDER)
        launch(main)
