# SPDX-License-Identifier: Apache-2.0
"""The balancer: one object per expert-parallel group that plans, reroutes and moves weights."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from topoep import ops
from topoep._version import __version__
from topoep.checks import check_choice, check_range, check_type
from topoep.debug import check_call, check_plan, debug_mode
from topoep.objective import Objective, Time, check_objective
from topoep.plan import MAX_TOKENS, Plan, PlanConfig, check_counts, make_plan
from topoep.portfolio import SOLVERS, Candidate, choose_candidates
from topoep.recompute import PlanHistory, Replay, in_backward
from topoep.replicas import (
    BufferPool,
    Copies,
    Lease,
    SlotBuffer,
    find_twin,
    prefetch,
    release,
    shapes_of,
)
from topoep.topology import Topology
from topoep.transports import make_transport
from topoep.transports.base import Weights
from topoep.transports.plane import DEFAULT_COMM_SMS

MAX_TOP_K = 64  # kMaxTopK in csrc/core/limits.h
MAX_TENSORS = 16  # kMaxRowParts: weight tensors per expert

MAX_SLOT_BUFFERS = 64
REPLICA_POLICIES = ("refetch", "keep")

# What all ranks must agree on, in the order of the messages, and which of it is shown as a number.
_FIELDS = (
    "valid",
    "version",
    "debug",
    "num_experts",
    "spare_slots",
    "node_of_rank",
    "objective",
    "cost_model",
    "solver",
    "candidates",
    "replica_policy",
    "slot_buffers",
    "comm_sms",
)
_PLAIN_FIELDS = ("num_experts", "spare_slots", "slot_buffers", "comm_sms")

#: What a call takes for each rank that the balancer holds: with ``transport="local"`` a list with
#: one entry per simulated rank, otherwise the entry itself.
TensorOrList = Tensor | list[Tensor]
WeightsOrList = Weights | list[Weights]

#: Told about every plan that is made: the layer given to ``plan``, and the counts.
PlanObserver = Callable[[object | None, Tensor], None]


class PendingReplicas:
    """Copies that are on their way: what :meth:`Balancer.replicate_async` returns."""

    def __init__(self, lease: Lease | None, make: Callable[[], WeightsOrList]) -> None:
        self._lease = lease
        self._make = make
        self._guests: WeightsOrList | None = None

    def wait(self) -> WeightsOrList:
        """The weights in the spare slots; what is enqueued after this finds them there.

        The first call, or :meth:`Balancer.release` without one, also decides when backward brings
        their gradients home: before the backward of what comes earlier. So all ranks make it at the
        same place among their collectives.

        Raises:
            RuntimeError: the slots were filled for another plan since.
        """
        if self._lease is not None:
            self._lease.wait()
        if self._guests is None:
            self._guests = self._make()
        return self._guests


class Balancer:
    """Balances the expert-parallel MoE layers of one process group.

    Call per layer and microbatch, all ranks in the same order::

        plan = balancer.plan(topk_ids)                 # collective: one all-gather of counts
        ids = balancer.reroute(topk_ids, plan)         # physical ids for any EP dispatcher
        guests = balancer.replicate((w1, w2), plan)    # weights for the spare slots
        y = balancer.release(experts(x, guests), plan)

    One balancer serves all layers of a model that have the same number of experts. Memory: S times
    the bytes of one expert, once per shape of expert weights, for ``replica_policy="refetch"``.

    Args:
        topology: the ranks of the group and their nodes.
        num_experts: E, a multiple of the number of ranks R.
        spare_slots: S, copies of other ranks' experts that a rank can hold at a time.
        group: the expert-parallel process group. None simulates all ranks in this process: calls
            then take and return lists with an entry per rank.
        transport: ``"nccl"`` (kernels over NCCL's windows, see docs/nccl.md), ``"c10d"`` (any
            torch.distributed backend), ``"local"``, or ``"auto"``: the first of these that can be
            used, with a line in the log about the others.
        objective: what makes a plan good; ``Balance(0.01)`` if None.
        replica_policy: ``"refetch"``: all layers share the spare slots, backward fetches the copies
            again; ``"keep"``: every call has its own, kept until its backward.
        slot_buffers: sets of spare slots per shape of expert weights, for ``"refetch"``; plans take
            turns at them. How many plans can be between replicate and release at a time (pipeline
            schedules that interleave microbatches, or fetch the next layer's copies early), or
            between replicate and :meth:`prefetch`.
        comm_sms: SMs that a transfer kernel of transport ``nccl`` takes.
        solver: ``"portfolio"`` or ``"taot"``, see :func:`topoep.solve`.
        candidates: what to try instead of the default list.

    Raises:
        ValueError: an argument is out of range, or two ranks of the group disagree on the
            configuration (the message names the field and the ranks; one collective at set-up).
    """

    def __init__(
        self,
        topology: Topology,
        num_experts: int,
        spare_slots: int = 2,
        *,
        group: dist.ProcessGroup | None = None,
        transport: str = "auto",
        objective: Objective | None = None,
        replica_policy: str = "refetch",
        slot_buffers: int = 1,
        comm_sms: int = DEFAULT_COMM_SMS,
        solver: str = "portfolio",
        candidates: Sequence[Candidate] | None = None,
    ) -> None:
        self.transport = make_transport(transport, topology, group, comm_sms)
        problem: Exception | None = None
        try:
            self._debug = debug_mode()
            objective = check_objective(objective)
            self.config = PlanConfig(topology, num_experts, spare_slots, objective)
            check_choice(replica_policy, "replica_policy", REPLICA_POLICIES)
            check_range(slot_buffers, "slot_buffers", 1, MAX_SLOT_BUFFERS)
            self._candidates = choose_candidates(objective, solver, candidates, topology.num_nodes)
            fields = self._fingerprint(solver, replica_policy) | {
                "slot_buffers": slot_buffers,
                "comm_sms": comm_sms,
            }
        except (TypeError, ValueError) as error:
            problem, fields = error, dict.fromkeys(_FIELDS, 0)
        # A rank with a bad argument still takes part, so that the others do not wait for it.
        gathered = self.transport.gather_config(
            torch.tensor([fields[f] for f in _FIELDS], device="cpu")
        )
        try:
            if problem is not None:
                raise problem
            _check_agreement(gathered)
        except (TypeError, ValueError):  # on every rank
            self.transport.close()
            raise
        self.transport.configure(self.config)
        self.replica_policy = replica_policy
        self.slot_buffers = slot_buffers
        self._pools: dict[object, BufferPool] = {}
        self._histories: weakref.WeakKeyDictionary[object, PlanHistory] = (
            weakref.WeakKeyDictionary()
        )
        self._replay = Replay()
        self._num_plans = 0
        self._observers: OrderedDict[int, PlanObserver] = OrderedDict()
        # What replicate handed out, by plan and whether in a recomputation, until its release.
        self._unreleased: dict[tuple[int, bool], list[Copies]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Balancer:
        """Copies of a model share its balancer, as they share its process group."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Balancer belongs to a process group and cannot be pickled; save the model's "
            "state_dict(), which it is no part of"
        )

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The ranks and their nodes."""
        return self.config.topology

    @property
    def num_experts(self) -> int:
        """E."""
        return self.config.num_experts

    @property
    def spare_slots(self) -> int:
        """S."""
        return self.config.spare_slots

    @property
    def num_physical_experts(self) -> int:
        """P = R * (H + S): what a dispatcher takes for its number of experts."""
        return self.config.num_physical_experts

    @property
    def held_ranks(self) -> tuple[int, ...]:
        """The ranks whose data this process holds."""
        return self.transport.held

    @property
    def num_plans(self) -> int:
        """Plans made so far; recomputations make none. For monitoring that balancing goes on."""
        return self._num_plans

    # ---- planning ------------------------------------------------------------------------------

    def plan(self, topk_ids: TensorOrList, *, layer: object | None = None) -> Plan:
        """Counts the routed ids, exchanges the counts and makes the plan. Collective.

        Inside a recomputation of activation checkpointing it returns the plan of the forward pass
        and communicates nothing.

        Args:
            topk_ids: int32 or int64 ``[T, K]``, -1 for padding; T may differ from rank to rank and
                may be 0.
            layer: the layer this plan is for, if the balancer serves several whose recomputations
                must be told apart: its module, or another object that can be weakly referenced.

        Raises:
            TypeError: the ids have another dtype.
            ValueError: the ids have another shape or exceed a limit.
            RuntimeError: a recomputation routes tokens in another way than its forward pass.
        """
        ids = self._held(topk_ids, "topk_ids")
        for tensor in ids:
            _check_ids(tensor, self.config.num_ranks)
        history = self.history(self if layer is None else layer)
        if in_backward():
            replayed = self._replay.next_plan(ids)
            return replayed if replayed is not None else history.find(ids)
        self._debug_check("plan")
        counted = [ops.histogram(tensor, self.num_experts) for tensor in ids]
        counts = self.transport.exchange([counts for counts, _ in counted])
        invalid = counted[0][1]
        if len(counted) > 1:
            invalid = torch.stack([invalid for _, invalid in counted]).sum(dtype=torch.int32)
        plan = self._make_plan(counts, invalid, ids)
        history.add(plan)
        self._replay.record(plan)
        for observer in tuple(self._observers.values()):
            observer(layer, counts)
        return plan

    def on_plan(self, observer: PlanObserver) -> RemovableHandle:
        """Calls ``observer(layer, counts)`` after every plan that :meth:`plan` makes.

        Plans that a recomputation finds again are not made, and not announced.

        Args:
            observer: gets the argument ``layer`` of :meth:`plan` and the counts, int32 ``[R, E]``
                on the device of the ids.

        Returns:
            A handle whose ``remove()`` ends it.
        """
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    def plan_from_counts(self, counts: Tensor) -> Plan:
        """Makes the plan from counts that all ranks know already; no communication.

        Args:
            counts: int32 ``[R, E]``, the same on all ranks. Kept without a copy.

        Raises:
            TypeError, ValueError: as for :func:`topoep.solve`.
        """
        check_counts(counts, self.config)
        self._debug_check("plan_from_counts")
        return self._make_plan(counts, None, ())

    def checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For ``torch.utils.checkpoint(.., context_fn=balancer.checkpoint_contexts)``.

        Hands the plans of the forward pass to its recomputation in order. Without it a
        recomputation finds its plan by comparing ids, which waits for the device on a GPU and
        cannot tell apart two microbatches in flight with equal ids.
        """
        return self._replay.contexts()

    def _make_plan(
        self, counts: Tensor, num_invalid: Tensor | None, ids: tuple[Tensor, ...]
    ) -> Plan:
        rank = self.held_ranks[0] if len(self.held_ranks) == 1 else None
        plan = make_plan(
            self.config,
            counts,
            self._candidates,
            rank,
            num_invalid,
            owner=self,
            topk_ids=ids,
            solve_counts=self.transport.solve,
        )
        if self._debug:
            check_plan(plan, self.transport)
        self._num_plans += 1
        return plan

    def history(self, layer: object) -> PlanHistory:
        """The plans of one layer that backward may still need."""
        try:
            return self._histories.setdefault(layer, PlanHistory())
        except TypeError:
            raise TypeError(
                f"layer is a {type(layer).__name__}; expected an object that can be weakly "
                "referenced, such as the layer's module"
            ) from None

    # ---- routing -------------------------------------------------------------------------------

    def reroute(self, topk_ids: TensorOrList, plan: Plan) -> TensorOrList:
        """Rewrites expert ids to physical ids ``rank * (H + S) + slot``.

        Quotas are filled in token order: home first, then the copies. Distinct experts of a token
        stay distinct physical ids, -1 stays -1, ids out of range are passed through.

        Args:
            topk_ids: int32 or int64 ``[T, K]``, those the plan was made for.
            plan: from this balancer.

        Returns:
            New ids of the same shape and dtype.

        Raises:
            TypeError, ValueError: bad ids, or a plan of another balancer.
        """
        self._check_plan(plan)
        ids = self._held(topk_ids, "topk_ids")
        for tensor in ids:
            _check_ids(tensor, self.config.num_ranks)
            if tensor.device != plan.counts.device:
                raise ValueError(
                    f"topk_ids are on {tensor.device}, the plan is on {plan.counts.device}"
                )
        rerouted = []
        for tensor, rank in zip(ids, self.held_ranks, strict=True):
            row = plan if plan.rank == rank else plan.for_rank(rank)
            assert row.send is not None
            rerouted.append(
                ops.reroute(
                    tensor, row.send, plan.copy_offsets, plan.copy_slots, self.config.num_ranks
                )
            )
        return self._like(topk_ids, rerouted)

    # ---- weights and gradients -----------------------------------------------------------------

    def replicate(self, weights: WeightsOrList, plan: Plan) -> WeightsOrList:
        """Fetches the weights of this rank's copies. Collective; its backward is one too.

        Autograd brings the gradients of the copies home: they are added to the gradients of
        ``weights``. With the policy "refetch", pass the output of the experts through
        :meth:`release` before the next layer replicates.

        Args:
            weights: tensors ``[H, ...]`` with home experts in dimension 0, of any dtype.
            plan: from this balancer.

        Returns:
            Tensors ``[S, ...]``, one per tensor of ``weights``; slots that the plan leaves empty
            hold zeros or the copy of an earlier plan.

        Raises:
            TypeError, ValueError: bad weights, or a plan of another balancer.
            RuntimeError: the slots hold copies that another layer's backward still needs.
        """
        return self.replicate_async(weights, plan).wait()

    def replicate_async(
        self, weights: WeightsOrList, plan: Plan, *, since: Tensor | None = None
    ) -> PendingReplicas:
        """As :meth:`replicate`, beside what is enqueued before ``wait()`` on the result.

        With transport ``nccl`` the copies travel on a stream of their own while the current stream
        computes, say, the home experts; ``wait`` makes the current stream wait, not the host. The
        other transports have done it when this returns.

        Args:
            weights: as for :meth:`replicate`.
            plan: from this balancer.
            since: a tensor of the same forward pass that gradients flow to, say the router's input.
                In backward the gradients of the copies travel beside the backward of all that was
                made since then and is not the experts' own; since this call if None.

        Returns:
            An object whose ``wait()`` returns what :meth:`replicate` does.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`replicate`.
        """
        self._check_plan(plan)
        per_rank = self._held_weights(weights, self.config.experts_per_rank, "weights", plan)
        for tensors in per_rank:
            for tensor in tensors:
                if not tensor.is_contiguous():
                    raise ValueError(
                        f"weights holds a tensor of shape {tuple(tensor.shape)} and strides "
                        f"{tensor.stride()}; expected contiguous tensors (tensor.contiguous())"
                    )
        self._debug_check("replicate", plan, per_rank[0])
        flat = [t for tensors in per_rank for t in tensors]
        size = len(per_rank[0])

        def group(guests: Sequence[Tensor]) -> WeightsOrList:
            grouped = [tuple(guests[i : i + size]) for i in range(0, len(guests), size)]
            return grouped if isinstance(weights, list) else grouped[0]

        if self.spare_slots == 0:
            return PendingReplicas(
                None, lambda: group([t.new_empty((0, *t.shape[1:])) for t in flat])
            )
        self._forget_unreleased(plan)
        twin = find_twin(plan, per_rank)
        # A recomputation whose forward pass took slots that cannot be told has its own: backward
        # fetches into those, and would not notice that what was saved aliases others.
        own = self.replica_policy == "keep" or (
            twin is None and in_backward() and bool(plan.usage.forward.alive())
        )
        lease = Lease(self.transport, self._pool(per_rank, own), plan, per_rank, twin)
        copies = Copies(lease, flat, since)
        plan.usage.current(in_backward()).leases.append(weakref.ref(lease))
        self._unreleased.setdefault((plan.token, in_backward()), []).append(copies)
        return PendingReplicas(lease, lambda: group(copies.tensors()))

    def release(self, outputs: TensorOrList, plan: Plan) -> TensorOrList:
        """Identity on the output of the experts that hands the spare slots to the next layer.

        Its backward, which runs before that of the experts, fetches the copies again. Call it with
        either policy, on every rank, also where the experts used no copy: it ties the copies to the
        output, so that their gradients, which are collective, are brought home by all ranks.
        Without it the slots stay taken until backward has run.

        Args:
            outputs: what the experts computed with the copies of ``plan``.
            plan: the plan given to :meth:`replicate`.
        """
        self._check_plan(plan)
        held = self._held(outputs, "outputs")
        usage = plan.usage.recomputed if in_backward() else plan.usage.forward
        leases = usage.alive()
        for lease in leases:
            lease.end_use()
        if leases:
            copies = self._unreleased.pop((plan.token, in_backward()), [])
            guests = [guest for c in copies for guest in c.tensors()]
            held = tuple(release(leases, guests, held, refetch=self.replica_policy == "refetch"))
        usage.released = True
        return self._like(outputs, list(held))

    def _forget_unreleased(self, plan: Plan) -> None:
        """Lets go of the oldest copies that were never released: their step has raised, perhaps.

        As many plans as can be in use at a time, with this one, are remembered.
        """
        most = self.slot_buffers if self.replica_policy == "refetch" else MAX_SLOT_BUFFERS
        others = [key for key in self._unreleased if key != (plan.token, in_backward())]
        for key in others[: max(len(others) + 1 - most, 0)]:
            del self._unreleased[key]

    def prefetch(self, outputs: TensorOrList, plan: Plan) -> TensorOrList:
        """Identity whose backward starts to fetch the copies again that :meth:`release` waits for.

        With transport ``nccl`` they travel beside all that backward does from here to the experts.
        Place it at least on the layer's own output, beside whose gradients they then travel; or
        further up, on hidden states that are computed later: ``slot_buffers=n`` lets it pass n - 1
        other plans. Optional, and any number of times, but on every rank alike: backward is
        collective. Nothing is fetched twice.

        Args:
            outputs: what was computed since :meth:`release`: the combined tokens, or the hidden
                states after a later layer. They must require gradients on all ranks or on none.
            plan: the plan given to :meth:`release`.

        Raises:
            RuntimeError: more plans replicated in between than there are ``slot_buffers`` for, or
                FSDP has freed the weights.
        """
        self._check_plan(plan)
        held = self._held(outputs, "outputs")
        usage = plan.usage.recomputed if in_backward() else plan.usage.forward
        leases = usage.alive()
        reached = torch.is_grad_enabled() and any(t.requires_grad for t in held)
        if self.replica_policy == "refetch" and leases and reached:
            self._debug_check("prefetch", plan)
            held = tuple(prefetch(leases, held))
        return self._like(outputs, list(held))

    def share_weights(self, weights: Sequence[Tensor]) -> None:
        """Moves home weights to memory that other ranks can read. Collective, once, at set-up.

        Transport ``nccl`` reads weights where they are, which takes such memory; for weights
        elsewhere it copies all home experts there before every transfer. Each tensor keeps its
        identity and its values and gets other storage (``tensor.data``), so call it after the model
        is on its device, and before anything that remembers storage, such as a CUDA graph.
        ``BalancedExperts`` does it by itself. Other transports need nothing.

        Args:
            weights: contiguous tensors or parameters ``[H, ...]``, in the same order on all ranks.

        Raises:
            TypeError, ValueError: what is given is not contiguous tensors with H rows.
        """
        rows = self.config.experts_per_rank * len(self.held_ranks)
        for tensor in weights:
            check_type(tensor, Tensor, "a tensor of weights")
            if tensor.dim() < 1 or tensor.shape[0] != rows or not tensor.is_contiguous():
                raise ValueError(
                    f"weights holds a tensor of shape {tuple(tensor.shape)}; expected contiguous "
                    f"tensors with {rows} experts in dimension 0"
                )
        with torch.no_grad():
            self.transport.share(list(weights))

    def close(self) -> None:
        """Frees what the transport holds; collective. Nothing may be called on this after it.

        Only transport ``nccl`` holds anything that outlives the balancer. A process may also end
        without this.
        """
        self.transport.close()

    def reduce_grads(self, slot_grads: WeightsOrList, plan: Plan, out: WeightsOrList) -> None:
        """Adds the gradients of all copies to the gradients at home, and zeroes them. Collective.

        For trainers that accumulate gradients themselves (Megatron's ``main_grad``). Sums are
        formed in float32 (float64 for float64) in an order that the plan alone decides, and rounded
        once, so the result is the same from run to run.

        Args:
            slot_grads: tensors ``[S, ...]``: gradients of the copies; zero where a slot is empty.
            plan: from this balancer.
            out: tensors ``[H, ...]``, changed in place.

        Raises:
            TypeError, ValueError: tensors of other shapes or dtypes, or a plan of another balancer.
        """
        self._check_plan(plan)
        grads = self._held_weights(slot_grads, self.spare_slots, "slot_grads", plan)
        homes = self._held_weights(out, self.config.experts_per_rank, "out", plan)
        for rank_grads, rank_homes in zip(grads, homes, strict=True):
            if len(rank_grads) != len(rank_homes):
                raise ValueError(
                    f"{len(rank_grads)} slot_grads for {len(rank_homes)} tensors in "
                    "out; expected one for each"
                )
            for grad, home in zip(rank_grads, rank_homes, strict=True):
                if grad.shape[1:] != home.shape[1:]:
                    raise ValueError(
                        f"slot_grads {tuple(grad.shape)} do not belong to out "
                        f"{tuple(home.shape)}: expert shapes differ"
                    )
                if not home.is_contiguous() or not home.is_floating_point():
                    raise ValueError(
                        "out must be contiguous floating-point tensors; it is changed in place"
                    )
        self._debug_check("reduce_grads", plan, (*grads[0], *homes[0]))
        if self.spare_slots > 0:
            with torch.no_grad():
                self.transport.reduce_grads(plan, grads, homes)
                for tensors in grads:
                    for grad in tensors:
                        grad.zero_()

    def _debug_check(
        self, call: str, plan: Plan | None = None, tensors: Sequence[Tensor] = ()
    ) -> None:
        """With ``TOPOEP_DEBUG=1``: raises on all ranks unless all make the same call."""
        if self._debug and not in_backward():
            check_call(call, plan, self.transport, tensors)

    # ---- checks --------------------------------------------------------------------------------

    def _check_plan(self, plan: Plan) -> None:
        if check_type(plan, Plan, "plan").owner is not self:
            made_by = "topoep.solve" if plan.owner is None else "another Balancer"
            raise ValueError(
                f"the plan was made by {made_by}; use this balancer's plan() or plan_from_counts()"
            )

    def _held(self, value: TensorOrList, name: str) -> tuple[Tensor, ...]:
        """The argument as one tensor per held rank."""
        if self.transport.name == "local":
            if not isinstance(value, (list, tuple)) or len(value) != len(self.held_ranks):
                raise ValueError(
                    f"{name}: transport 'local' simulates {len(self.held_ranks)} ranks and takes a "
                    "list with a tensor for each"
                )
            return tuple(value)
        return (check_type(value, Tensor, name),)

    def _like(self, given: TensorOrList, result: list[Tensor]) -> TensorOrList:
        return result[0] if isinstance(given, Tensor) else result

    def _held_weights(
        self, value: WeightsOrList, rows: int, name: str, plan: Plan
    ) -> list[Weights]:
        """The argument as a tuple of tensors per held rank, checked."""
        if self.transport.name == "local":
            if not isinstance(value, list) or len(value) != len(self.held_ranks):
                raise ValueError(
                    f"{name}: transport 'local' simulates {len(self.held_ranks)} ranks and takes a "
                    "list with a tuple of tensors for each"
                )
            per_rank = [tuple(tensors) for tensors in value]
        else:
            if not isinstance(value, (tuple, list)):
                raise TypeError(f"{name} is a {type(value).__name__}; expected a tuple of tensors")
            per_rank = [cast(Weights, tuple(value))]
        for tensors in per_rank:
            if not 1 <= len(tensors) <= MAX_TENSORS:
                raise ValueError(
                    f"{name} has {len(tensors)} tensors; expected 1 to {MAX_TENSORS} "
                    "(kMaxRowParts)" + ("; call replicate again for the rest" if tensors else "")
                )
            for tensor in tensors:
                if not isinstance(tensor, Tensor):
                    raise TypeError(
                        f"{name} holds a {type(tensor).__name__}; expected torch.Tensors"
                    )
                if tensor.dim() < 1 or tensor.shape[0] != rows:
                    raise ValueError(
                        f"{name} holds a tensor of shape {tuple(tensor.shape)}; expected "
                        f"{rows} experts in dimension 0"
                    )
                if tensor.device != plan.counts.device:
                    raise ValueError(
                        f"{name} holds a tensor on {tensor.device}; the plan is on "
                        f"{plan.counts.device}"
                    )
        return per_rank

    def _pool(self, weights: Sequence[Weights], own: bool) -> BufferPool:
        """The slots for weights of this shape: shared, or new ones of the caller's own."""
        like = [tuple(t.new_empty((0, *t.shape[1:])) for t in tensors) for tensors in weights]

        def make() -> SlotBuffer:
            return SlotBuffer(like, self.spare_slots)

        if own:
            return BufferPool(make, 1)
        key = shapes_of(weights)
        if key not in self._pools:
            self._pools[key] = BufferPool(make, self.slot_buffers)
        return self._pools[key]

    def _fingerprint(self, solver: str, replica_policy: str) -> dict[str, int]:
        """The values of ``_FIELDS`` on this rank, as integers."""
        packed = [candidate.pack() for candidate in self._candidates]
        objective = self.config.objective
        cost_model = objective.cost_model if isinstance(objective, Time) else None
        return {
            "valid": 1,
            "version": _digest(__version__),
            "debug": int(self._debug),
            "num_experts": self.num_experts,
            "spare_slots": self.spare_slots,
            "node_of_rank": _digest(self.topology.node_of_rank),
            # Kind, tolerance and weight; the cost model behind them is a field of its own.
            "objective": _digest(objective.to_ints()[:3]),
            "cost_model": _digest(cost_model and cost_model.to_ints()),
            "solver": SOLVERS.index(solver),
            "candidates": _digest(packed),
            "replica_policy": REPLICA_POLICIES.index(replica_policy),
        }


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _check_agreement(values: Tensor) -> None:
    """Raises unless every row (rank) of the gathered fields is the same."""
    for column, name in enumerate(_FIELDS):
        mine = values[:, column].tolist()
        other = next((rank for rank, value in enumerate(mine) if value != mine[0]), None)
        if name == "valid" and 0 in mine:
            raise ValueError(
                f"rank {mine.index(0)} was given arguments that are not valid, see its error; no "
                "rank can go on without it"
            )
        if other is not None:
            shown = f" ({mine[0]} and {mine[other]})" if name in _PLAIN_FIELDS else ""
            raise ValueError(
                f"ranks 0 and {other} of the group disagree on {name}{shown}; give every rank the "
                "same configuration"
            )


def _check_ids(ids: Tensor, num_ranks: int) -> None:
    if check_type(ids, Tensor, "topk_ids").dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"topk_ids has dtype {ids.dtype}; expected int32 or int64 (ids.to(torch.int64))"
        )
    if ids.dim() != 2:
        raise ValueError(f"topk_ids has shape {tuple(ids.shape)}; expected [tokens, top_k]")
    if not 1 <= ids.shape[1] <= MAX_TOP_K:
        raise ValueError(f"topk_ids has top_k={ids.shape[1]}; expected 1 to {MAX_TOP_K} (kMaxTopK)")
    if ids.numel() * num_ranks > MAX_TOKENS:
        raise ValueError(
            f"{ids.numel()} routed ids on each of {num_ranks} ranks may exceed {MAX_TOKENS} "
            "(kMaxTokens), the most that one plan counts; use smaller microbatches"
        )
