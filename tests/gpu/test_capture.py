# SPDX-License-Identifier: Apache-2.0
"""A step can be captured in a CUDA graph, and nothing in it waits for the host.

Transport nccl runs here with a group of one rank: real windows and kernels, but no copies. What
moves data between ranks is captured in test_data_plane.py.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

import topoep
from topoep.transports.nccl import local_problem

TOPOLOGY = topoep.Topology(num_nodes=2, ranks_per_node=2)
EXPERTS, TOP_K, TOKENS = 16, 2, 200


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ids_of(seed: int, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.randn(EXPERTS, generator=generator).mul(2).exp()
    return [
        torch.multinomial(popularity.expand(TOKENS, -1), TOP_K, generator=generator).cuda()
        for _ in range(ranks)
    ]


def results_of(balancer: topoep.Balancer, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    plan = balancer.plan(ids)
    return [plan.slot_expert, plan.slot_source, plan.slot_tokens, *balancer.reroute(ids, plan)]


def test_plan_and_reroute_are_captured_and_follow_new_ids():
    balancer = topoep.Balancer(TOPOLOGY, EXPERTS, 2)
    ids = ids_of(0, 4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results_of(balancer, ids)  # what is made once is made here
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results_of(balancer, ids)
    seen = set()
    for seed in range(1, 5):
        fresh = ids_of(seed, 4)
        for old, new in zip(ids, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        expected = results_of(balancer, fresh)
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
        seen.add(tuple(captured[0].flatten().tolist()))
    assert len(seen) > 1, "the plans are meant to differ"


def test_planning_and_rerouting_do_not_synchronise():
    balancer = topoep.Balancer(TOPOLOGY, EXPERTS, 2)
    ids = ids_of(0, 4)
    results_of(balancer, ids)
    with no_synchronisation():
        plan = balancer.plan(ids)
        balancer.reroute(ids, plan)
        plan.stats()
        plan.split()


@pytest.fixture
def group_of_one(tmp_path):
    problem = local_problem(topoep.Topology(num_nodes=1, ranks_per_node=1))
    if problem:
        pytest.skip(f"transport nccl cannot be used: {problem}")
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def balancer(group_of_one):
    made = topoep.Balancer(
        topoep.Topology(num_nodes=1, ranks_per_node=1),
        EXPERTS,
        2,
        group=group_of_one,
        transport="nccl",
    )
    yield made
    made.close()


def whole_step(balancer: topoep.Balancer, ids: torch.Tensor, weights, main_grads) -> torch.Tensor:
    """Forward and backward of a layer whose trainer accumulates gradients itself."""
    plan = balancer.plan(ids)
    routed = balancer.reroute(ids, plan)
    pending = balancer.replicate_async(weights, plan)
    home = weights[0].sum(dim=(1, 2))
    guests = pending.wait()
    y = balancer.release(home.sum() + guests[0].sum(), plan)
    slot_grads = tuple(torch.zeros_like(g) for g in guests)
    balancer.reduce_grads(slot_grads, plan, out=main_grads)
    return y + routed.sum()


def test_a_whole_step_does_not_synchronise_and_is_captured(balancer):
    ids = ids_of(0, 1)[0]
    weights = (torch.randn(EXPERTS, 8, 4, device="cuda"),)
    main_grads = (torch.ones(EXPERTS, 8, 4, device="cuda"),)
    balancer.share_weights(weights)
    with torch.no_grad():
        for _ in range(2):  # set-up
            whole_step(balancer, ids, weights, main_grads)
        with no_synchronisation():
            whole_step(balancer, ids, weights, main_grads)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = whole_step(balancer, ids, weights, main_grads)
        ids.copy_(ids_of(1, 1)[0])
        graph.replay()
        expected = whole_step(balancer, ids, weights, main_grads)
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert bool((main_grads[0] == 1).all())


def test_training_with_autograd_does_not_synchronise(balancer):
    """The layer's own dispatcher excepted: splits of an all-to-all are host integers."""
    weights = (torch.nn.Parameter(torch.randn(EXPERTS, 8, 4, device="cuda")),)
    balancer.share_weights(weights)
    ids = ids_of(0, 1)[0]

    def step() -> None:
        plan = balancer.plan(ids)
        guests = balancer.replicate(weights, plan)
        y = balancer.release(weights[0].sum() + guests[0].sum(), plan)
        balancer.prefetch(y, plan).backward()

    step()
    with no_synchronisation():
        step()
    assert bool((weights[0].grad == 2).all())


def test_training_with_autograd_is_captured(balancer):
    """Backward too, whose sums are on a stream of their own."""
    weights = (torch.nn.Parameter(torch.randn(EXPERTS, 8, 4, device="cuda")),)
    balancer.share_weights(weights)
    ids = ids_of(0, 1)[0]

    def step() -> None:
        weights[0].grad = None
        plan = balancer.plan(ids)
        guests = balancer.replicate_async(weights, plan).wait()
        y = balancer.release((weights[0] ** 2).sum() + guests[0].sum(), plan)
        balancer.prefetch(y, plan).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    expected = 2 * weights[0].detach()
    assert torch.equal(weights[0].grad, expected)
    weights[0].grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        weights[0].grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(weights[0].grad, expected)


def test_counts_and_plan_take_three_kernels(balancer):
    """Histogram, exchange, and a solve that also makes the transfer lists."""
    ids = ids_of(0, 1)[0]
    balancer.plan(ids)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        balancer.plan(ids)
        torch.cuda.synchronize()
    on_device = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    stages = ("histogram", "exchange_counts", "solve")
    assert sorted(next((s for s in stages if s in n), n) for n in on_device) == sorted(stages)


def test_new_tensors_while_capturing_are_refused(balancer):
    weights = (torch.randn(EXPERTS, 3, device="cuda"),)
    plan = balancer.plan(ids_of(0, 1)[0])
    with (
        pytest.raises(RuntimeError, match="run one step before capturing"),
        torch.no_grad(),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        balancer.replicate(weights, plan)


def test_closing_gives_the_memory_back(group_of_one):
    topology = topoep.Topology(num_nodes=1, ranks_per_node=1)
    free = []
    for _ in range(3):
        made = topoep.Balancer(topology, EXPERTS, 1, group=group_of_one, transport="nccl")
        weights = torch.randn(EXPERTS, 1 << 20, device="cuda")
        made.share_weights([weights])
        made.close()
        del weights, made
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert abs(free[2] - free[1]) < 32 << 20
