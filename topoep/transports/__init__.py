# SPDX-License-Identifier: Apache-2.0
"""How counts, weights and gradients move between ranks."""

from __future__ import annotations

import logging

import torch.distributed as dist

from topoep.topology import Topology
from topoep.transports.base import Transport
from topoep.transports.c10d import C10dTransport
from topoep.transports.local import LocalTransport

__all__ = ["C10dTransport", "LocalTransport", "Transport", "make_transport"]

TRANSPORTS = ("auto", "c10d", "local")
_logger = logging.getLogger("topoep")


def make_transport(name: str, topology: Topology, group: dist.ProcessGroup | None) -> Transport:
    """The transport of this name for this group; ``auto`` takes the best that can be used.

    Raises:
        ValueError: unknown name, or a group where there must be none, or the other way round.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"transport={name!r}; expected one of {', '.join(TRANSPORTS)}")
    if name == "auto":
        name = "local" if group is None else "c10d"
        _logger.info("transport 'auto' takes %r", name)
    if name == "local":
        if group is not None:
            raise ValueError(
                "transport='local' simulates all ranks in this process and takes no group; use "
                "transport='c10d' for a process group"
            )
        return LocalTransport(topology)
    if group is None:
        raise ValueError(
            "transport='c10d' needs group=, the process group of the expert-parallel ranks "
            "(torch.distributed.group.WORLD for all of them); without a group use "
            "transport='local', which simulates all ranks in this process"
        )
    return C10dTransport(topology, group)
