# SPDX-License-Identifier: Apache-2.0
"""Carries a trace through planners and predicts what each of them gains."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from topoep._version import __version__
from topoep.objective import Objective, Time
from topoep.simulator.cluster import Cluster
from topoep.simulator.layer_time import LayerModel, LayerTimes
from topoep.simulator.model import MoEModel
from topoep.simulator.placement import Placement
from topoep.simulator.planners import PLANNERS, Simulated, make_planner
from topoep.simulator.setting import Setting
from topoep.simulator.step_time import step_time
from topoep.topology import Topology
from topoep.trace import Trace

#: Called with what is being done, how many microbatches of it are done, and how many there are.
Report = Callable[[str, int, int], None]

#: What every table and file says.
PREDICTION = "Predictions of a model, not measurements."

_BATCH = 8  # microbatches that are looked at together; their arrays then fit a core's cache
_CROSS_WEIGHT = 3  # of a copy between nodes, in weighted copies


@dataclass(frozen=True)
class Request:
    """What to simulate.

    Args:
        trace: whole, recorded or generated.
        cluster: the machines.
        model: the model; its E and K must be the trace's.
        setting: the rest.
        planners: names, or planners themselves; ``none`` is always simulated.
        spare_slots: S.
        objective: of TopoEP; least predicted time on these machines if None.
        samples: the most microbatches (a layer of a step each) to plan for; whole steps are chosen,
            evenly spaced. None: all.
        slow_samples: the same for planners that are restated in Python.
        candidates: how many of its candidates TopoEP tries, the first of them; None: all, as in
            training. The first 32 take half the time, for a layer time within 0.1 % of all.
        threads: as many as torch uses if None.

    Raises:
        ValueError: the trace does not fit the cluster or the model, or a number is out of range.
    """

    trace: Trace
    cluster: Cluster
    model: MoEModel
    setting: Setting = field(default_factory=Setting)
    planners: tuple[str | Simulated, ...] = PLANNERS
    spare_slots: int = 2
    objective: Objective | None = None
    samples: int | None = 8192
    slow_samples: int | None = 64
    candidates: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        self.trace.check_whole()
        self.cluster.check_fits(self.trace.topology)
        for name, ours, theirs in (
            ("experts", self.trace.num_experts, self.model.experts),
            ("top-k", self.trace.top_k, self.model.top_k),
        ):
            if ours != theirs:
                raise ValueError(
                    f"the trace has {name} {ours}, {self.model.name} has {theirs}; give the model "
                    "that was recorded (its sizes can come from a .json file)"
                )
        for what in ("samples", "slow_samples", "candidates", "threads"):
            value = getattr(self, what)
            if value is not None and value < 1:
                raise ValueError(f"{what}={value}; expected at least 1, or None for all")

    @property
    def topology(self) -> Topology:
        """Of the expert-parallel group."""
        return self.trace.topology

    @functools.cached_property
    def tokens(self) -> float:
        """Of a rank and microbatch, on average."""
        total = self.trace.counts.sum(dtype=np.int64)
        microbatches = self.trace.num_steps * self.trace.num_layers
        return float(total / microbatches / self.trace.num_ranks / self.trace.top_k)


@dataclass(frozen=True)
class PlannerResult:
    """What a planner does, as means over its microbatches. Times are predictions.

    Args:
        name: of the planner.
        label: for tables.
        microbatches: that it planned for.
        imbalance: fullest rank over the mean.
        imbalance_worst: the largest.
        copies: experts held away from home.
        cross_copies: of these, fetched from another node (others there are passed on from them).
        copies_elsewhere: of these, held in another node than the home's.
        weighted_copies: copies in the node, and three times those that cross nodes.
        cross_tokens: share of the routed pairs that cross nodes.
        layer_ms: one MoE layer's experts and exchanges, forward and backward.
        step_ms: one optimizer step.
        speedup: step time without copies over this one, on the same microbatches.
        layer_speedup: the same for the layer.
        spare_bytes: memory of the spare slots of a rank.
        activation_bytes: of the fullest rank's experts and one layer, the largest.
        parts_ms: the parts of ``layer_ms``.
        layer_speedups: ``layer_speedup`` of each layer of the trace.
        layer_imbalances: imbalance without copies of each layer of the trace.
        plans_per_second: plans and predictions per second of one core.
    """

    name: str
    label: str
    microbatches: int
    imbalance: float
    imbalance_worst: float
    copies: float
    cross_copies: float
    copies_elsewhere: float
    weighted_copies: float
    cross_tokens: float
    layer_ms: float
    step_ms: float
    speedup: float
    layer_speedup: float
    spare_bytes: int
    activation_bytes: int
    parts_ms: dict[str, float]
    layer_speedups: tuple[float, ...]
    layer_imbalances: tuple[float, ...]
    plans_per_second: float


@dataclass(frozen=True)
class Result:
    """Of all planners; ``none`` comes first."""

    request: Request
    planners: tuple[PlannerResult, ...]

    def __getitem__(self, name: str) -> PlannerResult:
        return next(result for result in self.planners if result.name == name)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        request = self.request
        return {
            "format": 1,
            "topoep": __version__,
            "note": PREDICTION,
            "trace": {
                "steps": request.trace.num_steps,
                "layers": request.trace.num_layers,
                "ranks": request.trace.num_ranks,
                "nodes": request.topology.num_nodes,
                "experts": request.trace.num_experts,
                "top_k": request.trace.top_k,
                "tokens_per_rank": request.tokens,
                "meta": dict(request.trace.meta),
            },
            "cluster": dataclasses.asdict(request.cluster),
            "model": dataclasses.asdict(request.model),
            "setting": dataclasses.asdict(request.setting),
            "spare_slots": request.spare_slots,
            "planners": [dataclasses.asdict(result) for result in self.planners],
        }


@dataclass
class _Measured:
    """Of one planner and several microbatches, each ``[B]``."""

    times: LayerTimes
    imbalance: npt.NDArray[np.float64]
    copies: npt.NDArray[np.int64]
    cross_copies: npt.NDArray[np.int64]
    copies_elsewhere: npt.NDArray[np.int64]
    cross_tokens: npt.NDArray[np.int64]
    activation_bytes: npt.NDArray[np.int64]
    seconds: float = field(default=0.0)


def simulate(request: Request, report: Report | None = None) -> Result:
    """Runs all planners of a request over its trace.

    Args:
        request: what to simulate.
        report: called now and then, for a progress display.

    Raises:
        ValueError: an unknown planner, or more spare slots than a plan can have.
    """
    model = LayerModel(request.cluster, request.model, request.topology, request.setting)
    planners = planners_of(request, model)
    results: list[PlannerResult] = []
    request = dataclasses.replace(request, threads=request.threads or torch.get_num_threads())
    with one_thread_per_solve():
        plain: dict[bytes, _Measured] = {}  # by the microbatches that were looked at
        for planner in planners:
            measured, rows = _run(request, model, planner, report)
            key = rows.tobytes()
            if key not in plain:
                plain[key] = (
                    measured
                    if planner.name == "none"
                    else _measure_all(request, model, planners[0], rows, None)
                )
            results.append(_sum_up(request, model, planner, measured, rows, plain[key]))
    return Result(request, tuple(results))


def planners_of(request: Request, model: LayerModel) -> list[Simulated]:
    """What a request simulates, ``none`` first; raises like :func:`simulate`."""
    objective = request.objective or Time(model.cost_model(round(request.tokens)))
    return [
        planner
        if isinstance(planner, Simulated)
        else make_planner(
            planner,
            request.topology,
            request.trace.num_experts,
            request.spare_slots,
            objective,
            request.candidates,
        )
        for planner in ("none", *(name for name in request.planners if name != "none"))
    ]


@contextmanager
def one_thread_per_solve() -> Iterator[None]:
    """Threads work on different microbatches, so that no solve needs several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sampled_steps(steps: int, layers: int, samples: int | None, window: int = 0) -> int:
    """How many whole steps make at most ``samples`` microbatches; one at least.

    A planner that needs a window of history is given steps that have one, if there are any.
    """
    steps -= window if steps > window else 0
    return steps if samples is None else min(max(samples // layers, 1), steps)


def sampled_rows(trace: Trace, samples: int | None, window: int = 0) -> npt.NDArray[np.int64]:
    """Which layers of steps to look at: rows of ``[steps * layers]``, evenly spaced.

    Those of whole steps, as many as :func:`sampled_steps` says.
    """
    first = window if trace.num_steps > window else 0
    steps = trace.num_steps - first
    wanted = sampled_steps(trace.num_steps, trace.num_layers, samples, window)
    # The middles of equal parts of the trace: each step stands for those around it.
    chosen_steps = first + (np.arange(wanted) * 2 + 1) * steps // (2 * wanted)
    rows: npt.NDArray[np.int64] = (
        chosen_steps[:, None] * trace.num_layers + np.arange(trace.num_layers)
    ).ravel()
    return rows


def samples_of(request: Request, planner: Simulated) -> int | None:
    """The most microbatches that a planner of a request plans for; None: all."""
    return request.slow_samples if planner.slow else request.samples


def _run(
    request: Request, model: LayerModel, planner: Simulated, report: Report | None
) -> tuple[_Measured, npt.NDArray[np.int64]]:
    """Plans for the sampled steps; returns what came out, and the rows of ``[steps * layers]``."""
    rows = sampled_rows(request.trace, samples_of(request, planner), planner.window)
    return _measure_all(request, model, planner, rows, report), rows


def _measure_all(
    request: Request,
    model: LayerModel,
    planner: Simulated,
    rows: npt.NDArray[np.int64],
    report: Report | None,
) -> _Measured:
    chunks = np.split(rows, range(_BATCH, len(rows), _BATCH))
    done = 0
    parts = []
    with ThreadPoolExecutor(request.threads) as pool:
        for part in pool.map(lambda chunk: measure(request, model, planner, chunk), chunks):
            parts.append(part)
            done += len(part.imbalance)
            if report is not None:
                report(planner.label, done, len(rows))
    names = [f.name for f in dataclasses.fields(_Measured) if f.name not in ("times", "seconds")]
    return _Measured(
        times=LayerTimes.join([part.times for part in parts]),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
        seconds=sum(part.seconds for part in parts),
    )


def measure(
    request: Request, model: LayerModel, planner: Simulated, rows: npt.NDArray[np.int64]
) -> _Measured:
    """Plans for these rows of ``[steps * layers]``, and predicts what the plans do."""
    trace = request.trace
    steps, layers = np.divmod(rows, trace.num_layers)
    counts = trace.counts[steps, layers]
    begin = time.thread_time()
    history = [_history(trace, s, y, planner.window) for s, y in zip(steps, layers, strict=True)]
    placement = planner.place(counts, history)
    times = model.predict(placement, model.tokens(counts), planner.planned, planner.rerouted)
    seconds = time.thread_time() - begin
    loads = placement.loads
    mean = np.maximum(loads.mean(1), 1e-9)
    nodes = np.asarray(request.topology.node_of_rank)
    copies = count_copies(placement, nodes, planner.window > 0)
    return _Measured(
        times=times,
        imbalance=np.where(loads.any(1), loads.max(1) / mean, 1.0),
        copies=copies.all,
        cross_copies=copies.cross,
        copies_elsewhere=copies.elsewhere,
        cross_tokens=(placement.pairs() * (nodes[:, None] != nodes)).sum((1, 2), dtype=np.int64),
        activation_bytes=model.activation_bytes(placement),
        seconds=seconds,
    )


def _history(trace: Trace, step: int, layer: int, window: int) -> npt.NDArray[np.int32] | None:
    """The sum over the last full window before the one of this step."""
    if window == 0 or step < window:
        return None
    begin = (step // window - 1) * window
    summed: npt.NDArray[np.int32] = trace.counts[begin : begin + window, layer].sum(0)
    return summed


@dataclass(frozen=True)
class Copies:
    """Of B microbatches, each int64 ``[B]``.

    Args:
        all: experts held away from home.
        cross: distinct (expert, node other than the home's): what crosses the network.
        elsewhere: copies held in another node than the home's.
    """

    all: npt.NDArray[np.int64]
    cross: npt.NDArray[np.int64]
    elsewhere: npt.NDArray[np.int64]


def count_copies(
    placement: Placement, nodes: npt.NDArray[np.int64], moved_homes: bool = False
) -> Copies:
    """Counts the copies of a placement.

    Args:
        placement: of B microbatches.
        nodes: the node of each rank.
        moved_homes: homes are not where ids say; the node with most holders of an expert then
            counts as its home's.
    """
    batch = len(placement.experts)
    experts = len(nodes) * placement.home_slots
    per_node = np.zeros((batch, int(nodes.max()) + 1, experts), dtype=np.int64)
    b, rank, slot = np.nonzero(placement.experts >= 0)
    np.add.at(per_node, (b, nodes[rank], placement.experts[b, rank, slot]), 1)
    holders = per_node.sum(1)
    home_node = nodes[np.arange(experts) // placement.home_slots]
    at_home = per_node.max(1) if moved_homes else per_node[:, home_node, np.arange(experts)]
    return Copies(
        all=np.maximum(holders - 1, 0).sum(1),
        cross=np.maximum((per_node > 0).sum(1) - 1, 0).sum(1),
        elsewhere=(holders - at_home).sum(1),
    )


def _sum_up(
    request: Request,
    model: LayerModel,
    planner: Simulated,
    measured: _Measured,
    rows: npt.NDArray[np.int64],
    plain: _Measured,
) -> PlannerResult:
    trace = request.trace
    total, reference = measured.times.total, plain.times.total

    def step(layer: float) -> float:
        return step_time(request.cluster, request.model, request.setting, request.tokens, layer)

    def by_layer(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        means: npt.NDArray[np.float64] = values.reshape(-1, trace.num_layers).mean(0)
        return means

    layer, plain_layer = float(total.mean()), float(reference.mean())
    pairs = trace.counts.reshape(-1, *trace.counts.shape[2:])[rows].sum(dtype=np.int64)
    copies, cross = float(measured.copies.mean()), float(measured.cross_copies.mean())
    return PlannerResult(
        name=planner.name,
        label=planner.label,
        microbatches=len(rows),
        imbalance=float(measured.imbalance.mean()),
        imbalance_worst=float(measured.imbalance.max()),
        copies=copies,
        cross_copies=cross,
        copies_elsewhere=float(measured.copies_elsewhere.mean()),
        weighted_copies=copies + (_CROSS_WEIGHT - 1) * cross,
        cross_tokens=float(measured.cross_tokens.sum() / max(int(pairs), 1)),
        layer_ms=1e3 * layer,
        step_ms=1e3 * step(layer),
        speedup=step(plain_layer) / step(layer),
        layer_speedup=plain_layer / layer,
        spare_bytes=0 if planner.name == "none" else model.spare_bytes(request.spare_slots),
        activation_bytes=int(measured.activation_bytes.max()),
        parts_ms={
            part.name: 1e3 * float(getattr(measured.times, part.name).mean())
            for part in dataclasses.fields(LayerTimes)
        },
        layer_speedups=tuple(float(v) for v in by_layer(reference) / by_layer(total)),
        layer_imbalances=tuple(float(v) for v in by_layer(plain.imbalance)),
        plans_per_second=len(rows) / max(measured.seconds, 1e-9),
    )


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The names of planners; raises ValueError for an unknown one."""
    for name in names:
        if name not in PLANNERS:
            raise ValueError(f"planner {name!r}; expected one of {', '.join(PLANNERS)}")
    return tuple(dict.fromkeys(names))
