# SPDX-License-Identifier: Apache-2.0
"""torchtitan: ``--override.imports topoep.adapters.torchtitan.balance``.

torchtitan imports this module when the override is named, and applies it to the configuration
before the model is built; that is why, unlike the other adapters, it imports its framework itself.

The override replaces the routed experts of every MoE layer, the node above the token dispatcher and
the grouped experts, because the plan that the dispatcher's ids come from has to reach the weights.
Both stay those of the configuration: the dispatcher, whichever it is, gets physical ids and their
number, and the grouped experts, of any class, run on the home weights and again on the copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from topoep.adapters.options import BalancerOptions, OnPlan, read_options
from topoep.adapters.shared import BalancedLayer, local_weight, run_grouped
from topoep.adapters.upstream import check_parameters, check_version
from topoep.balancer import Balancer
from topoep.plan import Plan
from topoep.transports.base import Weights

check_version("torchtitan", "0.3", "0.4")

from torchtitan.config import derive, override  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher  # noqa: E402


class BalancedRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """Routed experts whose hot ones are copied for each microbatch; one per MoE layer.

    Without expert parallelism it is what it replaces.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """That of the routed experts, and the balancer's options."""

        options: BalancerOptions = field(default_factory=BalancerOptions)
        on_plan: OnPlan | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options = config.options
        self.on_plan = config.on_plan
        self.layer: BalancedLayer | None = None
        self.step: tuple[Plan, Weights] | None = None  # while forward runs
        experts = self.inner_experts
        experts.forward = functools.partial(self._run_experts, experts.forward)

    @property
    def balancer(self) -> Balancer | None:
        """Shared by the layers of the expert-parallel group; None without one."""
        return None if self.layer is None else self.layer.balancer

    def parallelize(self, parallel_dims: Any) -> None:
        """Makes the balancer for the expert-parallel mesh, then does what torchtitan does."""
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        if ep_mesh is not None:
            self.layer = BalancedLayer(
                ep_mesh.get_group(),
                self.token_dispatcher.num_experts,
                self.options,
                self,
                self.on_plan,
            )
            # Before the dispatcher is wired to the mesh and allocates its buffers.
            self.token_dispatcher.num_experts = self.layer.balancer.num_physical_experts
        super().parallelize(parallel_dims)

    def forward(
        self,
        x_BLD: Tensor,  # noqa: N803
        topk_scores_BLK: Tensor,  # noqa: N803
        topk_expert_ids_BLK: Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: Tensor,  # noqa: N803
    ) -> Tensor:
        """Dispatches, computes and combines by physical ids; shapes as the names say."""
        layer = self.layer
        counts = num_local_tokens_per_expert_E
        if layer is None:
            out: Tensor = super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, counts)
            return out
        ids = topk_expert_ids_BLK.flatten(0, 1)
        plan = layer.plan(ids)
        physical = layer.reroute(ids, plan).view_as(topk_expert_ids_BLK)
        # Before the dispatch, so that in backward the copies' gradients come after its collective.
        homes = tuple(
            local_weight(weight) for weight in self.inner_experts.parameters(recurse=False)
        )
        self.step = plan, layer.replicate(homes, plan)
        try:
            assert plan.send is not None
            out = super().forward(x_BLD, topk_scores_BLK, physical, plan.send.to(counts.dtype))
        finally:
            self.step = None
        return layer.mark(out, plan)

    def _run_experts(
        self, run: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor
    ) -> Tensor:
        """The grouped experts on rows ``[M, D]`` in slot order, ``counts`` of each slot."""
        if self.layer is None or self.step is None:
            return run(rows, counts)
        plan, copies = self.step
        y = run_grouped(run, rows, counts, self.inner_experts, copies, plan)
        return self.layer.release(y, plan)


@override(target=RoutedExperts.Config, exact=True, description="TopoEP: hot experts are copied")
def balance(
    config: RoutedExperts.Config, *, on_plan: OnPlan | None = None, **options: Any
) -> RoutedExperts.Config:
    """Balances every MoE layer; named in ``override.imports``.

    Args:
        config: of the routed experts, given by torchtitan.
        on_plan: called with a layer's module and each plan made for it, for example to log
            ``plan.stats()``; not for the recomputations of activation checkpointing.
        **options: those of :class:`topoep.Balancer`. On the command line, as JSON after the name:
            ``'topoep.adapters.torchtitan.balance={"spare_slots": 4}'``; the JSON forms of objects
            are in ``topoep/adapters/options.py``.

    Raises:
        ImportError: torchtitan has changed.
        TypeError: an option is not one of the Balancer's, or of another type.
        ValueError: an option is out of range.
    """
    balancer_options = read_options("torchtitan.balance", options, on_plan)
    routed = ("topk_scores", "topk_expert_ids")
    check_parameters(
        RoutedExperts.forward,
        "x_BLD",
        *(f"{name}_BLK" for name in routed),
        "num_local_tokens_per_expert_E",
    )
    check_parameters(
        LocalTokenDispatcher.dispatch,
        "x_TD",
        *(f"{name}_TK" for name in routed),
        "num_local_tokens_per_expert_E",
    )
    check_parameters(LocalTokenDispatcher.wire_meshes, "ep_mesh")
    check_parameters(GroupedExperts.forward, "x_RD", "num_tokens_per_expert_E")
    return derive(
        config,
        BalancedRoutedExperts.Config,
        options=balancer_options,
        on_plan=on_plan,
    )


def layers(model: nn.Module) -> list[BalancedRoutedExperts]:
    """The balanced routed experts of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, BalancedRoutedExperts)]
