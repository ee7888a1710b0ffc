# SPDX-License-Identifier: Apache-2.0
"""nvcc compiles every kernel for every architecture without a warning, and none spills."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import kernel_resources  # noqa: E402
from toolchain import find_nccl  # noqa: E402

CUDA_HOME = kernel_resources.find_cuda_home()
pytestmark = pytest.mark.skipif(
    CUDA_HOME is None,
    reason="no nvcc: the kernels were executed on the CPU, but not compiled for a GPU. "
    "Install the CUDA toolkit, or `pip install .[nvcc]`",
)


@pytest.fixture(scope="module")
def resources():
    return kernel_resources.measure(CUDA_HOME)


def test_every_kernel_is_compiled_for_every_architecture(resources):
    kernels = {row.kernel for row in resources}
    assert {(row.kernel, row.arch) for row in resources} == {
        (kernel, arch) for kernel in kernels for arch in kernel_resources.ARCHS
    }
    stages = {kernel.split("_kernel")[0] for kernel in kernels}
    expected = {"histogram", "solve", "split", "planner_slots", "reroute", "expand", "combine",
                "combine_grad_rows", "combine_grad_weights", "pack", "reduce_grads",
                "exchange_counts", "replicate", "reduce_grads_across"}  # fmt: skip
    assert stages == expected


def test_no_kernel_spills_or_needs_a_stack(resources):
    assert [row for row in resources if row.spill_bytes or row.stack_bytes] == []


@pytest.mark.skipif(find_nccl() is None, reason="no NCCL headers; set TOPOEP_NCCL_HOME")
def test_the_data_plane_over_nccl_compiles_without_spills():
    source = kernel_resources.CSRC / "comm" / "nccl_data_plane.cu"
    text = kernel_resources.compile_file(CUDA_HOME, source, (find_nccl()[0],))
    resources = kernel_resources.parse(text)
    assert len(resources) == len(kernel_resources.ARCHS) * 6
    # NCCL's own code keeps 8 bytes on the stack for sm_80.
    assert [row for row in resources if row.spill_bytes or row.stack_bytes > 8] == []


def test_the_kept_report_is_current(resources):
    """A change of registers is not an error, but it must be seen: run the script with --write."""
    text = kernel_resources.table(CUDA_HOME, resources)
    kept = kernel_resources.KEPT.read_text()
    if text.splitlines()[0] != kept.splitlines()[0]:
        pytest.skip(f"the report was kept with another compiler: {kept.splitlines()[0]}")
    assert text == kept
