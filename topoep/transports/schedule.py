# SPDX-License-Identifier: Apache-2.0
"""Which rank sends which slot to whom: the transfer lists of a plan.

Weights move in two stages, so that a copy crosses the network once per (expert, remote node):

    stage 0   home rank     -> copies in its node, and the first holder of every other node
    stage 1   first holder  -> the other holders of its node

Gradients take the same ways backwards, in the opposite order.
"""

from __future__ import annotations

from dataclasses import dataclass

from topoep.plan import HostPlan, PlanConfig

NUM_STAGES = 2


@dataclass(frozen=True)
class Transfer:
    """One copy that moves."""

    source: int
    target: int
    expert: int
    target_slot: int  # spare slot of the target, 0 .. S - 1
    source_slot: int  # stage 0: home slot of the source; stage 1: its spare slot


@dataclass(frozen=True)
class RankSchedule:
    """The transfers of one rank in one stage, in the order of the rows that travel.

    Rows go to the targets in rank order and arrive in the order of the sources; between two ranks
    they are ordered by the target's slot, so both ends agree without talking about it.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    send_splits: list[int]
    recv_splits: list[int]


def plan_transfers(config: PlanConfig, plan: HostPlan) -> tuple[list[Transfer], list[Transfer]]:
    """All transfers of each stage, ordered by target and slot."""
    stages: tuple[list[Transfer], list[Transfer]] = ([], [])
    home_slots = config.experts_per_rank
    slot_expert = plan.slot_expert.tolist()
    slot_source = plan.slot_source.tolist()
    for target, experts in enumerate(slot_expert):
        for slot, expert in enumerate(experts):
            if expert < 0:
                continue
            source = slot_source[target][slot]
            if source == expert // home_slots:
                stages[0].append(Transfer(source, target, expert, slot, expert % home_slots))
            else:
                source_slot = slot_expert[source].index(expert)
                stages[1].append(Transfer(source, target, expert, slot, source_slot))
    return stages


def rank_schedule(transfers: list[Transfer], rank: int, num_ranks: int) -> RankSchedule:
    """One rank's part of one stage."""
    sends = tuple(t for t in transfers if t.source == rank)
    receives = tuple(
        sorted((t for t in transfers if t.target == rank), key=lambda t: (t.source, t.target_slot))
    )
    send_splits = [0] * num_ranks
    recv_splits = [0] * num_ranks
    for transfer in sends:
        send_splits[transfer.target] += 1
    for transfer in receives:
        recv_splits[transfer.source] += 1
    return RankSchedule(sends, receives, send_splits, recv_splits)
