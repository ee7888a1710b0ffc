# SPDX-License-Identifier: Apache-2.0
"""Constants of the predicted layer time, from the shape of the model and the hardware.

docs/cost-model.md derives the formulas and names the source of every number. All results are
predictions.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from topoep.checks import check_int, check_number, check_type

MAX_COST = 2**29  # kMaxCost in csrc/core/limits.h
MAX_INTERFERENCE = 1000  # kMaxInterference
_SIZE_OF = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1}


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU in its node.

    Args:
        name: for messages.
        flops: dense bf16 FLOP/s, peak.
        efficiency: share of it that grouped GEMMs reach on many rows.
        memory_bandwidth: bytes/s that memory-bound kernels reach.
        link_bandwidth: bytes/s of a rank in its node, one direction, as collectives reach it.
        nic_bandwidth: bytes/s of one NIC, one direction, as collectives reach it.
        nics_per_node: NICs that share a node's network traffic.
        ranks_per_node: GPUs of a node.
        grad_bandwidth: bytes/s at which a rank pulls gradients inside its node.

    Raises:
        TypeError: a field is no number, or one that counts is no int.
        ValueError: a field is not positive and finite, or the efficiency is above 1.
    """

    name: str
    flops: float
    efficiency: float
    memory_bandwidth: float
    link_bandwidth: float
    nic_bandwidth: float
    nics_per_node: int
    ranks_per_node: int
    grad_bandwidth: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name == "name":
                continue
            name, value = f"Hardware.{field.name}", getattr(self, field.name)
            if check_number(value, name, 1.0 if field.name == "efficiency" else math.inf) == 0:
                raise ValueError(f"{name} is {value!r}; expected a positive number")
        check_int(self.nics_per_node, "Hardware.nics_per_node")
        check_int(self.ranks_per_node, "Hardware.ranks_per_node")


def _preset(name: str, flops: float, efficiency: float, memory: float, link: float) -> Hardware:
    return Hardware(
        name,
        flops=flops * 1e12,
        efficiency=efficiency,
        memory_bandwidth=0.75 * memory * 1e12,
        link_bandwidth=link * 1e9,
        nic_bandwidth=43.5e9,
        nics_per_node=8,
        ranks_per_node=8,
        grad_bandwidth=min(link, 170.0) * 1e9,
    )


#: Presets by name. Peak FLOP/s and memory bandwidth are from data sheets; the bandwidths of links
#: are what published all-to-alls and weight transfers reach (docs/cost-model.md).
HARDWARE = {
    hardware.name: hardware
    for hardware in (
        _preset("A100", 312, 0.62, 2.04, 240),
        _preset("H800", 989, 0.62, 3.35, 155),
        _preset("H100", 989, 0.62, 3.35, 320),
        _preset("H200", 989, 0.62, 4.8, 320),
        _preset("B200", 2250, 0.50, 8.0, 680),
        dataclasses.replace(
            _preset("GB200", 2500, 0.50, 8.0, 680), nics_per_node=4, ranks_per_node=4
        ),
    )
}


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
            TypeError: an argument is of another type.
            ValueError: an unknown preset or dtype, a size that is not positive, an overlap that is
                not a share, a negative time, or a cost above ``MAX_COST``.
        """
        if isinstance(hardware, str):
            if hardware not in HARDWARE:
                raise ValueError(
                    f"hardware {hardware!r}; presets are {', '.join(HARDWARE)}, anything else "
                    "takes a topoep.Hardware"
                )
            hardware = HARDWARE[hardware]
        check_type(hardware, Hardware, "hardware")
        if dtype not in _SIZE_OF:
            raise ValueError(f"dtype {dtype!r}; expected one of {', '.join(_SIZE_OF)}")
        if check_int(hidden, "hidden") < 1 or check_int(intermediate, "intermediate") < 1:
            raise ValueError(f"hidden={hidden}, intermediate={intermediate}; both must be positive")
        check_type(sharded, bool, "sharded")
        check_type(dedup, bool, "dedup")
        check_number(overlap, "overlap", 1.0)
        check_number(hide_grads_us, "hide_grads_us", unit="microseconds")
        size = _SIZE_OF[dtype]
        weights = 3 * hidden * intermediate
        weight_bytes = weights * size
        # GEMMs: 6 D I FLOP a row forward, twice that backward; permute, SwiGLU and unpermute move
        # 8 D + 6 I bytes a row forward and 2.2 times that backward.
        gemm = 2 * weights / (hardware.flops * hardware.efficiency)
        memory = (8 * hidden + 6 * intermediate) / hardware.memory_bandwidth
        forward, both = gemm + memory, 3 * gemm + 3.2 * memory
        # An instance costs its GEMMs' half-filled tiles (96 rows, forward and backward) and half of
        # the read-modify-write of its fp32 gradients, the rest of which hides.
        instance = 3 * 96 * gemm + 0.5 * 8 * weights / hardware.memory_bandwidth
        nics = hardware.nics_per_node if sharded else 1
        row_share = 0.25 if dedup else 1.0
        grads = 4 * weights

        def ns(seconds: float) -> int:
            return max(1, round(seconds * 1e9))  # no part of a layer is free

        return cls(
            token=ns(both),
            instance=ns(instance),
            copy=ns(weight_bytes / hardware.link_bandwidth),
            cross_copy=ns(weight_bytes / (nics * hardware.nic_bandwidth)),
            grad=ns(grads / hardware.grad_bandwidth),
            cross_grad=ns(grads / (nics * hardware.nic_bandwidth)),
            network_row=ns(
                row_share
                * 2
                * hidden
                * hardware.ranks_per_node
                / (hardware.nics_per_node * hardware.nic_bandwidth)
            ),
            hide_forward=round(overlap * forward * 1e9),
            hide_backward=round(overlap * (both - forward) * 1e9),
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
