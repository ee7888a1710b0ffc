# SPDX-License-Identifier: Apache-2.0
"""In which order a step enqueues its transfers, on which streams, and what waits for what.

Order is seen on the CPU with gloo and a stand-in for the kernels; streams by stand-ins that write
down what is asked of them (fake_streams.py).
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import topoep
from tests.distributed.fake_plane import FakeConnector, FakePlane
from tests.distributed.fake_streams import CudaOnCpu, Streams
from tests.distributed.ranks import run_ranks
from tests.distributed.test_experts import Setup, build_layers, problems_of
from tests.distributed.test_transports import EXPERTS, SPARE, hot_counts, rank_weights
from topoep import replicas
from topoep.transports import c10d, nccl

NODES = [0, 0, 1, 1]


def use(connector: FakeConnector) -> FakeConnector:
    topoep.transports.NcclConnector = lambda: connector
    return connector


# ---- the order of a backward ---------------------------------------------------------------------


class Wrapper(torch.autograd.Function):
    """What FSDP2 puts on the inputs of a module: its backward takes the weights' gradients."""

    @staticmethod
    def forward(ctx, x, calls):
        ctx.calls = calls
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.calls.append("wrapper")
        return grad, None


def backward_of_a_layer(rank: int, chunks: int, wrapped: bool = False) -> list[str]:
    """What the backward of a layer and its router enqueues, in order.

    "router" and "weights": those gradients are there; "below": that of the layer's input is.
    """
    connector = use(FakeConnector())
    setup = Setup(NODES, 8, [24, 9, 0, 30], chunks=chunks, dtype=torch.float32)
    (layer,) = build_layers(setup, rank, dist.group.WORLD)
    (problem,) = problems_of(setup, rank)
    calls = connector.planes[0].calls
    original = c10d._Flight.start
    c10d._Flight.start = lambda *a: (calls.append("tokens"), original(*a))[1]
    router = torch.nn.Linear(problem.x.shape[1], 8, bias=False)
    below = problem.x.detach().requires_grad_()
    for name, leaves in (
        ("router", router.parameters()), ("weights", layer.parameters()), ("below", [below]),
    ):  # fmt: skip
        for leaf in leaves:
            leaf.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    x = below * 2
    scores = router(x * 1).softmax(-1).gather(1, problem.ids)
    y = layer(Wrapper.apply(x, calls) if wrapped else x, problem.ids, scores)
    calls.clear()
    y.backward(problem.grad_y)
    return [call for call in calls if not call.startswith("window")]


def test_gradients_start_home_before_those_of_the_tokens_and_join_after_the_router():
    for calls in run_ranks(4, backward_of_a_layer, 1):
        # Combined tokens go back, then the copies' gradients start, then those of the dispatch.
        assert calls == ["tokens", "reduce", "tokens", "router", "weights", "weights", "below"]


def test_they_join_before_a_wrapper_takes_the_gradients_of_the_weights():
    for calls in run_ranks(4, backward_of_a_layer, 1, True):
        assert calls[:6] == ["tokens", "reduce", "tokens", "weights", "weights", "wrapper"]


def test_with_chunks_they_start_before_the_home_experts_have_run():
    for calls in run_ranks(4, backward_of_a_layer, 3):
        assert calls[:4] == ["tokens", "tokens", "tokens", "reduce"]
        assert calls[4:] == ["tokens"] * 3 + ["router", "weights", "weights", "below"]


def weights_as_leaves(rank: int) -> list[str]:
    """What is given to replicate is the parameter itself, which the home experts use too."""
    connector = use(FakeConnector())
    balancer = topoep.Balancer(
        topoep.Topology(node_of_rank=NODES), EXPERTS, SPARE, group=dist.group.WORLD
    )
    calls = connector.planes[0].calls
    weight, x = torch.ones(3, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda p: calls.append("weights"))
    x.register_post_accumulate_grad_hook(lambda p: calls.append("dispatch"))
    plan = balancer.plan_from_counts(hot_counts(0))
    pending = balancer.replicate_async((weight,), plan)
    sent = x * 2
    home = weight.sum() * sent.sum()
    (guests,) = pending.wait()
    y = balancer.release(home + guests.sum() * sent.sum(), plan)
    calls.clear()
    y.backward()
    return [call for call in calls if not call.startswith("window")]


def test_the_sums_meet_the_gradients_of_the_home_experts_after_the_dispatch():
    for calls in run_ranks(4, weights_as_leaves):
        assert calls == ["reduce", "dispatch", "weights"]


def late_or_never(rank: int, ask: str) -> tuple[list[str], list[float]]:
    """Rank 1 does not wait for its copies where ``ask`` says so; release makes up for it."""
    connector = use(FakeConnector())
    balancer = topoep.Balancer(
        topoep.Topology(node_of_rank=NODES), EXPERTS, SPARE, group=dist.group.WORLD
    )
    calls = connector.planes[0].calls
    weight = torch.ones(3, 2, requires_grad=True)
    plan = balancer.plan_from_counts(hot_counts(0))
    pending = balancer.replicate_async((weight,), plan)
    home = weight.sum()
    if ask == "all" or rank != 1:
        (guests,) = pending.wait()
        y = home + guests.sum()
    else:
        y = home
    calls.clear()
    balancer.release(y, plan).backward()
    calls[:] = [call for call in calls if not call.startswith("window")]
    return calls, weight.grad[:, 0].tolist()


@pytest.mark.parametrize("ask", ["all", "all but rank 1"])
def test_a_rank_that_never_asks_for_its_copies_takes_part_in_backward(ask):
    plan = topoep.solve(hot_counts(0), topoep.Topology(node_of_rank=NODES), SPARE)
    used = [0 if ask != "all" and rank == 1 else 1 for rank in range(4)]
    for rank, (calls, grads) in enumerate(run_ranks(4, late_or_never, ask)):
        assert calls == ["reduce"]
        held = plan.slot_expert
        copies = [
            sum(used[r] * int((held[r] == e).sum()) for r in range(4))
            for e in range(3 * rank, 3 * rank + 3)
        ]
        assert grads == [1.0 + n for n in copies]


def modes(rank: int) -> None:
    use(FakeConnector())
    balancer = topoep.Balancer(
        topoep.Topology(node_of_rank=NODES), EXPERTS, SPARE, group=dist.group.WORLD
    )
    weight = torch.ones(3, 2, requires_grad=True)
    pending = balancer.replicate_async((weight,), balancer.plan_from_counts(hot_counts(0)))
    with torch.no_grad():
        assert pending.wait()[0].requires_grad, "as the mode was when the copies departed"


def test_gradients_follow_the_mode_in_which_copies_departed():
    run_ranks(4, modes)


# ---- streams -------------------------------------------------------------------------------------


class StreamPlane(FakePlane):
    """A plane on a device with streams, whose launches are noted."""

    streams: Streams

    def replicate(self, *arguments) -> None:
        self.streams.note("replicate")
        super().replicate(*arguments)

    def reduce(self, *arguments) -> None:
        self.streams.note("reduce")
        super().reduce(*arguments)


def balancer_with_streams(patch: pytest.MonkeyPatch, **options) -> tuple[topoep.Balancer, Streams]:
    streams = Streams(patch)
    topology, group = topoep.Topology(node_of_rank=NODES), dist.group.WORLD
    plane = StreamPlane(topology, group)
    plane.streams, plane.device = streams, CudaOnCpu("cpu")
    transport = nccl.NcclTransport(topology, group, plane)
    patch.setattr("topoep.balancer.make_transport", lambda *arguments: transport)
    streams.follow(replicas._Replicate)
    return topoep.Balancer(topology, EXPERTS, SPARE, group=group, **options), streams


def check_launches(log: list[str]) -> None:
    """Two launches of one kernel are on one stream, or the later stream waits for the earlier."""
    last: dict[str, str] = {}
    waits: set[tuple[str, str]] = set()
    for line in log:
        if found := re.fullmatch(r"(\S.*) waits for (\S.*)", line):
            waits.add((found[1], found[2]))
        if found := re.fullmatch(r"(replicate|reduce) on (.*)", line):
            kernel, stream = found.groups()
            before = last.get(kernel, stream)
            assert stream == before or (stream, before) in waits, log
            last[kernel] = stream
            waits = {pair for pair in waits if stream not in pair}


def two_layers(rank: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        balancer, streams = balancer_with_streams(patch)
        weights = [tuple(w.requires_grad_() for w in rank_weights(rank)[:1]) for _ in range(2)]
        y = torch.ones(())
        for i, layer_weights in enumerate(weights):
            balancer.share_weights(layer_weights)
            plan = balancer.plan_from_counts(hot_counts(i))
            pending = balancer.replicate_async(layer_weights, plan)
            streams.log.append("home experts")
            (guests,) = pending.wait()
            streams.log.append("copies")
            y = balancer.release(y * guests.float().sum(), plan)
            y = balancer.prefetch(y, plan)
        streams.log.append("backward")
        y.backward()
        streams.log.append("by hand")
        grads = torch.zeros(SPARE, *weights[0][0].shape[1:])
        balancer.reduce_grads((grads,), plan, out=(torch.zeros(3, *grads.shape[1:]),))
        check_launches(streams.log)
        # Nothing that a side stream reads or writes is given back to the allocator too early.
        for tensor in (plan.slot_expert, plan.copy_offsets, plan.copy_slots, plan.lists):
            assert tensor.data_ptr() in streams.kept
        for layer_weights in weights:
            assert layer_weights[0].data_ptr() in streams.kept
        return streams.log


def test_weights_and_gradients_travel_on_streams_of_their_own():
    for log in run_ranks(4, two_layers):
        start = log.index("backward")
        forward, backward = log[:start], log[start:]
        one_layer = [
            "side 1 waits for main", "replicate on side 1", "record event 0 of side 1",
            "home experts", "main waits for event 0 of side 1", "copies",
        ]  # fmt: skip
        assert forward[:6] == one_layer
        # The second layer's copies are still there. The sums wait for where the stream was when
        # backward reached the layer, and otherwise for what autograd makes them wait for.
        assert backward[1:4] == [
            "record event 2 of main", "side 2 waits for event 2 of main", "reduce on side 2",
        ]  # fmt: skip
        # The first layer's are fetched again, beside those sums.
        assert backward[4:11] == [
            "side 1 waits for main", "replicate on side 1", "record event 3 of side 1",
            "record event 4 of main", "main waits for event 3 of side 1",
            "side 2 waits for event 4 of main", "reduce on side 2",
        ]  # fmt: skip
        assert backward[11:] == ["by hand", "main waits for side 2", "reduce on main"]
