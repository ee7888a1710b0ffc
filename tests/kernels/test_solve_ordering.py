# SPDX-License-Identifier: Apache-2.0
"""What lets the last block of a solve read what the others wrote: deleted once, and noticed.

The switches are those of test_data_plane_ordering.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path

import pytest

import topoep
from tests.emulation.harness import CACHE, PROJECT, SCHEDULES, Emulator, LaunchError
from tests.kernels import kernels
from tests.kernels.test_data_plane_ordering import SWITCH, sites_of
from tests.kernels.test_solve_kernel import CANDIDATES, random_counts

SITES = [site for site in sites_of("solve.cuh") if site.function == "is_last_to_finalize"]
# finalize_plan ends in a barrier where it has copies; the function does not rely on that.
EXPLAINED = {0}


@functools.cache
def mutants() -> Emulator:
    text = (PROJECT / "csrc" / "cuda" / "solve.cuh").read_text()
    for number, site in reversed(list(enumerate(SITES))):
        switch = f"(is_deleted({number}) ? static_cast<void>(0) : {text[site.begin : site.end]})"
        text = text[: site.begin] + switch + text[site.end :]
    folder = CACHE / f"mutants-{hashlib.sha256((SWITCH + text).encode()).hexdigest()[:16]}"
    (folder / "cuda").mkdir(parents=True, exist_ok=True)
    (folder / "cuda" / "solve.cuh").write_text(text)
    (folder / "switch.h").write_text(SWITCH)
    unit = Path(kernels.__file__).with_name("kernel_unit.cpp")
    return Emulator([unit], flags=[f"-iquote{folder}", "-include", str(folder / "switch.h")])


def is_noticed(number: int) -> bool:
    """Whether the checkers report something of a solve with lists."""
    unit = mutants()
    ctypes.c_int.in_dll(unit.library, "deleted_site").value = number
    topology = topoep.Topology(node_of_rank=[0, 1, 0, 1, 2, 2])
    packed = [candidate.pack() for candidate in CANDIDATES]
    for schedule in SCHEDULES:
        runner = kernels.Kernels(schedule)
        runner.emulator = unit
        counts = random_counts(6, 24, schedule.seed)
        arguments = (counts, topology.table(), 2, packed, topoep.Balance(0.02).to_ints(), 1)
        try:
            runner.solve(*arguments, with_lists=True)
        except (AssertionError, LaunchError):
            unit.take_reports()
            return True
    return False


def test_there_are_sites():
    assert len(SITES) == 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [-1, 0, 1, 2, 3])
def test_deleting_it_is_noticed_or_explained(number):
    assert is_noticed(number) != (number in EXPLAINED | {-1})
