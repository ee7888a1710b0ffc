# SPDX-License-Identifier: Apache-2.0
"""What the commands share: optional packages, traces and progress bars."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from topoep.topology import Topology
from topoep.trace import Trace
from topoep.trace_import import read_trace


class CommandError(Exception):
    """A message for the user; the command ends with ``code``."""

    code = 1


class TraceFileError(CommandError):
    """A file that was given as a trace cannot be used."""

    code = 2


def need(*packages: str) -> None:
    """Raises CommandError if a package of the extra ``sim`` is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"this needs {' and '.join(missing)}: pip install 'topoep[sim]'")


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """What foreign counts do not say about themselves."""
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="experts per token, for counts that do not say"
    )
    parser.add_argument(
        "--nodes",
        metavar="NxG",
        help="nodes x ranks per node, for counts that do not say, for example 4x8",
    )


def nodes(text: str) -> Topology:
    """``4x8`` as a topology.

    Raises:
        ValueError: something else.
    """
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isascii() and size.isdigit() for size in sizes):
        raise ValueError(f"nodes {text!r}; expected nodes x ranks per node, for example 4x8")
    return Topology(int(sizes[0]), int(sizes[1]))


def load(path: Path, given: argparse.Namespace) -> Trace:
    """A trace, or foreign counts with the options of ``add_import_options``.

    Raises:
        TraceFileError: there is no such file, or it holds something else.
        ValueError: ``--nodes`` is malformed.
    """
    topology = nodes(given.nodes) if given.nodes else None
    try:
        return read_trace(path, given.top_k, topology)
    except OSError as error:
        raise TraceFileError(
            f"{path}: {error.strerror or error}; expected a trace that topoep.Recorder or the demo "
            "wrote (.npz), or counts (.npz, .npy or .csv)"
        ) from None
    except (TypeError, ValueError) as error:
        raise TraceFileError(" ".join(str(error).split())) from None


@contextmanager
def progress(title: str) -> Iterator[Any]:
    """A rich progress bar on standard error; gives ``advance(done, total)``."""
    need("rich")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, what=title: bar.update(
            task, completed=done, total=total, description=what
        )
