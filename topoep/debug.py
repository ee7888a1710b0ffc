# SPDX-License-Identifier: Apache-2.0
"""Checks that cost time, for finding out why training went wrong: ``TOPOEP_DEBUG=1``."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

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


#: The collective calls of a Balancer, as ranks tell each other.
CALLS = ("plan", "plan_from_counts", "replicate", "prefetch", "reduce_grads")


def check_call(
    call: str, plan: Plan | None, transport: Transport, tensors: Sequence[Tensor] = ()
) -> None:
    """Checks that all ranks are in the same call, with the same plan and tensors of the same kind.

    All ranks raise, or none does.

    One more collective per call; waits for the device.

    Raises:
        RuntimeError: names two ranks that do different things.
    """
    kinds = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors])
    own = [
        CALLS.index(call),
        0 if plan is None else _digest(plan.counts, *_tables(plan)),
        zlib.crc32(kinds.encode()),
    ]
    calls, plans, shapes = transport.gather_config(torch.tensor(own, device="cpu")).unbind(1)
    if (other := _other(calls)) is not None:
        raise RuntimeError(
            f"rank 0 calls {CALLS[int(calls[0])]}() while rank {other} calls "
            f"{CALLS[int(calls[other])]}(): a rank has made a call more or less than the others. "
            "All ranks of a group must run the same layers in the same order"
        )
    if (other := _other(plans)) is not None:
        raise RuntimeError(
            f"ranks 0 and {other} call {call}() with different plans; weights would be sent to the "
            "wrong place. All ranks of a group must run the same layers in the same order"
        )
    if (other := _other(shapes)) is not None:
        raise RuntimeError(
            f"ranks 0 and {other} call {call}() with tensors of different shapes or dtypes; this "
            f"rank gives {kinds}. All ranks of a group must give the same"
        )


def check_plan(plan: Plan, transport: Transport) -> None:
    """Checks a plan's rules, that no id was out of range, and that all ranks made the same plan.

    One more collective per plan; waits for the device. All ranks raise, or none does.

    Raises:
        ValueError: an id of some rank is no expert.
        RuntimeError: two ranks have different counts or plans: the exchange of counts, or the
            memory of a rank, is broken.
    """
    own = [int(plan.num_invalid), _digest(plan.counts), _digest(*_tables(plan))]
    invalid, counts, plans = transport.gather_config(torch.tensor(own, device="cpu")).unbind(1)
    if invalid.any():
        rank = int(invalid.nonzero()[0])
        raise ValueError(
            f"{int(invalid[rank])} routed ids of rank {rank} are neither -1 nor an expert "
            f"(0 to {plan.config.num_experts - 1}); mask padding with -1"
        )
    for name, values in (("token counts", counts), ("plans", plans)):
        if (other := _other(values)) is not None:
            raise RuntimeError(
                f"ranks 0 and {other} have different {name} for the same layer: what is exchanged "
                "does not arrive as it was sent, or the counts given to plan_from_counts differ"
            )
    plan.validate()


def _tables(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    return plan.slot_expert, plan.slot_source, plan.slot_tokens


def _digest(*tensors: Tensor) -> int:
    digest = 0
    for tensor in tensors:
        digest = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), digest)
    return digest


def _other(values: Tensor) -> int | None:
    """The first rank whose value is not rank 0's."""
    differing = (values != values[0]).nonzero()
    return int(differing[0]) if len(differing) else None
