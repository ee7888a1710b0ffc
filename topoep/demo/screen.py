# SPDX-License-Identifier: Apache-2.0
"""What the demo shows on screen. Needs rich."""

from __future__ import annotations

import os
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressBars
from rich.table import Table

from topoep.demo.config import DemoConfig
from topoep.demo.launch import DemoResult
from topoep.demo.summary import LAST_STEPS, Spread, summarize
from topoep.demo.text import Text
from topoep.demo.training import Progress

_RUNS = {False: "plain EP", True: "TopoEP"}
_LINE_EVERY = 10  # steps, where there is no terminal


def show_setting(console: Console, config: DemoConfig, text: Text) -> None:
    """Says what is about to run."""
    console.print(
        f"[bold]TopoEP demo[/]: a byte-level MoE transformer ({config.layers} layers, "
        f"{config.experts} experts, top-{config.top_k}, no auxiliary loss) is trained twice from "
        f"seed {config.seed} on {text.name} ({len(text.data):,} bytes), with plain expert "
        f"parallelism (EP) and with TopoEP. {config.num_ranks} ranks, as {config.nodes} nodes x "
        f"{config.ranks_per_node}.",
        highlight=False,
    )


class TrainingScreen:
    """A progress bar for each run, or plain lines where there is no terminal."""

    def __init__(self, console: Console, config: DemoConfig) -> None:
        self._console = console
        self._steps = config.steps
        self._tasks: dict[bool, TaskID] = {}
        self._bars: ProgressBars | None = None

    def __enter__(self) -> TrainingScreen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        """Shows one more step."""
        if self._console.is_terminal:
            self._advance_bar(progress)
        elif progress.step % _LINE_EVERY == 0 or progress.step == self._steps:
            self._console.print(
                f"{_RUNS[progress.balanced]:<8}  step {progress.step:>4}/{self._steps}  "
                f"{_describe(progress)}",
                highlight=False,
            )

    def _advance_bar(self, progress: Progress) -> None:
        if self._bars is None:
            # Not before the first step: bars have a thread, and the ranks are forked before it.
            self._bars = ProgressBars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[now]}"),
                console=self._console,
                expand=True,
            )
            self._bars.start()
        if progress.balanced not in self._tasks:
            self._tasks[progress.balanced] = self._bars.add_task(
                _RUNS[progress.balanced], total=self._steps, now=""
            )
        self._bars.update(
            self._tasks[progress.balanced], completed=progress.step, now=_describe(progress)
        )


def _describe(progress: Progress) -> str:
    imbalance = f"imbalance {progress.imbalance_before:.2f}"
    if progress.balanced:
        imbalance += f" -> {progress.imbalance:.2f}"
    return f"loss {progress.loss:.3f}  {imbalance}"


def show_result(console: Console, result: DemoResult) -> None:
    """Prints the table and what may and may not be read from it."""
    config = result.config
    runs = [summarize(config, run) for run in (result.plain, result.balanced)]
    slots = "slot" if config.spare_slots == 1 else "slots"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("plain EP", justify="right")
    table.add_column(f"TopoEP, {config.spare_slots} spare {slots}", justify="right")

    def section(title: str, rows: dict[str, list[str]]) -> None:
        table.add_row(f"[bold]{title}[/]")
        for label, values in rows.items():
            table.add_row(f"  {label}", *values, end_section=label == list(rows)[-1])

    section(
        "loss",
        {
            "last step": [f"{run.final_loss:.4f}" for run in runs],
            f"mean of last {min(LAST_STEPS, config.steps)} steps": [
                f"{run.last_loss:.4f}" for run in runs
            ],
        },
    )
    section(
        "imbalance: mean / p95 / worst",
        {
            "before": [_spread(run.imbalance_before) for run in runs],
            "after": [f"[bold]{_spread(run.imbalance)}[/]" for run in runs],
        },
    )
    section(
        "in node / across nodes",
        {
            "copies": [_pair(run.in_node_copies, run.cross_node_copies) for run in runs],
            "weights fetched, MB": [
                _pair(run.in_node_weight_bytes / 1e6, run.cross_node_weight_bytes / 1e6)
                for run in runs
            ],
            "gradients sent home, MB": [
                _pair(run.in_node_grad_bytes / 1e6, run.cross_node_grad_bytes / 1e6) for run in runs
            ],
        },
    )
    section(
        "tokens across nodes",
        {
            "before": [f"{run.cross_node_tokens_before:,.0f}" for run in runs],
            "after": [f"{run.cross_node_tokens:,.0f}" for run in runs],
        },
    )
    table.add_row(
        "[bold]step time[/], median", *(f"{1e3 * run.step_seconds:,.0f} ms" for run in runs)
    )
    console.print(table, highlight=False)
    console.print(
        "Imbalance is the load of the fullest rank over the mean; 1 is perfect. Copies and tokens "
        "are means per layer and step, bytes are means per step. A token counts once per expert "
        "that it is routed to.",
        f"Look at the balance, not at the step time: {config.num_ranks} processes share "
        f"{_num_cores()} CPU cores here and talk over gloo, so a rank that waits costs nothing and "
        "a copy costs much. The step time says nothing about a GPU cluster.",
        sep="\n",
        highlight=False,
    )


def _spread(spread: Spread) -> str:
    return f"{spread.mean:.3f} / {spread.p95:.3f} / {spread.worst:.3f}"


def _pair(in_node: float, cross_node: float) -> str:
    return f"{in_node:.2f} / {cross_node:.2f}"


def _num_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
