# SPDX-License-Identifier: Apache-2.0
"""Some of the random plans of fuzz_plans.py in every test run; ``make fuzz`` runs many more."""

from __future__ import annotations

import pytest

from tests.fuzz_plans import run_kernels, run_plan
from tests.strategies import examples

BLOCK = 250


@pytest.mark.parametrize("first", range(0, examples(2000), BLOCK))
def test_random_plans_agree_and_keep_the_rules(first):
    with_copies = 0
    for seed in range(first, first + BLOCK):
        with_copies += int(run_plan(seed).stats()["copies"]) > 0
    assert with_copies > BLOCK // 5


@pytest.mark.parametrize("first", range(0, examples(60), 20))
def test_kernels_agree_on_random_plans(first):
    for seed in range(first, first + 20):
        run_kernels(seed)
