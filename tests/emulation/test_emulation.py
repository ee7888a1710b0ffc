# SPDX-License-Identifier: Apache-2.0
"""Right kernels give right results, without a report, under every schedule.

A checker that cries wolf would be worth nothing to the kernels' own tests. test_faults.py has the
other half: a checker that is silent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .harness import SCHEDULES, Emulator, Schedule, aligned_array

# ---- Each check runs one kernel and compares its result


def check_sort_scan_count(emulator: Emulator, rng: np.random.Generator) -> None:
    keys = rng.integers(0, 5000, 256).astype(np.uint64)
    sorted_keys = np.zeros_like(keys)
    sums, counts = np.zeros(256, np.uint32), np.zeros(64, np.uint32)
    with (
        emulator.memory(keys=keys),
        emulator.memory(initialised=False, sorted_keys=sorted_keys, sums=sums, counts=counts),
    ):
        emulator.call("selftest_sort_scan_count", keys, sorted_keys, sums, counts, 256, 2)
    expected = np.sort(keys)
    np.testing.assert_array_equal(sorted_keys, expected)
    np.testing.assert_array_equal(sums, np.cumsum(expected & 0xFF))
    np.testing.assert_array_equal(counts, np.bincount((expected & 63).astype(int), minlength=64))


def check_histogram(emulator: Emulator, rng: np.random.Generator) -> None:
    ids = rng.integers(-1, 101, 3000).astype(np.int32)  # some out of range on both sides
    counts = np.zeros(100, np.uint32)
    with emulator.memory(ids=ids, counts=counts):
        emulator.call("selftest_histogram", ids, ids.size, 100, counts, 5)
    expected = np.bincount(ids[(ids >= 0) & (ids < 100)], minlength=100)
    np.testing.assert_array_equal(counts, expected)


def check_stable_rank(emulator: Emulator, rng: np.random.Generator) -> None:
    ids = rng.integers(0, 20, 700).astype(np.int32)
    rank = np.zeros(ids.size, np.uint32)
    with emulator.memory(ids=ids), emulator.memory(initialised=False, rank=rank):
        emulator.call("selftest_stable_rank", ids, ids.size, 20, rank)
    expected = [int((ids[:i] == ids[i]).sum()) for i in range(ids.size)]
    np.testing.assert_array_equal(rank, expected)


def check_copy_bytes(emulator: Emulator, rng: np.random.Generator) -> None:
    for from_phase, to_phase, size in [(0, 0, 4096), (5, 5, 3001), (3, 8, 500), (9, 9, 2)]:
        source = aligned_array(size, np.uint8, from_phase)
        source[:] = rng.integers(0, 256, size)
        target = aligned_array(size, np.uint8, to_phase)
        with emulator.memory(source=source), emulator.memory(initialised=False, target=target):
            emulator.call("selftest_copy_bytes", source, target, size, 3)
        np.testing.assert_array_equal(target, source)


def check_last_block_sum(emulator: Emulator, rng: np.random.Generator) -> None:
    values = rng.integers(0, 1000, 2000).astype(np.uint32)
    partial, ticket = np.zeros(7, np.uint32), np.zeros(1, np.uint32)
    total = np.zeros(1, np.uint32)
    with (
        emulator.memory(values=values, ticket=ticket),
        emulator.memory(initialised=False, partial=partial, total=total),
    ):
        emulator.call("selftest_last_block_sum", values, values.size, partial, ticket, total, 7)
    assert total[0] == values.sum()


def check_reverse_through_grid(emulator: Emulator, rng: np.random.Generator) -> None:
    scratch, out = np.zeros(6 * 64, np.uint32), np.zeros(6 * 64, np.uint32)
    with emulator.memory(initialised=False, scratch=scratch, out=out):
        emulator.call("selftest_reverse_through_grid", scratch, out, 6)
    np.testing.assert_array_equal(out, np.arange(6 * 64)[::-1])


def check_producers_and_consumers(emulator: Emulator, rng: np.random.Generator) -> None:
    source = rng.integers(0, 1000, (5, 64)).astype(np.uint32)
    target = np.zeros_like(source)
    with emulator.memory(source=source), emulator.memory(initialised=False, target=target):
        emulator.call("selftest_producers_and_consumers", source, target, 5)
    np.testing.assert_array_equal(target, source[:, ::-1])


def check_flag_in_block(emulator: Emulator, rng: np.random.Generator) -> None:
    out = np.zeros(1, np.uint32)
    with emulator.memory(initialised=False, out=out):
        emulator.call("selftest_flag_in_block", out)
    assert out[0] == 42


def check_bytes_of_words(emulator: Emulator, rng: np.random.Generator) -> None:
    out = np.zeros(256, np.uint8)
    with emulator.memory(initialised=False, out=out):
        emulator.call("selftest_bytes_of_words", out)
    np.testing.assert_array_equal(out, (np.arange(256) ^ 1) * 3 % 256)


def check_short_warp(emulator: Emulator, rng: np.random.Generator) -> None:
    out = np.zeros(48, np.uint32)
    with emulator.memory(initialised=False, out=out):
        emulator.call("selftest_short_warp", out)
    lanes = np.where(np.arange(48) < 32, 32, 16)
    np.testing.assert_array_equal(out, (np.arange(48) ^ 1) + 100 * lanes)


def check_early_exit(emulator: Emulator, rng: np.random.Generator) -> None:
    out = np.zeros(40, np.uint32)
    with emulator.memory(initialised=False, out=out):
        emulator.call("selftest_early_exit", out)
    np.testing.assert_array_equal(out, [0xFFFFFFFF] * 32 + [0xFF] * 8)


def check_bounded_wait(emulator: Emulator, rng: np.random.Generator) -> None:
    flag, timed_out = np.zeros(1, np.uint32), np.zeros(256, np.uint32)
    with emulator.memory(flag=flag, timed_out=timed_out):
        emulator.call("selftest_bounded_wait", flag, timed_out)
    assert timed_out.all()


RIGHT_KERNELS: list[Callable[[Emulator, np.random.Generator], None]] = [
    check_sort_scan_count,
    check_histogram,
    check_stable_rank,
    check_copy_bytes,
    check_last_block_sum,
    check_reverse_through_grid,
    check_producers_and_consumers,
    check_flag_in_block,
    check_bytes_of_words,
    check_short_warp,
    check_early_exit,
    check_bounded_wait,
]


@pytest.mark.parametrize("check", RIGHT_KERNELS, ids=lambda check: check.__name__[6:])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_right_kernel(
    checked: Emulator,
    schedule: Schedule,
    check: Callable[[Emulator, np.random.Generator], None],
    rng: np.random.Generator,
) -> None:
    checked.use(schedule)
    check(checked, rng)
    assert checked.take_reports() == []


@pytest.mark.parametrize("check", RIGHT_KERNELS, ids=lambda check: check.__name__[6:])
@pytest.mark.parametrize("order", ["in_order", "reverse", "random"])
def test_right_kernel_in_fast_build(
    fast: Emulator,
    order: str,
    check: Callable[[Emulator, np.random.Generator], None],
    rng: np.random.Generator,
) -> None:
    fast.configure(order=order)
    check(fast, rng)
    assert fast.take_reports() == []


@pytest.mark.parametrize("resident", [2, 5, 16])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_look_back_over_resident_blocks(
    checked: Emulator, schedule: Schedule, resident: int
) -> None:
    checked.use(schedule, resident=resident)
    flags, values = np.zeros(16, np.uint32), np.zeros((16, 32), np.uint32)
    with checked.memory(flags=flags), checked.memory(initialised=False, values=values):
        checked.call("selftest_look_back", flags, values, 16)
    np.testing.assert_array_equal(values, np.cumsum(np.add.outer(range(16), range(32)), axis=0))
    assert checked.take_reports() == []


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_hand_over_at_a_named_barrier(checked: Emulator, schedule: Schedule) -> None:
    checked.use(schedule, resident=2)
    flag, value, out = (np.zeros(1, np.uint32) for _ in range(3))
    with checked.memory(flag=flag), checked.memory(initialised=False, value=value, out=out):
        checked.call("selftest_hand_over", flag, value, out)
    assert out[0] == 7
    assert checked.take_reports() == []
