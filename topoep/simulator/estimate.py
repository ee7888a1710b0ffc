# SPDX-License-Identifier: Apache-2.0
"""How long a simulation will take, told from one microbatch of each planner."""

from __future__ import annotations

import time

import torch

from topoep.simulator.layer_time import LayerModel
from topoep.simulator.planners import Simulated
from topoep.simulator.simulate import (
    Request,
    measure,
    one_thread_per_solve,
    planners_of,
    sampled_rows,
    sampled_steps,
    samples_of,
)

_SHORT_S = 0.1  # what takes less is timed again


def estimated_seconds(request: Request, steps: int, layers: int) -> dict[str, float]:
    """The time that :func:`topoep.simulator.simulate.simulate` will take, by planner.

    Planners that are restated in Python hold the interpreter, so threads do not help them.

    Args:
        request: its trace may be shorter than what is going to be simulated.
        steps: of the trace that is going to be simulated.
        layers: likewise.
    """
    threads = request.threads or torch.get_num_threads()
    model = LayerModel(request.cluster, request.model, request.topology, request.setting)
    seconds = {}
    with one_thread_per_solve():
        for planner in planners_of(request, model):
            samples = samples_of(request, planner)
            microbatches = layers * sampled_steps(steps, layers, samples, planner.window)
            took = _seconds_of_one(request, model, planner)
            seconds[planner.label] = took * microbatches / (1 if planner.slow else threads)
    return seconds


def _seconds_of_one(request: Request, model: LayerModel, planner: Simulated) -> float:
    row = sampled_rows(request.trace, 1, planner.window)[:1]

    def once() -> float:
        begin = time.perf_counter()
        measure(request, model, planner, row)
        return time.perf_counter() - begin

    took = once()
    # The first one loads what later ones find loaded.
    return took if took >= _SHORT_S else min(once(), once())
