# SPDX-License-Identifier: Apache-2.0
"""The interface of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from topoep import ops
from topoep.plan import Plan, PlanConfig

#: The weight tensors of one rank's experts, experts in dimension 0.
Weights = tuple[Tensor, ...]


class Pending:
    """Something that was started; :meth:`wait` makes the current stream wait for it, or the host.

    Args:
        wait: called by the first :meth:`wait`, None if there is nothing to wait for.
    """

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Waits; a second call does nothing."""
        if self._wait is not None:
            self._wait()
            self._wait = None


class Transport(ABC):
    """Moves counts, weights and gradients between the ranks of one group.

    A transport works for the ranks that this process *holds*: one rank for a process group, all of
    them when ranks are simulated. Arguments that belong to a rank come as a list with one entry per
    held rank, in the order of ``held``.

    Every method that communicates issues a fixed number of collectives in a fixed order, whatever
    the plan: a rank without copies takes part with nothing to send.
    """

    #: Name for messages and ``doctor``.
    name: str
    #: The ranks whose data this process holds, ascending.
    held: tuple[int, ...]

    @abstractmethod
    def gather_config(self, values: Tensor) -> Tensor:
        """Every rank's values of an int64 ``[F]`` CPU tensor: ``[R, F]``. Used once, at set-up."""

    def configure(self, config: PlanConfig) -> None:  # noqa: B027  (an optional step)
        """Called once, when all ranks agree on the configuration. May be collective."""

    def close(self) -> None:  # noqa: B027
        """Frees what the transport holds; nothing may be called after it. May be collective."""

    def solve(
        self,
        counts: Tensor,
        topology: Tensor,
        spare_slots: int,
        candidates: Sequence[int],
        objective: Sequence[int],
        rank: int,
    ) -> tuple[Tensor, ...]:
        """As :func:`topoep.ops.solve`.

        A transport may return one tensor more, which becomes ``plan.lists``: what it derives from
        the plan for itself, in the same launch.
        """
        return ops.solve(counts, topology, spare_slots, candidates, objective, rank)

    def share(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027
        """Moves tensors to memory that other ranks can read, where that helps. May be collective.

        Each tensor keeps its identity and gets other storage (``tensor.data``).
        """

    @abstractmethod
    def exchange(self, counts: Sequence[Tensor]) -> Tensor:
        """The counts of all ranks, int32 ``[R, E]``, from each held rank's int32 ``[E]``."""

    @abstractmethod
    def all_to_all(
        self,
        rows: Sequence[Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """Sends consecutive rows of each held rank's ``[n, ...]`` tensor to the ranks in order.

        Returns each held rank's received rows, in the order of the sending ranks. Differentiable:
        the gradient goes back along the same splits.
        """

    def start_all_to_all(
        self,
        rows: Sequence[Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
    ) -> Callable[[], list[Tensor]]:
        """As :meth:`all_to_all`, under way until the result is called, where possible.

        Several may be under way; call their results in the order in which they were started. In
        backward the gradients travel in the same way.
        """
        received = self.all_to_all(rows, send_splits, recv_splits)
        return lambda: received

    @abstractmethod
    def replicate(self, plan: Plan, weights: Sequence[Weights], out: Sequence[Weights]) -> None:
        """Copies weights ``[H, ...]`` of hot experts into the spare slots ``[S, ...]`` of ``out``.

        Bytes are moved as they are, whatever the dtype. Empty slots keep what they hold.
        """

    def start_replicate(
        self, plan: Plan, weights: Sequence[Weights], out: Sequence[Weights]
    ) -> Pending:
        """As :meth:`replicate`, beside what the caller enqueues until it waits, where possible.

        Transports that move data on the host, or need lists there, are done when this returns.
        """
        self.replicate(plan, weights, out)
        return Pending()

    def gradient_stream(self) -> AbstractContextManager[object]:
        """Makes the stream current, if there is one, on which gradients of copies come home."""
        return nullcontext()

    def mark(self) -> Pending:
        """What has been enqueued on the current stream; a stream may wait for it later."""
        return Pending()

    @abstractmethod
    def reduce_grads(
        self, plan: Plan, slot_grads: Sequence[Weights], out: Sequence[Weights]
    ) -> None:
        """Adds the gradients of all copies, ``[S, ...]``, to ``out``, ``[H, ...]``, at the homes.

        In float32 (float64 for float64): first home, then the copies in the home's node in rank
        order, then one partial sum per other node in node order, each of which adds its ranks in
        order; one rounding at the end.
        """
