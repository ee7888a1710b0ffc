# SPDX-License-Identifier: Apache-2.0
"""A data plane on the CPU: windows are plain tensors, and kernels are gloo and indexing.

Addresses are small numbers that only the rank that owns the window can resolve, so that a transport
which hands over a wrong table is found out.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from topoep import ops
from topoep.plan import PlanConfig
from topoep.topology import Topology
from topoep.transports import LocalTransport
from topoep.transports.plane import Plane, PlaneSettings, Window


class FakePlane(Plane):
    """One rank's windows; ``record`` is its error record, ``calls`` what was asked of it."""

    def __init__(self, topology: Topology, group: dist.ProcessGroup) -> None:
        self.device = torch.device("cpu")
        self.topology, self.group = topology, group
        self.rank = dist.get_rank(group)
        members = topology.ranks_of_node(topology.node_of_rank[self.rank])
        self.local, self.num_local = members.index(self.rank), len(members)
        self.memory: dict[int, torch.Tensor] = {}
        self.record = bytes(48)
        self.calls: list[str] = []
        self._next = 1 << 20

    def window(self, num_bytes: int) -> Window:
        self.calls.append(f"window {num_bytes}")
        dist.barrier(self.group)  # collective, as with NCCL
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.memory[self._next] = memory
        # Each rank of the node has the window somewhere else.
        addresses = tuple(self._next + (rank << 40) for rank in range(self.num_local))
        self._next += (num_bytes + 4095) // 4096 * 4096
        return Window(memory, addresses)

    def start(self, config: PlanConfig, settings: PlaneSettings) -> None:
        self.calls.append("start")
        self.config = config

    def error_record(self) -> bytes:
        return self.record

    def exchange(self, row: torch.Tensor) -> torch.Tensor:
        self.calls.append("exchange")
        rows = [torch.empty_like(row) for _ in range(self.config.num_ranks)]
        dist.all_gather(rows, row, group=self.group)
        return torch.stack(rows)

    def solve(self, counts, topology, spare_slots, candidates, objective):
        self.calls.append("solve")
        tables = ops.solve(counts, topology, spare_slots, candidates, objective, self.rank)
        return (*tables, tables[0] + 1000)

    def replicate(self, plan, home, spare) -> None:
        self.calls.append("replicate")
        assert torch.equal(plan.lists, plan.slot_expert + 1000)
        mine = self._resolve(home, [(self.config.experts_per_rank, t) for t in spare])
        everyone: list = [None] * self.config.num_ranks
        dist.all_gather_object(everyone, mine, self.group)
        simulated = LocalTransport(self.topology)
        out = [
            tuple(t.clone() if r == self.rank else torch.zeros_like(t) for t in spare)
            for r in range(self.config.num_ranks)
        ]
        # A copy: what this reads of the plan on the host is not read for others.
        simulated.replicate(replace(plan), everyone, out)
        for target, source in zip(spare, out[self.rank], strict=True):
            target.copy_(source)

    def reduce(self, plan, slot_table, slot_grads, home_grads) -> None:
        self.calls.append("reduce")
        assert torch.equal(plan.lists, plan.slot_expert + 1000)
        (slot_type,), (home_type,) = {t.dtype for t in slot_grads}, {t.dtype for t in home_grads}
        assert {slot_type, home_type} <= {torch.float32, torch.bfloat16}
        mine = self._resolve(slot_table, [(self.config.spare_slots, t) for t in slot_grads])
        for ours, theirs in zip(mine, slot_grads, strict=True):
            assert ours.data_ptr() == theirs.data_ptr(), "the table leads elsewhere"
        everyone: list = [None] * self.config.num_ranks
        dist.all_gather_object(everyone, (mine, tuple(home_grads)), self.group)
        homes = [h for _, h in everyone]
        homes[self.rank] = tuple(home_grads)
        slots = [s for s, _ in everyone]
        LocalTransport(self.topology).reduce_grads(replace(plan), slots, homes)
        used = plan.slot_expert[self.rank] >= 0
        for slot in slot_grads:
            slot[used] = 0

    def close(self, abort: bool) -> None:
        self.calls.append(f"close {abort}")

    def _resolve(self, table: torch.Tensor, like) -> tuple[torch.Tensor, ...]:
        """This rank's tensors, from its own column of a table of addresses."""
        assert tuple(table.shape) == (len(like), self.num_local)
        found = []
        for address, (rows, tensor) in zip(table[:, self.local].tolist(), like, strict=True):
            address -= self.local << 40
            begin = max(start for start in self.memory if start <= address)
            size = rows * tensor[0].numel() * tensor.element_size()
            memory = self.memory[begin][address - begin : address - begin + size]
            assert memory.numel() == size
            found.append(memory.view(tensor.dtype).view(rows, *tensor.shape[1:]))
        return tuple(found)


class FakeConnector:
    """Connects to a FakePlane unless told what is wrong, before or while connecting."""

    def __init__(self, before: str = "", while_connecting: str = "") -> None:
        self.before, self.while_connecting = before, while_connecting
        self.planes: list[FakePlane] = []

    def problem(self, topology: Topology, over_group) -> str:
        return self.before

    def connect(self, topology, group):
        if self.while_connecting:
            return None, self.while_connecting
        self.planes.append(FakePlane(topology, group))
        return self.planes[-1], ""
