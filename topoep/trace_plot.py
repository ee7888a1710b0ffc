# SPDX-License-Identifier: Apache-2.0
"""The picture of a trace: imbalance over time and layers, rank loads, expert heat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from topoep.trace import Trace

_NODE_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568")
_INK = "#1a202c"


def plot_trace(trace: Trace, path: Path, layer: int | None = None) -> None:
    """Draws a whole trace to a .png or .svg file.

    Args:
        trace: of all ranks.
        path: where to write; its suffix says what.
        layer: of the rank loads and the heat map; the one with the largest imbalance if None.
    """
    figure = trace_figure(trace, layer)
    figure.savefig(path, dpi=130, metadata=None if path.suffix == ".png" else {"Date": None})


def trace_figure(trace: Trace, layer: int | None = None) -> Figure:
    """The picture as a figure."""
    imbalance = trace.imbalance()
    chosen = int(imbalance.mean(0).argmax()) if layer is None else layer
    figure = Figure(figsize=(12, 8), layout="constrained")
    over_time, over_layers, loads, heat = figure.subplots(2, 2).flat
    steps = np.asarray(trace.steps)

    mark = "o" if len(steps) == 1 else None
    low, high = imbalance.min(1), imbalance.max(1)
    over_time.fill_between(steps, low, high, alpha=0.25, color="#718096", label="range of layers")
    over_time.plot(steps, imbalance.mean(1), color=_INK, marker=mark, label="mean of layers")
    over_time.set(xlabel="step", ylabel="fullest rank / mean", title="Imbalance over time")
    over_time.legend(frameon=False)

    shown = over_layers.imshow(
        imbalance.T, aspect="auto", origin="lower", cmap="magma", interpolation="nearest"
    )
    over_layers.set(xlabel="step recorded", ylabel="layer", title="Imbalance of every layer")
    figure.colorbar(shown, ax=over_layers)

    rank_load = trace.rank_loads()[:, chosen].mean(0)
    order = sorted(range(trace.num_ranks), key=lambda rank: (trace.node_of_rank[rank], rank))
    colours = [_NODE_COLOURS[trace.node_of_rank[rank] % len(_NODE_COLOURS)] for rank in order]
    loads.bar(range(len(order)), rank_load[order], color=colours)
    loads.axhline(rank_load.mean(), color=_INK, linestyle="--", linewidth=1, label="mean")
    if len(order) <= 32:
        loads.set_xticks(range(len(order)), [str(rank) for rank in order])
    loads.set(
        xlabel="rank, a colour per node",
        ylabel="tokens to compute",
        title=f"Mean load of each rank, layer {chosen}",
    )
    loads.legend(frameon=False)

    per_expert = trace.counts[:, chosen].sum(1, dtype=np.int64).astype(np.float64)
    share = per_expert / np.maximum(per_expert.mean(1, keepdims=True), 1)
    shown = heat.imshow(
        share.T, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest"
    )
    heat.set(
        xlabel="step recorded", ylabel="expert", title=f"Expert heat, layer {chosen} (1 = mean)"
    )
    figure.colorbar(shown, ax=heat)
    for axes in (over_time, over_layers, heat):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (over_layers, heat):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
