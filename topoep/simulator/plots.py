# SPDX-License-Identifier: Apache-2.0
"""The pictures of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from topoep.simulator.simulate import PlannerResult, Result
from topoep.simulator.sweep import Point

_LINES = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568", "#d69e2e")
_INK = "#1a202c"

# Parts of a layer in the order in which they happen, and their colours.
_PARTS = {
    "planning": ("planning", "#a0aec0"),
    "dispatch": ("exchange of tokens", "#63b3ed"),
    "compute_forward": ("experts", "#2f855a"),
    "exposed_forward": ("waiting for copies", "#c53030"),
    "combine": ("exchange of tokens", "#63b3ed"),
    "combine_backward": ("exchange of tokens", "#63b3ed"),
    "recompute": ("recomputation", "#d69e2e"),
    "compute_backward": ("experts, backward", "#276749"),
    "exposed_backward": ("waiting for copies", "#c53030"),
    "dispatch_backward": ("exchange of tokens", "#63b3ed"),
    "exposed_grads": ("waiting for gradients", "#822727"),
    "interference": ("slow-down by hidden transfers", "#ed8936"),
}


def plot_simulation(result: Result, points: Sequence[Point], path: Path) -> None:
    """Speed-up by skew and EP size, and one layer with and without, to a .png or .svg file."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_speedups(left, points)
    draw_timeline(right, result)
    figure.savefig(path, dpi=130, metadata=None if path.suffix == ".png" else {"Date": None})


def draw_speedups(axes: Axes, points: Sequence[Point]) -> None:
    """A line per EP size over the imbalance."""
    sizes = sorted({point.ep for point in points})
    for size, colour in zip(sizes, _LINES, strict=False):
        line = sorted((p.imbalance, 100 * (p.speedup - 1)) for p in points if p.ep == size)
        axes.plot(
            [x for x, _ in line], [y for _, y in line], marker="o", color=colour, label=f"EP{size}"
        )
    axes.axhline(0, color=_INK, linewidth=0.8)
    axes.set(
        xlabel="imbalance without copies (fullest rank / mean)",
        ylabel="predicted speed-up of a step, %",
        title="TopoEP by skew and EP size (prediction)",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_timeline(axes: Axes, result: Result) -> None:
    """The parts of one layer, one after another, without copies and with."""
    shown = [result["none"], _shown_planner(result)]
    used = {}
    for row, planner in enumerate(shown):
        begin = 0.0
        for name, (label, colour) in _PARTS.items():
            width = planner.parts_ms[name]
            if width > 0:
                used[label] = colour
                axes.barh(row, width, left=begin, color=colour, edgecolor="white", linewidth=0.5)
                begin += width
        axes.text(begin, row, f" {begin:.2f} ms", va="center", color=_INK)
    longest = max(planner.layer_ms for planner in shown)
    axes.set_yticks(range(len(shown)), [planner.label for planner in shown])
    axes.set_xlim(0, longest * 1.18)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set(xlabel="ms", title="One MoE layer, forward and backward (prediction)")
    axes.legend(
        handles=[Patch(color=colour, label=label) for label, colour in used.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=3,
        frameon=False,
        fontsize=8,
    )


def _shown_planner(result: Result) -> PlannerResult:
    """TopoEP if it was simulated, otherwise the last one."""
    names = [planner.name for planner in result.planners]
    return result["topoep"] if "topoep" in names else result.planners[-1]
