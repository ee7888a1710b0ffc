# SPDX-License-Identifier: Apache-2.0
"""What the examples share: a text, ranks on this machine, and what is printed at the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import topoep

RANKS, STEPS, BATCH, SEQUENCE, VOCABULARY = 4, 20, 4, 64, 256
#: Two nodes of two ranks; on a cluster TopoEP finds out by itself.
TOPOLOGY = topoep.Topology(num_nodes=2, ranks_per_node=2)

_text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


class Recorder:
    """Keeps the imbalance of every plan, before and after; an ``on_plan`` of the adapters."""

    def __init__(self) -> None:
        self.stats: list[dict[str, torch.Tensor]] = []

    def __call__(self, module: torch.nn.Module, plan: topoep.Plan) -> None:
        self.stats.append(plan.stats())

    def mean(self, name: str) -> float:
        return sum(float(stats[name]) for stats in self.stats) / len(self.stats)


def batch(rank: int, step: int) -> torch.Tensor:
    """Bytes of Python's documentation, int64 [BATCH, SEQUENCE], other ones for every rank."""
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    starts = torch.randint(len(_text) - SEQUENCE, (BATCH, 1), generator=generator)
    return _text[starts + torch.arange(SEQUENCE)].long()


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The loss of the whole batch."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / RANKS


def report(name: str, plain: list[float], balanced: list[float], recorder: Recorder) -> None:
    """Prints both trainings next to each other, and checks that they agree."""
    print(f"{name}: {RANKS} ranks as {TOPOLOGY.num_nodes} nodes, {len(plain)} steps")
    print(f"{'step':>6}{'loss':>10}{'with TopoEP':>14}")
    for step in sorted({0, len(plain) // 2, len(plain) - 1}):
        print(f"{step:>6}{plain[step]:>10.4f}{balanced[step]:>14.4f}")
    largest = max(abs(a - b) / a for a, b in zip(plain, balanced, strict=True))
    print(f"largest difference of the losses: {largest:.1e} of the loss")
    before, after = recorder.mean("imbalance_before"), recorder.mean("imbalance")
    print(
        f"imbalance (fullest rank over mean): {before:.2f} -> {after:.2f}, "
        f"{recorder.mean('copies'):.1f} copies per layer and step"
    )
    assert largest < 1e-2, "the trainings differ"


def launch(main: Callable[[int], None]) -> None:
    """Runs ``main(rank)`` on forked ranks with gloo between them."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{os.path.join(folder, 'store')}"
        mp.start_processes(_start, args=(main, store), nprocs=RANKS, start_method="fork")


def _start(rank: int, main: Callable[[int], None], store: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    main(rank)
    dist.barrier()
    dist.destroy_process_group()
