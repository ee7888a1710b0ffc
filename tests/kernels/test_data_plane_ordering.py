# SPDX-License-Identifier: Apache-2.0
"""Every fence and barrier of the data plane, deleted once: the checkers notice, or it is said why.

A mutant is the kernels with one `__threadfence*`, `__syncthreads*`, `__syncwarp`, or wait for the
bulk-copy engine taken out. It plays a few microbatches on small clusters until a race, a wrong byte
or a dead end shows.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulation.harness import CACHE, PROJECT, Emulator, LaunchError
from tests.kernels.cluster import SHORT, UNIT, Cluster, run
from tests.kernels.plans import random_plan
from topoep import Topology

FILES = (
    "bounded_wait.cuh", "exchange_counts.cuh", "landing.cuh", "relays.cuh",
    "bulk_copy.cuh", "pull_weights.cuh", "replicate.cuh", "reduce_grads_across.cuh",
)  # fmt: skip
CALL = re.compile(
    r"__(?:threadfence(?:_system)?|syncthreads(?:_and|_or)?|syncwarp)\("
    r"|engine_\.(?:wait_\w+|fence|start)\(|copier\.finish\("
)
FUNCTION = re.compile(r"__device__[^;]*?(\w+)\(")

# What the simulated cluster cannot see, by file, function and number in the function.
_VOTE = "a block that sees an earlier failure leaves as a whole; here no kernel has failed before"
_PROXY = "orders accesses of threads and of the engine, which are of one kind in the emulation"
EXPLAINED = {
    ("bulk_copy.cuh", "copy", 0): _PROXY,
    ("bulk_copy.cuh", "store_oldest", 1): _PROXY,
    ("bulk_copy.cuh", "finish", 1): _PROXY,
    ("bounded_wait.cuh", "fail", 0): "orders the error record for the host, which is not simulated",
    ("exchange_counts.cuh", "exchange_counts_block", 0): _VOTE,
    ("replicate.cuh", "replicate_block", 0): _VOTE,
    ("reduce_grads_across.cuh", "reduce_grads_across_block", 0): _VOTE,
    ("reduce_grads_across.cuh", "sum_at_home", 3): "the vote lets a block give up as a whole; the "
    "barrier of list_addresses stands between the waits and the first load",
    ("reduce_grads_across.cuh", "end_reading", 0): "sums end in a barrier already; the function "
    "does not rely on its callers for that",
}

SWITCH = """
extern "C" int deleted_site;
int deleted_site = -1;
__attribute__((noinline, no_sanitize_thread)) static bool is_deleted(int site) {
    return deleted_site == site;
}
"""


@dataclass(frozen=True)
class Site:
    """One call in a kernel header."""

    file: str
    function: str
    number: int  # in its function
    begin: int
    end: int  # of the call's closing parenthesis

    def __str__(self) -> str:
        return f"{self.file}-{self.function}-{self.number}"


def sites_of(file: str) -> list[Site]:
    text = (PROJECT / "csrc" / "cuda" / file).read_text()
    code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)
    functions = [(m.start(), m[1]) for m in FUNCTION.finditer(code)]
    found: list[Site] = []
    for match in CALL.finditer(code):
        depth, end = 1, match.end()
        while depth > 0:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        function = [name for start, name in functions if start < match.start()][-1]
        number = sum(site.function == function for site in found)
        found.append(Site(file, function, number, match.start(), end))
    return found


SITES = [site for file in FILES for site in sites_of(file)]


@functools.cache
def mutants() -> Emulator:
    """The kernels with a switch at every site, so that one build serves all mutants.

    A deleted vote becomes the thread's own opinion.
    """
    headers = {}
    for file in FILES:
        text = (PROJECT / "csrc" / "cuda" / file).read_text()
        for site in reversed(sites_of(file)):
            call = text[site.begin : site.end]
            opinion = call[call.index("(") + 1 : -1]
            instead = f"static_cast<int>({opinion})" if opinion else "static_cast<void>(0)"
            if not call.startswith("__sync"):
                instead = "static_cast<void>(0)"
            switch = f"(is_deleted({SITES.index(site)}) ? {instead} : {call})"
            text = text[: site.begin] + switch + text[site.end :]
        headers[file] = text
    key = hashlib.sha256("".join([SWITCH, *headers.values()]).encode()).hexdigest()[:16]
    folder = CACHE / f"mutants-{key}"
    (folder / "cuda").mkdir(parents=True, exist_ok=True)
    for file, text in headers.items():
        (folder / "cuda" / file).write_text(text)
    (folder / "switch.h").write_text(SWITCH)
    flags = [f"-iquote{folder}", "-include", str(folder / "switch.h")]
    return Emulator([UNIT], flags=flags)


def without(site: Site | None) -> Emulator:
    unit = mutants()
    number = -1 if site is None else SITES.index(site)
    ctypes.c_int.in_dll(unit.library, "deleted_site").value = number
    return unit


def cases():
    """(cluster, plans, seed, schedule): one node, two nodes, three; with and without exchange.

    Some relay, and the last ones copy by the bulk-copy engine.
    """
    two = Topology(num_nodes=2, ranks_per_node=2)
    small = {"ring_slots": 2, "timeout": 4 * SHORT}
    clusters = [
        (Cluster(two, **small), 0),
        (Cluster(two, exchange=False, optimizer=False, senders=2, bfloat16_slots=True, **small), 3),
        (Cluster(Topology(num_nodes=3, ranks_per_node=1), threads=64, **small), 0),
        (Cluster(Topology(num_nodes=1, ranks_per_node=4), threads=64, **small), 0),
        (Cluster(two, delay=1500, threads=64, workers=20, pullers=1, **small), 40),
        (Cluster(Topology(num_nodes=1, ranks_per_node=4), threads=64, workers=1, **small), 0),
        (Cluster(Topology(num_nodes=2, ranks_per_node=3), exchange=False, optimizer=False,
                 pullers=1, threads=64, **small), 3),
        (Cluster(two, bulk_piece_bytes=128, row_bytes=(4000, 20, 1, 192), **small), 0),
        (Cluster(Topology(num_nodes=1, ranks_per_node=4), bulk_piece_bytes=128, workers=1,
                 row_bytes=(4000, 20), tile_bytes=256, **small), 0),
    ]  # fmt: skip
    for seed, (cluster, preempt) in enumerate(clusters, 1):
        rng = np.random.default_rng(seed)
        kind = "relayed" if seed in (6, 7, 9) else "full"
        plans = [random_plan(rng, cluster.topology, 2, 2, kind) for _ in range(3)]
        yield cluster, plans, seed, {"preempt": preempt}


def is_noticed(unit: Emulator) -> bool:
    for cluster, plans, seed, schedule in cases():
        try:
            outcome = run(cluster, plans, seed, unit=unit, **schedule)
        except LaunchError:
            return True
        if outcome.reports or outcome.wrong or outcome.failures:
            return True
    return False


def test_every_explanation_is_of_a_site():
    assert EXPLAINED.keys() <= {(site.file, site.function, site.number) for site in SITES}
    assert len(SITES) > 40


@pytest.mark.slow
def test_the_cases_pass_with_nothing_deleted():
    assert not is_noticed(without(None))


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES, ids=str)
def test_deleting_it_is_noticed_or_explained(site):
    noticed = is_noticed(without(site))
    assert noticed != ((site.file, site.function, site.number) in EXPLAINED)
