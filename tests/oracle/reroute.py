# SPDX-License-Identifier: Apache-2.0
"""Rewriting expert ids to physical ids in token order, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence


def holders_of(
    expert: int,
    copy_offsets: Sequence[int],
    copy_slots: Sequence[int],
    home_slots: int,
    spare_slots: int,
) -> list[int]:
    """Physical ids of an expert: its home slot, then the copies in list order."""
    rank, slot = divmod(expert, home_slots)
    home = rank * (home_slots + spare_slots) + slot
    return [home, *copy_slots[copy_offsets[expert] : copy_offsets[expert + 1]]]


def reroute(
    ids: Sequence[Sequence[int]],
    send: Sequence[int],
    copy_offsets: Sequence[int],
    copy_slots: Sequence[int],
    num_ranks: int,
) -> list[list[int]]:
    """Physical ids of the same shape; ids that are no expert are passed through.

    Quotas (``send``) are filled in token order, the home slot's first; tokens beyond all quotas of
    an expert go home.
    """
    num_experts = len(copy_offsets) - 1
    home_slots = num_experts // num_ranks
    spare_slots = len(copy_slots) // num_ranks
    left = list(send)
    result = []
    for row in ids:
        new_row = []
        for expert in row:
            physical = expert
            if 0 <= expert < num_experts:
                holders = holders_of(expert, copy_offsets, copy_slots, home_slots, spare_slots)
                physical = next((p for p in holders if left[p] > 0), holders[0])
                left[physical] -= 1
            new_row.append(physical)
        result.append(new_row)
    return result
