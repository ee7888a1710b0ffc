# SPDX-License-Identifier: Apache-2.0
"""What the data plane of transport ``nccl`` is made of, apart from torch.distributed.

:class:`Plane` is the interface between the transport and what runs its kernels: NCCL on GPUs
(:class:`NcclPlane`), or a stand-in in tests.
"""

from __future__ import annotations

import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topoep import ops
from topoep.plan import Plan, PlanConfig

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_COMM_SMS = 24
# Of TOPOEP_WEIGHT_COPIES. Loads until a GPU has measured both (benchmarks/gpu_check.py).
BULK_PIECE_BYTES = {"loads": 0, "bulk": 16 * 1024}
GIN_CONTEXTS = 4  # a wish: NCCL may give another number


@dataclass(frozen=True)
class PlaneSettings:
    """Sizes of the rings and kernels; csrc/core/data_plane.h has what they mean.

    Args:
        comm_sms: thread blocks of a transfer kernel, each of which takes an SM while it runs.
        timeout_s: seconds without progress after which a wait on the GPU gives up.
        max_relays: experts that a node may relay to holders inside it, 0 to 32; 0: none.
        bulk_piece_bytes: weights that come to rest in this node are copied by the bulk-copy engine
            of sm_90 in pieces of so many bytes, a multiple of 128, at most 32 KiB; 0: by loads.
    """

    comm_sms: int = DEFAULT_COMM_SMS
    timeout_s: float = DEFAULT_TIMEOUT_S
    chunk_bytes: int = 256 * 1024
    tile_bytes: int = 64 * 1024
    ring_slots: int = 8
    staging_slots: int = 8
    workers: int = 2
    max_relays: int = 32
    threads: int = 512
    bulk_piece_bytes: int = 0

    @classmethod
    def from_environment(cls, comm_sms: int = DEFAULT_COMM_SMS) -> PlaneSettings:
        """With ``TOPOEP_TIMEOUT_S`` and ``TOPOEP_WEIGHT_COPIES``.

        Raises:
            ValueError: one of them is not valid.
        """
        return cls(
            comm_sms=comm_sms,
            timeout_s=timeout_from_environment(),
            bulk_piece_bytes=bulk_piece_bytes_from_environment(),
        )

    def roles(self, num_nodes: int) -> list[int]:
        """Senders, pullers and threads per block; one block is the agent of the network.

        Raises:
            ValueError: too few SMs for one block of each kind.
        """
        # A power of two, so that it divides the staging slots.
        senders = 0 if num_nodes == 1 else 4 if self.comm_sms >= 12 else 1
        pullers = self.comm_sms - 1 - senders
        if pullers < 1:
            raise ValueError(
                f"comm_sms={self.comm_sms}; expected at least {2 + senders}: one block that "
                "watches the network, and those that send and fetch"
            )
        return [senders, pullers, self.threads]

    def config(self, config: PlanConfig, rank: int) -> list[int]:
        """The numbers that the ops take; nodes must have equal sizes."""
        topology = config.topology
        node = topology.node_of_rank[rank]
        members = topology.ranks_of_node(node)
        return [
            topology.num_ranks,
            topology.num_nodes,
            len(members),
            config.num_experts,
            config.spare_slots,
            rank,
            node,
            members.index(rank),
            self.chunk_bytes,
            self.tile_bytes,
            self.ring_slots,
            self.staging_slots,
            self.workers,
            self.max_relays,
            self.bulk_piece_bytes,
        ]


def timeout_from_environment() -> float:
    """``TOPOEP_TIMEOUT_S``, or the default.

    Raises:
        ValueError: it is no positive number.
    """
    text = os.environ.get("TOPOEP_TIMEOUT_S")
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86400:
        raise ValueError(
            f"TOPOEP_TIMEOUT_S={text!r}; expected a number of seconds above 0 and up to 86400, "
            f"such as {DEFAULT_TIMEOUT_S:g}"
        )
    return seconds


def bulk_piece_bytes_from_environment() -> int:
    """What ``TOPOEP_WEIGHT_COPIES`` asks for: ``loads``, the default, or ``bulk``.

    Raises:
        ValueError: it is something else.
    """
    text = os.environ.get("TOPOEP_WEIGHT_COPIES", "loads")
    if text not in BULK_PIECE_BYTES:
        raise ValueError(
            f"TOPOEP_WEIGHT_COPIES={text!r}; expected {' or '.join(BULK_PIECE_BYTES)}: copies by "
            "loads of all threads, or by the bulk-copy engine of sm_90 and later"
        )
    return BULK_PIECE_BYTES[text]


def bulk_copies_problem(capability: tuple[int, int]) -> str:
    """Why a GPU of this compute capability cannot copy as ``TOPOEP_WEIGHT_COPIES`` asks, or ""."""
    if bulk_piece_bytes_from_environment() == 0 or capability >= (9, 0):
        return ""
    return (
        f"TOPOEP_WEIGHT_COPIES=bulk needs a GPU of compute capability 9.0 or later, this one has "
        f"{capability[0]}.{capability[1]}; leave it at 'loads'"
    )


# ErrorRecord of csrc/core/data_plane.h: waited, kernel, rank, block, from, what; wanted, seen,
# generation.
_RECORD = struct.Struct("=6I3Q")
_KERNELS = ("the exchange of counts", "replicate", "reduce_grads")
# By Waited of csrc/core/data_plane.h: what was waited for, and what the field `what` counts.
_WAITS = (
    ("nothing", "unused"),
    ("the token counts of a rank", "row"),
    ("token counts over the network", "node"),
    ("a receiver to read an earlier chunk (credit)", "ring slot"),
    ("a chunk over the network", "ring slot"),
    ("word that a chunk can be read in the node", "from node"),
    ("a rank of the node to read a chunk", "from node"),
    ("the gradients of a copy to be final", "expert"),
    ("a reader of this rank's gradients", "place in the node"),
    ("no wait: a signal had a value that cannot be (lost, doubled or foreign)", "ring slot"),
)


def describe_error(record: bytes, timeout_s: float) -> str | None:
    """The error record of a rank in words; None if nothing has failed."""
    waited, kernel, rank, block, source, what, wanted, seen, generation = _RECORD.unpack(record)
    if waited == 0:
        return None
    wait, unit = _WAITS[waited] if waited < len(_WAITS) else (f"reason {waited}", "number")
    where = _KERNELS[kernel] if kernel < len(_KERNELS) else f"kernel {kernel}"
    return (
        f"rank {rank} gave up in {where}, without progress within TOPOEP_TIMEOUT_S={timeout_s:g}: "
        f"it waited for rank {source}: {wait} ({unit} {what}, wanted {wanted}, seen {seen}, "
        f"launch {generation}, block {block}). That rank has died, hangs, or issues "
        "its calls in another order; or it is itself waiting: look at the messages of all ranks. "
        "The transport cannot be used any more: make a new Balancer"
    )


@dataclass(frozen=True)
class Window:
    """Memory that every rank of the node reads and writes."""

    #: uint8 ``[bytes]``, this rank's own.
    memory: Tensor
    #: Its address at every rank of the node, in rank order, as this rank's device sees it.
    addresses: tuple[int, ...]


class Plane(ABC):
    """Windows and kernels of one rank. Ranks make the same calls in the same order."""

    #: Where windows and all tensors live.
    device: torch.device

    @abstractmethod
    def window(self, num_bytes: int) -> Window:
        """New shared memory, zeroed. Collective; for set-up only."""

    @abstractmethod
    def start(self, config: PlanConfig, settings: PlaneSettings) -> None:
        """Makes everything that the kernels need. Collective; called once."""

    @abstractmethod
    def error_record(self) -> bytes:
        """The error record, without waiting for the device."""

    @abstractmethod
    def exchange(self, row: Tensor) -> Tensor:
        """Enqueues: int32 ``[R, E]`` from every rank's int32 ``[E]``."""

    @abstractmethod
    def solve(
        self,
        counts: Tensor,
        topology: Tensor,
        spare_slots: int,
        candidates: Sequence[int],
        objective: Sequence[int],
    ) -> tuple[Tensor, ...]:
        """Enqueues: a plan for this rank, and its transfer lists (``plan.lists``)."""

    @abstractmethod
    def replicate(self, plan: Plan, home: Tensor, spare: Sequence[Tensor]) -> None:
        """Enqueues the copies into ``spare``; ``home``: int64 ``[T, G]`` addresses."""

    @abstractmethod
    def reduce(
        self,
        plan: Plan,
        slot_table: Tensor,
        slot_grads: Sequence[Tensor],
        home_grads: Sequence[Tensor],
    ) -> None:
        """Enqueues the sums into ``home_grads``; zeroes the slots that the plan uses."""

    @abstractmethod
    def close(self, abort: bool) -> None:
        """Frees everything; collective unless it aborts."""


class NcclPlane(Plane):
    """Windows of an NCCL communicator, and the kernels of this library.

    Args:
        comm: number of the communicator in the library (``nccl_comm_create``).
        device: of this rank.
        rank: in the group.
        smallest: the smallest of all ranks' values; a collective that is used at set-up.
    """

    def __init__(
        self, comm: int, device: torch.device, rank: int, smallest: Callable[[int], int]
    ) -> None:
        self.device = device
        self._comm = comm
        self._rank = rank
        self._smallest = smallest
        self._plane: int | None = None
        self._ops = torch.ops.topoep

    def window(self, num_bytes: int) -> Window:
        """See :meth:`Plane.window`."""
        return self._window(num_bytes)[1]

    def _window(self, num_bytes: int) -> tuple[int, Window]:
        with torch.cuda.device(self.device):
            number, memory, addresses = self._ops.nccl_comm_window(
                self._comm, num_bytes, self.device.index
            )
        memory.zero_()
        return number, Window(memory, tuple(addresses))

    def start(self, config: PlanConfig, settings: PlaneSettings) -> None:
        """See :meth:`Plane.start`."""
        numbers = settings.config(config, self._rank)
        window_bytes, state_bytes, error_bytes, signals, self._lists_size = self._ops.plane_sizes(
            numbers
        )
        self._num_ranks = config.num_ranks
        num_nodes = config.topology.num_nodes
        number, window = self._window(window_bytes)
        addresses = torch.tensor(window.addresses, dtype=torch.int64, device=self.device)
        state = torch.zeros(state_bytes, dtype=torch.uint8, device=self.device)
        self._error = torch.zeros(error_bytes, dtype=torch.uint8, pin_memory=True)
        memory = config.topology.table(self.device), addresses, state, self._error
        numbers_and_roles = numbers, settings.roles(num_nodes), int(settings.timeout_s * 1e9)
        if num_nodes == 1:  # no network, and no kernel code of NCCL's
            none = addresses[:0]
            self._plane = self._ops.plane_over_memory(*memory, none, none, *numbers_and_roles)
        else:
            with torch.cuda.device(self.device):
                contexts = self._ops.nccl_comm_device(self._comm, signals, GIN_CONTEXTS)
            self._plane = self._ops.plane_over_nccl(
                *memory, *numbers_and_roles, self._comm, number, self._smallest(contexts)
            )
        # No kernel of a peer may find a window that is not zero yet.
        torch.cuda.synchronize(self.device)
        self._smallest(0)

    def error_record(self) -> bytes:
        """See :meth:`Plane.error_record`."""
        return bytes(self._error.numpy())

    def exchange(self, row: Tensor) -> Tensor:
        """See :meth:`Plane.exchange`."""
        return ops.exchange_counts(row, self._number, self._num_ranks)

    def solve(
        self,
        counts: Tensor,
        topology: Tensor,
        spare_slots: int,
        candidates: Sequence[int],
        objective: Sequence[int],
    ) -> tuple[Tensor, ...]:
        """See :meth:`Plane.solve`."""
        return ops.solve_for_plane(
            counts, topology, spare_slots, candidates, objective, self._number, self._lists_size
        )

    def replicate(self, plan: Plan, home: Tensor, spare: Sequence[Tensor]) -> None:
        """See :meth:`Plane.replicate`."""
        ops.replicate_(*_tables(plan), lists_of(plan), home, spare, self._number)

    def reduce(
        self,
        plan: Plan,
        slot_table: Tensor,
        slot_grads: Sequence[Tensor],
        home_grads: Sequence[Tensor],
    ) -> None:
        """See :meth:`Plane.reduce`."""
        ops.reduce_across_(
            *_tables(plan), lists_of(plan), slot_table, slot_grads, home_grads, self._number
        )

    def close(self, abort: bool) -> None:
        """See :meth:`Plane.close`."""
        if self._plane is not None:
            torch.cuda.synchronize(self.device)  # kernels use the memory that goes now
            self._ops.plane_close(self._plane)
            self._plane = None
        self._ops.nccl_comm_close(self._comm, abort)

    @property
    def _number(self) -> int:
        if self._plane is None:
            raise RuntimeError("the data plane was not started, or is closed")
        return self._plane


def lists_of(plan: Plan) -> Tensor:
    """The transfer lists that the plane made with the plan.

    Raises:
        RuntimeError: the plan is not from :meth:`Plane.solve`.
    """
    if plan.lists is None:
        raise RuntimeError(
            "this plan has no transfer lists, so it was not made by the solve of this transport; "
            "use balancer.plan(..) or plan_from_counts(..)"
        )
    return plan.lists


def _tables(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    return plan.slot_expert, plan.copy_offsets, plan.copy_slots
