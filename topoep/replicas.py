# SPDX-License-Identifier: Apache-2.0
"""Replica weights as autograd sees them, and the memory they live in.

With the policy ``refetch`` all layers share one set of spare slots, so the weights of a layer's
copies are gone by the time its backward runs, and are fetched again. Three parts make that safe:

- the tensors handed out alias the shared buffer under a version counter of their own, so that
  autograd does not complain when another layer fills the buffer;
- :func:`release`, an identity on the layer's output, runs first in backward and fetches again;
- a :class:`Lease` says whose weights the buffer holds. As long as a lease is neither released nor
  dead, nobody else may fill the buffer: an error there is better than a wrong gradient here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from topoep.plan import Plan
from topoep.recompute import in_backward
from topoep.transports.base import Transport, Weights


class SlotBuffer:
    """Spare slots of one shape, shared by all layers whose experts have that shape."""

    def __init__(self, weights: Sequence[Weights], spare_slots: int) -> None:
        # Zeros, so that an empty slot never feeds a grouped GEMM with NaNs.
        self.slots: list[Weights] = [
            tuple(w.new_zeros((spare_slots, *w.shape[1:])) for w in tensors) for tensors in weights
        ]
        self.content: object = None  # what the slots hold: Lease.content
        self.lease: weakref.ref[Lease] | None = None  # who relies on it


class Lease:
    """The copies of one plan for one set of weights."""

    def __init__(
        self, transport: Transport, buffer: SlotBuffer, plan: Plan, weights: Sequence[Weights]
    ) -> None:
        self.transport = transport
        self.buffer = buffer
        self.plan = plan
        self.weights = [tuple(w.detach() for w in tensors) for tensors in weights]
        # Without autograd nothing relies on the slots once the next layer asks for them.
        self.released = not torch.is_grad_enabled()
        self.content = self._content()

    def _content(self) -> object:
        # The storage, not the address: FSDP frees a parameter's memory between forward and backward
        # and gathers the same values into the same storage again, perhaps elsewhere.
        tensors = tuple(t for tensors in self.weights for t in tensors)
        return self.plan.token, tuple(
            (t.untyped_storage()._cdata, t.storage_offset(), t._version) for t in tensors
        )

    def take(self) -> list[Weights]:
        """Fills the buffer, if it does not hold this already, and hands out aliases of it."""
        holder = self.buffer.lease() if self.buffer.lease is not None else None
        if holder is not None and not holder.released and holder.plan.token != self.plan.token:
            raise RuntimeError(
                "the spare slots still hold the copies of another plan whose backward needs them. "
                "Call y = balancer.release(y, plan) on the output of the experts before the next "
                "layer replicates, or use Balancer(replica_policy='keep')"
            )
        self._fetch()
        if not in_backward():
            self.buffer.lease = weakref.ref(self)
        # .data: the same memory under a new version counter
        return [tuple(slot.data for slot in slots) for slots in self.buffer.slots]

    def retake(self) -> None:
        """Fetches again for backward what take() fetched in forward."""
        if self._content() != self.content:
            raise RuntimeError(
                "the weights of the experts changed between forward and backward (an optimizer "
                "step, or an in-place update); their copies cannot be fetched again. Run backward "
                "before the weights change"
            )
        self._fetch()

    def _fetch(self) -> None:
        if self.buffer.content != self.content:
            self.buffer.content = None  # in case the transport raises half-way
            self.transport.replicate(self.plan, self.weights, self.buffer.slots)
            self.buffer.content = self.content


class _Replicate(torch.autograd.Function):
    """Home weights -> weights in the spare slots. Backward brings the gradients home."""

    @staticmethod
    def forward(ctx: Any, lease: Lease, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.lease = lease
        return tuple(t for tensors in lease.take() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lease: Lease = ctx.lease
        lease.released = True
        lease.plan.usage.backward_done = True
        needed = ctx.needs_input_grad[1:]
        num_tensors = len(lease.weights[0])
        slot_grads: list[Weights] = []
        home_grads: list[Weights] = []
        result: list[Tensor | None] = []
        for i, weights in enumerate(lease.weights):
            # Frozen tensors, and integer ones such as scales, have no gradient to bring home.
            wanted = [k for k in range(num_tensors) if needed[i * num_tensors + k]]
            slot_grads.append(tuple(grads[i * num_tensors + k].contiguous() for k in wanted))
            home = {k: weights[k].new_zeros(weights[k].shape) for k in wanted}
            home_grads.append(tuple(home.values()))
            result += [home.get(k) for k in range(num_tensors)]
        lease.transport.reduce_grads(lease.plan, slot_grads, home_grads)
        return (None, *result)


class _Release(torch.autograd.Function):
    """Identity that gives the slots back in forward and fetches them again in backward."""

    @staticmethod
    def forward(ctx: Any, leases: Sequence[Lease], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.leases = leases
        for lease in leases:
            lease.released = True
        return tuple(y.view_as(y) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for lease in ctx.leases:
            lease.retake()
        return (None, *grads)


def replicate(lease: Lease, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The leased slots as tensors, through which gradients flow back to the home weights."""
    guests: tuple[Tensor, ...] = _Replicate.apply(lease, *weights)
    for guest in guests:
        # The lease lives as long as autograd or the caller keeps the tensor.
        setattr(guest, "_topoep_lease", lease)  # noqa: B010
    return guests


def release(leases: Sequence[Lease], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Identity on the outputs; gives the slots back, and fetches them again in backward."""
    return list(_Release.apply(leases, *outputs))
