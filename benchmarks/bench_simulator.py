# SPDX-License-Identifier: Apache-2.0
"""Replay and simulation: plans per second, and the time of a long trace.

Times are of the CPU (``thread_time``), so that other work on the machine does not count; a trace of
steps x layers microbatches takes its CPU time divided by the cores that simulate it. ``#wrong``
counts microbatches in which a plan does not send every routed pair exactly once.

    python benchmarks/bench_simulator.py             # one minute on one core
    python benchmarks/bench_simulator.py --long      # also 61 layers x 1,000 steps at R = 64, whole
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np
import torch
from common import report

from topoep import Balance, Cluster, Time, Topology, Trace
from topoep.objective import Objective
from topoep.plan import PlanConfig, make_plan
from topoep.portfolio import default_candidates
from topoep.simulator import MODELS, LayerModel, Placement, Setting
from topoep.simulator.simulate import Request, simulate
from topoep.simulator.workloads import generate

REPEATS = 3  # the best of so many: other work on the machine can only slow it down
FEWER = 32  # candidates of --candidates 32


def trace_of(ranks: int, experts: int, steps: int, layers: int) -> Trace:
    topology = Topology(ranks // 8, 8)
    return generate("lognormal", topology, experts, skew=1.5, steps=steps, layers=layers)


def replay(ranks: int, experts: int) -> list[dict[str, object]]:
    """Plans per second of one core, by objective and number of candidates."""
    trace = trace_of(ranks, experts, steps=25, layers=4)
    counts = trace.counts.reshape(-1, ranks, experts)
    tensors = [torch.from_numpy(one) for one in counts]
    model = LayerModel(
        Cluster("H800", ranks // 8), MODELS["Qwen3-30B-A3B"], trace.topology, Setting()
    )
    objectives: dict[str, Objective] = {
        "Balance(0.01)": Balance(0.01), "Time": Time(model.cost_model(8192))
    }  # fmt: skip
    rows: list[dict[str, object]] = []
    for name, objective in objectives.items():
        config = PlanConfig(trace.topology, experts, 2, objective)
        for limit in (None, FEWER):
            candidates = default_candidates(objective, trace.topology.num_nodes)[:limit]
            seconds = []
            for _ in range(REPEATS):
                begin = time.thread_time()
                plans = [make_plan(config, one, candidates, None) for one in tensors]
                seconds.append(time.thread_time() - begin)
            rows.append(
                {
                    "what": "replay",
                    "R": ranks,
                    "E": experts,
                    "planner": f"{name}, {len(candidates)} candidates",
                    "per second": len(plans) / min(seconds),
                    "us": 1e6 * min(seconds) / len(plans),
                    "#wrong": wrong(Placement.of_plans(plans), counts),
                }
            )
    return rows


def wrong(placement: Placement, counts: np.ndarray) -> int:
    bad = 0
    for b in range(len(counts)):
        one = dataclasses.replace(
            placement,
            split=placement.split[b : b + 1],
            experts=placement.experts[b : b + 1],
            sources=placement.sources[b : b + 1],
        )
        try:
            one.check(counts[b : b + 1])
        except ValueError:
            bad += 1
    return bad


def simulated(ranks: int, experts: int, steps: int, layers: int) -> dict[str, object]:
    """A whole trace through TopoEP and the time model."""
    drawn = min(steps, 20)
    trace = trace_of(ranks, experts, drawn, layers)
    if steps > drawn:  # drawing a thousand steps takes longer than simulating them
        counts = np.concatenate([trace.counts] * -(-steps // drawn))[:steps]
        trace = Trace(counts, trace.node_of_rank, trace.top_k)
    request = Request(
        trace,
        Cluster("H800", ranks // 8),
        dataclasses.replace(MODELS["DeepSeek-V3"], experts=experts),
        planners=("topoep",),
        samples=None,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    result = simulate(request)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    total = steps * layers
    print(f"{layers} layers x {steps} steps: {wall:.1f} s of wall time, {cpu:.1f} s of CPU time")
    return {
        "what": f"simulate {layers} x {steps}",
        "R": ranks,
        "E": experts,
        "planner": "Time, all candidates; and none",
        "per second": total / cpu,
        "us": 1e6 * cpu / total,
        "#wrong": int(result["topoep"].microbatches != total),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay and simulation.")
    parser.add_argument("--long", action="store_true", help="also the long trace (8 GB of memory)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    arguments.device = "cpu"
    torch.set_num_threads(1)
    rows = [*replay(32, 128), *replay(64, 256), simulated(64, 256, 20, 61)]
    if arguments.long:
        rows.append(simulated(64, 256, 1000, 61))
    report("bench_simulator", arguments, rows)


if __name__ == "__main__":
    main()
