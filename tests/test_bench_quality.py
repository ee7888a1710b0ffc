# SPDX-License-Identifier: Apache-2.0
"""The quality benchmark runs, and no planner with fixed homes beats TopoEP in its quick grid."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_quality
from baselines import BASELINES
from baselines.compare import tolerance_for
from baselines.grid import KINDS, full_grid, quick_grid
from baselines.tables import COMPACT, TOLERANCES

from topoep.simulator import workloads as loads

BENCHMARKS = Path(bench_quality.__file__).parent

#: (load, S, planner) that lose, with the reason. All have S >= 2; fixing one needs no change here.
KNOWN_LOSSES = {
    # 4 of 16 ranks have 16 equal experts each, and all spare slots of the others just suffice: the
    # node step splits what it exports into more pieces than there are slots. In W5 half of the
    # ranks have no tokens; of our policies only matching by transport ("T") finds as few copies.
    ("W1", 4, "UltraEP one domain"),
    ("W1", "own", "MoonEP"),
    ("W5", "own", "MoonEP"),
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("quality")
    rng = np.random.default_rng(0)
    np.savez(
        folder / "trace.npz",
        format=np.int32(1),
        counts=rng.integers(0, 90, (4, 2, 4, 16)).astype(np.int32),
        node_of_rank=np.array([0, 0, 1, 1], dtype=np.int32),
        top_k=np.int32(2),
        meta=np.array(json.dumps({"spare_slots": 2})),
    )
    command = [sys.executable, str(BENCHMARKS / "bench_quality.py"), "--quick"]
    command += ["--trace", str(folder / "trace.npz"), "--json", str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "out.json").read_text())
    for name in COMPACT:
        columns, *rows = result[name] or [[]]
        result[name] = [dict(zip(columns, row, strict=True)) for row in rows]
    return result, done.stdout, folder


def test_no_plan_is_wrong(quick):
    result, _, _ = quick
    for table in ("planners", "planners per R", "planners per group", "tolerances", "severe"):
        assert result[table]
        assert [row for row in result[table] if row["#wrong"] != 0] == []


def test_nothing_is_lost_with_two_slots_or_more(quick):
    result, _, _ = quick
    losses = [
        row
        for row in result["losses"]
        if row["S"] != 1 and (row["load"], row["S"], row["planner"]) not in KNOWN_LOSSES
    ]
    assert losses == []


def test_every_planner_and_group_is_there(quick):
    result, printed, _ = quick
    names = {baseline.name for baseline in BASELINES}
    assert {row["planner"] for row in result["planners"]} == names
    assert {row["group"] for row in result["cells"]} == {load.group for load in quick_grid()} | {
        "trace"
    }
    for name in (*names, "Instances lost", "Cells lost"):
        assert name in printed


def test_numbers_make_sense(quick):
    result, _, _ = quick
    for row in result["planners per group"]:
        assert 1 <= row["imbalance"] <= row["worst"]
        assert row["copies"] <= row["published"]
        assert row["topoep"] <= row["topoep published"]
        assert 0 <= row["cross %"] <= 100
        assert 0 <= row["topoep cross %"] <= 100
        if row["planner"] == "no balancing":
            assert row["copies"] == row["topoep"] == 0
            assert row["imbalance"] == row["before"]
        if row["planner"] == "UltraEP per node":
            assert row["copies"] == row["published"]
    for row in result["severe"]:
        assert 1 <= row["bound"] <= row["topoep"] + 1e-6 <= row["worst"] + 2e-6
    for row in result["tolerances"]:
        columns = [row[f"{100 * tolerance:g} %"] for tolerance in TOLERANCES]
        assert columns[0] > columns[-1] > 0


def test_results_are_small_and_pictures_are_written(quick):
    _, _, folder = quick
    assert (folder / "out.json").stat().st_size < 60_000
    for name in ("out.png", "out_sequence.png"):
        assert (folder / name).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("max_load", "tokens", "ranks"), [(1000, 4000, 4), (1001, 4000, 4), (65537, 2**20, 16)]
)
def test_tolerance_allows_that_load_and_no_token_more(max_load: int, tokens: int, ranks: int):
    ppm = round(tolerance_for(max_load, tokens, ranks) * 10**6)
    assert tokens * (10**6 + ppm) // (ranks * 10**6) == max_load


def test_grid_is_complete():
    main = [load for load in full_grid() if load.group == "main"]
    assert {load.ranks for load in main} == {8, 16, 32, 64, 128, 256}
    assert len(main) == 6 * len(KINDS) * 3
    assert {(load.ranks, load.experts, load.node_ranks) for load in full_grid()} >= {
        (40, 160, 8),
        (48, 384, 8),
        (32, 128, 4),
        (12, 60, 4),
    }
    patterns = {load.name for load in full_grid() if load.group == "Megatron"}
    assert patterns == set(loads.MEGATRON)
