# SPDX-License-Identifier: Apache-2.0
"""Checks that the layers of csrc/ include only what they may.

core <- cpu, cuda <- comm <- bindings: an arrow points from what is included to what includes it.
torch is for bindings, NCCL for comm (and bindings), CUDA for cuda, comm and bindings.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"

# What each layer may include, besides the C++ standard library and POSIX.
ALLOWED = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "cuda": {"core", "cuda", "CUDA"},
    "comm": {"core", "cuda", "comm", "CUDA", "NCCL"},
    "bindings": {"core", "cpu", "cuda", "comm", "bindings", "CUDA", "NCCL", "torch", "build"},
}

KINDS = [
    (re.compile(r"(core|cpu|cuda|comm|bindings)/"), lambda match: match[1]),
    (re.compile(r"torch/|ATen/|c10/|pybind11/"), lambda match: "torch"),
    (re.compile(r"nccl"), lambda match: "NCCL"),
    (re.compile(r"cuda_|cooperative_groups"), lambda match: "CUDA"),
    (re.compile(r"build_info\.h"), lambda match: "build"),
    (re.compile(r"emulation\.h"), lambda match: "cuda"),  # what compat.cuh is on the CPU
]


def kind_of(header: str) -> str | None:
    """The layer or library a header belongs to; None for the standard library."""
    for pattern, name in KINDS:
        match = pattern.match(header)
        if match:
            return name(match)
    return None


def main() -> None:
    problems = []
    for path in sorted(CSRC.rglob("*")):
        if not path.is_file():
            continue
        layer = path.relative_to(CSRC).parts[0]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)', line)
            kind = kind_of(match[1]) if match else None
            if kind is not None and kind not in ALLOWED[layer]:
                problems.append(
                    f"{path.relative_to(CSRC)}:{number}: {layer} must not include {match[1]}"
                )
        if not path.read_text().startswith(("// SPDX-License-Identifier: Apache-2.0\n",)):
            problems.append(f"{path.relative_to(CSRC)}: the SPDX line is missing")
    if problems:
        sys.exit("\n".join(problems))
    print("layering: ok")


if __name__ == "__main__":
    main()
