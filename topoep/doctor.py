# SPDX-License-Identifier: Apache-2.0
"""``python -m topoep doctor``: what was built, what the machine has, and what to do about it."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist

from topoep._library import BUILD_INFO
from topoep._version import __version__
from topoep.transports.nccl import local_problem


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    state: str  # what is the case
    remedy: str = ""  # what to do, if something is missing


def _nccl_version(code: int) -> str:
    """23007 -> 2.30.7."""
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def _find_kernels() -> Finding:
    if BUILD_INFO["cuda"]:
        archs = BUILD_INFO["cuda_arch"].replace(",", ", sm_")
        return Finding("CUDA kernels", f"built with CUDA {BUILD_INFO['cuda']} for sm_{archs}")
    return Finding(
        "CUDA kernels",
        f"not built: {BUILD_INFO['cuda_reason']}",
        "the CPU forms of all ops work; for kernels install a CUDA build of torch and the CUDA "
        "toolkit of the same major version, then reinstall topoep with TOPOEP_CUDA=1, which says "
        "what is missing",
    )


def _find_gpus() -> list[Finding]:
    if not torch.backends.cuda.is_built():
        return [
            Finding("GPUs", "none: this is a CPU build of torch", "install a CUDA build of torch")
        ]
    if not torch.cuda.is_available():
        return [Finding("GPUs", "none that torch can use", "check the driver with nvidia-smi")]
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        Finding(
            f"GPU {i}",
            f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, "
            f"{p.multi_processor_count} SMs",
        )
        for i, p in enumerate(names)
    ]


def _find_nccl() -> Finding:
    if not BUILD_INFO["nccl"]:
        return Finding(
            "NCCL",
            f"support not built: {BUILD_INFO['nccl_reason']}",
            "transport c10d works without; transport nccl needs it: see docs/nccl.md",
        )
    compiled, loaded, problem = torch.ops.topoep.nccl_status(True)
    state = f"compiled with {_nccl_version(compiled)}"
    state += f", loaded {_nccl_version(loaded)}" if loaded else ", none loaded"
    return Finding("NCCL", state, problem)


def _find_transports() -> list[Finding]:
    backends = [
        name
        for name, available in (
            ("gloo", dist.is_available() and dist.is_gloo_available()),
            ("nccl", dist.is_available() and dist.is_nccl_available()),
        )
        if available
    ]
    c10d = f"usable over {', '.join(backends)}" if backends else "not usable"
    in_node = local_problem(None)
    across = in_node or (torch.ops.topoep.nccl_status(True)[2])
    if in_node:
        nccl = Finding("transport nccl", f"not usable: {in_node}", "see docs/nccl.md")
    elif across:
        nccl = Finding("transport nccl", f"usable inside a node; between nodes not: {across}")
    else:
        nccl = Finding(
            "transport nccl",
            "usable as far as one process can see; windows and rails are checked at set-up",
        )
    if not backends:
        choice = "local"
    elif not in_node:
        choice = "nccl for a group with backend nccl, if every rank can; else c10d, with a line in "
        choice += "the log; local without a group"
    else:
        choice = f"c10d for a group and not nccl ({in_node}); local without a group"
    return [
        Finding("transport local", "usable: simulated ranks in one process"),
        Finding(
            "transport c10d",
            c10d,
            "" if backends else "this torch was built without torch.distributed",
        ),
        nccl,
        Finding("transport auto", f"takes {choice}"),
    ]


def examine() -> list[Finding]:
    """Everything the report says, in order."""
    built_with = BUILD_INFO["torch"]
    running = torch.__version__
    return [
        Finding("topoep", __version__),
        Finding("python", platform.python_version()),
        Finding(
            "torch",
            running
            if running == built_with
            else f"{running} (built with {built_with}; the "
            "library works with every torch from 2.11 on)",
        ),
        Finding("torch CUDA", torch.version.cuda or "none: a CPU build"),
        _find_kernels(),
        _find_nccl(),
        *_find_gpus(),
        *_find_transports(),
    ]


def report() -> str:
    """The report as text."""
    findings = examine()
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.what:<{width}}  {finding.state}")
        if finding.remedy:
            lines.append(f"{'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)
