# SPDX-License-Identifier: Apache-2.0
"""Weights and gradients by all-to-all: for transports whose transfer lists live on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from topoep import ops
from topoep.plan import Plan
from topoep.topology import Topology
from topoep.transports.base import Transport, Weights
from topoep.transports.schedule import (
    NUM_STAGES,
    RankSchedule,
    Transfer,
    plan_transfers,
    rank_schedule,
)


class HostTransport(Transport):
    """Everything that can be said with :meth:`Transport.all_to_all` and lists on the host.

    Two all-to-alls per direction, whatever the plan (schedule.py). On a GPU the host reads the
    plan once per plan, so work is not enqueued ahead of it.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def _schedules(self, plan: Plan) -> list[list[RankSchedule]]:
        """``[stage][held]``."""
        stages = plan_transfers(plan.config, plan.host)
        return [
            [rank_schedule(stage, rank, self.topology.num_ranks) for rank in self.held]
            for stage in stages
        ]

    def replicate(self, plan: Plan, weights: Sequence[Weights], out: Sequence[Weights]) -> None:
        """See :meth:`Transport.replicate`."""
        sources = [weights, out]  # stage 0 sends home experts, stage 1 copies that have arrived
        for schedules, source in zip(self._schedules(plan), sources, strict=True):
            packed = [
                ops.pack_rows(tensors, _index(s.sends, lambda t: t.source_slot, tensors[0]))
                for s, tensors in zip(schedules, source, strict=True)
            ]
            received = self.all_to_all(
                packed, [s.send_splits for s in schedules], [s.recv_splits for s in schedules]
            )
            for s, tensors, rows in zip(schedules, out, received, strict=True):
                slots = _index(s.receives, lambda t: t.target_slot, rows)
                ops.unpack_rows_(tensors, slots, rows)

    def reduce_grads(
        self, plan: Plan, slot_grads: Sequence[Weights], out: Sequence[Weights]
    ) -> None:
        """See :meth:`Transport.reduce_grads`."""
        if not out[0]:
            return
        schedules = self._schedules(plan)
        sums = [_accumulators(grads) for grads in slot_grads]  # each [S, elements of all tensors]
        totals = [_flat_rows(tensors) for tensors in out]
        for stage in reversed(range(NUM_STAGES)):
            # The receivers of the forward direction send back what they hold for the expert.
            rows = [
                held.index_select(0, _index(s.receives, lambda t: t.target_slot, held))
                for s, held in zip(schedules[stage], sums, strict=True)
            ]
            received = self.all_to_all(
                rows,
                [s.recv_splits for s in schedules[stage]],
                [s.send_splits for s in schedules[stage]],
            )
            for i, s in enumerate(schedules[stage]):
                if stage == 1:
                    _add_rows(sums[i], received[i], s.sends, self._reduce_order)
                else:
                    start = 0
                    for total in totals[i]:
                        part = received[i][:, start : start + total.shape[1]]
                        part = part.to(_accumulator_dtype(total.dtype)).contiguous()
                        _add_rows(total, part, s.sends, self._reduce_order)
                        start += total.shape[1]

    def _reduce_order(self, transfer: Transfer) -> tuple[bool, int, int]:
        """The owner's node first, then nodes in order, ranks in order inside each."""
        node = self.topology.node_of_rank
        return (
            node[transfer.target] != node[transfer.source],
            node[transfer.target],
            transfer.target,
        )


def _index(transfers: Sequence[Transfer], slot: Callable[[Transfer], int], like: Tensor) -> Tensor:
    return torch.tensor([slot(t) for t in transfers], dtype=torch.int64, device=like.device)


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _accumulators(grads: Weights) -> Tensor:
    dtype = max((_accumulator_dtype(g.dtype) for g in grads), key=lambda d: d.itemsize)
    return torch.cat([g.reshape(g.shape[0], -1).to(dtype) for g in grads], dim=1)


def _flat_rows(tensors: Weights) -> list[Tensor]:
    return [t.view(t.shape[0], -1) for t in tensors]


def _add_rows(
    out: Tensor,
    rows: Tensor,
    transfers: Sequence[Transfer],
    order_of: Callable[[Transfer], tuple[bool, int, int]],
) -> None:
    """out[source_slot of transfer i] += rows[i], in the fixed order of ``order_of``."""
    by_slot: list[list[int]] = [[] for _ in range(out.shape[0])]
    for i in sorted(range(len(transfers)), key=lambda i: order_of(transfers[i])):
        by_slot[transfers[i].source_slot].append(i)
    offsets = [0]
    for members in by_slot:
        offsets.append(offsets[-1] + len(members))
    order = [i for members in by_slot for i in members]
    device = out.device
    ops.reduce_grads_(
        out,
        rows,
        torch.tensor(offsets, dtype=torch.int64, device=device),
        torch.tensor(order, dtype=torch.int64, device=device),
    )
