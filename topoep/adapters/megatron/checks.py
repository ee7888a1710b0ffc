# SPDX-License-Identifier: Apache-2.0
"""What is checked about Megatron and about a layer before anything is changed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from topoep.adapters.upstream import check_parameters, check_version

MINIMUM, BELOW = "0.19", "0.20"

_DISPATCHER_CALL = ("hidden_states", "routing_map", "probs")
_DISPATCHER_INIT = ("num_local_experts", "local_expert_indices", "config", "pg_collection")


def check_upstream() -> None:
    """Raises ImportError unless Megatron is of a supported version and looks as expected."""
    check_version("megatron-core", MINIMUM, BELOW)
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.tensor_parallel.random import is_checkpointing
    from megatron.core.transformer.moe import experts, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for name in ("AllGather", "AlltoAll", "Flex"):
        dispatcher = getattr(token_dispatcher, f"MoE{name}TokenDispatcher")
        check_parameters(dispatcher.__init__, *_DISPATCHER_INIT)
        check_parameters(dispatcher.dispatch_preprocess, *_DISPATCHER_CALL)
    check_parameters(MoELayer.preprocess, "hidden_states", "probs", "routing_map")
    check_parameters(MoELayer.routed_experts_compute, "hidden_states", "probs")
    rows = ("permuted_local_hidden_states", "tokens_per_expert", "permuted_probs")
    check_parameters(experts.SequentialMLP.forward, *rows)
    check_parameters(experts.TEGroupedMLP.forward, *rows, "output_buffer", "grad_input_buffer")
    for cls in (experts.SequentialMLP, experts.TEGroupedMLP):
        check_parameters(cls.backward_dw)
    # Whose hook waits for parameters that are being gathered is found by this name.
    check_parameters(DistributedDataParallel._make_forward_pre_hook)
    check_parameters(DistributedDataParallel._make_backward_post_hook, "param")
    check_parameters(is_checkpointing)


def check_config(config: Any) -> None:
    """Raises ValueError for options that copies do not work with; the message says which."""
    refused = {
        "fp8": bool(config.fp8),
        "fp4": bool(config.fp4),
        "moe_pad_expert_input_to_capacity": config.moe_pad_expert_input_to_capacity,
        "moe_expert_rank_capacity_factor": config.moe_expert_rank_capacity_factor is not None,
        "moe_router_padding_for_quantization": bool(config.moe_router_padding_for_quantization),
        "moe_single_grouped_weight": config.moe_single_grouped_weight,
        "moe_single_grouped_bias": config.moe_single_grouped_bias,
        "moe_paged_stash": config.moe_paged_stash,
        "use_transformer_engine_op_fuser": config.use_transformer_engine_op_fuser,
        "gtp_weight_remat_size": getattr(config, "gtp_weight_remat_size", 1) > 1,
        "cuda_graph_impl": config.cuda_graph_impl != "none" and _captures_experts(config),
        "transformer_impl": config.transformer_impl == "inference_optimized",
        "moe_flex_dispatcher_backend": config.moe_token_dispatcher_type == "flex"
        and config.moe_flex_dispatcher_backend == "ncclep",
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"{name}={getattr(config, name)!r} does not work with copies of experts: "
                f"{_REASONS[name]}"
            )


def check_not_sharded(parameter: Tensor) -> None:
    """Raises ValueError for a parameter of which this rank holds a part only."""
    if hasattr(parameter, "__fsdp_param__"):
        raise ValueError(
            "parameters sharded by Megatron-FSDP cannot be copied; use DistributedDataParallel"
        )


def _captures_experts(config: Any) -> bool:
    """Whether a CUDA graph would capture planning or the experts."""
    modules = config.cuda_graph_modules
    names = {str(getattr(module, "name", module)) for module in modules or ()}
    return not names or bool(names & {"moe", "moe_preprocess", "full"})


_QUANTIZED = "their weights would have to be quantized again after each fetch"
_FIXED = "it fixes the number of tokens per expert or rank in advance"
_GROUPED = "one parameter for all experts cannot be extended by spare slots"
_REASONS = {
    "fp8": _QUANTIZED,
    "fp4": _QUANTIZED,
    "moe_pad_expert_input_to_capacity": _FIXED,
    "moe_expert_rank_capacity_factor": _FIXED,
    "moe_router_padding_for_quantization": _QUANTIZED,
    "moe_single_grouped_weight": _GROUPED,
    "moe_single_grouped_bias": _GROUPED,
    "moe_paged_stash": _FIXED,
    "use_transformer_engine_op_fuser": "the fused operation keeps its own list of parameters",
    "gtp_weight_remat_size": "parameters are gathered inside the linear layers",
    "cuda_graph_impl": "planning and fetching cannot be captured; leave moe and moe_preprocess out "
    "of cuda_graph_modules",
    "transformer_impl": "inference kernels read the weights of home experts from one tensor",
    "moe_flex_dispatcher_backend": "it is not supported; use 'deepep' or 'hybridep'",
}
