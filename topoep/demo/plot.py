# SPDX-License-Identifier: Apache-2.0
"""The picture of a demo. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from topoep.demo.launch import DemoResult
from topoep.plan import solve

_NODE_COLOURS = ("#2b6cb0", "#dd6b20", "#6b46c1", "#2c7a7b", "#b83280", "#975a16")
_BEFORE, _AFTER = "#a0aec0", "#276749"
_INK = "#2d3748"


def _light(colour: str) -> tuple[float, float, float]:
    """The tint of what was before."""
    red, green, blue = (0.38 * part + 0.62 for part in to_rgb(colour))
    return red, green, blue


def plot_demo(result: DemoResult, path: Path) -> None:
    """Draws rank loads of one layer and step, and the imbalance over the steps, as a PNG."""
    # Without pyplot there is neither a window nor any state that outlives the figure.
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1, wspace=0.04)
    figure = Figure(figsize=(13, 5.2), dpi=150, layout=layout)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_INK)
        axes.tick_params(colors=_INK, labelsize=11)
        axes.grid(axis="y", color="#e2e8f0")
        axes.set_axisbelow(True)
    _draw_loads(left, result)
    _draw_imbalance(right, result)
    figure.savefig(path)


def typical_step(imbalance: npt.NDArray[np.float64]) -> tuple[int, int]:
    """The step and layer whose imbalance is the median of all (the lower one of two)."""
    order = np.argsort(imbalance, axis=None, kind="stable")
    step, layer = np.unravel_index(order[(len(order) - 1) // 2], imbalance.shape)
    return int(step), int(layer)


def rank_loads(
    result: DemoResult, step: int, layer: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens that each rank computes without and with copies, int64 ``[R]`` each."""
    config = result.config
    counts = result.balanced.counts[step, layer]
    plan = solve(torch.from_numpy(counts), config.topology, config.spare_slots)
    before = counts.sum(0).reshape(config.num_ranks, -1).sum(1)
    after = plan.split().numpy().sum(0).reshape(config.num_ranks, -1).sum(1)
    return before.astype(np.int64), after.astype(np.int64)


def _draw_loads(axes: Axes, result: DemoResult) -> None:
    config = result.config
    step, layer = typical_step(result.balanced.stats["imbalance_before"])
    before, after = rank_loads(result, step, layer)
    mean = before.mean()
    nodes = config.topology.node_of_rank
    colours = [_NODE_COLOURS[node % len(_NODE_COLOURS)] for node in nodes]
    # A gap between the nodes
    places = np.arange(config.num_ranks) + 0.6 * np.array(nodes)
    width = 0.4
    axes.bar(places - width / 2, before, width, color=[_light(c) for c in colours], linewidth=0)
    axes.bar(places + width / 2, after, width, color=colours, linewidth=0)
    axes.axhline(mean, color=_INK, linestyle=(0, (4, 3)), linewidth=1.4)
    few = config.num_ranks <= 16  # more numbers than that do not fit side by side
    axes.set_xticks(places, [str(rank) if few else "" for rank in range(config.num_ranks)])
    for node in range(config.topology.num_nodes):
        centre = float(np.mean([places[rank] for rank in config.topology.ranks_of_node(node)]))
        axes.annotate(
            f"node {node}",
            (centre, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -24),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=12 if config.nodes <= 6 else 8,
            color=_NODE_COLOURS[node % len(_NODE_COLOURS)],
            fontweight="bold",
        )
    axes.set_ylim(0, before.max() * 1.16)  # room for the legend
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("rank", fontsize=12, color=_INK, labelpad=24 if few else 40)
    axes.set_ylabel("tokens to compute", fontsize=12, color=_INK)
    axes.set_title(
        f"Load of each rank (step {step + 1}, layer {layer + 1}, a typical one)\n"
        f"imbalance {before.max() / mean:.2f} before, {after.max() / mean:.2f} after",
        fontsize=13,
        color=_INK,
        loc="left",
    )
    axes.legend(
        handles=[
            Patch(color=_light(_INK), linewidth=0, label="before"),
            Patch(color=_INK, linewidth=0, label="after"),
            Line2D([], [], color=_INK, linestyle=(0, (4, 3)), label="mean"),
        ],
        ncols=3,
        loc="upper right",
        frameon=False,
        fontsize=11,
        labelcolor=_INK,
    )


def _draw_imbalance(axes: Axes, result: DemoResult) -> None:
    steps = np.arange(1, result.config.steps + 1)
    marker = "o" if len(steps) == 1 else None  # a line needs two points
    for name, label, colour, ink in (
        ("imbalance_before", "before", _BEFORE, "#4a5568"),
        ("imbalance", "after", _AFTER, _AFTER),
    ):
        values = result.balanced.stats[name]
        axes.fill_between(
            steps,
            values.min(1),
            values.max(1),
            color=colour,
            alpha=0.35,
            linewidth=0,
            label=f"{label}, range of layers",
        )
        axes.plot(
            steps,
            values.mean(1),
            color=ink,
            linewidth=2,
            marker=marker,
            label=f"{label}, mean of layers",
        )
    axes.axhline(1, color=_INK, linestyle=(0, (1, 2)), linewidth=1)
    axes.set_xlim(steps[0], max(steps[-1], 2))
    top = float(result.balanced.stats["imbalance_before"].max())
    height = max(top - 1, 0.1)
    axes.set_ylim(1 - 0.05 * height, 1 + 1.2 * height)  # room for the legend
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step", fontsize=12, color=_INK)
    axes.set_ylabel("imbalance (fullest rank / mean)", fontsize=12, color=_INK)
    means = [result.balanced.stats[name].mean() for name in ("imbalance_before", "imbalance")]
    layers = "1 layer" if result.config.layers == 1 else f"{result.config.layers} layers"
    axes.set_title(
        f"Imbalance over training ({layers})\n"
        f"mean {means[0]:.2f} before, {means[1]:.2f} after; 1 is perfect",
        fontsize=13,
        color=_INK,
        loc="left",
    )
    axes.legend(loc="upper right", ncols=2, frameon=False, fontsize=11, labelcolor=_INK)
