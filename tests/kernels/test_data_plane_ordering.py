# SPDX-License-Identifier: Apache-2.0
"""Every fence and barrier of the data plane, deleted once: the checkers notice, or it is said why.

A mutant is the kernels with one `__threadfence*`, `__syncthreads*` or `__syncwarp` taken out. It
plays a few microbatches on small clusters until a race, a wrong byte or a dead end shows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulation.harness import CACHE, PROJECT, Emulator, LaunchError
from tests.kernels.cluster import SHORT, UNIT, Cluster, run
from tests.kernels.plans import random_plan
from topoep import Topology

FILES = (
    "bounded_wait.cuh", "exchange_counts.cuh", "landing.cuh", "replicate.cuh",
    "reduce_grads_across.cuh",
)  # fmt: skip
CALL = re.compile(r"__(?:threadfence(?:_system)?|syncthreads(?:_and|_or)?|syncwarp)\(")
FUNCTION = re.compile(r"__device__[^;]*?(\w+)\(")

# What the simulated cluster cannot see, by file, function and number in the function.
EXPLAINED = {}


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


def without(site: Site) -> Emulator:
    """The kernels without that call: a vote becomes the thread's own opinion."""
    text = (PROJECT / "csrc" / "cuda" / site.file).read_text()
    call = text[site.begin : site.end]
    argument = call[call.index("(") + 1 : -1]
    folder = CACHE / "without" / str(site)
    (folder / "cuda").mkdir(parents=True, exist_ok=True)
    mutant = text[: site.begin] + f"({argument or '0'})" + text[site.end :]
    (folder / "cuda" / site.file).write_text(mutant)
    return Emulator([UNIT], flags=[f"-iquote{folder}", "-Wno-unused-value"])


def cases():
    """(cluster, plans, seed, schedule): one node, two nodes, three; with and without exchange."""
    two = Topology(num_nodes=2, ranks_per_node=2)
    small = {"ring_slots": 2, "timeout": 4 * SHORT}
    clusters = [
        (Cluster(two, **small), 0),
        (Cluster(two, exchange=False, optimizer=False, senders=2, bfloat16_slots=True, **small), 3),
        (Cluster(Topology(num_nodes=3, ranks_per_node=1), threads=64, **small), 0),
        (Cluster(Topology(num_nodes=1, ranks_per_node=4), threads=64, **small), 0),
        (Cluster(two, delay=1500, threads=64, chunk_bytes=256, **small), 40),
    ]
    for seed, (cluster, preempt) in enumerate(clusters, 1):
        rng = np.random.default_rng(seed)
        plans = [random_plan(rng, cluster.topology, 2, 2, "full") for _ in range(3)]
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


def test_the_cases_pass_with_nothing_deleted():
    assert not is_noticed(Emulator([UNIT]))


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES, ids=str)
def test_deleting_it_is_noticed_or_explained(site):
    noticed = is_noticed(without(site))
    assert noticed != ((site.file, site.function, site.number) in EXPLAINED)
