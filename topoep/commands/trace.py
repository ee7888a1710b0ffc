# SPDX-License-Identifier: Apache-2.0
"""``python -m topoep trace``: join, describe and draw recorded routing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from topoep.commands.arguments import CommandError, add_import_options, load, need
from topoep.trace import Trace, merge


def add_parser(commands: Any) -> None:
    """Adds the command and its sub-commands."""
    parser = commands.add_parser("trace", help="join, describe and draw recorded routing")
    actions = parser.add_subparsers(dest="action", required=True)

    joined = actions.add_parser(
        "merge", help="join the files of all ranks; or import counts from .npy, .npz or .csv"
    )
    joined.add_argument("parts", type=Path, nargs="+", metavar="FILE")
    joined.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.npz")
    add_import_options(joined)
    joined.set_defaults(run=_merge)

    described = actions.add_parser("info", help="sizes, and imbalance over layers and steps")
    described.add_argument("trace", type=Path, metavar="FILE")
    add_import_options(described)
    described.set_defaults(run=_info)

    drawn = actions.add_parser(
        "plot", help="imbalance over time and layers, rank loads, expert heat map; .png or .svg"
    )
    drawn.add_argument("trace", type=Path, metavar="FILE")
    drawn.add_argument(
        "-o", "--output", type=Path, required=True, nargs="+", metavar="FILE", help=".png or .svg"
    )
    drawn.add_argument("--layer", type=int, help="of the heat map and the rank loads")
    add_import_options(drawn)
    drawn.set_defaults(run=_plot)


def _merge(given: argparse.Namespace) -> None:
    if given.output.suffix != ".npz":
        raise CommandError(f"{given.output}: a trace is an .npz file; give a name that ends so")
    parts = [load(path, given) for path in given.parts]
    trace = merge(parts)
    trace.save(given.output)
    print(f"wrote {given.output}: {_sizes(trace)}")


def _sizes(trace: Trace) -> str:
    assert trace.ranks is not None
    part = "" if trace.is_whole else f" ({len(trace.ranks)} of them in this file)"
    return (
        f"{trace.num_steps} steps, {trace.num_layers} layers, {trace.num_ranks} ranks{part} on "
        f"{trace.topology.num_nodes} nodes, {trace.num_experts} experts, top-{trace.top_k}"
    )


def _info(given: argparse.Namespace) -> None:
    need("rich")
    from rich.console import Console
    from rich.table import Table

    trace = load(given.trace, given)
    console = Console()
    console.print(f"{given.trace}: {_sizes(trace)}", highlight=False, markup=False, soft_wrap=True)
    if left_out := trace.meta.get("left_out"):
        console.print(f"{left_out} microbatches were not recorded", highlight=False, markup=False)
    if not trace.is_whole:
        console.print("join the files of all ranks (trace merge) to see imbalance")
        return
    imbalance = trace.imbalance()
    tokens = trace.counts.sum((2, 3), dtype=np.int64) / trace.num_ranks / trace.top_k
    table = Table(title="imbalance: fullest rank / mean")
    for name in ("layer", "tokens per rank", "mean", "p95", "worst", "hottest expert"):
        table.add_column(name, justify="right")
    for layer in range(trace.num_layers):
        values = imbalance[:, layer]
        per_expert = trace.counts[:, layer].sum((0, 1), dtype=np.int64)
        share = per_expert.max() / max(int(per_expert.sum()), 1)
        table.add_row(
            str(layer),
            f"{tokens[:, layer].mean():.0f}",
            *(f"{value:.3f}" for value in (values.mean(), np.percentile(values, 95), values.max())),
            f"{per_expert.argmax()} ({100 * share:.1f} % of tokens)",
        )
    console.print(table)


def _plot(given: argparse.Namespace) -> None:
    need("matplotlib")
    from topoep.trace_plot import plot_trace

    for path in given.output:
        if path.suffix not in (".png", ".svg"):
            raise CommandError(f"{path}: expected a name that ends in .png or .svg")
    trace = load(given.trace, given)
    trace.check_whole()
    if given.layer is not None and not 0 <= given.layer < trace.num_layers:
        raise CommandError(f"layer {given.layer}; the trace has 0 to {trace.num_layers - 1}")
    for path in given.output:
        plot_trace(trace, path, given.layer)
        print(f"wrote {path}")
