# SPDX-License-Identifier: Apache-2.0
"""Copies of hot experts next to the home experts of one layer, and their gradients.

Home experts are computed by Megatron's own module on the first rows, copies by a second module of
the same class on the rest. The second module has no parameters: before each call the fetched
weights are put in their places. It is not part of the model, so checkpoints, optimizers and
gradient buckets do not see it.

Gradients come home in three steps, for every way in which Megatron forms them:

1. The weights of the copies reach their module through a node of the autograd graph that also
   depends on every home parameter. Its backward runs after the copies' weight gradients are there,
   either returned by autograd or added to the ``main_grad`` that the copies were given, and sends
   them home.
2. A parameter's gradient is accumulated only after that node has run, because the parameter is an
   input of it. A hook on the parameter, which runs before the accumulation and before
   DistributedDataParallel counts the parameter as ready, adds what has arrived: to ``main_grad``
   where there is one, otherwise to the gradient. It is not added earlier because the fused weight
   gradient of a first microbatch overwrites ``main_grad`` instead of adding to it.
3. With delayed weight gradients both happen in ``backward_dw`` instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from topoep.adapters.megatron.checks import check_not_sharded
from topoep.adapters.megatron.routing import LayerRouting, Routed
from topoep.adapters.megatron.rows import join_rows, split_rows
from topoep.adapters.megatron.slots import RowsLease, SlotMemory, copied_homes, slot_memory
from topoep.adapters.megatron.tables import Place, weight_table
from topoep.plan import Plan
from topoep.recompute import in_backward
from topoep.replicas import release


class LayerCopies:
    """The copies of one layer.

    Args:
        routing: where the dispatcher leaves the plan, and whose balancer made it.
        experts: Megatron's module of the home experts.
        guests: a module of the same class for S experts, whose parameters are taken out; None if
            there are no spare slots.
    """

    def __init__(self, routing: LayerRouting, experts: Any, guests: Any | None) -> None:
        self._balancer = routing.balancer
        self._routing = routing
        self._guests = guests
        self._home = weight_table(experts)
        self._guest_places = [] if guests is None else weight_table(guests)
        for place in (place for kind in self._guest_places for place in kind):
            place.clear()
        for module in [] if guests is None else guests.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = False  # slot gradients start at zero and are added to
        config = experts.config
        self._fused: bool = config.gradient_accumulation_fusion
        self._memory: SlotMemory | None = None  # of the last forward pass
        self._hooked: set[Tensor] = set()
        self._delayed = guests is not None and self._hook_delayed(config)
        self._delayed_plans: deque[tuple[Plan, list[int]]] = deque()

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self,
        compute: Callable[..., tuple[Tensor, Tensor | None]],
        hidden: Tensor,
        tokens_per_expert: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes home experts, then copies.

        Args:
            compute: the module's own forward, for home experts.
            hidden: ``[rows, D]``, grouped by local physical expert.
            tokens_per_expert: integers ``[H + S]``.
            probs: ``[rows]``.
        """
        routed, self._routing.current = self._routing.current, None
        if self._guests is None:
            return compute(hidden, tokens_per_expert, probs)
        assert routed is not None
        slots = self._balancer.config.experts_per_rank, self._balancer.spare_slots
        home_counts, guest_counts = tokens_per_expert.split(slots)
        home_rows = int(home_counts.sum())
        home_hidden, guest_hidden = split_rows(hidden, home_rows)
        home_probs, guest_probs = split_rows(probs, home_rows)
        lease, guests = self._fetch(routed)
        try:
            home_y, bias = compute(home_hidden, home_counts, home_probs)
            lease.wait()
            if self._guests.training != self._home[0][0].owner.training:
                self._guests.train(self._home[0][0].owner.training)
            guest_y, _ = self._guests(guest_hidden, guest_counts, guest_probs)
            self._leave_places()
            y = join_rows(home_y, guest_y)
            lease.end_use()
            (y,) = release([lease], guests, [y], self._balancer.replica_policy == "refetch")
        except BaseException:
            # The step may be given up and the next one tried: nothing may hold on to the slots.
            self._leave_places()
            lease.released = True
            raise
        return y, bias

    def _fetch(self, routed: Routed) -> tuple[RowsLease, tuple[Tensor, ...]]:
        """Puts the weights of the plan's copies into the places of the guests. Collective.

        They are there after ``wait()`` on the lease.
        """
        homes = [[place.get() for place in kind] for kind in self._home]
        trainable = [_all_or_none(kind, rows) for kind, rows in zip(self._home, homes, strict=True)]
        self._finish_param_gather()
        memory = self._memory = slot_memory(self._balancer, homes)
        if memory.arrived and not in_backward():
            raise RuntimeError(
                "gradients of copies were not taken over by the parameters they belong to; run "
                "backward over all parameters of the experts (loss.backward())"
            )
        lease = RowsLease(self._balancer, memory, routed, homes)
        if torch.is_grad_enabled():
            self._hook_parameters(homes, trainable)
        flat = [row for rows in homes for row in rows]
        check_not_sharded(flat[0])
        guests = _Fetch.apply(self, lease, trainable, *flat)
        places = [place for kind in self._guest_places for place in kind]
        for place, guest in zip(places, guests, strict=True):
            place.put(guest)
        if self._fused and any(trainable) and torch.is_grad_enabled():
            self._give_main_grads(memory)
        return lease, guests

    def _give_main_grads(self, memory: SlotMemory) -> None:
        for kind, grads in zip(self._guest_places, memory.grads[0], strict=True):
            if not self._adds_to_main_grad(kind):
                continue
            for place, grad in zip(kind, grads, strict=True):
                guest = place.get()
                guest.main_grad = grad  # type: ignore[attr-defined]
                guest.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def _leave_places(self) -> None:
        """Lets go of the copies, which autograd keeps for as long as it needs them."""
        for kind in self._guest_places:
            for place in kind:
                # A delayed weight gradient is formed later, and left at what is in place then.
                rest = place.get().detach() if self._delayed else None
                place.put(rest)

    def _finish_param_gather(self) -> None:
        """Waits for parameters that Megatron's optimizer gathers while forward runs.

        DistributedDataParallel waits in a hook before the module that uses them; copies are sent
        before that.
        """
        # In the same order on all ranks: the hook may start the next gather.
        for owner in dict.fromkeys(place.owner for kind in self._home for place in kind):
            for hook in owner._forward_pre_hooks.values():
                if "DistributedDataParallel" in getattr(hook, "__qualname__", ""):
                    hook(owner, ())

    # ---- backward ------------------------------------------------------------------------------

    def bring_home(
        self, lease: RowsLease, trainable: list[bool], grads: Sequence[Tensor | None]
    ) -> None:
        """Sends the gradients of the copies home. Collective; called by autograd."""
        plan = lease.plan
        plan.usage.backward_done = True
        lease.end_backward()
        kinds = [k for k, wanted in enumerate(trainable) if wanted]
        if self._delayed:
            self._delayed_plans.append((plan, kinds))
            return
        for k in kinds:
            first = k * lease.memory.spare_slots
            self._take_grads(lease.memory, k, grads[first : first + lease.memory.spare_slots])
        self._reduce(lease.memory, plan, kinds)

    def _adds_to_main_grad(self, kind: list[Place]) -> bool:
        """Whether the gradients of a kind of tensors bypass autograd."""
        if not self._fused or not kind[0].name.startswith("weight"):
            return False
        return getattr(self._home[0][0].get(), "main_grad", None) is not None

    def _take_grads(self, memory: SlotMemory, kind: int, grads: Sequence[Tensor | None]) -> None:
        """Collects gradients of the copies, one per slot, where they are not there already."""
        if self._adds_to_main_grad(self._guest_places[kind]):
            return
        for target, grad in zip(memory.grads[0][kind], grads, strict=True):
            target.zero_() if grad is None else target.copy_(grad)

    def _reduce(self, memory: SlotMemory, plan: Plan, kinds: list[int]) -> None:
        for parameter, sum_ in memory.arrived.items():
            # A layer that is used several times in one graph: its parameters wait for all uses.
            memory.arrived[parameter] = sum_.clone()
        slot_grads, home_grads = (tuple(grads[k] for k in kinds) for grads in memory.grads)
        homes = copied_homes(self._balancer, plan)
        with torch.no_grad():
            for grads in home_grads:
                for local in homes:
                    grads[local].zero_()
            self._balancer.transport.reduce_grads(plan, [slot_grads], [home_grads])
            for grads in slot_grads:
                grads.zero_()
        for k, grads in zip(kinds, home_grads, strict=True):
            for local in homes:
                parameter = self._home[k][local].get()
                earlier = memory.arrived.get(parameter)
                memory.arrived[parameter] = (
                    grads[local] if earlier is None else earlier.add_(grads[local])
                )

    def _hook_parameters(self, homes: list[list[Tensor]], trainable: list[bool]) -> None:
        for rows, wanted in zip(homes, trainable, strict=True):
            for parameter in rows if wanted and not self._delayed else ():
                if parameter not in self._hooked:
                    self._hooked.add(parameter)
                    parameter.register_hook(self._hook(parameter))

    def _hook(self, parameter: Tensor) -> Callable[[Tensor], Tensor | None]:
        def add_arrived(grad: Tensor) -> Tensor | None:
            assert self._memory is not None
            sum_ = self._memory.arrived.pop(parameter, None)
            if sum_ is None:
                return None
            main_grad = getattr(parameter, "main_grad", None)
            if main_grad is None:
                return grad + sum_.to(grad.dtype)
            main_grad.add_(sum_)
            return None

        return add_arrived

    # ---- delayed weight gradients --------------------------------------------------------------

    def _hook_delayed(self, config: Any) -> bool:
        """Registers with the modules that delay weight gradients; says whether there are any."""
        if not (config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad):
            return False
        places: dict[int, list[Place]] = {}
        for place in (place for kind in self._home for place in kind):
            if hasattr(place.owner, "register_wgrad_accumulation_and_reduce_hooks"):
                places.setdefault(id(place.owner), []).append(place)
        for owned in places.values():
            owner: Any = owned[0].owner
            if getattr(owner, "wgrad_accumulation_and_reduce_hooks", None):
                raise ValueError(
                    "with delayed weight gradients, call enable before the model is wrapped in "
                    "DistributedDataParallel: gradients of copies must be added before it reduces"
                )
            owner.register_wgrad_accumulation_and_reduce_hooks(self._after_wgrad(owned))
        return bool(places)

    def _after_wgrad(self, owned: list[Place]) -> Callable[[], None]:
        def add_arrived() -> None:
            arrived = {} if self._memory is None else self._memory.arrived
            for place in owned:
                parameter = place.get()
                sum_ = arrived.pop(parameter, None)
                if sum_ is not None:
                    main_grad = getattr(parameter, "main_grad", None)
                    target = parameter.grad if main_grad is None else main_grad
                    assert target is not None
                    target.add_(sum_)

        return add_arrived

    def backward_dw(self, compute: Callable[[], None]) -> None:
        """The delayed weight gradients: those of the copies first, which are then sent home."""
        if self._delayed_plans:
            plan, kinds = self._delayed_plans.popleft()
            memory = self._memory
            assert self._guests is not None
            assert memory is not None
            self._guests.backward_dw()
            for k in kinds:
                guests = [place.get() for place in self._guest_places[k]]
                self._take_grads(memory, k, [guest.grad for guest in guests])
                for guest in guests:
                    guest.grad = None
            self._reduce(memory, plan, kinds)
        compute()


class BalancedExpertsModule:
    """Mixed into the class of a layer's experts module."""

    topoep: LayerCopies

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Any:
        """As upstream, for home experts and copies."""
        compute = super().forward  # type: ignore[misc]
        return self.topoep.forward(compute, hidden, tokens_per_expert, probs)

    def backward_dw(self) -> None:
        """As upstream, for home experts and copies."""
        self.topoep.backward_dw(super().backward_dw)  # type: ignore[misc]


class _Fetch(torch.autograd.Function):
    """Home parameters -> weights of the copies, one tensor per kind and slot."""

    @staticmethod
    def forward(
        ctx: Any, copies: LayerCopies, lease: RowsLease, trainable: list[bool], *homes: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.copies, ctx.lease, ctx.trainable = copies, lease, trainable
        ctx.set_materialize_grads(False)
        (kinds,) = lease.take()
        # .data: the same memory without being views of one another
        guests = [[slot.data for slot in slots] for slots in kinds]
        frozen = [g for kind, t in zip(guests, trainable, strict=True) if not t for g in kind]
        ctx.mark_non_differentiable(*frozen)
        return tuple(guest for kind in guests for guest in kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.copies.bring_home(ctx.lease, ctx.trainable, grads)
        return (None,) * len(ctx.needs_input_grad)


def _all_or_none(kind: list[Place], rows: list[Tensor]) -> bool:
    """Whether the experts' tensors of one kind are trained."""
    trained = [row.requires_grad for row in rows]
    if any(trained) and not all(trained):
        raise ValueError(
            f"{kind[0].name} of some experts of a layer is frozen and of others is not; copies "
            "need either all or none of them frozen"
        )
    return all(trained)


def mixed(instance_class: type, mixin: type) -> type:
    """The class with a mixin in front of it."""
    return type(f"Balanced{instance_class.__name__}", (mixin, instance_class), {})
