# SPDX-License-Identifier: Apache-2.0
"""Any torch.distributed backend: gloo on the CPU, NCCL on GPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from topoep.topology import Topology
from topoep.transports.host import HostTransport

_logger = logging.getLogger("topoep")


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
        self.backend = str(dist.get_backend(group))
        if "nccl" in self.backend:
            _logger.info(
                "transport c10d (%s) reads the transfer list on the host: one wait for the GPU "
                "per plan",
                self.backend,
            )

    def gather_config(self, values: Tensor) -> Tensor:
        """See :meth:`Transport.gather_config`."""
        if self.backend == "nccl":
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
        with _explained("exchanging rows with the other ranks", group):
            dist.all_to_all_single(out, rows.contiguous(), recv_splits, send_splits, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        send_splits, recv_splits = ctx.splits
        back = _AllToAll.apply(grads[0], recv_splits, send_splits, ctx.group)
        return back, None, None, None
