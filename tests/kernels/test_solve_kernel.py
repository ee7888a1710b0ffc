# SPDX-License-Identifier: Apache-2.0
"""The solve and split kernels equal their CPU forms bit for bit, under every schedule."""

from __future__ import annotations

import pytest
import torch

import topoep
from tests.emulation.harness import SCHEDULES
from tests.kernels.kernels import Kernels
from tests.kernels.plans import PlanTables
from tests.kernels.test_stream_lists import meaning, raw_lists
from topoep import ops
from topoep.objective import Objective
from topoep.portfolio import Candidate

CANDIDATES = [
    Candidate("none"),
    Candidate("mean+1%", "H22112a"),
    Candidate("mean+0%", "F"),
    Candidate("node+1%", "H02122"),
    Candidate("load#3", "H10022A"),
    Candidate("mean+5%", "F0"),
    Candidate("mean+0.2%", "H12120"),
    Candidate("mean+1%", "H12112l"),
    Candidate("mean+0%", "T"),
    Candidate("mean+1%", "T"),
]
COST = topoep.CostModel(
    token=100, instance=50, copy=3000, cross_copy=900, grad=5000, cross_grad=1500, network_row=40,
    hide_forward=1, hide_backward=2, hide_grads=700,
)  # fmt: skip
OBJECTIVES = {"balance": topoep.Balance(0.02), "even": topoep.Even(), "time": topoep.Time(COST)}


def random_counts(ranks: int, experts: int, seed: int, scale: float = 3000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    heat = torch.rand(experts, generator=generator) ** 6
    noise = torch.rand(ranks, experts, generator=generator)
    return (heat * noise * scale).to(torch.int32)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: f"{c.cap}:{c.policy}")
def test_every_candidate_alone(candidate):
    """Whatever wins above, each kind of candidate is compared on its own too."""
    topology = topoep.Topology(node_of_rank=[0, 1, 0, 1, 2, 2])
    for seed in range(4):
        counts = random_counts(6, 24, seed, scale=300)
        check_against_cpu(
            Kernels(SCHEDULES[seed]), counts, topology, 2, 0, [CANDIDATES[0], candidate],
            topoep.Even() if candidate.policy != "H12112l" else topoep.Time(COST),
        )  # fmt: skip


def check_against_cpu(
    kernels: Kernels,
    counts: torch.Tensor,
    topology: topoep.Topology,
    spare: int,
    rank: int,
    candidates: list[Candidate],
    objective: Objective,
    max_shared: int = 96 * 1024,
) -> None:
    packed = [candidate.pack() for candidate in candidates]
    arguments = (counts, topology.table(), spare, packed, objective.to_ints(), rank)
    expected = ops.solve(*arguments)
    with_lists = rank >= 0 and spare > 0
    got = kernels.solve(*arguments, max_shared=max_shared, with_lists=with_lists)
    if with_lists:
        *got, lists = got
        tables = (got[0].numpy(), got[3].numpy(), got[4].numpy())
        plan = PlanTables(topology, counts.shape[1], *tables)
        wanted, starts = raw_lists(plan, rank)
        assert meaning(plan, lists.numpy(), starts) == meaning(plan, wanted, starts)
    names = [
        "slot_expert",
        "slot_source",
        "slot_tokens",
        "copy_offsets",
        "copy_slots",
        "send",
        "recv",
        "stats",
    ]
    for name, a, b in zip(names, got, expected, strict=True):
        assert torch.equal(a, b), f"{name}: kernel {a.tolist()}, CPU {b.tolist()}"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_kernel_equals_cpu_under_every_schedule(schedule):
    topology = topoep.Topology(node_of_rank=[0, 1, 0, 1, 2, 2])
    counts = random_counts(6, 24, schedule.seed)
    for objective in OBJECTIVES.values():
        check_against_cpu(Kernels(schedule), counts, topology, 2, 1, CANDIDATES, objective)


SHAPES = {
    "one rank": ([0], 5, 2),
    "one node": ([0] * 4, 8, 2),
    "one rank per node": ([0, 1, 2, 3], 8, 1),
    "no spare slots": ([0, 0, 1, 1], 8, 0),
    "one expert per rank": ([0, 0, 1, 1], 4, 2),
    "uneven nodes": ([0, 0, 0, 1, 2, 2, 1], 21, 3),
    "more ranks than a warp": ([r % 5 for r in range(40)], 80, 2),
    "more nodes than a word of bits": (list(range(36)), 72, 2),
    "many experts per rank": ([0, 1], 90, 4),
    "full slots": ([0, 0, 1, 1], 32, 16),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_kernel_equals_cpu_for_every_shape(name, objective):
    nodes, experts, spare = SHAPES[name]
    topology = topoep.Topology(node_of_rank=nodes)
    for seed in range(3):
        counts = random_counts(len(nodes), experts, seed)
        rank = seed % len(nodes)
        check_against_cpu(
            Kernels(SCHEDULES[seed]),
            counts,
            topology,
            spare,
            rank,
            CANDIDATES,
            OBJECTIVES[objective],
        )


@pytest.mark.parametrize(
    "counts",
    [
        torch.zeros(4, 8, dtype=torch.int32),
        torch.full((4, 8), 5, dtype=torch.int32),
        torch.eye(8, dtype=torch.int32)[:4] * 1_000_000,
        torch.tensor([[2**31 - 1] + [0] * 7] + [[0] * 8] * 3, dtype=torch.int32),
    ],
    ids=["zeros", "balanced", "one expert per source", "largest count"],
)
def test_kernel_equals_cpu_for_extreme_counts(counts):
    topology = topoep.Topology(num_nodes=2, ranks_per_node=2)
    check_against_cpu(Kernels(), counts, topology, 2, 3, CANDIDATES, topoep.Balance(0.01))


def test_state_that_does_not_fit_shared_memory_goes_to_the_workspace():
    topology = topoep.Topology(num_nodes=2, ranks_per_node=2)
    counts = random_counts(4, 16, 1)
    check_against_cpu(
        Kernels(), counts, topology, 2, 0, CANDIDATES, topoep.Balance(0.01), max_shared=64
    )


def test_a_block_solves_several_candidates_in_turn():
    topology = topoep.Topology(num_nodes=2, ranks_per_node=2)
    counts = random_counts(4, 16, 2)
    for num_sms in (1, 2, 40):
        kernels = Kernels(num_sms=num_sms)
        check_against_cpu(kernels, counts, topology, 2, 0, CANDIDATES, topoep.Balance(0.01))


def test_no_rank_no_row():
    topology = topoep.Topology(num_nodes=2, ranks_per_node=2)
    check_against_cpu(
        Kernels(), random_counts(4, 8, 3), topology, 1, -1, CANDIDATES, topoep.Balance(0.0)
    )


def test_more_tokens_than_int32_give_the_empty_plan_instead_of_garbage():
    topology = topoep.Topology(num_nodes=2, ranks_per_node=2)
    counts = torch.full((4, 4), 2**30, dtype=torch.int32)
    counts[:, 1:] = 7
    packed = [candidate.pack() for candidate in CANDIDATES]
    outputs = Kernels().solve(
        counts, topology.table(), 2, packed, topoep.Balance(0.01).to_ints(), 0
    )
    assert (outputs[0] == -1).all()
    assert outputs[-1][0] == 4 * 2**30 + 7 * 12  # the true number of tokens is reported
    assert torch.equal(outputs[5].view(4, 3)[:, 0], counts[0])


@pytest.mark.parametrize("schedule", SCHEDULES[::4], ids=str)
def test_split_kernel_equals_cpu(schedule):
    for nodes in ([0, 1, 0, 1, 2, 2], [0] * 3, list(range(5)), [0] * 40):
        topology = topoep.Topology(node_of_rank=nodes)
        counts = random_counts(len(nodes), 2 * len(nodes), schedule.seed)
        plan = topoep.solve(counts, topology, 2)
        assert plan.stats()["copies"] > 0
        assert torch.equal(Kernels(schedule).split(plan), plan.split())
