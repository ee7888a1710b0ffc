# SPDX-License-Identifier: Apache-2.0
"""prefetch placed further up: copies are fetched while the layer above is in backward."""

from __future__ import annotations

import re
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import topoep
from tests.distributed.fake_plane import FakeConnector
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import make_problem
from tests.distributed.test_experts import HIDDEN, Setup, build_layers, problems_of
from tests.distributed.test_streams import balancer_with_streams, check_launches
from tests.distributed.test_transports import hot_counts
from topoep.recompute import in_backward

NODES, TOKENS = [0, 0, 1, 1], [24, 9, 0, 30]
LAYERS = 4

#: Where the copies of a layer are fetched again: with how many buffers, and how many blocks up.
PLACES = {
    "own output": (1, None),
    "next attention": (1, 1),
    "next MoE layer": (2, 1),
    "next but one": (3, 2),
    "more buffers than needed": (4, 1),
}


class Model(torch.nn.Module):
    """Blocks of a layer that stands for attention, and an MoE layer, all with the same routing."""

    def __init__(self, setup: Setup, rank: int, place: str, silent: int | None = None) -> None:
        super().__init__()
        self.place, self.silent, self.recompute = place, silent, setup.recompute
        buffers, self.distance = PLACES[place]
        setup.buffers = buffers
        self.experts = torch.nn.ModuleList(build_layers(setup, rank, dist.group.WORLD))
        torch.manual_seed(0)
        self.attention = torch.nn.ModuleList(
            torch.nn.Linear(HIDDEN, HIDDEN, dtype=setup.dtype) for _ in self.experts
        )
        self.log: list[str] = []
        self.kept: deque[torch.Tensor] = deque()

    def block(self, i, h, ids, weights):
        h = h + self.attention[i](h).tanh()
        if self.place == "next attention" and i:
            h = self.experts[i - 1].prefetch(h)
        y = self.experts[i](h, ids.clone(), weights)
        if i == self.silent:
            self.kept.append(y)  # with its graph, so that its backward could still come
            y = y.detach()
        return h + y

    def forward(self, h, ids, weights):
        if self.recompute == "whole":
            contexts = self.experts[0].balancer.checkpoint_contexts
            arguments = (h, ids, weights)
            return checkpoint(self.blocks, *arguments, use_reentrant=False, context_fn=contexts)
        return self.blocks(h, ids, weights)

    def blocks(self, h, ids, weights):
        for i in range(len(self.experts)):
            arguments = (i, h, ids, weights)
            if self.recompute == "contexts":
                contexts = self.experts[i].balancer.checkpoint_contexts
                h = checkpoint(self.block, *arguments, use_reentrant=False, context_fn=contexts)
            elif self.recompute == "layer":
                h = checkpoint(self.block, *arguments, use_reentrant=False)
            else:
                h = self.block(*arguments)
            if h.requires_grad:
                h.register_hook(lambda grad, i=i: self.log.append(f"block {i}"))
            if self.place != "next attention" and self.distance and i >= self.distance:
                h = self.experts[i - self.distance].prefetch(h)
        return h

    def watch(self) -> None:
        """Notes transfers in the log, by layer: the order of a forward pass gives the numbers."""
        transport = self.experts[0].balancer.transport
        start, reduce = transport.start_replicate, transport.reduce_grads
        layer_of: dict[int, int] = {}

        def start_replicate(plan, *arguments):
            self.log.append(f"fetch {layer_of.setdefault(plan.token, len(layer_of))}")
            return start(plan, *arguments)

        def reduce_grads(plan, *arguments):
            self.log.append(f"reduce {layer_of[plan.token]}")
            reduce(plan, *arguments)

        transport.start_replicate, transport.reduce_grads = start_replicate, reduce_grads


def train(model: Model, setup: Setup, rank: int, steps: int = 2) -> bytes:
    """Outputs and gradients of some steps, as bytes; the oldest microbatch's backward first."""
    tensors = []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        runs = []
        for problem in problems_of(setup, rank):
            x = problem.x.clone().requires_grad_()
            w = problem.weights.clone().requires_grad_()
            runs.append((problem, x, w, model(x, problem.ids, w)))
        with torch.no_grad():  # an evaluation before backward
            tensors.append(model(problem.x, problem.ids, problem.weights))
        for problem, x, w, y in runs:
            y.backward(problem.grad_y)
            tensors += [y, x.grad, w.grad]
        tensors += [p.grad for p in trained if p.grad is not None]
        tensors = [t.detach().clone() for t in tensors]
        optimizer.step()
    return b"".join(t.numpy().tobytes() for t in tensors)


# ---- results -------------------------------------------------------------------------------------

CHANGES = [
    {},
    {"tokens": [0, 30, 0, 0]},
    {"microbatches": 3},
    {"microbatches": 3, "recompute": "contexts"},
    {"recompute": "layer", "tokens": [24, 9, 1, 30]},
    {"microbatches": 2, "recompute": "whole"},
    {"frozen": True},
    {"frozen": True, "recompute": "whole"},
    {"chunks": 2},
    {"policy": "keep"},
]


def setup_of(change: dict) -> Setup:
    given = {"nodes": NODES, "experts": 8, "tokens": TOKENS, "layers": LAYERS}
    return Setup(**(given | {"dtype": torch.float32} | change))


def places_that_differ(rank: int, change: dict, fake: bool) -> list[str]:
    """The places of prefetch whose training differs in a bit from that without."""
    results = {}
    for place in list(PLACES)[: 3 if fake else None]:
        if fake:
            topoep.transports.NcclConnector = FakeConnector
        model = Model(setup_of(change), rank, place)
        assert model.experts[0].balancer.transport.name == ("nccl" if fake else "c10d")
        results[place] = train(model, setup_of(change), rank)
    plan = model.experts[0].balancer.plan(problems_of(setup_of(change), rank)[0].ids)
    assert int(plan.stats()["copies"]) > 0
    return [place for place in results if results[place] != results["own output"]]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_no_bit_changes_wherever_copies_are_fetched(change):
    assert run_ranks(4, places_that_differ, change, False) == [[]] * 4


@pytest.mark.parametrize("change", [{}, {"microbatches": 2, "recompute": "contexts"}], ids=str)
def test_no_bit_changes_with_transport_nccl(change):
    assert run_ranks(4, places_that_differ, change, True) == [[]] * 4


def train_partly(rank: int, kind: str, layer: int) -> list[str]:
    """One layer is frozen, or its output is used without a gradient."""
    results = {}
    for place in PLACES:
        model = Model(setup_of({}), rank, place, layer if kind == "silent" else None)
        if kind == "frozen":
            model.experts[layer].requires_grad_(False)
        results[place] = train(model, setup_of({}), rank)
    return [place for place in PLACES if results[place] != results["own output"]]


@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("kind", ["frozen", "silent"])
def test_layers_without_gradients_of_their_own(kind, layer):
    assert run_ranks(4, train_partly, kind, layer) == [[]] * 4


# ---- order ---------------------------------------------------------------------------------------


def backward_log(rank: int, place: str, change: dict) -> list[str]:
    setup = setup_of(change)
    model = Model(setup, rank, place)
    model.watch()
    (problem,) = problems_of(setup, rank)
    y = model(problem.x.clone().requires_grad_(), problem.ids, problem.weights)
    assert model.log == [f"fetch {layer}" for layer in range(LAYERS)]
    model.log.clear()
    y.backward(problem.grad_y)
    return model.log


#: "block i": backward is through with the blocks above i, and comes to block i. The copies of as
#: many layers as there are buffers are still there from forward.
LOGS = {
    "own output": """
        block 3            reduce 3
        block 2  fetch 2   reduce 2
        block 1  fetch 1   reduce 1
        block 0  fetch 0   reduce 0""",
    "next attention": """
        block 3            reduce 3  fetch 2
        block 2            reduce 2  fetch 1
        block 1            reduce 1  fetch 0
        block 0            reduce 0""",
    "next MoE layer": """
                 block 3   reduce 3
        fetch 1  block 2   reduce 2
        fetch 0  block 1   reduce 1
                 block 0   reduce 0""",
    "next but one": """
                 block 3   reduce 3
        fetch 0  block 2   reduce 2
                 block 1   reduce 1
                 block 0   reduce 0""",
}


@pytest.mark.parametrize("place", LOGS)
@pytest.mark.parametrize("recompute", ["", "contexts"])
def test_fetches_begin_before_the_layer_above_is_in_backward(place, recompute):
    """And in the same order on all ranks, one of which has no tokens."""
    expected = re.split(r"\s{2,}", LOGS[place].strip())
    assert run_ranks(4, backward_log, place, {"recompute": recompute}) == [expected] * 4


def log_of_a_layer_without_gradient(rank: int, keep: bool) -> list[str]:
    model = Model(setup_of({}), rank, "next MoE layer", silent=0)
    if not keep:
        model.kept = deque(maxlen=0)
    model.watch()
    (problem,) = problems_of(setup_of({}), rank)
    y = model(problem.x.clone().requires_grad_(), problem.ids, problem.weights)
    model.log.clear()
    y.backward(problem.grad_y)
    return model.log


@pytest.mark.parametrize("keep", [True, False])
def test_a_layer_without_gradient_is_fetched_at_most_for_nothing(keep):
    for log in run_ranks(4, log_of_a_layer_without_gradient, keep):
        assert [e for e in log if e.endswith("0")] == ["fetch 0"] * keep + ["block 0"]


def call_on_three_ranks(rank: int) -> str:
    stack = build_layers(setup_of({"layers": 2}), rank, dist.group.WORLD)
    (problem,) = problems_of(setup_of({}), rank)
    h = problem.x.clone().requires_grad_()
    h = stack[0](h, problem.ids, problem.weights)
    try:
        h = stack[0].prefetch(h) if rank != 2 else h
        stack[1](h, problem.ids, problem.weights)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_leaves_it_out_is_told_when_debugging(monkeypatch):
    monkeypatch.setenv("TOPOEP_DEBUG", "1")
    for text in run_ranks(4, call_on_three_ranks, timeout_s=30):
        assert "rank 0 calls prefetch() while rank 2 calls plan()" in text


def streams_of_three_layers(rank: int) -> tuple[list[str], list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        balancer, streams = balancer_with_streams(patch, slot_buffers=2)
        weights = [torch.ones(3, 4, requires_grad=True) for _ in range(3)]
        balancer.share_weights(weights)
        y, plans = torch.ones(()), []
        for i, weight in enumerate(weights):
            plans.append(balancer.plan_from_counts(hot_counts(i)))
            (copies,) = balancer.replicate((weight,), plans[i])
            y = balancer.release(y * (weight.sum() + copies.sum()), plans[i])
            if i:
                y = balancer.prefetch(y, plans[i - 1])
        streams.log.append("backward")
        y.backward()
        check_launches(streams.log)
        return streams.log[streams.log.index("backward") + 1 :]


def test_copies_travel_beside_the_backward_of_the_layer_above():
    for log in run_ranks(4, streams_of_three_layers):
        launches = [line for line in log if re.match("replicate|reduce", line)]
        assert launches == ["reduce on side 2", "replicate on side 1"] + ["reduce on side 2"] * 2
        fetch = log.index("replicate on side 1")
        done = log[fetch + 1].removeprefix("record ")
        # Not before main has enqueued the backward of the layer that had these slots.
        assert log[fetch - 1] == "side 1 waits for main"
        # Only the experts of its own layer wait for it, so after the sums of the layer above.
        assert log.index(f"main waits for {done}") > log.index("reduce on side 2", fetch)


# ---- what is refused -----------------------------------------------------------------------------


def local_layers(buffers: int, layers: int) -> tuple[list[topoep.BalancedExperts], list]:
    balancer = topoep.Balancer(topoep.Topology(2, 2), 8, 2, slot_buffers=buffers)
    stack = [topoep.BalancedExperts(8, HIDDEN, 8, balancer=balancer) for _ in range(layers)]
    problems = [make_problem(rank, 20, 2, 8, HIDDEN, torch.float32) for rank in range(4)]
    return stack, problems


def run(layer: topoep.BalancedExperts, problems, h):
    return layer(h, [p.ids for p in problems], [p.weights for p in problems])


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_more_layers_in_between_than_buffers_are_refused_in_forward(buffers):
    stack, problems = local_layers(buffers, buffers + 1)
    h = [p.x.clone().requires_grad_() for p in problems]
    for layer in stack[:buffers]:
        h = run(layer, problems, h)
    h = stack[0].prefetch(h)
    h = run(stack[buffers], problems, h)
    h = stack[1].prefetch(h) if buffers > 1 else h
    with pytest.raises(RuntimeError, match=r"slot_buffers=\.\.\) with one more for each plan"):
        stack[0].prefetch(h)
    sum(y.sum() for y in h).backward()  # the layers themselves are as they were


def test_without_autograd_or_copies_it_does_nothing():
    stack, problems = local_layers(1, 2)
    with pytest.raises(RuntimeError, match="there was none"):
        stack[0].prefetch([p.x for p in problems])
    with torch.no_grad():
        h = run(stack[1], problems, run(stack[0], problems, [p.x for p in problems]))
        assert stack[0].prefetch(h) is h
    plain = topoep.BalancedExperts(8, HIDDEN, 8, topology=topoep.Topology(2, 2), spare_slots=0)
    h = run(plain, problems, [p.x.clone().requires_grad_() for p in problems])
    sum(y.sum() for y in plain.prefetch(h)).backward()


def with_fsdp(rank: int, reshard: bool) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    setup = Setup([0, 1], 6, [30, 20], layers=3, buffers=2)
    place = mesh["ep"].get_local_rank()
    layers = build_layers(setup, place, mesh["ep"].get_group())
    for layer in layers:
        fully_shard(layer, mesh=mesh["fsdp"], reshard_after_forward=reshard)
    (problem,) = problems_of(setup, place)
    grads = []
    for early in (False, True):
        h = x = problem.x.clone().requires_grad_()
        for i, layer in enumerate(layers):
            h = h + layer(h, problem.ids, problem.weights)
            if early and i:
                try:
                    h = layers[i - 1].prefetch(h)
                except RuntimeError as error:
                    return str(error)
        h.backward(problem.grad_y)
        grads.append(x.grad)
    return "equal" if torch.equal(*grads) else "not equal"


def test_weights_that_fsdp_has_freed_are_refused_in_forward():
    for text in run_ranks(4, with_fsdp, True):
        assert "fully_shard(experts, reshard_after_forward=False)" in text
    assert run_ranks(4, with_fsdp, False) == ["equal"] * 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_fetches_early_too(backend):
    stack, problems = local_layers(2, 3)
    started = []
    start = stack[0].balancer.transport.start_replicate

    def start_replicate(plan, *arguments):
        started.append(in_backward())
        return start(plan, *arguments)

    stack[0].balancer.transport.start_replicate = start_replicate

    def model(*h):
        for i, layer in enumerate(stack):
            ys = run(layer, problems, list(h))
            h = [x * 2 + y for x, y in zip(h, ys, strict=True)]
            h = stack[i - 1].prefetch(h) if i else h
        return sum(y.sum() for y in h)

    grads = []
    for function in (model, torch.compile(model, backend=backend)):
        xs = [p.x.clone().requires_grad_() for p in problems]
        function(*xs).backward()
        grads.append(torch.cat([x.grad for x in xs]))
    assert torch.equal(*grads)
    assert started == [False, False, False, True] * 2
