# SPDX-License-Identifier: Apache-2.0
"""One training run: data parallel where the model is dense, expert parallel in its experts."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from topoep.balancer import Balancer
from topoep.demo.config import DemoConfig
from topoep.demo.model import ByteModel
from topoep.demo.text import Text, batches

#: What is kept of ``plan.stats()``.
STATS = (
    "imbalance_before",
    "imbalance",
    "in_node_copies",
    "cross_node_copies",
    "cross_node_tokens_before",
    "cross_node_tokens",
)


@dataclass(frozen=True)
class Progress:
    """What one step looked like, for a progress display."""

    balanced: bool
    step: int  # done so far
    loss: float
    imbalance_before: float  # mean over layers
    imbalance: float


@dataclass(frozen=True)
class RunResult:
    """What a run leaves behind; the same on every rank but for ``step_seconds``."""

    balanced: bool
    #: float64 ``[steps]``: mean over all tokens of all ranks.
    losses: npt.NDArray[np.float64]
    #: float64 ``[steps]``.
    step_seconds: npt.NDArray[np.float64]
    #: int32 ``[steps, layers, R, E]``: tokens that source rank r routes to expert e.
    counts: npt.NDArray[np.int32]
    #: float64 ``[steps, layers]`` for every name of ``STATS``.
    stats: Mapping[str, npt.NDArray[np.float64]]
    #: SHA-256 of the final parameters of all ranks.
    parameters_sha256: str


def train(
    config: DemoConfig,
    text: Text,
    group: dist.ProcessGroup,
    balanced: bool,
    report: Callable[[Progress], None] | None = None,
) -> RunResult:
    """Trains a new model. Collective over the group.

    Args:
        config: sizes and seed.
        text: what to train on.
        group: ``config.num_ranks`` ranks, over which both dense gradients and experts are spread.
        balanced: copy hot experts; otherwise plain expert parallelism.
        report: called after every step.
    """
    rank = dist.get_rank(group)
    spare_slots = config.spare_slots if balanced else 0
    balancer = Balancer(
        config.topology, config.experts, spare_slots, group=group, replica_policy="refetch"
    )
    model = ByteModel(config, balancer)
    dense = model.dense_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))

    losses, seconds, counts, stats = [], [], [], []
    for step, (inputs, targets) in enumerate(batches(text, config, rank), start=1):
        start = time.perf_counter()
        optimizer.zero_grad()
        # Every rank has as many tokens as the next, so the mean over all tokens is the sum of
        # these. The tokens of all ranks meet in the experts: their gradients are sums already.
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / config.num_ranks
        torch.autograd.backward(loss)
        mean_loss = _sum_over_ranks(loss.detach(), dense, group)
        optimizer.step()
        schedule.step()
        seconds.append(time.perf_counter() - start)

        plans = [moe.plan for moe in model.moes()]
        losses.append(mean_loss)
        counts.append(torch.stack([plan.counts for plan in plans]))
        stats.append(torch.stack([_numbers(plan.stats()) for plan in plans]))
        if report is not None:
            shown = stats[-1].mean(0)
            report(Progress(balanced, step, mean_loss.item(), shown[0].item(), shown[1].item()))

    table = torch.stack(stats).numpy()
    return RunResult(
        balanced=balanced,
        losses=torch.stack(losses).double().numpy(),
        step_seconds=np.array(seconds),
        counts=torch.stack(counts).numpy(),
        stats={name: table[:, :, i] for i, name in enumerate(STATS)},
        parameters_sha256=_digest(model, group),
    )


def _rate(step: int, steps: int) -> float:
    """Warm-up over a tenth of the steps, then a cosine down to a tenth of the learning rate."""
    warm_up = math.ceil(steps / 10)
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(steps - warm_up, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _sum_over_ranks(loss: Tensor, dense: list[nn.Parameter], group: dist.ProcessGroup) -> Tensor:
    """Sums the gradients of the dense parameters in place, and returns the sum of the losses."""
    grads = [p.grad for p in dense if p.grad is not None]
    flat = torch.cat([loss.view(1), *(grad.flatten() for grad in grads)])
    dist.all_reduce(flat, group=group)
    total, *summed = torch.split(flat, [1, *(grad.numel() for grad in grads)])
    for grad, values in zip(grads, summed, strict=True):
        grad.copy_(values.view_as(grad))
    return total[0].clone()  # not a view, which would keep all the gradients


def _numbers(stats: dict[str, Tensor]) -> Tensor:
    return torch.stack([stats[name].double() for name in STATS])


def _digest(model: nn.Module, group: dist.ProcessGroup) -> str:
    mine = hashlib.sha256()
    for parameter in model.parameters():
        mine.update(parameter.detach().numpy().tobytes())
    digests = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, mine.hexdigest(), group)
    return hashlib.sha256("".join(digests).encode()).hexdigest()
