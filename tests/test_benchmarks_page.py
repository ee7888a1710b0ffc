# SPDX-License-Identifier: Apache-2.0
"""benchmarks/README.md names every script, and the runner starts them with options they have."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import run  # noqa: E402

PAGE = (BENCHMARKS / "README.md").read_text()


def test_every_script_is_on_the_page():
    named = set(re.findall(r"`(\w+\.py)`", PAGE))
    assert named == {path.name for path in BENCHMARKS.glob("*.py")}


def test_what_the_page_says_of_the_targets_is_what_they_run():
    rows = re.findall(r"^\| `(\w+)\.py` \| [^|]* \| ([^|]*) \| ([^|]*) \|$", PAGE, re.M)
    assert {(name, quick != "-", not full.startswith("-")) for name, quick, full in rows} == {
        (b.script, b.quick is not None, b.full is not None) for b in run.BENCHMARKS
    }


@pytest.mark.parametrize("benchmark", run.BENCHMARKS, ids=lambda benchmark: benchmark.script)
@pytest.mark.parametrize("full", [False, True])
def test_scripts_have_the_options_that_they_are_started_with(benchmark, full):
    source = (BENCHMARKS / f"{benchmark.script}.py").read_text()
    if "parse_arguments(" in source:
        source += (BENCHMARKS / "common.py").read_text()
    command = benchmark.command(full)
    options = command[command.index(str(BENCHMARKS / f"{benchmark.script}.py")) + 1 :]
    for option in options:
        if option.startswith("--"):
            # bench_cluster makes its options from a list of names.
            assert f'"{option}"' in source or f'("{option[2:]}", ' in source


def test_the_runner_says_how_long_each_took_and_which_failed(tmp_path, monkeypatch, capfd):
    (tmp_path / "good.py").write_text(
        "import json, sys; json.dump(sys.argv[1:], open(sys.argv[-1], 'w'))"
    )
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "QUICK_RESULTS", tmp_path / "results")
    monkeypatch.setattr(
        run,
        "BENCHMARKS",
        (
            run.Benchmark("good", "--few 1", "--many 2", keeps=True),
            run.Benchmark("bad", None, ""),
        ),
    )
    kept = tmp_path / "results" / "good.json"
    assert run.main([]) == 0
    assert json.loads(kept.read_text()) == ["--few", "1", "--json", str(kept)]
    assert re.search(r"\d\.\d s  good\n", capfd.readouterr().out)
    assert run.main(["bad", "--full"]) == 1
    assert re.search(r"\d\.\d s  bad  failed with status 3\n", capfd.readouterr().out)
    for wrong in (["bad"], ["worse"]):
        with pytest.raises(SystemExit):
            run.main(wrong)
    assert "expected some of good, bad" in capfd.readouterr().err
