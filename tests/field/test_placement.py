# SPDX-License-Identifier: Apache-2.0
"""Faults of other balancers in choosing copies, with the inputs that showed them."""

from __future__ import annotations

import itertools

import pytest
import torch

import topoep
from topoep import Balance, Even, Topology, ops

SOLVERS = ("portfolio", "taot")


def counts_of(loads: list[int], ranks: int) -> torch.Tensor:
    """All tokens of an expert from rank 0: a planner that only sees totals sees these."""
    counts = torch.zeros(ranks, len(loads), dtype=torch.int32)
    counts[0] = torch.tensor(loads, dtype=torch.int32)
    return counts


def fullest(plan: topoep.Plan) -> int:
    return int(plan.split().sum(0).view(plan.config.num_ranks, -1).sum(1).max())


# https://github.com/deepseek-ai/EPLB/issues/22
# https://github.com/deepseek-ai/EPLB/pull/28
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("loads", "ranks", "spare"),
    [
        ([2, 12], 2, 1),
        ([20, 10, 11, 17], 2, 1),
        ([3, 9, 20], 3, 1),
        ([1000, 1, 1, 1, 1, 1, 1, 1], 4, 2),
        ([5] * 8, 4, 1),
    ],
    ids=str,
)
def test_duplicate_replica_same_rank(loads, ranks, spare, solver):
    plan = topoep.solve(counts_of(loads, ranks), Topology(1, ranks), spare, Even(), solver=solver)
    home = len(loads) // ranks
    for rank, copies in enumerate(plan.slot_expert.tolist()):
        held = [*range(rank * home, (rank + 1) * home), *(e for e in copies if e >= 0)]
        assert len(held) == len(set(held))
    assert fullest(plan) <= max(sum(loads[r * home : (r + 1) * home]) for r in range(ranks))


# Every spare slot of a layer without load went to expert 0.
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_zero_load_layer(nodes, solver):
    counts = torch.zeros(4, 8, dtype=torch.int32)
    plan = topoep.solve(counts, Topology(nodes, 4 // nodes), 1, solver=solver)
    assert (plan.slot_expert == -1).all()
    assert float(plan.stats()["imbalance"]) == 1.0
    with pytest.raises(TypeError, match="expected int32"):
        topoep.solve(torch.full((4, 8), float("nan")), Topology(nodes, 4 // nodes), 1)


# https://github.com/deepseek-ai/EPLB/issues/8
def test_ties_differ_between_machines():
    """Nothing but ties: every rank's plan, a hundred times, and with the sources in any order."""
    topology = Topology(2, 2)
    counts = torch.full((4, 8), 5, dtype=torch.int32)
    counts[:, 0:2] = 10
    plans = [topoep.solve(counts, topology, 1, Even(), rank=rank) for rank in range(4)]
    plans += [topoep.solve(counts, topology, 1, Even()) for _ in range(100)]
    plans += [
        topoep.solve(counts[list(order)], topology, 1, Even())
        for order in itertools.permutations(range(4))
    ]
    assert int(plans[0].stats()["copies"]) > 0
    for plan in plans:
        assert torch.equal(plan.slot_expert, plans[0].slot_expert)
        assert torch.equal(plan.slot_tokens, plans[0].slot_tokens)


# https://github.com/vllm-project/vllm/issues/18343
# https://github.com/vllm-project/vllm/issues/52435
@pytest.mark.parametrize(("experts", "ranks", "nearest"), [(8, 3, 9), (10, 4, 8), (2, 4, 4)])
def test_not_divisible(experts, ranks, nearest):
    counts = torch.zeros(ranks, experts, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"{experts} does not divide over {ranks}.*: {nearest}"):
        topoep.solve(counts, Topology(1, ranks), 1)


# https://github.com/vllm-project/vllm/issues/52435: three ranks were unusable; here only E matters.
def test_three_ranks():
    plan = topoep.solve(counts_of([30, 0, 0, 1, 1, 1], 3), Topology(1, 3), 1, Even())
    plan.validate()
    assert fullest(plan) == 11


# https://github.com/sgl-project/sglang/issues/8253
# https://github.com/PaddlePaddle/FastDeploy/pull/5923
@pytest.mark.parametrize(
    "node_of_rank",
    [
        [0, 0, 0, 1, 1, 1],
        [0, 0, 1, 1, 2, 2],
        [0, 1, 2, 0, 1, 2],
        [0, 0, 0, 0, 1, 2],
        [3, 3, 5, 9, 9, 9],
    ],
    ids=str,
)
def test_groups_nodes_fallback(node_of_rank):
    """Any node table is planned for: a hot expert's copies prefer its own node."""
    topology = Topology(node_of_rank=node_of_rank)
    counts = torch.full((6, 6), 10, dtype=torch.int32)
    counts[:, 0] += 3  # rank 0 is over by 18 - 3: its node has room, if it has other ranks
    plan = topoep.solve(counts, topology, 1, Balance(0.02))
    plan.validate()
    crossed = int(plan.stats()["cross_node_copies"])
    alone = node_of_rank.count(node_of_rank[0]) == 1
    assert crossed == 0 or alone or float(plan.stats()["imbalance"]) > 1.0
    blind = topoep.solve(counts, Topology(1, 6), 1, Balance(0.02))
    assert int(blind.stats()["cross_node_copies"]) == 0


# https://github.com/sgl-project/sglang/issues/37741
def test_idle_ranks():
    """One expert with 90 % of the load over eight ranks: every rank computes its share."""
    counts = torch.full((8, 8), 10, dtype=torch.int32)
    counts[:, 0] = 630
    plan = topoep.solve(counts, Topology(2, 4), 2)
    loads = plan.split().sum(0).view(8, -1).sum(1)
    assert loads.min() > 0
    assert float(plan.stats()["imbalance"]) <= 1.01
    assert float(plan.stats()["imbalance_before"]) > 7


# https://github.com/sgl-project/sglang/issues/8345
@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_already_balanced_still_moves(tolerance):
    counts = torch.full((4, 8), 100, dtype=torch.int32)
    if tolerance:
        counts[:, 0] += 4  # rank 0 is 2 % above
        counts[:, 2] -= 4
    plan = topoep.solve(counts, Topology(2, 2), 2, Balance(tolerance))
    assert int(plan.stats()["copies"]) == 0
    assert int(plan.stats()["candidate"]) == 0


# https://github.com/sgl-project/sglang/issues/21610
# https://github.com/NVIDIA/TensorRT-LLM/issues/11510
@pytest.mark.parametrize("experts", [1025, 2048, 4096])
def test_more_than_1024_experts(experts):
    ids = torch.arange(experts).repeat_interleave(33).view(experts, 33)[:, :33]
    counts, invalid = ops.histogram(ids, experts)
    assert (counts == 33).all()
    assert int(invalid) == 0
    ranks = 25 if experts == 1025 else 256
    hot = counts.expand(ranks, experts).clone()
    hot[:, experts - 1] *= 50
    plan = topoep.solve(hot, Topology(ranks, 1), 1, Even())
    plan.validate()
    assert int(plan.stats()["copies"]) > 0
    with pytest.raises(ValueError, match="kMaxExperts"):
        topoep.solve(torch.zeros(1, 4097, dtype=torch.int32), Topology(1, 1), 1)


# https://github.com/NousResearch/torchtitan/pull/55
def test_forced_remainder():
    """All ranks at capacity but for one token: what is left over is not forced on anyone twice."""
    counts = counts_of([103, 100, 100, 99], 4)
    plan = topoep.solve(counts, Topology(2, 2), 2, Even())
    plan.validate()  # quotas sum to the load; one entry per expert and rank
    assert fullest(plan) == 101


# https://github.com/deepseek-ai/LPLB/issues/4
def test_flow_vs_lp():
    """No choice of copies does better, over all placements of one copy per rank."""
    counts = counts_of([40, 9, 7, 0], 4)
    topology = Topology(2, 2)
    plan = topoep.solve(counts, topology, 1, Even())
    loads = counts.sum(0)

    def least_fullest(slots: tuple[int, ...]) -> int:
        """The largest load when every expert spreads as it may, by trying every cap (Hall)."""
        for cap in range(1, int(loads.max()) + 1):
            if all(
                sum(int(loads[e]) for e in chosen)
                <= cap * len({r for r in range(4) if {r, slots[r]} & set(chosen)})
                for size in range(1, 5)
                for chosen in itertools.combinations(range(4), size)
            ):
                return cap
        raise AssertionError

    best = min(least_fullest(slots) for slots in itertools.product(range(4), repeat=4))
    assert fullest(plan) == best == 14


# https://github.com/vllm-project/vllm-ascend/issues/2952
def test_nondeterministic_choice():
    ids = torch.randint(0, 3, (500, 2), generator=torch.Generator().manual_seed(0))
    balancer = topoep.Balancer(Topology(2, 2), 8, 2)
    seen = set()
    for _ in range(50):
        plan = balancer.plan([ids] * 4)
        seen.add(b"".join(t.numpy().tobytes() for t in balancer.reroute([ids] * 4, plan)))
    assert len(seen) == 1


# https://github.com/sgl-project/sglang/pull/19772
# https://github.com/NVIDIA/Megatron-LM/issues/2368
def test_wants_topology():
    """A hot expert used from both nodes: its copy over there keeps tokens off the network."""
    counts = torch.full((8, 8), 20, dtype=torch.int32)
    counts[:, 0] = 200
    stats = topoep.solve(counts, Topology(2, 4), 2).stats()
    assert 0 < int(stats["cross_node_tokens"]) < int(stats["cross_node_tokens_before"])


# https://github.com/NVIDIA/Megatron-LM/issues/2398
# https://github.com/NVIDIA/Megatron-LM/pull/7488
def test_no_visibility():
    counts = torch.full((4, 8), 20, dtype=torch.int32)
    counts[:, 0] = 100
    stats = topoep.solve(counts, Topology(2, 2), 1).stats()
    for name in (
        "tokens", "imbalance", "imbalance_before", "max_load", "in_node_copies",
        "cross_node_copies", "cross_node_tokens", "cross_node_tokens_before", "invalid",
    ):  # fmt: skip
        assert stats[name].dim() == 0
    assert int(stats["tokens"]) == int(counts.sum())
