# SPDX-License-Identifier: Apache-2.0
"""The compiled planner makes the plan of docs/algorithm.md, number for number."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topoep
from tests import strategies
from tests.oracle import planner as oracle
from tests.strategies import Case, examples
from topoep import Balance, Candidate, CostModel, Even, Plan, Time, ops
from topoep.objective import Objective
from topoep.portfolio import default_candidates

EAGER = Time(strategies.EAGER_COSTS)
OBJECTIVES = {
    "balance": Balance(),
    "balance_exactly": Balance(0.0),
    "balance_loosely": Balance(0.1),
    "balance_near": Balance(0.02, 8),
    "even": Even(),
    "even_anywhere": Even(1),
    "time_eager": EAGER,
    "time_h800": Time(CostModel.from_model(2048, 512, hardware="H800")),
    "time_unsharded": Time(CostModel.from_model(16, 512, hardware="A100", sharded=False)),
}


def oracle_objective(objective: Objective) -> oracle.Objective:
    if isinstance(objective, Balance):
        tolerance = round(objective.tolerance * 1_000_000)
        return oracle.Objective("balance", tolerance, objective.cross_weight)
    if isinstance(objective, Time):
        costs = oracle.Costs(**dataclasses.asdict(objective.cost_model))
        return oracle.Objective("time", 0, objective.cross_weight, costs)
    return oracle.Objective("even", 0, objective.cross_weight)


def described(plan: Plan) -> dict[str, object]:
    """A product plan in the terms of the oracle's."""
    offsets, slots = plan.copy_offsets.tolist(), plan.copy_slots.tolist()
    stats = {name: int(value) for name, value in plan.stats().items() if "imbalance" not in name}
    return {
        "slot_expert": plan.slot_expert.tolist(),
        "slot_source": plan.slot_source.tolist(),
        "slot_tokens": plan.slot_tokens.tolist(),
        "copies_of": [slots[a:b] for a, b in itertools.pairwise(offsets)],
        "copy_slots beyond the copies": set(slots[offsets[-1] :]) - {-1},
        "split": plan.split().tolist(),
        "winner": stats["candidate"],
        "cap": stats["cap"],
        "tokens": stats["tokens"],
        "max_load_before": stats["max_load_before"],
        "max_load": stats["max_load"],
        "copies": stats["copies"],
        "pairs": stats["cross_node_copies"],
        "cross_node_tokens_before": stats["cross_node_tokens_before"],
        "cross_node_tokens": stats["cross_node_tokens"],
        "steps": stats["steps"],
        "predicted_ns_before": stats["predicted_ns_before"],
        "predicted_ns": stats["predicted_ns"],
    }


def expected(
    case: Case, objective: Objective, candidates: Sequence[Candidate]
) -> dict[str, object]:
    """What the page says."""
    counts, node = case.counts.tolist(), case.node_of_rank
    texts = [(c.cap, c.policy) for c in candidates]
    plan = oracle.solve(counts, node, case.spare_slots, oracle_objective(objective), texts)
    split = oracle.split(counts, node, plan.slot_expert, plan.slot_tokens)
    unchanged = oracle.split(counts, node, [[] for _ in node], [[] for _ in node])
    result = dict(vars(plan))
    result["copy_slots beyond the copies"] = set()
    result["split"] = split
    result["cross_node_tokens_before"] = oracle.cross_node_tokens(unchanged, node)
    result["cross_node_tokens"] = oracle.cross_node_tokens(split, node)
    return result


def shown(value: object) -> str:
    text = str(value)
    return text if len(text) < 400 else f"{text[:400]}.."


def check(case: Case, objective: Objective, candidates: Sequence[Candidate] | None) -> Plan:
    """Solves with both and compares everything; the message is a call that replays it."""
    plan = topoep.solve(
        case.tensor, case.topology, case.spare_slots, objective, candidates=candidates
    )
    if candidates is None:
        candidates = default_candidates(objective, case.topology.num_nodes)[1:]
    actual, page = described(plan), expected(case, objective, candidates)
    if page["cap"] is None:  # the empty plan has none
        del page["cap"]
    wrong = {name: (actual[name], value) for name, value in page.items() if actual[name] != value}
    if wrong:
        listed = list(candidates) if len(candidates) < 10 else f"the default of {objective}"
        pytest.fail(
            f"{sorted(wrong)} differ, replay with\n  check({case}, {objective}, {listed})\n"
            + "\n".join(f"{n}: product {shown(a)}, page {shown(b)}" for n, (a, b) in wrong.items())
        )
    return plan


@settings(max_examples=examples(800))
@given(strategies.tiny_cases(), strategies.candidates(), strategies.objectives())
def test_one_candidate_on_written_counts_equals_the_page(
    case: Case, candidate: Candidate, objective: Objective
) -> None:
    check(case, objective, [candidate])


@settings(max_examples=examples(800))
@given(strategies.cases(), strategies.candidates(), strategies.objectives())
def test_one_candidate_on_any_kind_of_counts_equals_the_page(
    case: Case, candidate: Candidate, objective: Objective
) -> None:
    check(case, objective, [candidate])


@settings(max_examples=examples(400))
@given(
    st.one_of(strategies.tiny_cases(), strategies.cases()),
    st.lists(strategies.candidates(), max_size=8),
    strategies.objectives(),
)
def test_the_winner_of_any_list_equals_the_page(
    case: Case, candidates: list[Candidate], objective: Objective
) -> None:
    check(case, objective, candidates)


@pytest.mark.parametrize("policy", strategies.POLICIES)
def test_every_policy_with_every_cap_equals_the_page(policy: str) -> None:
    objective = EAGER if "l" in policy else Even()
    copies = 0
    start = 1000 * strategies.POLICIES.index(policy)
    for seed in strategies.seeds(1, start):
        case = strategies.random_case(seed, strategies.SKEWED_KINDS)
        for cap in strategies.CAPS:
            copies += int(check(case, objective, [Candidate(cap, policy)]).stats()["copies"])
    # Enough slots for the policy to show what it does, whatever the seeds above drew.
    crowded = strategies.make_case(
        "uneven_nodes", start, node_of_rank=[0] * 5 + [1] * 4 + [2] * 6, home_slots=3, spare_slots=4
    )
    copies += int(check(crowded, objective, [Candidate("mean+1%", policy)]).stats()["copies"])
    assert copies > 0, f"policy {policy} made no copies at all, so nothing was compared"


@pytest.mark.parametrize("kind", ["small_totals", "crumbs"])
def test_comparisons_off_by_one_would_show(kind: str) -> None:
    # Few of these cases hit a given boundary, so there are many of them.
    for seed in strategies.seeds(900, 100_000):
        rng = np.random.default_rng(seed)
        policies = (strategies.PLAIN_POLICIES, strategies.LOCAL_POLICIES, ("T",))[seed // 3 % 3]
        candidate = Candidate(str(rng.choice(strategies.CAPS)), str(rng.choice(policies)))
        objectives = (Even(), EAGER, Time(strategies.random_cost_model(seed)))
        check(strategies.random_case(seed, [kind]), objectives[seed % 3], [candidate])


@pytest.mark.parametrize("kind", strategies.COUNT_KINDS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_default_list_equals_the_page(name: str, kind: str) -> None:
    start = 10_000 * (1 + list(OBJECTIVES).index(name))
    start += 100 * list(strategies.COUNT_KINDS).index(kind)
    for seed in strategies.seeds(2, start):
        check(strategies.random_case(seed, [kind]), OBJECTIVES[name], None)


@pytest.mark.parametrize(
    ("node_of_rank", "home_slots", "spare_slots"),
    [
        ([rank // 8 for rank in range(64)], 4, 2),
        ([rank % 9 for rank in range(72)], 2, 3),
        ([0] * 33 + [1] * 31, 8, 1),
        (list(range(48)), 3, 2),
    ],
    ids=["blocks", "strided", "two_large_nodes", "a_node_for_each_rank"],
)
def test_large_groups_equal_the_page(
    node_of_rank: list[int], home_slots: int, spare_slots: int
) -> None:
    for kind in ("lognormal", "one_node", "near_sources"):
        case = strategies.make_case(
            kind, 7, node_of_rank=node_of_rank, home_slots=home_slots, spare_slots=spare_slots
        )
        for candidate in (
            "mean+1%:H22112A",
            "mean+0%:F",
            "mean+5%:H10022a",
            "mean+1%:H22112l",
            "mean+0%:T",
        ):
            plan = check(case, EAGER, [Candidate(*candidate.split(":"))])
            assert int(plan.stats()["copies"]) > 0


@settings(max_examples=examples(200))
@given(strategies.cases(), st.integers(0, 2**32 - 1))
def test_the_split_of_any_copies_equals_the_page(case: Case, seed: int) -> None:
    slot_expert, slot_tokens = random_copies(case, np.random.default_rng(seed))
    split = ops.split(
        case.tensor,
        case.topology.table(),
        torch.tensor(slot_expert, dtype=torch.int32).reshape(case.num_ranks, case.spare_slots),
        torch.tensor(slot_tokens, dtype=torch.int32).reshape(case.num_ranks, case.spare_slots),
    )
    counts = case.counts.tolist()
    assert split.tolist() == oracle.split(counts, case.node_of_rank, slot_expert, slot_tokens)


def random_copies(case: Case, rng: np.random.Generator) -> tuple[list[list[int]], list[list[int]]]:
    """Copies that no planner would make: any expert anywhere, any quota that the home can give."""
    at_home = case.counts.sum(0, dtype=np.int64)
    slot_expert, slot_tokens = [], []
    for rank in range(case.num_ranks):
        foreign = [e for e in range(case.num_experts) if e // case.home_slots != rank]
        number = min(len(foreign), int(rng.integers(0, case.spare_slots + 1)))
        experts = sorted(int(e) for e in rng.choice(foreign, number, replace=False))
        tokens = [int(rng.integers(0, at_home[e] + 1)) for e in experts]
        for e, amount in zip(experts, tokens, strict=True):
            at_home[e] -= amount
        empty = case.spare_slots - number
        slot_expert.append(experts + [-1] * empty)
        slot_tokens.append(tokens + [0] * empty)
    return slot_expert, slot_tokens


# ---- the oracle itself, on numbers worked out by hand --------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "ranks", "ppm", "load"),
    [
        (100, 4, 0, 25),
        (101, 4, 0, 26),  # never below what a plan can reach
        (1000, 4, 10_000, 252),  # 252.5 rounded down
        (10, 4, 10_000, 3),
        (0, 3, 50_000, 0),
        (2**31 - 1, 3, 10**9, 716_543_710_215),  # no 32-bit product
    ],
)
def test_within_rounds_down_but_not_below_the_mean(
    tokens: int, ranks: int, ppm: int, load: int
) -> None:
    assert oracle.within(tokens, ranks, ppm) == load


def test_the_oracle_splits_the_lines_of_the_page() -> None:
    # Sources of 3, 4 and 2 tokens over quotas of 5 and 4.
    assert oracle.overlaps([3, 4, 2], [5, 4]) == [(0, 0, 3), (1, 0, 2), (1, 1, 2), (2, 1, 2)]


def test_a_hot_rank_gives_its_neighbour_what_it_lacks() -> None:
    # Loads 9 and 1, mean 5: four tokens of expert 0 go to rank 1, the nearest source serves itself.
    case = strategies.written_case([[6, 0], [3, 1]], node_of_rank=[0, 0], spare_slots=1)
    plan = check(case, Even(), [Candidate("mean+0%", "F")])
    assert plan.slot_expert.tolist() == [[-1], [0]]
    assert plan.slot_tokens.tolist() == [[0], [4]]
    assert plan.split().tolist() == [[5, 0, 0, 1], [0, 0, 1, 3]]


def test_a_second_copy_in_a_remote_node_comes_from_the_first() -> None:
    # Expert 0 has everything; one copy per rank, and node 1 fetches across the network once.
    counts = [[25, 0, 0, 0], [25, 0, 0, 0], [25, 0, 0, 0], [25, 0, 0, 0]]
    case = strategies.written_case(counts, node_of_rank=[0, 0, 1, 1], spare_slots=1)
    plan = check(case, Even(), [Candidate("mean+0%", "H00000")])
    assert plan.slot_expert.tolist() == [[-1], [0], [0], [0]]
    assert plan.slot_source.tolist() == [[-1], [0], [0], [2]]
    assert int(plan.stats()["cross_node_copies"]) == 1
    assert int(plan.stats()["cross_node_tokens"]) == 0


def test_one_token_always_stays_home() -> None:
    # Rank 0 is over the mean, but neither of its experts has a second token to give.
    case = strategies.written_case([[1, 1, 0, 0], [0, 0, 0, 0]], node_of_rank=[0, 0], spare_slots=2)
    for policy in ("F", "H00000"):
        assert int(check(case, Even(), [Candidate("mean+0%", policy)]).stats()["copies"]) == 0
