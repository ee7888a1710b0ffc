# SPDX-License-Identifier: Apache-2.0
"""Compiles the fake NCCL and programs over csrc/comm, where the headers are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from toolchain import find_cuda_home, find_nccl  # noqa: E402

CUDA_HOME, NCCL = find_cuda_home(), find_nccl()
MISSING = (
    "no headers of CUDA and NCCL (TOPOEP_NCCL_HOME): the host side of transport nccl is neither "
    "compiled nor run"
)


def have_headers() -> bool:
    return CUDA_HOME is not None and NCCL is not None


def compile_cpp(output: Path, *arguments: str | Path) -> Path:
    """Compiles C++ with warnings as errors and the headers of CUDA, NCCL and this project."""
    command = ["c++", "-std=c++20", "-g", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    command += ["-isystem", str(NCCL[0]), "-isystem", str(CUDA_HOME / "include")]
    command += [str(argument) for argument in arguments]
    result = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return output


def compile_fake(folder: Path, *flags: str) -> Path:
    """A libnccl.so.2 in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]
    return compile_cpp(folder / "libnccl.so.2", *options, *flags, HERE / "fake_nccl.cpp")
