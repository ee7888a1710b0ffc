# SPDX-License-Identifier: Apache-2.0
"""Routing of one layer: Megatron's map over experts in, its map over physical experts out.

The router keeps its own configuration: expert bias and auxiliary losses are computed from the
logical counts before anything here runs. What the dispatcher gets is as wide as P.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from topoep import ops
from topoep.adapters.options import OnPlan
from topoep.balancer import Balancer
from topoep.plan import Plan
from topoep.recompute import in_backward
from topoep.replicas import Lease


@dataclass(eq=False)
class Routed:
    """What a recomputation must find again: the plan, and this rank's part of it."""

    plan: Plan
    ids: Tensor  # int64 [T, K]
    send: Tensor  # int32 [P]
    lease: weakref.ref[Lease] | None = None  # of the forward pass


class OpenPlans:
    """Plans of one layer whose backward is still to come.

    Megatron's checkpoints run forward without autograd, so nothing but this keeps their plans. They
    are handed out again in the order in which they were made, as Megatron's schedules run
    microbatches backward in the order of forward; the routed ids decide where several are open.
    """

    def __init__(self) -> None:
        self._kept: list[Routed] = []
        self._alive: list[weakref.ref[Routed]] = []

    def add(self, routed: Routed) -> None:
        """Remembers a plan until its recomputation, or for as long as autograd keeps it."""
        if torch.is_grad_enabled():
            self._alive = [ref for ref in self._alive if _is_open(ref())]
            self._alive.append(weakref.ref(routed))
        elif _in_megatron_checkpoint():
            self._kept.append(routed)

    def recall(self, ids: Tensor) -> Routed:
        """The plan of the forward pass that this recomputation repeats.

        Raises:
            RuntimeError: there is none for these ids, or several different ones.
        """
        if len(self._kept) == 1:
            # Nothing to choose from, and so nothing that the host would have to wait for.
            routed = self._kept.pop()
            same = (routed.ids == ids).all() if routed.ids.shape == ids.shape else ids.new_zeros(())
            torch._assert_async(same, _ROUTED_DIFFERENTLY)
            return routed
        for i, routed in enumerate(self._kept):
            if _same(routed.ids, ids):
                return self._kept.pop(i)
        return _only(r for ref in self._alive if (r := ref()) is not None and _same(r.ids, ids))


class LayerRouting:
    """Plans and rewrites the routing of one MoE layer.

    Args:
        balancer: shared by the layers of the model.
        layer: Megatron's MoELayer, handed to ``on_plan``.
        on_plan: called with the layer and each plan made for it, but not for recomputations.
    """

    def __init__(self, balancer: Balancer, layer: Any, on_plan: OnPlan | None) -> None:
        self.balancer = balancer
        self._layer = weakref.ref(layer)
        self._on_plan = on_plan
        self._top_k: int = layer.config.moe_router_topk
        dispatcher = layer.token_dispatcher
        self._tp_size: int = dispatcher.tp_size
        self._tp_rank: int = dispatcher.tp_rank
        self._tp_ep_group = dispatcher.tp_ep_group
        self._open = OpenPlans()
        #: Of the forward pass that is under way, from the dispatcher to the experts.
        self.current: Routed | None = None

    def to_physical(self, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Plans, and moves each routed pair from its expert to the physical expert.

        Args:
            routing_map: bool ``[T, E]``, at most top_k per row.
            probs: ``[T, E]``, any floating dtype.

        Returns:
            Both as ``[T, P]``. Gradients of the new probabilities flow to the old ones.
        """
        config = self.balancer.config
        # Columns of the map in any order: within a row the order does not matter to reroute.
        used, expert = routing_map.to(torch.int8).topk(self._top_k, dim=1)
        chosen = used.bool()
        ids = torch.where(chosen, expert, -1)
        if in_backward():
            routed = self._open.recall(ids)
        else:
            routed = self._plan(ids)
            self._open.add(routed)
        self.current = routed
        plan = routed.plan
        physical = ops.reroute(
            ids, routed.send, plan.copy_offsets, plan.copy_slots, config.num_ranks
        )
        # Unused pairs (dropped tokens) write False, to the home of an unused expert of their row.
        physical = torch.where(chosen, physical, _home_slot(expert, plan))
        shape = len(ids), config.num_physical_experts
        physical_map = routing_map.new_zeros(shape).scatter_(1, physical, chosen)
        physical_probs = probs.new_zeros(shape).scatter(1, physical, probs.gather(1, expert))
        return physical_map, physical_probs

    def _plan(self, ids: Tensor) -> Routed:
        """Exchanges the counts and solves. Collective, one all-gather."""
        bal = self.balancer
        counts, _ = ops.histogram(ids, bal.num_experts)
        if self._tp_size == 1:
            plan = bal.plan_from_counts(bal.transport.exchange([counts]))
            assert plan.send is not None
            send = plan.send
        else:
            # The ranks of an expert-tensor-parallel group compute the same rows, each with its
            # shard of every expert, so they are one rank to the planner.
            by_rank = self._gather(counts).view(-1, self._tp_size, bal.num_experts)
            plan = bal.plan_from_counts(by_rank.sum(1, dtype=torch.int32))
            send = split_send(plan, by_rank[bal.held_ranks[0]], self._tp_rank)
        layer = self._layer()
        if self._on_plan is not None and layer is not None:
            self._on_plan(layer, plan)
        return Routed(plan, ids, send)

    def _gather(self, counts: Tensor) -> Tensor:
        gathered = counts.new_empty(self.balancer.config.num_ranks * self._tp_size * len(counts))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, counts, group=self._tp_ep_group)
        return gathered


class BalancedDispatcher:
    """Mixed into the class of a layer's token dispatcher, which has been built for P experts."""

    topoep: LayerRouting

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """As upstream, with a plan made first."""
        physical_map, physical_probs = self.topoep.to_physical(routing_map, probs)
        return super().dispatch_preprocess(  # type: ignore[misc]
            hidden_states, physical_map, physical_probs
        )


def split_send(plan: Plan, counts: Tensor, part: int) -> Tensor:
    """One part of a rank's row of the plan, when several sources share the rank.

    The sources fill the quotas one after the other, as tokens of one source would.

    Args:
        plan: for a rank whose tokens are those of all parts.
        counts: int32 ``[parts, E]``, tokens of each part.
        part: which one.

    Returns:
        int32 ``[P]``: tokens that the part sends to each physical expert.
    """
    assert plan.send is not None
    first = counts[:part].sum(0)
    last = first + counts[part]
    experts = torch.arange(len(first), device=counts.device)
    home = _home_slot(experts, plan)
    offsets = plan.copy_offsets.long()
    used = torch.arange(len(plan.copy_slots), device=counts.device) < offsets[-1]
    slot = torch.where(used, plan.copy_slots, 0).long()
    tokens = torch.where(used, plan.send[slot], 0).long()
    # The expert of each copy, and the tokens of its expert that are served before it: at home, and
    # by earlier copies.
    expert = torch.searchsorted(offsets, torch.arange(len(slot), device=offsets.device), right=True)
    expert = (expert - 1).clamp(max=len(first) - 1)
    before = torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
    start = plan.send[home][expert] + before[:-1] - before[offsets[expert]]

    def overlap(start: Tensor, tokens: Tensor, expert: Tensor) -> Tensor:
        end = torch.minimum(start + tokens, last[expert])
        return (end - torch.maximum(start, first[expert])).clamp(min=0).to(torch.int32)

    send = torch.zeros_like(plan.send)
    send[home] = overlap(torch.zeros_like(experts), plan.send[home].long(), experts)
    return send.index_add(0, slot, torch.where(used, overlap(start, tokens, expert), 0))


def _home_slot(expert: Tensor, plan: Plan) -> Tensor:
    """The physical id of each expert's home."""
    home = plan.config.experts_per_rank
    return expert + expert.div(home, rounding_mode="floor") * plan.config.spare_slots


def _in_megatron_checkpoint() -> bool:
    from megatron.core.tensor_parallel.random import is_checkpointing

    return bool(is_checkpointing())


def _is_open(routed: Routed | None) -> bool:
    return routed is not None and not routed.plan.usage.backward_done


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _only(matches: Iterable[Routed]) -> Routed:
    found = [routed for routed in matches if _is_open(routed)]
    if not found:
        raise RuntimeError(_ROUTED_DIFFERENTLY)
    if any(not torch.equal(other.plan.counts, found[0].plan.counts) for other in found[1:]):
        raise RuntimeError(
            f"{len(found)} different plans in flight were made for the same routed ids, so this "
            "recomputation cannot tell which is its own; use Megatron's recompute options"
        )
    return found[0]


_ROUTED_DIFFERENTLY = (
    "a recomputation routes tokens as no forward pass in flight of this layer did. Routing must "
    "repeat exactly; recompute with Megatron's options (recompute_granularity), or with "
    "torch.utils.checkpoint and use_reentrant=False"
)
