# SPDX-License-Identifier: Apache-2.0
"""Recorded routing: who sent how many tokens to which expert, and the file that holds it.

A trace file is a compressed .npz without pickled objects; ``numpy.load(path)`` reads it:

================  =====================================  =========================================
``format``        int32 ``[]``                           1, the version of this layout
``counts``        int32 ``[steps, layers, ranks, E]``    tokens that a source rank routes to expert
                                                         e, whose home is rank ``e // (E / R)``
``node_of_rank``  int32 ``[R]``                          the node of each rank
``top_k``         int32 ``[]``                           experts per token
``meta``          string ``[]``                          JSON object: where it comes from
``steps``         int64 ``[steps]``, optional            number of each step; 0, 1, 2, .. if absent
``ranks``         int32 ``[ranks]``, optional            the source ranks in this file; all R if
                                                         absent
================  =====================================  =========================================

A file with ``ranks`` is one rank's part; :func:`merge` (``python -m topoep trace merge``) joins
the parts of all ranks. A step is one microbatch.
"""

from __future__ import annotations

import itertools
import json
import logging
import lzma
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from topoep.checks import check_int
from topoep.plan import MAX_EXPERTS, MAX_TOKENS
from topoep.topology import Topology

_logger = logging.getLogger("topoep")

Counts = npt.NDArray[np.int32]

FORMAT = 1
MAX_BYTES = 16 * 2**30  # of the counts in memory
MAX_META_CHARS = 2**18
MAX_STEPS = 10**8
MAX_LAYERS = 4096
MAX_TOP_K = 64  # kMaxTopK in csrc/core/limits.h

# Bytes of an element and the most dimensions of each array of a file.
_LIMITS = {
    "format": (8, 0),
    "counts": (8, 4),
    "node_of_rank": (8, 1),
    "top_k": (8, 0),
    "meta": (4 * MAX_META_CHARS, 0),
    "steps": (8, 1),
    "ranks": (8, 1),
}


@dataclass(frozen=True, eq=False)
class Trace:
    """Counts of several steps and layers.

    Args:
        counts: int32 ``[steps, layers, ranks, E]``.
        node_of_rank: the node of each of the R ranks.
        top_k: experts per token.
        ranks: the source ranks of dimension 2; all R if None.
        steps: the number of each step, ascending; 0, 1, .. if None.
        meta: where it comes from; anything that JSON can hold.

    Raises:
        TypeError: counts are no integers.
        ValueError: the parts do not fit each other, or a limit is exceeded.
    """

    counts: Counts
    node_of_rank: tuple[int, ...]
    top_k: int
    ranks: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts)
        if counts.dtype.kind not in "iu":
            raise TypeError(f"counts have dtype {counts.dtype}; expected integers")
        if counts.ndim != 4 or 0 in counts.shape:
            raise ValueError(
                f"counts have shape {counts.shape}; expected [steps, layers, ranks, E], none of "
                "them 0"
            )
        nodes = Topology(node_of_rank=self.node_of_rank).node_of_rank
        ranks = tuple(range(len(nodes))) if self.ranks is None else tuple(self.ranks)
        steps = tuple(range(len(counts))) if self.steps is None else tuple(self.steps)
        if len(set(ranks)) != len(ranks) or not all(0 <= r < len(nodes) for r in ranks):
            raise ValueError(
                f"ranks {list(ranks)}; expected different ones of 0 .. {len(nodes) - 1}"
            )
        if counts.shape[2] != len(ranks):
            raise ValueError(
                f"counts have shape {counts.shape}, [steps, layers, ranks, E]: {counts.shape[2]} "
                f"source ranks, but node_of_rank and ranks name {len(ranks)}"
            )
        if len(steps) != len(counts) or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ValueError(
                f"{len(steps)} numbers for {len(counts)} steps; expected one each, ascending"
            )
        experts = counts.shape[3]
        if experts > MAX_EXPERTS or experts % len(nodes):
            raise ValueError(
                f"{experts} experts; expected a multiple of {len(nodes)} ranks, at most "
                f"{MAX_EXPERTS} (kMaxExperts)"
            )
        if not 1 <= check_int(self.top_k, "top_k") <= min(MAX_TOP_K, experts):
            raise ValueError(f"top_k={self.top_k}; expected 1 to {min(MAX_TOP_K, experts)}")
        for step, values in enumerate(counts):  # step by step: counts can be gigabytes
            _check_values(step, values)
        object.__setattr__(self, "counts", counts.astype(np.int32, copy=False))
        object.__setattr__(self, "node_of_rank", nodes)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "steps", steps)

    @property
    def num_ranks(self) -> int:
        """R, whether or not this trace has the counts of all of them."""
        return len(self.node_of_rank)

    @property
    def num_steps(self) -> int:
        """Microbatches."""
        return int(self.counts.shape[0])

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.counts.shape[3])

    @property
    def is_whole(self) -> bool:
        """Whether the counts of all R ranks are there, in order."""
        return self.ranks == tuple(range(self.num_ranks))

    @property
    def topology(self) -> Topology:
        """The ranks and their nodes."""
        return Topology(node_of_rank=self.node_of_rank)

    def check_whole(self) -> None:
        """Raises ValueError unless the counts of all ranks are there."""
        if not self.is_whole:
            assert self.ranks is not None
            raise ValueError(
                f"the trace holds {len(self.ranks)} of {self.num_ranks} ranks; join the files of "
                "all ranks first: python -m topoep trace merge"
            )

    def rank_loads(self) -> npt.NDArray[np.int64]:
        """Tokens that each rank computes without copies, ``[steps, layers, R]``."""
        self.check_whole()
        totals = self.counts.sum(2, dtype=np.int64)
        loads: npt.NDArray[np.int64] = totals.reshape(*totals.shape[:2], self.num_ranks, -1).sum(3)
        return loads

    def imbalance(self) -> npt.NDArray[np.float64]:
        """Largest rank load over the mean, ``[steps, layers]``; 1 where nothing was routed."""
        loads = self.rank_loads()
        mean = loads.mean(2)
        return np.where(mean > 0, loads.max(2) / np.where(mean > 0, mean, 1), 1.0)

    def save(self, path: Path | str) -> None:
        """Writes the file, whole or not at all."""
        path = Path(path)
        meta = json.dumps(dict(self.meta))
        if len(meta) > MAX_META_CHARS:
            raise ValueError(
                f"meta takes {len(meta)} characters as JSON; a trace holds at most {MAX_META_CHARS}"
            )
        arrays: dict[str, Any] = {
            "format": np.int32(FORMAT),
            "counts": self.counts,
            "node_of_rank": np.array(self.node_of_rank, dtype=np.int32),
            "top_k": np.int32(self.top_k),
            "meta": np.str_(meta),
        }
        if self.steps != tuple(range(self.num_steps)):
            arrays["steps"] = np.array(self.steps, dtype=np.int64)
        if not self.is_whole:
            arrays["ranks"] = np.array(self.ranks, dtype=np.int32)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            _write_npz(part, arrays)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Reads a file of this layout. Sizes are checked before memory is taken.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no trace, or its parts do not fit each other.
        """
        arrays = read_npz(Path(path), _LIMITS)
        for name in ("format", "counts", "node_of_rank", "top_k", "meta"):
            if name not in arrays:
                raise ValueError(f"{path}: no array {name!r}; is this a trace of topoep?")
        if arrays["format"] != FORMAT:
            raise ValueError(
                f"{path}: format {arrays['format']}; this version reads format {FORMAT}"
            )
        if arrays["top_k"].dtype.kind not in "iu":
            raise ValueError(f"{path}: top_k is {arrays['top_k']}; expected an integer")
        try:
            meta = json.loads(str(arrays["meta"]))
            if not isinstance(meta, dict):
                raise ValueError("meta is no JSON object")
            return cls(
                arrays["counts"],
                tuple(arrays["node_of_rank"].tolist()),
                int(arrays["top_k"]),
                tuple(arrays["ranks"].tolist()) if "ranks" in arrays else None,
                tuple(arrays["steps"].tolist()) if "steps" in arrays else None,
                meta,
            )
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None


def _check_values(step: int, values: npt.NDArray[Any]) -> None:
    """Raises ValueError for counts ``[layers, ranks, E]`` that no plan can be made for."""
    where = np.unravel_index(int(values.argmin()), values.shape)
    if values[where] < 0:
        place = [step, *(int(i) for i in where)]
        raise ValueError(f"counts{place} is {values[where]}; expected no negative number")
    largest = values.max()
    if largest <= MAX_TOKENS:
        sums = values.sum((1, 2), dtype=np.int64)
        largest = sums.max()
        if largest <= MAX_TOKENS:
            return
        layer = int(sums.argmax())
    else:
        layer = int(values.max((1, 2)).argmax())
    raise ValueError(
        f"step {step}, layer {layer} holds at least {largest} tokens; a plan covers at most "
        f"{MAX_TOKENS} (kMaxTokens)"
    )


def _write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """Like numpy.savez_compressed, with the fast level of zlib: counts are hard to compress."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(value), allow_pickle=False)


#: What reading a damaged or hostile file raises besides ValueError.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    tokenize.TokenError,
    SyntaxError,
    ArithmeticError,
    EOFError,
    KeyError,
    MemoryError,
    RuntimeError,
)


def read_npz(path: Path, limits: Mapping[str, tuple[int, int]]) -> dict[str, npt.NDArray[Any]]:
    """Reads the named arrays of an .npz, after a look at every header.

    Args:
        path: the file.
        limits: for each name the most bytes of an element and the number of dimensions; other
            arrays are left alone.

    Raises:
        ValueError: no .npz, damaged, pickled objects, or larger than ``MAX_BYTES``.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            arrays = {}
            for name, (item_bytes, dimensions) in limits.items():
                if name not in members:
                    continue
                with archive.open(members[name]) as file:
                    check_header(file, name, item_bytes, dimensions, members[name].file_size)
                with archive.open(members[name]) as file:
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
            return arrays
    except _DAMAGED as error:
        raise ValueError(f"{path}: no .npz file, or a damaged one ({error})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_header(
    file: Any, name: str, item_bytes: int, dimensions: int | None, size: int
) -> tuple[int, ...]:
    """Reads the header of one array and returns its shape; ``size`` is what its file holds."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"{name!r} is no array of format 1.0, which numpy.save writes")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject:
        raise ValueError(f"{name!r} holds Python objects; expected numbers (nothing is unpickled)")
    if dtype.itemsize > item_bytes or (dimensions is not None and len(shape) != dimensions):
        raise ValueError(
            f"{name!r} has shape {shape} and dtype {dtype}; something else belongs there"
        )
    # Counts become int32, whatever the file holds.
    total = math.prod(shape) * max(dtype.itemsize, np.dtype(np.int32).itemsize)
    if total > MAX_BYTES:
        raise ValueError(f"{name!r}, shape {shape}, takes {total} bytes; the limit is {MAX_BYTES}")
    size -= file.tell()
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"{name!r}, shape {shape}, takes {total} bytes; the file holds {size}")
    return tuple(int(length) for length in shape)


def merge(parts: Sequence[Trace]) -> Trace:
    """Joins the traces of the ranks of one run. Only steps that all of them have are kept.

    Where ranks disagree which steps an error has ended, they may have numbered the later ones
    differently; the trace then ends there, with a warning.

    Raises:
        ValueError: no part, parts of different runs, a rank twice, or ranks that are missing.
    """
    if not parts:
        raise ValueError("nothing to merge")
    first = parts[0]
    column: dict[int, tuple[Trace, int]] = {}
    for part in parts:
        for name in ("num_layers", "num_experts", "top_k", "node_of_rank"):
            mine, other = getattr(part, name), getattr(first, name)
            if mine != other:
                raise ValueError(f"parts of different runs? {name} is {other} and {mine}")
        for name in ("layers", "every"):
            mine, other = part.meta.get(name), first.meta.get(name)
            if mine != other:
                raise ValueError(f"parts of different runs? {name} is {other} and {mine}")
        assert part.ranks is not None
        for index, rank in enumerate(part.ranks):
            if rank in column:
                raise ValueError(f"rank {rank} is in two of the parts")
            column[rank] = (part, index)
    missing = [rank for rank in range(first.num_ranks) if rank not in column]
    if missing:
        raise ValueError(f"the counts of rank {', '.join(map(str, missing))} are missing")
    steps = sorted(set.intersection(*(set(part.steps or ()) for part in parts)))
    end = _agreed(parts)
    if end is not None:
        steps = [step for step in steps if step < end]
        _logger.warning("the trace ends before step %d: not all ranks completed it", end)
    if not steps:
        raise ValueError("no step is in all of the parts")
    counts = np.empty((len(steps), first.num_layers, first.num_ranks, first.num_experts), np.int32)
    rows = {id(part): np.searchsorted(part.steps or (), steps) for part in parts}
    for rank, (part, index) in column.items():
        counts[:, :, rank] = part.counts[rows[id(part)], :, index]
    return Trace(counts, first.node_of_rank, first.top_k, None, tuple(steps), first.meta)


def _agreed(parts: Sequence[Trace]) -> int | None:
    """The first step that only some of the parts name as incomplete; None if there is none."""
    named: list[set[int]] = []
    for part in parts:
        steps = part.meta.get("incomplete", [])
        if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
            raise ValueError(f"meta holds incomplete={steps!r}; expected a list of steps")
        named.append(set(steps))
    union = set[int]().union(*named)
    return min((step for step in union if not all(step in steps for steps in named)), default=None)
