# SPDX-License-Identifier: Apache-2.0
"""What to simulate, from the options of a command: trace or generator, cluster, model, setting."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topoep.commands.arguments import CommandError, add_import_options, load, progress
from topoep.simulator.cluster import Cluster
from topoep.simulator.estimate import estimated_seconds
from topoep.simulator.model import MODELS, MoEModel
from topoep.simulator.planners import EPLB_WINDOW
from topoep.simulator.reshape import rescale
from topoep.simulator.setting import Setting
from topoep.simulator.simulate import Request
from topoep.simulator.workloads import GENERATORS, check_sizes, generate
from topoep.trace import Trace

_NAMED_PARTS = 3  # in a message


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

    parser.add_argument(
        "--max-minutes",
        type=float,
        default=60.0,
        metavar="M",
        help="refuse what will take longer, told from one microbatch (default: %(default)g)",
    )


def make_request(
    given: argparse.Namespace,
    planners: tuple[str, ...],
    spare_slots: int,
    times: Callable[[Request], int] = lambda request: 1,
) -> Request:
    """What the options of ``add_workload_options`` ask for.

    Args:
        given: the options.
        planners: to simulate.
        spare_slots: S.
        times: how often it will be simulated.

    Raises:
        CommandError: options that do not fit, or what would take longer than ``--max-minutes``.
        ValueError: numbers out of range, or no memory for a trace of that size.
    """
    cluster = Cluster.parse(given.cluster)
    setting = _setting(given.set)

    def request(trace: Trace, model: MoEModel) -> Request:
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

    def check(short: Request, steps: int, layers: int, seconds: dict[str, float]) -> None:
        planning = estimated_seconds(short, steps, layers)
        often = times(short)
        _check_time(
            {**seconds, **{name: often * took for name, took in planning.items()}},
            given.max_minutes,
        )

    if given.generator is None:
        trace = load(given.trace, given)
        model = _model_of(trace, given.model)
        if given.tokens is not None:
            trace = rescale(trace, given.tokens)
        check(request(trace, model), trace.num_steps, trace.num_layers, {})
        return request(trace, model)

    if given.model is None:
        raise CommandError("--generator needs --model")
    model = MoEModel.parse(given.model)
    topology = cluster.topology(cluster.num_ranks if given.ep is None else given.ep)

    def make(steps: int, layers: int, report: Any = None) -> Trace:
        return generate(
            given.generator,
            topology,
            model.experts,
            top_k=model.top_k,
            tokens=8192 if given.tokens is None else given.tokens,
            skew=given.skew,
            steps=steps,
            layers=layers,
            seed=given.seed,
            report=report,
        )

    check_sizes(given.steps, given.layers, topology.num_ranks, model.experts)
    short, per_step, per_layer = _timed(make)
    generating = given.layers * (per_layer + given.steps * per_step)
    check(request(short, model), given.steps, given.layers, {"the generator": generating})
    with progress("generating layers") as report:
        return request(make(given.steps, given.layers, report), model)


def _timed(make: Callable[[int, int], Trace]) -> tuple[Trace, float, float]:
    """A short trace, and the seconds that each step of a layer and each layer take besides."""
    steps = EPLB_WINDOW + 1  # so that every planner has its history
    begin = time.perf_counter()
    make(1, 1)
    one = time.perf_counter()
    short = make(steps, 1)
    per_step = max((time.perf_counter() - one) - (one - begin), 0.0) / (steps - 1)
    return short, per_step, one - begin


def _check_time(seconds: dict[str, float], max_minutes: float) -> None:
    """Raises CommandError for what will take longer than the user wants to wait.

    Args:
        seconds: that each part will take.
        max_minutes: for all of them.
    """
    total = sum(seconds.values()) / 60
    if not total <= max_minutes:
        longest = sorted(seconds.items(), key=lambda part: -part[1])[:_NAMED_PARTS]
        named = ", ".join(f"{name} {took / 60:.2g}" for name, took in longest)
        raise CommandError(
            f"this would take about {total:.2g} minutes (longest: {named}), and --max-minutes is "
            f"{max_minutes:g}: raise it, lower --steps, --samples or --slow-samples, or name fewer "
            "planners"
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
