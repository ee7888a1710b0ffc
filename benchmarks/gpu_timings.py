# SPDX-License-Identifier: Apache-2.0
"""The timings of gpu_check.py. Every row compares its result, and counts what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from common import lognormal_counts, skewed_ids, time_us
from torch import Tensor

import topoep
from topoep import ops
from topoep.plan import PlanConfig
from topoep.portfolio import default_candidates
from topoep.transports import LocalTransport
from topoep.transports.plane import BULK_PIECE_BYTES

Add = Callable[..., None]

TOKENS, TOP_K = 8192, 8
SPARE = 2
# (ranks per node, nodes, experts), and the target of a solve in microseconds.
SOLVES = (((8, 8, 256), 15.0), ((8, 32, 512), 60.0))
TARGETS_US = {"histogram": 4.0, "reroute": 6.0, "control plane": 40.0}
# Two weight matrices of an expert in bfloat16: 12 MiB per expert.
EXPERT_SHAPES = ((2 * 1024, 2048), (2048, 1024))
# Calls in one graph: launching a graph takes longer than the shortest kernels.
CALLS_PER_GRAPH = 20
REPLAYS = 10
# Before a timed eager call the GPU is kept busy for about a millisecond, so that all launches of
# the call are queued when the clock starts.
BUSY_CYCLES = 2_000_000


def count_wrong(got: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """Elements that differ."""
    return sum(
        int((a.cpu() != b.cpu()).sum()) + int(a.shape != b.shape)
        for a, b in zip(got, expected, strict=True)
    )


def make_topology(ranks_per_node: int, num_nodes: int) -> topoep.Topology:
    return topoep.Topology(num_nodes=num_nodes, ranks_per_node=ranks_per_node)


class Problem:
    """Inputs of the control plane of one rank, on a device."""

    def __init__(self, ranks_per_node: int, num_nodes: int, experts: int, device: str) -> None:
        self.topology = make_topology(ranks_per_node, num_nodes)
        self.experts = experts
        self.counts = lognormal_counts(self.topology.num_ranks, experts, seed=0).to(device)
        self.ids = skewed_ids(TOKENS, TOP_K, experts, seed=1).to(device)
        own, _ = ops.histogram(self.ids, experts)
        self.counts[0] = own
        objective = topoep.Balance()
        self.candidates = [c.pack() for c in default_candidates(objective, num_nodes)]
        self.objective = objective.to_ints()
        self.table = self.topology.table(device)

    def solve(self) -> tuple[Tensor, ...]:
        return ops.solve(self.counts, self.table, SPARE, self.candidates, self.objective, 0)

    def histogram(self) -> tuple[Tensor, ...]:
        return ops.histogram(self.ids, self.experts)

    def reroute(self, plan: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        num_ranks = self.topology.num_ranks
        return (ops.reroute(self.ids, plan[5], plan[3], plan[4], num_ranks),)


def control_plane(problem: Problem, plan: tuple[Tensor, ...]):
    """(name, what to time) of the stages."""
    yield "histogram", problem.histogram
    yield "solve", problem.solve
    yield "reroute", lambda: problem.reroute(plan)


def time_cpu(add: Add) -> None:
    """The CPU forms, where no GPU is: that they run and are right, and how fast."""
    torch.set_num_threads(1)
    problem = Problem(8, 2, 64, "cpu")
    plan = problem.solve()
    send = plan[5]
    flat = problem.ids.flatten()
    right = {
        "histogram": lambda result: result[0] - torch.bincount(flat, minlength=problem.experts),
        "solve": lambda result: result[5].sum() - flat.numel(),  # every token is served once
        "reroute": lambda result: torch.bincount(result[0].flatten(), minlength=len(send)) - send,
    }
    for name, call in control_plane(problem, plan):
        wrong = int(right[name](call()).count_nonzero())
        took = time_us(call, "cpu", budget_s=0.1)
        text = "ok" if not wrong else "WRONG"
        add("timings", f"{name}, R=16 E=64, CPU form", text, took, None, "", wrong)


def replay_us(call: Callable[[], object]) -> tuple[float, object]:
    """Time of one call among many in a CUDA graph that is replayed, and what the last returns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            result = call()
    graph.replay()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (REPLAYS * CALLS_PER_GRAPH))
    return sorted(times)[2], result


def event_us(call: Callable[[], object], repeats: int = 7) -> float:
    """Median time of one eager call between two events, without its launches."""
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return sorted(times)[repeats // 2]


def time_gpu(
    add: Add, leave_out: Callable[[str, str], None], seconds_left: Callable[[], float]
) -> None:
    """Everything with a target, largest problems last; stops when time runs out."""
    for (ranks_per_node, nodes, experts), target in SOLVES:
        if seconds_left() < 20:
            leave_out(f"control plane, E={experts}", "no time is left")
            continue
        time_control_plane(add, ranks_per_node, nodes, experts, target)
    for ranks_per_node, nodes in ((8, 1), (4, 2)):
        if seconds_left() < 20:
            leave_out(f"transfers, {nodes}x{ranks_per_node}", "no time is left")
            continue
        time_transfers(add, ranks_per_node, nodes)


def time_control_plane(
    add: Add, ranks_per_node: int, nodes: int, experts: int, target: float
) -> None:
    on_cpu = Problem(ranks_per_node, nodes, experts, "cpu")
    on_gpu = Problem(ranks_per_node, nodes, experts, "cuda")
    expected_plan = on_cpu.solve()
    expected = dict(control_plane(on_cpu, expected_plan))
    plan = on_gpu.solve()
    shape = f"R={ranks_per_node * nodes} E={experts} S={SPARE}"
    for name, call in control_plane(on_gpu, plan):
        took, result = replay_us(call)
        wrong = count_wrong(result, expected[name]())
        add(
            "timings",
            f"{name}, {shape}" if name == "solve" else f"{name}, {TOKENS}x{TOP_K} E={experts}",
            "ok" if not wrong else "WRONG",
            took,
            target if name == "solve" else TARGETS_US[name],
            "graph replay",
            wrong,
        )
    if nodes * ranks_per_node == 64:
        return

    def all_stages() -> tuple[Tensor, ...]:
        on_gpu.histogram()
        return on_gpu.reroute(on_gpu.solve())

    took, result = replay_us(all_stages)
    wrong = count_wrong(result, on_cpu.reroute(expected_plan))
    add("timings", f"histogram + solve + reroute, {shape}", "ok" if not wrong else "WRONG", took,
        None, "graph replay; without the exchange of counts", wrong)  # fmt: skip


def time_transfers(add: Add, ranks_per_node: int, nodes: int) -> None:
    """replicate and reduce of all ranks at once, against copies of the same bytes in one go."""
    from simulated_cluster import SimulatedCluster

    topology = make_topology(ranks_per_node, nodes)
    ranks, home = topology.num_ranks, 2
    experts = home * ranks
    config = PlanConfig(topology, experts, SPARE, topoep.Balance())
    cluster = SimulatedCluster(config)
    counts = torch.full((ranks, experts), 10, dtype=torch.int32)
    counts[:, ::home] = 100
    counts[:, 0] = 3000
    plan = topoep.solve(counts.cuda(), topology, SPARE)
    copies = int(plan.stats()["copies"])

    def make(rows: int, fill: bool):
        generator = torch.Generator("cuda").manual_seed(rows)
        return [
            tuple(
                torch.randn(rows, *shape, generator=generator, device="cuda").bfloat16()
                if fill
                else torch.zeros(rows, *shape, dtype=torch.bfloat16, device="cuda")
                for shape in EXPERT_SHAPES
            )
            for _ in range(ranks)
        ]

    weights, spare = make(home, True), make(SPARE, False)
    expert_bytes = sum(t[0].numel() * t.element_size() for t in weights[0])
    moved = copies * expert_bytes
    source = torch.empty(moved, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    plain = event_us(lambda: target.copy_(source))
    lists = cluster.lists(plan)
    shape = f"{nodes}x{ranks_per_node}, {copies} copies of {expert_bytes >> 20} MiB"

    tables = cluster.tables(weights)
    torch.cuda.synchronize()
    cluster.replicate(plan, lists, tables, spare)
    reference = LocalTransport(topology)
    expected = make(SPARE, False)
    reference.replicate(plan, weights, expected)
    wrong = sum(count_wrong(a, b) for a, b in zip(spare, expected, strict=True))
    took = event_us(lambda: cluster.replicate(plan, lists, tables, spare))
    _add_transfer(add, f"replicate, {shape}", took, plain, moved, wrong, cluster.errors())

    def replicate_with(how: str, **settings: int) -> None:
        """The same plan and weights with other settings."""
        other = SimulatedCluster(config, replace(cluster.settings, **settings))
        other_lists, other_tables = other.lists(plan), other.tables(weights)
        for tensor in (t for rank in spare for t in rank):
            tensor.zero_()
        torch.cuda.synchronize()
        took = event_us(lambda: other.replicate(plan, other_lists, other_tables, spare))
        wrong = sum(count_wrong(a, b) for a, b in zip(spare, expected, strict=True))
        _add_transfer(add, f"replicate {how}, {shape}", took, plain, moved, wrong, other.errors())
        other.close()

    # Ranks in one GPU have no links to relieve: this is what relays cost.
    replicate_with("without relays", max_relays=0)
    if torch.cuda.get_device_capability() >= (9, 0):
        replicate_with("by bulk copies", bulk_piece_bytes=BULK_PIECE_BYTES["bulk"])

    slots, sums = make(SPARE, True), [tuple(t.float() for t in rank) for rank in make(home, True)]
    wanted = [tuple(t.clone() for t in rank) for rank in sums]
    reference.reduce_grads(plan, slots, wanted)
    tables = cluster.tables(slots)
    torch.cuda.synchronize()
    cluster.reduce(plan, lists, tables, slots, sums)
    wrong = sum(count_wrong(a, b) for a, b in zip(sums, wanted, strict=True))
    took = event_us(lambda: cluster.reduce(plan, lists, tables, slots, sums))
    _add_transfer(add, f"reduce_grads, {shape}", took, plain, moved, wrong, cluster.errors())

    rows = [torch.zeros(experts, dtype=torch.int32, device="cuda") for _ in range(ranks)]
    torch.cuda.synchronize()
    took = event_us(lambda: cluster.exchange(rows))
    errors = cluster.errors()
    add("timings", f"exchange of counts, {nodes}x{ranks_per_node}", "ok" if not errors else "WRONG",
        took, None, "; ".join(errors) or "all ranks in one GPU",
        len(errors))  # fmt: skip
    cluster.close()


def _add_transfer(
    add: Add, what: str, took: float, plain: float, moved: int, wrong: int, errors: list[str]
) -> None:
    rate = moved / took / 1e3
    note = f"{rate:.0f} GB/s; a plain copy of as many bytes: {moved / plain / 1e3:.0f} GB/s, "
    note += f"{plain / took:.0%} of it"
    if errors:
        note = "; ".join(errors)
    add("timings", what, "WRONG" if wrong or errors else "ok", took, None, note,
        wrong + len(errors))  # fmt: skip
