# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks, runs both trainings on them, and brings the results back."""

from __future__ import annotations

import importlib
import logging
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from topoep.demo.config import DemoConfig
from topoep.demo.text import Text, load_text
from topoep.demo.training import Progress, RunResult, train

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class DemoResult:
    """Both runs of a demo."""

    config: DemoConfig
    text: Text
    plain: RunResult
    balanced: RunResult


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback."""


def run_demo(config: DemoConfig, report: Report | None = None) -> DemoResult:
    """Trains twice from the same seed: with plain expert parallelism, then with TopoEP.

    Forks a process for every rank, or, under torchrun, takes the processes that it has started.

    Args:
        config: what to run.
        report: called after every step; under torchrun on rank 0 only.

    Raises:
        ValueError: the text cannot be used.
        RankError: a forked rank failed; all others have been ended.
    """
    text = load_text(config)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        try:
            runs = _both_runs(config, text, report if dist.get_rank() == 0 else None)
        finally:
            dist.destroy_process_group()
    else:
        runs = _fork(config, text, report)
    return DemoResult(config, text, *runs)


def _both_runs(
    config: DemoConfig, text: Text, report: Report | None
) -> tuple[RunResult, RunResult]:
    torch.set_num_threads(1)  # the ranks share the cores of this machine
    group = dist.group.WORLD
    assert group is not None  # initialised by the caller
    plain, balanced = (train(config, text, group, kind, report) for kind in (False, True))
    return plain, balanced


def _fork(config: DemoConfig, text: Text, report: Report | None) -> tuple[RunResult, RunResult]:
    """Forks the ranks and listens to rank 0 until all have ended."""
    # Making an optimizer imports this large module; here it is once instead of once per rank.
    importlib.import_module("torch._dynamo")

    # torch announces every process that it ends because another one has failed.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    receiver, sender = Pipe(duplex=False)
    runs: tuple[RunResult, RunResult] | None = None
    with tempfile.TemporaryDirectory(prefix="topoep-demo-") as folder:
        context = start_processes(
            _rank_main,
            args=(config, text, Path(folder), receiver, sender),
            nprocs=config.num_ranks,
            join=False,
            start_method="fork",
        )
        try:
            ended = False
            while not ended:
                wait([receiver, *context.sentinels])
                ended = context.join(timeout=0)
                while receiver.poll():
                    message = receiver.recv()
                    if not isinstance(message, Progress):
                        runs = message
                    elif report is not None:
                        report(message)
        except ProcessException as error:
            cause = _killed_rank(context.processes) or _first_failure(Path(folder)) or error.msg
            raise RankError(cause) from None
        finally:
            for process in context.processes:
                process.kill()  # nothing to a process that has ended
                process.join()
    if runs is None:
        raise RankError("the ranks ended without a result")
    return runs


def _rank_main(
    rank: int,
    config: DemoConfig,
    text: Text,
    folder: Path,
    receiver: Connection,
    sender: Connection,
) -> None:
    """A forked rank. Rank 0 sends its progress and its results to the parent."""
    # If the parent is killed, then no other end of the pipe is left: rank 0 fails to send, and so
    # ends all ranks.
    receiver.close()
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=config.num_ranks
        )
        runs = _both_runs(config, text, sender.send if rank == 0 else None)
        if rank == 0:
            sender.send(runs)
        dist.barrier()  # a rank that leaves early breaks the connections of the others
        dist.destroy_process_group()
    except Exception:
        # The first failure is the cause. The other ranks fail after it, when they find their
        # connections closed, and find the file already there.
        with suppress(FileExistsError), _failure_file(folder).open("x") as file:
            file.write(f"rank {rank} failed:\n\n{traceback.format_exc()}")
        raise


def _failure_file(folder: Path) -> Path:
    return folder / "first-failure"


def _first_failure(folder: Path) -> str | None:
    file = _failure_file(folder)
    return file.read_text() if file.exists() else None


def _killed_rank(processes: Sequence[BaseProcess]) -> str | None:
    """Names a rank that something else than a failure of another rank has ended."""
    for rank, process in enumerate(processes):
        if (code := process.exitcode or 0) < 0 and code != -signal.SIGTERM:
            return f"rank {rank} was ended by {signal.Signals(-code).name}"
    return None
