# SPDX-License-Identifier: Apache-2.0
"""Speed-up by skew and by the size of the expert-parallel group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topoep.simulator.cluster import Cluster
from topoep.simulator.reshape import regroup
from topoep.simulator.simulate import Report, Request, simulate
from topoep.simulator.workloads import MEGATRON, generate

SKEWS = (1.0, 1.2, 1.5, 2.0, 3.0)
_SAMPLES = 64  # microbatches of each point


@dataclass(frozen=True)
class Point:
    """A predicted speed-up of TopoEP over no copies."""

    ep: int
    imbalance: float
    speedup: float


def ep_sizes(cluster: Cluster, experts: int) -> list[int]:
    """Sizes of an expert-parallel group: powers of two that fit the cluster and divide E."""
    sizes = []
    size = 2
    while size <= min(cluster.num_ranks, experts):
        whole_nodes = size <= cluster.ranks_per_node or size % cluster.ranks_per_node == 0
        if experts % size == 0 and whole_nodes:
            sizes.append(size)
        size *= 2
    return sizes


def sweep(request: Request, report: Report | None = None) -> list[Point]:
    """Speed-ups over skew and EP size.

    For a generated trace with a skew, other skews are generated. For other traces the routing is
    regrouped to the EP sizes, and the microbatches are put in three groups by their imbalance.

    Args:
        request: its planners are not used.
        report: for a progress display.
    """
    sizes = [size for size in ep_sizes(request.cluster, request.model.experts) if size >= 4]
    generator = request.trace.meta.get("generator")
    points: list[Point] = []
    for i, size in enumerate(sizes):
        if generator is not None and generator not in MEGATRON:
            points += _generated(request, size, str(generator))
        else:
            points += _regrouped(request, size)
        if report is not None:
            report("EP sizes", i + 1, len(sizes))
    return points


def _generated(request: Request, size: int, generator: str) -> list[Point]:
    points = []
    topology = request.cluster.topology(size)
    for skew in SKEWS:
        try:
            trace = generate(
                generator,
                topology,
                request.model.experts,
                top_k=request.model.top_k,
                tokens=round(request.tokens),
                skew=skew,
                steps=2,
                layers=4,
                seed=int(request.trace.meta.get("seed", 0)),
            )
        except ValueError:
            continue  # a skew that this many experts per rank cannot have
        points += _point(dataclasses.replace(request, trace=trace), size)
    return points


def _point(request: Request, size: int) -> list[Point]:
    ours = simulate(
        dataclasses.replace(request, planners=("topoep",), samples=_SAMPLES, objective=None)
    )
    return [Point(size, ours["none"].imbalance, ours["topoep"].speedup)]


def _regrouped(request: Request, size: int) -> list[Point]:
    trace = regroup(request.trace, request.cluster.topology(size))
    imbalance = trace.imbalance().mean(1)  # of steps
    groups: Sequence[np.ndarray] = np.array_split(np.argsort(imbalance, kind="stable"), 3)
    points = []
    for steps in groups:
        if len(steps):
            part = dataclasses.replace(trace, counts=trace.counts[np.sort(steps)], steps=None)
            points += _point(dataclasses.replace(request, trace=part), size)
    return points
