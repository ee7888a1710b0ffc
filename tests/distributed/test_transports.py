# SPDX-License-Identifier: Apache-2.0
"""Transports move exactly the right bytes, sum in the promised order, and always call alike."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import topoep
from tests.distributed.ranks import run_ranks
from topoep.plan import Plan
from topoep.transports.schedule import plan_transfers

EXPERTS, SPARE = 12, 2
TABLES = {"blocks": [0, 0, 1, 1], "strided": [0, 1, 0, 1], "uneven": [0, 1, 1, 1], "alone": [0] * 4}


def hot_counts(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 40, (4, EXPERTS), generator=generator, dtype=torch.int32)
    counts[:, torch.randint(0, EXPERTS, (2,), generator=generator)] += 400
    return counts


def expert_tensors(expert: int) -> tuple[torch.Tensor, ...]:
    """The tensors of one expert, of several dtypes and odd sizes, unlike any other expert's."""
    generator = torch.Generator().manual_seed(expert)
    return (
        torch.randn(3, 5, generator=generator),
        torch.randn(7, generator=generator).to(torch.bfloat16),
        torch.randint(0, 256, (4, 4), generator=generator, dtype=torch.uint8),
        torch.randn(1, generator=generator, dtype=torch.float64),
    )


def rank_weights(rank: int) -> tuple[torch.Tensor, ...]:
    home = EXPERTS // 4
    experts = [expert_tensors(e) for e in range(rank * home, (rank + 1) * home)]
    return tuple(torch.stack(tensors) for tensors in zip(*experts, strict=True))


def check_guests(plan: Plan, rank: int, guests: tuple[torch.Tensor, ...]) -> None:
    for slot, expert in enumerate(plan.slot_expert[rank].tolist()):
        expected = expert_tensors(expert) if expert >= 0 else None
        for i, guest in enumerate(guests):
            if expected is None:
                assert not guest[slot].view(torch.uint8).any(), "empty slots hold zeros"
            else:
                assert torch.equal(guest[slot], expected[i])


def replicate_by_process(rank: int, nodes: list[int], seed: int) -> None:
    balancer = topoep.Balancer(
        topoep.Topology(node_of_rank=nodes), EXPERTS, SPARE, group=dist.group.WORLD
    )
    plan = balancer.plan_from_counts(hot_counts(seed))
    check_guests(plan, rank, balancer.replicate(rank_weights(rank), plan))


@pytest.mark.parametrize("table", TABLES)
def test_replicate_moves_the_bytes_of_every_dtype(table):
    for seed in range(2):
        run_ranks(4, replicate_by_process, TABLES[table], seed)


@pytest.mark.parametrize("table", TABLES)
def test_replicate_between_simulated_ranks(table):
    topology = topoep.Topology(node_of_rank=TABLES[table])
    for seed in range(20):
        balancer = topoep.Balancer(topology, EXPERTS, SPARE)
        plan = balancer.plan_from_counts(hot_counts(seed))
        assert plan.stats()["copies"] > 0
        guests = balancer.replicate([rank_weights(rank) for rank in range(4)], plan)
        for rank in range(4):
            check_guests(plan, rank, guests[rank])


@pytest.mark.parametrize("table", TABLES)
def test_a_copy_crosses_the_network_once_per_remote_node(table):
    topology = topoep.Topology(node_of_rank=TABLES[table])
    for seed in range(20):
        plan = topoep.solve(hot_counts(seed), topology, SPARE)
        crossing = [
            (t.expert, topology.node_of_rank[t.target])
            for stage in plan_transfers(plan.config, plan.host)
            for t in stage
            if topology.node_of_rank[t.source] != topology.node_of_rank[t.target]
        ]
        assert len(crossing) == len(set(crossing)) == plan.stats()["cross_node_copies"]


def random_grads(seed: int, dtype: torch.dtype):
    """Gradients of slots and homes of all ranks, of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            (
                torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
                * 10 ** torch.randint(-3, 4, (rows, *shape), generator=generator)
            ).to(dtype)
            for shape in ((3, 2), (5,))
        )

    return [draw(SPARE) for _ in range(4)], [draw(EXPERTS // 4) for _ in range(4)]


def expected_sums(plan: Plan, nodes: list[int], slots, homes):
    """The documented order, in plain loops: home, its node's ranks, then one sum per other node."""
    result = [tuple(t.clone() for t in tensors) for tensors in homes]
    wide = torch.float64 if homes[0][0].dtype == torch.float64 else torch.float32
    for expert in range(EXPERTS):
        home, local = divmod(expert, EXPERTS // 4)
        holders = [
            (rank, row.index(expert))
            for rank, row in enumerate(plan.slot_expert.tolist())
            if expert in row
        ]
        for i, total in enumerate(result[home]):
            sum_ = total[local].to(wide)
            for rank, slot in holders:
                if nodes[rank] == nodes[home]:
                    sum_ = sum_ + slots[rank][i][slot].to(wide)
            for node in sorted(set(nodes) - {nodes[home]}):
                parts = [slots[r][i][s].to(wide) for r, s in holders if nodes[r] == node]
                if parts:
                    partial = parts[0]
                    for part in parts[1:]:
                        partial = partial + part
                    sum_ = sum_ + partial
            if holders:
                total[local] = sum_.to(total.dtype)
    return result


def reduce_by_process(rank: int, nodes: list[int], seed: int, dtype: torch.dtype):
    balancer = topoep.Balancer(
        topoep.Topology(node_of_rank=nodes), EXPERTS, SPARE, group=dist.group.WORLD
    )
    plan = balancer.plan_from_counts(hot_counts(seed))
    slots, homes = random_grads(seed, dtype)
    balancer.reduce_grads(slots[rank], plan, out=homes[rank])
    assert not any(grad.any() for grad in slots[rank]), "slots are zeroed"
    return homes[rank]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_gradients_are_summed_in_the_promised_order(table, dtype):
    nodes = TABLES[table]
    topology = topoep.Topology(node_of_rank=nodes)
    for seed in range(10):
        balancer = topoep.Balancer(topology, EXPERTS, SPARE)
        plan = balancer.plan_from_counts(hot_counts(seed))
        slots, homes = random_grads(seed, dtype)
        expected = expected_sums(plan, nodes, slots, homes)
        balancer.reduce_grads(slots, plan, out=homes)
        for got, wanted in zip(homes, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("table", TABLES)
def test_processes_sum_gradients_like_simulated_ranks(table):
    nodes = TABLES[table]
    plan = topoep.solve(hot_counts(5), topoep.Topology(node_of_rank=nodes), SPARE)
    slots, homes = random_grads(5, torch.float32)
    expected = expected_sums(plan, nodes, slots, homes)
    for got, wanted in zip(
        run_ranks(4, reduce_by_process, nodes, 5, torch.float32), expected, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


CALLS = ("all_gather_single", "all_to_all_single", "all_gather_object", "all_reduce")


def log_collectives() -> list[str]:
    """A list to which every collective of this process adds its name from now on."""
    log: list[str] = []
    for name in CALLS:
        original = getattr(dist, name)

        def logged(*arguments, _name=name, _original=original, **options):
            log.append(_name)
            return _original(*arguments, **options)

        setattr(dist, name, logged)
    return log


def count_collectives(rank: int, counts_scale: list[int]) -> list[list[str]]:
    """The collectives of one training step, for routing that needs no copies, few, or many."""
    log = log_collectives()
    topology = topoep.Topology(node_of_rank=[0, 0, 1, 1])
    layer = topoep.BalancedExperts(8, 4, 4, topology=topology, group=dist.group.WORLD)
    steps = []
    for scale in counts_scale:
        log.clear()
        ids = torch.arange(16).view(8, 2) % 8
        ids[: scale * (1 + rank), 0] = 0
        if scale == 9:
            ids = ids[:0]
        x = torch.randn(len(ids), 4, requires_grad=True)
        layer(x, ids, torch.rand(ids.shape)).sum().backward()
        steps.append(list(log))
    return steps


def test_collectives_per_step_do_not_depend_on_the_data():
    by_rank = run_ranks(4, count_collectives, [0, 1, 4, 9])
    first = by_rank[0][0]
    # Counts; dispatch, weights in two stages, combine. Backward: combine, gradients in two stages,
    # dispatch. The slots still hold the weights: a single layer need not fetch them again.
    assert sorted(first) == ["all_gather_single"] + ["all_to_all_single"] * 8
    assert all(step == first for steps in by_rank for step in steps)


def collectives_of_a_recomputation(rank: int) -> tuple[list[str], list[str]]:
    """The collectives of a step without and with activation checkpointing."""
    log = log_collectives()
    topology = topoep.Topology(node_of_rank=[0, 0, 1, 1])
    layer = topoep.BalancedExperts(8, 4, 4, topology=topology, group=dist.group.WORLD)
    ids = torch.randint(0, 3, (20, 2))
    results = []
    for recompute in (False, True):
        log.clear()
        x = torch.randn(20, 4, requires_grad=True)
        weights = torch.rand(20, 2)
        if recompute:
            y = checkpoint(layer, x, ids, weights, use_reentrant=False)
        else:
            y = layer(x, ids, weights)
        y.sum().backward()
        results.append(list(log))
    return results[0], results[1]


def test_a_recomputation_adds_no_collective_of_its_own():
    """It sends the tokens again, as any expert-parallel layer does; the plan and the weights that
    backward would fetch anyway are not fetched twice."""
    for plain, recomputed in run_ranks(4, collectives_of_a_recomputation):
        assert recomputed.count("all_gather_single") == plain.count("all_gather_single") == 1
        dispatch_and_combine = 2
        extra = recomputed.count("all_to_all_single") - plain.count("all_to_all_single")
        assert extra <= dispatch_and_combine


def test_plans_of_simulated_ranks_are_those_of_processes():
    counts = hot_counts(3)
    balancer = topoep.Balancer(topoep.Topology(node_of_rank=[0, 0, 1, 1]), EXPERTS, SPARE)
    plan = balancer.plan_from_counts(counts)
    for rank, (send, recv) in enumerate(run_ranks(4, rows_of_plan, counts)):
        assert torch.equal(plan.for_rank(rank).send, send)
        assert torch.equal(plan.for_rank(rank).recv, recv)


def rows_of_plan(rank: int, counts: torch.Tensor):
    balancer = topoep.Balancer(
        topoep.Topology(node_of_rank=[0, 0, 1, 1]), EXPERTS, SPARE, group=dist.group.WORLD
    )
    plan = balancer.plan_from_counts(counts)
    assert dataclasses.is_dataclass(plan)
    return plan.send, plan.recv
