# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run that the table shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from topoep.demo.config import DemoConfig
from topoep.demo.training import RunResult

#: Steps at the end of a run over which the loss is averaged.
LAST_STEPS = 10


@dataclass(frozen=True)
class Spread:
    """Of a number over all steps and layers."""

    mean: float
    p95: float
    worst: float

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Spread:
        """The spread of the values of an array."""
        return cls(float(values.mean()), float(np.percentile(values, 95)), float(values.max()))


@dataclass(frozen=True)
class RunSummary:
    """One column of the table. Copies and tokens are means per layer and step."""

    final_loss: float
    last_loss: float  # mean of the last LAST_STEPS steps
    imbalance_before: Spread
    imbalance: Spread
    in_node_copies: float
    cross_node_copies: float
    cross_node_tokens_before: float
    cross_node_tokens: float
    #: Bytes of weights fetched in forward and again in backward, mean per step.
    in_node_weight_bytes: float
    cross_node_weight_bytes: float
    #: Bytes of gradients that the copies send home, mean per step.
    in_node_grad_bytes: float
    cross_node_grad_bytes: float
    step_seconds: float  # median


def summarize(config: DemoConfig, run: RunResult) -> RunSummary:
    """Sums up a run."""
    # Backward goes from the last layer to the first. The copies of the last layer are still in
    # the spare slots when it begins; all others are fetched a second time.
    fetches = np.full(config.layers, 2)
    fetches[-1] = 1
    size = config.bytes_per_expert
    in_node, cross_node = run.stats["in_node_copies"], run.stats["cross_node_copies"]

    def per_step(copies: npt.NDArray[np.float64]) -> float:
        return float(copies.sum(1).mean()) * size

    return RunSummary(
        final_loss=float(run.losses[-1]),
        last_loss=float(run.losses[-LAST_STEPS:].mean()),
        imbalance_before=Spread.of(run.stats["imbalance_before"]),
        imbalance=Spread.of(run.stats["imbalance"]),
        in_node_copies=float(in_node.mean()),
        cross_node_copies=float(cross_node.mean()),
        cross_node_tokens_before=float(run.stats["cross_node_tokens_before"].mean()),
        cross_node_tokens=float(run.stats["cross_node_tokens"].mean()),
        in_node_weight_bytes=per_step(in_node * fetches),
        cross_node_weight_bytes=per_step(cross_node * fetches),
        in_node_grad_bytes=per_step(in_node),
        cross_node_grad_bytes=per_step(cross_node),
        step_seconds=float(np.median(run.step_seconds)),
    )
