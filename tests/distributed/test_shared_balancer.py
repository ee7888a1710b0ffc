# SPDX-License-Identifier: Apache-2.0
"""Adapters share one balancer per group and options; ranks agree on whether it has to be made."""

from __future__ import annotations

import gc

import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from topoep import Even, Topology
from topoep.adapters.options import BalancerOptions
from topoep.adapters.shared import shared_balancer

OPTIONS = BalancerOptions(topology=Topology(1, 2), objective=Even())


def one_rank_has_collected(rank: int) -> tuple[bool, bool]:
    group = dist.group.WORLD
    first = shared_balancer(group, 4, OPTIONS)
    same = shared_balancer(group, 4, OPTIONS) is first
    kept = [first] if rank == 0 else []
    del first
    gc.collect()
    again = shared_balancer(group, 4, OPTIONS)  # rank 1 has lost it, rank 0 has not
    return same, again in kept


def test_a_balancer_that_lives_on_one_rank_only_is_made_again_by_all():
    assert run_ranks(2, one_rank_has_collected, timeout_s=30) == [(True, False), (True, False)]


def other_options_after_a_hit(rank: int) -> str:
    kept = shared_balancer(dist.group.WORLD, 4, BalancerOptions(3, Topology(1, 2)))
    try:
        shared_balancer(dist.group.WORLD, 4, BalancerOptions(3 + rank, Topology(1, 2)))
    except ValueError as error:
        return str(error)
    return f"{kept} of both"


def test_options_that_differ_are_named_although_one_rank_has_that_balancer():
    for text in run_ranks(2, other_options_after_a_hit, timeout_s=30):
        assert "ranks 0 and 1 of the group disagree on spare_slots (3 and 4)" in text


def not_an_integer(rank: int) -> str:
    kept = shared_balancer(dist.group.WORLD, 4, BalancerOptions(2, Topology(1, 2)))
    try:
        shared_balancer(dist.group.WORLD, 4, BalancerOptions(2.0, Topology(1, 2)))
    except TypeError as error:
        return str(error)
    return f"{kept} of both"


def test_options_are_checked_although_equal_ones_were_used_before():
    for text in run_ranks(2, not_an_integer, timeout_s=30):
        assert "spare_slots is 2.0, a float; expected an int" in text
