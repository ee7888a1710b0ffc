# SPDX-License-Identifier: Apache-2.0
"""The kernels of the data plane over ranks simulated in one GPU, against the host transport."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from simulated_cluster import SimulatedCluster, small_settings

import topoep
from topoep import ops
from topoep.plan import PlanConfig
from topoep.transports import LocalTransport

SHAPES = {"1x8": (1, 8), "2x4": (2, 4), "4x2": (4, 2), "8x1": (8, 1), "1x1": (1, 1)}
SPARE, HOME = 2, 3


class Case:
    """A cluster, and random plans, weights and gradients for it."""

    def __init__(self, shape: str, settings=None) -> None:
        nodes, local = SHAPES[shape]
        self.topology = topoep.Topology(num_nodes=nodes, ranks_per_node=local)
        self.ranks = nodes * local
        self.experts = HOME * self.ranks
        config = PlanConfig(self.topology, self.experts, SPARE, topoep.Balance())
        self.cluster = SimulatedCluster(config, settings or small_settings(self.ranks))
        self.reference = LocalTransport(self.topology)

    def plan(self, seed: int) -> topoep.Plan:
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(
            0, 40, (self.ranks, self.experts), generator=generator, dtype=torch.int32
        )
        hot = torch.randint(0, self.experts, (seed % 4,), generator=generator)
        counts[:, hot] += 400
        return topoep.solve(counts.cuda(), self.topology, SPARE)

    def draw(self, seed: int, rows: int, dtypes, sizes=(700, 33, 5)):
        """A tuple of tensors [rows, size] for each rank."""
        generator = torch.Generator().manual_seed(seed)

        def values(size: int) -> torch.Tensor:
            """Of very different magnitudes, so that the order of a sum shows."""
            powers = torch.randint(-2, 3, (rows, size), generator=generator)
            return torch.randn(rows, size, generator=generator) * 10.0**powers + 100

        return [
            tuple(values(size).to(dtype).cuda() for size, dtype in zip(sizes, dtypes, strict=True))
            for _ in range(self.ranks)
        ]


@pytest.fixture(params=SHAPES)
def case(request):
    made = Case(request.param)
    yield made
    made.cluster.close()


def test_counts(case):
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        rows = torch.randint(
            0, 1000, (case.ranks, case.experts), generator=generator, dtype=torch.int32
        ).cuda()
        for counts in case.cluster.exchange(list(rows.unbind())):
            assert torch.equal(counts, rows)
    assert case.cluster.errors() == []


def test_every_rank_makes_the_plan_with_its_lists(case):
    for seed in range(4):
        plan = case.plan(seed)
        torch.cuda.synchronize()
        made = case.cluster.solve(plan.counts)
        torch.cuda.synchronize()
        for rank, (slot_expert, _, slot_tokens, *rest, _lists) in enumerate(made):
            own = plan.for_rank(rank)
            assert torch.equal(slot_expert, plan.slot_expert)
            assert torch.equal(slot_tokens, plan.slot_tokens)
            for got, wanted in zip(
                rest[:4], (own.copy_offsets, own.copy_slots, own.send, own.recv), strict=True
            ):
                assert torch.equal(got, wanted)


def test_weights_of_several_dtypes(case):
    """Several plans one after the other, without waiting in between: rings wrap around."""
    dtypes = torch.bfloat16, torch.uint8, torch.float32
    weights = case.draw(1, HOME, dtypes)
    tables = case.cluster.tables(weights)
    runs = []
    for seed in range(6):
        plan = case.plan(seed)
        spare = [tuple(t.new_zeros(SPARE, t.shape[1]) for t in rank) for rank in weights]
        torch.cuda.synchronize()
        case.cluster.replicate(plan, case.cluster.lists(plan), tables, spare)
        runs.append((plan, spare))
    assert case.cluster.errors() == []
    for plan, spare in runs:
        expected = [tuple(torch.zeros_like(t) for t in rank) for rank in spare]
        case.reference.replicate(plan, weights, expected)
        for got, wanted in zip(spare, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("slot_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("home_type", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(case, slot_type, home_type):
    for seed in range(4):
        plan = case.plan(seed)
        slots = case.draw(seed, SPARE, [slot_type] * 3)
        homes = case.draw(seed + 50, HOME, [home_type] * 3)
        wanted = [tuple(t.clone() for t in rank) for rank in homes]
        case.reference.reduce_grads(plan, slots, wanted)
        tables = case.cluster.tables(slots)
        torch.cuda.synchronize()
        case.cluster.reduce(plan, case.cluster.lists(plan), tables, slots, homes)
        assert case.cluster.errors() == []
        for got, expected in zip(homes, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        for rank, tensors in enumerate(slots):
            used = plan.slot_expert[rank] >= 0
            assert not any(t[used].any() for t in tensors), "slots that were used are zero"


def test_a_rank_that_never_comes_ends_in_an_error_on_the_others():
    case = Case("2x4", replace(small_settings(8), timeout_s=0.3))
    row = torch.zeros(case.experts, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for rank in range(7):  # rank 7 stays away
        with torch.cuda.stream(case.cluster.streams[rank]):
            ops.exchange_counts(row, case.cluster.planes[rank], 8)
    texts = case.cluster.errors()
    assert texts
    assert any("it waited for rank 7" in text for text in texts)
    assert all("without progress within TOPOEP_TIMEOUT_S=0.3" in text for text in texts)
    case.cluster.close()


def test_every_rank_in_a_graph_of_its_own():
    """Replays continue the sequences that eager launches began, and follow the plan's memory."""
    case = Case("2x4")
    weights = case.draw(1, HOME, [torch.float32] * 3)
    spare = [tuple(t.new_zeros(SPARE, t.shape[1]) for t in rank) for rank in weights]
    tables = case.cluster.tables(weights)
    first, second = case.plan(1), case.plan(3)
    lists = case.cluster.lists(first)
    case.cluster.replicate(first, lists, tables, spare)  # eager, and warms up
    torch.cuda.synchronize()
    graphs = []
    for rank in range(case.ranks):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=case.cluster.streams[rank]):
            ops.replicate_(
                first.slot_expert,
                first.copy_offsets,
                first.copy_slots,
                lists[rank],
                tables[rank],
                spare[rank],
                case.cluster.planes[rank],
            )
        graphs.append(graph)
    for plan in (second, case.plan(2), second):
        # The graph reads the plan where the first one was: new content there is a new plan.
        new_lists = case.cluster.lists(plan)
        for name in ("slot_expert", "copy_offsets", "copy_slots"):
            getattr(first, name).copy_(getattr(plan, name))
        for old, new in zip(lists, new_lists, strict=True):
            old.copy_(new)
        torch.cuda.synchronize()
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(case.cluster.streams[rank]):
                graph.replay()
        assert case.cluster.errors() == []
        expected = [tuple(t.clone() for t in rank) for rank in spare]
        case.reference.replicate(plan, weights, expected)
        for got, wanted in zip(spare, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    case.cluster.close()
