# SPDX-License-Identifier: Apache-2.0
"""What an adapter costs while there is nothing to balance: CPU time of a layer, empty plan.

Runs the framework's own MoE layer forward and backward, untouched and adapted in turn, on 2 forked
ranks with 4096 tokens each. Every plan is empty, because the objective is content with any load.

    python benchmarks/bench_adapters.py
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import parse_arguments, report
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import topoep
from tests.distributed.ranks import run_ranks

RANKS, TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 2, 4096, 512, 512, 16, 4
ROUNDS = 7
OPTIONS = {"spare_slots": 2, "objective": topoep.Balance(tolerance=1000)}

#: Makes the same layer on this rank, untouched or adapted; called with whether to adapt.
Builder = Callable[[bool], torch.nn.Module]


def transformers_layer(adapted: bool) -> torch.nn.Module:
    import transformers
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    from topoep.adapters.transformers import register

    register(**OPTIONS)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("ep", "tp"))
    plan = model._expand_parallel_plan(model.ep_plan)
    name = "topoep" if adapted else "all_to_all"
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation=name)
    return model.model.layers[0].mlp


def torchtitan_layer(adapted: bool) -> torch.nn.Module:
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    from examples.frameworks.torchtitan_on_cpu import dims_on_cpu, small_model

    dims = dims_on_cpu(RANKS, ep=RANKS)
    config = small_model(layers=1, width=HIDDEN, expert_width=WIDTH, experts=EXPERTS, top_k=TOP_K)
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
    if adapted:
        override = "topoep.adapters.torchtitan.balance"
        apply_overrides(OverrideConfig(imports=[(override, OPTIONS)]), config)
    layer = config.layers[0].moe.build()
    layer.init_states()
    layer.parallelize(dims)
    return layer


def megatron_layer(dispatcher: str) -> Builder:
    def build(adapted: bool) -> torch.nn.Module:
        from megatron.core import parallel_state

        from tests.frameworks import megatron_cpu
        from topoep.adapters.megatron import enable

        if not parallel_state.model_parallel_is_initialized():
            megatron_cpu.start(RANKS)
        config = megatron_cpu.config(
            RANKS,
            hidden_size=HIDDEN,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOP_K,
            moe_ffn_hidden_size=WIDTH,
            moe_token_dispatcher_type=dispatcher,
        )
        layer = megatron_cpu.moe_layer(config)
        if adapted:
            enable(layer, **OPTIONS)
        return layer

    return build


LAYERS: dict[str, Builder] = {
    "transformers": transformers_layer,
    "torchtitan": torchtitan_layer,
    "megatron alltoall": megatron_layer("alltoall"),
    "megatron allgather": megatron_layer("allgather"),
}


def step(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Forward and backward; what must not differ."""
    x = x.detach().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    y: Any = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def measure(rank: int, name: str) -> tuple[float, float, float, int]:
    """CPU seconds untouched and adapted, the median overhead of the rounds, and what differs."""
    layers = []
    for adapted in (False, True):
        torch.manual_seed(0)
        layers.append(LAYERS[name](adapted))
    torch.manual_seed(rank + 1)
    x, grad = torch.randn(2, 1, TOKENS, HIDDEN)
    results = [step(layer, x, grad) for layer in layers]  # also warms up
    wrong = sum(not torch.equal(_local(a), _local(b)) for a, b in zip(*results, strict=True))
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for layer, list_ in zip(layers, times, strict=True):
            dist.barrier()
            begin = time.process_time()
            step(layer, x, grad)
            list_.append(time.process_time() - begin)
    overhead = statistics.median(b / a - 1 for a, b in zip(*times, strict=True))
    return statistics.median(times[0]), statistics.median(times[1]), overhead, wrong


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    warnings.filterwarnings("ignore")
    rows: list[dict[str, object]] = []
    for name in LAYERS:
        results = run_ranks(RANKS, measure, name, timeout_s=600)
        untouched, adapted, overhead, wrong = (
            statistics.mean(column) for column in zip(*results, strict=True)
        )
        rows.append(
            {
                "framework": name,
                "EP": RANKS,
                "tokens": TOKENS,
                "untouched ms": untouched * 1e3,
                "adapted ms": adapted * 1e3,
                "overhead %": overhead * 100,
                "#wrong": int(wrong * RANKS),
            }
        )
    report("bench_adapters", arguments, rows)


if __name__ == "__main__":
    main()
