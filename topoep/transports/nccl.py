# SPDX-License-Identifier: Apache-2.0
"""Counts, weights and gradients by kernels over NCCL's windows; no step waits for the host.

Ranks of a node read each other's weights and gradients where they are. Weights must therefore live
in memory that the others can address: :meth:`NcclTransport.share` moves them there once. Weights
that were not shared are copied there before every transfer, which the log says once.

Order between ranks comes from the exchange of counts: after it every rank has done, in stream
order, what it enqueued before it. So a peer that pulls weights for a plan sees the weights of the
optimizer step before the plan.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from topoep._library import BUILD_INFO
from topoep.plan import Plan, PlanConfig
from topoep.topology import Topology
from topoep.transports.base import Pending, Weights
from topoep.transports.c10d import C10dTransport
from topoep.transports.plane import (
    NcclPlane,
    Plane,
    PlaneSettings,
    Window,
    bulk_copies_problem,
    describe_error,
    lists_of,
)

_logger = logging.getLogger("topoep")

_ID_BYTES = 128  # of an ncclUniqueId
_ALIGNMENT = 256  # of a tensor in a window
COUNTS_EXCHANGES = ("kernel", "all_gather")


def local_problem(topology: Topology | None) -> str:
    """Why this process cannot use transport ``nccl``, in words; empty if nothing speaks against it.

    Looks at the build, the loaded NCCL, the GPUs and the topology (if one is given), and
    communicates nothing.
    """
    if not BUILD_INFO["cuda"]:
        return f"topoep was built without CUDA kernels: {BUILD_INFO['cuda_reason']}"
    if not BUILD_INFO["nccl"]:
        return f"topoep was built without NCCL: {BUILD_INFO['nccl_reason']}"
    if not torch.cuda.is_available():
        return "torch finds no GPU in this process"
    across_nodes = topology is not None and topology.num_nodes > 1
    problem: str = torch.ops.topoep.nccl_status(across_nodes)[2]
    problem = problem or bulk_copies_problem(torch.cuda.get_device_capability())
    return problem or (topology_problem(topology) if topology is not None else "")


def topology_problem(topology: Topology) -> str:
    """Why the kernels cannot serve this topology, in words."""
    sizes = [len(topology.ranks_of_node(node)) for node in range(topology.num_nodes)]
    if len(set(sizes)) > 1:
        return (
            f"nodes have different numbers of ranks ({min(sizes)} to {max(sizes)}); the kernels "
            "need equally many on every node (give the group as many ranks of each)"
        )
    return ""


def table_problem(topology: Topology, measured: Topology) -> str:
    """Where the node table and the one by host name differ first, in words; empty: nowhere."""
    for rank in range(topology.num_ranks):
        given, found = (t.ranks_of_node(t.node_of_rank[rank])[0] for t in (topology, measured))
        if given != found:
            where = "with no lower rank" if given == rank else f"in the node of rank {given}"
            there = "with no lower rank" if found == rank else f"in the node of rank {found}"
            return (
                f"the topology has rank {rank} {where}, by host name it is {there}: "
                "Topology.from_group(group) makes the table by host name and TOPOEP_NODE"
            )
    return ""


class NcclConnector:
    """How make_transport finds out whether ``nccl`` can be used, and starts it."""

    def problem(self, topology: Topology, over_group: C10dTransport) -> str:
        """What this process knows to speak against it, without talking to others."""
        problem = local_problem(topology)
        if not problem and not over_group.moves_cuda:
            problem = f"the backend of the group is {over_group.backend!r}; CUDA tensors need nccl"
        if not problem:
            try:
                _use_comm_of_group()
            except RuntimeError as error:
                problem = str(error)
        return problem

    def connect(self, topology: Topology, group: dist.ProcessGroup) -> tuple[Plane | None, str]:
        """A communicator of the group's ranks, numbered node by node. Collective.

        NCCL joins consecutive ranks by load and store. Groups whose ranks alternate between nodes
        therefore get a communicator in another order than the group's; kernels go on speaking of
        the group's ranks, and the network translates.

        Returns:
            The plane over it, and why it cannot serve; one of the two is empty.
        """
        ops = torch.ops.topoep
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        device = torch.device("cuda", torch.cuda.current_device())
        measured = Topology.from_group(group)
        order = topology.rank_order
        adopt = _use_comm_of_group()
        everyone = [False] * size
        dist.all_gather_object(everyone, adopt, group)
        if len(set(everyone)) > 1:
            adopts, creates = everyone.index(True), everyone.index(False)
            return None, (
                f"TOPOEP_NCCL_COMM is 'group' on rank {adopts} and 'own' on rank {creates}; set it "
                "to the same on all ranks"
            )
        if adopt and order != tuple(range(size)):
            adopt = False
            if rank == 0:
                _logger.warning(
                    "TOPOEP_NCCL_COMM=group: the group does not have its ranks node by node, and "
                    "NCCL joins consecutive ranks only; a communicator in the order of the nodes "
                    "is made instead"
                )
        comm = 0
        try:
            if adopt:
                backend: Any = group._get_backend(device)
                comm = ops.nccl_comm_adopt(backend._comm_ptr())
            else:
                comm = ops.nccl_comm_create(_shared_id(group), size, order.index(rank))
            local_ranks = len(topology.ranks_of_node(topology.node_of_rank[rank]))
            problem = ops.nccl_comm_problem(comm, order, local_ranks, rank)
        except (AttributeError, RuntimeError) as error:
            problem = str(error)
        if problem:
            if comm:
                ops.nccl_comm_close(comm, True)
            table = table_problem(topology, measured)
            return None, f"{problem}; {table}" if table else problem

        def smallest(value: int) -> int:
            values: list[int] = [0] * size
            dist.all_gather_object(values, value, group)
            return min(values)

        return NcclPlane(comm, device, rank, smallest), ""


def _use_comm_of_group() -> bool:
    """Whether TOPOEP_NCCL_COMM asks for the communicator that the group has already."""
    choice = os.environ.get("TOPOEP_NCCL_COMM", "own")
    if choice not in ("own", "group"):
        raise RuntimeError(f"TOPOEP_NCCL_COMM={choice!r}; expected own or group")
    return choice == "group"


def _shared_id(group: dist.ProcessGroup) -> Tensor:
    """The id of a new communicator, made by the group's rank 0. Collective.

    Raises:
        RuntimeError: NCCL could not make one; on every rank.
    """
    identity, failure = torch.zeros(_ID_BYTES, dtype=torch.uint8), ""
    if dist.get_rank(group) == 0:
        try:
            torch.ops.topoep.nccl_unique_id_(identity)
        except RuntimeError as error:
            failure = str(error)
    shared: list[tuple[list[int], str]] = [(identity.tolist(), failure)]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    numbers, failure = shared[0]
    if failure:
        raise RuntimeError(failure)
    return torch.tensor(numbers, dtype=torch.uint8)


@dataclass(frozen=True)
class _Shared:
    """A tensor in a window, and where the other ranks of the node have theirs."""

    tensor: weakref.ref[Tensor]
    addresses: tuple[int, ...]


class NcclTransport(C10dTransport):
    """Kernels of this library over windows of NCCL, for CUDA tensors.

    Tokens are still sent by torch.distributed (:meth:`all_to_all`); counts, weights and gradients
    are enqueued on the current stream and never wait for the host.

    Args:
        topology: nodes of equal size, in any arrangement of the ranks.
        group: its ranks.
        plane: windows and kernels, from :class:`NcclConnector`.
        settings: sizes; ``PlaneSettings.from_environment()`` if None.
        counts_exchange: ``"kernel"``, or ``"all_gather"`` of torch.distributed on the stream;
            ``TOPOEP_COUNTS_EXCHANGE`` if None.

    Raises:
        ValueError: a setting or an environment variable is out of range.
    """

    name = "nccl"

    def __init__(
        self,
        topology: Topology,
        group: dist.ProcessGroup,
        plane: Plane,
        settings: PlaneSettings | None = None,
        counts_exchange: str | None = None,
    ) -> None:
        super().__init__(topology, group)
        self._plane = plane
        self.settings = settings or PlaneSettings.from_environment()
        self.settings.roles(topology.num_nodes)  # raises if they do not fit
        if counts_exchange is None:
            counts_exchange = os.environ.get("TOPOEP_COUNTS_EXCHANGE", "kernel")
        if counts_exchange not in COUNTS_EXCHANGES:
            raise ValueError(
                f"TOPOEP_COUNTS_EXCHANGE={counts_exchange!r}; expected one of "
                f"{', '.join(COUNTS_EXCHANGES)}"
            )
        self._counts_exchange = counts_exchange
        self._failure = ""
        self._closed = False
        self._num_experts = 0
        self._shared: dict[int, _Shared] = {}  # by address
        self._stages: dict[object, tuple[Weights, Tensor]] = {}
        self._grad_slots: dict[object, tuple[Weights, Tensor]] = {}
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._last_stream: dict[str, torch.cuda.Stream] = {}
        self._side_streams: dict[str, torch.cuda.Stream] = {}

    def configure(self, config: PlanConfig) -> None:
        """See :meth:`Transport.configure`."""
        self._plane.start(config, self.settings)
        self._num_experts = config.num_experts

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        if not self._closed:
            self._closed = True
            for cache in (self._shared, self._stages, self._grad_slots, self._tables):
                cache.clear()
            self._plane.close(abort=bool(self._failure))

    # ---- counts --------------------------------------------------------------------------------

    def exchange(self, counts: Sequence[Tensor]) -> Tensor:
        """See :meth:`Transport.exchange`."""
        self._check()
        self._check_device(counts[0], "topk_ids")
        if self._counts_exchange == "all_gather":
            return self._all_gather(counts[0])
        with self._in_order("exchange"):
            return self._plane.exchange(counts[0])

    def solve(
        self,
        counts: Tensor,
        topology: Tensor,
        spare_slots: int,
        candidates: Sequence[int],
        objective: Sequence[int],
        rank: int,
    ) -> tuple[Tensor, ...]:
        """See :meth:`Transport.solve`: with the lists of the data plane, in one launch."""
        if spare_slots == 0:  # nothing will be moved
            return super().solve(counts, topology, spare_slots, candidates, objective, rank)
        self._check_device(counts, "the counts")
        assert rank == self.held[0], "the plane's rank is this process's"
        return self._plane.solve(counts, topology, spare_slots, candidates, objective)

    # ---- weights -------------------------------------------------------------------------------

    def share(self, tensors: Sequence[Tensor]) -> None:
        """See :meth:`Transport.share`."""
        self._check()
        pending = [t for t in tensors if self._addresses(t) is None]
        if not pending:
            return
        self._set_up("share", [(tuple(t.shape), str(t.dtype)) for t in pending])
        window, views = self._window_for(pending)
        for tensor, (view, offset) in zip(pending, views, strict=True):
            view.copy_(tensor.detach())
            tensor.data = view
            addresses = tuple(address + offset for address in window.addresses)
            # The storage is in the window for as long as the tensor lives.
            self._shared[tensor.data_ptr()] = _Shared(weakref.ref(tensor), addresses)

    def replicate(self, plan: Plan, weights: Sequence[Weights], out: Sequence[Weights]) -> None:
        """See :meth:`Transport.replicate`."""
        self._check()
        (home,), (spare,) = weights, out
        table = self._table_of(home)
        if table is None:
            table = self._stage(home)
        with self._in_order("replicate"):
            self._plane.replicate(plan, table, spare)

    def start_replicate(
        self, plan: Plan, weights: Sequence[Weights], out: Sequence[Weights]
    ) -> Pending:
        """See :meth:`Transport.start_replicate`: on a stream of its own, of high priority."""
        if self._plane.device.type != "cuda":
            return super().start_replicate(plan, weights, out)
        side = self._side_stream("replicate")
        side.wait_stream(torch.cuda.current_stream(self._plane.device))
        with torch.cuda.stream(side):
            self.replicate(plan, weights, out)
            done = self.mark()
        # The allocator must not give their memory to others while the side stream reads it.
        for tensor in (
            plan.slot_expert,
            plan.copy_offsets,
            plan.copy_slots,
            lists_of(plan),
            *weights[0],
            *out[0],
        ):
            tensor.record_stream(side)
        return done

    def mark(self) -> Pending:
        """See :meth:`Transport.mark`."""
        if self._plane.device.type != "cuda":
            return super().mark()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._plane.device))
        return Pending(lambda: torch.cuda.current_stream(self._plane.device).wait_event(event))

    def _side_stream(self, kernel: str) -> torch.cuda.Stream:
        """A stream of high priority for one kind of transfer, made when it is first used.

        One for each: weights for the next layer must not queue behind the gradients of this one,
        and may travel beside them.
        """
        if kernel not in self._side_streams:
            self._side_streams[kernel] = torch.cuda.Stream(self._plane.device, priority=-1)
        return self._side_streams[kernel]

    def _stage(self, home: Weights) -> Tensor:
        """Copies weights that were not shared into a window; the table of their addresses there.

        Peers may still read the copies of the transfer before, and must not read these too early:
        an exchange between all ranks on either side.
        """
        key = _shape_key(home)
        if key not in self._stages:
            self._set_up("stage", key)
            if self.held[0] == 0:
                _logger.warning(
                    "transport nccl: weights of shape %s are not in shared memory, so all home "
                    "experts are copied there before every transfer; "
                    "balancer.share_weights(..) after the model is on its device avoids that",
                    ", ".join(str(tuple(t.shape)) for t in home),
                )
            window, views = self._window_for(home)
            staged = tuple(view for view, _ in views)
            self._stages[key] = staged, self._make_table(window, [o for _, o in views])
        staged, table = self._stages[key]
        self._barrier()
        for target, source in zip(staged, home, strict=True):
            target.copy_(source)
        self._barrier()
        return table

    def _barrier(self) -> None:
        """All ranks have done, in stream order, what they enqueued before theirs."""
        row = torch.zeros(self._num_experts, dtype=torch.int32, device=self._plane.device)
        with self._in_order("exchange"):
            self._plane.exchange(row)

    # ---- gradients -----------------------------------------------------------------------------

    def gradient_stream(self) -> AbstractContextManager[object]:
        """See :meth:`Transport.gradient_stream`: of high priority."""
        if self._plane.device.type != "cuda":
            return super().gradient_stream()
        return torch.cuda.stream(self._side_stream("reduce"))

    def reduce_grads(
        self, plan: Plan, slot_grads: Sequence[Weights], out: Sequence[Weights]
    ) -> None:
        """See :meth:`Transport.reduce_grads`. float64 is not supported."""
        self._check()
        (grads,), (homes,) = slot_grads, out
        for slot_type, home_type in sorted(
            {(_slot_type(g.dtype), h.dtype) for g, h in zip(grads, homes, strict=True)}, key=str
        ):
            chosen = [
                (g, h)
                for g, h in zip(grads, homes, strict=True)
                if (_slot_type(g.dtype), h.dtype) == (slot_type, home_type)
            ]
            slots, table = self._slots_for(tuple(g for g, _ in chosen), slot_type)
            # The kernel knows float32 and bfloat16; others are widened, and rounded once at the
            # end as they are there.
            native = _slot_type(home_type) == home_type
            sums = [h if native else h.float() for _, h in chosen]
            with self._in_order("reduce"):  # the copies too: the launch before reads these slots
                for slot, (grad, _) in zip(slots, chosen, strict=True):
                    slot.copy_(grad)
                self._plane.reduce(plan, table, slots, sums)
            if not native:
                for total, (_, home) in zip(sums, chosen, strict=True):
                    home.copy_(total)

    def _slots_for(self, grads: Weights, dtype: torch.dtype) -> tuple[Weights, Tensor]:
        """Windows for gradients of these shapes, and the table of their addresses."""
        key = dtype, _shape_key(grads)
        if key not in self._grad_slots:
            self._set_up("gradients", key)
            wanted = [g.new_empty(g.shape, dtype=dtype, device="meta") for g in grads]
            window, views = self._window_for(wanted)
            table = self._make_table(window, [offset for _, offset in views])
            self._grad_slots[key] = tuple(view for view, _ in views), table
        return self._grad_slots[key]

    # ---- windows -------------------------------------------------------------------------------

    def _window_for(self, like: Sequence[Tensor]) -> tuple[Window, list[tuple[Tensor, int]]]:
        """One new window with room for tensors like these: each tensor there, and its offset."""
        offsets, total = [], 0
        for tensor in like:
            offsets.append(total)
            size = tensor.numel() * tensor.element_size()
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        window = self._plane.window(max(total, _ALIGNMENT))
        views = [
            window.memory[offset : offset + t.numel() * t.element_size()]
            .view(t.dtype)
            .view(t.shape)
            for offset, t in zip(offsets, like, strict=True)
        ]
        return window, list(zip(views, offsets, strict=True))

    def _make_table(self, window: Window, offsets: Sequence[int]) -> Tensor:
        """int64 ``[T, G]``."""
        rows = [[address + offset for address in window.addresses] for offset in offsets]
        return torch.tensor(rows, dtype=torch.int64, device=self._plane.device)

    def _addresses(self, tensor: Tensor) -> tuple[int, ...] | None:
        shared = self._shared.get(tensor.data_ptr())
        owner = shared.tensor() if shared is not None else None
        if shared is None or owner is None or owner.data_ptr() != tensor.data_ptr():
            return None
        return shared.addresses

    def _table_of(self, home: Weights) -> Tensor | None:
        """The table of shared weights; None if one of them is not shared."""
        rows = [self._addresses(t) for t in home]
        if any(row is None for row in rows):
            return None
        key = tuple(t.data_ptr() for t in home)
        if key not in self._tables:
            self._set_up("table", _shape_key(home))
            self._tables[key] = torch.tensor(rows, dtype=torch.int64, device=self._plane.device)
        return self._tables[key]

    def _set_up(self, what: str, key: object) -> None:
        """Before memory is made for something seen for the first time: all ranks must do it."""
        if self._plane.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "transport nccl needs new shared memory for tensors it has not seen, which cannot "
                "be captured in a CUDA graph; run one step before capturing"
            )
        mine = f"{what} {key}"
        everyone: list[str] = [""] * self.topology.num_ranks
        dist.all_gather_object(everyone, mine, self.group)
        other = next((rank for rank, text in enumerate(everyone) if text != everyone[0]), None)
        if other is not None:
            raise RuntimeError(
                f"ranks 0 and {other} move different tensors: '{everyone[0]}' and "
                f"'{everyone[other]}'. All ranks must share and replicate weights of the same "
                "shapes in the same order"
            )

    # ---- order and errors ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_order(self, kernel: str) -> Iterator[None]:
        """Launches of one kernel must not overlap, also when they come from several streams."""
        if self._plane.device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self._plane.device)
        last = self._last_stream.get(kernel, stream)
        if last != stream:
            with torch.cuda.stream(last):
                last_captures = torch.cuda.is_current_stream_capturing()
            # A graph cannot wait for work outside of it: it is replayed in stream order.
            if last_captures == torch.cuda.is_current_stream_capturing():
                stream.wait_stream(last)
        yield
        self._last_stream[kernel] = stream

    def _check(self) -> None:
        """Raises if a kernel gave up since the last call; reads host memory only."""
        if self._closed:
            raise RuntimeError("the balancer was closed")
        if not self._failure:
            self._failure = (
                describe_error(self._plane.error_record(), self.settings.timeout_s) or ""
            )
        if self._failure:
            raise RuntimeError(self._failure)

    def _check_device(self, tensor: Tensor, name: str) -> None:
        if tensor.device != self._plane.device:
            raise ValueError(
                f"{name} are on {tensor.device}; transport 'nccl' of this rank works on "
                f"{self._plane.device}. Move them there, or use transport='c10d'"
            )


def _slot_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of this type are sent."""
    if dtype == torch.float64:
        raise TypeError(
            "transport 'nccl' sums gradients in float32 and does not take float64; use "
            "transport='c10d'"
        )
    return dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32


def _shape_key(tensors: Weights) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((tuple(t.shape), str(t.dtype)) for t in tensors)
