# SPDX-License-Identifier: Apache-2.0
"""Exact plans: the program that makes them, and what TopoEP's plans are compared with them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import topoep
from tests.strategies import examples

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_optimal
import local_search
import optimal
from baselines.score import cross_tokens, quota_of_plan

from topoep.simulator import workloads as loads

# Two nodes of two ranks with two experts each. Rank loads 200, 140, 20 and 40, the mean is 100.
TOTALS = np.array([[150, 50, 70, 70, 20, 0, 40, 0]], dtype=np.int32)
TOPOLOGY = topoep.Topology(2, 2)


def by_hand(slots: int = 2) -> optimal.Problem:
    counts = np.zeros((4, 8), dtype=np.int32)
    counts[0] = TOTALS
    return optimal.from_counts(counts, TOPOLOGY, slots)


# ---- worked by hand ------------------------------------------------------------------------------


def test_worked_example():
    """Ranks 0 and 1 have 100 and 40 too many, ranks 2 and 3 have room for 80 and 60.

    Node 0 must export 140. One expert of rank 0 carries at most 149 and fills both rooms only if
    140 leave rank 0, which then takes 40 from rank 1: three copies (two of expert 0 in node 1, one
    pair; one of expert 2 on rank 0). Two copies cannot do: one rank's room is below 100. So the
    cost is 3 copies + 2 x 1 pair.
    """
    problem = by_hand()
    answer = optimal.fewest_copies(problem, 100)
    assert answer.proved
    assert answer.value == 5
    assert optimal.broken_rule(problem, answer.copies, 100) is None
    assert optimal.loads(problem, answer.copies).tolist() == [100, 100, 100, 100]


@pytest.mark.parametrize(("cap", "cost"), [(200, 0), (199, 1), (180, 1), (140, 3), (120, 4)])
def test_looser_caps_by_hand(cap: int, cost: int):
    """199 and 180: rank 1 has room for what rank 0 has too much.

    140: rank 1 is full, so 60 tokens cross to one rank, which costs 3. 120: rank 0 has 80 too many
    and rank 1 has 20. Rank 2 takes 100 of expert 0, then rank 0 takes 20 from rank 1: 3 + 1.
    """
    answer = optimal.fewest_copies(by_hand(), cap)
    assert answer.proved
    assert answer.value == cost


def test_too_low_a_cap_has_no_plan():
    assert optimal.fewest_copies(by_hand(), 99).copies is None
    # One slot per rank: ranks 2 and 3 each take one copy, so three copies fit, as worked above.
    assert optimal.fewest_copies(by_hand(slots=1), 100).value == 5
    assert optimal.fewest_copies(by_hand(slots=0), 150).copies is None


def test_smallest_max_load_by_hand():
    answer = optimal.lowest_max_load(by_hand())
    assert (answer.value, answer.bound) == (100, 100)
    # A single expert of 100 tokens on rank 0, one slot on each rank: 25 each, one stays at home.
    counts = np.zeros((4, 4), dtype=np.int32)
    counts[0, 0] = 101
    answer = optimal.lowest_max_load(optimal.from_counts(counts, TOPOLOGY, 1))
    assert (answer.value, answer.bound) == (26, 26)
    assert optimal.lowest_max_load(optimal.from_counts(counts, TOPOLOGY, 0)).value == 101


def test_lower_bound_by_hand():
    """Ranks 2 and 3 must both take in something, and node 1: 2 copies and a pair."""
    assert optimal.lower_bound(by_hand(), 100) == 4
    assert optimal.lower_bound(by_hand(), 200) == 0


def test_broken_rules_are_named():
    problem = by_hand(slots=1)
    assert optimal.broken_rule(problem, {(0, 1): 50}) is None
    assert "holds expert 0" in optimal.broken_rule(problem, {(0, 0): 1})
    assert "-1 tokens" in optimal.broken_rule(problem, {(0, 1): -1})
    assert "slots" in optimal.broken_rule(problem, {(0, 2): 1, (1, 2): 1})
    assert "at home" in optimal.broken_rule(problem, {(1, 2): 50})
    assert "more than 199" in optimal.broken_rule(problem, {}, 199)


# ---- against the planner -------------------------------------------------------------------------


def brute_force(problem: optimal.Problem, cap: int) -> float:
    """The fewest weighted copies by trying all sets of at most three copies; inf if none."""
    possible = [(e, r) for e, r in np.argwhere(~problem.held).tolist() if problem.movable[e] > 0]
    best = float("inf")
    for number in range(4):
        for holders in itertools.combinations(possible, number):
            used = np.bincount([r for _, r in holders], minlength=problem.num_ranks)
            cost = optimal.weighted_copies(problem, holders)
            if cost < best and (used <= problem.slots).all():
                copies = optimal.place_tokens(problem, cap, holders)
                if copies is not None:
                    best = cost
    return best


@settings(max_examples=examples(4), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 2))
def test_exact_plans_equal_brute_force_where_three_copies_suffice(seed: int, slots: int):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 30, (4, 4)).astype(np.int32) * (rng.random(4) < 0.7)
    problem = optimal.from_counts(counts.astype(np.int32), TOPOLOGY, slots)
    cap = optimal.cap_within(problem, 0.3)
    answer, expected = optimal.fewest_copies(problem, cap), brute_force(problem, cap)
    if np.isfinite(expected):
        assert answer.value == expected
    else:
        assert answer.copies is None or len(answer.copies) > 3


@pytest.mark.parametrize(("kind", "slots"), [("lognormal", 1), ("zipf_rank_shuf", 2)])
def test_small_instances(kind: str, slots: int):
    rows = bench_optimal.small_rows(slots, kind, 1.7, seed=5, time_limit=60)
    assert [row["#wrong"] for row in rows] == [0] * 4
    assert all(row["proved"] for row in rows)
    even = rows[0]
    assert even["topoep"] == even["optimum"] == even["mean"]
    for row in rows[1:]:
        assert row["optimum"] <= row["topoep"] <= row["optimum"] + 2


@settings(max_examples=examples(10), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tolerance=st.sampled_from([0.0, 0.01, 0.1]))
def test_lower_bound_is_below_every_plan(seed: int, tolerance: float):
    topology = topoep.Topology(4, 4)
    counts = loads.skewed("lognormal", 16, 64, 1.7, seed, 1, node_ranks=4)[0]
    problem = optimal.from_counts(counts, topology, 2)
    cap = optimal.cap_within(problem, tolerance)
    copies = bench_optimal.copies_for(counts, topology, 2, topoep.Balance(tolerance))
    assert optimal.broken_rule(problem, copies) is None
    if optimal.loads(problem, copies).max() <= cap:
        assert 0 < optimal.lower_bound(problem, cap) <= optimal.weighted_copies(problem, copies)


def test_search_keeps_the_rules_and_only_improves():
    """A wasteful plan, every excess token to a rank of its own, becomes cheaper."""
    topology = topoep.Topology(2, 4)
    counts = loads.skewed("lognormal", 8, 32, 1.7, 1, 1, node_ranks=4)[0]
    problem = optimal.from_counts(counts, topology, 4)
    cap = optimal.cap_within(problem, 0.01)
    wasteful = optimal.copies_of(
        topoep.solve(
            torch.from_numpy(counts),
            topology,
            4,
            topoep.Even(),
            candidates=[topoep.Candidate("mean+0%", "F0")],
        )
    )
    found = local_search.search(problem, cap, wasteful, time_limit=4.0, enough=8)
    assert optimal.broken_rule(problem, found, cap) is None
    before = optimal.weighted_copies(problem, wasteful)
    assert optimal.weighted_copies(problem, found) < before


# ---- quotas by level -----------------------------------------------------------------------------


def fewest_far_tokens(counts: np.ndarray, node: np.ndarray, quota: np.ndarray) -> tuple[float, ...]:
    """Linear program: fewest tokens that cross nodes, and then that leave their rank."""
    ranks, experts = counts.shape
    crossing = leaving = 0.0
    far = (node[:, None] != node).astype(float).reshape(-1)
    other = (1 - np.eye(ranks)).reshape(-1)
    for e in range(experts):
        sent = np.kron(np.eye(ranks), np.ones(ranks))
        served = np.kron(np.ones(ranks), np.eye(ranks))
        equal, right = np.vstack([sent, served]), np.concatenate([counts[:, e], quota[:, e]])
        first = linprog(far, A_eq=equal, b_eq=right, method="highs")
        # Lexicographic by weight: one token across nodes outweighs all inside.
        weight = float(counts.sum()) + 1
        both = linprog(far * weight + other, A_eq=equal, b_eq=right, method="highs")
        assert first.status == both.status == 0
        crossing += first.fun
        leaving += both.fun - weight * first.fun
    return round(crossing), round(leaving)


@settings(max_examples=examples(12), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 4, 1), (2, 2, 2), (2, 3, 2), (3, 2, 1), (4, 1, 2)]),
    slots=st.integers(0, 3),
    tolerance=st.sampled_from([0.0, 0.05]),
)
def test_level_greedy_split_is_the_optimum_of_the_linear_program(
    seed: int, shape: tuple[int, int, int], slots: int, tolerance: float
):
    nodes, width, home_experts = shape
    topology = topoep.Topology(nodes, width)
    ranks = nodes * width
    rng = np.random.default_rng(seed)
    popular = np.exp(1.5 * rng.standard_normal((ranks, ranks * home_experts)))
    counts = rng.poisson(40 * popular).astype(np.int32)
    plan = topoep.solve(torch.from_numpy(counts), topology, slots, topoep.Balance(tolerance))
    node, quota = np.array(topology.node_of_rank), quota_of_plan(plan)
    split = plan.split().numpy().reshape(ranks, ranks, -1).sum(2)  # [source, rank that serves]
    crossing = int(split[node[:, None] != node].sum())
    leaving = int(split.sum() - np.trace(split))
    assert (crossing, leaving) == fewest_far_tokens(counts, node, quota)
    assert crossing == cross_tokens(counts, node, quota)
