# SPDX-License-Identifier: Apache-2.0
"""Transport nccl between the GPUs of this machine, against transport c10d, rank by rank."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import topoep
from tests.distributed.reference import make_problem, make_weights

pytestmark = pytest.mark.nccl

EXPERTS_PER_RANK, HIDDEN, WIDTH, TOP_K = 4, 64, 96, 2


def run_on_gpus(function, *arguments) -> None:
    """Calls ``function(rank, *arguments)`` in a process per GPU, at most 8."""
    world = min(torch.cuda.device_count(), 8)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_main, (world, f"file://{folder}/store", function, arguments), nprocs=world)


def _main(rank: int, world: int, store: str, function, arguments) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=store, rank=rank, world_size=world, device_id=device
    )
    try:
        function(rank, world, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train(rank: int, world: int, transport: str, chunks: int) -> list[torch.Tensor]:
    """Two layers, three microbatches in flight: all outputs and gradients."""
    experts = EXPERTS_PER_RANK * world
    topology = topoep.Topology(num_nodes=1, ranks_per_node=world)
    balancer = topoep.Balancer(topology, experts, 2, group=dist.group.WORLD, transport=transport)
    layers = []
    for i in range(2):
        layer = topoep.BalancedExperts(
            experts, HIDDEN, WIDTH, balancer=balancer, num_chunks=chunks
        ).cuda()
        gate_up, down = make_weights(experts, HIDDEN, WIDTH, torch.float32, seed=i)
        mine = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
        with torch.no_grad():
            layer.gate_up_proj.copy_(gate_up[mine])
            layer.down_proj.copy_(down[mine])
        layers.append(layer)
    runs = []
    for seed in range(3):
        problem = make_problem(rank, 100 + 7 * rank, TOP_K, experts, HIDDEN, torch.float32, seed)
        x = problem.x.cuda().requires_grad_()
        y = x
        for layer in layers:
            y = y + layer(y, problem.ids.cuda(), problem.weights.cuda())
        runs.append((x, y, problem.grad_y.cuda()))
    for _, y, grad in runs:
        y.backward(grad)
    tensors = [t for x, y, _ in runs for t in (y.detach(), x.grad)]
    tensors += [p.grad for layer in layers for p in layer.parameters()]
    balancer.close()
    return tensors


def same_as_c10d(rank: int, world: int, chunks: int) -> None:
    expected = train(rank, world, "c10d", 1)
    for got, wanted in zip(train(rank, world, "nccl", chunks), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("chunks", [1, 2])
def test_training_gives_the_bits_of_transport_c10d(chunks):
    run_on_gpus(same_as_c10d, chunks)


def a_peer_dies(rank: int, world: int) -> None:
    os.environ["TOPOEP_TIMEOUT_S"] = "3"
    topology = topoep.Topology(num_nodes=1, ranks_per_node=world)
    balancer = topoep.Balancer(
        topology, EXPERTS_PER_RANK * world, 1, group=dist.group.WORLD, transport="nccl"
    )
    ids = torch.zeros(10, TOP_K, dtype=torch.int64, device="cuda")
    balancer.plan(ids)
    torch.cuda.synchronize()
    if rank != world - 1:
        balancer.plan(ids)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match=f"it waited for rank {world - 1}"):
            balancer.plan(ids)
        with pytest.raises(RuntimeError, match="make a new Balancer"):
            balancer.plan(ids)


def test_a_rank_that_stays_away_ends_in_an_error_on_the_others():
    run_on_gpus(a_peer_dies)
