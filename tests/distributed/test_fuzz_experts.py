# SPDX-License-Identifier: Apache-2.0
"""Some of the random layers of fuzz_experts.py in every test run."""

from __future__ import annotations

import pytest

from tests.distributed.fuzz_experts import run
from tests.strategies import examples


@pytest.mark.parametrize("seed", range(examples(24)))
def test_a_random_layer_equals_the_dense_one(seed):
    run(seed)
