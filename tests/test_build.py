# SPDX-License-Identifier: Apache-2.0
"""setup.py builds what it is told to, and ends with the reason when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from toolchain import find_cuda_home, find_nccl  # noqa: E402


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs build_ext with only these of the build's own variables."""
    ours = (
        "TOPOEP_CUDA",
        "TOPOEP_NCCL",
        "TOPOEP_CUDA_ARCH",
        "CUDA_HOME",
        "CUDA_PATH",
        "MAX_JOBS",
        "TOPOEP_WERROR",
    )
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    return subprocess.run(
        command, cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"TOPOEP_CUDA": "yes"}, "TOPOEP_CUDA='yes': expected auto, 0 or 1"),
        ({"TOPOEP_CUDA": "0", "MAX_JOBS": "0"}, "MAX_JOBS='0': expected a positive number"),
        ({"TOPOEP_CUDA": "0", "TOPOEP_WERROR": "on"}, "TOPOEP_WERROR='on': expected auto, 0 or 1"),
        ({"TOPOEP_CUDA": "1", "CUDA_HOME": "/nowhere"}, "TOPOEP_CUDA=1, but the kernels cannot be"
         " built: no bin/nvcc with include/cuda_runtime.h found (CUDA_HOME=/nowhere)"),
        ({"TOPOEP_CUDA": "0", "TOPOEP_NCCL": "1"}, "TOPOEP_NCCL=1, but NCCL support cannot be"
         " built: it needs the CUDA kernels, which are left out"),
    ],
)  # fmt: skip
def test_a_forced_build_that_cannot_be_done_ends_with_the_reason(tmp_path, environment, reason):
    result = build(tmp_path, **environment)
    assert result.returncode != 0
    assert reason in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(find_cuda_home() is None, reason="no nvcc: nothing to give a bad SM version to")
def test_an_unknown_sm_version_is_refused(tmp_path):
    result = build(tmp_path, TOPOEP_CUDA="1", TOPOEP_CUDA_ARCH="12")
    assert result.returncode != 0
    assert "TOPOEP_CUDA_ARCH='12': nvcc" in result.stderr


@pytest.mark.skipif(find_cuda_home() is None, reason="no nvcc: the kernels cannot be linked")
def test_the_library_with_kernels_loads_into_this_torch():
    """One SM version is enough here: the compile gate covers the others."""
    folder = ROOT / "build" / "test_build"  # kept, so that ninja compiles only what has changed
    nccl = "1" if find_nccl() else "auto"
    result = build(folder, TOPOEP_CUDA="1", TOPOEP_NCCL=nccl, TOPOEP_CUDA_ARCH="90")
    assert result.returncode == 0, result.stdout + result.stderr
    (library,) = (folder / "lib" / "topoep").glob("_ops*.so")
    code = f"""
import json, torch
torch.ops.load_library({str(library)!r})
info = json.loads(torch.ops.topoep.build_info())
assert info["cuda"] and info["cuda_arch"] == "90", info
counts, invalid = torch.ops.topoep.histogram(torch.tensor([[0, 2], [2, 9]]), 3)
assert counts.tolist() == [1, 0, 2] and invalid == 1
for name in torch._C._dispatch_get_all_op_names():
    administrative = ("topoep::build_info", "topoep::nccl_", "topoep::plane_")
    if name.startswith("topoep::") and not name.startswith(administrative):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), name
"""
    subprocess.run([sys.executable, "-c", code], check=True)
