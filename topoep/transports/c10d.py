# SPDX-License-Identifier: Apache-2.0
"""Any torch.distributed backend: gloo on the CPU, NCCL on GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from topoep.topology import Topology
from topoep.transports.host import HostTransport

_logger = logging.getLogger("topoep")

_ROWS = "exchanging rows with the other ranks"


class C10dTransport(HostTransport):
    """Collectives of torch.distributed over one process group.

    Works everywhere, at a price on a GPU: the split sizes of an all-to-all are host integers, so
    the host waits for each plan. It says so in the log.

    Raises:
        ValueError: the group does not have the topology's number of ranks, or this process is not
            a member of it.
    """

    name = "c10d"

    def __init__(self, topology: Topology, group: dist.ProcessGroup) -> None:
        super().__init__(topology)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not a member of the group given to the Balancer")
        size = dist.get_world_size(group)
        if size != topology.num_ranks:
            raise ValueError(
                f"the group has {size} ranks, the topology {topology.num_ranks}; describe the "
                "ranks of the group (Topology.from_group(group) does)"
            )
        self.group = group
        self.held = (rank,)
        #: Backend by device type.
        self.backends = dict(
            pair.split(":") for pair in str(dist.get_backend_config(group)).split(",")
        )
        name = str(dist.get_backend(group))
        self.backend = str(dist.get_backend_config(group)) if name == "undefined" else name

    @property
    def moves_cuda(self) -> bool:
        """Whether CUDA tensors go over NCCL."""
        return self.backends.get("cuda") == "nccl"

    def announce(self) -> None:
        """Says in the log what this transport costs on a GPU."""
        if self.moves_cuda and self.held == (0,):
            _logger.info(
                "transport c10d (%s) reads the transfer list on the host: one wait for the GPU "
                "per plan",
                self.backend,
            )

    def gather_config(self, values: Tensor) -> Tensor:
        """See :meth:`Transport.gather_config`."""
        if "cpu" not in self.backends:
            values = values.cuda()
        return self._all_gather(values).cpu()

    def exchange(self, counts: Sequence[Tensor]) -> Tensor:
        """See :meth:`Transport.exchange`."""
        return self._all_gather(counts[0])

    def _all_gather(self, values: Tensor) -> Tensor:
        """``[R, F]`` from every rank's ``[F]``."""
        gathered = values.new_empty(self.topology.num_ranks * values.numel())
        # The newer name of the same call, where torch has it: the older one warns there.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with _explained("gathering the counts of all ranks", self.group):
            gather(gathered, values, group=self.group)
        return gathered.view(self.topology.num_ranks, -1)

    def all_to_all(
        self,
        rows: Sequence[Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """See :meth:`Transport.all_to_all`."""
        received: Tensor = _AllToAll.apply(
            rows[0], list(send_splits[0]), list(recv_splits[0]), self.group
        )
        return [received]

    def start_all_to_all(
        self,
        rows: Sequence[Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
    ) -> Callable[[], list[Tensor]]:
        """See :meth:`Transport.start_all_to_all`."""
        flight = _Flight(self.group, list(send_splits[0]), list(recv_splits[0]))
        out: Tensor = _Depart.apply(rows[0], flight)

        def arrive() -> list[Tensor]:
            received: Tensor = _Arrive.apply(out, flight)
            return [received]

        return arrive


class _Flight:
    """One all-to-all under way, and the one that brings its gradients back."""

    def __init__(
        self, group: dist.ProcessGroup, send_splits: list[int], recv_splits: list[int]
    ) -> None:
        self.group = group
        self.splits = send_splits, recv_splits
        self.grad_rows: Tensor | None = None
        self._work: dist.Work | None = None
        self._rows: Tensor | None = None  # must live until the work is done

    def start(self, rows: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        self._rows = rows.contiguous()
        out = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
        with _explained(_ROWS, self.group):
            self._work = dist.all_to_all_single(
                out, self._rows, recv_splits, send_splits, group=self.group, async_op=True
            )
        return out

    def wait(self) -> None:
        assert self._work is not None
        with _explained(_ROWS, self.group):
            self._work.wait()
        self._work = self._rows = None


class _Depart(torch.autograd.Function):
    """Starts an all-to-all; its backward waits for the gradients that _Arrive's has sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.start(rows, *flight.splits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flight: _Flight = ctx.flight
        flight.wait()
        returned, flight.grad_rows = flight.grad_rows, None
        return returned, None


class _Arrive(torch.autograd.Function):
    """Waits for an all-to-all; its backward starts to send the gradients back."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flight: _Flight = ctx.flight
        send_splits, recv_splits = flight.splits
        flight.grad_rows = flight.start(grads[0], recv_splits, send_splits)
        return grads[0], None


@contextmanager
def _explained(doing: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Says in the error of a collective what it was for, and what to look at."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{doing} failed on rank {dist.get_rank(group)} of {dist.get_world_size(group)}: "
            f"{error}\nAnother rank has raised, died, was slower than the group's timeout, or made "
            "another call than this one: see its output. TOPOEP_DEBUG=1 compares the calls first"
        ) from error


class _AllToAll(torch.autograd.Function):
    """all_to_all_single whose gradient goes back along the same splits."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send_splits: list[int],
        recv_splits: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.splits = send_splits, recv_splits
        ctx.group = group
        out = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
        with _explained(_ROWS, group):
            dist.all_to_all_single(out, rows.contiguous(), recv_splits, send_splits, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        send_splits, recv_splits = ctx.splits
        back = _AllToAll.apply(grads[0], recv_splits, send_splits, ctx.group)
        return back, None, None, None
