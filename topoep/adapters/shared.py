# SPDX-License-Identifier: Apache-2.0
"""What the adapters share: balancers, a layer's calls on them, and experts run on copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from topoep.adapters.options import BalancerOptions, OnPlan
from topoep.balancer import Balancer
from topoep.plan import Plan
from topoep.recompute import in_backward
from topoep.topology import Topology
from topoep.transports.base import Weights

_balancers: weakref.WeakValueDictionary[Any, Balancer] = weakref.WeakValueDictionary()


def shared_balancer(
    group: dist.ProcessGroup, num_experts: int, options: BalancerOptions
) -> Balancer:
    """The balancer of all layers with this group, number of experts and options. Collective.

    Lives as long as a layer uses it.
    """
    # A balancer keeps its group, so the group's id is not given to another one meanwhile.
    key = id(group), num_experts, repr(options)
    balancer = _balancers.get(key)
    # Whether it still lives depends on when a rank's garbage collector has run, and making one is
    # collective: all make a new one unless all have it.
    answers = [(0, "", False)] * dist.get_world_size(group)
    dist.all_gather_object(answers, (*key[1:], balancer is not None), group)
    if balancer is None or any(answer != answers[0] for answer in answers):
        topology = options.topology
        balancer = Balancer(
            Topology.from_group(group) if topology is None else topology,
            num_experts,
            options.spare_slots,
            group=group,
            transport=options.transport,
            objective=options.objective,
            replica_policy=options.replica_policy,
            slot_buffers=options.slot_buffers,
            comm_sms=options.comm_sms,
            solver=options.solver,
            candidates=options.candidates,
        )
        _balancers[key] = balancer
    return balancer


class BalancedLayer:
    """One MoE layer of this rank and the balancer that it shares with others.

    Its methods are those of the balancer for one rank. Weak references to it tell apart the
    recomputations of layers, so there is one object per layer.

    Args:
        group: the expert-parallel group.
        num_experts: E.
        options: for the balancer.
        module: handed to ``on_plan``.
        on_plan: called with each plan made, but not for recomputations.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        options: BalancerOptions,
        module: nn.Module,
        on_plan: OnPlan | None,
    ) -> None:
        self.balancer = shared_balancer(group, num_experts, options)
        self.module = module
        self.on_plan = on_plan

    @property
    def home_slots(self) -> int:
        """H, experts per rank."""
        return self.balancer.config.experts_per_rank

    @property
    def slots(self) -> int:
        """H + S, physical experts per rank."""
        return self.balancer.config.slots_per_rank

    def plan(self, topk_ids: Tensor) -> Plan:
        """See :meth:`topoep.Balancer.plan`."""
        # Selective checkpointing hands saved results out again by their number. A recomputation
        # does not plan, so what planning does, and what a caller logs, must not be counted.
        with _disable_current_modes():
            plan = self.balancer.plan(topk_ids, layer=self)
            _ = plan.host
            if self.on_plan is not None and not in_backward():
                self.on_plan(self.module, plan)
        return plan

    def reroute(self, topk_ids: Tensor, plan: Plan) -> Tensor:
        """See :meth:`topoep.Balancer.reroute`."""
        return cast(Tensor, self.balancer.reroute(topk_ids, plan))

    def replicate(self, weights: Weights, plan: Plan) -> Weights:
        """See :meth:`topoep.Balancer.replicate`."""
        return cast(Weights, self.balancer.replicate(weights, plan))

    def release(self, y: Tensor, plan: Plan) -> Tensor:
        """See :meth:`topoep.Balancer.release`; ``y`` need not depend on the copies."""
        return cast(Tensor, self.balancer.release(y, plan))

    def mark(self, y: Tensor, plan: Plan) -> Tensor:
        """Identity on the layer's output by which a recomputation finds the plan."""
        return self.balancer.history(self).mark(y, plan)


def rows_for_copies(plan: Plan) -> int:
    """Rows that the plan's rank receives for its spare slots; the transport has it on the host."""
    return int(plan.host.recv[:, plan.config.experts_per_rank :].sum())


@contextmanager
def parameters_replaced(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """The module with other tensors in place of its own parameters of these names."""
    kept = {name: module._parameters[name] for name in tensors}
    cast(dict[str, Tensor], module._parameters).update(tensors)
    try:
        yield
    finally:
        module._parameters.update(kept)


def run_grouped(
    run: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    counts: Tensor,
    experts: nn.Module,
    copies: Weights,
    plan: Plan,
) -> Tensor:
    """Grouped experts on the home weights and, if any row came for a copy, on the copies.

    Twice rather than once on one table: that would hold a second copy of all home weights.

    Args:
        run: the experts' own forward, of rows and counts.
        rows: ``[M, D]`` in slot order.
        counts: ``[H + S]``, rows of each slot, as the dispatcher says: it may have padded them.
        experts: the module, whose own parameters ``run`` uses.
        copies: in place of its parameters, in their order.
        plan: for this rank.

    Returns:
        ``[M, D]``.
    """
    home = plan.config.experts_per_rank
    if rows_for_copies(plan) == 0:
        return run(rows, counts[:home])
    split = int(counts[:home].sum())
    parts = [run(rows[:split], counts[:home])] if split else []
    names = [name for name, _ in experts.named_parameters(recurse=False)]
    with parameters_replaced(experts, dict(zip(names, copies, strict=True))):
        parts.append(run(rows[split:], counts[home:]))
    return torch.cat(parts)


def local_weight(weight: Tensor) -> Tensor:
    """This rank's experts, of a parameter that may be a DTensor."""
    local: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return local.contiguous()
