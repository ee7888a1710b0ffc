# SPDX-License-Identifier: Apache-2.0
"""Memory for copies and their gradients, and the weights that are fetched into it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from topoep.adapters.megatron.routing import Routed
from topoep.balancer import Balancer
from topoep.plan import Plan
from topoep.recompute import in_backward
from topoep.replicas import BufferPool, Lease, SlotBuffer, identity_of
from topoep.transports.base import Pending, Weights

#: Transports that read the plan on the host anyway; with the others that would mean waiting for it.
HOST_TRANSPORTS = ("c10d", "local")


class SlotMemory:
    """What all layers with experts of one shape share.

    Per kind of tensor: S spare slots, H rows in which home experts are staged for the transport
    (Megatron's parameters do not lie next to each other), and the same again in float32 for
    gradients.
    """

    def __init__(self, balancer: Balancer, home: Sequence[Sequence[Tensor]]) -> None:
        self.spare_slots = balancer.spare_slots
        with torch.inference_mode(False):  # training uses what an evaluation has made
            self.staged: Weights = tuple(
                rows[0].new_empty((len(rows), *rows[0].shape), requires_grad=False) for rows in home
            )
        self.sending = Pending()  # what still reads the staged rows
        self.pool = BufferPool(self._make_buffer, balancer.slot_buffers)
        self._grads: tuple[Weights, Weights] | None = None
        #: Sums for home experts that wait for the parameter's own gradient.
        self.arrived: dict[Tensor, Tensor] = {}

    def _make_buffer(self) -> SlotBuffer:
        return SlotBuffer([self.staged], self.spare_slots)

    def pool_of_one(self) -> BufferPool:
        """Slots for a single call, which are kept until its backward."""
        return BufferPool(self._make_buffer, 1)

    @property
    def grads(self) -> tuple[Weights, Weights]:
        """Gradients of the slots ``[S, ...]`` and of the homes ``[H, ...]``, made when needed."""
        if self._grads is None:

            def zeros(rows: int) -> Weights:
                return tuple(
                    t.new_zeros((rows, *t.shape[1:]), dtype=_wide(t.dtype)) for t in self.staged
                )

            self._grads = zeros(self.spare_slots), zeros(len(self.staged[0]))
        return self._grads


#: The memory of each balancer's layers, by the shape of their experts.
_memory: weakref.WeakKeyDictionary[Balancer, dict[object, SlotMemory]] = weakref.WeakKeyDictionary()


def slot_memory(balancer: Balancer, home: Sequence[Sequence[Tensor]]) -> SlotMemory:
    """The memory for experts of this shape, made for the first layer that asks."""
    key = tuple((rows[0].shape, rows[0].dtype, rows[0].device) for rows in home)
    memory = _memory.setdefault(balancer, {})
    if key not in memory:
        memory[key] = SlotMemory(balancer, home)
    return memory[key]


class RowsLease(Lease):
    """A lease on slots whose weights are separate tensors per expert, staged when they are sent.

    Args:
        balancer: whose transport and policy are used.
        memory: of experts of this shape.
        routed: the plan.
        homes: ``[kind][home expert]``.
    """

    def __init__(
        self,
        balancer: Balancer,
        memory: SlotMemory,
        routed: Routed,
        homes: list[list[Tensor]],
    ) -> None:
        self.memory = memory
        self.routed = routed  # kept for recomputations, by the autograd graph that keeps this
        self._homes = homes
        self._balancer = balancer
        keep = balancer.replica_policy == "keep"
        pool = memory.pool_of_one() if keep else memory.pool
        # A recomputation that runs inside the backward of its forward pass uses the copies that
        # this backward has fetched.
        twin = routed.lease() if in_backward() and routed.lease is not None else None
        super().__init__(balancer.transport, pool, routed.plan, [memory.staged], twin)
        if not in_backward():
            routed.lease = weakref.ref(self)

    def _identity(self) -> object:
        return identity_of(t for rows in self._homes for t in rows)

    def _fetch(self) -> None:
        self.memory.sending.wait()
        with torch.no_grad():
            for local in copied_homes(self._balancer, self.plan):
                for staged, rows in zip(self.memory.staged, self._homes, strict=True):
                    staged[local].copy_(rows[local])
        super()._fetch()
        self.memory.sending = self.buffer.pending


def copied_homes(balancer: Balancer, plan: Plan) -> list[int]:
    """The home experts of this rank that the plan copies; all where the plan is not on the host."""
    home = plan.config.experts_per_rank
    if balancer.transport.name not in HOST_TRANSPORTS:
        return list(range(home))
    rank = balancer.held_ranks[0]
    return sorted(
        {int(e) % home for e in plan.host.slot_expert.flat if e >= 0 and e // home == rank}
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
