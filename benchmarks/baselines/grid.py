# SPDX-License-Identifier: Apache-2.0
"""What plans are compared on: loads, shapes and numbers of spare slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from topoep import Topology, Trace
from topoep.simulator import workloads as loads
from topoep.simulator.planners.base import IntArray

Instance = tuple[loads.Counts, IntArray]  # counts and history, both [R, E]

KINDS = ("lognormal", "zipf_rank", "zipf_rank_shuf")
SKEWS = (1.3, 1.7, 3.0)
SLOTS = (1, 2, 4)
SEEDS = {8: 12, 16: 12, 32: 12, 64: 8, 128: 6, 256: 4}  # of the main grid, by R
ODD_SHAPES = ((40, 160, 8), (48, 384, 8), (32, 128, 4), (12, 60, 4))  # R, E, G
LLEP_SHAPES = ((8, 128, 4), (8, 256, 8), (8, 384, 8), (32, 128, 4))  # R, E, top-k
WINDOW = 8  # steps of history in sequences


@dataclass(frozen=True)
class Load:
    """Instances of one shape to plan for; a cell of the grid is a load and a number of slots."""

    group: str
    name: str
    topology: Topology
    experts: int
    slots: Sequence[int]
    seeds: int
    instances: Callable[[int], Iterable[Instance]]  # of a seed

    @property
    def ranks(self) -> int:
        """R."""
        return self.topology.num_ranks

    @property
    def node_ranks(self) -> int:
        """G."""
        return self.ranks // self.topology.num_nodes


def nodes_of(ranks: int, node_ranks: int = 8) -> Topology:
    """Nodes of consecutive ranks, one smaller node if there are fewer."""
    return Topology(max(ranks // node_ranks, 1), min(ranks, node_ranks))


def full_grid() -> list[Load]:
    """Everything."""
    grid = []
    for ranks, kind, skew in itertools.product(SEEDS, KINDS, SKEWS):
        shape = (ranks, 512 if ranks == 256 else 256, 8)
        grid.append(_skewed("main", kind, skew, shape, SEEDS[ranks]))
    for shape, kind, skew in itertools.product(ODD_SHAPES, KINDS, SKEWS):
        grid.append(_skewed("odd shapes", kind, skew, shape, 6))
    for ranks, skew in ((16, 1.7), (32, 1.7), (32, 3.0), (64, 1.7), (64, 3.0), (128, 3.0)):
        grid.append(_skewed("hot node", "hot_node", skew, (ranks, 256, 8), 6))
    for ranks, workload in itertools.product((16, 64), loads.MEGATRON):
        grid.append(_megatron(workload, ranks, steps=12, seeds=2))
    for ranks, make in itertools.product((32, 64), (loads.drifting, loads.bursty)):
        grid.append(_sequence(make, ranks, steps=24, seeds=3))
    for shape, percent, hot in itertools.product(LLEP_SHAPES, (30, 50, 80, 95), (1, 4, 16)):
        grid.append(_concentrated(percent, hot, shape, 2))
    return grid


def quick_grid() -> list[Load]:
    """A little of everything."""
    grid = [
        _skewed("main", kind, skew, (ranks, 256, 8), 2)
        for ranks, kind, skew in itertools.product((16, 64), KINDS, (1.3, 3.0))
    ]
    grid.append(_skewed("odd shapes", "lognormal", 1.7, (12, 60, 4), 3))
    grid.append(_skewed("hot node", "hot_node", 1.7, (32, 256, 8), 2))
    grid += [_megatron(workload, 16, steps=6, seeds=1) for workload in loads.MEGATRON]
    grid += [_sequence(make, 32, 12, 1) for make in (loads.drifting, loads.bursty)]
    grid.append(_concentrated(80, 4, LLEP_SHAPES[0], 1))
    return grid


def trace_load(path: Path) -> Load:
    """All layers of a recorded training run, every step from the middle on or after WINDOW."""
    trace = Trace.load(path)
    steps, layers, _, experts = trace.counts.shape

    def instances(seed: int) -> Iterator[Instance]:
        for layer in range(layers):
            yield from loads.with_history(trace.counts[:, layer], min(WINDOW, steps // 2))

    topology = Topology(node_of_rank=trace.node_of_rank)
    return Load("trace", path.name, topology, experts, SLOTS, 1, instances)


def _skewed(group: str, kind: str, skew: float, shape: tuple[int, int, int], seeds: int) -> Load:
    ranks, experts, node_ranks = shape

    def instances(seed: int) -> Iterator[Instance]:
        counts = loads.skewed(kind, ranks, experts, skew, seed, node_ranks=node_ranks)
        yield counts[0], counts[1]

    topology = nodes_of(ranks, node_ranks)
    return Load(group, f"{kind} {skew}", topology, experts, SLOTS, seeds, instances)


def _megatron(workload: str, ranks: int, steps: int, seeds: int) -> Load:
    def instances(seed: int) -> Iterator[Instance]:
        sequence = [loads.megatron(workload, ranks, 256, seed, step) for step in range(steps)]
        return loads.with_history(np.stack(sequence), 4)

    return Load("Megatron", workload, nodes_of(ranks), 256, SLOTS, seeds, instances)


def _sequence(make: Callable[..., loads.Counts], ranks: int, steps: int, seeds: int) -> Load:
    def instances(seed: int) -> Iterator[Instance]:
        return loads.with_history(make(ranks, 256, 1.7, seed, steps), WINDOW)

    return Load("sequence", make.__name__, nodes_of(ranks), 256, (2,), seeds, instances)


def _concentrated(percent: int, hot: int, shape: tuple[int, int, int], seeds: int) -> Load:
    ranks, experts, top_k = shape

    def instances(seed: int) -> Iterator[Instance]:
        counts = loads.concentrated(ranks, experts, percent, hot, top_k, seed)
        yield counts[0], counts[1]

    name = f"{percent} % to {hot} of {experts}"
    return Load("LLEP", name, nodes_of(ranks), experts, (2,), seeds, instances)
