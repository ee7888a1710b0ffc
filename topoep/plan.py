# SPDX-License-Identifier: Apache-2.0
"""The plan of one microbatch of one layer, and the pure function that makes it."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from topoep import ops
from topoep.checks import check_int, check_type
from topoep.objective import Balance, Objective, check_objective
from topoep.portfolio import Candidate, choose_candidates
from topoep.topology import Topology
from topoep.validate import MAX_TOKENS as MAX_TOKENS
from topoep.validate import PlanArrays, validate_plan

if TYPE_CHECKING:
    from topoep.replicas import Lease

MAX_EXPERTS = 4096  # kMaxExperts in csrc/core/limits.h
MAX_SPARE_SLOTS = 16  # kMaxSpareSlots

_next_token = itertools.count()


@dataclass(frozen=True)
class PlanConfig:
    """What two plans must share to be exchangeable."""

    topology: Topology
    num_experts: int
    spare_slots: int
    objective: Objective

    def __post_init__(self) -> None:
        ranks = check_type(self.topology, Topology, "topology").num_ranks
        for name in ("num_experts", "spare_slots"):  # a NumPy int8 would overflow in H + S
            object.__setattr__(self, name, check_int(getattr(self, name), name))
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ValueError(
                f"num_experts={self.num_experts}; expected 1 to {MAX_EXPERTS} (kMaxExperts)"
            )
        if self.num_experts % ranks:
            nearest = max(round(self.num_experts / ranks), 1) * ranks
            raise ValueError(
                f"num_experts={self.num_experts} does not divide over {ranks} ranks; every rank "
                f"is home to the same number of experts (nearest that works: {nearest})"
            )
        if not 0 <= self.spare_slots <= MAX_SPARE_SLOTS:
            raise ValueError(
                f"spare_slots={self.spare_slots}; expected 0 to {MAX_SPARE_SLOTS} (kMaxSpareSlots)"
            )

    def check_rank(self, rank: int) -> int:
        """The rank as a Python int; raises TypeError or ValueError for what is none."""
        number = check_int(rank, "rank")
        if not 0 <= number < self.num_ranks:
            raise ValueError(f"rank {rank}; expected 0 to {self.num_ranks - 1}")
        return number

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.topology.num_ranks

    @property
    def experts_per_rank(self) -> int:
        """H, home experts per rank."""
        return self.num_experts // self.num_ranks

    @property
    def slots_per_rank(self) -> int:
        """H + S, local physical experts."""
        return self.experts_per_rank + self.spare_slots

    @property
    def num_physical_experts(self) -> int:
        """P = R * (H + S)."""
        return self.num_ranks * self.slots_per_rank


@dataclass(frozen=True)
class HostPlan:
    """A copy of the plan in host memory, for transports that need their lists there."""

    slot_expert: npt.NDArray[np.int32]  # [R, S]
    slot_source: npt.NDArray[np.int32]  # [R, S]
    send: npt.NDArray[np.int32]  # [P], no elements for a plan without a rank
    recv: npt.NDArray[np.int32]  # [R, H + S], likewise


@dataclass
class Replication:
    """The replicate calls of one plan up to their release."""

    leases: list[weakref.ref[Lease]] = field(default_factory=list)
    released: bool = False

    def alive(self) -> list[Lease]:
        """The leases that somebody still has."""
        return [lease for ref in self.leases if (lease := ref()) is not None]


@dataclass
class PlanUsage:
    """What has been done with a plan; the only thing about it that changes."""

    backward_done: bool = False
    forward: Replication = field(default_factory=Replication)
    recomputed: Replication = field(default_factory=Replication)
    replications: int = 0  # of forward passes

    def current(self, recompute: bool) -> Replication:
        """What replicate adds to, and release ends: a released one makes way for a new one."""
        name = "recomputed" if recompute else "forward"
        found: Replication = getattr(self, name)
        if found.released:
            found = Replication()
            setattr(self, name, found)
        if not found.leases and not recompute:
            self.replications += 1
        return found


@dataclass(frozen=True, eq=False)
class Plan:
    """Copies for one microbatch of one layer, and who serves which tokens.

    Frozen, owned by the caller, and valid as long as the caller keeps it: nothing else holds state
    for it. All tensors are on the device of the counts and have shapes that depend on the
    configuration only.
    """

    #: Topology, E, S and objective.
    config: PlanConfig
    #: int32 ``[R, E]``: tokens that source rank r routes to expert e.
    counts: Tensor
    #: int32 ``[R, S]``: the expert in each spare slot, -1 if empty; ascending per rank.
    slot_expert: Tensor
    #: int32 ``[R, S]``: the rank to fetch the copy from (the home rank, or the first holder in the
    #: same node when the home is elsewhere), -1 if empty.
    slot_source: Tensor
    #: int32 ``[R, S]``: tokens that the copy serves.
    slot_tokens: Tensor
    #: int32 ``[E + 1]`` and ``[R * S]``: the copies of expert e are the physical experts
    #: ``copy_slots[copy_offsets[e]:copy_offsets[e + 1]]``.
    copy_offsets: Tensor
    copy_slots: Tensor
    #: The rank whose row and column follow; None for a plan of :func:`solve` without a rank.
    rank: int | None
    #: int32 ``[P]``: tokens that ``rank`` sends to each physical expert.
    send: Tensor | None
    #: int32 ``[R, H + S]``: tokens that ``rank`` receives from each rank for each of its slots.
    recv: Tensor | None
    #: 0-d int32: ids of this rank that were neither padding nor an expert.
    num_invalid: Tensor
    _stats: Tensor
    # Plans that differ only in rank share a token; it tells two plans apart without comparing them.
    token: int = field(default_factory=lambda: next(_next_token))
    # The Balancer that made the plan, None for a plan of solve().
    owner: object | None = field(default=None, repr=False)
    # Local routed ids of a Balancer's plan, by which a recomputation finds it again.
    topk_ids: tuple[Tensor, ...] = field(default=(), repr=False)
    usage: PlanUsage = field(default_factory=PlanUsage, repr=False)
    #: int32: what transport ``nccl`` needs of the plan to move data from and to this process's rank
    #: (csrc/core/stream_lists.h); None with other transports, and for a plan of :func:`solve`.
    lists: Tensor | None = field(default=None, repr=False)

    @functools.cached_property
    def _split(self) -> Tensor:
        return ops.split(
            self.counts,
            self.config.topology.table(self.counts.device),
            self.slot_expert,
            self.slot_tokens,
        )

    def split(self) -> Tensor:
        """int32 ``[R, P]``: tokens that source rank r sends to physical expert p.

        Each rank's tokens of an expert go to a holder on the rank itself first, then to holders in
        its node, then to the rest.
        """
        return self._split.clone()

    def for_rank(self, rank: int) -> Plan:
        """The same plan with the row and column of another rank."""
        rank = self.config.check_rank(rank)
        width = self.config.slots_per_rank
        send = self._split[rank]
        recv = self._split[:, rank * width : (rank + 1) * width].contiguous()
        return replace(self, rank=rank, send=send, recv=recv)

    @functools.cached_property
    def host(self) -> HostPlan:
        """The plan in host memory. On a GPU this waits for the plan (one copy)."""
        none = self.counts.new_empty(0)
        parts = [
            self.slot_expert,
            self.slot_source,
            none if self.send is None else self.send,
            none if self.recv is None else self.recv,
        ]
        flat = torch.cat([part.flatten() for part in parts]).cpu().numpy()
        ends = np.cumsum([part.numel() for part in parts])[:-1]
        arrays = zip(np.split(flat, ends), parts, strict=True)
        return HostPlan(*(array.reshape(tuple(part.shape)) for array, part in arrays))

    def stats(self) -> dict[str, Tensor]:
        """What the plan does, as 0-d tensors on the plan's device (nothing waits for the device).

        ``tokens``, ``max_load_before``, ``max_load``, ``imbalance_before``, ``imbalance`` (max load
        over mean load; 1.0 is perfect), ``copies``, ``in_node_copies``, ``cross_node_copies``
        (distinct (expert, remote node); a second copy in that node is fanned out from the first and
        counts as in-node), ``weighted_copies``, ``cross_node_tokens_before``,
        ``cross_node_tokens``, ``invalid`` (ids of this rank out of range), ``candidate`` (index of
        the winner), ``cap``, ``steps`` (dependent steps of the winner), ``predicted_ns_before`` and
        ``predicted_ns`` (objective ``Time`` only, otherwise 0). With objective ``Balance`` also
        ``tolerance_met``: whether ``max_load`` is within its tolerance (bool).
        """
        named = dict(zip(ops.STAT_NAMES, self._stats.unbind(), strict=True))
        mean = named["tokens"].double().clamp(min=1) / self.config.num_ranks
        empty = named["tokens"] == 0
        for key in ("", "_before"):
            ratio = named[f"max_load{key}"].double() / mean
            named[f"imbalance{key}"] = torch.where(empty, torch.ones_like(ratio), ratio)
        named["in_node_copies"] = named["copies"] - named["cross_node_copies"]
        named["weighted_copies"] = (
            named["in_node_copies"]
            + self.config.objective.cross_weight * named["cross_node_copies"]
        )
        named["invalid"] = self.num_invalid
        if isinstance(self.config.objective, Balance):
            limit = self.config.objective.largest_load(named["tokens"], self.config.num_ranks)
            named["tolerance_met"] = named["max_load"] <= limit
        return named

    def validate(self) -> None:
        """Checks every rule of a plan on the host; a debugging aid, it waits for the device.

        Among them that the counts, which are the caller's tensor, still give the numbers of tokens
        that the solve found.

        Raises:
            ValueError: names the broken rule and the first place that breaks it.
        """
        arrays = PlanArrays(
            node_of_rank=self.config.topology.node_of_rank,
            counts=self.counts.cpu().numpy(),
            slot_expert=self.slot_expert.cpu().numpy(),
            slot_source=self.slot_source.cpu().numpy(),
            slot_tokens=self.slot_tokens.cpu().numpy(),
            split=lambda: self._split.cpu().numpy(),
            copy_offsets=self.copy_offsets.cpu().numpy(),
            copy_slots=self.copy_slots.cpu().numpy(),
            rank=self.rank,
            send=None if self.send is None else self.send.cpu().numpy(),
            recv=None if self.recv is None else self.recv.cpu().numpy(),
            stats=dict(zip(ops.STAT_NAMES, self._stats.tolist(), strict=True)),
        )
        validate_plan(arrays)


def make_plan(
    config: PlanConfig,
    counts: Tensor,
    candidates: Sequence[Candidate],
    rank: int | None,
    num_invalid: Tensor | None = None,
    owner: object | None = None,
    topk_ids: tuple[Tensor, ...] = (),
    solve_counts: Callable[..., tuple[Tensor, ...]] = ops.solve,
) -> Plan:
    """Solves for counts that have been checked, as a transport does if one is to; see `solve`."""
    tensors = solve_counts(
        counts,
        config.topology.table(counts.device),
        config.spare_slots,
        [candidate.pack() for candidate in candidates],
        config.objective.to_ints(),
        -1 if rank is None else rank,
    )
    slot_expert, slot_source, slot_tokens, copy_offsets, copy_slots, send, recv, stats = tensors[:8]
    if num_invalid is None:
        num_invalid = torch.zeros((), dtype=torch.int32, device=counts.device)
    return Plan(
        config,
        counts,
        slot_expert,
        slot_source,
        slot_tokens,
        copy_offsets,
        copy_slots,
        rank=rank,
        send=None if rank is None else send,
        recv=None if rank is None else recv,
        num_invalid=num_invalid,
        _stats=stats,
        owner=owner,
        topk_ids=topk_ids,
        lists=tensors[8] if len(tensors) > 8 else None,
    )


def check_counts(counts: Tensor, config: PlanConfig) -> None:
    """Raises TypeError or ValueError unless counts are int32 [R, E] without negative entries.

    The values are looked at on the CPU only; on a GPU that would mean waiting for it.
    """
    check_type(counts, Tensor, "counts")
    if counts.dtype != torch.int32:
        raise TypeError(f"counts has dtype {counts.dtype}; expected int32 (counts.to(torch.int32))")
    expected = (config.num_ranks, config.num_experts)
    if tuple(counts.shape) != expected:
        raise ValueError(f"counts has shape {tuple(counts.shape)}; expected [R, E] = {expected}")
    if counts.device.type != "cpu":
        return
    if counts.numel() and int(counts.min()) < 0:
        where = [int(i) for i in torch.nonzero(counts < 0)[0]]
        raise ValueError(
            f"counts{where} is {int(counts[tuple(where)])}; token counts must not be negative"
        )
    if int(counts.sum()) > MAX_TOKENS:
        raise ValueError(
            f"counts sum to {int(counts.sum())} tokens; one plan covers at most {MAX_TOKENS} "
            "(kMaxTokens): plan a smaller microbatch"
        )


def solve(
    counts: Tensor,
    topology: Topology,
    spare_slots: int = 2,
    objective: Objective | None = None,
    *,
    rank: int | None = None,
    solver: str = "portfolio",
    candidates: Sequence[Candidate] | None = None,
) -> Plan:
    """Makes the plan for given counts: a pure function, without communication.

    The same integers give the same plan bit for bit on every rank, on the CPU and on every GPU.

    Args:
        counts: int32 ``[R, E]`` on the CPU or a GPU: tokens that source rank r routes to expert e.
            Expert e lives on rank ``e // (E / R)``. The plan keeps them without a copy: do not
            change them while it is in use (``plan.validate()`` looks for that).
        topology: R ranks and their nodes.
        spare_slots: S, copies that a rank can hold.
        objective: ``Balance(0.01)`` if None.
        rank: fill ``plan.send`` and ``plan.recv`` for this rank.
        solver: ``"portfolio"`` tries many candidates; ``"taot"`` matches surplus and room by
            entropy-regularised optimal transport in fixed point (docs/algorithm.md).
        candidates: what to try instead of the default list; an empty plan is put before them.

    Raises:
        TypeError: counts is not an int32 tensor.
        ValueError: counts does not fit the topology or holds a negative number, E does not divide
            over R, or a limit is exceeded (the message names it).
    """
    objective = check_objective(objective)
    check_type(counts, Tensor, "counts")
    if counts.dim() != 2:
        raise ValueError(f"counts has shape {tuple(counts.shape)}; expected [R, E]")
    config = PlanConfig(topology, counts.shape[1], spare_slots, objective)
    check_counts(counts, config)
    if rank is not None:
        rank = config.check_rank(rank)
    chosen = choose_candidates(objective, solver, candidates, topology.num_nodes)
    return make_plan(config, counts, chosen, rank)
