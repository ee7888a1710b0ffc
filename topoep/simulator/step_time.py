# SPDX-License-Identifier: Apache-2.0
"""Predicted time of what surrounds the experts, and of a whole training step."""

from __future__ import annotations

from topoep.simulator.cluster import Cluster
from topoep.simulator.model import MoEModel
from topoep.simulator.setting import Setting

_ATTENTION_EFFICIENCY = 0.45  # of the peak, causal flash attention
_ELEMENTWISE_PASSES = 20  # over a token's hidden vector: norms, residuals, rotations
_BACKWARD = 2.1  # over forward


def attention_times(
    cluster: Cluster, model: MoEModel, setting: Setting, tokens: float
) -> tuple[float, float]:
    """Seconds forward and backward of a layer without its experts, on one rank.

    Projections, causal attention, the shared experts, the router and element-wise work; and the
    fixed time of a layer.
    """
    return _layer(cluster, model, setting, tokens, model.shared_intermediate, model.experts)


def dense_layer_time(cluster: Cluster, model: MoEModel, setting: Setting, tokens: float) -> float:
    """Seconds of a layer with a dense feed-forward network, forward and backward."""
    forward, backward = _layer(cluster, model, setting, tokens, model.dense_intermediate, 0)
    again = forward if setting.recompute == "full" else 0.0
    return forward + backward + again


def _layer(
    cluster: Cluster, model: MoEModel, setting: Setting, tokens: float, width: int, router: int
) -> tuple[float, float]:
    kind = cluster.hardware
    dense = model.attention_weights + 3 * model.hidden * width + model.hidden * router
    per_token = 2 * dense / (kind.efficiency * kind.flops)
    # A token looks at half of the sequence on average: 2 FLOP per weight and position.
    context = setting.sequence * model.attention_width
    per_token += context / (_ATTENTION_EFFICIENCY * kind.flops)
    per_token += _ELEMENTWISE_PASSES * 2 * model.hidden / kind.memory_bandwidth
    return (
        tokens * per_token + 1e-6 * setting.fixed_forward_us,
        _BACKWARD * tokens * per_token + 1e-6 * setting.fixed_backward_us,
    )


def step_time(
    cluster: Cluster, model: MoEModel, setting: Setting, tokens: float, moe_layer: float
) -> float:
    """Seconds of one optimizer step.

    Args:
        cluster: the machines.
        model: the model.
        setting: microbatches, pipeline stages and the rest.
        tokens: of a rank and microbatch.
        moe_layer: seconds of the average MoE layer's experts and exchanges, forward and backward.
    """
    kind = cluster.hardware
    forward, backward = attention_times(cluster, model, setting, tokens)
    again = forward if setting.recompute == "full" else 0.0
    layers = model.moe_layers * (moe_layer + forward + backward + again)
    layers += model.dense_layers * dense_layer_time(cluster, model, setting, tokens)
    head = 6 * tokens * model.hidden * model.vocabulary / (kind.efficiency * kind.flops)
    stage = (layers + head) / setting.pipeline
    bubble = (setting.pipeline - 1) / setting.microbatches
    return setting.microbatches * stage * (1 + bubble) / (1 - setting.outside_share)
