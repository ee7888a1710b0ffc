# SPDX-License-Identifier: Apache-2.0
"""Several plans in flight: who may fill the spare slots, and that stale use is noticed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import topoep
from tests.distributed.reference import make_problem

TOPOLOGY = topoep.Topology(num_nodes=1, ranks_per_node=2)


def make_balancer(**options) -> topoep.Balancer:
    return topoep.Balancer(TOPOLOGY, 4, 1, **options)


def plan_with_copy_of(balancer: topoep.Balancer, expert: int):
    """The other rank holds a copy of this expert."""
    counts = torch.full((2, 4), 10, dtype=torch.int32)
    counts[:, expert] = 200
    plan = balancer.plan_from_counts(counts)
    assert plan.slot_expert[1 - expert // 2].tolist() == [expert]
    return plan


def make_weights(requires_grad: bool = True):
    """Home weights [2, 1] of two ranks; expert e is the number e + 1."""
    return [(torch.tensor([[v], [v + 1.0]], requires_grad=requires_grad),) for v in (1.0, 3.0)]


def compute(guests) -> list[torch.Tensor]:
    return [guest[0] * 2 for guest in guests]


def test_a_lease_without_autograd_that_was_overwritten_is_noticed():
    balancer = make_balancer()
    first, second = plan_with_copy_of(balancer, 0), plan_with_copy_of(balancer, 3)
    with torch.no_grad():
        guests = balancer.replicate(make_weights(), first)
        balancer.replicate(make_weights(), second)
        with pytest.raises(RuntimeError, match="what they computed is wrong"):
            balancer.release(compute(guests), first)


def test_waiting_for_copies_that_were_overwritten_is_noticed():
    balancer = make_balancer()
    first, second = plan_with_copy_of(balancer, 0), plan_with_copy_of(balancer, 3)
    with torch.no_grad():
        pending = balancer.replicate_async(make_weights(), first)
        balancer.replicate(make_weights(), second)
        with pytest.raises(RuntimeError, match=r"slot_buffers=\.\.\) with one more"):
            pending.wait()


def test_backward_that_another_plan_interrupts_is_noticed():
    """The experts of the second plan run between the refetch for the first and its gradients."""
    balancer = make_balancer()
    first, second = plan_with_copy_of(balancer, 0), plan_with_copy_of(balancer, 3)

    def interrupt(grad: torch.Tensor) -> None:
        with torch.no_grad():
            balancer.replicate(make_weights(), second)

    guests = balancer.replicate(make_weights(), first)
    outputs = compute(guests)
    outputs[0].register_hook(interrupt)
    released = balancer.release(outputs, first)
    with pytest.raises(RuntimeError, match="what they computed is wrong"):
        sum(y.sum() for y in released).backward()


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_as_many_plans_at_a_time_as_buffers(buffers):
    balancer = make_balancer(slot_buffers=buffers)
    weights = make_weights()
    plans = [plan_with_copy_of(balancer, e) for e in (0, 3, 1, 2)]
    held = [balancer.replicate(weights, plan) for plan in plans[:buffers]]
    with pytest.raises(RuntimeError, match=r"balancer.release\(y, plan\)"):
        balancer.replicate(weights, plans[buffers])
    for plan, guests in zip(plans, held, strict=False):
        ((rank, expert),) = [(r, e) for r, (e,) in enumerate(plan.slot_expert.tolist()) if e >= 0]
        assert guests[rank][0].item() == expert + 1
    outputs = [compute(guests) for guests in held]
    released = [balancer.release(y, p) for y, p in zip(outputs, plans, strict=False)]
    balancer.replicate(weights, plans[buffers])  # a buffer is free again
    sum(y.sum() for ys in released for y in ys).backward()
    grads = torch.cat([w[0].grad for w in weights]).flatten().tolist()
    # Each copy's gradient is 2 per plan; the experts at home were not used here.
    used = [e for plan in plans[:buffers] for e in plan.slot_expert.flatten().tolist() if e >= 0]
    assert grads == [2.0 * used.count(e) for e in range(4)]


def test_plans_take_turns_at_the_buffers_which_are_made_when_first_used(monkeypatch):
    made = []
    original = topoep.balancer.SlotBuffer

    def counting(*arguments):
        made.append(arguments)
        return original(*arguments)

    monkeypatch.setattr("topoep.balancer.SlotBuffer", counting)
    balancer = make_balancer(slot_buffers=3)
    weights, used = make_weights(), []
    for n, expert in enumerate((0, 3, 1, 2, 0, 3)):
        plan = plan_with_copy_of(balancer, expert)
        guests = balancer.replicate(weights, plan)
        used.append(guests[0][0].data_ptr())
        balancer.release(compute(guests), plan)
        assert len(made) == min(n + 1, 3)
    assert len(set(used)) == 3
    assert used[3:] == used[:3]


def grads_of_layers(buffers: int, recompute: bool, layers: int = 4) -> list[torch.Tensor]:
    """Of layers in one checkpointed function, whose recomputation fetches for all of them first."""
    torch.manual_seed(0)
    balancer = topoep.Balancer(topoep.Topology(2, 2), 8, 2, slot_buffers=buffers)
    stack = [
        topoep.BalancedExperts(8, 12, 8, balancer=balancer, dtype=torch.float64)
        for _ in range(layers)
    ]
    problems = [make_problem(rank, 20 + rank, 2, 8, 12, torch.float64) for rank in range(4)]
    xs = [p.x.clone().requires_grad_() for p in problems]

    def segment(*h):
        for layer in stack:
            ys = layer(list(h), [p.ids for p in problems], [p.weights for p in problems])
            h = tuple(x + y for x, y in zip(h, ys, strict=True))
        return h

    contexts = {"context_fn": balancer.checkpoint_contexts}
    ys = checkpoint(segment, *xs, use_reentrant=False, **contexts) if recompute else segment(*xs)
    torch.autograd.backward(ys, [p.grad_y for p in problems])
    return [x.grad for x in xs] + [p.grad for layer in stack for p in layer.parameters()]


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_several_layers_in_one_checkpoint(buffers):
    """Each layer's slots are in backward where its recomputation has saved them."""
    expected = grads_of_layers(1, recompute=False)
    for grad, wanted in zip(grads_of_layers(buffers, recompute=True), expected, strict=True):
        assert torch.equal(grad, wanted)


def grads_of_plans_used_twice(buffers: int, recompute: bool, replicates: int) -> list[torch.Tensor]:
    """A recomputation cannot tell which slots its forward pass took."""
    torch.manual_seed(0)
    balancer = make_balancer(slot_buffers=buffers)
    plans = [plan_with_copy_of(balancer, expert) for expert in (0, 3, 1)]
    weights = [[make_weights() for _ in range(replicates)] for _ in plans]

    def segment(x):
        for plan, layer_weights in zip(plans, weights, strict=True):
            outputs = [x, x]
            for w in layer_weights:
                guests = balancer.replicate(w, plan)
                filled = (plan.slot_expert >= 0).unsqueeze(2)
                outputs = [
                    y * (copies * used).sum()
                    for y, (copies,), used in zip(outputs, guests, filled, strict=True)
                ]
            x = x + sum(balancer.release([y.tanh() for y in outputs], plan))
        return x

    x = torch.tensor([0.1, 0.2], requires_grad=True)
    segment(x.detach())  # the first use of the plans
    y = checkpoint(segment, x, use_reentrant=False) if recompute else segment(x)
    y.sum().backward()
    return [x.grad] + [w.grad for ws in weights for pairs in ws for (w,) in pairs]


@pytest.mark.parametrize("replicates", [1, 2])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_a_recomputation_that_cannot_tell_its_slots_has_its_own(buffers, replicates):
    expected = grads_of_plans_used_twice(buffers, False, replicates)
    got = grads_of_plans_used_twice(buffers, True, replicates)
    for grad, wanted in zip(got, expected, strict=True):
        assert torch.equal(grad, wanted)


def test_the_asynchronous_form_gives_what_the_synchronous_one_gives():
    balancer = make_balancer()
    plan = plan_with_copy_of(balancer, 3)
    pending = balancer.replicate_async(make_weights(), plan)
    guests = pending.wait()
    assert guests is pending.wait()
    assert guests[0][0].item() == 4
    balancer.release(compute(guests), plan)
    with_no_slots = topoep.Balancer(TOPOLOGY, 4, 0)
    empty = with_no_slots.plan_from_counts(plan.counts)
    assert with_no_slots.replicate_async(make_weights(), empty).wait()[0][0].shape == (0, 1)


def test_prefetch_fetches_before_release_does(monkeypatch):
    """In backward the copies are under way before the gradients reach the experts."""
    balancer = make_balancer()
    first, second = plan_with_copy_of(balancer, 0), plan_with_copy_of(balancer, 3)
    fetched = []
    original = balancer.transport.replicate

    def logged(plan, *arguments):
        fetched.append("fetch")
        original(plan, *arguments)

    monkeypatch.setattr(balancer.transport, "replicate", logged)
    guests = balancer.replicate(make_weights(), first)
    released = balancer.release(compute(guests), first)
    sent = [y * 3 for y in released]
    sent[0].register_hook(lambda grad: fetched.append("gradients travel"))
    final = balancer.prefetch(sent, first)
    balancer.release(compute(balancer.replicate(make_weights(), second)), second)
    fetched.clear()
    sum(y.sum() for y in final).backward()
    assert fetched == ["fetch", "gradients travel"]


def test_chunks_that_do_not_fit_the_experts_are_refused():
    balancer = make_balancer()
    for num_chunks in (0, 4, -1):
        with pytest.raises(ValueError, match=f"num_chunks={num_chunks}; expected 1 to 3"):
            topoep.BalancedExperts(4, 8, 8, balancer=balancer, num_chunks=num_chunks)
    with pytest.raises(TypeError, match=r"num_chunks is 2\.0"):
        topoep.BalancedExperts(4, 8, 8, balancer=balancer, num_chunks=2.0)


def test_sharing_weights_checks_them():
    balancer = make_balancer()
    weights = torch.randn(4, 3)
    balancer.share_weights([weights])  # nothing to do for simulated ranks
    for bad in (weights[:2], torch.randn(3, 4).t(), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="expected contiguous tensors with 4 experts"):
            balancer.share_weights([bad])
    with pytest.raises(TypeError, match="a tensor of weights is a list"):
        balancer.share_weights([[1.0]])
    balancer.close()
