# SPDX-License-Identifier: Apache-2.0
"""Rows of results as tables: summed up, printed and written."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

TOLERANCES = (0.002, 0.005, 0.01, 0.02, 0.05)  # of the table
CURVE = (0.0, 0.0005, *TOLERANCES, 0.1, 0.2, 0.5)  # of the plot
COMPACT = (  # tables with many rows
    "planners per R",
    "planners per group",
    "severe",
    "losses",
    "losses to moved homes",
    "cells",
)


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def summary(cells: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Cells with the same values of ``keys`` as one row; means are over cells."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in cells:
        groups[tuple(row[key] for key in keys)].append(row)
    result = []
    for values, rows in groups.items():
        margin = [row["copies"] - row["topoep"] for row in rows]
        won, lost = sum(m > 1e-9 for m in margin), sum(m < -1e-9 for m in margin)
        columns = ("copies", "topoep", "published", "topoep published", "cross %", "topoep cross %")
        result.append(
            {
                **dict(zip(keys, values, strict=True)),
                "before": mean(row["before"] for row in rows),
                "imbalance": mean(row["imbalance"] for row in rows),
                "worst": max(row["worst"] for row in rows),
                **{column: mean(row[column] for row in rows) for column in columns},
                "cells": len(rows),
                "won": won,
                "tied": len(rows) - won - lost,
                "lost": lost,
                "instances": sum(row["instances"] for row in rows),
                "instances lost": sum(row["lost"] for row in rows),
                "#wrong": sum(row["#wrong"] for row in rows),
            }
        )
    return result


def tolerance_table(curve: Sequence[Row]) -> list[Row]:
    """Weighted copies per (R, S), and how many instances missed the tolerance.

    In brackets: how many of them cannot reach it, as the lower bound proves.
    """
    result = []
    for ranks, slots in sorted({(row["R"], row["S"]) for row in curve}):
        chosen = [row for row in curve if (row["R"], row["S"]) == (ranks, slots)]
        line: Row = {"R": ranks, "S": slots, "instances": len(chosen) // len(CURVE)}
        for tolerance in TOLERANCES:
            at = [row for row in chosen if row["tolerance"] == tolerance]
            line[f"{100 * tolerance:g} %"] = mean(row["copies"] for row in at)
            missed, impossible = (sum(row[key] for row in at) for key in ("missed", "impossible"))
            line[f"missed {100 * tolerance:g} %"] = f"{missed} ({impossible})"
        line["#wrong"] = sum(row["#wrong"] for row in chosen)
        result.append(line)
    return result


def moved_homes_summary(losses: Sequence[Row]) -> list[Row]:
    """How many instances are lost per group, R, S and planner."""
    keys = ("group", "R", "S", "planner")
    number = Counter(tuple(row[key] for key in keys) for row in losses)
    wrong_plans = sum(row["#wrong"] for row in losses)
    return [
        {**dict(zip(keys, values, strict=True)), "instances": n, "#wrong": wrong_plans}
        for values, n in number.items()
    ]


def print_table(title: str, rows: Sequence[Row], digits: int = 1) -> None:
    """Columns of imbalances get four digits."""
    print(f"\n{title}")
    if not rows:
        print("  none")
        return

    def text(column: str, value: object) -> str:
        if not isinstance(value, float):
            return str(value)
        precise = column in ("before", "imbalance", "worst", "bound")
        return f"{value:.{4 if precise else digits}f}"

    columns = list(rows[0])
    cells = [[text(column, row[column]) for column in columns] for row in rows]
    widths = [max(len(c), *(len(r[i]) for r in cells)) for i, c in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def compact(cells: Sequence[Row]) -> list[Row]:
    """The cells, those of a group, R and S as one."""
    keys = ("group", "R", "S", "planner")
    columns = (*keys, "imbalance", "copies", "topoep", "cells", "won", "lost", "instances lost")
    return [{column: row[column] for column in columns} for row in summary(cells, keys)]


def write(result: dict[str, Any], target: Path) -> None:
    """JSON with a row per line; long tables are lists of values behind their columns."""
    target.parent.mkdir(parents=True, exist_ok=True)

    def rounded(value: object) -> object:
        return round(value, 4 if abs(value) < 10 else 1) if isinstance(value, float) else value

    parts = []
    for name, value in {**result, "cells": compact(result["cells"])}.items():
        text = json.dumps(value)
        if isinstance(value, list):
            rows: list[Any] = [{key: rounded(v) for key, v in row.items()} for row in value]
            if name in COMPACT and rows:
                rows = [list(value[0]), *(list(row.values()) for row in rows)]
            text = (
                "[" + ",".join(f"\n{json.dumps(row, separators=(',', ':'))}" for row in rows) + "]"
            )
        parts.append(f" {json.dumps(name)}: {text}")
    target.write_text("{\n" + ",\n".join(parts) + "\n}\n")
