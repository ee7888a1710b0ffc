# SPDX-License-Identifier: Apache-2.0
"""What the candidates for ``Time(cost_model)`` are chosen on, for choose_portfolio.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from baselines.grid import nodes_of

from topoep import Candidate, CostModel, Time, ops
from topoep.portfolio import EMPTY_PLAN, default_candidates
from topoep.simulator import workloads as loads

Ints = npt.NDArray[np.int64]

# Ten policies, in the order in which a greedy choice over many loads takes them.
POLICIES = (
    "H22112", "F", "H10122", "F0", "H02122", "H12012", "H12120", "H20020", "H20122", "H10022",
)  # fmt: skip
SPARE_SLOTS = (1, 2, 4)
TOKENS = (1024, 4096, 8192)  # of a rank
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
DRAWS = 3  # of cost model, slots and tokens, for every load

_MEAN = (0, 1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 150)  # percent
_NODE = (0, 2, 5, 10, 20, 50)
_LOAD = (2, 3, 5, 8, 12, 20)
_SUFFIXES = ("", "a", "w", "l", "al", "Al", "wl")
_LIMITS = ("", "/1", "/2")  # copies on a rank; "/3" changes nothing


def pool() -> list[Candidate]:
    """All caps with all policies: for locality, with affinity, with few copies on a rank."""
    caps = [*(f"mean+{x}%" for x in _MEAN), *(f"node+{x}%" for x in _NODE)]
    caps += [f"load#{k}" for k in _LOAD]
    steps = [
        policy + suffix
        for policy in POLICIES
        for suffix in (_SUFFIXES if policy.startswith("H") else ("",))
    ]
    return [Candidate(cap, policy + most) for cap in caps for policy in steps for most in _LIMITS]


@dataclass(frozen=True)
class TimeProblem:
    """A load and what its layer costs."""

    name: str
    counts: loads.Counts
    spare_slots: int
    objective: Time

    def nanoseconds(self, candidates: list[Candidate]) -> list[int]:
        """Predicted time with each candidate or the empty plan, and of the empty plan, last."""
        return [
            *(self._solve([EMPTY_PLAN, c], self.spare_slots)["predicted_ns"] for c in candidates),
            self._solve([EMPTY_PLAN], self.spare_slots)["predicted_ns"],
        ]

    def by_slots(self, most: int) -> list[int]:
        """Predicted time of the default list with 1 to ``most`` slots."""
        candidates = default_candidates(self.objective)
        return [self._solve(candidates, s)["predicted_ns"] for s in range(1, most + 1)]

    def _solve(self, candidates: Sequence[Candidate], slots: int) -> dict[str, int]:
        table, objective = nodes_of(len(self.counts)).table(), self.objective.to_ints()
        packed = [candidate.pack() for candidate in candidates]
        *_, stats = ops.solve(torch.from_numpy(self.counts), table, slots, packed, objective, -1)
        return dict(zip(ops.STAT_NAMES, stats.tolist(), strict=True))


def cases(seed: int) -> Iterator[tuple[str, loads.Counts]]:
    """Skewed, domain-skewed and collapsed routing, ``[R, E]`` each, of ``max(TOKENS)`` per rank."""
    tokens = max(TOKENS)
    for ranks, experts in SHAPES:
        for kind, skew in itertools.product(loads.FAMILIES, SKEWS):
            if kind == "hot_node" and skew > 0.9 * (ranks // 8):
                continue  # a node cannot be that much above the mean
            try:
                counts = loads.skewed(kind, ranks, experts, skew, seed, 1, tokens=tokens)[0]
            except ValueError:
                continue  # nor can a rank with few experts
            yield f"{kind} {skew}", counts
        rng = np.random.default_rng(seed)
        for width in (1.0, 2.0):
            yield f"domain {width}", loads.domain(ranks, experts, width, rng)
        yield "collapsed", loads.collapsed(ranks, experts, rng)


def problems(seed: int) -> Iterator[TimeProblem]:
    """Every case with some of the cost models, slots and tokens."""
    rng = np.random.default_rng(seed)
    keys = list(COST_MODELS)
    for name, counts in cases(seed):
        for key in rng.permutation(len(keys))[:DRAWS]:
            model, number = keys[key]
            slots, tokens = int(rng.choice(SPARE_SLOTS)), int(rng.choice(TOKENS))
            if model == FEW_EXPERTS and len(counts) > FEW_RANKS:
                continue
            label = f"{name} R={len(counts)} S={slots} T={tokens} "
            label += f"{model} on {HARDWARE[number][0]} {number}"
            fewer = rng.binomial(counts, tokens / max(TOKENS)).astype(counts.dtype)
            yield TimeProblem(label, fewer, slots, Time(COST_MODELS[model, number]))
