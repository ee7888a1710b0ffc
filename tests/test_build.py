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

from tests.comm.fake import compile_fake  # noqa: E402


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
def test_the_library_with_kernels_loads_into_this_torch(tmp_path):
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
    if nccl == "1":
        check_nccl_ops(library, compile_fake(tmp_path))


def check_nccl_ops(library: Path, fake: Path) -> None:
    """The ops that make a communicator, without an NCCL in the process and with a fake one."""
    code = f"""
import ctypes, torch
torch.ops.load_library({str(library)!r})
ops = torch.ops.topoep
identity = torch.zeros(128, dtype=torch.uint8)
for call in (lambda: ops.nccl_unique_id_(identity), lambda: ops.nccl_comm_create(identity, 8, 5),
             lambda: ops.nccl_comm_adopt(1)):
    try:
        call()
        raise AssertionError("no error")
    except RuntimeError as error:
        assert "no libnccl.so.2 is loaded" in str(error), error
numbers = [8, 2, 4, 32, 2, 5, 1, 1, 262144, 65536, 8, 8, 2, 32, 16384]
window, state, error, signals, lists = ops.plane_sizes(numbers)
assert window > 2 * 2 * 8 * 262144 and error == 48 and signals > 2 * 2 * 2 * 8, signals
for place, bad in ((2, 3), (3, 33), (4, 17), (5, 8), (8, 100), (10, 0), (13, 33)):
    try:
        ops.plane_sizes([bad if i == place else n for i, n in enumerate(numbers)])
        raise AssertionError(f"number {{place}} = {{bad}} was taken")
    except RuntimeError:
        pass
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    code = f"""
import ctypes, torch
ctypes.CDLL({str(fake)!r}, ctypes.RTLD_GLOBAL)
torch.ops.load_library({str(library)!r})
ops = torch.ops.topoep
compiled, loaded, problem = ops.nccl_status(True)
assert compiled == loaded and problem == "", (compiled, loaded, problem)
identity = torch.zeros(128, dtype=torch.uint8)
ops.nccl_unique_id_(identity)
assert identity.tolist() == [7] * 128
comm = ops.nccl_comm_create(identity, 8, 5)
in_order, strided = list(range(8)), [0, 2, 4, 6, 1, 3, 5, 7]
assert ops.nccl_comm_problem(comm, in_order, 4, 5) == ""
assert ops.nccl_comm_problem(comm, strided, 4, 3) == ""
assert "numbers rank 5 of the group 5" in ops.nccl_comm_problem(comm, strided, 4, 5)
assert "node of rank 5 has 8 ranks" in ops.nccl_comm_problem(comm, in_order, 8, 5)
assert ops.nccl_comm_device(comm, 66, 4) == 2
ops.nccl_comm_check(comm)
ops.nccl_comm_close(comm, False)
ops.nccl_comm_close(comm, False)
try:
    ops.nccl_comm_check(comm)
    raise AssertionError("no error")
except RuntimeError as error:
    assert "was closed or never made" in str(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
