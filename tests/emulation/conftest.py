# SPDX-License-Identifier: Apache-2.0
"""The self-test's kernels, in both builds."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import HERE, Emulator

UNIT = HERE / "selftest_unit.cpp"


@pytest.fixture(scope="session")
def checked() -> Emulator:
    return Emulator([UNIT])


@pytest.fixture(scope="session")
def fast() -> Emulator:
    return Emulator([UNIT], instrumented=False)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)
