# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has the memory for what is about to be made."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMITS = (  # of control groups, version 2 and 1; "max" where there is none
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def available_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not say (not Linux)."""
    limits = []
    for path in _GROUP_LIMITS:
        text = _read(path).strip()
        if text.isdigit():
            limits.append(int(text))
    for line in _read(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=None)


def check_memory(needed: int, what: str, cure: str) -> None:
    """Raises ValueError if there is less memory than needed.

    Args:
        needed: bytes.
        what: takes them.
        cure: what to change.
    """
    available = available_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"{what} would take {needed / 1e9:.3g} GB of memory; this machine has "
            f"{available / 1e9:.3g} GB to give: {cure}"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
