# SPDX-License-Identifier: Apache-2.0
"""The default lists of candidates, and how they are chosen."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import topoep
from topoep import Balance, CostModel, Even, Time, portfolio
from topoep.portfolio import EMPTY_PLAN, default_candidates

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import choose_portfolio
import time_problems

TIME = Time(CostModel.from_model(4096, 1408, "bfloat16", "H800"))


@pytest.mark.parametrize(
    ("objective", "length"), [(Balance(0.0123), 64), (Even(), 64), (TIME, 128)]
)
def test_a_default_list_is_the_empty_plan_and_others(
    objective: topoep.objective.Objective, length: int
) -> None:
    candidates = default_candidates(objective)
    assert candidates[0] == EMPTY_PLAN
    assert len(candidates) == len(set(candidates)) == length


def test_the_list_for_balance_follows_the_tolerance() -> None:
    at = {t: default_candidates(Balance(t)) for t in (0.0, 0.01, 0.02, 1000.0)}
    assert at[0.01][1].cap == "mean+1.0000%"
    assert at[0.02][1].cap == "mean+2.0000%"
    half = [c for c in at[0.01] if c.cap == "mean+0.5000%"]
    assert half
    assert {c.policy for c in half} == {c.policy for c in at[0.02] if c.cap == "mean+1.0000%"}
    # Caps end where Candidate allows no more; nothing is refused.
    assert {len(candidates) for candidates in at.values()} == {len(at[0.01])}


def test_every_default_candidate_is_in_the_pool_it_was_chosen_from() -> None:
    pool = choose_portfolio.balance_pool()
    columns = choose_portfolio.default_columns(pool)
    assert len(columns) == len(set(columns)) == len(default_candidates(Balance())) - 1
    one_node = choose_portfolio.one_node_pool()
    columns = choose_portfolio.default_columns(one_node, num_nodes=1)
    assert len(columns) == len(set(columns)) == len(default_candidates(Balance(), 1)) - 1
    assert set(portfolio.TIME) <= set(time_problems.pool())


def test_the_greedy_choice_by_hand() -> None:
    """Column 2 is the best alone, then column 0, which takes the rest of row 1 away."""
    excess = np.array([[9.0, 0.0, 1.0], [0.0, 9.0, 2.0], [3.0, 5.0, 0.0]])
    assert choose_portfolio.choose(excess, 3) == [2, 0, 1]
    assert choose_portfolio.choose(excess, 2, first=[1]) == [1, 2]


def test_the_excess_by_hand() -> None:
    """Row 0: both meet the cap. Row 1: only the second does. Row 2: none does."""
    tables = {
        "load": np.array([[10, 10], [12, 10], [20, 40]]),
        "weighted": np.array([[6, 3], [1, 5], [1, 1]]),
        "cap": np.array([10, 10, 10]),
    }
    excess = choose_portfolio.excesses(tables)
    expected = [
        [np.log(2), 0],
        [choose_portfolio.MISSED + np.log(1.2), 0],
        [0, choose_portfolio.NOTHING * np.log(2)],
    ]
    np.testing.assert_allclose(excess, expected)


def test_copies_for_time_are_only_made_where_they_pay() -> None:
    """Times of a problem: no candidate is worse than the empty plan, which is last."""
    problem = next(time_problems.problems(0))
    times = problem.nanoseconds(time_problems.pool()[::100])
    assert max(times) == times[-1] > 0
    assert min(times) < times[-1]


def test_what_was_solved_is_kept(tmp_path: Path) -> None:
    first = choose_portfolio.kept(tmp_path, "a", lambda: {"x": np.arange(3)})
    second = choose_portfolio.kept(tmp_path, "a", lambda: pytest.fail("solved again"))
    assert first["x"].tolist() == second["x"].tolist() == [0, 1, 2]
    assert choose_portfolio.joined([first, second])["x"].tolist() == [0, 1, 2, 0, 1, 2]
