# SPDX-License-Identifier: Apache-2.0
"""``python -m topoep advise``: what to set, what it gains, and where it does not pay."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from topoep.commands.arguments import CommandError, need, progress
from topoep.commands.workload import add_workload_options, make_request
from topoep.simulator.advise import TRIALS, WORTHWHILE, Advice, Trial, advise
from topoep.simulator.simulate import PREDICTION, Request
from topoep.simulator.sweep import ep_sizes

_SAMPLES = 64  # microbatches of each trial


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("advise", help="what to set for a trace, and what it gains")
    add_workload_options(parser)
    parser.add_argument(
        "--ep-sizes",
        metavar="A,B,..",
        help="sizes of the expert-parallel group to try besides the trace's (default: half and "
        "twice of it, where the cluster has them)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.set_defaults(run=run, samples=str(_SAMPLES))


def run(given: argparse.Namespace) -> None:
    """Runs the command."""
    need("rich")
    request = make_request(
        given, ("topoep",), 2, lambda short: TRIALS * (1 + len(_sizes(given.ep_sizes, short)))
    )
    with progress("trying") as report:
        advice = advise(
            request, _sizes(given.ep_sizes, request), lambda what, n, of: report(n, of, what)
        )
    _print(request, advice)
    if given.json:
        trials = [dataclasses.asdict(trial) for trial in advice.trials]
        content = {
            "note": PREDICTION,
            "best": dataclasses.asdict(advice.best),
            "losing_layers": advice.losing_layers,
            "trials": trials,
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {given.json}")


def _sizes(text: str | None, request: Request) -> list[int]:
    possible = ep_sizes(request.cluster, request.model.experts)
    own = request.trace.num_ranks
    if text is None:
        return [size for size in (own // 2, own * 2) if size in possible and size > 1]
    sizes = []
    for part in text.split(","):
        if not (part.isascii() and part.isdigit()) or int(part) not in possible:
            raise CommandError(
                f"EP size {part!r}; {request.cluster.name} and {request.model.experts} experts "
                f"allow {', '.join(map(str, possible))}"
            )
        sizes.append(int(part))
    return sizes


def _print(request: Request, advice: Advice) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    best = advice.best
    plain = next(t for t in advice.trials if t.ep == best.ep and not t.spare_slots)
    say(
        f"{request.model.name} on {request.cluster.name}, EP{best.ep}, imbalance "
        f"{plain.result.imbalance:.2f} without copies"
    )
    say("")
    if best.spare_slots == 0:
        most = max(trial.gain for trial in advice.trials if trial.ep == best.ep)
        say(
            f"Leave TopoEP off: the best setting gains {100 * most:+.1f} % of a step, less than "
            f"{100 * WORTHWHILE:.1f} %."
        )
    else:
        say(f"Set   spare_slots={best.spare_slots}, objective={best.objective}")
        if best.objective.startswith("Time"):
            say(f"      with cost_model = topoep.{advice.cost_model}")
        say(
            f"Gains {100 * best.gain:+.1f} % training throughput (predicted); a layer's experts "
            f"take {best.result.layer_ms:.2f} instead of {plain.result.layer_ms:.2f} ms, imbalance "
            f"{best.result.imbalance:.2f}"
        )
        saved = plain.result.activation_bytes - best.result.activation_bytes
        say(
            f"Costs {best.result.spare_bytes / 1e6:.1f} MB of each GPU; the fullest rank keeps "
            f"{saved / 1e6:.1f} MB less activations per layer"
        )
        if advice.losing_layers:
            layers = ", ".join(map(str, advice.losing_layers))
            say(f"Does not pay in layer {layers} of the trace: too even there for planning")
        else:
            say("Pays in every layer of the trace")
    _table(console, Table(box=box.SIMPLE_HEAD, title="by spare slots, best objective each"), [
        max((t for t in advice.trials if (t.ep, t.spare_slots) == (best.ep, slots)),
            key=lambda trial: trial.gain)
        for slots in sorted({t.spare_slots for t in advice.trials})
    ])  # fmt: skip
    if len(advice.best_of_ep) > 1:
        title = "by EP size, best setting each; other sizes than the trace's are regrouped"
        _table(console, Table(box=box.SIMPLE_HEAD, title=title), advice.best_of_ep)
    say(PREDICTION)


def _table(console: Any, table: Any, trials: Any) -> None:
    for name in ("EP", "slots", "objective", "gain", "tokens/s per GPU", "spare MB", "home MB"):
        left = name == "objective"
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    for trial in trials:
        table.add_row(*_cells(trial))
    console.print(table)


def _cells(trial: Trial) -> list[str]:
    return [
        str(trial.ep),
        str(trial.spare_slots),
        trial.objective,
        f"{100 * trial.gain:+.1f}%",
        f"{trial.tokens_per_second:.0f}",
        f"{trial.result.spare_bytes / 1e6:.1f}",
        f"{trial.home_bytes / 1e6:.0f}",
    ]
