# SPDX-License-Identifier: Apache-2.0
"""The rules of a plan, checked one by one on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_TOKENS = 2**31 - 1  # kMaxTokens

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True)
class PlanArrays:
    """A plan on the host; shapes as in :class:`topoep.Plan`."""

    node_of_rank: Sequence[int]
    counts: IntArray
    slot_expert: IntArray
    slot_source: IntArray
    slot_tokens: IntArray
    copy_offsets: IntArray
    copy_slots: IntArray
    rank: int | None
    send: IntArray | None
    recv: IntArray | None
    #: ``tokens``, ``max_load_before`` and ``cross_node_tokens_before`` as the solve found them.
    stats: Mapping[str, int]
    #: Computes ``[R, P]``; called once the slots are known to make sense.
    split: Callable[[], IntArray]


class _Rules:
    """A method per rule: None, or what breaks it."""

    def __init__(self, plan: PlanArrays) -> None:
        self.plan = plan
        self.node = np.asarray(plan.node_of_rank)
        self.counts = plan.counts.astype(np.int64)
        self.slot_expert = plan.slot_expert
        self.slot_source = plan.slot_source
        self.slot_tokens = plan.slot_tokens.astype(np.int64)
        self.ranks, self.experts = plan.counts.shape
        self.home_slots = self.experts // self.ranks
        self.width = self.home_slots + plan.slot_expert.shape[1]
        # expert behind every physical id, -1 for empty slots
        home = np.arange(self.experts).reshape(self.ranks, self.home_slots)
        self.expert_of = np.concatenate([home, plan.slot_expert], axis=1).reshape(-1)

    @functools.cached_property
    def split(self) -> IntArray:
        return self.plan.split().astype(np.int64)

    def counts_are_those_solved(self) -> str | None:
        """The plan keeps the caller's tensor, which may have been written to since."""
        load = self.counts.sum(0).reshape(self.ranks, self.home_slots).sum(1)
        home = np.repeat(self.node, self.home_slots)
        crossing = self.counts[self.node[:, None] != home[None, :]]
        found = {
            "tokens": self.counts.sum(),
            "max_load_before": load.max(),
            "cross_node_tokens_before": crossing.sum(),
        }
        for name, value in found.items():
            if value != self.plan.stats[name]:
                return (
                    f"the counts give {name} = {value}, the solve found {self.plan.stats[name]}. "
                    "Were they changed in place since? Solve again, or give solve() a clone()"
                )
            if value > MAX_TOKENS:
                return None  # counts that no plan covers: the empty plan, and no other numbers
        return None

    def slots_hold_experts(self) -> str | None:
        bad = (self.slot_expert < -1) | (self.slot_expert >= self.experts)
        return f"slot {_first(bad)} holds an id that is no expert" if bad.any() else None

    def tokens_fit_slots(self) -> str | None:
        bad = (self.slot_tokens < 0) | ((self.slot_expert < 0) & (self.slot_tokens != 0))
        if not bad.any():
            return None
        rank, slot = _first(bad)
        state = "an empty slot" if self.slot_expert[rank, slot] < 0 else "the copy"
        return f"{state} in slot [{rank}, {slot}] serves {self.slot_tokens[rank, slot]} tokens"

    def one_holder_per_rank(self) -> str | None:
        for rank in range(self.ranks):
            held = self.expert_of[rank * self.width : (rank + 1) * self.width]
            held = held[held >= 0]
            if len(set(held.tolist())) != len(held):
                return f"rank {rank} holds an expert twice: {sorted(held.tolist())}"
        return None

    def sources_hold_the_expert(self) -> str | None:
        for rank, slot in np.argwhere(self.slot_expert >= 0):
            expert = int(self.slot_expert[rank, slot])
            home = expert // self.home_slots
            in_node = [
                r
                for r in range(self.ranks)
                if self.node[r] == self.node[rank] and expert in self.slot_expert[r].tolist()
            ]
            same_node = self.node[home] == self.node[rank]
            expected = home if same_node or in_node[0] == rank else in_node[0]
            if self.slot_source[rank, slot] != expected:
                return (
                    f"rank {rank} fetches expert {expert} from {self.slot_source[rank, slot]}, "
                    f"expected {expected}"
                )
        empty = (self.slot_expert < 0) & (self.slot_source != -1)
        return f"empty slot {_first(empty)} has a source" if empty.any() else None

    def quotas_are_counts(self) -> str | None:
        if (self.split < 0).any():
            return f"split{_first(self.split < 0)} is negative"
        served = np.zeros_like(self.counts)
        valid = self.expert_of >= 0
        np.add.at(served.T, self.expert_of[valid], self.split[:, valid].T)
        if (self.split[:, ~valid] != 0).any():
            return "an empty slot is given tokens"
        wrong = served != self.counts
        if wrong.any():
            rank, expert = _first(wrong)
            return (
                f"rank {rank} sends {served[rank, expert]} tokens of expert {expert} to its "
                f"holders, the counts say {self.counts[rank, expert]}"
            )
        return None

    def copies_serve_their_quota(self) -> str | None:
        received = self.split.sum(0).reshape(self.ranks, self.width)[:, self.home_slots :]
        wrong = received != self.slot_tokens
        if not wrong.any():
            return None
        rank, slot = _first(wrong)
        return (
            f"the copy in slot [{rank}, {slot}] receives {received[rank, slot]} tokens, its quota "
            f"is {self.slot_tokens[rank, slot]}"
        )

    def copies_are_listed(self) -> str | None:
        order = np.lexsort((np.arange(self.ranks), self.node))  # node by node
        physical = np.arange(self.ranks * self.width).reshape(self.ranks, self.width)
        spare = physical[order, self.home_slots :].reshape(-1)
        for expert in range(self.experts):
            begin, end = self.plan.copy_offsets[expert : expert + 2]
            listed = self.plan.copy_slots[begin:end].tolist()
            held = [int(p) for p in spare if self.expert_of[p] == expert]
            if listed != held:
                return f"the copies of expert {expert} are {held}, listed are {listed}"
        rest = self.plan.copy_slots[self.plan.copy_offsets[-1] :]
        if (rest != -1).any():
            return f"copy_slots holds {rest[rest != -1][0]} beyond the last copy"
        return None

    def row_and_column_are_the_split(self) -> str | None:
        rank = self.plan.rank
        if rank is None or self.plan.send is None or self.plan.recv is None:
            return None
        if (self.plan.send != self.split[rank]).any():
            return f"send{_first(self.plan.send != self.split[rank])} is not that of rank {rank}"
        column = self.split[:, rank * self.width : (rank + 1) * self.width]
        if (self.plan.recv != column).any():
            return f"recv{_first(self.plan.recv != column)} is not that of rank {rank}"
        return None

    def never_worse(self) -> str | None:
        before = self.counts.sum(0).reshape(self.ranks, self.home_slots).sum(1).max()
        after = self.split.sum(0).reshape(self.ranks, self.width).sum(1).max()
        return f"max load rises from {before} to {after}" if after > before else None


def _first(mask: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])


_RULES = {
    "the counts are those that were solved": _Rules.counts_are_those_solved,
    "a spare slot holds an expert or -1": _Rules.slots_hold_experts,
    "a copy serves tokens, an empty slot none": _Rules.tokens_fit_slots,
    "at most one copy of an expert on a rank": _Rules.one_holder_per_rank,
    "a copy comes from its home or the first holder of its node": _Rules.sources_hold_the_expert,
    "quotas of every rank and expert sum to the counts": _Rules.quotas_are_counts,
    "a copy serves the tokens its slot says": _Rules.copies_serve_their_quota,
    "never worse than no copies": _Rules.never_worse,
    "the copies of an expert are listed node by node": _Rules.copies_are_listed,
    "send and recv are the row and column of the rank": _Rules.row_and_column_are_the_split,
}


def validate_plan(plan: PlanArrays) -> None:
    """Raises ValueError naming the first broken rule."""
    rules = _Rules(plan)
    for name, broken in _RULES.items():
        problem = broken(rules)
        if problem is not None:
            raise ValueError(f"plan breaks the rule '{name}': {problem}")
