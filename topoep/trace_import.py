# SPDX-License-Identifier: Apache-2.0
"""Other people's counts: .npz, .npy and CSV.

``.npz``
    A trace of this package (see :mod:`topoep.trace`), or an array ``counts``.
``.npy``, and ``counts`` in a foreign ``.npz``
    Integers ``[steps, layers, R, E]``, ``[steps, R, E]`` (one layer) or ``[R, E]`` (one step).
``.csv``
    A header line ``step,layer,rank,expert,tokens`` and one line per number, in any order; what is
    not listed is 0. ``rank`` is the source rank, where the router ran.
"""

from __future__ import annotations

import csv
import tokenize
from pathlib import Path

import numpy as np
import numpy.typing as npt

from topoep.plan import MAX_EXPERTS
from topoep.topology import MAX_RANKS, Topology
from topoep.trace import MAX_BYTES, MAX_LAYERS, MAX_STEPS, Trace, check_header, read_npz

COLUMNS = ("step", "layer", "rank", "expert", "tokens")
_LARGEST = (MAX_STEPS, MAX_LAYERS, MAX_RANKS, MAX_EXPERTS, 2**31)


def read_trace(
    path: Path | str, top_k: int | None = None, topology: Topology | None = None
) -> Trace:
    """Reads a trace or foreign counts.

    Args:
        path: a file whose name ends in .npz, .npy or .csv.
        top_k: experts per token, for files that do not say so.
        topology: the ranks and their nodes, likewise.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is malformed (the message names the line or the array), or ``top_k`` or
            ``topology`` is needed.
    """
    path = Path(path)
    steps: tuple[int, ...] | None = None
    if path.suffix == ".npz":
        found = read_npz(path, {"format": (8, 0)})
        if "format" in found:
            return Trace.load(path)
        arrays = {}
        for dimensions in (4, 3, 2):
            try:
                arrays = read_npz(path, {"counts": (8, dimensions)})
                break
            except ValueError:
                if dimensions == 2:
                    raise
        if "counts" not in arrays:
            raise ValueError(f"{path}: neither a trace nor an .npz with an array 'counts'")
        counts = arrays["counts"]
    elif path.suffix == ".npy":
        counts = _read_npy(path)
    elif path.suffix == ".csv":
        counts, steps = _read_csv(path, topology)
    else:
        raise ValueError(f"{path}: unknown kind of file; expected .npz, .npy or .csv")
    if counts.ndim == 3:
        counts = counts[:, None]
    counts = counts.reshape((1,) * (4 - counts.ndim) + counts.shape)
    if top_k is None or topology is None:
        raise ValueError(
            f"{path} does not say how many experts a token has and which rank is on which node; "
            "give --top-k and --nodes (top_k= and topology=)"
        )
    try:
        meta = {"imported": path.name}
        return Trace(counts, topology.node_of_rank, top_k, None, steps, meta)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _read_npy(path: Path) -> npt.NDArray[np.int32]:
    try:
        with path.open("rb") as file:
            shape = check_header(file, path.name, 8, None, path.stat().st_size)
            if not 2 <= len(shape) <= 4:
                raise ValueError(f"shape {shape}; expected [steps, layers, R, E] (or less)")
            file.seek(0)
            counts: npt.NDArray[np.int32] = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, tokenize.TokenError, SyntaxError, ArithmeticError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from None
    return counts


def _read_csv(
    path: Path, topology: Topology | None
) -> tuple[npt.NDArray[np.int32], tuple[int, ...]]:
    """Counts, and the number of each step that a line names."""
    rows: list[tuple[int, ...]] = []
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
        except csv.Error as error:
            raise ValueError(f"{path}, line 1: {error}") from None
        if tuple(name.strip() for name in header) != COLUMNS:
            raise ValueError(f"{path}, line 1: {','.join(header)!r}; expected {','.join(COLUMNS)}")
        try:
            for row in reader:
                if row:
                    rows.append(_csv_numbers(row, f"{path}, line {reader.line_num}"))
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no line after the header")
    table = np.array(rows, dtype=np.int64)
    steps, table[:, 0] = np.unique(table[:, 0], return_inverse=True)
    shape = [int(size) for size in table[:, :4].max(0) + 1]
    if topology is not None:  # ranks and experts that no line names still exist
        shape[2] = max(shape[2], topology.num_ranks)
        shape[3] += -shape[3] % shape[2]
    if np.prod([float(size) for size in shape]) * 4 > MAX_BYTES:
        raise ValueError(f"{path}: counts of shape {shape} take more than {MAX_BYTES} bytes")
    places = np.ravel_multi_index(tuple(table[:, :4].T), tuple(shape))
    order = np.argsort(places, kind="stable")
    repeated = np.flatnonzero(np.diff(places[order]) == 0)
    if len(repeated):
        again = table[order[repeated[0] + 1]]
        again = [int(steps[again[0]]), *again[1:4]]
        named = ", ".join(f"{name} {n}" for name, n in zip(COLUMNS[:4], again, strict=True))
        raise ValueError(f"{path}: {named} is on two lines")
    counts = np.zeros(shape, dtype=np.int32)
    counts.flat[places] = table[:, 4]
    return counts, tuple(int(step) for step in steps)


def _csv_numbers(row: list[str], where: str) -> tuple[int, ...]:
    if len(row) != len(COLUMNS):
        raise ValueError(f"{where}: {len(row)} fields; expected {','.join(COLUMNS)}")
    numbers = []
    for name, text, largest in zip(COLUMNS, row, _LARGEST, strict=True):
        text = text.strip()
        if not (text.isascii() and text.isdigit()) or len(text) > 12 or int(text) >= largest:
            raise ValueError(f"{where}: {name} is {text!r}; expected 0 .. {largest - 1}")
        numbers.append(int(text))
    return tuple(numbers)
