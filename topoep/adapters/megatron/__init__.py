# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core: expert parallelism balanced with one call on a model that has been built.

    model = build_the_gpt_model()
    topoep.adapters.megatron.enable(model, spare_slots=2)
    model = DistributedDataParallel(config, ddp_config, model)     # and train as before

Routers, parameters, checkpoints and optimizers stay as they are. In each MoE layer the token
dispatcher is replaced by one of the same class that has P experts and gets physical ids
(``routing``), and the experts module learns to compute copies after its own experts (``copies``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from topoep.adapters import deepep
from topoep.adapters.megatron.checks import check_config, check_not_sharded, check_upstream
from topoep.adapters.megatron.copies import (
    BalancedExpertsModule,
    LayerCopies,
    mixed,
)
from topoep.adapters.megatron.routing import BalancedDispatcher, LayerRouting
from topoep.adapters.megatron.tables import Place, Table, register_weight_table, weight_table
from topoep.adapters.options import OnPlan, read_options
from topoep.adapters.shared import shared_balancer
from topoep.balancer import Balancer
from topoep.topology import Topology

__all__ = ["OnPlan", "Place", "Table", "enable", "register_weight_table", "weight_table"]


def enable(
    model: nn.Module | Sequence[nn.Module],
    spare_slots: int = 2,
    *,
    topology: Topology | None = None,
    on_plan: OnPlan | None = None,
    allow_none: bool = False,
    **balancer_options: Any,
) -> int:
    """Balances all MoE layers of a Megatron model. Collective over each expert-parallel group.

    Args:
        model: the model, or the list of its virtual pipeline stages; before or after it is wrapped
            in DistributedDataParallel, but not in FSDP.
        spare_slots: S, copies of other ranks' experts that a rank can hold at a time.
        topology: of the expert-parallel group; found by :meth:`topoep.Topology.from_group` if None.
        on_plan: called with the MoE layer and each plan made for it, but not for recomputations.
        allow_none: for pipeline stages without MoE layers: return 0 instead of raising.
        balancer_options: for :class:`topoep.Balancer`: ``transport``, ``objective``,
            ``replica_policy``, ``slot_buffers``, ``comm_sms``, ``solver``, ``candidates``.

    Returns:
        The number of layers that are balanced now.

    Raises:
        ImportError: megatron-core is missing, of a version that is not supported, or differs from
            what this adapter was written for.
        ValueError: there is no MoE layer, a layer is balanced already, its experts are on one rank,
            it has options that copies do not work with, or exceeds what DeepEP can take; or an
            option is out of range.
        TypeError: an option is not one of these, or of another type.
    """
    given = {"spare_slots": spare_slots, "topology": topology, **balancer_options}
    options = read_options("megatron.enable", given, on_plan, ("allow_none",))
    check_upstream()
    layers = list(_moe_layers(model))
    if not layers and not allow_none:
        raise ValueError(
            "the model has no MoE layer on this rank; pass allow_none=True for pipeline stages "
            "that have none"
        )
    for layer in layers:
        _check_layer(layer)
    for layer in layers:
        balancer = shared_balancer(layer.ep_group, layer.config.num_moe_experts, options)
        _check_same_topology(balancer.topology, layer.token_dispatcher)
        _check_limits(balancer, layer)
        _balance(layer, balancer, on_plan)
    return len(layers)


def _moe_layers(model: nn.Module | Sequence[nn.Module]) -> Iterator[Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for chunk in [model] if isinstance(model, nn.Module) else model:
        yield from (module for module in chunk.modules() if isinstance(module, MoELayer))


def _check_layer(layer: Any) -> None:
    check_config(layer.config)
    if hasattr(layer.experts, "topoep"):
        raise ValueError(f"MoE layer {layer.layer_number} is balanced already")
    if layer.token_dispatcher.ep_size == 1:
        raise ValueError(
            f"MoE layer {layer.layer_number} has all its experts on one rank "
            "(expert_model_parallel_size=1), so there is nothing to balance"
        )
    for kind in weight_table(layer.experts):
        check_not_sharded(kind[0].get())


def _check_same_topology(topology: Topology, dispatcher: Any) -> None:
    """Ranks that hold shards of the same experts must plan alike."""
    if dispatcher.tp_size == 1:
        return
    tables: list[Any] = [None] * dispatcher.tp_size
    dist.all_gather_object(tables, topology.node_of_rank, group=dispatcher.tp_group)
    if any(table != tables[0] for table in tables):
        raise ValueError(
            "the ranks of an expert-tensor-parallel group see different topologies "
            f"({tables}); pass topology= to enable"
        )


def _check_limits(balancer: Balancer, layer: Any) -> None:
    """What DeepEP can take; Megatron hands it the ranks of a tensor-parallel group one by one."""
    config = layer.config
    if (
        config.moe_token_dispatcher_type == "flex"
        and config.moe_flex_dispatcher_backend == "deepep"
    ):
        deepep.limits.check(balancer, config.moe_router_topk * layer.token_dispatcher.tp_size)


def _balance(layer: Any, balancer: Balancer, on_plan: OnPlan | None) -> None:
    routing = LayerRouting(balancer, layer, on_plan)
    copies = LayerCopies(routing, layer.experts, _build_guests(layer, balancer))
    layer.token_dispatcher = _build_dispatcher(layer, balancer)
    layer.token_dispatcher.topoep = routing
    layer.experts.__class__ = mixed(type(layer.experts), BalancedExpertsModule)
    layer.experts.topoep = copies


def _build_dispatcher(layer: Any, balancer: Balancer) -> Any:
    """A dispatcher of the layer's own class for P experts."""
    old = layer.token_dispatcher
    config = copy.copy(layer.config)
    config.num_moe_experts = balancer.num_physical_experts
    slots = balancer.config.slots_per_rank
    first = balancer.held_ranks[0] * slots
    dispatcher = mixed(type(old), BalancedDispatcher)(
        slots, list(range(first, first + slots)), config=config, pg_collection=_groups(layer)
    )
    if old.shared_experts is not None:
        dispatcher.set_shared_experts(old.shared_experts)
    return dispatcher


def _build_guests(layer: Any, balancer: Balancer) -> Any | None:
    """An experts module of the layer's own class for S experts, without parameters of its own."""
    if balancer.spare_slots == 0:
        return None
    config = copy.copy(layer.config)
    config.perform_initialization = False
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.device("meta"):
        guests = layer.submodules.experts(
            balancer.spare_slots, config, pg_collection=_groups(layer)
        )
    return guests


def _groups(layer: Any) -> Any:
    """The process groups that the layer was built with."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    initialized = parallel_state.model_parallel_is_initialized()
    groups = get_default_pg_collection() if initialized else ProcessGroupCollection()
    dispatcher = layer.token_dispatcher
    groups.ep = dispatcher.ep_group
    groups.expt_tp = dispatcher.tp_group
    groups.tp_ep = dispatcher.tp_ep_group
    if hasattr(layer.experts, "dp_group"):
        groups.expt_dp = layer.experts.dp_group
    return groups
