# SPDX-License-Identifier: Apache-2.0
"""``python -m topoep simulate``: what planners gain, predicted from a trace or a generator."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from topoep.commands.arguments import CommandError, need, progress
from topoep.commands.workload import add_workload_options, make_request
from topoep.simulator.planners import PLANNERS
from topoep.simulator.simulate import Result, chosen, simulate


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "simulate", help="predict what planners gain, from a trace or a generator"
    )
    add_workload_options(parser)
    parser.add_argument(
        "--planners",
        default=",".join(PLANNERS),
        metavar="A,B,..",
        help="what to compare (default: %(default)s)",
    )
    parser.add_argument("--spare-slots", type=int, default=2, metavar="S", help="(default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw; .png or .svg")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained page")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Runs the command."""
    need("rich")
    if given.plot or given.html:
        need("matplotlib")
    for path, suffixes in (
        (given.plot, (".png", ".svg")),
        (given.html, (".html",)),
        (given.json, (".json",)),
    ):
        if path is not None and path.suffix not in suffixes:
            raise CommandError(f"{path}: expected a name that ends in {' or '.join(suffixes)}")
    request = make_request(given, chosen(given.planners.split(",")), given.spare_slots)
    points = []
    with progress("planning") as report:
        result = simulate(request, lambda what, done, total: report(done, total, what))
        if given.plot or given.html:
            from topoep.simulator.sweep import sweep

            points = sweep(request, lambda what, done, total: report(done, total, what))
    _print(result)
    if given.json:
        values = result.to_json()
        values["by_skew_and_ep"] = [dataclasses.asdict(point) for point in points]
        given.json.write_text(json.dumps(values, indent=1) + "\n")
        print(f"wrote {given.json}")
    if given.plot:
        from topoep.simulator.plots import plot_simulation

        plot_simulation(result, points, given.plot)
        print(f"wrote {given.plot}")
    if given.html:
        from topoep.simulator.page import write_page

        write_page(result, points, given.html)
        print(f"wrote {given.html}")


def _print(result: Result) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from topoep.simulator.table import COLUMNS, cells, heading, notes

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, (name, _) in enumerate(COLUMNS):
        lines = name.replace(" ", "\n")  # so that the table fits 80 columns
        table.add_column(lines, justify="right" if i else "left", no_wrap=True)
    for planner in result.planners:
        table.add_row(*cells(planner))
    console.print(heading(result), highlight=False, markup=False)
    console.print(table)
    for line in notes(result):
        console.print(line, highlight=False, markup=False)
