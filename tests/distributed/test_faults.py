# SPDX-License-Identifier: Apache-2.0
"""A rank raises, is killed, is slow, or does something else: the others end with an error.

Real processes die here. Nothing may hang (every case has a limit far above the group's timeout),
and no step may come back on a rank whose peers were not in it.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import topoep
from tests.distributed.ranks import run_to_the_end
from topoep import Topology

RANKS, FAULTY = 4, 2
GROUP_TIMEOUT_S, LIMIT_S = 3.0, 25.0


def train_step(layer: topoep.BalancedExperts, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 3, (12, 1), generator=generator)
    x = torch.randn(12, 4, generator=generator, requires_grad=True)
    layer(x, ids, torch.ones(12, 1)).sum().backward()


def misbehave(layer: topoep.BalancedExperts, fault: str) -> None:
    balancer = layer.balancer

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    match fault:
        case "raises":
            raise ValueError("not enough memory")
        case "killed":
            die()
        case "killed while weights move":
            balancer.transport.replicate = die
        case "killed in backward":
            balancer.transport.reduce_grads = die
        case "slow":
            time.sleep(2 * GROUP_TIMEOUT_S)
        case "one plan more":
            balancer.plan(torch.zeros(4, 1, dtype=torch.int64))
        case "one step less":
            os._exit(0)


def several_steps(rank: int, fault: str) -> int:
    layer = topoep.BalancedExperts(8, 4, 4, topology=Topology(2, 2), group=dist.group.WORLD)
    train_step(layer, rank)
    if rank == FAULTY:
        misbehave(layer, fault)
    for _ in range(3):
        train_step(layer, rank)
    return 4


@pytest.mark.parametrize(
    "fault",
    [
        "raises",
        "killed",
        "killed while weights move",
        "killed in backward",
        "slow",
        "one plan more",
        "one step less",
    ],
)
def test_the_others_end_with_an_error(fault):
    outcomes = run_to_the_end(
        RANKS, several_steps, fault, group_timeout_s=GROUP_TIMEOUT_S, timeout_s=LIMIT_S
    )
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code is not None, f"rank {rank} hangs"
        assert outcome.value is None, f"rank {rank} went on without rank {FAULTY}"
        if rank != FAULTY:
            assert f"failed on rank {rank} of 4" in outcome.error
            assert "Another rank has raised, died, was slower" in outcome.error
    if fault == "raises":
        assert "not enough memory" in outcomes[FAULTY].error


def test_without_a_fault_all_come_back():
    outcomes = run_to_the_end(
        RANKS, several_steps, "", group_timeout_s=GROUP_TIMEOUT_S, timeout_s=LIMIT_S
    )
    assert [outcome.value for outcome in outcomes] == [4] * RANKS


def other_plan(rank: int) -> None:
    balancer = topoep.Balancer(Topology(2, 2), 8, 2, group=dist.group.WORLD)
    plans = [balancer.plan(torch.full((8, 1), expert)) for expert in (0, 5)]
    balancer.replicate((torch.zeros(2, 3),), plans[rank == FAULTY])


def test_debug_mode_names_the_rank_with_another_plan(monkeypatch):
    monkeypatch.setenv("TOPOEP_DEBUG", "1")
    for outcome in run_to_the_end(
        RANKS, other_plan, group_timeout_s=GROUP_TIMEOUT_S, timeout_s=LIMIT_S
    ):
        assert "ranks 0 and 2 call replicate() with different plans" in outcome.error


def test_debug_mode_names_the_rank_with_a_call_more(monkeypatch):
    monkeypatch.setenv("TOPOEP_DEBUG", "1")
    started = time.monotonic()
    for outcome in run_to_the_end(
        RANKS, several_steps, "one plan more", group_timeout_s=20, timeout_s=LIMIT_S
    ):
        assert "rank 0 calls replicate() while rank 2 calls plan()" in outcome.error
    assert time.monotonic() - started < 20, "found by comparing, not by waiting"


def other_dtype(rank: int) -> None:
    balancer = topoep.Balancer(Topology(2, 2), 8, 2, group=dist.group.WORLD)
    plan = balancer.plan(torch.zeros(8, 1, dtype=torch.int64))
    dtype = torch.bfloat16 if rank == FAULTY else torch.float32
    balancer.replicate((torch.zeros(2, 3, dtype=dtype),), plan)


def test_debug_mode_names_the_rank_with_other_weights(monkeypatch):
    monkeypatch.setenv("TOPOEP_DEBUG", "1")
    for outcome in run_to_the_end(
        RANKS, other_dtype, group_timeout_s=GROUP_TIMEOUT_S, timeout_s=LIMIT_S
    ):
        assert "ranks 0 and 2 call replicate() with tensors of different" in outcome.error
