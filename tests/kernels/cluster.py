# SPDX-License-Identifier: Apache-2.0
"""Runs the data plane on a simulated cluster and compares it with what a plan means.

`run` plays some microbatches on all ranks: exchange of counts, weights to the copies, "experts"
that write gradients, gradients home, and an optimizer step. The expected bytes and sums come from
the plan's tables alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.emulation.harness import Emulator, LaunchError, Report, aligned_array
from tests.kernels.plans import PlanTables
from topoep import Topology

UNIT = Path(__file__).with_name("data_plane_unit.cpp")

# The fields of Settings and Memory in data_plane_unit.cpp.
SETTINGS = (
    "num_nodes ranks_per_node spare_slots experts_per_rank num_tensors workers senders pullers "
    "ring_slots staging_slots chunk_bytes tile_bytes slot_type home_type microbatches threads "
    "exchange optimizer dropped_signal doubled_signal doubled_late slow_rank delay seed timeout "
    "alternate backward bulk_piece_bytes"
).split()
MEMORY = (
    "table row_bytes elements slot_expert copy_offsets copy_slots rows counts lists windows "
    "signals states errors sent_bytes sent_signals home spare slot_grads home_grads grads "
    "seen_spare seen_slots seen_home seen_counts"
).split()

# Waited in core/data_plane.h.
WAITED = (
    "nothing counts counts_signal credit data arrived done grads_ready grads_read impossible_signal"
).split()
ERROR_WORDS = 12  # of 32 bits in ErrorRecord

# A limit that no run without a fault comes near to, in polls of one thread, and one that ends runs
# with a fault soon.
LONG = 1_000_000
SHORT = 5_000


@dataclass(frozen=True)
class Cluster:
    """Sizes, types and faults of one run; the defaults are small, odd, and use every feature."""

    topology: Topology
    spare_slots: int = 2
    experts_per_rank: int = 2
    # Whole vectors, rows that are not aligned, a single byte: as weights with FP8 scales are.
    row_bytes: tuple[int, ...] = (400, 20, 1, 192)
    elements: tuple[int, ...] = (104, 13, 40)
    workers: int = 2
    senders: int = 1
    pullers: int = 2
    ring_slots: int = 2
    staging_slots: int = 2
    chunk_bytes: int = 128
    tile_bytes: int = 128
    bfloat16_slots: bool = False
    bfloat16_home: bool = False
    threads: int = 32
    exchange: bool = True
    optimizer: bool = True
    dropped_signal: int = -1
    doubled_signal: int = -1
    doubled_late: int = 0
    slow_rank: int = -1
    dead_rank: int = -1
    delay: int = 60
    timeout: int = LONG
    alternate: bool = False  # every second microbatch has only the first tensors
    bulk_piece_bytes: int = 0  # pullers copy by the bulk-copy engine
    backward: bool = True  # False: weights go to the copies, and that is all; no optimizer

    def num_tensors(self, microbatch: int) -> int:
        """How many tensors (row_bytes, elements) a microbatch has."""
        tensors = max(len(self.row_bytes), len(self.elements))
        return (tensors + 1) // 2 if self.alternate and microbatch % 2 else tensors


@dataclass(frozen=True)
class Failure:
    """An error record."""

    rank: int
    waited: str
    source: int
    what: int
    wanted: int
    seen: int


@dataclass
class Outcome:
    """What a run left behind, and what is wrong with it."""

    reports: list[Report]
    failures: list[Failure]
    sent_bytes: np.ndarray  # [R] over the network, by sending rank
    sent_signals: int
    wrong: list[str] = field(default_factory=list)  # committed data that differs
    missing: int = 0  # results that were never written, in runs with a failure


@functools.cache
def emulator(instrumented: bool = True) -> Emulator:
    return Emulator([UNIT], instrumented=instrumented)


def to_float(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _random_floats(rng: np.random.Generator, shape: tuple[int, ...], narrow: bool) -> np.ndarray:
    """Values of very different size, so that every order of a sum has its own bits."""
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)
    return to_bfloat16(values) if narrow else values


def _aligned(values: np.ndarray) -> np.ndarray:
    copy = aligned_array(values.size, values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def _pointers(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([a.ctypes.data for a in arrays], np.int64)


def run(
    cluster: Cluster,
    plans: Sequence[PlanTables],
    seed: int,
    *,
    order: str = "random",
    preempt: int = 0,
    unit: Emulator | None = None,
) -> Outcome:
    """Plays one microbatch per plan under one schedule."""
    unit = unit or emulator()
    c = cluster
    topology = c.topology
    ranks, batches = topology.num_ranks, len(plans)
    home_slots, spare = c.experts_per_rank, c.spare_slots
    experts = ranks * home_slots
    tensors = max(len(c.row_bytes), len(c.elements))
    row_bytes = np.array([*c.row_bytes, *[0] * (tensors - len(c.row_bytes))], np.int64)
    elements = np.array([*c.elements, *[0] * (tensors - len(c.elements))], np.int64)
    rng = np.random.default_rng(seed)

    settings = {name: getattr(c, name) for name in SETTINGS if hasattr(c, name)}
    settings |= {
        "num_nodes": topology.num_nodes,
        "ranks_per_node": ranks // topology.num_nodes,
        "num_tensors": tensors,
        "slot_type": 3 if c.bfloat16_slots else 0,  # DType
        "home_type": 3 if c.bfloat16_home else 0,
        "microbatches": batches,
        "seed": seed,
    }
    packed_settings = np.array([int(settings[name]) for name in SETTINGS], np.int64)
    sizes = np.zeros(4, np.int64)
    unit.library.cluster_sizes(
        ctypes.c_void_p(packed_settings.ctypes.data), ctypes.c_void_p(sizes.ctypes.data)
    )

    def bytes_of(*shape: int) -> np.ndarray:
        return _aligned(np.zeros(shape, np.uint8))

    slot_dtype = np.uint16 if c.bfloat16_slots else np.float32
    home_dtype = np.uint16 if c.bfloat16_home else np.float32
    flat = {
        "table": topology.table().numpy(),
        "row_bytes": row_bytes,
        "elements": elements,
        "slot_expert": np.stack([p.slot_expert for p in plans]),
        "copy_offsets": np.stack([p.copy_offsets for p in plans]),
        "copy_slots": np.stack([p.copy_slots for p in plans]),
        "rows": rng.integers(0, 1000, (batches, ranks, experts), dtype=np.int32),
        "counts": np.zeros((ranks, ranks, experts), np.int32),
        "lists": np.zeros((ranks, sizes[3]), np.int32),
        "windows": bytes_of(ranks, int(sizes[0])),
        "signals": np.zeros((ranks, max(1, sizes[1])), np.uint64),
        "states": bytes_of(ranks, int(sizes[2])),
        "errors": np.zeros((ranks, ERROR_WORDS), np.uint32),
        "sent_bytes": np.zeros(ranks, np.uint64),
        "sent_signals": np.zeros(1, np.uint64),
        "seen_counts": np.zeros((batches, ranks, ranks, experts), np.int32),
    }
    per_tensor: dict[str, list[np.ndarray]] = {
        "home": [_aligned(rng.integers(0, 256, (ranks, home_slots, b), dtype=np.uint8))
                 for b in row_bytes],
        "spare": [bytes_of(ranks, spare, b) for b in row_bytes],
        "slot_grads": [_aligned(np.zeros((ranks, spare, n), slot_dtype)) for n in elements],
        "home_grads": [_aligned(_random_floats(rng, (ranks, home_slots, n), c.bfloat16_home))
                       for n in elements],
        "grads": [_aligned(_random_floats(rng, (batches, ranks, spare, n), c.bfloat16_slots))
                  for n in elements],
        "seen_spare": [bytes_of(batches, ranks, spare, b) for b in row_bytes],
        "seen_slots": [_aligned(np.ones((batches, ranks, spare, n), slot_dtype))
                       for n in elements],
        "seen_home": [_aligned(np.zeros((batches, ranks, home_slots, n), home_dtype))
                      for n in elements],
    }  # fmt: skip
    if c.dead_rank >= 0:
        flat["states"][c.dead_rank, 0] = 1  # StateHeader::failed: its kernels leave at once
    first_home = [a.copy() for a in per_tensor["home"]]
    first_grads = [a.copy() for a in per_tensor["home_grads"]]

    pointers = {name: _pointers(arrays) for name, arrays in per_tensor.items()}
    addresses = _pointers([(flat | pointers)[name] for name in MEMORY])
    unit.configure(
        seed=seed, order=order, preempt=preempt, max_polls=1 << 60, max_switches=0,
        max_shared_bytes=32 << 10,
    )  # fmt: skip
    registered = {name: a for name, a in flat.items() if name != "windows"}
    registered |= {f"{name}[{t}]": a for name, arrays in per_tensor.items()
                   for t, a in enumerate(arrays)}  # fmt: skip
    registered |= {f"window of rank {r}": flat["windows"][r] for r in range(ranks)}
    registered |= {f"pointers to {name}": a for name, a in pointers.items()}
    with unit.memory(**registered):
        try:
            unit.call("run_cluster", packed_settings, addresses)
        except LaunchError as error:
            raise LaunchError("\n".join(map(str, [error, *unit.take_reports()]))) from error
    outcome = Outcome(
        unit.take_reports(),
        _failures(flat["errors"]),
        flat["sent_bytes"],
        int(flat["sent_signals"][0]),
    )
    _compare(outcome, cluster, plans, flat, per_tensor, first_home, first_grads)
    return outcome


def _failures(errors: np.ndarray) -> list[Failure]:
    failures = []
    for record in errors:
        waited, _, rank, _, source, what = record[:6].tolist()
        wanted, seen, _ = record[6:12].view(np.uint64).tolist()
        if waited != 0:
            failures.append(Failure(rank, WAITED[waited], source, what, wanted, seen))
    return failures


def expected_home_grads(
    plan: PlanTables, before: np.ndarray, grads: np.ndarray, narrow_home: bool
) -> np.ndarray:
    """Home gradients [R, H, n] after one reduce: the order of sums is part of the contract."""
    after = before.copy()
    for expert in range(plan.num_experts):
        home = plan.home(expert)

        def grad(rank: int, expert: int = expert) -> np.ndarray:
            return to_float(grads[rank, plan.slot(rank, expert)])

        nodes = range(plan.topology.num_nodes)
        holders = {node: plan.holders(expert, node) for node in nodes}
        if not any(holders.values()):
            continue
        row = expert % plan.experts_per_rank
        total = to_float(before[home, row]).copy()
        own_node = plan.node(home)
        for rank in holders[own_node]:
            total += grad(rank)
        for node in nodes:
            if node != own_node and holders[node]:
                partial = grad(holders[node][0]).copy()
                for rank in holders[node][1:]:
                    partial += grad(rank)
                total += partial
        after[home, row] = to_bfloat16(total) if narrow_home else total
    return after


def _compare(
    outcome: Outcome,
    cluster: Cluster,
    plans: Sequence[PlanTables],
    flat: dict[str, np.ndarray],
    per_tensor: dict[str, list[np.ndarray]],
    home: list[np.ndarray],
    home_grads: list[np.ndarray],
) -> None:
    """Everything a rank committed must be right, also in a run with a failure."""

    def check(name: str, got: np.ndarray, wanted: np.ndarray) -> None:
        if np.array_equal(got.view(np.uint8), wanted.view(np.uint8)):
            return
        if outcome.failures and not got.view(np.uint8).any():
            outcome.missing += 1
        else:
            outcome.wrong.append(name)

    ranks = cluster.topology.num_ranks
    for m, plan in enumerate(plans):
        for rank in range(ranks):
            if cluster.exchange:
                got = flat["seen_counts"][m, rank]
                check(f"counts of microbatch {m} on rank {rank}", got, flat["rows"][m])
            for slot, expert in enumerate(plan.slot_expert[rank].tolist()):
                if expert < 0:
                    continue
                for t, weights in enumerate(home[: cluster.num_tensors(m)]):
                    row = expert % plan.experts_per_rank
                    wanted = (weights[plan.home(expert), row]
                              + np.uint8(m if cluster.optimizer else 0))  # fmt: skip
                    got = per_tensor["seen_spare"][t][m, rank, slot]
                    if wanted.any():
                        check(f"tensor {t} in slot {slot} of rank {rank}, {m}", got, wanted)
        if not cluster.backward:
            continue
        for t in range(len(home_grads)):
            if t < cluster.num_tensors(m):
                home_grads[t] = expected_home_grads(
                    plan, home_grads[t], per_tensor["grads"][t][m], cluster.bfloat16_home
                )
            for rank in range(ranks):
                got = per_tensor["seen_home"][t][m, rank]
                check(f"gradients of tensor {t} on rank {rank}, {m}", got, home_grads[t][rank])
                used = plan.slot_expert[rank] >= 0
                left = per_tensor["seen_slots"][t][m, rank][used]
                if left.view(np.uint8).any() and not outcome.failures:
                    outcome.wrong.append(f"slots of rank {rank} are not zero, {m}")


def _padded(sizes: Sequence[int], alignment: int) -> int:
    return sum(-(-size // alignment) * alignment for size in sizes)


def expected_sent_bytes(cluster: Cluster, plans: Sequence[PlanTables]) -> int:
    """Over the network, all ranks together: each pair once, in each direction."""
    total = 0
    for m, plan in enumerate(plans):
        tensors = cluster.num_tensors(m)
        weights = _padded(cluster.row_bytes[:tensors], 16)
        grads = 4 * _padded(cluster.elements[:tensors], 8) if cluster.backward else 0
        total += len(plan.pairs()) * (weights + grads)
    if cluster.exchange:
        ranks, nodes = cluster.topology.num_ranks, cluster.topology.num_nodes
        row = _padded([4 * ranks * cluster.experts_per_rank], 16)
        total += len(plans) * ranks * (nodes - 1) * row
    return total
