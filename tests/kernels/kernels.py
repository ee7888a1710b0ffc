# SPDX-License-Identifier: Apache-2.0
"""The product's kernels under the emulation, called with torch tensors on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.emulation.harness import SCHEDULES, Emulator, Schedule, Stats, aligned_array
from topoep.ops import STAT_NAMES
from topoep.plan import Plan

_UNIT = Path(__file__).with_name("kernel_unit.cpp")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # DType in core/numeric.h


class Kernels:
    """One schedule of the emulation: every method launches a kernel and checks for reports."""

    def __init__(self, schedule: Schedule = SCHEDULES[0], num_sms: int = 3) -> None:
        self.emulator = _emulator()
        self.schedule = schedule
        self.num_sms = num_sms

    def _run(self, entry: str, arguments: Sequence[object], inputs: list, outputs: list) -> None:
        arrays = {f"input{i}": _array(t) for i, t in enumerate(inputs)}
        written = {f"output{i}": _array(t) for i, t in enumerate(outputs)}
        converted = [_array(a) if isinstance(a, Tensor) else a for a in arguments]
        self.emulator.use(self.schedule)
        with (
            self.emulator.memory(**arrays),
            self.emulator.memory(initialised=False, **written),
        ):
            self.emulator.call(entry, *converted)
        reports = self.emulator.take_reports()
        assert not reports, "\n".join(str(report) for report in reports)

    def _size(self, entry: str, *arguments: int) -> int:
        function = self.emulator.library[entry]
        return int(function(*[_long(a) for a in arguments]))

    def stats(self) -> Stats:
        """Counters of the emulation so far."""
        return self.emulator.stats()

    def histogram(self, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        size = (ids.numel(), ids.element_size(), num_experts, self.num_sms)
        workspace = _bytes(self._size("histogram_workspace", *size))
        counts = torch.empty(num_experts, dtype=torch.int32)
        invalid = torch.empty((), dtype=torch.int32)
        self._run(
            "run_histogram",
            [ids, *size, workspace, counts, invalid],
            [ids],
            [workspace, counts, invalid],
        )
        return counts, invalid

    def solve(
        self,
        counts: Tensor,
        table: Tensor,
        spare_slots: int,
        candidates: Sequence[int],
        objective: Sequence[int],
        rank: int,
        max_shared: int = 96 * 1024,
        with_lists: bool = False,
    ) -> tuple[Tensor, ...]:
        """Same arguments and results as ``topoep.ops.solve``, perhaps as ``solve_for_plane``."""
        ranks, experts = counts.shape
        nodes = table.numel() - 3 * ranks - 1
        width = experts // ranks + spare_slots
        workspace = _bytes(
            self._size(
                "solve_workspace", ranks, nodes, experts, spare_slots, len(candidates),
                self.num_sms, max_shared,
            )
        )  # fmt: skip
        rows = ranks if rank >= 0 else 0
        outputs = [
            *(torch.empty(ranks, spare_slots, dtype=torch.int32) for _ in range(3)),
            torch.empty(experts + 1, dtype=torch.int32),
            torch.empty(ranks * spare_slots, dtype=torch.int32),
            torch.empty(rows * width, dtype=torch.int32),
            torch.empty(rows, width, dtype=torch.int32),
            torch.empty(len(STAT_NAMES), dtype=torch.int64),
        ]
        if with_lists:
            size = self._size("lists_size", ranks, nodes, experts, spare_slots)
            outputs.append(torch.full((size,), -7, dtype=torch.int32))
        packed = torch.tensor(candidates)
        goal = torch.tensor(objective)
        self._run(
            "run_solve",
            [counts, table, ranks, nodes, experts, spare_slots, packed, len(candidates), goal,
             rank, self.num_sms, max_shared, workspace, *outputs, *([] if with_lists else [None])],
            [counts, table],
            [workspace, *outputs],
        )  # fmt: skip
        return tuple(outputs)

    def split(self, plan: Plan) -> Tensor:
        config = plan.config
        sizes = (
            config.num_ranks, config.topology.num_nodes, config.num_experts, config.spare_slots,
        )  # fmt: skip
        workspace = _bytes(self._size("split_workspace", *sizes))
        split = torch.zeros(config.num_ranks, config.num_physical_experts, dtype=torch.int32)
        table = config.topology.table()
        tables = [plan.slot_expert, plan.slot_tokens]
        self._run(
            "run_split",
            [plan.counts, table, *sizes, *tables, self.num_sms, workspace, split],
            [plan.counts, table, *tables, split],
            [workspace],
        )
        return split

    def reroute(self, ids: Tensor, plan: Plan) -> Tensor:
        assert plan.send is not None
        experts = plan.config.num_experts
        workspace = _bytes(self._size("reroute_workspace", ids.numel(), experts, self.num_sms))
        out = torch.empty_like(ids)
        self._run(
            "run_reroute",
            [ids, ids.numel(), ids.element_size(), plan.send, plan.send.numel(),
             plan.copy_offsets, experts, plan.copy_slots, plan.config.num_ranks, self.num_sms,
             workspace, out],
            [ids, plan.send, plan.copy_offsets, plan.copy_slots],
            [workspace, out],
        )  # fmt: skip
        return out

    def expand(self, x: Tensor, pair_of_row: Tensor, top_k: int) -> Tensor:
        out = torch.empty(len(pair_of_row), x.shape[1], dtype=x.dtype)
        self._run(
            "run_expand",
            [x, x.shape[1] * x.element_size(), pair_of_row, len(pair_of_row), top_k, self.num_sms,
             out],
            [x, pair_of_row],
            [out],
        )  # fmt: skip
        return out

    def combine(self, rows: Tensor, row_of_pair: Tensor, weights: Tensor) -> Tensor:
        tokens, top_k = row_of_pair.shape
        y = torch.empty(tokens, rows.shape[1], dtype=rows.dtype)
        self._run(
            "run_combine",
            [_DTYPES.index(rows.dtype), rows, row_of_pair, weights, tokens, top_k, rows.shape[1],
             self.num_sms, y],
            [rows, row_of_pair, weights],
            [y],
        )  # fmt: skip
        return y

    def combine_backward(
        self,
        grad_y: Tensor,
        rows: Tensor,
        pair_of_row: Tensor,
        row_of_pair: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        tokens, top_k = row_of_pair.shape
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        self._run(
            "run_combine_backward",
            [_DTYPES.index(rows.dtype), grad_y, rows, pair_of_row, row_of_pair, weights, tokens,
             len(rows), top_k, rows.shape[1], self.num_sms, grad_rows, grad_weights],
            [grad_y, rows, pair_of_row, row_of_pair, weights],
            [grad_rows, grad_weights],
        )  # fmt: skip
        return grad_rows, grad_weights

    def pack_rows(self, tensors: Sequence[Tensor], index: Tensor) -> Tensor:
        row_bytes = _row_bytes(tensors)
        packed = torch.empty(
            len(index), sum(-(-int(b) // 16) * 16 for b in row_bytes), dtype=torch.uint8
        )
        self._run(
            "run_pack",
            [len(tensors), _pointers(tensors), row_bytes, index, len(index), self.num_sms, packed],
            [*tensors, index],
            [packed],
        )
        return packed

    def unpack_rows_(self, tensors: Sequence[Tensor], index: Tensor, packed: Tensor) -> None:
        self._run(
            "run_unpack",
            [len(tensors), _pointers(tensors), _row_bytes(tensors), index, len(index),
             self.num_sms, packed],
            [*tensors, index, packed],
            [],
        )  # fmt: skip

    def reduce_grads_(self, out: Tensor, rows: Tensor, offsets: Tensor, order: Tensor) -> None:
        self._run(
            "run_reduce_grads",
            [_DTYPES.index(out.dtype), out, rows, offsets, order, *out.shape, self.num_sms],
            [out, rows, offsets, order],
            [],
        )


@functools.cache
def _emulator() -> Emulator:
    return Emulator([_UNIT])


def _long(value: int) -> object:
    import ctypes

    return ctypes.c_longlong(value)


def _array(tensor: Tensor | np.ndarray) -> np.ndarray:
    """A view of the tensor's memory, as bytes where numpy has no such dtype."""
    if isinstance(tensor, np.ndarray):
        return tensor
    assert tensor.is_contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.view(torch.int16)
    return tensor.detach().numpy()


def _bytes(size: int) -> np.ndarray:
    """Aligned as device allocations are."""
    return aligned_array(size, np.uint8)


def _pointers(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors])


def _row_bytes(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([t[0].numel() * t.element_size() for t in tensors])
