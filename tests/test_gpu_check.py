# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_check.py without a GPU: what it is asked, what it leaves out, what it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_cluster  # noqa: E402
import gpu_check  # noqa: E402
import gpu_timings  # noqa: E402


def test_arguments():
    default = gpu_check.parse_arguments([])
    assert default.stages == ["build", "tests", "sanitizer", "timings"]
    assert default.budget_s == 480
    assert default.json.name == "gpu_check.json"
    chosen = gpu_check.parse_arguments(["--stages", "timings", "--budget-s", "9", "--json", "a/b"])
    assert (chosen.stages, chosen.budget_s, chosen.json) == (["timings"], 9, Path("a/b"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "lunch"], "invalid choice: 'lunch'"),
        (["--budget-s", "0"], "--budget-s 0: expected more than 0"),
        (["--budget-s", "nan"], "--budget-s nan: expected more than 0"),
        (["--budget-s", "soon"], "invalid float value: 'soon'"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit):
        gpu_check.parse_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_runs_what_it_can_and_says_what_it_leaves_out(tmp_path):
    target = tmp_path / "deep" / "out.json"
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu_check.py"), "--json", str(target)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(target.read_text())
    left_out = "\n".join(written["left_out"])
    for what in ("build: no GPU to build for", "tests: torch", "sanitizer: torch", "timings on a"):
        assert what in left_out
        assert f"left out: {what}" in result.stdout
    assert [row["what"].split(",")[0] for row in written["rows"]] == [
        "histogram",
        "solve",
        "reroute",
    ]
    for row in written["rows"]:
        assert row["#wrong"] == 0
        assert row["time_us"] > 0
    assert "#wrong" in result.stdout


def test_what_fails_is_seen_in_the_table_and_in_the_status(tmp_path, capsys):
    report = gpu_check.Report()
    ok = gpu_check.run_stage(report, "tests", "good", [sys.executable, "-c", "print('3 ok')"], 60)
    assert ok
    for command, seconds in (("raise SystemExit(3)", 60), ("import time; time.sleep(60)", 5)):
        assert not gpu_check.run_stage(
            report, "tests", "bad", [sys.executable, "-c", command], seconds
        )
    assert not gpu_check.run_stage(report, "tests", "late", ["true"], 1)
    assert [row.result for row in report.rows] == ["ok", "FAILED", "FAILED"]
    assert "3 ok" in report.rows[0].note
    assert "status 3" in report.rows[1].note
    assert "no end within 5 s" in report.rows[2].note
    assert report.left_out == ["late: no time is left (--budget-s)"]
    assert report.failed()
    gpu_check.write(report, tmp_path / "out.json", 1.0)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["#wrong"] for row in rows] == [0, 1, 1]
    assert "no end within 5 s" in capsys.readouterr().out


def test_the_cases_for_the_sanitizer_exist():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *gpu_check.SANITIZED]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_wrong_results_are_counted(monkeypatch):
    rows = []
    monkeypatch.setattr(
        gpu_timings.Problem, "reroute", lambda self, plan: (torch.zeros_like(self.ids),)
    )
    gpu_timings.time_cpu(lambda *row: rows.append(row))
    assert [row[-1] for row in rows][:2] == [0, 0]
    assert rows[2][-1] > 0
    assert rows[2][2] == "WRONG"
    assert gpu_timings.count_wrong([torch.tensor([1, 2])], [torch.tensor([1, 3])]) == 1


def test_cluster_benchmark_runs_over_gloo(tmp_path):
    """Three steps of each transport that runs here, on two ranks, started by torchrun."""
    target = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "benchmarks/bench_cluster.py")]
    command += ["--experts", "8", "--hidden", "16", "--intermediate", "32", "--tokens", "64"]
    command += ["--top-k", "2", "--steps", "3", "--skew", "3", "--json", str(target)]
    running = subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = running.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # with the ranks that torchrun started
        raise
    assert running.returncode == 0, output
    written = json.loads(target.read_text())
    rows = {row["transport"]: row for row in written["rows"]}
    assert list(rows) == ["no copies", "c10d"]
    assert all(row["#wrong"] == 0 for row in rows.values())
    assert rows["c10d"]["copies"] > 0
    assert rows["c10d"]["imbalance"] < rows["no copies"]["imbalance"]
    assert any("nccl" in text for text in written["left_out"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens 0: expected at least 1"),
        (["--steps", "-1"], "--steps -1: expected at least 1"),
        (["--chunks", "x"], "invalid int value"),
    ],
)
def test_bad_arguments_of_the_cluster_benchmark(capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench_cluster.parse_arguments(arguments)
    assert message in capsys.readouterr().err
