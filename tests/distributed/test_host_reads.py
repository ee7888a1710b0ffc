# SPDX-License-Identifier: Apache-2.0
"""Where a step would wait for a GPU: every place that reads a tensor's values on the host.

Run on the CPU, where such reads are free, and noted. docs/limits.md lists them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import topoep
from tests.distributed.fake_plane import FakeConnector
from tests.distributed.ranks import run_ranks
from tests.distributed.test_experts import Setup, build_layers, problems_of
from topoep.adapters import deepep

PACKAGE = Path(topoep.__file__).resolve().parent
NODES = [0, 0, 1, 1]
METHODS = ("cpu", "item", "numpy", "tolist", "__bool__", "__int__", "__float__", "__index__")
# Ops whose results have sizes that depend on values, or that are such a read themselves.
OPS = ("_local_scalar_dense", "equal", "masked_select", "nonzero", "_unique2", "unique_dim")


class HostReads(TorchDispatchMode):
    """Notes who reads values on the host, as file:function of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def note(self) -> None:
        place, frame = "", sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.name == "fake_plane.py" or "torch/distributed" in path.as_posix():
                return  # stands in for kernels and NCCL
            if PACKAGE in path.parents and not place:
                place = f"{path.name}:{frame.f_code.co_name}"
            frame = frame.f_back
        if place:
            self.found.append(place)

    def __torch_dispatch__(self, func, types, arguments=(), keywords=None):
        keywords = keywords or {}
        name = func._schema.name.removeprefix("aten::")
        reads = name in OPS
        if name == "repeat_interleave":
            reads = keywords.get("output_size") is None
        if name in ("index", "index_put", "index_put_"):
            indices = [index for index in arguments[1] if index is not None]
            reads = any(index.dtype == torch.bool for index in indices)
        if reads:
            self.note()
        return func(*arguments, **keywords)


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    mode = HostReads()
    with pytest.MonkeyPatch.context() as patch, mode:
        for name in METHODS:
            original = getattr(torch.Tensor, name)

            def noted(tensor, *arguments, original=original, **keywords):
                mode.note()
                return original(tensor, *arguments, **keywords)

            patch.setattr(torch.Tensor, name, noted)
        yield mode.found


def steps_of_a_layer(rank: int, chunks: int) -> list[str]:
    connector = FakeConnector()
    topoep.transports.NcclConnector = lambda: connector
    setup = Setup(NODES, 8, [24, 9, 0, 30], chunks=chunks, dtype=torch.float32)
    (layer,) = build_layers(setup, rank, dist.group.WORLD)
    (problem,) = problems_of(setup, rank)
    for _ in range(2):  # the first step makes memory
        with host_reads() as found:
            layer(problem.x, problem.ids, problem.weights).backward(problem.grad_y)
    return found


@pytest.mark.parametrize("chunks", [1, 3])
def test_balanced_experts_reads_the_plan_once_and_nothing_else(chunks):
    for found in run_ranks(4, steps_of_a_layer, chunks):
        # One copy of the quotas; numpy() is of the copy.
        assert found == ["plan.py:host"] * 2


def steps_of_an_own_layer(rank: int) -> list[str]:
    """Everything that a dispatcher with fixed shapes takes of TopoEP, without the dispatcher."""
    connector = FakeConnector()
    topoep.transports.NcclConnector = lambda: connector
    balancer = topoep.Balancer(
        topoep.Topology(node_of_rank=NODES), 8, 2, group=dist.group.WORLD, replica_policy="refetch"
    )
    weight = torch.nn.Parameter(torch.ones(2, 3))
    balancer.share_weights([weight])
    ids = torch.tensor([[0, 1], [0, 2], [3, -1]])
    for _ in range(2):
        with host_reads() as found:
            plan = balancer.plan(ids)
            pending = balancer.replicate_async((weight,), plan)
            balancer.reroute(ids, plan)
            deepep.dispatch_arguments(balancer, ids, plan, check_distinct=False)
            deepep.received_counts(plan)
            plan.stats()
            y = balancer.release(weight.sum() + pending.wait()[0].sum(), plan)
            balancer.prefetch(y, plan).backward()
    return found


def test_what_a_layer_of_ones_own_calls_reads_nothing():
    assert run_ranks(4, steps_of_an_own_layer) == [[]] * 4


def test_the_reads_are_found():
    plan = topoep.solve(
        torch.ones(4, 8, dtype=torch.int32), topoep.Topology(num_nodes=1, ranks_per_node=4), rank=0
    )
    with host_reads() as found:
        plan.validate()
    assert "plan.py:validate" in found
    with host_reads() as found:
        torch.ones(3).tolist()
    assert found == [], "not by this package"
