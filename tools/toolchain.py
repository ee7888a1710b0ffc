# SPDX-License-Identifier: Apache-2.0
"""Finding the CUDA toolkit and NCCL's headers; shared by setup.py, the tests and the benchmarks."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

#: The first NCCL with versioned structs, peer pointers on the host, and team queries.
NCCL_MINIMUM = (2, 29, 2)


def _nvidia_wheel_folders() -> list[Path]:
    """site-packages/nvidia, where torch's CUDA wheels unpack themselves."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def find_cuda_home() -> Path | None:
    """The toolkit: a folder with both the compiler and the headers.

    CUDA_HOME if it is set, and then nothing else; otherwise the first of CUDA_PATH, the
    conventional place, the compiler's wheels, and the nvcc on the PATH, perhaps a wrapper script.
    """
    if os.environ.get("CUDA_HOME"):
        candidates = [Path(os.environ["CUDA_HOME"])]
    else:
        named = os.environ.get("CUDA_PATH")
        candidates = [Path(named)] if named else []
        candidates.append(Path("/usr/local/cuda"))
        candidates += [folder / "cu13" for folder in _nvidia_wheel_folders()]
        on_path = shutil.which("nvcc")
        if on_path:
            candidates.append(Path(on_path).resolve().parent.parent)
    for home in candidates:
        if os.access(home / "bin/nvcc", os.X_OK) and (home / "include/cuda_runtime.h").exists():
            return home
    return None


def nvcc_output(cuda_home: Path, flag: str) -> str:
    """What nvcc prints for one flag."""
    command = [str(cuda_home / "bin/nvcc"), flag]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def nvcc_version(cuda_home: Path) -> str:
    """Such as "13.0"."""
    match = re.search(r"release (\d+\.\d+)", nvcc_output(cuda_home, "--version"))
    if match is None:
        raise RuntimeError(f"{cuda_home}/bin/nvcc --version does not name a release")
    return match.group(1)


def nvcc_archs(cuda_home: Path) -> list[str]:
    """SM versions that nvcc can compile for, such as "90"."""
    return re.findall(r"compute_(\d+)", nvcc_output(cuda_home, "--list-gpu-arch"))


def find_nccl() -> tuple[Path, str] | None:
    """(include folder, version) of an NCCL with its device API at NCCL_MINIMUM or newer."""
    named = os.environ.get("TOPOEP_NCCL_HOME")
    candidates = [Path(named)] if named else []
    candidates += [folder / "nccl" for folder in _nvidia_wheel_folders()]
    candidates.append(Path("/usr"))
    for home in candidates:
        include = home / "include"
        if (include / "nccl.h").exists() and (include / "nccl_device.h").exists():
            text = (include / "nccl.h").read_text()
            parts = dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
            version = tuple(int(parts[name]) for name in ("MAJOR", "MINOR", "PATCH"))
            if version >= NCCL_MINIMUM:
                return include, ".".join(map(str, version))
    return None
