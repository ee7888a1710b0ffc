# SPDX-License-Identifier: Apache-2.0
"""Importing a framework, or skipping the tests of its adapter."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

import pytest

#: Set by `make test-frameworks`: there a framework that cannot be imported is a failure.
REQUIRED = os.environ.get("TOPOEP_TEST_FRAMEWORKS") == "1"


def require(package: str) -> ModuleType:
    """The package, imported once before ranks are forked; skips the module where it is absent."""
    if not REQUIRED and importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(
            f"{package} is not installed; run make test-frameworks", allow_module_level=True
        )
    return importlib.import_module(package)
