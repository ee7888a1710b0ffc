# SPDX-License-Identifier: Apache-2.0
"""How deep a candidate is: dependent steps, and barriers and warp collectives of the kernel itself.

A step is one repetition of a loop of the planner (docs/algorithm.md, section 8). The chain is the
longest sequence of barriers and collectives that had to follow one another, counted by running the
kernel under the emulation; divided by the steps it says what a step costs. No GPU needed, and no
time measured: the last column multiplies the chain with a stated guess of cycles per link. Loads:
lognormal and two Zipf families at imbalance 1.3, 1.7 and 3.

#wrong counts kernels whose plan differs from the CPU form's.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from baselines.grid import KINDS, SKEWS
from common import parse_arguments, report

from topoep.simulator import workloads as loads

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import topoep
from tests.emulation.harness import Schedule
from tests.kernels.kernels import Kernels
from topoep import ops
from topoep.portfolio import EMPTY_PLAN, default_candidates

# A warp collective (redux, shuffle: about 20 cycles) with the shared-memory loads (about 30) and
# the arithmetic before it; a guess for sm_90, to be replaced by a measurement.
CYCLES_PER_LINK = 60
SHAPES = [(16, 256), (32, 256), (64, 256), (128, 256), (256, 512)]
SEEDS = range(2)
OBJECTIVE = topoep.Balance(0.01)
CANDIDATES = default_candidates(OBJECTIVE)[1:]


def steps_of(counts: torch.Tensor, topology: topoep.Topology) -> dict[str, list[int]]:
    """Dependent steps of every default candidate of Balance(0.01) that makes copies."""
    steps: dict[str, list[int]] = {"H": [], "F": []}
    for candidate in CANDIDATES:
        plan = topoep.solve(counts, topology, 2, OBJECTIVE, candidates=[candidate])
        stats = plan.stats()
        if int(stats["candidate"]) == 1:
            steps[candidate.policy[0]].append(int(stats["steps"]))
    return steps


def chain_of(counts: torch.Tensor, topology: topoep.Topology) -> tuple[float, int]:
    """Chain links of one typical candidate beyond those of the empty plan, and #wrong."""
    kernels = Kernels(Schedule(1, "in_order", 0), num_sms=64)
    chains, wrong = [], 0
    for candidates in ([EMPTY_PLAN], [EMPTY_PLAN, CANDIDATES[0]]):
        packed = [candidate.pack() for candidate in candidates]
        arguments = (counts, topology.table(), 2, packed, topoep.Even().to_ints(), 0)
        before = kernels.stats()
        got = kernels.solve(*arguments)
        chains.append((kernels.stats() - before).chain)
        expected = ops.solve(*arguments)
        wrong += not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    plan = topoep.solve(counts, topology, 2, topoep.Even(), candidates=[CANDIDATES[0]])
    return (chains[1] - chains[0]) / max(int(plan.stats()["steps"]), 1), wrong


def main() -> None:
    arguments = parse_arguments(__doc__)
    rows = []
    for ranks, experts in SHAPES:
        topology = topoep.Topology(num_nodes=ranks // 8, ranks_per_node=8)
        steps: dict[str, list[int]] = {"H": [], "F": []}
        for kind, skew, seed in itertools.product(KINDS, SKEWS, SEEDS):
            counts = torch.from_numpy(loads.skewed(kind, ranks, experts, skew, seed, 1)[0])
            for policy, values in steps_of(counts, topology).items():
                steps[policy] += values
        per_step, wrong = chain_of(counts, topology)
        mean = sum(steps["H"]) / len(steps["H"])
        rows.append(
            {
                "R": ranks,
                "E": experts,
                "H steps": mean,
                "H worst": max(steps["H"]),
                "F steps": sum(steps["F"]) / len(steps["F"]),
                "F worst": max(steps["F"]),
                "links per step": per_step,
                "cycles, guessed": mean * per_step * CYCLES_PER_LINK,
                "#wrong": wrong,
            }
        )
    report("bench_depth", arguments, rows)


if __name__ == "__main__":
    main()
