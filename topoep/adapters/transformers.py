# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: ``DistributedConfig(ep_implementation="topoep")``.

transformers lets an expert-parallel implementation decide how the experts of a model get their
tokens. This one plans, lets transformers' own all-to-all dispatch by physical ids, and runs the
experts' own forward twice: on the home experts, and on the copies if any row came for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topoep.adapters.options import BalancerOptions, OnPlan, read_options
from topoep.adapters.shared import BalancedLayer, parameters_replaced, rows_for_copies
from topoep.adapters.upstream import check_parameters, check_version
from topoep.balancer import Balancer
from topoep.checks import check_type
from topoep.plan import Plan


def register(name: str = "topoep", *, on_plan: OnPlan | None = None, **options: Any) -> None:
    """Makes ``DistributedConfig(ep_implementation=name)`` available.

    Works for every model whose experts transformers can distribute (those with an
    ``"ep_dispatch_experts"`` rule in their plan), with tensor parallelism and FSDP. Registering a
    name again replaces it for models that are built afterwards.

    Args:
        name: for ``ep_implementation``.
        on_plan: called with an experts module and each plan made for it, for example to log
            ``plan.stats()``; not for the recomputations of activation checkpointing.
        **options: those of :class:`topoep.Balancer`; the topology is that of the group if not
            given. Layers with the same group and number of experts share a balancer.

    Raises:
        ImportError: transformers is missing, of a version that is not supported, or changed.
        TypeError: an option is not one of the Balancer's, or of another type.
        ValueError: an option is out of range.
    """
    check_type(name, str, "name")
    balancer_options = read_options("transformers.register", options, on_plan, ("name",))
    check_version("transformers", "5.24", "6")
    from transformers.distributed.expert_parallel import (
        AllToAllEP,
        EPImplementation,
        EPImplementationInterface,
    )

    routed = ("hidden_states", "top_k_index", "top_k_weights")
    check_parameters(EPImplementation.__init__, "experts", "ep_mesh", "tp_mesh")
    check_parameters(AllToAllEP.__call__, *routed)
    check_parameters(AllToAllEP._dispatch_tokens, *routed)
    check_parameters(AllToAllEP._combine_tokens, "expert_output", "state")
    EPImplementationInterface.register(
        name, functools.partial(BalancedEP, balancer_options, on_plan)
    )


def layers(model: nn.Module) -> list[BalancedEP]:
    """What balances each MoE layer of a model, in the order of its modules."""
    found = (getattr(module, "topoep", None) for module in model.modules())
    return [layer for layer in found if isinstance(layer, BalancedEP)]


class BalancedEP:
    """Brings one experts module its tokens; transformers builds it and calls it.

    Args:
        options: for the balancer.
        on_plan: see :func:`register`.
        experts: the module, whose parameters hold this rank's experts in dimension 0.
        ep_mesh: the expert-parallel ranks.
        tp_mesh: the ranks that hold the same batch.

    Raises:
        ValueError: a parameter of the module does not have an entry per expert.
    """

    def __init__(
        self,
        options: BalancerOptions,
        on_plan: OnPlan | None,
        experts: Any,
        ep_mesh: Any,
        tp_mesh: Any,
    ) -> None:
        from transformers.distributed.expert_parallel import AllToAllEP

        self.exchange = AllToAllEP(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.tp_mesh = tp_mesh
        home = experts.num_experts
        for name, parameter in experts.named_parameters(recurse=False):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if local.dim() < 1 or local.shape[0] != home:
                raise ValueError(
                    f"{type(experts).__name__}.{name} has the local shape {tuple(local.shape)}; "
                    f"expected {home} experts in dimension 0, as its expert-parallel plan shards it"
                )
        self.layer = BalancedLayer(
            ep_mesh.get_group(), home * ep_mesh.size(), options, experts, on_plan
        )
        self.exchange.num_local_experts = self.layer.slots
        experts.topoep = self

    @property
    def balancer(self) -> Balancer:
        """Shared by the layers of the group."""
        return self.layer.balancer

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Applies the experts.

        Args:
            hidden_states: ``[T, D]``, the batch this rank holds.
            top_k_index: int64 ``[T, K]``, expert ids.
            top_k_weights: ``[T, K]``.

        Returns:
            ``[T, D]``.
        """
        begin, end = self._own_rows(len(top_k_index))
        ids = top_k_index[begin:end]
        plan = self.layer.plan(ids)
        # The dispatcher takes this rank's rows out of what it gets; the others may be anything.
        own = self.layer.reroute(ids, plan)
        physical = F.pad(own, (0, 0, begin, len(top_k_index) - end))
        # Before the dispatch, so that in backward the copies' gradients come after its collective
        # on every rank, whether copies were used there or not.
        names, homes = zip(*self.experts.named_parameters(recurse=False), strict=True)
        copies = self.layer.replicate(homes, plan)
        arrived = self.exchange._dispatch_tokens(hidden_states, physical, top_k_weights)
        tokens, slots, weights, state = arrived
        y = self._run_experts(tokens, slots, weights, dict(zip(names, copies, strict=True)), plan)
        y = self.layer.release(y, plan)
        return self.layer.mark(self.exchange._combine_tokens(y, state), plan)

    def _own_rows(self, tokens: int) -> tuple[int, int]:
        """The rows of the shared batch that this rank dispatches: DTensor's Shard(0) of them."""
        size = -(-tokens // self.tp_mesh.size())
        begin = min(self.tp_mesh.get_local_rank() * size, tokens)
        return begin, min(begin + size, tokens)

    def _run_experts(
        self, tokens: Tensor, slots: Tensor, weights: Tensor, copies: dict[str, Tensor], plan: Plan
    ) -> Tensor:
        """The experts on the rows that arrived: ``[M, D]``, and their local slots ``[M, 1]``."""
        home = self.layer.home_slots
        run: Callable[[Tensor, Tensor, Tensor], Tensor] = self.exchange.experts_forward
        for_copies = rows_for_copies(plan)
        if len(tokens) == 0:
            # One row of zeros, so that FSDP and the way back find the parameters in the graph.
            row = tokens.sum(0, keepdim=True)
            return run(row, slots.new_zeros(1, 1), weights.new_ones(1, 1))[:0]
        if for_copies == 0:
            return run(tokens, slots, weights)
        # Home rows first. Not by transformers' id for "not on this rank": not every model knows it.
        order = torch.argsort((slots >= home).flatten().to(torch.uint8), stable=True)
        tokens, slots = tokens[order], slots[order]
        split = len(tokens) - for_copies
        parts = [run(tokens[:split], slots[:split], weights[:split])] if split else []
        with parameters_replaced(self.experts, copies):
            self.experts.num_experts = self.layer.slots - home
            try:
                parts.append(run(tokens[split:], slots[split:] - home, weights[split:]))
            finally:
                self.experts.num_experts = home
        y = torch.cat(parts)
        return torch.empty_like(y).index_copy(0, order, y)
