# SPDX-License-Identifier: Apache-2.0
"""``python -m topoep simulate``: what planners gain, predicted from a trace or a generator."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from topoep.commands.arguments import CommandError, add_import_options, load, need, progress
from topoep.simulator.cluster import Cluster
from topoep.simulator.model import MODELS, MoEModel
from topoep.simulator.planners import PLANNERS
from topoep.simulator.setting import Setting
from topoep.simulator.simulate import Request, Result, chosen, rescale, simulate
from topoep.simulator.workloads import GENERATORS, generate
from topoep.trace import Trace


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


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Trace or generator, cluster, model and setting."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="recorded routing")
    source.add_argument(
        "--generator", choices=GENERATORS, metavar="NAME", help="one of: " + ", ".join(GENERATORS)
    )
    add_import_options(parser)
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NxHARDWARE",
        help="nodes x hardware (4xH800), nodes x ranks per node x hardware (4x4xH800), or a .json "
        "file with numbers",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or a .json file with numbers; for a trace of topoep.demo the "
        "model is known",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="of a rank and microbatch: of a generator (default 8192), or to scale a trace to",
    )
    parser.add_argument("--ep", type=int, metavar="R", help="ranks of a generator (default: all)")
    parser.add_argument("--skew", type=float, default=1.5, help="of a generator (default: 1.5)")
    parser.add_argument("--steps", type=int, default=16, help="of a generator (default: 16)")
    parser.add_argument("--layers", type=int, default=4, help="of a generator (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of a generator (default: 0)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change an assumption: " + ", ".join(f.name for f in dataclasses.fields(Setting)),
    )
    parser.add_argument(
        "--samples",
        default="8192",
        metavar="N",
        help="the most microbatches to plan for, or 'all' (default: %(default)s)",
    )
    parser.add_argument(
        "--slow-samples",
        default="64",
        metavar="N",
        help="the same for the planners of others, which are restated in Python (default: 64)",
    )
    parser.add_argument(
        "--candidates",
        default="all",
        metavar="N",
        help="how many candidates TopoEP tries; 'all' as in training (default: %(default)s)",
    )


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


def make_request(given: argparse.Namespace, planners: tuple[str, ...], spare_slots: int) -> Request:
    """What the options of ``add_workload_options`` ask for."""
    cluster = Cluster.parse(given.cluster)
    setting = _setting(given.set)
    if given.generator:
        if given.model is None:
            raise CommandError("--generator needs --model")
        model = MoEModel.parse(given.model)
        topology = cluster.topology(cluster.num_ranks if given.ep is None else given.ep)
        trace = generate(
            given.generator,
            topology,
            model.experts,
            top_k=model.top_k,
            tokens=8192 if given.tokens is None else given.tokens,
            skew=given.skew,
            steps=given.steps,
            layers=given.layers,
            seed=given.seed,
        )
    else:
        trace = load(given.trace, given)
        model = _model_of(trace, given.model)
        if given.tokens is not None:
            trace = rescale(trace, given.tokens)
    return Request(
        trace,
        cluster,
        model,
        setting,
        planners,
        spare_slots,
        samples=_samples(given.samples),
        slow_samples=_samples(given.slow_samples),
        candidates=_samples(given.candidates),
    )


def _model_of(trace: Trace, name: str | None) -> MoEModel:
    """The model that was named, or the one of topoep.demo that the trace describes."""
    if name is not None:
        return MoEModel.parse(name)
    meta = trace.meta
    if not all(isinstance(meta.get(key), int) for key in ("hidden", "intermediate")):
        raise CommandError("the trace does not describe its model; give --model")
    hidden = int(meta["hidden"])
    return MoEModel(
        "demo",
        moe_layers=trace.num_layers,
        hidden=hidden,
        intermediate=int(meta["intermediate"]),
        experts=trace.num_experts,
        top_k=trace.top_k,
        attention_weights=4 * hidden * hidden,
        attention_width=2 * hidden,
        vocabulary=256,
    )


def _setting(changes: list[str]) -> Setting:
    types = vars(Setting())
    values: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in types or not text:
            raise CommandError(
                f"--set {change}; expected NAME=VALUE with one of {', '.join(types)}"
            )
        default = types[name]
        try:
            if isinstance(default, bool):
                values[name] = {"true": True, "false": False}[text.lower()]
            else:
                values[name] = type(default)(text)
        except (KeyError, ValueError):
            raise CommandError(
                f"--set {change}: expected a value like {default!r} ({type(default).__name__})"
            ) from None
    return Setting(**values)


def _samples(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit()):
        raise CommandError(f"{text!r}; expected a number or 'all'")
    return int(text)


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
