# SPDX-License-Identifier: Apache-2.0
"""Plans that a test chooses, instead of those the planner would make."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from topoep import Balancer, Even, Plan, ops
from topoep.portfolio import EMPTY_PLAN

#: Chooses the experts in every rank's spare slots from counts int32 [R, E].
Chooser = Callable[[Balancer, Tensor], list[list[int]]]


def no_copies(balancer: Balancer, counts: Tensor) -> list[list[int]]:
    """Every spare slot stays empty."""
    return [[] for _ in range(balancer.config.num_ranks)]


def random_copies(seed: int) -> Chooser:
    """Up to S experts of other ranks in each rank, other ones for every plan."""
    generator = random.Random(seed)

    def choose(balancer: Balancer, counts: Tensor) -> list[list[int]]:
        # The ranks make their plans in the same order, so they draw the same experts.
        home = balancer.config.experts_per_rank
        chosen = []
        for rank in range(balancer.config.num_ranks):
            others = [e for e in range(balancer.num_experts) if e // home != rank]
            chosen.append(generator.sample(others, generator.randint(0, balancer.spare_slots)))
        chosen[-1] = chosen[-1] or [0]
        return chosen

    return choose


def force(balancer: Balancer, choose: Chooser) -> list[Plan]:
    """Makes a balancer use the chosen copies, whose tokens are shared out evenly.

    Returns:
        The plans, which the balancer appends to as it makes them.
    """
    made: list[Plan] = []

    def make(counts: Tensor, num_invalid: Tensor | None, ids: tuple[Tensor, ...]) -> Plan:
        plan = make_plan(balancer, counts, choose(balancer, counts), ids)
        made.append(plan)
        return plan

    balancer._make_plan = make
    return made


def make_plan(
    balancer: Balancer, counts: Tensor, copies: list[list[int]], ids: tuple[Tensor, ...]
) -> Plan:
    """The plan with these experts in the spare slots of each rank."""
    config = balancer.config
    node = config.topology.node_of_rank
    shape = config.num_ranks, config.spare_slots
    slot_expert = torch.full(shape, -1, dtype=torch.int32)
    slot_source = torch.full(shape, -1, dtype=torch.int32)
    slot_tokens = torch.zeros(shape, dtype=torch.int32)
    holders: dict[int, list[tuple[int, int]]] = {}
    for rank in sorted(range(config.num_ranks), key=lambda r: (node[r], r)):
        for slot, expert in enumerate(sorted(copies[rank])):
            slot_expert[rank, slot] = expert
            holders.setdefault(expert, []).append((rank, slot))
    slots: list[int] = []
    offsets = [0]
    for expert in range(config.num_experts):
        places = holders.get(expert, [])
        home = expert // config.experts_per_rank
        for rank, slot in places:
            # Across nodes the first holder of the node fetches; the others take it from there.
            first = next(r for r, _ in places if node[r] == node[rank])
            direct = node[home] == node[rank] or first == rank
            slot_source[rank, slot] = home if direct else first
            slot_tokens[rank, slot] = int(counts[:, expert].sum()) // (len(places) + 1)
            slots.append(rank * config.slots_per_rank + config.experts_per_rank + slot)
        offsets.append(len(slots))
    copy_slots = torch.full((config.num_ranks * config.spare_slots,), -1, dtype=torch.int32)
    copy_slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    table = config.topology.table("cpu")
    split = ops.split(counts, table, slot_expert, slot_tokens)
    # Those of the empty plan: right in what they say of the counts.
    *_, stats = ops.solve(
        counts, table, config.spare_slots, [EMPTY_PLAN.pack()], Even().to_ints(), -1
    )
    plan = Plan(
        config,
        counts,
        slot_expert,
        slot_source,
        slot_tokens,
        torch.tensor(offsets, dtype=torch.int32),
        copy_slots,
        rank=None,
        send=None,
        recv=None,
        num_invalid=torch.zeros((), dtype=torch.int32),
        _stats=stats,
        owner=balancer,
        topk_ids=ids,
    )
    assert int(split.sum()) == int(counts.sum())
    plan = plan.for_rank(balancer.held_ranks[0])
    try:
        plan.validate()
    except ValueError as error:
        if "never worse" not in str(error):  # which is the planner's promise, not a test's
            raise
    return plan
