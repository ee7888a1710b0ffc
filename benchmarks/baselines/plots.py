# SPDX-License-Identifier: Apache-2.0
"""The pictures of bench_quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]

_STYLE = {  # planner: colour, marker
    "EPLB hierarchical": ("#7f7f7f", "s"),
    "EPLB global": ("#bcbd22", "s"),
    "two-stage (paper)": ("#8c564b", "P"),
    "LLEP-like": ("#17becf", "v"),
    "ECHO one-shot": ("#ff7f0e", "D"),
    "TAOT": ("#2ca02c", "^"),
    "UltraEP one domain": ("#9467bd", "o"),
    "UltraEP per node": ("#e377c2", "o"),
    "MoonEP": ("#1f77b4", "<"),
}
_OURS = "#d62728"
_FLOOR = 0.001  # percent above the mean, at which a logarithmic axis ends


def plot_tradeoff(cells: Sequence[Row], curve: Sequence[Row], target: Path) -> None:
    """Weighted copies against imbalance of the main grid with S = 2, a panel per R.

    Args:
        cells: rows with ``group``, ``R``, ``S``, ``planner``, ``imbalance``, ``copies``.
        curve: TopoEP alone, with ``R``, ``S``, ``tolerance``, ``imbalance``, ``copies``.
        target: where to write.
    """
    sizes = sorted({row["R"] for row in curve})
    columns = min(len(sizes), 3)
    lines = -(-len(sizes) // columns)
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(4.2 * columns, 3.3 * lines + 1),
        layout="constrained",
        squeeze=False,
    )
    for axes, ranks in zip(grid.flat, sizes, strict=False):
        ours = [row for row in curve if (row["R"], row["S"]) == (ranks, 2)]
        line = [
            _point([row for row in ours if row["tolerance"] == tolerance])
            for tolerance in sorted({row["tolerance"] for row in ours})
        ]
        axes.plot(*zip(*line, strict=True), color=_OURS, marker=".", label="TopoEP", zorder=3)
        here = [
            row
            for row in cells
            if (row["group"], row["R"]) == ("main", ranks) and row["S"] in (2, "own")
        ]
        for name, (colour, marker) in _STYLE.items():
            point = _point([row for row in here if row["planner"] == name])
            label = f"{name} (moves homes)" if name.startswith("EPLB") else name
            axes.plot(*point, marker, color=colour, markersize=8, label=label, linestyle="none")
        axes.set(xscale="log", yscale="log", title=f"R = {ranks}", xlim=(_FLOOR * 0.6, 200))
        axes.set_xticks(
            [0.001, 0.01, 0.1, 1, 10, 100], ["≤ 0.001", "0.01", "0.1", "1", "10", "100"]
        )
        low, high = axes.get_ylim()
        ticks = [m * 10**p for p in range(4) for m in (1, 2, 5) if low <= m * 10**p <= high]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(sizes) :]:
        axes.set_visible(False)
    figure.supxlabel("fullest rank above the mean, % (two spare slots; MoonEP H, LLEP any number)")
    figure.supylabel("weighted copies")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def _point(rows: Sequence[Row]) -> tuple[float, float]:
    above = float(np.mean([100 * (row["imbalance"] - 1) for row in rows]))
    return max(above, _FLOOR), float(np.mean([row["copies"] for row in rows]))


def plot_sequences(
    sequences: Mapping[str, Mapping[str, Sequence[float]]], first_step: int, target: Path
) -> None:
    """Imbalance over the steps, a panel per sequence and a line per planner."""
    figure, panels = plt.subplots(
        1, len(sequences), figsize=(5.5 * len(sequences), 3.6), layout="constrained", sharey=True
    )
    for axes, (title, lines) in zip(panels, sequences.items(), strict=True):
        for (name, values), (colour, style) in zip(
            lines.items(), (("#444444", "--"), ("#1f77b4", "-"), (_OURS, "-")), strict=True
        ):
            steps = range(first_step, first_step + len(values))
            axes.plot(steps, values, style, color=colour, marker=".", label=name)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("fullest rank / mean")
    panels[0].legend()
    figure.savefig(target, dpi=120)
    plt.close(figure)
