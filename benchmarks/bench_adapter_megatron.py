# SPDX-License-Identifier: Apache-2.0
"""What TopoEP costs a Megatron MoE layer when there is nothing to copy: CPU time of a step.

Forked ranks with gloo between them; forward and backward of the untouched layer and of the balanced
one in turn, 4,096 tokens a rank. The tolerance is so wide that every plan is empty, but plans are
made, and the collectives for weights and gradients run. #wrong counts outputs and gradients that
are not the same bits.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from common import parse_arguments, report

import topoep

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "frameworks"))

TOKENS, HIDDEN, TOP_K, REPEATS = 4096, 512, 2, 15
#: Ranks, experts, width of an expert, dispatcher.
CASES = [(2, 16, 512, "alltoall"), (2, 16, 512, "allgather"), (2, 64, 512, "alltoall")]


def build(ranks: int, experts: int, width: int, dispatcher: str):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=experts,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=width,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=ranks,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
    )
    torch.manual_seed(0)
    spec = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
    return spec(config=config, layer_number=1)


def step(layer, x: torch.Tensor, grad_y: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The output of one forward and backward pass, and its CPU time in seconds."""
    x.grad = None
    layer.zero_grad()
    begin = time.process_time()
    y, _ = layer(x)
    y.backward(grad_y)
    return y, time.process_time() - begin


def measure(rank: int, store: str, case: tuple, results) -> None:
    from megatron.core import parallel_state
    from megatron_on_cpu import use_cpu

    from topoep.adapters.megatron import enable

    warnings.simplefilter("ignore")
    ranks = case[0]
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    use_cpu()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    plain, balanced = build(*case), build(*case)
    plans = []
    enable(
        balanced,
        topology=topoep.Topology(num_nodes=1, ranks_per_node=ranks),
        objective=topoep.Balance(10.0),
        on_plan=lambda layer, plan: plans.append(int(plan.stats()["copies"])),
    )
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, 1, HIDDEN, generator=generator).requires_grad_()
    grad_y = torch.randn(x.shape, generator=generator)
    times: dict[bool, list[float]] = {False: [], True: []}
    wrong = 0
    for repeat in range(REPEATS + 2):
        outputs, gradients = [], []
        for layer in (plain, balanced):
            y, seconds = step(layer, x, grad_y)
            outputs.append(y.detach())
            gradients.append([x.grad, *(p.grad for p in layer.parameters())])
            if repeat >= 2:
                times[layer is balanced].append(seconds)
        pairs = zip([outputs[0], *gradients[0]], [outputs[1], *gradients[1]], strict=True)
        wrong += sum(not torch.equal(one, other) for one, other in pairs)
    assert not any(plans), "every plan is empty"
    results.put((rank, *(statistics.median(times[b]) for b in (False, True)), wrong))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    arguments = parse_arguments(__doc__)
    import megatron.core.models.gpt.moe_module_specs  # noqa: F401  once, before the ranks fork

    context = multiprocessing.get_context("fork")
    rows = []
    for case in CASES:
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{Path(folder) / 'store'}"
            ranks = [
                context.Process(target=measure, args=(rank, store, case, results))
                for rank in range(case[0])
            ]
            for process in ranks:
                process.start()
            answers = [results.get() for _ in ranks]
            for process in ranks:
                process.join()
        plain, balanced = (sum(answer[i] for answer in answers) for i in (1, 2))
        rows.append(
            {
                "R": case[0],
                "E": case[1],
                "width": case[2],
                "dispatcher": case[3],
                "T": TOKENS,
                "K": TOP_K,
                "plain ms": 1e3 * plain / case[0],
                "balanced ms": 1e3 * balanced / case[0],
                "more %": 100 * (balanced / plain - 1),
                "#wrong": sum(answer[3] for answer in answers),
            }
        )
    report("bench_adapter_megatron", arguments, rows)


if __name__ == "__main__":
    main()
