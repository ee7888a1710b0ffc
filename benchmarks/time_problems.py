# SPDX-License-Identifier: Apache-2.0
"""What the candidates for ``Time(cost_model)`` are chosen on, for choose_portfolio.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from baselines.grid import nodes_of

from topoep import Candidate, CostModel, Time, ops
from topoep.portfolio import EMPTY_PLAN
from topoep.simulator import workloads as loads

Ints = npt.NDArray[np.int64]

# Ten policies, in the order in which a greedy choice over many loads takes them.
POLICIES = (
    "H22112", "F", "H10122", "F0", "H02122", "H12012", "H12120", "H20020", "H20122", "H10022",
)  # fmt: skip
SPARE_SLOTS = 2
SHAPES = ((8, 64), (16, 128), (32, 128), (64, 256))  # R, E
SKEWS = (1.1, 1.3, 1.7, 2.5)
MODELS = {  # hidden and intermediate size
    "30B": (2048, 768),
    "106B": (4096, 1408),
    "671B": (7168, 2048),
    "120B": (2880, 2880),
    "8x7B": (4096, 14336),
}
FEW_EXPERTS = "8x7B"  # not run over many ranks
FEW_RANKS = 16
HARDWARE: tuple[tuple[str, dict[str, bool]], ...] = (
    ("H800", {}),
    ("H100", {"dedup": False}),
    ("H100", {"sharded": False, "dedup": False}),
    ("B200", {}),
)
COST_MODELS = {
    (model, number): CostModel.from_model(hidden, intermediate, "bfloat16", name, **options)
    for model, (hidden, intermediate) in MODELS.items()
    for number, (name, options) in enumerate(HARDWARE)
}
COST_MODELS_PER_LOAD = 3  # drawn for every load

_MEAN = (0, 1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 150)  # percent
_NODE = (0, 2, 5, 10, 20, 50)
_LOAD = (2, 3, 5, 8, 12, 20)


def pool() -> list[Candidate]:
    """All caps with all policies; those by nodes also for locality and with affinity."""
    above_mean = [f"mean+{x}%" for x in _MEAN]
    caps = [*above_mean, *(f"node+{x}%" for x in _NODE), *(f"load#{k}" for k in _LOAD)]
    by_nodes = [policy for policy in POLICIES if policy.startswith("H")]
    return [
        *(Candidate(cap, policy) for cap, policy in itertools.product(caps, POLICIES)),
        *(Candidate(cap, policy + "l") for cap, policy in itertools.product(caps, by_nodes)),
        *(Candidate(cap, policy + "a") for cap, policy in itertools.product(above_mean, by_nodes)),
        *(Candidate(cap, "H22112al") for cap in above_mean),
    ]


@dataclass(frozen=True)
class TimeProblem:
    """A load and what its layer costs."""

    name: str
    counts: loads.Counts
    objective: Time

    def nanoseconds(self, candidates: list[Candidate]) -> list[int]:
        """Predicted time with each candidate or the empty plan, and of the empty plan, last."""
        counts = torch.from_numpy(self.counts)
        table, objective = nodes_of(len(self.counts)).table(), self.objective.to_ints()
        result, before = [], 0
        for candidate in candidates:
            packed = [EMPTY_PLAN.pack(), candidate.pack()]
            *_, stats = ops.solve(counts, table, SPARE_SLOTS, packed, objective, -1)
            named = dict(zip(ops.STAT_NAMES, stats.tolist(), strict=True))
            result.append(named["predicted_ns"])
            before = named["predicted_ns_before"]
        return [*result, before]


def cases(seed: int) -> Iterator[tuple[str, loads.Counts]]:
    """Skewed, domain-skewed and collapsed routing, ``[R, E]`` each."""
    for ranks, experts in SHAPES:
        for kind, skew in itertools.product(loads.FAMILIES, SKEWS):
            if kind == "hot_node" and skew > 0.9 * (ranks // 8):
                continue  # a node cannot be that much above the mean
            try:
                yield f"{kind} {skew}", loads.skewed(kind, ranks, experts, skew, seed, 1)[0]
            except ValueError:
                continue  # nor can a rank with few experts
        rng = np.random.default_rng(seed)
        for width in (1.0, 2.0):
            yield f"domain {width}", loads.domain(ranks, experts, width, rng)
        yield "collapsed", loads.collapsed(ranks, experts, rng)


def problems(seed: int) -> Iterator[TimeProblem]:
    """Every case with some of the cost models."""
    rng = np.random.default_rng(seed)
    keys = list(COST_MODELS)
    for name, counts in cases(seed):
        for key in rng.permutation(len(keys))[:COST_MODELS_PER_LOAD]:
            model, number = keys[key]
            if model != FEW_EXPERTS or len(counts) <= FEW_RANKS:
                label = f"{name} R={len(counts)} {model} on {HARDWARE[number][0]} {number}"
                yield TimeProblem(label, counts, Time(COST_MODELS[model, number]))
