# SPDX-License-Identifier: Apache-2.0
"""Seconds that the parts of an MoE layer take, from the experts' shape and the hardware.

The one place of these formulas: :class:`topoep.CostModel` rounds them to integers for the planner,
:mod:`topoep.simulator` uses them as they are. docs/cost-model.md derives them and names sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from topoep.checks import check_int
from topoep.hardware import SIZE_OF, Hardware, check_dtype

ELEMENTWISE_BACKWARD = 2.2  # bytes of the memory-bound part, backward over forward


@dataclass(frozen=True)
class ExpertCosts:
    """Seconds, unless said otherwise.

    Args:
        row_forward: one routed token through one expert.
        row_backward: the same in backward.
        group_forward: one expert instance more on a rank, with no more tokens.
        group_backward: the same in backward.
        copy: weights of one expert over one rank's in-node link.
        cross_copy: weights of one expert over the NICs that carry them together.
        grad: fp32 gradients of one expert over one rank's in-node link.
        cross_grad: fp32 gradients of one expert over the NICs.
        weight_bytes: bytes of one expert's weights.
        grad_bytes: bytes of its fp32 gradients.
        sharded: whether network copies are cut over NICs.
    """

    row_forward: float
    row_backward: float
    group_forward: float
    group_backward: float
    copy: float
    cross_copy: float
    grad: float
    cross_grad: float
    weight_bytes: int
    grad_bytes: int
    sharded: bool

    @classmethod
    def of(
        cls,
        hidden: int,
        intermediate: int,
        dtype: str,
        hardware: Hardware,
        sharded: bool = True,
        gemm_dtype: str = "bfloat16",
    ) -> ExpertCosts:
        """The costs for SwiGLU experts of 3 D I weights.

        Args:
            hidden: D.
            intermediate: I.
            dtype: of the weights that are copied.
            hardware: of every rank.
            sharded: network copies are cut over NICs.
            gemm_dtype: in which the experts compute.

        Raises:
            TypeError, ValueError: a size that is no positive int, or a dtype that the hardware
                does not have.
        """
        check_dtype(dtype)
        if check_int(hidden, "hidden") < 1 or check_int(intermediate, "intermediate") < 1:
            raise ValueError(f"hidden={hidden}, intermediate={intermediate}; both must be positive")
        weights = 3 * hidden * intermediate
        weight_bytes = weights * SIZE_OF[dtype]
        grad_bytes = 4 * weights
        # GEMMs: 6 D I FLOP a row forward, twice that backward. Permute, SwiGLU and unpermute move
        # 8 D + 6 I bytes a row forward, and ELEMENTWISE_BACKWARD times that backward.
        gemm = 2 * weights / (hardware.flops_of(gemm_dtype) * hardware.efficiency)
        memory = (8 * hidden + 6 * intermediate) / hardware.memory_bandwidth
        # A group costs its half-filled tiles, and in backward half of the read-modify-write of its
        # fp32 gradients; the other half hides.
        tiles = hardware.half_rows * gemm
        accumulate = 0.5 * 2 * grad_bytes / hardware.memory_bandwidth
        nics = (hardware.shard_nics or hardware.nics_per_node) if sharded else 1
        network = nics * hardware.nic_bandwidth
        return cls(
            row_forward=gemm + memory,
            row_backward=2 * gemm + ELEMENTWISE_BACKWARD * memory,
            group_forward=tiles,
            group_backward=2 * tiles + accumulate,
            copy=weight_bytes / hardware.link_bandwidth,
            cross_copy=weight_bytes / network,
            grad=grad_bytes / hardware.grad_bandwidth,
            cross_grad=grad_bytes / network,
            weight_bytes=weight_bytes,
            grad_bytes=grad_bytes,
            sharded=sharded,
        )
