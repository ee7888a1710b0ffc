# SPDX-License-Identifier: Apache-2.0
"""Constants of the predicted layer time, from the shape of the model and the hardware.

docs/cost-model.md derives the formulas and names the source of every number. All results are
predictions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from topoep.checks import check_int
from topoep.expert_costs import ExpertCosts
from topoep.hardware import Hardware, find_hardware

MAX_COST = 2**29  # kMaxCost in csrc/core/limits.h
# A dispatcher that sends a token once per node: a routed pair less across nodes saves this much of
# a row (docs/cost-model.md).
DEDUP_ROW_SHARE = 0.25


@dataclass(frozen=True)
class CostModel:
    """What the parts of a layer cost, in integer nanoseconds (csrc/core/cost_model.h).

    Args:
        token: compute of one routed token, forward and backward.
        instance: one expert instance more on a rank, forward and backward.
        copy: weights of one expert over one rank's in-node link.
        cross_copy: weights of one expert over the network, on one NIC.
        grad: gradients of one expert over one rank's in-node link.
        cross_grad: gradients of one expert over the network, on one NIC.
        network_row: one routed token over one NIC, one of the four exchanges.
        hide_forward: transfer time hidden per token that home experts compute, forward.
        hide_backward: the same in backward.
        hide_grads: transfer time of gradients that other work of backward hides.
        interference: slow-down of that other work, in parts per thousand of what it hides.
        sharded: whether network copies are cut over a node's NICs.

    Raises:
        TypeError: a field is no int.
        ValueError: a field is negative or above ``MAX_COST``.
    """

    token: int
    instance: int
    copy: int
    cross_copy: int
    grad: int
    cross_grad: int
    network_row: int
    hide_forward: int = 0
    hide_backward: int = 0
    hide_grads: int = 0
    interference: int = 100
    sharded: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name == "sharded":
                continue
            value = check_int(getattr(self, field.name), f"CostModel.{field.name}")
            if not 0 <= value <= MAX_COST:
                raise ValueError(
                    f"CostModel.{field.name}={value}; expected 0 to {MAX_COST} ns (kMaxCost)"
                )

    @classmethod
    def from_model(
        cls,
        hidden: int,
        intermediate: int,
        dtype: str = "bfloat16",
        hardware: str | Hardware = "H100",
        *,
        sharded: bool = True,
        dedup: bool = True,
        overlap: float = 0.8,
        hide_grads_us: float = 500.0,
    ) -> CostModel:
        """The constants for SwiGLU experts of this shape on this hardware.

        Args:
            hidden: D.
            intermediate: I.
            dtype: of the expert weights: bfloat16, float16, float32 or float8.
            hardware: a preset's name, or a :class:`Hardware`.
            sharded: network copies are cut over a node's NICs; otherwise one NIC carries each.
            dedup: the dispatcher sends a token once per node, so that a routed pair less across
                nodes often saves nothing (about a quarter of a row on average).
            overlap: share of the compute of home experts and of dispatch that can hide transfers.
            hide_grads_us: what else in backward hides the gradients' way home.

        Raises:
            ValueError: an unknown preset or dtype, or a size that is not positive.
        """
        kind = find_hardware(hardware)
        costs = ExpertCosts.of(hidden, intermediate, dtype, kind, sharded)
        row_share = DEDUP_ROW_SHARE if dedup else 1.0

        def ns(seconds: float) -> int:
            return max(1, round(seconds * 1e9))

        return cls(
            token=ns(costs.row_forward + costs.row_backward),
            instance=ns(costs.group_forward + costs.group_backward),
            copy=ns(costs.copy),
            cross_copy=ns(costs.cross_copy),
            grad=ns(costs.grad),
            cross_grad=ns(costs.cross_grad),
            network_row=ns(
                row_share
                * 2
                * hidden
                * kind.ranks_per_node
                / (kind.nics_per_node * kind.nic_bandwidth)
            ),
            hide_forward=ns(overlap * costs.row_forward),
            hide_backward=ns(overlap * costs.row_backward),
            hide_grads=ns(hide_grads_us * 1e-6),
            sharded=sharded,
        )

    @classmethod
    def measured(
        cls,
        *,
        token_us: float,
        copy_us: float,
        cross_copy_us: float,
        network_row_us: float,
        instance_us: float = 0.0,
        grad_us: float | None = None,
        cross_grad_us: float | None = None,
        forward_share: float = 1 / 3,
        overlap: float = 0.8,
        hide_grads_us: float = 0.0,
        sharded: bool = True,
    ) -> CostModel:
        """The constants from times that were measured on the cluster, in microseconds.

        Args:
            token_us: time per routed token of the expert computation, forward and backward.
            copy_us: one expert's weights from a rank of the same node.
            cross_copy_us: one expert's weights from another node.
            network_row_us: one token's row across nodes, on its NIC.
            instance_us: one expert instance more, with no more tokens.
            grad_us: one expert's gradients inside a node; twice ``copy_us`` if None.
            cross_grad_us: the same across nodes; twice ``cross_copy_us`` if None.
            forward_share: share of ``token_us`` that is forward.
            overlap: share of the home experts' compute that can hide transfers.
            hide_grads_us: what else in backward hides the gradients' way home.
            sharded: whether ``cross_copy_us`` was measured with the copy cut over all NICs.
        """

        def ns(us: float) -> int:
            return round(us * 1e3)

        return cls(
            token=ns(token_us),
            instance=ns(instance_us),
            copy=ns(copy_us),
            cross_copy=ns(cross_copy_us),
            grad=ns(2 * copy_us if grad_us is None else grad_us),
            cross_grad=ns(2 * cross_copy_us if cross_grad_us is None else cross_grad_us),
            network_row=ns(network_row_us),
            hide_forward=ns(overlap * forward_share * token_us),
            hide_backward=ns(overlap * (1 - forward_share) * token_us),
            hide_grads=ns(hide_grads_us),
            sharded=sharded,
        )

    def to_ints(self) -> list[int]:
        """The fields in the order of the solve op."""
        return [int(getattr(self, field.name)) for field in dataclasses.fields(self)]
