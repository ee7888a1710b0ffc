# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels are reported: the right kind, the right lines, under every schedule."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest

from .conftest import UNIT
from .harness import (
    HERE,
    SCHEDULES,
    Emulator,
    LaunchError,
    Report,
    Schedule,
    aligned_array,
    has_line_numbers,
)

FAULTS_FILE = "selftest_faults.cuh"

FAULTS = {
    "missing_barrier": "race",
    "write_after_read": "race",
    "lost_update": "race",
    "plain_read_of_atomic": "race",
    "divergent_barrier": "barrier",
    "missing_thread_at_barrier": "deadlock",
    "poll_without_end": "livelock",
    "barrier_counts_differ": "barrier",
    "write_after_arrive": "race",
    "missing_syncwarp": "race",
    "vote_as_syncwarp": "race",
    "shuffle_from_outside_mask": "warp",
    "mask_without_caller": "warp",
    "masks_differ": "warp",
    "collectives_differ": "warp",
    "divergent_shuffle": "deadlock",
    "shared_out_of_bounds": "bounds",
    "global_out_of_bounds": "bounds",
    "null_pointer": "bounds",
    "local_of_another_thread": "bounds",
    "uninitialised_shared": "uninitialised",
    "uninitialised_global": "uninitialised",
    "misaligned_vector_load": "misaligned",
    "misaligned_vector_store": "misaligned",
    "misaligned_shared_vector": "misaligned",
    "misaligned_hinted_load": "misaligned",
    "misaligned_atomic": "misaligned",
    "cross_block_race": "race",
    "race_behind_a_read": "race",
    "race_behind_an_atomic": "race",
    "release_by_failed_swap": "race",
    "missing_release_fence": "race",
    "missing_acquire_fence": "race",
    "fence_before_write": "race",
    "release_of_block_scope": "race",
    "acquire_of_block_scope": "race",
    "grid_sync_without_cooperation": "barrier",
    "exit_before_grid_sync": "deadlock",
    "trap_in_one_thread": "trap",
}
# Their places are known without debug information.
BARRIERS_AND_COLLECTIVES = {"barrier", "warp", "deadlock", "trap"}


def run_fault(emulator: Emulator, name: str) -> list[Report]:
    out, extra = aligned_array(256, np.uint32), aligned_array(320, np.uint32)
    extra_is_set = name != "uninitialised_global"
    with (
        emulator.memory(out=out),
        emulator.register(extra, "extra", initialised=extra_is_set),
        contextlib.suppress(LaunchError),  # some faults end the launch, others do not
    ):
        emulator.call("selftest_fault", name, out, extra)
    return emulator.take_reports()


def fault_lines(name: str) -> range:
    """The lines of a kernel in the file of faults, with what it calls between its neighbours."""
    lines = (HERE / FAULTS_FILE).read_text().splitlines()
    if name in ("missing_release_fence", "missing_acquire_fence", "fence_before_write") or (
        name.endswith("_of_block_scope")
    ):
        name = "tell_last_block"
    start = next(i for i, line in enumerate(lines) if re.search(rf"void {name}\(", line))
    end = next(i for i in range(start, len(lines)) if lines[i].endswith("}") and lines[i][0] != " ")
    return range(start + 1, end + 2)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(checked: Emulator, name: str, schedule: Schedule) -> None:
    checked.use(schedule, max_polls=20000)
    reports = run_fault(checked, name)
    assert FAULTS[name] in [report.kind for report in reports], [str(r) for r in reports]


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_placed(checked: Emulator, name: str) -> None:
    if FAULTS[name] not in BARRIERS_AND_COLLECTIVES and not has_line_numbers():
        pytest.skip("addr2line is missing: accesses are reported without their lines")
    checked.configure(max_polls=20000)
    report = next(r for r in run_fault(checked, name) if r.kind == FAULTS[name])
    for place in report.places:
        file, line = place.split(":")
        assert file == FAULTS_FILE
        assert int(line) in fault_lines(name)
        assert place in report.message


def test_control_of_the_fence_faults_is_clean(checked: Emulator) -> None:
    for schedule in SCHEDULES:
        checked.use(schedule)
        assert run_fault(checked, "fences_in_place") == []


def test_fast_build_finds_faults_of_barriers_and_collectives(fast: Emulator) -> None:
    fast.configure(max_polls=20000)
    for name, kind in FAULTS.items():
        if kind in (*BARRIERS_AND_COLLECTIVES, "livelock"):
            assert kind in [report.kind for report in run_fault(fast, name)], name


def test_message_names_memory_and_threads(checked: Emulator) -> None:
    checked.configure(order="in_order")
    messages = {name: str(run_fault(checked, name)[0]) for name in FAULTS}
    assert "4 bytes, 0 bytes behind the end of out" in messages["global_out_of_bounds"]
    assert "by block 0 thread 255 (warp 7 lane 31)" in messages["global_out_of_bounds"]
    assert "shared variable values+0x3fc (of 0x3fc bytes)" in messages["shared_out_of_bounds"]
    assert "another thread's local variable" in messages["local_of_another_thread"]
    assert "memory that is not registered" in messages["null_pointer"]
    assert "uninitialised read of extra+0x24" in messages["uninitialised_global"]
    assert "race on extra+0x4" in messages["missing_release_fence"]
    assert "32 threads wait in barrier" in messages["missing_thread_at_barrier"]


def test_spin_on_a_block_that_is_not_resident(checked: Emulator) -> None:
    checked.configure(order="reverse", max_polls=20000)
    flags, values = np.zeros(4, np.uint32), np.zeros((4, 32), np.uint32)
    with (
        checked.memory(flags=flags, values=values),
        pytest.raises(LaunchError, match="see the reports"),
    ):
        checked.call("selftest_look_back", flags, values, 4)
    [report] = checked.take_reports()
    assert report.kind == "livelock"
    assert "only 1 of 4 blocks are resident" in report.message


def test_repeated_faults_are_counted(checked: Emulator) -> None:
    checked.configure(order="in_order")
    [report] = run_fault(checked, "uninitialised_shared")
    assert report.count == 1
    [report] = run_fault(checked, "shuffle_from_outside_mask")
    assert report.count == 8 * 8


def test_without_addr2line_places_are_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checked: Emulator
) -> None:
    # Lines that were looked up once are remembered: this needs a library of its own.
    emulator = Emulator([UNIT], flags=["-DNO_LINE_WAS_LOOKED_UP_YET"])
    monkeypatch.setenv("PATH", str(tmp_path))
    [report] = run_fault(emulator, "write_after_read")
    assert report.places == ("?",)
    [report] = run_fault(emulator, "trap_in_one_thread")
    assert report.places[0].startswith(FAULTS_FILE)


def test_checks_can_be_switched_off(checked: Emulator) -> None:
    checked.configure(check_races=False)
    assert run_fault(checked, "write_after_read") == []
    checked.configure(check_initialised=False)
    assert run_fault(checked, "uninitialised_shared") == []
