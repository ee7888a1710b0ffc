# SPDX-License-Identifier: Apache-2.0
"""Replica weights as autograd sees them, and the memory they live in.

With the policy ``refetch`` all layers share a few sets of spare slots, so the weights of a layer's
copies are gone by the time its backward runs, and are fetched again. Four parts make that safe:

- the tensors handed out alias a shared buffer under a version counter of their own, so that
  autograd does not complain when another layer fills the buffer;
- :func:`release`, an identity on the layer's output, runs first in backward and fetches again;
- a :class:`Lease` says whose weights a buffer holds. As long as a lease is neither released nor
  dead, nobody else may fill the buffer: an error there is better than a wrong gradient here;
- every fill of a buffer has a number. Whoever computed with the copies of a lease checks, before
  the result goes on, that the buffer was not filled in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from topoep.plan import Plan
from topoep.recompute import in_backward
from topoep.transports.base import Pending, Transport, Weights


class SlotBuffer:
    """Spare slots of one shape, shared by all layers whose experts have that shape."""

    def __init__(self, weights: Sequence[Weights], spare_slots: int) -> None:
        # Zeros, so that an empty slot never feeds a grouped GEMM with NaNs. Never inference
        # tensors: training uses the slots that an evaluation has made.
        with torch.inference_mode(False):
            self.slots: list[Weights] = [
                tuple(w.new_zeros((spare_slots, *w.shape[1:])) for w in tensors)
                for tensors in weights
            ]
        self.lease: weakref.ref[Lease] | None = None  # who relies on it
        self.fills = 0
        self.pending = Pending()  # the last fill, perhaps still under way
        self.in_backward = False  # the last to fetch was a backward that has not ended

    def holder(self) -> Lease | None:
        """Who relies on the content, if anybody does."""
        lease = self.lease() if self.lease is not None else None
        return None if lease is None or lease.released else lease


class BufferPool:
    """The buffers of one shape: as many sets of copies can be in use at a time.

    Args:
        make: makes a buffer.
        size: how many; each is made when it is first used.
    """

    def __init__(self, make: Callable[[], SlotBuffer], size: int) -> None:
        self._make = make
        self._size = size
        self._buffers: list[SlotBuffer] = []  # least recently chosen first

    def choose(self, plan: Plan) -> SlotBuffer:
        """A buffer that nobody relies on, the least recently chosen first.

        A plan that replicates several times before its release (gate and up projections, say) has
        slots for each; they come on top of the size.

        Raises:
            RuntimeError: other plans need all of them.
        """
        chosen = self._find(plan)
        if chosen is None:
            raise RuntimeError(
                "the spare slots still hold the copies of another plan whose backward needs them. "
                "Call y = balancer.release(y, plan) on the output of the experts before the next "
                "layer replicates, or use Balancer(slot_buffers=..) with one more for each plan "
                "whose experts run at the same time, or Balancer(replica_policy='keep')"
            )
        self._buffers.remove(chosen)
        self._buffers.append(chosen)
        return chosen

    def _find(self, plan: Plan) -> SlotBuffer | None:
        holders = [buffer.holder() for buffer in self._buffers]
        free = [b for b, holder in zip(self._buffers, holders, strict=True) if holder is None]
        own = sum(h is not None and h.plan.token == plan.token for h in holders)
        if in_backward():
            unused = [b for b in free if not b.in_backward]
            if unused:
                return unused[0]
        # In forward plans take turns at all of them, so that those of neighbouring layers differ
        # and backward can fetch for the next layer while this one still computes.
        if len(self._buffers) < self._size + own:
            self._buffers.append(self._make())
            return self._buffers[-1]
        return next(iter(free), None)


class Lease:
    """The copies of one plan for one set of weights."""

    def __init__(
        self,
        transport: Transport,
        pool: BufferPool,
        plan: Plan,
        weights: Sequence[Weights],
        twin: Lease | None = None,
    ) -> None:
        self.transport = transport
        self.plan = plan
        self.weights = [tuple(w.detach() for w in tensors) for tensors in weights]
        # Without autograd nothing relies on the slots once the next layer asks for them.
        self.released = not torch.is_grad_enabled()
        self.in_use = True  # until the experts' output is released
        self._content = self._identity()
        # A recomputation computes with the slots of its forward pass: what it saves for backward
        # aliases them, and backward fetches the copies there.
        self._twin = twin
        self.buffer: SlotBuffer = pool.choose(plan) if twin is None else twin.buffer
        self._fill = -1  # the fill that this lease's users see
        self.backward_began = Pending()  # where the current stream was when backward came here

    def _identity(self) -> object:
        return identity_of(t for tensors in self.weights for t in tensors)

    def take(self) -> list[Weights]:
        """Starts to fill the buffer and hands out aliases of it.

        Always a transfer, whatever the slots hold: whether they hold it already is something that
        ranks could find different answers to, and a transfer takes all of them. Only a
        recomputation relies on what backward has fetched, on all ranks alike.
        """
        twin, self._twin = self._twin, None
        if twin is None:
            self._fetch()
        else:
            if not twin.is_fresh():
                twin.start_retake()
            self._fill = twin._fill
        if not in_backward():
            self.buffer.lease = weakref.ref(self)
            self.buffer.in_backward = False
        # .data: the same memory under a new version counter
        return [tuple(slot.data for slot in slots) for slots in self.buffer.slots]

    def start_retake(self) -> None:
        """Starts to fetch again for backward what take() fetched in forward."""
        if self._identity() != self._content:
            raise RuntimeError(
                "the weights of the experts changed between forward and backward (an optimizer "
                "step, or an in-place update); their copies cannot be fetched again. Run backward "
                "before the weights change"
            )
        self._check_there()
        if not self.is_fresh():
            self._fetch()
        self.buffer.in_backward = True

    def check_prefetch(self) -> None:
        """Raises RuntimeError unless backward can start to fetch again where forward is now.

        Backward comes to other plans between here and this lease in the reverse order, and would
        find their copies overwritten. That shows in forward: those plans have filled the buffer.
        """
        if not self.is_fresh():
            raise RuntimeError(
                "prefetch is placed where backward would fetch copies into spare slots that "
                "another plan's backward still needs: since replicate of this plan, that one has "
                "taken the same slots. Use Balancer(slot_buffers=..) with one more for each plan "
                "in between, or place prefetch before the next layer that replicates"
            )
        self._check_there()

    def _check_there(self) -> None:
        if any(t.numel() and not t.untyped_storage().nbytes() for w in self.weights for t in w):
            raise RuntimeError(
                "the weights of the experts are not in memory where their copies are to be fetched "
                "again: FSDP frees them after forward, and gathers them only when backward comes "
                "to their module. Use fully_shard(experts, reshard_after_forward=False), or place "
                "prefetch inside of that module's forward"
            )

    def is_fresh(self) -> bool:
        """Whether the buffer holds what was last fetched for this lease."""
        return self.buffer.fills == self._fill

    def wait(self) -> None:
        """Waits for what was started. Raises if the buffer was filled for others since."""
        self.check_fresh()
        self.buffer.pending.wait()

    def check_fresh(self) -> None:
        """Raises RuntimeError if the buffer was filled for another plan since it was for this."""
        if not self.is_fresh():
            raise RuntimeError(
                "the spare slots were filled for another plan while the experts of this one were "
                "still computing with them: what they computed is wrong. Call replicate, the "
                "experts and release of one plan before replicate of the next, or use "
                "Balancer(slot_buffers=..) with one more for each plan whose experts run at the "
                "same time, or Balancer(replica_policy='keep')"
            )

    def end_use(self) -> None:
        """The experts have computed with the copies; raises if they were others'."""
        if self.in_use:
            self.check_fresh()
            self.in_use = False

    def end_backward(self) -> None:
        """The copies are not needed any more."""
        self.check_fresh()
        self.released = True
        self.buffer.in_backward = False

    def _fetch(self) -> None:
        buffer = self.buffer
        buffer.pending.wait()
        buffer.fills += 1
        buffer.pending = self.transport.start_replicate(self.plan, self.weights, buffer.slots)
        self._fill = buffer.fills


class _Join(torch.autograd.Function):
    """Identity on home weights, where the gradients of their copies join those of the experts.

    Autograd runs backward what was made last first. This is made when the copies depart, or counts
    as made even earlier, so its backward comes after that of all that was made until they were
    waited for (the router, the dispatch), and only then the current stream has to wait for the
    sums.
    """

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class _Replicate(torch.autograd.Function):
    """Home weights -> weights in the spare slots. Backward brings the gradients home."""

    @staticmethod
    def forward(
        ctx: Any, lease: Lease, slots: Sequence[Weights], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.lease = lease
        return tuple(t for tensors in slots for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lease: Lease = ctx.lease
        lease.end_backward()
        lease.backward_began.wait()
        lease.plan.usage.backward_done = True
        needed = ctx.needs_input_grad[2:]
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
        return (None, None, *result)


class _Release(torch.autograd.Function):
    """Identity on outputs that fetches the copies again in backward, if it is to.

    The copies are inputs too, so that autograd reaches the backward of replicate, a collective, on
    ranks whose experts did not use theirs.
    """

    @staticmethod
    def forward(
        ctx: Any, leases: Sequence[Lease], refetch: bool, num_outputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.leases = leases
        ctx.refetch = refetch
        ctx.num_guests = len(tensors) - num_outputs
        return tuple(y.view_as(y) for y in tensors[:num_outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for lease in ctx.leases:
            lease.backward_began = lease.transport.mark()
            if ctx.refetch:
                lease.start_retake()
                lease.wait()
        return (None, None, None, *grads, *[None] * ctx.num_guests)


class _Prefetch(torch.autograd.Function):
    """Identity whose backward starts what the backward of release waits for."""

    @staticmethod
    def forward(ctx: Any, leases: Sequence[Lease], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.leases = leases
        return tuple(y.view_as(y) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for lease in ctx.leases:
            lease.start_retake()
        return (None, *grads)


def find_twin(plan: Plan, weights: Sequence[Weights]) -> Lease | None:
    """In a recomputation: the forward pass's lease of the same weights, where that is certain."""
    if not in_backward() or plan.usage.replications != 1:
        return None
    shapes = shapes_of(weights)
    alike = [lease for lease in plan.usage.forward.alive() if shapes_of(lease.weights) == shapes]
    return alike[0] if len(alike) == 1 else None


def identity_of(tensors: Iterable[Tensor]) -> object:
    """Equal for tensors of the same memory that have not been written to in between.

    The storage, not the address: FSDP frees a parameter's memory between forward and backward and
    gathers the same values into the same storage again, perhaps elsewhere.
    """
    return tuple(
        (t.untyped_storage()._cdata, t.storage_offset(), 0 if t.is_inference() else t._version)
        for t in tensors
    )


def shapes_of(weights: Sequence[Weights]) -> object:
    """What decides which slots weights fit into."""
    return tuple((t.shape[1:], t.dtype, t.device) for t in weights[0])


class Copies:
    """Copies that are on their way, and how their gradients come home.

    Making one starts the transfer. The tensors are made when they are first asked for: the later,
    the earlier their backward, which sums the gradients over ranks. It is made on the transport's
    stream for that, and autograd runs a backward on the stream of its forward: so the sums travel
    beside the backward of the home experts and of the dispatch. Autograd makes streams wait for
    each other, and keeps memory until both are done with it.

    Args:
        lease: of the slots.
        weights: home weights, through which gradients flow back.
        since: their gradients join those of the copies in backward after all that was made since
            this tensor; since now if None.
    """

    def __init__(
        self, lease: Lease, weights: Sequence[Tensor], since: Tensor | None = None
    ) -> None:
        self.lease = lease
        self._grad_enabled = torch.is_grad_enabled()
        self._weights: tuple[Tensor, ...] = _Join.apply(*weights)
        if since is not None:
            _rank_before(since, self._weights)
        self._slots = lease.take()
        self._tensors: tuple[Tensor, ...] | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """The leased slots; their content is there after ``lease.wait()``."""
        if self._tensors is None:
            stream = self.lease.transport.gradient_stream()
            with torch.set_grad_enabled(self._grad_enabled), stream:
                guests: tuple[Tensor, ...] = _Replicate.apply(
                    self.lease, self._slots, *self._weights
                )
            for guest in guests:
                # The lease lives as long as autograd or the caller keeps the tensor.
                setattr(guest, "_topoep_lease", self.lease)  # noqa: B010
            self._tensors, self._weights = guests, ()
        return self._tensors


def _rank_before(tensor: Tensor, made: Sequence[Tensor]) -> None:
    """Lets the backward of what one function made come just before that of an earlier tensor.

    Of what is ready, autograd runs the highest sequence number first. Before and not after it: a
    wrapper may have put a function there whose backward takes the gradients of all weights (FSDP2).
    """
    node: Any = next((t.grad_fn for t in made if t.grad_fn is not None), None)
    earlier: Any = tensor.grad_fn
    if node is not None and earlier is not None:
        node._set_sequence_nr(earlier._sequence_nr() + 1)


def release(
    leases: Sequence[Lease], guests: Sequence[Tensor], outputs: Sequence[Tensor], refetch: bool
) -> list[Tensor]:
    """Identity on the outputs; with ``refetch`` gives the slots back until backward."""
    if refetch:
        for lease in leases:
            lease.released = True
    return list(_Release.apply(leases, refetch, len(outputs), *outputs, *guests))


def prefetch(leases: Sequence[Lease], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Identity on what was computed since the release; see _Prefetch."""
    if not in_backward():
        for lease in leases:
            lease.check_prefetch()
    return list(_Prefetch.apply(leases, *outputs))
