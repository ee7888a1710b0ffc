# SPDX-License-Identifier: Apache-2.0
"""Constants of the predicted layer time, from the shape of the model and the hardware.

docs/cost-model.md derives the formulas and names the source of every number. All results are
predictions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from topoep.checks import check_int, check_number, check_type
from topoep.expert_costs import ExpertCosts
from topoep.hardware import Hardware, find_hardware

MAX_COST = 2**29  # kMaxCost in csrc/core/limits.h
MAX_INTERFERENCE = 1000  # kMaxInterference
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
        cross_copy: weights of one expert over the network, with all NICs of the node at it if
            ``sharded``, else with one.
        grad: gradients of one expert over one rank's in-node link.
        cross_grad: gradients of one expert over the network, likewise.
        network_row: one routed token over one NIC, one of the four exchanges.
        hide_forward: transfer time hidden per token that home experts compute, forward.
        hide_backward: the same in backward.
        hide_grads: transfer time of gradients that other work of backward hides.
        interference: slow-down of that other work, in parts per thousand of what it hides.
        sharded: whether network copies are cut over a node's NICs.

    Raises:
        TypeError: a field is no int, or ``sharded`` no bool.
        ValueError: a field is negative or above ``MAX_COST``, ``interference`` above 1000.
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
            name, value = f"CostModel.{field.name}", getattr(self, field.name)
            if field.name == "sharded":
                check_type(value, bool, name)
            elif field.name == "interference":
                if not 0 <= check_int(value, name) <= MAX_INTERFERENCE:
                    raise ValueError(
                        f"{name}={value}; expected 0 to {MAX_INTERFERENCE} parts per thousand "
                        "(kMaxInterference)"
                    )
            elif not 0 <= check_int(value, name) <= MAX_COST:
                raise ValueError(
                    f"{name}={value}; expected 0 to {MAX_COST} ns (kMaxCost), about half a second; "
                    "are the sizes and the units right?"
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
        gemm_dtype: str = "bfloat16",
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
            gemm_dtype: in which the experts compute.

        Raises:
            TypeError: an argument is of another type.
            ValueError: an unknown preset or dtype, a size that is not positive, an overlap that is
                not a share, a negative time, or a cost above ``MAX_COST``.
        """
        kind = find_hardware(hardware)
        check_type(sharded, bool, "sharded")
        check_type(dedup, bool, "dedup")
        check_number(overlap, "overlap", 1.0)
        check_number(hide_grads_us, "hide_grads_us", unit="microseconds")
        costs = ExpertCosts.of(hidden, intermediate, dtype, kind, sharded, gemm_dtype)
        row_share = DEDUP_ROW_SHARE if dedup else 1.0

        def ns(seconds: float) -> int:
            return max(1, round(seconds * 1e9))  # no part of a layer is free

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
            hide_forward=round(overlap * costs.row_forward * 1e9),
            hide_backward=round(overlap * costs.row_backward * 1e9),
            hide_grads=round(hide_grads_us * 1e3),
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

        Raises:
            TypeError: an argument is of another type.
            ValueError: a time is negative or above ``MAX_COST``, or a share is not in [0, 1].
        """

        def ns(us: float, name: str) -> int:
            return round(1e3 * check_number(us, name, MAX_COST / 1e3, "microseconds (kMaxCost)"))

        token = ns(token_us, "token_us")
        copy, cross_copy = ns(copy_us, "copy_us"), ns(cross_copy_us, "cross_copy_us")
        forward = check_number(forward_share, "forward_share", 1.0)
        hidden = 1e3 * check_number(overlap, "overlap", 1.0) * token_us
        return cls(
            token=token,
            instance=ns(instance_us, "instance_us"),
            copy=copy,
            cross_copy=cross_copy,
            grad=2 * copy if grad_us is None else ns(grad_us, "grad_us"),
            cross_grad=2 * cross_copy
            if cross_grad_us is None
            else ns(cross_grad_us, "cross_grad_us"),
            network_row=ns(network_row_us, "network_row_us"),
            hide_forward=round(hidden * forward),
            hide_backward=round(hidden * (1 - forward)),
            hide_grads=ns(hide_grads_us, "hide_grads_us"),
            sharded=sharded,
        )

    def to_ints(self) -> list[int]:
        """The fields in the order of the solve op."""
        return [int(getattr(self, field.name)) for field in dataclasses.fields(self)]
