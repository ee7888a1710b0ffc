# SPDX-License-Identifier: Apache-2.0
"""The rules of a plan, checked one by one on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]


class _Rules:
    """The arrays of one plan, and a method per rule."""

    def __init__(
        self,
        node_of_rank: Sequence[int],
        counts: IntArray,
        slot_expert: IntArray,
        slot_source: IntArray,
        slot_tokens: IntArray,
        split: IntArray,
    ) -> None:
        self.node = np.asarray(node_of_rank)
        self.counts = counts.astype(np.int64)
        self.slot_expert = slot_expert
        self.slot_source = slot_source
        self.slot_tokens = slot_tokens.astype(np.int64)
        self.split = split.astype(np.int64)
        self.ranks, self.experts = counts.shape
        self.home_slots = self.experts // self.ranks
        self.width = self.home_slots + slot_expert.shape[1]
        # expert behind every physical id, -1 for empty slots
        home = np.arange(self.experts).reshape(self.ranks, self.home_slots)
        self.expert_of = np.concatenate([home, slot_expert], axis=1).reshape(-1)

    def slots_hold_experts(self) -> str | None:
        bad = (self.slot_expert < -1) | (self.slot_expert >= self.experts)
        return f"slot {_first(bad)} holds an id that is no expert" if bad.any() else None

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

    def never_worse(self) -> str | None:
        before = self.counts.sum(0).reshape(self.ranks, self.home_slots).sum(1).max()
        after = self.split.sum(0).reshape(self.ranks, self.width).sum(1).max()
        return f"max load rises from {before} to {after}" if after > before else None


def _first(mask: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])


_RULES = {
    "a spare slot holds an expert or -1": _Rules.slots_hold_experts,
    "at most one copy of an expert on a rank": _Rules.one_holder_per_rank,
    "a copy comes from its home or the first holder of its node": _Rules.sources_hold_the_expert,
    "quotas of every rank and expert sum to the counts": _Rules.quotas_are_counts,
    "a copy serves the tokens its slot says": _Rules.copies_serve_their_quota,
    "never worse than no copies": _Rules.never_worse,
}


def validate_plan(
    node_of_rank: Sequence[int],
    counts: IntArray,
    slot_expert: IntArray,
    slot_source: IntArray,
    slot_tokens: IntArray,
    split: IntArray,
) -> None:
    """Raises ValueError naming the first broken rule; shapes as in :class:`topoep.Plan`."""
    rules = _Rules(node_of_rank, counts, slot_expert, slot_source, slot_tokens, split)
    for name, broken in _RULES.items():
        problem = broken(rules)
        if problem is not None:
            raise ValueError(f"plan breaks the rule '{name}': {problem}")
