# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled library of ops and tells what it was built with."""

from __future__ import annotations

import json
from pathlib import Path

import torch  # first: it brings the one libcudart and libnccl of this process


def _load() -> dict[str, str]:
    found = sorted(Path(__file__).parent.glob("_ops*.so"))
    if not found:
        raise ImportError(
            "topoep's compiled ops are missing. Build them with "
            "`pip install --no-build-isolation -e .` in a checkout, or reinstall the package; "
            "do not import the source folder of a checkout that was installed without -e."
        )
    torch.ops.load_library(str(found[0]))
    info: dict[str, str] = json.loads(torch.ops.topoep.build_info())
    return info


#: What the library was built with: torch, cuda, cuda_reason, cuda_arch, nccl, nccl_reason.
BUILD_INFO = _load()
