# SPDX-License-Identifier: Apache-2.0
"""Finding the plan of the forward pass again when activation checkpointing runs it a second time.

A recomputation must use the plan of the forward pass: making another one would be a collective in
the middle of backward, and any difference in routing would give other shapes. The plan is found
among those whose backward is still to come, by the routed ids, which a recomputation repeats.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from topoep.plan import Plan


def in_backward() -> bool:
    """Whether autograd is running: then a forward call is the recomputation of a checkpoint."""
    return torch._C._current_graph_task_id() != -1


class PlanHistory:
    """The plans of one layer (or of one balancer's direct calls) that backward may still need."""

    def __init__(self) -> None:
        self._plans: list[weakref.ref[Plan]] = []
        self._marked: weakref.ref[Plan] | None = None

    def add(self, plan: Plan) -> None:
        """Remembers a plan for as long as something else (autograd, the caller) keeps it."""
        self._plans = [ref for ref in self._plans if _is_open(ref())]
        self._plans.append(weakref.ref(plan))

    def find(self, topk_ids: tuple[Tensor, ...]) -> Plan:
        """The plan that was made for these ids. Comparing them waits for the device on a GPU.

        Raises:
            RuntimeError: no plan, or several different ones, were made for these ids.
        """
        # Selective checkpointing replays the ops of the forward pass and refuses others.
        with _disable_current_modes():
            return self._find(topk_ids)

    def _find(self, topk_ids: tuple[Tensor, ...]) -> Plan:
        marked = self._marked() if self._marked is not None else None
        if marked is not None and _is_open(marked) and _same_ids(marked.topk_ids, topk_ids):
            return marked
        matches = [
            plan
            for ref in self._plans
            if (plan := ref()) is not None and _is_open(plan) and _same_ids(plan.topk_ids, topk_ids)
        ]
        if not matches:
            raise RuntimeError(_ROUTED_DIFFERENTLY)
        if len(matches) > 1:
            raise RuntimeError(
                f"{len(matches)} plans in flight were made for the same routed ids (those of a "
                "rank without tokens, perhaps), so this recomputation cannot tell which is its "
                "own. Pass context_fn=balancer.checkpoint_contexts to torch.utils.checkpoint, or "
                "plan outside of the checkpointed function and pass the plan in"
            )
        return matches[0]

    def mark(self, y: Tensor, plan: Plan) -> Tensor:
        """The tensor itself; its backward says first that this plan's layer is next.

        A hook, not an autograd function: that would return a view, on which FSDP2 cannot rely.
        """
        if y.requires_grad:
            y.register_hook(lambda grad: self._set_marked(plan))
        return y

    def _set_marked(self, plan: Plan) -> None:
        self._marked = weakref.ref(plan)


class Replay:
    """Hands plans from a forward pass to its recomputation in order."""

    def __init__(self) -> None:
        self._recording: list[Plan] | None = None
        self._replaying: Iterator[Plan] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The pair that ``torch.utils.checkpoint(context_fn=..)`` wants."""
        plans: list[Plan] = []
        return self._record(plans), self._replay(plans)

    def record(self, plan: Plan) -> None:
        """Notes a plan of the forward pass, if one is being recorded."""
        if self._recording is not None:
            self._recording.append(plan)

    def next_plan(self, topk_ids: tuple[Tensor, ...]) -> Plan | None:
        """The next plan of the recorded pass, or None outside of a recomputation.

        Raises:
            RuntimeError: the ids are not those of the forward pass. On a GPU this is found without
                waiting, and ends the process as a device-side assertion.
        """
        if self._replaying is None:
            return None
        plan = next(self._replaying, None)
        if plan is None or [i.shape for i in plan.topk_ids] != [i.shape for i in topk_ids]:
            raise RuntimeError(_ROUTED_DIFFERENTLY)
        for before, now in zip(plan.topk_ids, topk_ids, strict=True):
            if now.is_cuda:
                torch._assert_async((before == now).all(), _ROUTED_DIFFERENTLY)
            elif not torch.equal(before, now):
                raise RuntimeError(_ROUTED_DIFFERENTLY)
        return plan

    @contextmanager
    def _record(self, plans: list[Plan]) -> Iterator[None]:
        outer, self._recording = self._recording, plans
        try:
            yield
        finally:
            self._recording = outer

    @contextmanager
    def _replay(self, plans: list[Plan]) -> Iterator[None]:
        outer, self._replaying = self._replaying, iter(plans)
        try:
            yield
        finally:
            self._replaying = outer


_ROUTED_DIFFERENTLY = (
    "a recomputation in backward routes tokens as no forward pass in flight did. Routing must be "
    "deterministic (jitter in the router needs preserve_rng_state=True), and plans are kept by the "
    "autograd graph, so use torch.utils.checkpoint with use_reentrant=False"
)


def _is_open(plan: Plan | None) -> bool:
    return plan is not None and not plan.usage.backward_done


def _same_ids(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(
        x is y or (x.shape == y.shape and torch.equal(x, y)) for x, y in zip(a, b, strict=True)
    )
