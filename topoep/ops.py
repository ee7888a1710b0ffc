# SPDX-License-Identifier: Apache-2.0
"""The torch ops: fakes, gradients, and thin typed wrappers.

Every op is functional except those whose names end in an underscore. Output shapes depend on
(T, K, E, P, R, S) only, never on values, so the ops can be compiled and captured. Letters as in
docs: T local tokens, K top-k, E experts, R ranks, H = E / R home experts per rank, S spare slots
per rank, P = R * (H + S) physical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from topoep import _library

__all__ = [
    "combine",
    "exchange_counts",
    "expand",
    "histogram",
    "pack_rows",
    "reduce_across_",
    "reduce_grads_",
    "replicate_",
    "reroute",
    "solve",
    "solve_for_plane",
    "split",
    "unpack_rows_",
]

assert _library.BUILD_INFO is not None  # loading the library registers the schemas
_ops = torch.ops.topoep

#: Names of the entries of the stats vector that ``solve`` returns, in order.
STAT_NAMES = (
    "tokens",
    "max_load_before",
    "max_load",
    "copies",
    "cross_node_copies",
    "cross_node_tokens_before",
    "cross_node_tokens",
    "candidate",
    "cap",
    "steps",
    "predicted_ns_before",
    "predicted_ns",
)

#: A packed row gives every tensor's part a multiple of this many bytes (csrc/core/row_parts.h).
ROW_ALIGNMENT = 16


def histogram(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Counts routed ids.

    Args:
        ids: int32 or int64 ``[T, K]``; -1 is padding.
        num_experts: E.

    Returns:
        ``counts``, int32 ``[E]``, and ``invalid``, int32 ``[]``: how many ids are neither -1 nor
        in ``[0, E)``. Padding is in neither.
    """
    counts, invalid = _ops.histogram(ids, num_experts)
    return counts, invalid


def solve(
    counts: Tensor,
    topology: Tensor,
    spare_slots: int,
    candidates: Sequence[int],
    objective: Sequence[int],
    rank: int,
) -> tuple[Tensor, ...]:
    """Solves all candidates and returns the best plan; see :func:`topoep.solve`.

    Args:
        counts: int32 ``[R, E]``.
        topology: int32 table from :meth:`topoep.Topology.table`, on the device of ``counts``.
        spare_slots: S.
        candidates: packed candidates, the first of which is the empty plan.
        objective: from ``to_ints`` of an objective.
        rank: whose ``send`` and ``recv`` to fill; -1 leaves them without elements.

    Returns:
        ``slot_expert``, ``slot_source``, ``slot_tokens`` (int32 ``[R, S]``), ``copy_offsets``
        (int32 ``[E + 1]``), ``copy_slots`` (int32 ``[R * S]``), ``send`` (int32 ``[P]``), ``recv``
        (int32 ``[R, H + S]``) and ``stats`` (int64, named by ``STAT_NAMES``).
    """
    result: tuple[Tensor, ...] = _ops.solve(
        counts, topology, spare_slots, candidates, objective, rank
    )
    return result


def split(counts: Tensor, topology: Tensor, slot_expert: Tensor, slot_tokens: Tensor) -> Tensor:
    """Tokens that every source rank sends to every physical expert.

    Args:
        counts: int32 ``[R, E]``.
        topology: int32 table from :meth:`topoep.Topology.table`.
        slot_expert: int32 ``[R, S]``, -1 for empty slots.
        slot_tokens: int32 ``[R, S]``, tokens that each copy serves.

    Returns:
        int32 ``[R, P]``.
    """
    result: Tensor = _ops.split(counts, topology, slot_expert, slot_tokens)
    return result


def reroute(
    ids: Tensor, send: Tensor, copy_offsets: Tensor, copy_slots: Tensor, num_ranks: int
) -> Tensor:
    """Rewrites expert ids to physical ids, filling quotas in token order.

    Args:
        ids: int32 or int64 ``[T, K]``; ids outside ``[0, E)`` are passed through.
        send: int32 ``[P]``, this rank's quotas.
        copy_offsets: int32 ``[E + 1]``.
        copy_slots: int32 ``[R * S]``.
        num_ranks: R.

    Returns:
        A new tensor like ``ids``.
    """
    result: Tensor = _ops.reroute(ids, send, copy_offsets, copy_slots, num_ranks)
    return result


def expand(x: Tensor, pair_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
    """Copies each token to the rows of its (token, k) pairs.

    Args:
        x: ``[T, D]``, any dtype.
        pair_of_row: int64 ``[M]``: row i is a copy of token ``pair_of_row[i] // K``; -1 gives a
            zero row.
        row_of_pair: int64 ``[T, K]``, the inverse map, -1 where a pair has no row; the gradient
            needs it.

    Returns:
        ``[M, D]``. Its gradient sums the K rows of a token in order of k.
    """
    result: Tensor = _ops.expand(x, pair_of_row, row_of_pair)
    return result


def combine(rows: Tensor, pair_of_row: Tensor, row_of_pair: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the rows of each token, in order of k whatever computed them.

    Args:
        rows: float32, float64, float16 or bfloat16 ``[M, D]``.
        pair_of_row: int64 ``[M]``, as for :func:`expand`.
        row_of_pair: int64 ``[T, K]``; pairs with -1 add nothing.
        weights: ``[T, K]``, float64 for float64 rows, else float32. Sums have this type.

    Returns:
        ``[T, D]`` in the dtype of ``rows``. Differentiable in ``rows`` and ``weights``.
    """
    result: Tensor = _ops.combine(rows, pair_of_row, row_of_pair, weights)
    return result


def pack_rows(tensors: Sequence[Tensor], index: Tensor) -> Tensor:
    """Gathers rows of several tensors side by side, as bytes.

    Args:
        tensors: contiguous ``[rows, ...]`` tensors of any dtypes.
        index: int64 ``[n]``, rows to take.

    Returns:
        uint8 ``[n, bytes]``; each tensor's part is padded with zeros to ``ROW_ALIGNMENT`` bytes.
    """
    result: Tensor = _ops.pack_rows(list(tensors), index)
    return result


def unpack_rows_(tensors: Sequence[Tensor], index: Tensor, packed: Tensor) -> None:
    """Writes packed rows to ``tensors[..][index[i]]``: the inverse of :func:`pack_rows`."""
    _ops.unpack_rows_(list(tensors), index, packed)


def reduce_grads_(out: Tensor, rows: Tensor, offsets: Tensor, order: Tensor) -> None:
    """Adds rows to ``out`` in a fixed order, in float32 (float64 for float64), rounding once.

    Args:
        out: contiguous ``[segments, elements]``, changed in place.
        rows: ``[n, elements]``, float64 if ``out`` is, else float32.
        offsets: int64 ``[segments + 1]``.
        order: int64; segment s adds ``rows[order[offsets[s]]], .., rows[order[offsets[s+1]-1]]``.
    """
    _ops.reduce_grads_(out, rows, offsets, order)


def exchange_counts(row: Tensor, plane: int, num_ranks: int) -> Tensor:
    """Every rank's token counts, over the windows of a data plane. CUDA only, nothing waits.

    Args:
        row: int32 ``[E]``, this rank's counts.
        plane: number of the data plane (csrc/bindings/planes.h).
        num_ranks: R.

    Returns:
        int32 ``[R, E]``.
    """
    result: Tensor = _ops.exchange_counts(row, plane, num_ranks)
    return result


def solve_for_plane(
    counts: Tensor,
    topology: Tensor,
    spare_slots: int,
    candidates: Sequence[int],
    objective: Sequence[int],
    plane: int,
    size: int,
) -> tuple[Tensor, ...]:
    """As :func:`solve` for the rank of a data plane, in one launch with its lists. CUDA only.

    Args:
        counts: int32 ``[R, E]``, this and the next four as for :func:`solve`.
        topology: int32 table.
        spare_slots: S.
        candidates: packed candidates.
        objective: from ``to_ints`` of an objective.
        plane: number of the data plane.
        size: entries of the lists, from ``plane_sizes``.

    Returns:
        What :func:`solve` does, and int32 ``[size]``: who sends, lands and sums what
        (csrc/core/stream_lists.h).
    """
    result: tuple[Tensor, ...] = _ops.solve_for_plane(
        counts, topology, spare_slots, candidates, objective, plane, size
    )
    return result


def replicate_(
    slot_expert: Tensor,
    copy_offsets: Tensor,
    copy_slots: Tensor,
    lists: Tensor,
    home: Tensor,
    spare: Sequence[Tensor],
    plane: int,
) -> None:
    """Fetches the weights of this rank's copies into ``spare``. CUDA only, nothing waits.

    Args:
        slot_expert: int32 ``[R, S]``, this and the next two from the plan.
        copy_offsets: int32 ``[E + 1]``.
        copy_slots: int32 ``[R * S]``.
        lists: from :func:`solve_for_plane`, with the plan.
        home: int64 ``[T, G]``: addresses of the home weights ``[H, ...]`` of each of T tensors at
            each rank of the node.
        spare: T contiguous tensors ``[S, ...]``, changed in place.
        plane: number of the data plane.
    """
    _ops.replicate_(slot_expert, copy_offsets, copy_slots, lists, home, list(spare), plane)


def reduce_across_(
    slot_expert: Tensor,
    copy_offsets: Tensor,
    copy_slots: Tensor,
    lists: Tensor,
    slot_table: Tensor,
    slot_grads: Sequence[Tensor],
    home_grads: Sequence[Tensor],
    plane: int,
) -> None:
    """Adds the gradients of all copies to those at home, in a fixed order. CUDA only.

    Args:
        slot_expert: int32 ``[R, S]``, this and the next two from the plan.
        copy_offsets: int32 ``[E + 1]``.
        copy_slots: int32 ``[R * S]``.
        lists: from :func:`solve_for_plane`, with the plan.
        slot_table: int64 ``[T, G]``: addresses of ``slot_grads`` at each rank of the node.
        slot_grads: this rank's T tensors ``[S, ...]``, float32 or bfloat16, in windows of the data
            plane; slots that the plan uses are zero afterwards.
        home_grads: T contiguous tensors ``[H, ...]``, float32 or bfloat16, changed in place.
        plane: number of the data plane.
    """
    _ops.reduce_across_(
        slot_expert,
        copy_offsets,
        copy_slots,
        lists,
        slot_table,
        list(slot_grads),
        list(home_grads),
        plane,
    )


def packed_row_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of one row of :func:`pack_rows`."""
    sizes = [t[0].numel() * t.element_size() if t.shape[0] else 0 for t in tensors]
    return sum(-(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT for size in sizes)


# ---- fakes: shapes and dtypes without data, for torch.compile and friends ------------------------


@torch.library.register_fake("topoep::histogram")
def _(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return (
        ids.new_empty((num_experts,), dtype=torch.int32),
        ids.new_empty((), dtype=torch.int32),
    )


@torch.library.register_fake("topoep::solve")
def _solve_fake(
    counts: Tensor,
    topology: Tensor,
    spare_slots: int,
    candidates: Sequence[int],
    objective: Sequence[int],
    rank: int,
) -> tuple[Tensor, ...]:
    num_ranks, num_experts = counts.shape
    width = num_experts // num_ranks + spare_slots
    rows = 0 if rank < 0 else num_ranks

    def int32(*shape: int) -> Tensor:
        return counts.new_empty(shape, dtype=torch.int32)

    slots = (num_ranks, spare_slots)
    return (
        int32(*slots),
        int32(*slots),
        int32(*slots),
        int32(num_experts + 1),
        int32(num_ranks * spare_slots),
        int32(rows * width),
        int32(rows, width),
        counts.new_empty((len(STAT_NAMES),), dtype=torch.int64),
    )


@torch.library.register_fake("topoep::split")
def _(counts: Tensor, topology: Tensor, slot_expert: Tensor, slot_tokens: Tensor) -> Tensor:
    num_ranks, num_experts = counts.shape
    return counts.new_empty((num_ranks, num_experts + num_ranks * slot_expert.shape[1]))


@torch.library.register_fake("topoep::reroute")
def _(
    ids: Tensor, send: Tensor, copy_offsets: Tensor, copy_slots: Tensor, num_ranks: int
) -> Tensor:
    return ids.new_empty(ids.shape)


@torch.library.register_fake("topoep::expand")
def _(x: Tensor, pair_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
    return x.new_empty((pair_of_row.shape[0], x.shape[1]))


@torch.library.register_fake("topoep::combine")
def _(rows: Tensor, pair_of_row: Tensor, row_of_pair: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty((row_of_pair.shape[0], rows.shape[1]))


@torch.library.register_fake("topoep::combine_backward")
def _(
    grad_y: Tensor, rows: Tensor, pair_of_row: Tensor, row_of_pair: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


@torch.library.register_fake("topoep::pack_rows")
def _(tensors: Sequence[Tensor], index: Tensor) -> Tensor:
    return index.new_empty((index.shape[0], packed_row_bytes(tensors)), dtype=torch.uint8)


@torch.library.register_fake("topoep::unpack_rows_")
def _(tensors: Sequence[Tensor], index: Tensor, packed: Tensor) -> None:
    return None


@torch.library.register_fake("topoep::reduce_grads_")
def _(out: Tensor, rows: Tensor, offsets: Tensor, order: Tensor) -> None:
    return None


@torch.library.register_fake("topoep::exchange_counts")
def _(row: Tensor, plane: int, num_ranks: int) -> Tensor:
    return row.new_empty((num_ranks, row.shape[0]))


@torch.library.register_fake("topoep::solve_for_plane")
def _(
    counts: Tensor,
    topology: Tensor,
    spare_slots: int,
    candidates: Sequence[int],
    objective: Sequence[int],
    plane: int,
    size: int,
) -> tuple[Tensor, ...]:
    tables = _solve_fake(counts, topology, spare_slots, candidates, objective, 0)
    return (*tables, counts.new_empty((size,), dtype=torch.int32))


@torch.library.register_fake("topoep::replicate_")
def _(
    slot_expert: Tensor,
    copy_offsets: Tensor,
    copy_slots: Tensor,
    lists: Tensor,
    home: Tensor,
    spare: Sequence[Tensor],
    plane: int,
) -> None:
    return None


@torch.library.register_fake("topoep::reduce_across_")
def _(
    slot_expert: Tensor,
    copy_offsets: Tensor,
    copy_slots: Tensor,
    lists: Tensor,
    slot_table: Tensor,
    slot_grads: Sequence[Tensor],
    home_grads: Sequence[Tensor],
    plane: int,
) -> None:
    return None


# ---- gradients -----------------------------------------------------------------------------------


def _expand_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


@once_differentiable
def _expand_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    pair_of_row, row_of_pair = ctx.saved_tensors
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    ones = torch.ones(row_of_pair.shape, dtype=dtype, device=grad.device)
    return _ops.combine(grad.contiguous(), pair_of_row, row_of_pair, ones), None, None


def _combine_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@once_differentiable
def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, pair_of_row, row_of_pair, weights = ctx.saved_tensors
    grad_rows, grad_weights = _ops.combine_backward(
        grad.contiguous(), rows, pair_of_row, row_of_pair, weights
    )
    return grad_rows, None, None, grad_weights


torch.library.register_autograd("topoep::expand", _expand_backward, setup_context=_expand_setup)
torch.library.register_autograd("topoep::combine", _combine_backward, setup_context=_combine_setup)
