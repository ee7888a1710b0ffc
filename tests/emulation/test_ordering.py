# SPDX-License-Identifier: Apache-2.0
"""Tests of the race checker against a second opinion.

Random programs of reads, writes, atomics, fences and barriers run in the emulation, which also
records the order of all steps. `find_races` then judges that order with full vector clocks, one
entry for each thread of the grid and every access ever made: slow, short, and written from the
rules alone. The checker, which compresses its clocks and forgets accesses, must agree on whether
the program has a race.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from .harness import HERE, Emulator

NUM_WARPS = 3
NUM_THREADS = 32 * NUM_WARPS  # of a block
NUM_WORDS = 5
NUM_FLAGS = 2
COMING = 128


class Step(IntEnum):
    NOTHING = 0
    READ = 1
    WRITE = 2
    ATOMIC_ADD = 3
    RELAXED_LOAD = 4
    RELAXED_STORE = 5
    FENCE = 6
    BLOCK_FENCE = 7
    BLOCK_BARRIER = 8
    WARP_BARRIER = 9
    NAMED_BARRIER = 10
    NAMED_ARRIVE = 11


def step(kind: int | np.integer, argument: int | np.integer = 0) -> int:
    return int(kind) + 256 * int(argument)


def random_accesses(rng: np.random.Generator) -> list[int]:
    """What one thread does between barriers: publish, look, or just touch memory."""
    access = step(rng.choice([Step.READ, Step.READ, Step.WRITE]), rng.integers(NUM_WORDS))
    fence = step(rng.choice([Step.FENCE, Step.FENCE, Step.FENCE, Step.BLOCK_FENCE]))
    flag = int(rng.integers(NUM_FLAGS))
    update = step(rng.choice([Step.ATOMIC_ADD, Step.ATOMIC_ADD, Step.RELAXED_STORE]), flag)
    look = step(rng.choice([Step.ATOMIC_ADD, Step.RELAXED_LOAD]), flag)
    shapes = [[access], [access, fence, update], [look, fence, access], [fence], [update], [look]]
    return shapes[rng.integers(len(shapes))]


def random_block(rng: np.random.Generator) -> list[list[int]]:
    """The programs of one block: barriers that all sides agree on, accesses between them."""
    programs: list[list[int]] = [[] for _ in range(NUM_THREADS)]
    warps = [programs[32 * w : 32 * w + 32] for w in range(NUM_WARPS)]
    fresh_ids = [1, 2, 3, 4]
    for _ in range(rng.integers(3, 14)):
        choice = rng.random()
        if choice < 0.25:
            for program in programs:
                program.append(Step.BLOCK_BARRIER)
            fresh_ids = [1, 2, 3, 4]
        elif choice < 0.4:
            for program in warps[rng.integers(NUM_WARPS)]:
                program.append(Step.WARP_BARRIER)
        elif choice < 0.6 and fresh_ids:
            # Two warps meet, or one tells the other; an id is used once between block barriers.
            barrier = fresh_ids.pop()
            first, second = rng.permutation(NUM_WARPS)[:2]
            first_kind = rng.choice([Step.NAMED_BARRIER, Step.NAMED_ARRIVE])
            for program in warps[first]:
                program.append(step(first_kind, barrier))
            for program in warps[second]:
                program.append(step(Step.NAMED_BARRIER, barrier))
        else:
            for _ in range(rng.integers(1, 4)):
                programs[rng.integers(NUM_THREADS)].extend(random_accesses(rng))
    return programs


def random_programs(rng: np.random.Generator, num_blocks: int) -> np.ndarray:
    programs = [program for _ in range(num_blocks) for program in random_block(rng)]
    table = np.zeros((len(programs), max(map(len, programs))), np.uint32)
    for row, program in zip(table, programs, strict=True):
        row[: len(program)] = program
    return table


Clocks = npt.NDArray[np.int64]
Scope = int | None  # a block's number, or None for the whole device
Key = TypeVar("Key")


class Judge:
    """Full vector clocks: clocks[t][u] is how much of thread u's past thread t knows."""

    def __init__(self, num_threads: int) -> None:
        self.clocks = np.zeros((num_threads, num_threads), np.int64)
        # By thread and scope: what atomics saw until a fence, and what fences published.
        self.seen: dict[tuple[int, Scope], Clocks] = {}
        self.published: dict[tuple[int, Scope], Clocks] = {}
        # By flag and scope: what its readers can learn.
        self.released: dict[int, dict[Scope, Clocks]] = defaultdict(dict)
        self.history: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
        self.meetings: dict[tuple[int, ...], tuple[list[int], Clocks]] = {}
        self.met: dict[tuple[int, tuple[int, ...]], Clocks] = {}
        self.has_race = False

    def take(self, thread: int, event: int) -> None:
        self.clocks[thread, thread] += 1
        kind, argument = event & 255, event >> 8
        if kind in (Step.READ, Step.WRITE):
            self.access(thread, argument, kind == Step.WRITE)
        elif kind in (Step.ATOMIC_ADD, Step.RELAXED_LOAD, Step.RELAXED_STORE):
            self.atomic(thread, argument, kind)
        elif kind in (Step.FENCE, Step.BLOCK_FENCE):
            scopes: list[Scope] = [thread // NUM_THREADS, None]
            self.fence(thread, scopes if kind == Step.FENCE else scopes[:1])
        elif kind >= COMING:
            self.come(thread, self.meeting(thread, kind - COMING, argument))
        else:
            self.leave(thread, self.meeting(thread, kind, argument))

    def access(self, thread: int, word: int, writes: bool) -> None:
        for other, clock, wrote in self.history[word]:
            self.has_race |= (writes or wrote) and self.clocks[thread, other] < clock
        self.history[word].append((thread, int(self.clocks[thread, thread]), writes))

    def atomic(self, thread: int, flag: int, kind: int) -> None:
        scopes: list[Scope] = [None, thread // NUM_THREADS]
        passed_on = self.released[flag]
        if kind != Step.RELAXED_STORE:
            for scope in scopes:
                self.join(self.seen, (thread, scope), passed_on.get(scope))
        if kind == Step.RELAXED_STORE:
            passed_on.clear()  # a plain store passes on nothing but its own
        if kind != Step.RELAXED_LOAD:
            for scope in scopes:
                self.join(passed_on, scope, self.published.get((thread, scope)))

    def fence(self, thread: int, scopes: list[Scope]) -> None:
        for scope in scopes:
            learnt = self.seen.pop((thread, scope), None)
            if learnt is not None:
                self.clocks[thread] = np.maximum(self.clocks[thread], learnt)
        for scope in scopes:
            self.published[thread, scope] = self.clocks[thread].copy()

    def meeting(self, thread: int, kind: int, argument: int) -> tuple[int, ...]:
        place = thread // 32 if kind == Step.WARP_BARRIER else thread // NUM_THREADS
        named = kind in (Step.NAMED_BARRIER, Step.NAMED_ARRIVE)
        return (Step.NAMED_BARRIER, place, argument) if named else (kind, place, 0)

    def come(self, thread: int, meeting: tuple[int, ...]) -> None:
        """Everyone who comes to one meeting shares one clock, which leaves with those who wait."""
        sizes = {Step.BLOCK_BARRIER: NUM_THREADS, Step.WARP_BARRIER: 32, Step.NAMED_BARRIER: 64}
        came, clocks = self.meetings.setdefault(meeting, ([], np.zeros_like(self.clocks[0])))
        np.maximum(clocks, self.clocks[thread], out=clocks)
        came.append(thread)
        self.met[thread, meeting] = clocks
        if len(came) == sizes[Step(meeting[0])]:
            del self.meetings[meeting]

    def leave(self, thread: int, meeting: tuple[int, ...]) -> None:
        self.clocks[thread] = np.maximum(self.clocks[thread], self.met.pop((thread, meeting)))
        self.clocks[thread, thread] += 1

    @staticmethod
    def join(table: dict[Key, Clocks], key: Key, clocks: Clocks | None) -> None:
        if clocks is not None:
            table[key] = np.maximum(table.get(key, clocks), clocks)


def run(emulator: Emulator, programs: np.ndarray, num_blocks: int) -> np.ndarray:
    data, flags = np.zeros(NUM_WORDS, np.uint32), np.zeros(NUM_FLAGS, np.uint32)
    with emulator.memory(programs=programs, data=data, flags=flags):
        emulator.call(
            "programs_run", programs, programs.shape[1], data, flags, num_blocks, NUM_THREADS
        )
    count = ctypes.c_longlong()
    get_events = emulator.library.programs_events
    get_events.restype = ctypes.POINTER(ctypes.c_uint32)
    events = get_events(ctypes.byref(count))
    return np.ctypeslib.as_array(events, (count.value, 2)).copy()


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator([HERE / "program_unit.cpp"])


@pytest.mark.parametrize("group", range(8))
def test_checker_agrees_with_full_vector_clocks(emulator: Emulator, group: int) -> None:
    verdicts = []
    for seed in range(50 * group, 50 * group + 50):
        rng = np.random.default_rng(seed)
        num_blocks = int(rng.integers(1, 4))
        emulator.configure(
            seed=seed,
            order=str(rng.choice(["random", "warp_random", "in_order", "reverse"])),
            preempt=int(rng.choice([0, 2, 10])),
            resident=num_blocks,
        )
        events = run(emulator, random_programs(rng, num_blocks), num_blocks)
        judge = Judge(num_blocks * NUM_THREADS)
        for thread, event in events.tolist():
            judge.take(thread, event)
        reports = emulator.take_reports()
        assert {report.kind for report in reports} <= {"race"}
        assert bool(reports) == judge.has_race, f"seed {seed}: {[str(r) for r in reports]}"
        verdicts.append(judge.has_race)
    assert 10 <= sum(verdicts) <= 40, "the programs should be of both sorts"
