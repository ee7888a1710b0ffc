# SPDX-License-Identifier: Apache-2.0
"""Uses of plans and copies that go beyond one replicate and one release per plan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import topoep
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import dense_layer, make_problem
from topoep import Topology

RANKS, EXPERTS, HOME, HIDDEN = 4, 8, 2, 3


@pytest.fixture(params=["refetch", "keep"])
def balancer(request) -> topoep.Balancer:
    return topoep.Balancer(Topology(2, 2), EXPERTS, 2, replica_policy=request.param)


def skewed_plan(balancer: topoep.Balancer) -> topoep.Plan:
    counts = torch.full((RANKS, EXPERTS), 10, dtype=torch.int32)
    counts[:, 0] = 90
    plan = balancer.plan_from_counts(counts)
    assert int(plan.stats()["copies"]) > 0
    return plan


def home_weights(value: float) -> list[tuple[Tensor]]:
    return [(torch.full((HOME, HIDDEN), value, requires_grad=True),) for _ in range(RANKS)]


def copies_in(guests: list[tuple[Tensor]], plan: topoep.Plan) -> Tensor:
    return torch.stack([tensors[0] for tensors in guests])[plan.slot_expert >= 0]


def test_several_replicates_of_one_plan_have_slots_of_their_own(balancer):
    """Gate and up projections of the same shape, fetched by two calls."""
    plan = skewed_plan(balancer)
    for _ in range(2):  # again after the release
        gate = balancer.replicate(home_weights(1.0), plan)
        up = balancer.replicate(home_weights(-1.0), plan)
        assert (copies_in(gate, plan) == 1).all()
        assert (copies_in(up, plan) == -1).all()
        outputs = [g[0].sum() * u[0].sum() for g, u in zip(gate, up, strict=True)]
        sum(balancer.release(outputs, plan)).backward()


def test_a_plan_used_again_sees_the_weights_of_now(balancer):
    plan = skewed_plan(balancer)
    weights = home_weights(1.0)
    with torch.no_grad():
        balancer.replicate(weights, plan)
        for (weight,) in weights:
            weight.data.fill_(5.0)
        assert (copies_in(balancer.replicate(weights, plan), plan) == 5).all()
        for value in range(6, 12):  # temporaries, whose addresses come again
            halves = [(w.detach().fill_(value).bfloat16(),) for (w,) in weights]
            assert (copies_in(balancer.replicate(halves, plan), plan) == value).all()


def test_a_plan_used_for_several_steps(balancer):
    """The graph of the step before may still be alive when weights have changed."""
    plan = skewed_plan(balancer)
    weights = home_weights(1.0)
    for step in range(3):
        guests = balancer.replicate(weights, plan)
        loss = sum(balancer.release([g.sum() for (g,) in guests], plan))
        loss.backward()  # loss stays alive into the next step
        with torch.no_grad():
            for (weight,) in weights:
                assert weight.grad is not None
                weight -= 0.1 * weight.grad
        assert step < 3


def unused_copies(rank: int) -> list[float]:
    """Only rank 0 computes with its copies; backward is collective all the same."""
    balancer = topoep.Balancer(Topology(2, 2), EXPERTS, 2, group=dist.group.WORLD)
    plan = skewed_plan(balancer)
    weight = torch.ones(HOME, HIDDEN, requires_grad=True)
    (guests,) = balancer.replicate((weight,), plan)
    used = guests.sum() if rank == 1 else torch.zeros((), requires_grad=rank == 2)
    del guests
    balancer.release(used, plan).backward()
    grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return grad.sum(1).tolist()


def test_experts_that_skip_their_copies_do_not_leave_the_others_waiting():
    grads = run_ranks(RANKS, unused_copies, timeout_s=30)
    assert grads == [[HIDDEN, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def changing_on_one_rank(rank: int) -> int:
    balancer = topoep.Balancer(Topology(2, 2), EXPERTS, 2, group=dist.group.WORLD)
    plan = skewed_plan(balancer)
    weight, kept = torch.ones(HOME, HIDDEN, requires_grad=True), []
    for _ in range(3):
        (guests,) = balancer.replicate((weight,), plan)
        y = balancer.release(guests.sum(), plan)
        y.backward()
        if rank == 0:
            kept.append(y)  # only this rank keeps the graph, and changes its weights
            weight.data.mul_(2)
    return len(kept)


def test_collectives_do_not_depend_on_what_a_rank_keeps_or_changes():
    assert run_ranks(RANKS, changing_on_one_rank, timeout_s=30) == [3, 0, 0, 0]


def test_checkpoint_contexts_notice_other_routing():
    layer = topoep.BalancedExperts(EXPERTS, HIDDEN, 4, topology=Topology(2, 2))
    problems = [make_problem(r, 9, 2, EXPERTS, HIDDEN, torch.float32) for r in range(RANKS)]
    calls = []

    def noisy(*xs):
        calls.append(1)
        ids = [p.ids if len(calls) == 1 else p.ids.flip(0) for p in problems]
        return torch.cat(layer(list(xs), ids, [p.weights for p in problems]))

    y = checkpoint(
        noisy,
        *[p.x.requires_grad_() for p in problems],
        use_reentrant=False,
        context_fn=layer.balancer.checkpoint_contexts,
    )
    with pytest.raises(RuntimeError, match="routes tokens as no forward pass in flight did"):
        y.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_breaks_its_graph_at_the_layer(backend):
    layer = topoep.BalancedExperts(EXPERTS, HIDDEN, 4, topology=Topology(1, 1))
    problem = make_problem(0, 9, 2, EXPERTS, HIDDEN, torch.float32)

    def model(x, ids, weights):
        return layer([x * 2], [ids], [weights])[0] + 1

    arguments = (problem.x, problem.ids, problem.weights)
    assert torch.equal(torch.compile(model, backend=backend)(*arguments), model(*arguments))


def test_training_after_an_evaluation_in_inference_mode():
    layer = topoep.BalancedExperts(EXPERTS, HIDDEN, 4, topology=Topology(2, 2))
    problems = [make_problem(r, 9, 2, EXPERTS, HIDDEN, torch.float32) for r in range(RANKS)]
    arguments = ([p.ids for p in problems], [p.weights for p in problems])
    with torch.inference_mode():
        seen = layer([p.x for p in problems], *arguments)
    y = layer([p.x.requires_grad_() for p in problems], *arguments)
    assert all(torch.equal(a, b) for a, b in zip(seen, y, strict=True))
    torch.cat(y).sum().backward()


def test_autocast():
    """Mixed precision as PyTorch does it: float32 parameters, bfloat16 activations."""
    layer = topoep.BalancedExperts(EXPERTS, HIDDEN, 4, topology=Topology(2, 2))
    problems = [make_problem(r, 30, 2, EXPERTS, HIDDEN, torch.float32) for r in range(RANKS)]
    xs = [p.x.bfloat16().requires_grad_() for p in problems]
    arguments = ([p.ids for p in problems], [p.weights for p in problems])
    with pytest.raises(TypeError, match=r"x has dtype torch.bfloat16.*torch.autocast"):
        layer(xs, *arguments)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(xs, *arguments)
    torch.autograd.backward([t.float().sum() for t in y])
    for got, problem, x in zip(y, problems, xs, strict=True):
        expected = dense_layer(problem.x, problem.ids, problem.weights, *layer.parameters())
        torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)
        assert x.grad is not None
    assert layer.gate_up_proj.grad.dtype == torch.float32


def test_one_number_per_expert_has_a_gradient(balancer):
    plan = skewed_plan(balancer)
    scales = [(torch.ones(HOME, requires_grad=True),) for _ in range(RANKS)]
    guests = balancer.replicate(scales, plan)
    sum(balancer.release([g.sum() for (g,) in guests], plan)).backward()
    total = sum(float(scale.grad.sum()) for (scale,) in scales)
    assert total == int(plan.stats()["copies"])


def test_second_derivatives_are_refused():
    layer = topoep.BalancedExperts(EXPERTS, HIDDEN, 4, topology=Topology(2, 2))
    problems = [make_problem(r, 9, 2, EXPERTS, HIDDEN, torch.float32) for r in range(RANKS)]
    xs = [p.x.requires_grad_() for p in problems]
    y = layer(xs, [p.ids for p in problems], [p.weights for p in problems])
    (grad,) = torch.autograd.grad(torch.cat(y).square().sum(), xs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_layer_on_the_meta_device():
    """Large models are built without memory and filled from a checkpoint."""
    with torch.device("meta"):
        layer = topoep.BalancedExperts(EXPERTS, HIDDEN, 4, topology=Topology(2, 2))
    assert layer.gate_up_proj.is_meta
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert bool(layer.gate_up_proj.isfinite().all())
    assert layer.balancer.plan([torch.zeros(3, 1, dtype=torch.int64)] * RANKS).counts.sum() == 12


def bad_set_up(rank: int, what: str) -> str:
    options = {"topology": Topology(2, 2), "transport": "c10d"}
    if rank == 2:
        options |= {
            "size": {"topology": Topology(2, 4)},
            "type": {"topology": "2x2"},
            "name": {"transport": "gloo"},
            "sms": {"comm_sms": 0},
        }[what]
    try:
        topoep.Balancer(num_experts=8, group=dist.group.WORLD, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("size", "the group has 4 ranks, the topology 8"),
        ("type", "topology is a str; expected a topoep.Topology"),
        ("name", "transport='gloo'; expected one of"),
        ("sms", "comm_sms"),
    ],
)
def test_a_bad_argument_of_one_rank_is_told_to_all(what, message):
    for text in run_ranks(RANKS, bad_set_up, what, timeout_s=30):
        assert message in text
