# SPDX-License-Identifier: Apache-2.0
"""DeepEP and dispatchers with its interface: physical ids instead of expert ids, and their number.

Nothing of DeepEP is imported or wrapped; its buffer stays the caller's::

    deepep.limits.check(balancer, top_k)                                # once
    plan = balancer.plan(topk_ids)
    arguments = deepep.dispatch_arguments(balancer, topk_ids, plan)
    recv_x, recv_ids, recv_weights, handle, event = buffer.dispatch(
        x, topk_weights=topk_weights, num_max_tokens_per_rank=most, **arguments
    )

``recv_ids`` are then local slots: home experts first, copies behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from topoep.balancer import Balancer
from topoep.plan import Plan


@dataclass(frozen=True)
class DispatchLimits:
    """What a dispatcher can take. The defaults are those of DeepEP 2's ElasticBuffer.

    Copies count: with S spare slots per rank a dispatcher sees P = E + R * S experts.
    """

    top_k: int = 32
    experts: int = 2048
    experts_per_rank: int = 256
    ranks: int = 1024

    def check(self, balancer: Balancer, top_k: int) -> None:
        """Raises for a balancer whose physical experts the dispatcher cannot serve; at set-up.

        Args:
            balancer: whose ids will be dispatched.
            top_k: K.

        Raises:
            ValueError: names the limit, what was given, and which part of it are spare slots.
        """
        config = balancer.config
        spare = f"{config.spare_slots} spare slots on each of {config.num_ranks} ranks included"
        for name, given, limit in (
            ("top_k", top_k, self.top_k),
            ("ranks", config.num_ranks, self.ranks),
            (f"experts per rank, {spare},", config.slots_per_rank, self.experts_per_rank),
            (f"physical experts, {spare},", config.num_physical_experts, self.experts),
        ):
            if not 1 <= given <= limit:
                raise ValueError(f"{given} {name} for a dispatcher that takes 1 to {limit}")


#: Those of DeepEP 2.
limits = DispatchLimits()


def dispatch_arguments(
    balancer: Balancer, topk_ids: Tensor, plan: Plan, *, check_distinct: bool = True
) -> dict[str, Any]:
    """The arguments of ``buffer.dispatch`` that TopoEP decides.

    Args:
        balancer: with a process group.
        topk_ids: int32 or int64 ``[T, K]``, expert ids; -1 and ids out of range select nothing.
        plan: from ``balancer.plan(topk_ids)``.
        check_distinct: whether to look for an expert that a token selects twice, which DeepEP
            cannot deliver. Sorts the ids; on a GPU it stops the device, without waiting for it.

    Returns:
        ``topk_idx``: int64 ``[T, K]``, physical ids, -1 for nothing; ``num_experts``: P.

    Raises:
        ValueError: a token selects an expert twice (on the CPU), ids or a plan that do not fit.
    """
    if check_distinct:
        _check_distinct(topk_ids, balancer.num_experts)
    valid = (topk_ids >= 0) & (topk_ids < balancer.num_experts)
    physical = cast(Tensor, balancer.reroute(topk_ids, plan)).to(torch.int64)
    return {
        "topk_idx": torch.where(valid, physical, -1),
        "num_experts": balancer.num_physical_experts,
    }


def received_counts(plan: Plan) -> Tensor:
    """Tokens that this rank's slots will receive: int32 ``[H + S]``, known before the dispatch.

    The same numbers as ``handle.num_recv_tokens_per_expert_list``, without waiting for them.
    """
    if plan.recv is None:
        raise ValueError("the plan belongs to no rank; use plan.for_rank(rank)")
    return plan.recv.sum(0, dtype=torch.int32)


def _check_distinct(topk_ids: Tensor, num_experts: int) -> None:
    ordered = topk_ids.sort(dim=-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    twice &= ordered[:, 1:] < num_experts
    if topk_ids.device.type != "cpu":
        torch._assert_async(~twice.any(), "a token selects an expert twice")
    elif twice.any():
        token = int(twice.any(-1).nonzero()[0])
        raise ValueError(
            f"token {token} selects {topk_ids[token].tolist()}; DeepEP delivers a token to an "
            "expert once, so the ids of a token must be distinct (-1 for unused places)"
        )
