# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks: forked processes with gloo between them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Calls ``function(rank, *arguments)`` on every rank and returns the results in order.

    Forking is a hundred times faster than starting fresh interpreters, and is safe here because the
    parent never runs torch's thread pool: conftest.py sets one thread.

    Raises:
        RankError: a rank raised, died, or did not come back in time; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = _start(world_size, folder, function, arguments, 60.0)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout_s)
        if not ready:
            missing = sorted(set(range(len(pipes))) - set(results))
            raise RankError(f"ranks {missing} did not come back within {timeout_s} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                error, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if error is not None:
                raise RankError(f"rank {rank} raised:\n{error}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    exit_code: int | None  # 0: came back; negative: killed by that signal; None: still running
    error: str  # its traceback; empty if it came back or died without a word
    value: Any


def run_to_the_end(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    group_timeout_s: float,
    timeout_s: float,
) -> list[Outcome]:
    """Like :func:`run_ranks` for ranks that are expected to fail: how each of them ended.

    A rank that raises ends its process at once, as in training; what is still running after
    ``timeout_s`` is killed and has exit code None.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = _start(world_size, folder, function, arguments, group_timeout_s)
        deadline = time.monotonic() + timeout_s
        outcomes = []
        for process, pipe in zip(processes, pipes, strict=True):
            process.join(max(deadline - time.monotonic(), 0))
            code = process.exitcode
            try:
                error, value = pickle.loads(pipe.recv_bytes()) if pipe.poll() else ("", None)
            except EOFError:
                error, value = "", None
            outcomes.append(Outcome(code, error or "", value))
        for process in processes:
            process.kill()
            process.join()
    return outcomes


def _start(
    world_size: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    group_timeout_s: float,
) -> tuple[list[Connection], list[Any]]:
    """Forks the ranks; they meet in a file of the folder and answer through the pipes."""
    context = multiprocessing.get_context("fork")
    store = f"file://{Path(folder) / 'store'}"
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_main,
            args=(rank, world_size, store, sender, function, arguments, group_timeout_s),
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    return pipes, processes


def _main(
    rank: int,
    world_size: int,
    store: str,
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    group_timeout_s: float,
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout_s),
        )
        answer = None, function(rank, *arguments)
    except BaseException:
        answer = traceback.format_exc(), None
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    if answer[0] is not None:
        os._exit(1)  # at once, as a trainer that raised
