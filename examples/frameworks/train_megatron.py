# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT with MoE layers by Megatron-Core, with TopoEP and without.

python examples/frameworks/train_megatron.py
"""

from __future__ import annotations

import logging
import warnings

import torch
from common import (
    BATCH,
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
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_on_cpu import use_cpu

import topoep.adapters.megatron

MICROBATCHES = 2


def build(recorder: Recorder | None) -> tuple[TransformerConfig, GPTModel]:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=16,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_router_load_balancing_type="none",  # nothing else balances here
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=RANKS,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    torch.manual_seed(0)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="LayerNorm"
    )
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)
    if recorder is not None:
        layers = topoep.adapters.megatron.enable(  # that is all
            model, spare_slots=2, topology=TOPOLOGY, on_plan=recorder
        )
        assert layers == config.num_layers
    return config, model


def train(rank: int, recorder: Recorder | None) -> list[float]:
    config, model = build(recorder)
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        bucket_size=50_000,
    )
    model = DistributedDataParallel(config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=3e-3, use_distributed_optimizer=True, overlap_param_gather=True
        ),
        [model],
    )
    positions = torch.arange(SEQUENCE - 1).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE - 1, SEQUENCE - 1, dtype=torch.bool).triu(1)
    losses = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        total = torch.zeros(())
        for microbatch in range(MICROBATCHES):
            for group in model.bucket_groups + model.expert_parallel_bucket_groups:
                group.is_last_microbatch = microbatch == MICROBATCHES - 1
            ids = batch(rank, MICROBATCHES * step + microbatch)
            loss = model(ids[:, :-1], positions, mask, labels=ids[:, 1:]).mean() / MICROBATCHES
            loss.backward()
            total += loss.detach()
        finalize_model_grads([model])
        optimizer.step()
        losses.append(mean_over_ranks(total))
    return losses


def main(rank: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if not torch.cuda.is_available():
        use_cpu()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    recorder = Recorder()
    plain = train(rank, None)
    balanced = train(rank, recorder)
    if rank == 0:
        report("Megatron-Core, GPT", plain, balanced, recorder)


if __name__ == "__main__":
    launch(main)
