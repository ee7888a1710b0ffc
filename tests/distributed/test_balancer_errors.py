# SPDX-License-Identifier: Apache-2.0
"""Bad input ends in an error that says what to do, before the step communicates."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import topoep
from tests.distributed.ranks import run_ranks

TOPOLOGY = topoep.Topology(num_nodes=1, ranks_per_node=2)


@pytest.fixture
def balancer() -> topoep.Balancer:
    return topoep.Balancer(TOPOLOGY, 4, 1)


@pytest.fixture
def ids() -> list[torch.Tensor]:
    return [torch.tensor([[0, 1], [0, 2]]), torch.tensor([[0, 3]])]


def weights(dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(2, 3, 4).to(dtype), torch.randn(2, 5).to(dtype)) for _ in range(2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 5}, r"num_experts=5 does not divide over 2 ranks.*nearest.*4"),
        ({"num_experts": 0}, "kMaxExperts"),
        ({"num_experts": 8192}, "kMaxExperts"),
        ({"spare_slots": -1}, "spare_slots=-1; expected 0 to 16"),
        ({"spare_slots": 17}, "kMaxSpareSlots"),
        ({"replica_policy": "drop"}, "replica_policy='drop'; expected one of refetch, keep"),
        ({"transport": "smoke"}, "transport='smoke'; expected one of auto, nccl, c10d, local"),
        ({"transport": "c10d"}, "transport='c10d' needs group="),
        ({"transport": "nccl"}, "transport='nccl' needs group="),
        ({"slot_buffers": 0}, "slot_buffers=0; expected 1 to 64"),
        ({"slot_buffers": 65}, "slot_buffers=65; expected 1 to 64"),
    ],
)
def test_constructor(arguments, message):
    with pytest.raises(ValueError, match=message):
        topoep.Balancer(**{"topology": TOPOLOGY, "num_experts": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs num_nodes and ranks_per_node, or node_of_rank"),
        ({"num_nodes": 2}, "needs num_nodes and ranks_per_node"),
        ({"num_nodes": 0, "ranks_per_node": 2}, "at least 1"),
        ({"num_nodes": 1, "ranks_per_node": 2, "node_of_rank": [0]}, "not both"),
        ({"node_of_rank": []}, "0 ranks; expected 1 to 1024"),
        ({"num_nodes": 129, "ranks_per_node": 8}, "1032 ranks.*kMaxRanks"),
    ],
)
def test_topology(arguments, message):
    with pytest.raises(ValueError, match=message):
        topoep.Topology(**arguments)


@pytest.mark.parametrize(
    ("tolerance", "weight", "message"),
    [
        (-0.1, 3, "tolerance is -0.1"),
        (float("nan"), 3, "tolerance is nan"),
        (0.01, 0, "cross_weight=0"),
    ],
)
def test_objective(tolerance, weight, message):
    with pytest.raises(ValueError, match=message):
        topoep.Balance(tolerance, cross_weight=weight)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (torch.zeros(3, 2), TypeError, "dtype torch.float32; expected int32 or int64"),
        (torch.zeros(3, 2, dtype=torch.int16), TypeError, "int16"),
        (
            torch.zeros(3, dtype=torch.int64),
            ValueError,
            r"shape \(3,\); expected \[tokens, top_k\]",
        ),
        (torch.zeros(3, 65, dtype=torch.int64), ValueError, "top_k=65.*kMaxTopK"),
        (torch.zeros(3, 0, dtype=torch.int64), ValueError, "top_k=0"),
        ([[0, 1]], TypeError, "list; expected a torch.Tensor"),
    ],
)
def test_ids(balancer, ids, bad, error, message):
    for call in (balancer.plan, lambda i: balancer.reroute(i, balancer.plan(ids))):
        with pytest.raises(error, match=message):
            call([bad, ids[1]])


def test_ids_are_a_list_only_for_simulated_ranks(balancer, ids):
    with pytest.raises(ValueError, match="takes a list with a tensor for each"):
        balancer.plan(ids[0])
    with pytest.raises(ValueError, match="simulates 2 ranks"):
        balancer.plan(ids[:1])


def test_counts(balancer):
    good = torch.ones(2, 4, dtype=torch.int32)
    for bad, error, message in [
        (good.long(), TypeError, r"expected int32 \(counts.to\(torch.int32\)\)"),
        (good[:, :3], ValueError, r"shape \(2, 3\); expected \[R, E\] = \(2, 4\)"),
        (good - torch.eye(2, 4, dtype=torch.int32) * 3, ValueError, r"counts\[0, 0\] is -2"),
        ([[1]], TypeError, "list; expected a torch.Tensor"),
    ]:
        with pytest.raises(error, match=message):
            balancer.plan_from_counts(bad)


def test_plans_of_others_are_refused(balancer, ids):
    plan = balancer.plan(ids)
    pure = topoep.solve(plan.counts, TOPOLOGY, 1)
    other = topoep.Balancer(TOPOLOGY, 4, 1).plan(ids)
    for bad, message in [(pure, "made by topoep.solve"), (other, "made by another Balancer")]:
        with pytest.raises(ValueError, match=message):
            balancer.reroute(ids, bad)
        with pytest.raises(ValueError, match=message):
            balancer.replicate(weights(), bad)
        with pytest.raises(ValueError, match=message):
            balancer.reduce_grads(weights(), bad, out=weights())
        with pytest.raises(ValueError, match=message):
            balancer.release([torch.zeros(1), torch.zeros(1)], bad)
    with pytest.raises(TypeError, match=r"expected a topoep.Plan"):
        balancer.reroute(ids, None)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: (w[0][:1], w[1]), ValueError, "expected 2 experts in dimension 0"),
        (lambda w: (w[0].transpose(1, 2), w[1]), ValueError, "expected contiguous tensors"),
        (lambda w: (torch.randn(4, 5)[::2], w[1]), ValueError, "expected contiguous tensors"),
        (lambda w: (), ValueError, "weights has 0 tensors"),
        (lambda w: (w[0], "w2"), TypeError, "holds a str"),
        (lambda w: (torch.tensor(1.0), w[1]), ValueError, r"shape \(\)"),
        (lambda w: (w[0].to("meta"), w[1]), ValueError, "on meta; the plan is on cpu"),
    ],
)
def test_weights(balancer, ids, change, error, message):
    plan = balancer.plan(ids)
    good = weights()
    with pytest.raises(error, match=message):
        balancer.replicate([change(good[0]), good[1]], plan)


def test_gradients(balancer, ids):
    plan = balancer.plan(ids)
    homes = weights()
    slots = [tuple(t[:1].clone() for t in tensors) for tensors in homes]
    for bad_slots, bad_out, message in [
        (homes, homes, "expected 1 experts in dimension 0"),
        (slots, slots, "expected 2 experts in dimension 0"),
        ([s[:1] for s in slots], homes, "1 slot_grads for 2 tensors"),
        ([s[::-1] for s in slots], homes, "expert shapes differ"),
        ([tuple(t.int() for t in s) for s in slots], [tuple(t.int() for t in h) for h in homes],
         "floating-point"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            balancer.reduce_grads(bad_slots, plan, out=bad_out)


def test_spare_slots_that_backward_still_needs_are_not_overwritten(balancer, ids):
    first, second = balancer.plan(ids), balancer.plan(ids)
    w = [tuple(t.requires_grad_() for t in tensors) for tensors in weights()]
    guests = balancer.replicate(w, first)
    with pytest.raises(RuntimeError, match=r"balancer.release\(y, plan\)"):
        balancer.replicate(w, second)
    y = [guest[0].sum() for guest in guests]
    del guests
    released = balancer.release(y, first)
    balancer.replicate(w, second)
    sum(released).backward()
    assert all(t.grad is not None for t in (w[0][0], w[1][0]))


def test_weights_that_change_between_forward_and_backward_are_noticed(balancer, ids):
    plan, other = balancer.plan(ids), balancer.plan(ids)
    w = [tuple(t.requires_grad_() for t in tensors) for tensors in weights()]
    guests = balancer.replicate(w, plan)
    y = balancer.release([guest[0].sum() for guest in guests], plan)
    with torch.no_grad():
        balancer.replicate(w, other)  # the slots now hold something else
        w[0][0].add_(1.0)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        sum(y).backward()


def test_a_recomputation_that_routes_differently_is_noticed(balancer, ids):
    calls = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        routed = ids if len(calls) == 1 else [i.flip(0) for i in ids]
        balancer.plan(routed)
        return x.sin()

    y = checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="routes tokens as no forward pass in flight did"):
        y.sum().backward()


def disagree(rank: int, name: str, values: list) -> None:
    arguments = {
        "topology": topoep.Topology(node_of_rank=[0, 0, 1, 1]),
        "num_experts": 8,
        "group": dist.group.WORLD,
        name: values[rank],
    }
    topoep.Balancer(**arguments)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("num_experts", [8, 8, 16, 8], r"ranks 0 and 2 .* disagree on num_experts \(8 and 16\)"),
        ("spare_slots", [1, 2, 1, 1], r"ranks 0 and 1 .* disagree on spare_slots \(1 and 2\)"),
        (
            "topology",
            [topoep.Topology(node_of_rank=t) for t in [[0, 0, 1, 1]] * 3 + [[0, 1, 0, 1]]],
            "ranks 0 and 3 .* disagree on node_of_rank",
        ),
        (
            "objective",
            [topoep.Balance(0.01), topoep.Balance(0.01), topoep.Even(), topoep.Even()],
            "ranks 0 and 2 .* disagree on objective",
        ),
        (
            "objective",
            [topoep.Balance(0.01)] * 3 + [topoep.Balance(0.01, cross_weight=4)],
            "ranks 0 and 3 .* disagree on objective",
        ),
        (
            "objective",
            [
                topoep.Time(topoep.CostModel.from_model(64, 32, hardware=hardware))
                for hardware in ("H800", "H800", "H100", "H800")
            ],
            "ranks 0 and 2 .* disagree on cost_model",
        ),
        (
            "solver",
            ["portfolio", "taot", "portfolio", "portfolio"],
            "ranks 0 and 1 .* disagree on solver",
        ),
        (
            "candidates",
            [[topoep.Candidate("mean+1%", "F")]] * 3 + [[topoep.Candidate("mean+1%", "F0")]],
            "ranks 0 and 3 .* disagree on candidates",
        ),
        (
            "candidates",  # their order decides between equal keys
            [
                [topoep.Candidate("mean+1%", policy) for policy in policies]
                for policies in (("F", "F0"), ("F0", "F"), ("F", "F0"), ("F", "F0"))
            ],
            "ranks 0 and 1 .* disagree on candidates",
        ),
        ("replica_policy", ["keep", "refetch", "keep", "keep"], "disagree on replica_policy"),
        ("slot_buffers", [1, 1, 1, 2], r"ranks 0 and 3 .* disagree on slot_buffers \(1 and 2\)"),
        ("comm_sms", [24, 8, 24, 24], r"ranks 0 and 1 .* disagree on comm_sms \(24 and 8\)"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_ranks_that_disagree_are_told_so_on_every_rank(name, values, message):
    for kind, text in run_ranks(4, catch, name, values):
        assert kind == "ValueError"
        assert re.search(message, text)


def catch(rank: int, name: str, values: list) -> tuple[str, str]:
    try:
        disagree(rank, name, values)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_rank_with_a_bad_argument_does_not_leave_the_others_waiting():
    errors = run_ranks(4, catch, "spare_slots", [2, -3, 2, 2], timeout_s=20)
    assert "spare_slots=-3; expected 0 to 16" in errors[1][1]
    for rank in (0, 2, 3):
        assert "rank 1 was given arguments that are not valid" in errors[rank][1]


def wrong_group(rank: int) -> str:
    try:
        topoep.Balancer(topoep.Topology(num_nodes=2, ranks_per_node=2), 8, group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


def test_a_group_of_another_size_is_refused():
    for text in run_ranks(2, wrong_group):
        assert "the group has 2 ranks, the topology 4" in text


def from_group(rank: int) -> tuple[int, ...]:
    os.environ["TOPOEP_NODE"] = f"node-{rank % 2}"
    return topoep.Topology.from_group(dist.group.WORLD).node_of_rank


def test_topology_from_a_group():
    assert run_ranks(4, from_group) == [(0, 1, 0, 1)] * 4


def test_topology_from_a_group_needs_torch_distributed():
    with pytest.raises(RuntimeError, match="init_process_group"):
        topoep.Topology.from_group()


def test_experts_module_arguments(balancer):
    make = topoep.BalancedExperts
    with pytest.raises(ValueError, match="needs balancer=, topology= or group="):
        make(4, 8, 8)
    with pytest.raises(ValueError, match="give balancer=, or topology"):
        make(4, 8, 8, balancer=balancer, spare_slots=1)
    with pytest.raises(ValueError, match="the balancer is for 4"):
        make(8, 8, 8, balancer=balancer)
    layer = make(4, 8, 8, balancer=balancer)
    x, ids, w = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
    for bad, error, message in [
        ((x[:, :5], ids, w), ValueError, r"expected \[tokens, 8\]"),
        ((x.double(), ids, w), TypeError, "x has dtype torch.float64, the experts"),
        ((x, ids[:2], w), ValueError, "for 3 tokens"),
        ((x, ids, w[:, :1]), ValueError, "for 3 tokens"),
        ((x, ids, ids), TypeError, "expected a floating dtype"),
    ]:
        with pytest.raises(error, match=message):
            layer(*[[value, value] for value in bad])
    plan = balancer.plan([ids, ids])
    with pytest.raises(ValueError, match="not made for the topk_ids of rank 0"):
        layer([x, x], [ids + 1, ids], [w, w], plan=plan)


def test_debug_mode_is_zero_or_one(monkeypatch):
    monkeypatch.setenv("TOPOEP_DEBUG", "yes")
    with pytest.raises(ValueError, match="TOPOEP_DEBUG='yes'; expected 0 or 1"):
        topoep.Balancer(topoep.Topology(1, 2), 4)
