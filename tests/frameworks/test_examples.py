# SPDX-License-Identifier: Apache-2.0
"""The examples run, and show equal losses and a smaller imbalance."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.environment import REQUIRED

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "frameworks").glob("train_*.py"))


@pytest.mark.skipif(not REQUIRED, reason="needs the frameworks; run make test-frameworks")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains_to_equal_losses_with_a_smaller_imbalance(path):
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    difference = float(re.search(r"largest difference of the losses: (\S+)", result.stdout)[1])
    assert difference < 1e-2
    before, after = re.search(r"imbalance .*: (\S+) -> (\S+),", result.stdout).groups()
    assert float(after) < 1.05 < 1.3 < float(before)
