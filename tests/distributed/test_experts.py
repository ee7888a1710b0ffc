# SPDX-License-Identifier: Apache-2.0
"""BalancedExperts equals the layer with all experts in one process: outputs and all gradients."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import topoep
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import Problem, dense_layer, make_problem, make_weights

HIDDEN, WIDTH, TOP_K = 12, 8, 2


@dataclass
class Setup:
    """A layer over some ranks, compared with the dense one."""

    nodes: list[int]
    experts: int
    tokens: list[int]
    spare: int = 2
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10
    policy: str = "refetch"
    buffers: int = 1
    chunks: int = 1
    layers: int = 1
    microbatches: int = 1
    in_flight: int = 99  # microbatches whose backward is still to come, at most
    recompute: str = ""  # "": none, "layer", "selective" or "contexts"
    frozen: bool = False
    seed: int = 0
    copies: list[int] = field(default_factory=list)


def problems_of(setup: Setup, rank: int) -> list[Problem]:
    return [
        make_problem(
            rank, setup.tokens[rank], TOP_K, setup.experts, HIDDEN, setup.dtype, setup.seed + m
        )
        for m in range(setup.microbatches)
    ]


def build_layers(setup: Setup, rank: int, group: dist.ProcessGroup) -> list[topoep.BalancedExperts]:
    topology = topoep.Topology(node_of_rank=setup.nodes)
    balancer = topoep.Balancer(
        topology,
        setup.experts,
        setup.spare,
        group=group,
        replica_policy=setup.policy,
        slot_buffers=setup.buffers,
    )
    home = setup.experts // topology.num_ranks
    layers = []
    for i in range(setup.layers):
        layer = topoep.BalancedExperts(
            setup.experts,
            HIDDEN,
            WIDTH,
            balancer=balancer,
            dtype=setup.dtype,
            num_chunks=setup.chunks,
        )
        gate_up, down = make_weights(setup.experts, HIDDEN, WIDTH, setup.dtype, seed=i)
        with torch.no_grad():
            layer.gate_up_proj.copy_(gate_up[rank * home : (rank + 1) * home])
            layer.down_proj.copy_(down[rank * home : (rank + 1) * home])
        layer.requires_grad_(not setup.frozen)
        layers.append(layer)
    return layers


def run_model(layers, problem: Problem, x, weights, setup: Setup):
    """Residual layers, all with the same routing; perhaps checkpointed."""
    y = x
    for layer in layers:
        if setup.recompute == "layer":
            y = y + checkpoint(layer, y, problem.ids, weights, use_reentrant=False)
        elif setup.recompute == "selective":
            # Routed inside, so that the recomputation has ids of its own to compare.
            y = y + checkpoint(
                lambda y, ids, weights, layer=layer: layer(y, ids.clone(), weights),
                y,
                problem.ids,
                weights,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(
                    [torch.ops.aten.mm.default]
                ),
            )
        elif setup.recompute == "contexts":
            y = y + checkpoint(
                layer,
                y,
                problem.ids.clone(),
                weights,
                use_reentrant=False,
                context_fn=layer.balancer.checkpoint_contexts,
            )
        else:
            y = y + layer(y, problem.ids, weights)
    return y


def reference_results(setup: Setup, rank: int, group: dist.ProcessGroup):
    """Outputs and gradients of the dense layers; weight gradients summed over the ranks."""
    weights = [
        make_weights(setup.experts, HIDDEN, WIDTH, setup.dtype, i) for i in range(setup.layers)
    ]
    for pair in weights:
        for tensor in pair:
            tensor.requires_grad_()
    outputs, grads = [], []
    for problem in problems_of(setup, rank):
        x = problem.x.clone().requires_grad_()
        w = problem.weights.clone().requires_grad_()
        y = x
        for gate_up, down in weights:
            y = y + dense_layer(y, problem.ids, w, gate_up, down)
        y.backward(problem.grad_y)
        outputs.append(y.detach())
        grads += [x.grad, w.grad]
    home = setup.experts // len(setup.nodes)
    place = dist.get_rank(group)
    for pair in weights:
        for tensor in pair:
            total = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            dist.all_reduce(total, group=group)
            grads.append(total[place * home : (place + 1) * home])
    return outputs, grads


def compare(setup: Setup, rank: int, group: dist.ProcessGroup) -> int:
    """Runs forward and backward of all microbatches, the oldest backward first (1F1B)."""
    place = dist.get_rank(group)
    layers = build_layers(setup, place, group)
    runs, waiting = [], deque()
    for problem in problems_of(setup, place):
        x = problem.x.clone().requires_grad_()
        w = problem.weights.clone().requires_grad_()
        y = run_model(layers, problem, x, w, setup)
        runs.append((problem, x, w, y))
        waiting.append((y, problem.grad_y))
        if len(waiting) == setup.in_flight:
            torch.autograd.backward(*waiting.popleft())
    for y, grad_y in waiting:
        y.backward(grad_y)
    outputs, grads = reference_results(setup, place, group)
    got = [grad for _, x, w, _ in runs for grad in (x.grad, w.grad)]
    for layer in layers:
        got += [layer.gate_up_proj.grad, layer.down_proj.grad]
    if setup.frozen:
        assert got[-1] is None
        got, grads = got[: 2 * setup.microbatches], grads[: 2 * setup.microbatches]
    for (_, _, _, y), expected in zip(runs, outputs, strict=True):
        torch.testing.assert_close(y.detach(), expected, rtol=setup.tolerance, atol=setup.tolerance)
    for a, b in zip(got, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=setup.tolerance, atol=setup.tolerance)
    plan = layers[0].balancer.plan(problems_of(setup, place)[0].ids)
    return int(plan.stats()["copies"])


def on_world(rank: int, setup: Setup) -> int:
    return compare(setup, rank, dist.group.WORLD)


def check(setup: Setup) -> None:
    copies = run_ranks(len(setup.nodes), on_world, setup)
    assert len(set(copies)) == 1
    if setup.spare and len(setup.nodes) > 1:
        assert copies[0] > 0, "the case is meant to have copies"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_equals_the_dense_layer(ranks):
    nodes = [rank // max(ranks // 2, 1) for rank in range(ranks)]
    check(Setup(nodes, 3 * ranks, [20 + 3 * rank for rank in range(ranks)]))


@pytest.mark.parametrize("tokens", [[0, 30, 30, 30], [40, 0, 0, 5], [1, 0, 64, 2]], ids=str)
def test_uneven_and_empty_ranks(tokens):
    check(Setup([0, 0, 1, 1], 8, tokens))


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_spare_slots(spare):
    check(Setup([0, 1, 1, 0], 8, [25] * 4, spare=spare))


def test_one_expert_per_rank():
    check(Setup([0, 0, 1, 1], 4, [25] * 4))


@pytest.mark.parametrize("policy", ["refetch", "keep"])
def test_layers_that_share_the_spare_slots(policy):
    check(Setup([0, 0, 1, 1], 8, [24] * 4, layers=3, policy=policy))


@pytest.mark.parametrize("policy", ["refetch", "keep"])
def test_microbatches_in_flight(policy):
    check(Setup([0, 0, 1, 1], 8, [24, 9, 0, 30], layers=2, microbatches=3, policy=policy))


@pytest.mark.parametrize("recompute", ["layer", "selective", "contexts"])
def test_checkpointed_layers(recompute):
    check(Setup([0, 0, 1, 1], 8, [24, 9, 17, 30], layers=3, recompute=recompute))


def test_checkpointed_layers_with_an_empty_rank_and_microbatches_in_flight():
    """A rank without tokens sees the same ids in every microbatch: only the contexts can tell."""
    check(Setup([0, 0, 1, 1], 8, [24, 0, 17, 30], layers=2, microbatches=3, recompute="contexts"))


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("spare", [0, 2])
def test_tokens_in_chunks(chunks, spare):
    nodes, tokens = [0, 0, 1, 1], [24, 9, 0, 30]
    setup = Setup(nodes, 12, tokens, spare, chunks=chunks, layers=2, microbatches=2)
    if spare:
        check(setup)
    else:
        run_ranks(4, on_world, setup)


def test_checkpointed_layers_with_tokens_in_chunks():
    check(Setup([0, 0, 1, 1], 8, [24, 9, 17, 30], layers=3, recompute="layer", chunks=2))


@pytest.mark.parametrize("recompute", ["", "contexts"])
def test_several_buffers_for_microbatches_in_flight(recompute):
    setup = Setup([0, 0, 1, 1], 8, [24, 9, 0, 30], layers=2, microbatches=3, recompute=recompute)
    setup.buffers = 2
    check(setup)


def one_step_of_two_layers(rank: int, setup: Setup) -> bytes:
    """All outputs and gradients of two microbatches, as bytes."""
    layers = build_layers(setup, rank, dist.group.WORLD)
    runs = []
    for problem in problems_of(setup, rank):
        x = problem.x.clone().requires_grad_()
        w = problem.weights.clone().requires_grad_()
        runs.append((problem, x, w, run_model(layers, problem, x, w, setup)))
    tensors = []
    for problem, x, w, y in runs:
        y.backward(problem.grad_y)
        tensors += [y.detach(), x.grad, w.grad]
    tensors += [p.grad for layer in layers for p in layer.parameters()]
    return b"".join(t.numpy().tobytes() for t in tensors)


def test_chunks_buffers_and_policies_change_no_bit():
    """Every expert computes the same rows in the same order, whatever overlaps."""
    base = Setup([0, 0, 1, 1], 8, [24, 9, 0, 30], layers=2, microbatches=2, dtype=torch.float32)
    expected = run_ranks(4, one_step_of_two_layers, base)
    for change in ({"chunks": 2}, {"chunks": 3}, {"buffers": 3}, {"policy": "keep"}):
        assert run_ranks(4, one_step_of_two_layers, replace(base, **change)) == expected


def test_frozen_experts_still_give_input_gradients():
    check(Setup([0, 0, 1, 1], 8, [24] * 4, layers=2, frozen=True))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)], ids=str
)
def test_lower_precision(dtype, tolerance):
    check(Setup([0, 0, 1, 1], 8, [24] * 4, dtype=dtype, tolerance=tolerance))


def on_two_groups(rank: int, members: list[list[int]], setup: Setup) -> None:
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if rank in ranks)
    setup.seed = 10 * mine  # the two groups see different data
    compare(setup, rank, groups[mine])


@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=str)
def test_two_groups_at_once(members):
    run_ranks(4, on_two_groups, members, Setup([0, 1], 6, [30, 20], layers=2))


def steps_between_evaluations(rank: int, setup: Setup) -> None:
    """Evaluation without autograd between forward and backward does not disturb either."""
    layers = build_layers(setup, rank, dist.group.WORLD)
    problem, other = problems_of(setup, rank)
    x = problem.x.clone().requires_grad_()
    y = run_model(layers, problem, x, problem.weights, setup)
    with torch.no_grad():
        seen = run_model(layers, other, other.x, other.weights, setup)
    y.backward(problem.grad_y)
    outputs, grads = reference_results(setup, rank, dist.group.WORLD)
    torch.testing.assert_close(y.detach(), outputs[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(seen, outputs[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(x.grad, grads[0], rtol=1e-10, atol=1e-10)


def test_evaluation_between_forward_and_backward():
    run_ranks(
        4, steps_between_evaluations, Setup([0, 0, 1, 1], 8, [20] * 4, layers=2, microbatches=2)
    )


def step_with_fsdp(rank: int, setup: Setup) -> None:
    """FSDP frees the gathered weights after forward and gathers them again for backward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    group = mesh["ep"].get_group()
    setup.seed = 10 * mesh["fsdp"].get_local_rank()
    layers = build_layers(setup, mesh["ep"].get_local_rank(), group)
    for layer in layers:
        fully_shard(layer, mesh=mesh["fsdp"], reshard_after_forward=True)
    problem = problems_of(setup, mesh["ep"].get_local_rank())[0]
    x = problem.x.clone().requires_grad_()
    y = run_model(layers, problem, x, problem.weights, setup)
    # Other memory is in the way when the weights come back.
    kept = [torch.full_like(x, float("nan")) for _ in range(20)]
    y.backward(problem.grad_y)
    assert len(kept) == 20
    # The dense layers have no gradients summed over FSDP's ranks: outputs and x.grad say enough.
    outputs, grads = reference_results(setup, mesh["ep"].get_local_rank(), group)
    torch.testing.assert_close(y.detach(), outputs[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(x.grad, grads[0], rtol=1e-10, atol=1e-10)
    assert all(p.grad.to_local().abs().sum() > 0 for p in layers[0].parameters())


def test_weights_that_fsdp_frees_between_forward_and_backward():
    run_ranks(4, step_with_fsdp, Setup([0, 1], 6, [30, 20], layers=2))


def train(rank: int, setup: Setup, steps: int) -> bytes:
    layers = build_layers(setup, rank, dist.group.WORLD)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.05)
    for step in range(steps):
        problem = make_problem(
            rank, setup.tokens[rank], TOP_K, setup.experts, HIDDEN, setup.dtype, seed=step
        )
        optimizer.zero_grad()
        run_model(layers, problem, problem.x, problem.weights, setup).backward(problem.grad_y)
        optimizer.step()
    return b"".join(p.detach().numpy().tobytes() for layer in layers for p in layer.parameters())


def test_training_is_the_same_bit_for_bit_from_run_to_run():
    setup = Setup([0, 0, 1, 1], 8, [24, 9, 17, 30], layers=2, dtype=torch.float32)
    assert run_ranks(4, train, setup, 4) == run_ranks(4, train, setup, 4)


def test_simulated_ranks_equal_processes():
    """transport='local' gives the bits that four processes give."""
    setup = Setup([0, 1, 0, 1], 8, [24, 9, 0, 30], dtype=torch.float32)
    by_process = run_ranks(4, one_step, setup)
    topology = topoep.Topology(node_of_rank=setup.nodes)
    layer = topoep.BalancedExperts(setup.experts, HIDDEN, WIDTH, topology=topology, spare_slots=2)
    with torch.no_grad():
        for target, source in zip(
            layer.parameters(),
            make_weights(setup.experts, HIDDEN, WIDTH, setup.dtype),
            strict=True,
        ):
            target.copy_(source)
    problems = [problems_of(setup, rank)[0] for rank in range(4)]
    xs = [p.x.clone().requires_grad_() for p in problems]
    ys = layer(xs, [p.ids for p in problems], [p.weights for p in problems])
    torch.autograd.backward(ys, [p.grad_y for p in problems])
    for rank, (y, x_grad, gate_up_grad) in enumerate(by_process):
        assert torch.equal(ys[rank].detach(), y)
        assert torch.equal(xs[rank].grad, x_grad)
        assert torch.equal(layer.gate_up_proj.grad[2 * rank : 2 * rank + 2], gate_up_grad)


def one_step(rank: int, setup: Setup):
    (layer,) = build_layers(setup, rank, dist.group.WORLD)
    (problem,) = problems_of(setup, rank)
    x = problem.x.clone().requires_grad_()
    y = layer(x, problem.ids, problem.weights)
    y.backward(problem.grad_y)
    return y.detach(), x.grad, layer.gate_up_proj.grad


def test_nothing_is_added_to_the_state_dict():
    topology = topoep.Topology(num_nodes=1, ranks_per_node=2)
    layer = topoep.BalancedExperts(4, HIDDEN, WIDTH, topology=topology)
    assert list(layer.state_dict()) == ["gate_up_proj", "down_proj"]
    assert [name for name, _ in layer.named_parameters()] == ["gate_up_proj", "down_proj"]
    assert list(layer.buffers()) == []


def test_initial_weights_depend_on_the_seed_and_the_expert_only():
    drawn = []
    for ranks in (1, 2, 4):
        torch.manual_seed(7)
        topology = topoep.Topology(num_nodes=1, ranks_per_node=ranks)
        drawn.append(topoep.BalancedExperts(4, HIDDEN, WIDTH, topology=topology).down_proj)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_padding_and_ids_out_of_range_add_nothing():
    topology = topoep.Topology(num_nodes=2, ranks_per_node=1)
    layer = topoep.BalancedExperts(4, HIDDEN, WIDTH, topology=topology, dtype=torch.float64)
    problems = [make_problem(rank, 9, TOP_K, 4, HIDDEN, torch.float64) for rank in range(2)]
    ids = [p.ids.clone() for p in problems]
    for odd, where in zip((-1, 4, 2**30, -9), itertools.product(range(2), range(2)), strict=True):
        ids[where[0]][3 * where[1], 0] = odd
    ys = layer([p.x for p in problems], ids, [p.weights for p in problems])
    for y, p, i in zip(ys, problems, ids, strict=True):
        expected = dense_layer(p.x, i, p.weights, layer.gate_up_proj, layer.down_proj)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
