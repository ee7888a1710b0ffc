# SPDX-License-Identifier: Apache-2.0
"""The demo: two trainings that agree, files that can be replayed, failures that end it."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import topoep
from topoep.demo import DemoConfig, DemoResult, Progress, RankError, run_demo, training
from topoep.demo.__main__ import main
from topoep.demo.summary import Spread, summarize
from topoep.demo.text import Text, batches, load_text
from topoep.transports.host import HostTransport

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

SMALL = DemoConfig(
    steps=50,
    nodes=2,
    ranks_per_node=2,
    batch=2,
    sequence=32,
    layers=2,
    experts=8,
    hidden=32,
    heads=2,
    intermediate=32,
)
SMALL_ARGUMENTS = [
    f"--{name.replace('_', '-')}={getattr(SMALL, name)}"
    for name in (
        "nodes",
        "ranks_per_node",
        "batch",
        "sequence",
        "layers",
        "experts",
        "hidden",
        "heads",
        "intermediate",
    )
]


@pytest.fixture(scope="module")
def result() -> DemoResult:
    return run_demo(SMALL)


# ---- training ----------------------------------------------------------------------------------


def test_balancing_does_not_change_the_losses(result: DemoResult) -> None:
    assert result.balanced.stats["cross_node_copies"].sum() > 0
    np.testing.assert_allclose(result.balanced.losses, result.plain.losses, rtol=1e-4)


def test_the_same_seed_gives_the_same_bits(result: DemoResult) -> None:
    again = run_demo(SMALL)
    for one, other in ((result.plain, again.plain), (result.balanced, again.balanced)):
        assert one.losses.tobytes() == other.losses.tobytes()
        assert one.counts.tobytes() == other.counts.tobytes()
        assert one.parameters_sha256 == other.parameters_sha256


def test_another_seed_gives_another_run(result: DemoResult) -> None:
    other = run_demo(replace(SMALL, steps=1, seed=1))
    assert other.plain.losses[0] != result.plain.losses[0]
    assert other.plain.parameters_sha256 != result.plain.parameters_sha256


def test_the_loss_falls(result: DemoResult) -> None:
    for run in (result.plain, result.balanced):
        assert run.losses[-10:].mean() < 0.8 * run.losses[0]


def test_the_load_is_balanced(result: DemoResult) -> None:
    before, after = (result.balanced.stats[f"imbalance{when}"] for when in ("_before", ""))
    assert (before > 1.2).mean() > 0.5  # or this would show nothing
    assert after[before > 1.2].mean() <= 1.05
    plain = result.plain.stats
    np.testing.assert_array_equal(plain["imbalance"], plain["imbalance_before"])
    assert not plain["in_node_copies"].any()
    assert not plain["cross_node_copies"].any()


def test_ranks_together_train_as_one_process_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of dense parameters and of experts are those of the mean over all tokens."""

    # Unlike AdamW, SGD does not forgive a gradient of the wrong scale.
    def sgd(parameters: Any, lr: float, fused: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr)

    def reset(self: topoep.BalancedExperts) -> None:
        first = self.balancer.held_ranks[0] * self.balancer.config.experts_per_rank
        for parameter in self.parameters():
            for i, expert in enumerate(parameter.data):
                draws = torch.Generator().manual_seed(first + i)
                expert.uniform_(-0.3, 0.3, generator=draws)

    monkeypatch.setattr(torch.optim, "AdamW", sgd)
    monkeypatch.setattr(topoep.BalancedExperts, "reset_parameters", reset)
    four = replace(SMALL, steps=8, learning_rate=0.3)
    apart = run_demo(four)

    def of_all_ranks(text: Text, config: DemoConfig, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        for step in zip(*(batches(text, four, r) for r in range(four.num_ranks)), strict=True):
            yield torch.cat([inputs for inputs, _ in step]), torch.cat([t for _, t in step])

    monkeypatch.setattr(training, "batches", of_all_ranks)
    alone = run_demo(replace(four, nodes=1, ranks_per_node=1, batch=four.batch * four.num_ranks))
    assert alone.plain.losses[-1] < alone.plain.losses[0] - 0.2
    np.testing.assert_allclose(apart.plain.losses, alone.plain.losses, rtol=1e-4)
    np.testing.assert_allclose(apart.balanced.losses, alone.plain.losses, rtol=1e-4)


def test_batches_are_drawn_per_rank() -> None:
    text = load_text(SMALL)
    rows = [[inputs for inputs, _ in batches(text, SMALL, rank)] for rank in (0, 0, 1)]
    assert len(rows[0]) == SMALL.steps
    assert all(torch.equal(a, b) for a, b in zip(rows[0], rows[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(rows[0], rows[2], strict=True))
    inputs, targets = next(batches(text, SMALL, 0))
    assert inputs.shape == targets.shape == (SMALL.batch, SMALL.sequence)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


# ---- what is reported --------------------------------------------------------------------------


def test_bytes_are_those_that_the_transport_moves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "fetches"
    replicate = HostTransport.replicate

    def noting(self: HostTransport, plan: topoep.Plan, weights: Any, out: Any) -> None:
        replicate(self, plan, weights, out)
        if self.held == (0,):
            stats = plan.stats()
            size = sum(tensor[0].nbytes for tensor in weights[0])
            with log.open("a") as file:
                for kind in ("in_node", "cross_node"):
                    print(int(stats[f"{kind}_copies"]) * size, file=file, end=" ")

    monkeypatch.setattr(HostTransport, "replicate", noting)
    config = replace(SMALL, steps=3, layers=3)
    summary = summarize(config, run_demo(config).balanced)
    moved = np.array(log.read_text().split(), dtype=float).reshape(-1, 2).sum(0) / config.steps
    np.testing.assert_allclose(
        moved, [summary.in_node_weight_bytes, summary.cross_node_weight_bytes]
    )


@dataclass(frozen=True)
class Finished:
    stdout: str
    folder: Path
    config: DemoConfig


@pytest.fixture(scope="module")
def default_ranks(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The demo as a command, on its eight ranks, with less work for each."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    arguments = ["--steps=12", "--batch=2", "--sequence=64", f"--output={folder}"]
    done = subprocess.run(
        [sys.executable, "-m", "topoep.demo", *arguments],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Finished(done.stdout, folder, DemoConfig(steps=12, batch=2, sequence=64))


def test_trace_replays_to_the_numbers_of_the_table(default_ranks: Finished) -> None:
    config = default_ranks.config
    with np.load(default_ranks.folder / "trace.npz", allow_pickle=False) as trace:
        assert set(trace) == {"format", "counts", "node_of_rank", "top_k", "meta"}
        assert trace["format"] == 1
        counts, node_of_rank = trace["counts"], trace["node_of_rank"]
        top_k = int(trace["top_k"])
        meta = json.loads(str(trace["meta"]))
    assert counts.dtype == np.int32
    assert counts.shape == (12, 4, 8, 32)
    assert node_of_rank.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (counts.sum(-1) == config.batch * config.sequence * top_k).all()
    assert meta["text"] == "pydoc_data.topics"
    assert meta["seed"] == 0
    assert meta["steps"] == 12

    topology = topoep.Topology(node_of_rank=node_of_rank.tolist())
    plans = [
        topoep.solve(torch.from_numpy(layer), topology, meta["spare_slots"]).stats()
        for step in counts
        for layer in step
    ]

    def numbers(name: str) -> np.ndarray:
        return np.array([float(plan[name]) for plan in plans])

    summary = json.loads((default_ranks.folder / "losses.json").read_text())["topoep"]["summary"]
    shown = []
    for name in ("imbalance_before", "imbalance"):
        spread = Spread.of(numbers(name))
        assert summary[name] == pytest.approx(vars(spread))
        shown.append(f"{spread.mean:.3f} / {spread.p95:.3f} / {spread.worst:.3f}")
    for name in (
        "in_node_copies",
        "cross_node_copies",
        "cross_node_tokens_before",
        "cross_node_tokens",
    ):
        assert summary[name] == pytest.approx(numbers(name).mean())
    shown.append(f"{summary['in_node_copies']:.2f} / {summary['cross_node_copies']:.2f}")
    shown.append(f"{summary['cross_node_tokens']:,.0f}")
    for text in shown:
        assert text in default_ranks.stdout
    assert meta["bytes_per_expert"] == 3 * config.hidden * config.intermediate * 4
    assert summary["in_node_grad_bytes"] == pytest.approx(
        numbers("in_node_copies").sum() / config.steps * meta["bytes_per_expert"]
    )


def test_losses_are_written(default_ranks: Finished) -> None:
    losses = json.loads((default_ranks.folder / "losses.json").read_text())
    assert losses["format"] == 1
    assert losses["versions"]["topoep"] == topoep.__version__
    assert losses["versions"]["torch"] == torch.__version__
    assert losses["config"]["steps"] == 12
    for run in ("plain", "topoep"):
        assert len(losses[run]["loss"]) == len(losses[run]["step_seconds"]) == 12
        assert losses[run]["summary"]["final_loss"] == losses[run]["loss"][-1]
        assert f"{losses[run]['loss'][-1]:.4f}" in default_ranks.stdout
    assert losses["topoep"]["loss"] == pytest.approx(losses["plain"]["loss"], rel=1e-4)


def test_picture_is_a_png_of_a_readable_size(default_ranks: Finished) -> None:
    header = (default_ranks.folder / "demo.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(header[i : i + 4], "big") for i in (16, 20))
    assert width >= 1200
    assert height >= 500


def test_screen_without_a_terminal(default_ranks: Finished) -> None:
    lines = [line for line in default_ranks.stdout.splitlines() if " step " in line]
    steps = [line.split("step")[1].split()[0] for line in lines if "/12" in line]
    assert steps == ["10/12", "12/12"] * 2
    assert "says nothing about a GPU cluster" in " ".join(default_ranks.stdout.split())
    for name in ("demo.png", "losses.json", "trace.npz"):
        assert f"wrote {default_ranks.folder / name}" in default_ranks.stdout


def test_screen_on_a_terminal() -> None:
    from rich.console import Console

    from topoep.demo.screen import TrainingScreen

    console = Console(file=io.StringIO(), force_terminal=True, width=100, no_color=True)
    with TrainingScreen(console, SMALL) as screen:
        screen(Progress(balanced=False, step=50, loss=2.5, imbalance_before=2, imbalance=2))
        screen(Progress(balanced=True, step=7, loss=2.25, imbalance_before=2, imbalance=1.01))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "50/50" in shown
    assert " 7/50" in shown
    assert "loss 2.250  imbalance 2.00 -> 1.01" in shown


# ---- what goes wrong ---------------------------------------------------------------------------


def _raise() -> None:
    raise RuntimeError("a rank has had enough")


def _vanish() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail_on_rank_2(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    def failing(text: Text, config: DemoConfig, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        for step, batch in enumerate(batches(text, config, rank)):
            if rank == 2 and step == 3:
                fail()
            yield batch

    monkeypatch.setattr(training, "batches", failing)


def test_a_failing_rank_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _fail_on_rank_2(monkeypatch, _raise)
    start = time.monotonic()
    assert main([*SMALL_ARGUMENTS, f"--output={tmp_path}"]) == 1
    assert time.monotonic() - start < 20
    assert not multiprocessing.active_children()
    error = capfd.readouterr().err
    assert "rank 2 failed" in error
    assert error.count("Traceback") == 1
    assert "RuntimeError: a rank has had enough" in error
    assert not list(tmp_path.iterdir())


def test_a_vanishing_rank_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_on_rank_2(monkeypatch, _vanish)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 2 was ended by SIGKILL"):
        run_demo(SMALL)
    assert time.monotonic() - start < 20
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps is 0; expected at least 1"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--nodes", "0"], "nodes is 0"),
        (["--ranks-per-node", "-1"], "ranks_per_node is -1"),
        (["--nodes", "3"], "32 experts do not divide over 12 ranks"),
        (["--spare-slots", "0"], "spare_slots is 0; expected 1 to 16"),
        (["--spare-slots", "17"], "spare_slots is 17; expected 1 to 16"),
        (["--experts", "8192"], "experts is 8192; expected at most 4096"),
        (["--top-k", "33"], "top_k is 33; expected at most 32"),
        (["--heads", "3"], "hidden is 128; expected a multiple of 3 heads"),
        (["--learning-rate", "nan"], "learning_rate is nan"),
        (["--seed", "-1"], "seed is -1; expected 0 or more"),
        (["--text", "{folder}/missing"], "cannot read the text"),
        (["--text", "{folder}/short"], "short has 5 bytes; sequences of 128 need at least 129"),
        (["--output", "{folder}/short"], "cannot write to"),
        (["--speed", "11"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_get_clear_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("short")
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    # The last of two flags counts
    with pytest.raises(SystemExit) as ended:
        main([f"--output={tmp_path}", *filled])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_missing_extras_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main([f"--output={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert "the demo needs rich: pip install 'topoep[demo]'" in error


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name in DemoConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown


# ---- torchrun ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("to be or not to be, that is the question\n" * 50)
    sizes = [argument for argument in SMALL_ARGUMENTS if "ranks-per-node" not in argument]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"),
            *("-m", "topoep.demo", *sizes),
            *("--steps=3", f"--text={text}", f"--output={tmp_path / 'out'}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TopoEP demo") == 1
    assert "4 ranks" in done.stdout
    with np.load(tmp_path / "out" / "trace.npz") as trace:
        assert trace["node_of_rank"].tolist() == [0, 0, 1, 1]
        assert json.loads(str(trace["meta"]))["text"] == "own.txt"


@pytest.mark.slow
def test_torchrun_with_ranks_that_do_not_fit(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("-m", "topoep.demo", "--ranks-per-node=4", f"--output={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("2 nodes x 4 ranks do not fit the 2 processes of torchrun") == 1
