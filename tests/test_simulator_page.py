# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/simulator.md runs, in order, from the demo's trace to advice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from topoep import Trace

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "simulator.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [line.removeprefix("$ ") for line in lines]


def test_the_walk_through(tmp_path):
    found = commands()
    assert len(found) >= 8
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    printed = {}
    for command in found:
        line = re.sub(r"^python ", f"'{sys.executable}' ", command)
        result = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        printed[command] = result.stdout
    walk = tmp_path / "walk"
    for name in ("trace.png", "trace.svg", "result.json", "result.png", "report.html"):
        assert (walk / name).stat().st_size > 1000, name
    trace = Trace.load(walk / "trace.npz")
    assert trace.counts.shape == (6, 4, 8, 32)
    result = json.loads((walk / "result.json").read_text())
    assert result["trace"]["tokens_per_rank"] == 8192
    before, after = result["planners"][0], result["planners"][-1]
    assert (before["name"], after["name"]) == ("none", "topoep")
    assert after["imbalance"] < 1.1 < before["imbalance"]
    advice = next(text for command, text in printed.items() if " advise " in command)
    assert "spare_slots=" in advice
    own = Trace.load(walk / "own.npz")
    assert own.counts.tolist() == [[[[90, 0, 0, 10], [0, 0, 100, 0]]]]
    for command, text in printed.items():
        if " simulate " in command or " advise " in command:
            assert "Predictions of a model" in text
