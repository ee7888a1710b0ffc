# SPDX-License-Identifier: Apache-2.0
"""All ranks of a cluster in one GPU: a data plane, a window and a stream for each.

The kernels are those of transport ``nccl``; only the network is another (puts are stores to the
peer's window). Used by gpu_check.py and by the tests under tests/gpu.

Every rank's kernels wait for the others', so the blocks of all ranks must be resident at once, and
the streams must not share a hardware queue: call :func:`prepare_environment` before CUDA starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from topoep import ops
from topoep.plan import Plan, PlanConfig
from topoep.portfolio import choose_candidates
from topoep.transports.base import Weights
from topoep.transports.plane import PlaneSettings, describe_error

Result = TypeVar("Result")

MAX_RANKS = 32  # as many hardware queues as CUDA gives


def prepare_environment() -> None:
    """Settings that CUDA reads when it starts: a queue per stream, and no loading of kernels later.

    Loading a kernel at its first launch may wait for the device, where another rank's kernel
    already waits for that launch.
    """
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(MAX_RANKS)
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"


class SimulatedCluster:
    """R ranks in the current GPU.

    Args:
        config: topology (nodes of equal size, ranks node by node), experts and spare slots.
        settings: sizes; ``comm_sms`` is per rank, and no more than fit are taken if None.
    """

    def __init__(self, config: PlanConfig, settings: PlaneSettings | None = None) -> None:
        topology = config.topology
        num_ranks = topology.num_ranks
        if num_ranks > MAX_RANKS:
            raise ValueError(f"{num_ranks} simulated ranks; expected at most {MAX_RANKS}")
        self.config = config
        self.device = torch.device("cuda", torch.cuda.current_device())
        if settings is None:
            sms = torch.cuda.get_device_properties(self.device).multi_processor_count
            settings = PlaneSettings(comm_sms=max(min(24, sms // num_ranks), 3), timeout_s=10)
        self.settings = settings
        self._ops = torch.ops.topoep
        numbers = [settings.config(config, rank) for rank in range(num_ranks)]
        window_bytes, state_bytes, error_bytes, num_signals, self._lists_size = (
            self._ops.plane_sizes(numbers[0])
        )
        self.windows = [self._zeros(window_bytes) for _ in range(num_ranks)]
        self._signals = [self._zeros(8 * max(num_signals, 1)) for _ in range(num_ranks)]
        self._states = [self._zeros(state_bytes) for _ in range(num_ranks)]
        self._errors = [
            torch.zeros(error_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(num_ranks)
        ]
        self.members = [topology.ranks_of_node(n) for n in topology.node_of_rank]
        all_windows = self.table([self.windows[r] for r in range(num_ranks)])
        all_signals = self.table(self._signals)
        self.planes = [
            self._ops.plane_over_memory(
                topology.table(self.device),
                self.table([self.windows[peer] for peer in self.members[rank]]),
                self._states[rank],
                self._errors[rank],
                all_windows,
                all_signals,
                numbers[rank],
                settings.roles(topology.num_nodes),
                int(settings.timeout_s * 1e9),
            )
            for rank in range(num_ranks)
        ]
        self.streams = [torch.cuda.Stream(self.device) for _ in range(num_ranks)]
        for rank in range(num_ranks):  # no allocation may have to wait for a kernel that waits
            with torch.cuda.stream(self.streams[rank]):
                torch.empty(64 << 10, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize()
        for plane in self.planes:
            self._ops.plane_close(plane)
        self.planes = []

    def _zeros(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def table(self, tensors: Sequence[Tensor]) -> Tensor:
        """int64 addresses."""
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=self.device)

    def tables(self, per_rank: Sequence[Weights]) -> list[Tensor]:
        """For each rank, int64 ``[T, G]``: the tensors of the ranks of its node."""
        num_tensors = len(per_rank[0])
        return [
            torch.stack(
                [self.table([per_rank[peer][t] for peer in members]) for t in range(num_tensors)]
            )
            for members in self.members
        ]

    def on_every_rank(self, enqueue: Callable[[int], Result]) -> list[Result]:
        """Calls ``enqueue(rank)`` on each rank's stream, between fork and join with the current."""
        current = torch.cuda.current_stream()
        results = []
        for stream in self.streams:
            stream.wait_stream(current)
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                results.append(enqueue(rank))
        for stream in self.streams:
            current.wait_stream(stream)
        return results

    def exchange(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Each rank's int32 ``[R, E]``."""
        return self.on_every_rank(
            lambda r: ops.exchange_counts(rows[r], self.planes[r], self.config.num_ranks)
        )

    def solve(self, counts: Tensor) -> list[tuple[Tensor, ...]]:
        """What every rank's solve gives: the plan's tables, and its transfer lists."""
        config = self.config
        nodes = config.topology.num_nodes
        every = choose_candidates(config.objective, "portfolio", None, nodes)
        candidates = [c.pack() for c in every]
        arguments = (
            counts,
            config.topology.table(self.device),
            config.spare_slots,
            candidates,
            config.objective.to_ints(),
        )
        return self.on_every_rank(
            lambda r: ops.solve_for_plane(*arguments, self.planes[r], self._lists_size)
        )

    def lists(self, plan: Plan) -> list[Tensor]:
        """The transfer lists of every rank, for a plan of this configuration."""
        return [tables[8] for tables in self.solve(plan.counts)]

    def replicate(
        self, plan: Plan, lists: list[Tensor], tables: list[Tensor], spare: Sequence[Weights]
    ) -> None:
        self.on_every_rank(
            lambda r: ops.replicate_(*_copies(plan), lists[r], tables[r], spare[r], self.planes[r])
        )

    def reduce(
        self,
        plan: Plan,
        lists: list[Tensor],
        tables: list[Tensor],
        slot_grads: Sequence[Weights],
        home_grads: Sequence[Weights],
    ) -> None:
        self.on_every_rank(
            lambda r: ops.reduce_across_(
                *_copies(plan), lists[r], tables[r], slot_grads[r], home_grads[r], self.planes[r]
            )
        )

    def errors(self) -> list[str]:
        """What the ranks' error records say, after waiting for the device."""
        torch.cuda.synchronize()
        texts = [describe_error(bytes(e.numpy()), self.settings.timeout_s) for e in self._errors]
        return [text for text in texts if text is not None]


def small_settings(num_ranks: int) -> PlaneSettings:
    """Small rings and blocks, so that tests reach every wrap-around and fit any GPU."""
    return replace(
        PlaneSettings(),
        comm_sms=4 if num_ranks <= 16 else 3,
        timeout_s=10,
        chunk_bytes=512,
        tile_bytes=256,
        ring_slots=2,
        staging_slots=2,
        threads=128,
    )


def _copies(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    return plan.slot_expert, plan.copy_offsets, plan.copy_slots
