# SPDX-License-Identifier: Apache-2.0
"""How transport nccl makes its communicator: in the order of the nodes, whatever the group's is.

The library's NCCL ops are replaced by ones that number ranks and form teams as NCCL does.
"""

from __future__ import annotations

import logging
import math
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import topoep
from tests.distributed.ranks import run_ranks
from topoep.transports import nccl


class FakeOps:
    """The ops of bindings/ops_nccl.cpp that set-up calls, over the group; ``hosts`` by rank."""

    def __init__(self, hosts: list[int]) -> None:
        self.hosts = hosts
        self.calls: list[str] = []
        self.place = -1

    def nccl_unique_id_(self, identity: torch.Tensor) -> None:
        identity.fill_(7)

    def nccl_comm_create(self, identity: torch.Tensor, num_ranks: int, place: int) -> int:
        assert identity.tolist() == [7] * 128
        self.calls.append(f"create {num_ranks} {place}")
        self.place = place
        return 5

    def nccl_comm_adopt(self, pointer: int) -> int:
        self.calls.append(f"adopt {pointer}")
        self.place = dist.get_rank()
        return 5

    def nccl_comm_problem(self, comm: int, rank_at, ranks_per_node: int, rank: int) -> str:
        assert comm == 5
        places: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(places, self.place)
        assert sorted(places) == list(range(len(places)))
        numbered = sorted(range(len(places)), key=lambda r: places[r])  # as NCCL numbers ranks
        assert list(rank_at) == numbered
        runs = [len(list(run)) for _, run in groupby(self.hosts[r] for r in numbered)]
        joined = math.gcd(*runs)
        first = self.place - self.place % joined
        self.node = tuple(numbered[first : first + joined])
        self.calls.append(f"problem {ranks_per_node}")
        return "" if joined == ranks_per_node else f"NCCL joins {joined}"

    def nccl_comm_close(self, comm: int, abort: bool) -> None:
        self.calls.append(f"close {abort}")


def connect(rank: int, nodes: list[int], hosts: list[int], choice: str) -> tuple:
    """What the ops were asked for, whom NCCL joins with this rank, the problem, and the log."""
    ops = FakeOps(hosts)
    for name in dir(FakeOps):
        if name.startswith("nccl_"):
            setattr(torch.ops.topoep, name, getattr(ops, name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOPOEP_NODE", f"host{hosts[rank]}")
        patch.setenv("TOPOEP_NCCL_COMM", choice)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        group = dist.group.WORLD
        backend = SimpleNamespace(_comm_ptr=lambda: 0xABC)
        patch.setattr(type(group), "_get_backend", lambda self, device: backend, raising=False)
        lines: list[str] = []
        patch.setattr(
            logging.getLogger("topoep"), "warning", lambda text, *values: lines.append(text)
        )
        topology = topoep.Topology(node_of_rank=nodes)
        plane, problem = nccl.NcclConnector().connect(topology, group)
        members = topology.ranks_of_node(topology.node_of_rank[rank])
        if not problem:
            assert plane is not None
            assert ops.node == members, "windows' addresses come in the order of the node's ranks"
    return ops.calls, problem, lines


TABLES = [[0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 2, 3], [0, 0, 0, 0]]


@pytest.mark.parametrize("nodes", TABLES, ids=str)
def test_the_communicator_is_numbered_node_by_node(nodes):
    topology = topoep.Topology(node_of_rank=nodes)
    size = len(topology.ranks_of_node(0))
    for rank, (calls, problem, lines) in enumerate(run_ranks(4, connect, nodes, nodes, "own")):
        assert calls == [f"create 4 {topology.rank_order.index(rank)}", f"problem {size}"]
        assert (problem, lines) == ("", [])


@pytest.mark.parametrize("nodes", TABLES, ids=str)
def test_a_group_in_another_order_gets_a_communicator_of_its_own_and_is_told(nodes):
    in_order = nodes == sorted(nodes)
    for rank, (calls, problem, lines) in enumerate(run_ranks(4, connect, nodes, nodes, "group")):
        assert calls[0].startswith("adopt 2748" if in_order else "create 4")
        assert problem == ""
        expected = 0 if in_order or rank > 0 else 1
        assert len(lines) == expected
        assert all("the group does not have its ranks node by node" in line for line in lines)


@pytest.mark.parametrize(
    ("nodes", "hosts", "message"),
    [
        ([0, 1, 0, 1], [0, 0, 1, 1], "NCCL joins 1; the topology has rank 1 with no lower rank, by "
         "host name it is in the node of rank 0: Topology.from_group(group) makes the table"),
        ([0, 0, 1, 1], [0, 1, 0, 1], "NCCL joins 1; the topology has rank 1 in the node of rank 0, "
         "by host name it is with no lower rank: "),
        ([0, 1, 0, 1], [0, 0, 0, 0], "NCCL joins 4; the topology has rank 1 with no lower rank"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_the_machines_is_refused_on_every_rank(nodes, hosts, message):
    for calls, problem, _ in run_ranks(4, connect, nodes, hosts, "own"):
        assert problem.startswith(message)
        assert calls[-1] == "close True"


def connect_by_choice(rank: int) -> tuple:
    nodes = [0, 0, 1, 1]
    return connect(rank, nodes, nodes, "group" if rank == 2 else "own")


def test_ranks_that_choose_different_communicators_are_told():
    for calls, problem, _ in run_ranks(4, connect_by_choice):
        assert calls == []
        assert problem == (
            "TOPOEP_NCCL_COMM is 'group' on rank 2 and 'own' on rank 0; set it to the same on all "
            "ranks"
        )


def test_a_table_that_only_names_nodes_otherwise_is_the_same():
    given, measured = (
        topoep.Topology(node_of_rank=[1, 0, 1]),
        topoep.Topology(node_of_rank=[0, 1, 0]),
    )
    assert nccl.table_problem(given, measured) == ""
