# SPDX-License-Identifier: Apache-2.0
"""TopoEP and the baselines on the same counts; what a duel is says bench_quality."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import topoep
from baselines import BASELINES
from baselines.grid import SLOTS, WINDOW, Load, nodes_of
from baselines.score import Score, least_max_load, quota_of_plan, score
from baselines.tables import CURVE, Row, mean
from topoep.plan import MAX_SPARE_SLOTS
from topoep.simulator import workloads as loads
from topoep.simulator.planners.base import Baseline, IntArray

Tick = Callable[[], None]

SEVERE_SKEW = 8.0
MAX_VALIDATED_RANKS = 64  # the check of every rule on the host takes long for larger plans


def tolerance_for(max_load: int, tokens: int, ranks: int) -> float:
    """The least tolerance, in whole parts per million, whose cap is not below ``max_load``."""
    return max(-(-max_load * ranks * 10**6 // tokens) - 10**6, 0) / 10**6


def solved(
    counts: loads.Counts,
    topology: topoep.Topology,
    slots: int,
    objective: topoep.objective.Objective,
) -> Score:
    """TopoEP's plan with the default candidates, measured."""
    plan = topoep.solve(torch.from_numpy(counts), topology, slots, objective)
    result = score(counts, topology, quota_of_plan(plan), slots)
    if topology.num_ranks <= MAX_VALIDATED_RANKS:
        try:
            plan.validate()
        except ValueError as broken:
            result = dataclasses.replace(result, fault=str(broken))
    return result


def planned(
    baseline: Baseline,
    counts: loads.Counts,
    topology: topoep.Topology,
    slots: int,
    history: IntArray | None = None,
) -> Score:
    """A baseline's plan, measured."""
    ranks, experts = counts.shape
    limit = {"spare": slots, "one": 1, "home": experts // ranks, "any": None}[baseline.slots]
    quota = baseline.plan(counts, topology, slots, history)
    return score(counts, topology, quota, limit, baseline.moves_homes)


@dataclass(frozen=True)
class Duel:
    """A baseline's plan, and TopoEP's for the imbalance that the baseline reached."""

    instance: str
    before: Score
    theirs: Score
    ours: Score

    @property
    def lost(self) -> bool:
        """TopoEP did not reach that imbalance, or with more weighted copies."""
        reached = self.ours.max_load <= self.theirs.max_load
        return not reached or self.ours.weighted > self.theirs.weighted


def _slots_of(baseline: Baseline, load: Load, theirs: Score) -> int:
    has = load.experts // load.ranks if baseline.slots == "home" else max(theirs.slots_used, 2)
    return min(has, MAX_SPARE_SLOTS)


def duels_of(load: Load, first_seed: int, tick: Tick) -> dict[tuple[int | str, str], list[Duel]]:
    """All baselines on all instances of a load, by S and name."""
    result: dict[tuple[int | str, str], list[Duel]] = defaultdict(list)
    for seed in range(first_seed, first_seed + load.seeds):
        for number, (counts, history) in enumerate(load.instances(seed)):
            before = planned(BASELINES[0], counts, load.topology, 0)
            for slots, baseline in itertools.product(load.slots, BASELINES):
                own = baseline.slots in ("home", "any")  # S makes no difference: once is enough
                if (own and slots != 2) or (baseline.slots == "one" and slots != 1):
                    continue
                theirs = planned(baseline, counts, load.topology, slots, history)
                given = _slots_of(baseline, load, theirs) if own else slots
                tolerance = tolerance_for(theirs.max_load, theirs.tokens, load.ranks)
                ours = solved(counts, load.topology, given, topoep.Balance(tolerance))
                duel = Duel(f"{seed}.{number}", before, theirs, ours)
                result["own" if own else slots, baseline.name].append(duel)
        tick()
    return result


def wrong(scores: Iterable[Score]) -> int:
    return sum(score.fault is not None for score in scores)


def shape_of(load: Load) -> Row:
    return {"group": load.group, "load": load.name, "R": load.ranks, "E": load.experts} | {
        "G": load.node_ranks
    }


def cell_row(load: Load, slots: int | str, name: str, duels: Sequence[Duel]) -> Row:
    theirs, ours = [duel.theirs for duel in duels], [duel.ours for duel in duels]
    before = [duel.before for duel in duels]
    return {
        **shape_of(load),
        "S": slots,
        "planner": name,
        "instances": len(duels),
        "before": mean(s.imbalance for s in before),
        "imbalance": mean(s.imbalance for s in theirs),
        "worst": max(s.imbalance for s in theirs),
        "copies": mean(s.weighted for s in theirs),
        "topoep": mean(s.weighted for s in ours),
        "published": mean(s.published for s in theirs),
        "topoep published": mean(s.published for s in ours),
        "cross % before": 100 * mean(s.cross_tokens / s.tokens for s in before),
        "cross %": 100 * mean(s.cross_tokens / s.tokens for s in theirs),
        "topoep cross %": 100 * mean(s.cross_tokens / s.tokens for s in ours),
        "re-homed": mean(s.moved_homes for s in theirs),
        "lost": sum(duel.lost for duel in duels),
        "#wrong": wrong((*theirs, *ours)),
    }


def loss_row(load: Load, slots: int | str, name: str, duel: Duel) -> Row:
    return {
        **shape_of(load),
        "S": slots,
        "instance": duel.instance,
        "planner": name,
        "imbalance": duel.theirs.imbalance,
        "max load": duel.theirs.max_load,
        "topoep max load": duel.ours.max_load,
        "copies": duel.theirs.weighted,
        "topoep": duel.ours.weighted,
        "#wrong": wrong((duel.theirs, duel.ours)),
    }


def curve_rows(load: Load, first_seed: int, tick: Tick) -> list[Row]:
    """TopoEP alone, for fixed tolerances: a row per instance."""
    rows = []
    for seed in range(first_seed, first_seed + load.seeds):
        for counts, _ in load.instances(seed):
            bound = {slots: least_max_load(counts, slots) for slots in load.slots}
            for slots, tolerance in itertools.product(load.slots, CURVE):
                ours = solved(counts, load.topology, slots, topoep.Balance(tolerance))
                least = -(-ours.tokens // load.ranks)
                cap = max(least, ours.tokens * (1 + tolerance) / load.ranks)
                rows.append(
                    {
                        "R": load.ranks,
                        "S": slots,
                        "tolerance": tolerance,
                        "imbalance": ours.imbalance,
                        "copies": ours.weighted,
                        "missed": ours.max_load > cap,
                        "impossible": bound[slots] > cap,
                        "#wrong": wrong([ours]),
                    }
                )
        tick()
    return rows


def severe_rows(ranks: int, experts: int, kind: str, seeds: Iterable[int]) -> list[Row]:
    """The least imbalance reached when one rank has eight times the mean, a row per S."""
    topology = nodes_of(ranks)
    others = [b for b in BASELINES if b.slots == "spare" and b.name != "no balancing"]
    pairs = [loads.skewed(kind, ranks, experts, SEVERE_SKEW, seed) for seed in seeds]
    rows = []
    for slots in SLOTS:
        ours = [solved(counts, topology, slots, topoep.Even()) for counts, _ in pairs]
        bound = [least_max_load(counts, slots) * ranks / counts.sum() for counts, _ in pairs]
        theirs = {
            b.name: [planned(b, counts, topology, slots, history) for counts, history in pairs]
            for b in others
        }
        rows.append(
            {
                "R": ranks,
                "E": experts,
                "load": kind,
                "S": slots,
                "bound": mean(bound),
                "topoep": mean(s.imbalance for s in ours),
                "worst": max(s.imbalance for s in ours),
                "copies": mean(s.weighted for s in ours),
                **{name: mean(s.imbalance for s in found) for name, found in theirs.items()},
                "#wrong": wrong(ours) + sum(wrong(found) for found in theirs.values()),
            }
        )
    return rows


def sequence_lines(seed: int, ranks: int = 32, steps: int = 40) -> dict[str, dict[str, Any]]:
    """Imbalance over the steps without balancing, with EPLB from history, and with TopoEP."""
    topology = nodes_of(ranks)
    chosen = [b for b in BASELINES if b.name in ("no balancing", "EPLB hierarchical")]
    result = {}
    for make in (loads.drifting, loads.bursty):
        lines: dict[str, list[float]] = defaultdict(list)
        for counts, history in loads.with_history(make(ranks, 256, 1.7, seed, steps), WINDOW):
            for b in chosen:
                lines[b.name].append(planned(b, counts, topology, 2, history).imbalance)
            ours = solved(counts, topology, 2, topoep.Balance())
            lines["TopoEP, tolerance 1 %"].append(ours.imbalance)
        result[f"{make.__name__}, R = {ranks}, S = 2"] = lines
    return result
