# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed AutoEP: ``enable(engine.module)`` after ``deepspeed.initialize``.

AutoEP's layer splits tokens by what its router returns and by its numbers of experts, so for the
time of a forward pass it is shown physical ids and physical numbers. Outside of it, where DeepSpeed
writes checkpoints and updates the expert bias, everything stays logical.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from topoep.adapters.options import BalancerOptions, OnPlan, read_options
from topoep.adapters.shared import BalancedLayer, run_grouped
from topoep.adapters.upstream import check_parameters, check_version
from topoep.balancer import Balancer
from topoep.plan import Plan
from topoep.transports.base import Weights


def enable(model: nn.Module, *, on_plan: OnPlan | None = None, **options: Any) -> int:
    """Balances every AutoEP layer of a model. Collective over each expert-parallel group.

    Args:
        model: after DeepSpeed has replaced its MoE layers and bound their groups.
        on_plan: called with each AutoEP layer and each plan made for it, but not for
            recomputations.
        **options: those of :class:`topoep.Balancer`.

    Returns:
        How many layers are balanced.

    Raises:
        ImportError: deepspeed is missing, of a version that is not supported, or changed.
        ValueError: the model has no AutoEP layer with more than one rank, one is balanced already,
            or uses DeepEP, tensor-parallel folding or ZeRO-3, which this adapter does not cover; or
            an option is out of range.
        TypeError: an option is not one of the Balancer's, or of another type.
    """
    balancer_options = read_options("deepspeed.enable", options, on_plan)
    check_version("deepspeed", "0.19.8", "0.20")
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.moe.ep_experts import GroupedExperts
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter

    check_parameters(AutoEPMoELayer.forward, "hidden_states")
    check_parameters(TokenChoiceTopKRouter.forward, "x", "expert_bias")
    check_parameters(GroupedExperts.forward, "x", "num_tokens_per_expert")
    found = {name: m for name, m in model.named_modules() if isinstance(m, AutoEPMoELayer)}
    chosen = {name: layer for name, layer in found.items() if layer.ep_size > 1}
    if not chosen:
        raise ValueError(f"{len(found)} AutoEP layers in the model, none with more than one rank")
    for name, layer in chosen.items():
        _check_layer(name, layer)
    for layer in chosen.values():
        layer.topoep = _BalancedAutoEP(layer, balancer_options, on_plan)
    return len(chosen)


def balancers(model: nn.Module) -> list[Balancer]:
    """The balancer of each balanced layer, in the order of the model's modules."""
    found = (getattr(module, "topoep", None) for module in model.modules())
    return [hook.layer.balancer for hook in found if isinstance(hook, _BalancedAutoEP)]


def _check_layer(name: str, layer: Any) -> None:
    folded = layer.folding_group_handles is not None
    problems = {
        "is balanced already": hasattr(layer, "topoep"),
        "has no group yet: call deepspeed.initialize first": layer.ep_group is None,
        f"uses comm_backend={layer.comm_backend!r}; expected 'comm'": layer.comm_backend != "comm",
        "is folded with tensor parallelism": folded
        and layer.folding_group_handles.spec.tp_size > 1,
        "is partitioned by ZeRO-3": any(hasattr(p, "ds_shape") for p in layer.experts.parameters()),
    }
    for problem, there in problems.items():
        if there:
            raise ValueError(f"the AutoEP layer {name} {problem}")


class _BalancedAutoEP:
    """The hooks of one layer."""

    def __init__(self, module: Any, options: BalancerOptions, on_plan: OnPlan | None) -> None:
        self.module = module
        self.layer = BalancedLayer(module.ep_group, module.num_experts, options, module, on_plan)
        self.run_layer: Callable[..., Any] = module.forward
        self.run_router: Callable[..., Any] = module.router.forward
        self.run_experts: Callable[..., Any] = module.experts.forward
        self.step: tuple[Plan, Weights, Tensor] | None = None  # while forward runs
        module.forward, module.router.forward = self.forward, self.route
        module.experts.forward = self.compute

    def forward(self, hidden_states: Tensor) -> Any:
        """The layer with physical numbers of experts."""
        module, used = self.module, self.module.tokens_per_expert
        logical = module.num_experts, module.num_local_experts
        physical = self.layer.balancer.num_physical_experts
        module.num_experts, module.num_local_experts = physical, self.layer.slots
        module.tokens_per_expert = used.new_zeros(physical)
        try:
            output = self.run_layer(hidden_states)
            assert self.step is not None
            plan, _, counts = self.step
        finally:
            module.num_experts, module.num_local_experts = logical
            module.tokens_per_expert, self.step = used, None
        used.add_(counts)
        y = output[0] if isinstance(output, tuple) else output
        self.layer.mark(y, plan)
        return output

    def route(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The router with physical ids, and tokens per physical expert."""
        scores, ids, counts = self.run_router(x, expert_bias)
        plan = self.layer.plan(ids)
        homes = tuple(self.module.experts.parameters(recurse=False))
        self.step = plan, self.layer.replicate(homes, plan), counts
        assert plan.send is not None
        return scores, self.layer.reroute(ids, plan), plan.send.to(counts.dtype)

    def compute(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """The experts on rows in slot order."""
        assert self.step is not None
        plan, copies, _ = self.step
        experts = self.module.experts
        y = run_grouped(self.run_experts, x, num_tokens_per_expert, experts, copies, plan)
        return self.layer.release(y, plan)
