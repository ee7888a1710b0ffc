# SPDX-License-Identifier: Apache-2.0
"""The script that puts predictions beside published figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import paper_setting as paper

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = json.loads((ROOT / "benchmarks" / "results" / "paper_setting.json").read_text())


def test_crossing_interpolates_and_says_when_there_is_none():
    rows = [{"imbalance": 1.0, "topoep": -1.0}, {"imbalance": 1.5, "topoep": 9.0}]
    assert paper.crossing(rows, 4.0) == pytest.approx(1.25)
    assert paper.crossing(rows, 9.5) is None


@pytest.mark.parametrize("case", paper.CASES, ids=lambda case: case.model)
def test_committed_figures_come_out_again(case):
    """A gain of the committed file with the committed number of seeds."""
    index = paper.SKEWS.index(1.3)
    variant = paper.Variant(case, paper.SKEWS[index], COMMITTED["seeds"])
    assert paper.gain(variant) == pytest.approx(
        COMMITTED["gains"][case.model][index]["topoep"], abs=0.3
    )


def test_what_the_model_says_about_the_paper():
    """The statements of docs/simulator.md."""
    for case in paper.CASES:
        rows = COMMITTED["gains"][case.model]
        uniform = rows[0]
        assert uniform["imbalance"] < 1.03
        assert -2 < uniform["topoep"] < 0, "planning is all that balanced routing costs"
        assert uniform["two_stage"] < uniform["topoep"] - 1, "copies for traffic do not pay"
        values = [row["topoep"] for row in rows]
        assert values == sorted(values)
        assert all(row["topoep"] < row["free_balance"] for row in rows)
        at = COMMITTED["imbalance_of_published"][case.model]
        assert at is not None
        assert 1.15 < at < 1.6


def test_every_assumption_is_in_the_table_and_the_text_is_whole():
    names = [row["what"] for row in COMMITTED["sensitivity"]]
    base = paper.Variant(paper.CASES[0], 1.5, 1)
    assert set(names) == set(paper.variants(base))
    moves = [row["move"] for row in COMMITTED["sensitivity"]]
    assert moves == sorted(moves, reverse=True)
    text = paper.describe(COMMITTED)
    assert "Predictions" in text
    for case in paper.CASES:
        assert case.model in text
    assert text.count("published") >= 3


def test_the_page_shows_the_committed_figures(tmp_path):
    page = (ROOT / "docs" / "simulator.md").read_text()
    tables = paper.page_tables(COMMITTED)
    assert [len(rows) for rows in tables] == [3, len(COMMITTED["sensitivity"]), 4]
    for rows in tables:
        assert "\n".join(rows) + "\n" in page
    # Other figures replace them, and nothing else.
    other = json.loads(json.dumps(COMMITTED).replace("1.", "2."))
    (tmp_path / "page.md").write_text(page)
    paper.update_page(tmp_path / "page.md", other)
    changed = (tmp_path / "page.md").read_text()
    assert "\n".join(paper.page_tables(other)[0]) in changed
    paper.update_page(tmp_path / "page.md", COMMITTED)
    assert (tmp_path / "page.md").read_text() == page
