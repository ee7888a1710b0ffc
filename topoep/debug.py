# SPDX-License-Identifier: Apache-2.0
"""Checks that cost time, for finding out why training went wrong: ``TOPOEP_DEBUG=1``."""

from __future__ import annotations

import os
import zlib

import torch

from topoep.plan import Plan
from topoep.transports.base import Transport


def debug_mode() -> bool:
    """Whether ``TOPOEP_DEBUG`` asks for the checks.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get("TOPOEP_DEBUG", "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"TOPOEP_DEBUG={value!r}; expected 0 or 1")
    return value == "1"


def check_plan(plan: Plan, transport: Transport) -> None:
    """Checks a plan's rules, that no id was out of range, and that all ranks made the same plan.

    One more collective per plan; waits for the device. All ranks raise, or none does.

    Raises:
        ValueError: an id of some rank is no expert.
        RuntimeError: two ranks have different counts or plans: the exchange of counts, or the
            memory of a rank, is broken.
    """
    parts = (plan.counts, plan.slot_expert, plan.slot_source, plan.slot_tokens)
    sums = [zlib.crc32(part.cpu().contiguous().numpy().tobytes()) for part in parts]
    own = torch.tensor([int(plan.num_invalid), zlib.crc32(repr(sums[1:]).encode()), sums[0]])
    invalid, plans, counts = transport.gather_config(own).unbind(1)
    if invalid.any():
        rank = int(invalid.nonzero()[0])
        raise ValueError(
            f"{int(invalid[rank])} routed ids of rank {rank} are neither -1 nor an expert "
            f"(0 to {plan.config.num_experts - 1}); mask padding with -1"
        )
    for name, values in (("token counts", counts), ("plans", plans)):
        other = (values != values[0]).nonzero()
        if len(other):
            raise RuntimeError(
                f"ranks 0 and {int(other[0])} have different {name} for the same layer; weights "
                "would be sent to the wrong place. All ranks of a group must plan the same layers "
                "in the same order"
            )
    plan.validate()
