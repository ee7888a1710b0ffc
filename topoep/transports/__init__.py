# SPDX-License-Identifier: Apache-2.0
"""How counts, weights and gradients move between ranks."""

from __future__ import annotations

import logging

import torch.distributed as dist

from topoep.checks import check_choice, check_int, check_type
from topoep.topology import Topology
from topoep.transports.base import Pending, Transport
from topoep.transports.c10d import C10dTransport
from topoep.transports.local import LocalTransport
from topoep.transports.nccl import NcclConnector, NcclTransport
from topoep.transports.plane import DEFAULT_COMM_SMS, PlaneSettings

__all__ = [
    "C10dTransport",
    "LocalTransport",
    "NcclTransport",
    "Pending",
    "Transport",
    "make_transport",
]

TRANSPORTS = ("auto", "nccl", "c10d", "local")
_logger = logging.getLogger("topoep")


def make_transport(
    name: str,
    topology: Topology,
    group: dist.ProcessGroup | None,
    comm_sms: int = DEFAULT_COMM_SMS,
    connector: NcclConnector | None = None,
) -> Transport:
    """The transport of this name for this group; ``auto`` takes the best that can be used.

    With a group, ``nccl`` and ``auto`` talk over it: one rank that cannot use ``nccl`` is reason
    enough for all of them. What ``auto`` takes instead, and why, is one line of the log.

    Raises:
        ValueError: unknown name, a group where there must be none, or the other way round, ranks
            that ask for different transports, or a setting out of range.
        RuntimeError: ``nccl`` was asked for and cannot be used; says why and on which rank.
    """
    settings: PlaneSettings | None = None
    error: Exception | None = None
    try:
        settings = _check_arguments(name, topology, group, comm_sms)
        fallback = LocalTransport(topology) if group is None else C10dTransport(topology, group)
    except (TypeError, ValueError) as problem:
        error = problem
    if group is not None and dist.get_rank(group) >= 0:
        _agree(name, error, group)
    if error is not None:
        raise error
    assert settings is not None
    if isinstance(fallback, LocalTransport) or group is None:
        if name == "auto":
            _logger.info("transport 'auto' takes 'local': there is no group")
        return fallback
    if name == "c10d":
        fallback.announce()
        return fallback
    return _best(name, topology, group, settings, connector or NcclConnector(), fallback)


def _check_arguments(
    name: str, topology: Topology, group: dist.ProcessGroup | None, comm_sms: int
) -> PlaneSettings:
    check_choice(name, "transport", TRANSPORTS)
    if name == "local" and group is not None:
        raise ValueError(
            "transport='local' simulates all ranks in this process and takes no group; use "
            "transport='c10d' for a process group"
        )
    if group is None and name in ("nccl", "c10d"):
        raise ValueError(
            f"transport={name!r} needs group=, the process group of the expert-parallel ranks "
            "(torch.distributed.group.WORLD for all of them); without a group use "
            "transport='local', which simulates all ranks in this process"
        )
    num_nodes = check_type(topology, Topology, "topology").num_nodes
    settings = PlaneSettings.from_environment(check_int(comm_sms, "comm_sms"))
    if group is not None:
        settings.roles(num_nodes)  # raises if they do not fit
    return settings


def _best(
    name: str,
    topology: Topology,
    group: dist.ProcessGroup,
    settings: PlaneSettings,
    connector: NcclConnector,
    fallback: C10dTransport,
) -> Transport:
    """Transport ``nccl`` if all ranks can use it, else the fallback or an error."""
    # Once for what each rank knows by itself, and again after connecting.
    problem = _gather(connector.problem(topology, fallback), group)
    if not problem:
        plane, problem = connector.connect(topology, group)
        problem = _gather(problem, group)
        if plane is not None and not problem:
            _logger.info("transport %r takes 'nccl'", name)
            return NcclTransport(topology, group, plane, settings)
        if plane is not None:
            plane.close(abort=True)
    if name == "nccl":
        raise RuntimeError(f"transport='nccl' cannot be used: {problem}")
    if fallback.held == (0,):
        _logger.log(
            logging.WARNING if fallback.moves_cuda else logging.INFO,
            "transport 'auto' takes 'c10d' (%s) and not 'nccl': %s",
            fallback.backend,
            problem,
        )
    fallback.announce()
    return fallback


def _agree(name: str, error: Exception | None, group: dist.ProcessGroup) -> None:
    """Tells every rank what is wrong on another, so that nobody waits for it. Collective.

    Raises:
        ValueError: another rank has bad arguments, or asks for another transport.
    """
    answers = [("", "")] * dist.get_world_size(group)
    dist.all_gather_object(answers, (str(name), "" if error is None else str(error)), group)
    if error is not None:
        return  # this rank raises its own
    for rank, (other, bad) in enumerate(answers):
        if bad:
            raise ValueError(f"{bad} (on rank {rank} of the group)")
        if other != answers[0][0]:
            raise ValueError(
                f"ranks 0 and {rank} of the group ask for transport={answers[0][0]!r} and "
                f"{other!r}; give every rank the same"
            )


def _gather(problem: str, group: dist.ProcessGroup) -> str:
    """The first rank's problem of all ranks' problems. Collective."""
    problems = [""] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group)
    if len(set(problems)) == 1:
        return problems[0]
    rank = next(rank for rank, text in enumerate(problems) if text)
    return f"rank {rank}: {problems[rank]}"
