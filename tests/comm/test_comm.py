# SPDX-License-Identifier: Apache-2.0
"""csrc/comm over a fake NCCL: what it calls, in which order, and what it says when that fails."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.comm.fake import HERE, MISSING, NCCL, ROOT, compile_cpp, compile_fake, have_headers
from topoep import Topology

pytestmark = pytest.mark.skipif(not have_headers(), reason=MISSING)


def version_code(text: str) -> int:
    major, minor, patch = map(int, text.split("."))
    return major * 10000 + minor * 100 + patch


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The program, the fake library, and one without the device API."""
    folder = tmp_path_factory.mktemp("comm")
    sources = [HERE / "comm_program.cpp", ROOT / "csrc/comm/communicator.cpp"]
    sources.append(ROOT / "csrc/comm/nccl_library.cpp")
    program = compile_cpp(folder / "program", "-fsanitize=address,undefined", *sources, "-ldl")
    old = compile_fake(folder / "old", "-DFAKE_NCCL_WITHOUT_DEVICE_API")
    return program, compile_fake(folder / "whole"), old


@pytest.fixture
def run(built):
    """Runs a scenario and returns the lines it prints."""
    program, whole, old = built

    def call(*arguments: str, library: str = "whole", **settings: object) -> list[str]:
        path = {"whole": str(whole), "old": str(old), "none": ""}[library]
        environment = {f"FAKE_NCCL_{name.upper()}": str(value) for name, value in settings.items()}
        result = subprocess.run(
            [str(program), path, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr  # a leak or an overrun ends here
        return result.stdout.splitlines()

    return call


def test_the_loaded_version_fits(run):
    assert run("problem") == ["node: ", "cluster: "]


def test_no_library_is_ever_loaded_by_us(run):
    for line in run("problem", library="none"):
        assert "no libnccl.so.2 is loaded in this process" in line


@pytest.mark.parametrize("loaded", ["2.28.9", "2.27.5"])
def test_an_old_library_is_named_with_the_fix(run, loaded):
    for line in run("problem", version=version_code(loaded)):
        assert f"NCCL {loaded} is loaded" in line
        assert f"headers of {NCCL[1]}" in line
        assert "use torch 2.12 or newer" in line


def test_a_library_older_than_the_headers_is_refused_with_both_versions(run):
    older = "2.29.3" if version_code(NCCL[1]) > 22903 else "2.29.2"
    for line in run("problem", version=version_code(older)):
        assert f"headers of NCCL {NCCL[1]}, but NCCL {older} is loaded" in line
        assert "reinstall topoep in this environment" in line


def test_a_newer_library_serves_inside_a_node_only(run):
    node, cluster = run("problem", version=29901)
    assert node == "node: "
    assert f"headers of NCCL {NCCL[1]}, but NCCL 2.99.1 is loaded" in cluster
    assert "between nodes need exactly the version compiled with" in cluster


def test_missing_functions_are_named(run):
    for line in run("problem", library="old"):
        assert "ncclDevCommCreate" in line
        assert "ncclTeamRail" in line
        assert "it was built without its device API" in line


def test_set_up_and_teardown_in_order(run):
    lines = run("life")
    assert lines == [
        "ncclGetUniqueId",
        "id 7, 8 ranks, rank 5, name topoep",
        "ncclCommInitRankConfig",
        "ncclCommUserRank",
        "ncclCommCount",
        "ncclCommQueryProperties",
        "problem: ",
        *["ncclMemAlloc", "ncclCommWindowRegister"] * 2,
        *["ncclGetLsaDevicePointer"] * 4,
        "4 peers",
        "16 signals, 2 counters, 4 contexts",
        "ncclDevCommCreate",
        "2 contexts",
        "ncclCommGetAsyncError",
        # The device communicator lives in the windows' communicator, and memory must not be freed
        # under a window.
        "ncclDevCommDestroy",
        "ncclCommWindowDeregister",
        "ncclMemFree",
        "ncclCommWindowDeregister",
        "ncclCommDestroy",
        "closed",
        "ncclMemFree",  # a tensor still used the memory of the first window
    ]


def test_an_aborted_communicator_does_not_wait_for_its_peers(run):
    lines = run("abort")
    assert "ncclCommAbort" in lines
    assert "ncclCommDestroy" not in lines


@pytest.mark.parametrize(
    ("function", "undone"),
    [
        ("ncclGetUniqueId", []),
        ("ncclCommInitRankConfig", []),
        ("ncclCommUserRank", ["ncclCommAbort"]),
        ("ncclCommQueryProperties", ["ncclCommDestroy"]),
        ("ncclMemAlloc", ["ncclCommDestroy"]),
        ("ncclCommWindowRegister", ["ncclMemFree", "ncclCommDestroy"]),
        ("ncclGetLsaDevicePointer", [*["ncclCommWindowDeregister", "ncclMemFree"] * 2,
                                     "ncclCommDestroy"]),
        ("ncclDevCommCreate", [*["ncclCommWindowDeregister", "ncclMemFree"] * 2,
                               "ncclCommDestroy"]),
    ],
)  # fmt: skip
def test_a_failing_call_is_named_and_undone(run, function, undone):
    lines = run("life", fail=f",{function},")
    assert lines[-1].startswith(
        f"error: {function} failed with 'unhandled system error' (2): the NIC is on fire"
    )
    after = lines[len(lines) - 1 - lines[::-1].index(function) + 1 : -1]
    assert after == undone


@pytest.mark.parametrize("function", ["ncclDevCommDestroy", "ncclCommWindowDeregister"])
def test_teardown_goes_on_after_a_failure_and_reports_it(run, function):
    lines = run("life", fail=f",{function},")
    assert lines.count("ncclMemFree") == 2
    assert "ncclCommDestroy" in lines
    assert lines[-1].startswith(f"error: {function} failed")


def test_errors_of_peers_are_noticed(run):
    assert "error: an earlier NCCL operation failed" in run("life", **{"async": 1})[-1]


def test_what_the_communicator_cannot_do_is_said(run):
    assert any("has no device API: the GPUs of a node" in x for x in run("life", no_device_api=1))
    assert any("cannot put from a kernel to other nodes" in x for x in run("life", no_gin=1))
    assert "made no symmetric window" in run("life", no_window=1)[-1]


def as_text(numbers) -> str:
    return ",".join(map(str, numbers))


def teams(run, topology: Topology, hosts: list[int]) -> list[str]:
    """What each rank of the group says of NCCL's teams; ``hosts``: where each rank really is."""
    order = topology.rank_order
    size = len(topology.ranks_of_node(0))
    settings = {"hosts": as_text(hosts[rank] for rank in order)}
    said = []
    for rank in range(topology.num_ranks):
        lines = run("teams", str(rank), as_text(order), str(size), **settings)
        assert lines[1].startswith(f"id 7, {len(hosts)} ranks, rank {order.index(rank)},")
        said += [line.removeprefix("teams: ") for line in lines if line.startswith("teams: ")]
    return said


@pytest.mark.parametrize(
    "nodes",
    [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 2, 0, 1, 2], [0] * 4,
     [0, 1, 2, 3], [0, 1, 1, 2, 0, 2, 2, 1, 0]],
    ids=as_text,
)  # fmt: skip
def test_tables_of_any_order_fit_where_the_ranks_are_there(run, nodes):
    assert teams(run, Topology(node_of_rank=nodes), nodes) == [""] * len(nodes)


@pytest.mark.parametrize(
    ("nodes", "hosts", "message"),
    [
        ([0, 1, 0, 1], [0, 0, 1, 1],
         "the topology's node of rank 0 has 2 ranks (0, 2), but on this machine NCCL joins 1 rank "
         "(0) by load and store: some GPUs of a node cannot reach each other (nvidia-smi topo "
         "-p2p r), or the node table is not that of the machines (expected: Topology.from_group)"),
        ([0, 0, 1, 1], [0, 1, 0, 1], "of rank 0 has 2 ranks (0, 1), but on this machine NCCL joins "
         "1 rank (0) by load and store"),
        ([0, 1, 1, 0], [0, 1, 0, 1], "of rank 0 has 2 ranks (0, 3), but"),
        ([0, 1, 0, 1], [0] * 4,
         "has 2 ranks (0, 2), but on this machine NCCL joins 4 ranks (0, 2, 1, 3) by load and "
         "store: they are one NVLink domain; give all its processes the same TOPOEP_NODE"),
        ([0, 1] * 8, [0] * 16, "NCCL joins 16 ranks (0, 2, 4, 6, 8, 10, 12, 14, ..) by load"),
        ([0, 1] * 4, [0, 2, 0, 2, 1, 3, 1, 3], "has 4 ranks (0, 2, 4, 6), but on this machine NCCL "
         "joins 2 ranks (0, 2)"),
    ],
)  # fmt: skip
def test_tables_that_are_not_the_machines_are_refused_on_every_rank(run, nodes, hosts, message):
    said = teams(run, Topology(node_of_rank=nodes), hosts)
    assert message in said[0]
    assert all(said)


def test_an_adopted_communicator_must_be_in_the_order_of_the_nodes(run):
    (line,) = run("adopted_teams", "3", "0,2,4,6,1,3,5,7", "4", hosts="0,1,0,1,0,1,0,1")[-1:]
    assert line == (
        "teams: the communicator numbers rank 3 of the group 3, where node by node rank 6 would "
        "be: NCCL joins consecutive ranks only. Unset TOPOEP_NCCL_COMM, so that a communicator in "
        "the order of the nodes is made"
    )
    (line,) = run("adopted_teams", "3", "0,1,2,3", "2")[-1:]
    assert "the communicator has 8 ranks, the topology 4" in line
    assert run("adopted_teams", "3", "0,1,2,3,4,5,6,7", "4")[-1] == "teams: "


def test_an_adopted_communicator_is_not_destroyed(run):
    assert "ncclCommDestroy" not in run("adopted_teams", "3", "0,1,2,3,4,5,6,7", "4")
    (line,) = run("adopt_nothing")
    assert "has no NCCL communicator yet; make it eager" in line
