# SPDX-License-Identifier: Apache-2.0
"""Every op gives on a GPU what it gives on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

import topoep
from topoep import ops

TOPOLOGIES = {
    "1x8": topoep.Topology(num_nodes=1, ranks_per_node=8),
    "2x4": topoep.Topology(num_nodes=2, ranks_per_node=4),
    "strided": topoep.Topology(node_of_rank=[0, 1, 2, 3] * 2),
    "8x8": topoep.Topology(num_nodes=8, ranks_per_node=8),
}


def routed_ids(tokens: int, top_k: int, experts: int, seed: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.randn(experts, generator=generator).mul(1.5).exp()
    noise = torch.rand(tokens, experts, generator=generator).log().neg()
    ids = (noise / popularity).topk(top_k, largest=False).indices.to(dtype)
    if tokens:
        ids[:: max(tokens // 7, 1), 0] = -1
        ids[tokens // 2, 0] = experts + 5
    return ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 257, 8192])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_planning_and_rerouting(name, tokens, dtype):
    topology = TOPOLOGIES[name]
    experts = 4 * topology.num_ranks
    ids = [routed_ids(tokens, 4, experts, seed, dtype) for seed in range(topology.num_ranks)]
    on = {}
    for device in ("cpu", "cuda"):
        balancer = topoep.Balancer(topology, experts, 2)
        here = [i.to(device) for i in ids]
        plan = balancer.plan(here)
        plan.validate()
        on[device] = [
            plan.counts,
            plan.slot_expert,
            plan.slot_source,
            plan.slot_tokens,
            plan.copy_offsets,
            plan.copy_slots,
            plan.split(),
            *balancer.reroute(here, plan),
            *plan.stats().values(),
        ]
    for cpu, cuda in zip(on["cpu"], on["cuda"], strict=True):
        assert cuda.device.type == "cuda"
        assert torch.equal(cpu, cuda.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows(dtype):
    generator = torch.Generator().manual_seed(0)
    tokens, top_k, width = 65, 3, 40
    row_of_pair = torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k)
    row_of_pair[5] = -1
    pair_of_row = torch.full((tokens * top_k,), -1)
    flat = row_of_pair.flatten()
    pair_of_row[flat[flat >= 0]] = torch.arange(tokens * top_k)[flat >= 0]
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.rand(tokens, top_k, generator=generator).to(wide)
    results = {}
    for device in ("cpu", "cuda"):
        maps = pair_of_row.to(device), row_of_pair.to(device)
        a = x.to(device).requires_grad_()
        w = weights.to(device).requires_grad_()
        y = ops.combine(ops.expand(a, *maps), *maps, w)
        y.backward(torch.ones_like(y))
        results[device] = [y.detach(), a.grad, w.grad]
    for cpu, cuda in zip(results["cpu"], results["cuda"], strict=True):
        assert torch.equal(cpu, cuda.cpu())


def test_transfers_between_simulated_ranks():
    """The host transports, with their kernels for packing and summing."""
    topology = TOPOLOGIES["2x4"]
    experts = 16
    counts = torch.full((8, experts), 10, dtype=torch.int32)
    counts[:, :2] = 500
    generator = torch.Generator().manual_seed(1)
    weights = [
        (torch.randn(2, 9, generator=generator), torch.randn(2, 3, generator=generator).bfloat16())
        for _ in range(8)
    ]
    grads = [
        (torch.randn(2, 9, generator=generator), torch.randn(2, 3, generator=generator).bfloat16())
        for _ in range(8)
    ]
    results = {}
    for device in ("cpu", "cuda"):
        balancer = topoep.Balancer(topology, experts, 2)
        plan = balancer.plan_from_counts(counts.to(device))
        here = [tuple(t.to(device) for t in rank) for rank in weights]
        guests = balancer.replicate(here, plan)
        balancer.reduce_grads([tuple(t.to(device) for t in rank) for rank in grads], plan, out=here)
        results[device] = [t for rank in [*guests, *here] for t in rank]
    for cpu, cuda in zip(results["cpu"], results["cuda"], strict=True):
        assert torch.equal(cpu, cuda.cpu())
