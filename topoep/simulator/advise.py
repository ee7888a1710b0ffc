# SPDX-License-Identifier: Apache-2.0
"""What to set for a trace, what it gains, what it costs, and where it does not pay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from topoep.cost_model import CostModel
from topoep.objective import Balance, Even, Objective, Time
from topoep.simulator.layer_time import LayerModel
from topoep.simulator.reshape import regroup
from topoep.simulator.simulate import (
    PlannerResult,
    Report,
    Request,
    simulate,
)

SLOTS = range(9)
#: A setting is worth more memory or another EP size only if it gains at least this much more.
WORTHWHILE = 0.005


@dataclass(frozen=True)
class Trial:
    """A setting and its predicted result.

    Args:
        ep: ranks of the expert-parallel group.
        spare_slots: S.
        objective: as code that makes it; ``-`` for no copies.
        result: of the planner.
        home_bytes: weights of the home experts of a rank, all layers.
        tokens_per_second: of one GPU, predicted.
    """

    ep: int
    spare_slots: int
    objective: str
    result: PlannerResult
    home_bytes: int
    tokens_per_second: float

    @property
    def gain(self) -> float:
        """Predicted speed-up of the step over no copies at this EP size, less 1."""
        return self.result.speedup - 1


@dataclass(frozen=True)
class Advice:
    """What was tried and what came of it.

    Args:
        trials: all of them.
        best: for the trace's own EP size; its spare slots are 0 if copies do not pay.
        best_of_ep: the same for every EP size.
        losing_layers: layers of the trace that the best setting makes slower.
        cost_model: what ``Time`` was tried with.
    """

    trials: tuple[Trial, ...]
    best: Trial
    best_of_ep: tuple[Trial, ...]
    losing_layers: tuple[int, ...]
    cost_model: CostModel


def advise(request: Request, sizes: Sequence[int], report: Report | None = None) -> Advice:
    """Tries spare slots 0 to 8, objectives and EP sizes.

    Args:
        request: its trace, cluster, model, setting and samples are used.
        sizes: EP sizes besides the trace's own. The routing is regrouped for them
            (:func:`topoep.simulator.reshape.regroup`).
        report: for a progress display.
    """
    own = request.trace.num_ranks
    trials: list[Trial] = []
    groups = [own, *(size for size in sizes if size != own)]
    for i, ep in enumerate(groups):
        here = request
        if ep != own:
            trace = regroup(request.trace, request.cluster.topology(ep))
            here = dataclasses.replace(request, trace=trace)
        trials += _trials(here, report, i * TRIALS, len(groups) * TRIALS)
    best_of_ep = tuple(_best([trial for trial in trials if trial.ep == ep]) for ep in groups)
    best = best_of_ep[0]
    losing = tuple(layer for layer, speedup in enumerate(best.result.layer_speedups) if speedup < 1)
    return Advice(tuple(trials), best, best_of_ep, losing, _cost_model(request))


def _cost_model(request: Request) -> CostModel:
    model = LayerModel(request.cluster, request.model, request.topology, request.setting)
    return model.cost_model(round(request.tokens))


def _objectives(request: Request) -> dict[str, Objective]:
    return {
        "Time(cost_model)": Time(_cost_model(request)),
        "Balance(0.01)": Balance(0.01),
        "Balance(0.05)": Balance(0.05),
        "Even()": Even(),
    }


#: Of an EP size: no copies, and each objective for each S.
TRIALS = 1 + 4 * (len(SLOTS) - 1)


def _trials(request: Request, report: Report | None, done: int, total: int) -> list[Trial]:
    model, setting = request.model, request.setting
    trials: list[Trial] = []
    expert = LayerModel(request.cluster, model, request.topology, setting).costs.weight_bytes
    home = expert * request.trace.num_experts // request.trace.num_ranks * model.moe_layers

    def add(result: PlannerResult, slots: int, objective: str) -> None:
        tokens = request.tokens * setting.microbatches / setting.pipeline
        rate = tokens / (1e-3 * result.step_ms)
        trials.append(Trial(request.trace.num_ranks, slots, objective, result, home, rate))
        if report is not None:
            report(f"EP{request.trace.num_ranks}", done + len(trials), total)

    for slots in SLOTS[1:]:
        for name, objective in _objectives(request).items():
            ours = simulate(
                dataclasses.replace(
                    request, planners=("topoep",), spare_slots=slots, objective=objective
                )
            )
            if not trials:
                add(ours["none"], 0, "-")
            add(ours["topoep"], slots, name)
    return trials


def _best(trials: Sequence[Trial]) -> Trial:
    """The fewest spare slots, then the first objective, within ``WORTHWHILE`` of the largest gain.

    Without a gain of that size: no copies.
    """
    most = max(trial.gain for trial in trials)
    if most < WORTHWHILE:
        return trials[0]
    close = [t for t in trials if t.spare_slots and t.gain >= most - WORTHWHILE]
    return min(close, key=lambda trial: trial.spare_slots)


__all__ = ["SLOTS", "TRIALS", "WORTHWHILE", "Advice", "Trial", "advise"]
