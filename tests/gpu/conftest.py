# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: skipped, with the reason, where there is none that can be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from simulated_cluster import prepare_environment  # noqa: E402

prepare_environment()  # before anything starts CUDA

from topoep._library import BUILD_INFO  # noqa: E402


def missing(markers: set[str]) -> str:
    """Why tests with these markers cannot run here."""
    if not BUILD_INFO["cuda"]:
        return f"topoep was built without CUDA kernels: {BUILD_INFO['cuda_reason']}"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if "nccl" in markers and torch.cuda.device_count() < 2:
        return f"{torch.cuda.device_count()} GPU; two are needed"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            reason = missing({marker.name for marker in item.iter_markers()})
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_error_is_left_behind():
    yield
    torch.cuda.synchronize()
