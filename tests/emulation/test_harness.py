# SPDX-License-Identifier: Apache-2.0
"""Launches that are refused, schedules, counters, options, and the build."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from .harness import BuildError, Emulator, LaunchError, build


@pytest.mark.parametrize(
    ("threads", "shared_bytes", "error"),
    [
        (0, 64, "invalid configuration argument"),
        (1025, 64, "invalid configuration argument"),
        (1, 300000, "invalid argument"),
    ],
)
def test_refused_launch(checked: Emulator, threads: int, shared_bytes: int, error: str) -> None:
    checked.configure()
    out = np.zeros(3, np.uint32)
    with checked.memory(out=out), pytest.raises(LaunchError, match=error):
        checked.call("selftest_shared_alignment", out, shared_bytes, threads)
    assert checked.take_reports() == []


def test_static_and_dynamic_shared_memory_over_the_limit(checked: Emulator) -> None:
    checked.configure()
    out = np.zeros(3, np.uint32)
    # The dynamic part alone needs no opt-in, so launch() takes none; with the static part it does.
    with checked.memory(out=out), pytest.raises(LaunchError):
        checked.call("selftest_shared_alignment", out, 48 * 1024, 1)
    assert [report.kind for report in checked.take_reports()] == ["limit"]
    with checked.memory(out=out):
        checked.call("selftest_shared_alignment", out, 48 * 1024 + 16, 1)
    assert checked.take_reports() == []


def running_order(emulator: Emulator, **options: int | str) -> list[int]:
    emulator.configure(**options)
    ticket, order = np.zeros(1, np.uint32), np.zeros(128, np.uint32)
    with emulator.memory(ticket=ticket), emulator.memory(initialised=False, order=order):
        emulator.call("selftest_running_order", ticket, order)
    return order.tolist()


def test_orders_of_threads(checked: Emulator) -> None:
    in_order = list(range(128))
    assert running_order(checked, order="in_order") == in_order
    assert running_order(checked, order="reverse") == in_order[::-1]

    runs = [running_order(checked, order="random", seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert sorted(runs[0]) == in_order

    by_warps = running_order(checked, order="warp_random", seed=1)
    starts = by_warps[::32]
    assert starts != [0, 32, 64, 96]
    assert by_warps == [thread for start in starts for thread in range(start, start + 32)]

    # Without order at the start, only forced switches can mix the threads.
    assert running_order(checked, order="in_order", preempt=2) != in_order


def test_same_schedule_gives_the_same_run(checked: Emulator) -> None:
    ids = np.arange(700, dtype=np.int32) % 20
    rank = np.zeros(ids.size, np.uint32)
    runs = []
    for seed in (5, 5, 6):
        checked.configure(seed=seed, preempt=7)
        before = checked.stats()
        with checked.memory(ids=ids, rank=rank):
            checked.call("selftest_stable_rank", ids, ids.size, 20, rank)
        runs.append(checked.stats() - before)
    assert runs[0] == runs[1]
    assert runs[0].switches != runs[2].switches


def test_stats(checked: Emulator) -> None:
    checked.configure()
    out = np.zeros(96, np.uint32)
    before = checked.stats()
    with checked.memory(out=out):
        checked.call("selftest_barriers_and_shuffles", 5, 7, out, 96)
    stats = checked.stats() - before
    assert (stats.barriers, stats.warp_ops, stats.atomics) == (5, 3 * 7, 0)
    assert stats.chain == 5 + 7
    assert stats.accesses == 96


def test_options_and_memory_are_validated(checked: Emulator) -> None:
    with pytest.raises(ValueError, match="no option"):
        checked.configure(sed=1)
    with pytest.raises(ValueError, match="warp_random"):
        checked.configure(order="sideways")
    array = np.zeros((4, 4), np.uint32)
    with pytest.raises(ValueError, match="not contiguous"), checked.memory(a=array[:, 1]):
        pass
    with (
        checked.memory(a=array),
        pytest.raises(ValueError, match="overlaps"),
        checked.memory(b=array[1]),
    ):
        pass
    with checked.memory(a=array, empty=np.zeros(0)):
        pass


def test_broken_unit_is_a_build_error(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    # uint64_t is `unsigned long` here, for which CUDA has no atomics.
    source.write_text(
        '#include "cuda/compat.cuh"\n'
        "__global__ void add(uint64_t* p) { atomicAdd(p, uint64_t{1}); }\n"
    )
    with pytest.raises(BuildError, match="atomicAdd"):
        build((source,), False)


def test_cache_key_follows_the_content(tmp_path: Path) -> None:
    source = tmp_path / "unit.cpp"
    paths = []
    for value in (1, 2, 1):
        source.write_text(f'extern "C" int value() {{ return {value}; }}\n')
        build.cache_clear()
        paths.append(build((source,), False))
    assert paths[0] == paths[2] != paths[1]
    assert ctypes.CDLL(str(paths[1])).value() == 2


def test_host_code_of_a_unit_may_use_the_standard_library(tmp_path: Path) -> None:
    source = tmp_path / "host_code.cpp"
    source.write_text(
        """
        #include <atomic>
        #include <functional>
        #include <map>
        #include <memory>
        #include <string>
        #include <vector>
        static std::shared_ptr<std::vector<int>> shared() {
            static std::shared_ptr<std::vector<int>> kept = std::make_shared<std::vector<int>>(3);
            return kept;
        }
        extern "C" int use_library() {
            std::atomic<int> count{0};
            std::map<std::string, std::function<void()>> calls;
            calls["a"] = [&] { count += static_cast<int>(shared()->size()); };
            calls["a"]();
            return count;
        }
        """
    )
    for instrumented in (False, True):
        assert ctypes.CDLL(str(build((source,), instrumented))).use_library() == 3
