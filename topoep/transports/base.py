# SPDX-License-Identifier: Apache-2.0
"""The interface of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from topoep.plan import Plan

#: The weight tensors of one rank's experts, experts in dimension 0.
Weights = tuple[Tensor, ...]


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

    @abstractmethod
    def replicate(self, plan: Plan, weights: Sequence[Weights], out: Sequence[Weights]) -> None:
        """Copies weights ``[H, ...]`` of hot experts into the spare slots ``[S, ...]`` of ``out``.

        Bytes are moved as they are, whatever the dtype. Empty slots keep what they hold.
        """

    @abstractmethod
    def reduce_grads(
        self, plan: Plan, slot_grads: Sequence[Weights], out: Sequence[Weights]
    ) -> None:
        """Adds the gradients of all copies, ``[S, ...]``, to ``out``, ``[H, ...]``, at the homes.

        In float32 (float64 for float64): first home, then the copies in the home's node in rank
        order, then one partial sum per other node in node order, each of which adds its ranks in
        order; one rounding at the end.
        """
