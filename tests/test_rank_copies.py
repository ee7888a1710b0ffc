# SPDX-License-Identifier: Apache-2.0
"""Policies that end in /k put at most k copies on a rank, which Time needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topoep
from tests import strategies
from tests.strategies import Case, examples
from topoep import Candidate, CostModel, Even, Time, Topology
from topoep.hardware import HARDWARE


@settings(max_examples=examples(300))
@given(
    strategies.cases(kinds=strategies.SKEWED_KINDS, spare_slots=st.integers(2, 6)),
    st.sampled_from(strategies.CAPS),
    st.sampled_from([*strategies.PLAIN_POLICIES, *strategies.LOCAL_POLICIES, "T"]),
    st.integers(1, 3),
    st.one_of(st.just(Even()), st.builds(Time, strategies.cost_models())),
)
def test_a_limit_is_the_same_as_so_many_slots(
    case: Case, cap: str, policy: str, most: int, objective: topoep.objective.Objective
) -> None:
    def solve(slots: int, policy: str) -> topoep.Plan:
        candidates = [Candidate(cap, policy)]
        return topoep.solve(case.tensor, case.topology, slots, objective, candidates=candidates)

    limited = solve(case.spare_slots, f"{policy}/{most}")
    slots = min(most, case.spare_slots)
    fewer = solve(slots, policy)
    assert limited.stats() == fewer.stats()
    # Used slots come first, so the others are empty.
    assert (limited.slot_expert[:, slots:] == -1).all()
    assert torch.equal(limited.slot_expert[:, :slots], fewer.slot_expert)
    assert torch.equal(limited.slot_tokens[:, :slots], fewer.slot_tokens)


@pytest.mark.parametrize("policy", ["F/0", "F/4", "H00000/", "/1", "H00000/1l", "T/12"])
def test_other_limits_are_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="'/1' to '/3'"):
        Candidate("mean+1%", policy)


def times(counts: np.ndarray, topology: Topology, model: CostModel, slots: list[int]) -> list[int]:
    tensor = torch.from_numpy(counts)
    plans = [topoep.solve(tensor, topology, s, Time(model)) for s in slots]
    return [int(plan.stats()["predicted_ns"]) for plan in plans]


def test_two_copies_on_a_rank_are_not_made_where_its_link_is_what_takes_time() -> None:
    # Best fit alone stacks copies on one rank.
    model = CostModel.from_model(4096, 1408, hardware="H800")
    counts = np.array([[573, 90, 558, 442, 529, 309, 84, 134]] * 4, np.int32)
    one, two, four = times(counts, Topology(2, 2), model, [1, 2, 4])
    assert four <= two <= one
    without = [Candidate(c.cap, c.policy.split("/")[0]) for c in topoep.portfolio.TIME]
    plan = topoep.solve(
        torch.from_numpy(counts),
        Topology(2, 2),
        2,
        Time(model),
        candidates=list(dict.fromkeys(without)),
    )
    assert plan.stats()["predicted_ns"] > 1.05 * one


@settings(max_examples=examples(60))
@given(strategies.cases(kinds=strategies.SKEWED_KINDS), strategies.cost_models())
def test_a_slot_more_never_costs_time(case: Case, model: CostModel) -> None:
    found = times(case.counts, case.topology, model, [0, 1, 2, 3, 4])
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("hardware", HARDWARE)
def test_a_slot_more_never_costs_time_in_models(hardware: str) -> None:
    rng = np.random.default_rng(11)
    saved = 0
    for hidden, intermediate in ((2048, 768), (4096, 1536), (7168, 2048)):
        model = CostModel.from_model(hidden, intermediate, hardware=hardware)
        for nodes, ranks, tokens in ((1, 8, 8192), (2, 4, 8192), (2, 8, 65536), (4, 8, 8192)):
            popularity = rng.lognormal(0, rng.choice([0.5, 1.0, 1.5]), 4 * nodes * ranks)
            drawn = rng.multinomial(tokens, popularity / popularity.sum(), nodes * ranks)
            found = times(drawn.astype(np.int32), Topology(nodes, ranks), model, [0, 1, 2, 3, 4])
            assert found == sorted(found, reverse=True)
            saved += found[2] < found[1]
    assert saved > 0
