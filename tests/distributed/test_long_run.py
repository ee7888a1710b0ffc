# SPDX-License-Identifier: Apache-2.0
"""Many steps with changing shapes: memory stays, ranks agree, the collectives are the same."""

from __future__ import annotations

import gc
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import topoep
from tests.distributed.ranks import run_ranks
from tests.distributed.test_transports import log_collectives
from topoep import Topology

EXPERTS, HIDDEN = 8, 4
PAGE_BYTES = 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def living_tensors() -> int:
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def one_step(layers: list[topoep.BalancedExperts], rank: int, step: int) -> int:
    """A training step of another size than the last; a checksum of its last plan."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = int(torch.randint(0, 40, (), generator=generator)) * (step % 7 > 0)
    hot = 1 + step % 5
    ids = torch.randint(0, EXPERTS, (tokens, 2), generator=generator)
    ids[: tokens // 2, 0] = hot
    x = torch.randn(tokens, HIDDEN, generator=generator, requires_grad=True)
    weights = torch.rand(tokens, 2, generator=generator)
    plan = layers[0].balancer.plan(ids)
    y = x
    for layer in layers:
        y = y + layer(y, ids, weights, plan if layer is layers[0] else None)
    y.sum().backward()
    for layer in layers:
        layer.zero_grad()
    return zlib.crc32(plan.slot_expert.numpy().tobytes() + plan.slot_tokens.numpy().tobytes())


def train(rank: int, steps: int, warm: int) -> tuple[int, int, int, set[tuple[str, ...]]]:
    log = log_collectives()
    balancer = topoep.Balancer(Topology(1, 2), EXPERTS, 2, group=dist.group.WORLD)
    layers = [topoep.BalancedExperts(EXPERTS, HIDDEN, 4, balancer=balancer) for _ in range(2)]
    seen: set[tuple[str, ...]] = set()
    plans = tensors = resident = 0
    for step in range(steps):
        log.clear()
        plans = zlib.crc32(one_step(layers, rank, step).to_bytes(4, "big"), plans)
        seen.add(tuple(log))
        if step == warm:
            tensors, resident = living_tensors(), resident_bytes()
    return plans, living_tensors() - tensors, resident_bytes() - resident, seen


def check(steps: int, warm: int) -> None:
    results = run_ranks(2, train, steps, warm, timeout_s=3600)
    assert len({plans for plans, *_ in results}) == 1, "ranks have seen different plans"
    assert len({step for *_, seen in results for step in seen}) == 1, "collectives of a step vary"
    for _, tensors, resident, _ in results:
        assert tensors <= 0, f"{tensors} tensors more than after {warm} steps"
        assert resident < 8 << 20, f"{resident / 2**20:.1f} MiB more than after {warm} steps"


def test_some_hundred_steps():
    check(steps=300, warm=100)


@pytest.mark.slow
def test_ten_thousand_steps():
    check(steps=10_000, warm=1000)
