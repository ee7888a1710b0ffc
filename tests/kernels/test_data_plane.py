# SPDX-License-Identifier: Apache-2.0
"""The data plane on simulated clusters: right bytes, right sums, bounded waits, no races.

Every run goes through exchange of counts, weights forward, gradients home and an optimizer step,
for two or three microbatches in ONE launch with the race checker on, over a network that delivers
the pieces of operations in any order. A case is a seed: sizes, plans, delays and schedule follow.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.emulation.harness import Emulator, LaunchError
from tests.kernels import cluster as simulated
from tests.kernels.cluster import SHORT, Cluster, expected_sent_bytes, run
from tests.kernels.plans import KINDS, TOPOLOGIES, plan_tables, random_plan
from tests.kernels.relays import relays_by_definition
from topoep import Topology

SMALL = {
    "2x2": Topology(num_nodes=2, ranks_per_node=2),
    "3x1": Topology(num_nodes=3, ranks_per_node=1),
    "2x2-strided": Topology(node_of_rank=[0, 1, 0, 1]),
}
# Nodes that are large enough to relay.
RELAYING = {
    "1x3": Topology(num_nodes=1, ranks_per_node=3),
    "1x5": Topology(num_nodes=1, ranks_per_node=5),
    "2x3": Topology(num_nodes=2, ranks_per_node=3),
    "2x4-strided": TOPOLOGIES["2x4-strided"],
}
ORDERS = ("random", "warp_random")


def random_case(seed: int, topologies: dict[str, Topology], **fixed):
    """(cluster, plans, schedule) of a seed."""
    g = random.Random(seed)
    senders = g.choice([1, 2])
    sizes = {
        "topology": topologies[g.choice(sorted(topologies))],
        "spare_slots": g.choice([1, 2, 3]),
        "experts_per_rank": g.choice([1, 2]),
        "row_bytes": g.choice([(400, 20, 1, 192), (16,), (48, 7), (1504,), (64, 4, 4, 4, 2000)]),
        "elements": g.choice([(104, 13, 40), (8,), (24, 5), (392,), (1, 1, 700)]),
        "workers": g.choice([1, 2, 3]),
        "senders": senders,
        "pullers": g.choice([1, 2, 3]),
        "ring_slots": g.choice([1, 2, 3, 5]),
        "staging_slots": senders * g.choice([1, 2, 3]),
        "chunk_bytes": g.choice([128, 256]),
        "tile_bytes": g.choice([128, 512]),
        "bfloat16_slots": g.random() < 0.3,
        "bfloat16_home": g.random() < 0.3,
        "threads": g.choice([32, 32, 64]),
        "exchange": g.random() < 0.5,
        "delay": g.choice([0, 20, 200, 1500]),
        "alternate": seed % 3 == 0,
    }
    # Weights may change only where the exchange keeps ranks from running ahead.
    sizes["optimizer"] = sizes["exchange"]
    sizes["slow_rank"] = g.choice([-1, -1, g.randrange(sizes["topology"].num_ranks)])
    cluster = Cluster(**sizes | fixed)
    rng = np.random.default_rng(seed)
    plans = [
        random_plan(
            rng, cluster.topology, cluster.experts_per_rank, cluster.spare_slots, g.choice(KINDS)
        )
        for _ in range(g.choice([2, 3]))
    ]
    return cluster, plans, {"order": g.choice(ORDERS), "preempt": g.choice([0, 0, 3, 40])}


def check(cluster: Cluster, plans, seed: int, **schedule) -> None:
    outcome = run(cluster, plans, seed, **schedule)
    assert outcome.reports == [], "\n".join(map(str, outcome.reports))
    assert outcome.failures == []
    assert outcome.wrong == []
    assert outcome.sent_bytes.sum() == expected_sent_bytes(cluster, plans)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_and_kind_of_plan(name, kind):
    cluster = Cluster(TOPOLOGIES[name])
    rng = np.random.default_rng(len(name) + 10 * len(kind))
    plans = [random_plan(rng, cluster.topology, 2, 2, kind) for _ in range(2)]
    check(cluster, plans, seed=len(name))


@pytest.mark.parametrize("part", range(8))
def test_random_schedules(part):
    for seed in range(part, 120, 8):
        cluster, plans, schedule = random_case(seed, SMALL)
        check(cluster, plans, seed, **schedule)


def num_relayed(plans) -> int:
    return sum(
        len(relays_by_definition(plan, node))
        for plan in plans
        for node in range(plan.topology.num_nodes)
    )


@pytest.mark.parametrize("part", range(4))
def test_random_schedules_with_relays(part):
    relaying = 0
    for seed in range(part, 40, 4):
        cluster, plans, schedule = random_case(seed, RELAYING)
        rng = np.random.default_rng(seed)
        sizes = cluster.topology, cluster.experts_per_rank, cluster.spare_slots
        plans[0] = random_plan(rng, *sizes, "relayed")
        plans[-1] = random_plan(rng, *sizes, "relayed")
        relaying += num_relayed(plans) > 0
        check(cluster, plans, seed, **schedule)
    assert relaying >= 5


@pytest.mark.parametrize("part", range(4))
def test_random_schedules_with_bulk_copies(part):
    """Pieces of all lengths, through rings that wrap; other rows are not aligned."""
    for seed in range(part, 40, 4):
        rows = random.Random(seed).choice([(4000, 20, 1, 192), (16,), (1504, 48), (400, 7)])
        cluster, plans, schedule = random_case(
            seed,
            RELAYING if seed % 2 else SMALL,
            bulk_piece_bytes=128 if seed % 3 else 256,
            row_bytes=rows,
        )
        if seed % 2:
            sizes = cluster.topology, cluster.experts_per_rank, cluster.spare_slots
            plans[0] = random_plan(np.random.default_rng(seed), *sizes, "relayed")
        check(cluster, plans, seed, **schedule)


def hot_at_home_plan(topology: Topology):
    """Expert 1, of rank 0, on every other rank of its node, and expert 0 on the other nodes."""
    slot_expert = np.full((topology.num_ranks, 2), -1, np.int32)
    for rank in range(1, topology.num_ranks):
        slot_expert[rank, rank % 2] = 1 if topology.node_of_rank[rank] == 0 else 0
    return plan_tables(topology, 2 * topology.num_ranks, slot_expert)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("name", ["1x8", "2x4"])
def test_relay_rings_wrap(name, workers):
    """Many chunks through short rings, with fewer and with more pullers than work."""
    cluster = Cluster(TOPOLOGIES[name], workers=workers, pullers=1 if workers == 2 else 4,
                      ring_slots=3, row_bytes=(8000, 52), elements=(8,), exchange=False,
                      optimizer=False)  # fmt: skip
    plans = [hot_at_home_plan(cluster.topology)] * 2
    assert num_relayed(plans) == 2
    check(cluster, plans, seed=workers, order="warp_random")


@pytest.mark.parametrize("seed", range(6))
def test_forward_only(seed):
    """Copies of one layer after the other, nothing in between that ranks would wait in."""
    fixed = {"backward": False, "optimizer": False, "exchange": False}
    cluster, plans, schedule = random_case(seed, RELAYING, **fixed)
    rng = np.random.default_rng(seed)
    sizes = cluster.topology, cluster.experts_per_rank, cluster.spare_slots
    plans = [random_plan(rng, *sizes, "relayed") for _ in range(5)]
    check(cluster, plans, seed, **schedule)


def test_one_node_needs_no_senders():
    cluster = Cluster(TOPOLOGIES["1x8"], senders=0, pullers=3)
    rng = np.random.default_rng(1)
    check(cluster, [random_plan(rng, cluster.topology, 2, 2, "full")] * 2, seed=1)


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ((2, 8, 4, 20, 512), None),
        ((1, 8, 0, 1, 32), None),
        ((2, 8, 0, 20, 512), "a sender"),
        ((1, 8, 0, 0, 512), "a puller"),
        ((2, 8, 3, 20, 512), "divide staging_slots"),
        ((1, 8, 0, 1, 48), "multiple of 32"),
        ((1, 8, 0, 1, 544), "at most 512"),
    ],
)
def test_roles_are_checked_before_a_launch(roles, problem):
    """roles: nodes, staging slots, senders, pullers, threads."""
    if problem is None:
        simulated.emulator().call("check_roles", *roles)
    else:
        with pytest.raises(LaunchError, match=problem):
            simulated.emulator().call("check_roles", *roles)


@pytest.mark.parametrize("seed", range(4))
def test_an_exchange_may_overtake_the_one_before(seed):
    """A slow network, nothing but exchanges: a row is put while the last one is under way."""
    cluster = Cluster(SMALL["2x2"], optimizer=False, delay=1500, threads=64)
    empty = random_plan(np.random.default_rng(0), cluster.topology, 2, 2, "empty")
    check(cluster, [empty] * 4, seed, order="warp_random", preempt=3)


@pytest.mark.slow
def test_more_nodes_than_a_block_has_threads():
    topology = Topology(num_nodes=40, ranks_per_node=1)
    cluster = Cluster(topology, 1, 1, row_bytes=(400, 20), elements=(104, 13))
    rng = np.random.default_rng(1)
    check(cluster, [random_plan(rng, topology, 1, 1, k) for k in ("full", "hot")], seed=1)


def test_over_peer_memory():
    """The network of simulated ranks in one GPU: puts are plain stores."""
    unit = Emulator([simulated.UNIT], flags=["-DTOPOEP_TEST_PEER_MEMORY"])
    for seed in range(10):
        cluster, plans, schedule = random_case(seed, SMALL if seed < 6 else RELAYING)
        outcome = run(cluster, plans, seed, unit=unit, **schedule)
        assert (outcome.reports, outcome.failures, outcome.wrong) == ([], [], [])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_random_schedules(part):
    for seed in range(1000 + part, 2200, 20):
        cluster, plans, schedule = random_case(seed, SMALL | TOPOLOGIES | RELAYING)
        check(cluster, plans, seed, **schedule)


def hot_expert_plan(topology: Topology, holders_per_node: int):
    """One expert of node 0, copied to the first ranks of every other node."""
    slot_expert = np.full((topology.num_ranks, 1), -1, np.int32)
    for node in range(1, topology.num_nodes):
        for rank in topology.ranks_of_node(node)[:holders_per_node]:
            slot_expert[rank, 0] = 1
    return plan_tables(topology, topology.num_ranks, slot_expert)


@pytest.mark.parametrize("holders", [1, 3])
def test_every_nic_of_a_node_carries_the_same(holders):
    """One hot expert to three remote nodes: at most 1.15 times the mean of the node's NICs."""
    topology = Topology(num_nodes=4, ranks_per_node=4)
    cluster = Cluster(topology, 1, 1, row_bytes=(4096, 52), elements=(1024, 13), exchange=False,
                      optimizer=False, chunk_bytes=256)  # fmt: skip
    outcome = run(cluster, [hot_expert_plan(topology, holders)], seed=1)
    assert (outcome.reports, outcome.failures, outcome.wrong) == ([], [], [])
    for node in range(4):
        sent = outcome.sent_bytes[list(topology.ranks_of_node(node))].astype(float)
        assert sent.min() > 0
        assert sent.max() <= 1.15 * sent.mean()


# ---- Faults

FAULTY = {"ring_slots": 2, "delay": 60, "timeout": SHORT, "exchange": False, "optimizer": False}


def faulty_case(seed: int, **faults):
    cluster = Cluster(SMALL["2x2"] if seed % 3 else TOPOLOGIES["3x2-mixed"], **FAULTY | faults)
    rng = np.random.default_rng(seed)
    return cluster, [random_plan(rng, cluster.topology, 2, 2, "full") for _ in range(3)]


def some_signal(seed: int) -> int:
    """The number of a signal in the first half of a run: its slot is used again."""
    total = run(*faulty_case(seed), seed).sent_signals
    return total * seed // 20


@pytest.mark.parametrize("seed", range(1, 7))
def test_without_a_fault_the_same_limits_are_enough(seed):
    """The control of the tests below; also with one rank that starts late."""
    check(*faulty_case(seed, slow_rank=seed % 5 - 1), seed)


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_lost_signal_ends_in_the_error_record(seed):
    outcome = run(*faulty_case(seed, dropped_signal=some_signal(seed)), seed)
    assert outcome.failures, "the run went on"
    assert outcome.wrong == []
    assert outcome.reports == []
    assert {f.waited for f in outcome.failures} <= set(simulated.WAITED[1:])


def test_the_error_record_names_both_ends():
    """The first signal of a run with two ranks carries data: its receiver names its sender."""
    cluster = Cluster(Topology(num_nodes=2, ranks_per_node=1), 1, 1, **FAULTY | {
        "dropped_signal": 0})  # fmt: skip
    plan = plan_tables(cluster.topology, 2, np.array([[-1], [0]], np.int32))
    outcome = run(cluster, [plan], 1)
    by_rank = {f.rank: f for f in outcome.failures}
    assert (by_rank[1].waited, by_rank[1].source) == ("data", 0)
    assert by_rank[1].seen == 0
    assert by_rank[1].wanted == 1


@pytest.mark.parametrize("late", [0, 400, 3000])
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_doubled_signal_never_releases_old_bytes(seed, late):
    cluster, plans = faulty_case(seed, doubled_signal=some_signal(seed), doubled_late=late)
    outcome = run(cluster, plans, seed)
    assert outcome.wrong == []
    assert outcome.reports == []
    if late == 0:
        assert outcome.failures, "the run went on"


def test_a_dead_rank_ends_in_an_error_on_the_others():
    """A rank that never takes part: here its kernels see an earlier failure and leave at once."""
    cluster, plans = faulty_case(1, dead_rank=1)
    outcome = run(cluster, plans, 1)
    assert {f.rank for f in outcome.failures} == {0, 2, 3}
    assert 1 in {f.source for f in outcome.failures}
    assert outcome.wrong == []


def relaying_case(**faults):
    """Two nodes whose every replicate goes over relays, and one without a network."""
    for topology in (TOPOLOGIES["2x4"], Topology(num_nodes=1, ranks_per_node=4)):
        cluster = Cluster(topology, **FAULTY | faults)
        plans = [hot_at_home_plan(topology)] * 2
        assert num_relayed(plans) == 2
        yield cluster, plans


@pytest.mark.parametrize("slow", [-1, 0, 2])
def test_relays_bear_a_slow_rank(slow):
    for cluster, plans in relaying_case(slow_rank=slow):
        check(cluster, plans, seed=1)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_relay_ends_in_an_error_on_its_node(dead):
    """Rank 0 is the home, which relays nothing; the others relay and hold."""
    for cluster, plans in relaying_case(dead_rank=dead):
        outcome = run(cluster, plans, seed=1)
        node = set(range(4)) - {dead}
        assert {f.rank for f in outcome.failures} >= node
        if dead != 0:
            by_relays = [f for f in outcome.failures if f.rank in node - {0}]
            assert {f.waited for f in by_relays} <= {"arrived", "done", "data", "credit"}
            assert dead in {f.source for f in by_relays}
        assert outcome.wrong == []
