# SPDX-License-Identifier: Apache-2.0
"""Counting routed ids, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence


def histogram(ids: Sequence[Sequence[int]], num_experts: int) -> tuple[list[int], int]:
    """Counts per expert, and how many ids are neither padding (-1) nor an expert."""
    counts = [0] * num_experts
    invalid = 0
    for row in ids:
        for expert in row:
            if 0 <= expert < num_experts:
                counts[expert] += 1
            elif expert != -1:
                invalid += 1
    return counts, invalid
