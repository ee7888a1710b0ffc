# SPDX-License-Identifier: Apache-2.0
"""The candidates that a solve tries: (cap on rank load, policy) pairs.

No single policy and no single cap is best for all loads, and while a plan is being made the other
SMs of the GPU are idle anyway, so every candidate is solved and an integer key picks the winner.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from topoep.checks import check_type
from topoep.objective import PARTS_PER_MILLION, Balance, Objective, Time
from topoep.topology import MAX_RANKS

MAX_CANDIDATES = 256  # kMaxCandidates in csrc/core/limits.h
MAX_PERCENT = 100_000  # kMaxPartsPerMillion

# CapRule in csrc/core/policy.h
_NO_COPIES, _ABOVE_MEAN, _ABOVE_NODE, _AT_RANK_LOAD = range(4)


@dataclass(frozen=True)
class Candidate:
    """One way to make a plan.

    Args:
        cap: how much load a rank may keep: ``"mean+1%"`` above the mean rank load, ``"node+1%"``
            above the mean of the fullest node (no copy needs to cross nodes then), both in
            multiples of 0.0001 %, ``"load#5"`` the fifth largest rank load, or ``"none"``, which
            makes the empty plan.
        policy: ``"F"`` (one flat step over all ranks, near nodes first), ``"F0"`` (the same without
            that preference), or ``"H"`` (nodes first) and five digits: room threshold 0-2, exporter
            0 hottest or 2 cover-fit, round up 0-1, item order 0-2, fit 0 single or 2 pair. An ``a``
            or ``A`` behind them prefers destination nodes that the tokens come from, if the share
            fits there or always; a ``w`` imports no more of an expert at once than the room of one
            rank; an ``l`` first makes copies for locality (objective ``Time`` only; without effect
            otherwise). ``"T"``: matching by optimal transport. Behind any of them, ``/1`` to ``/3``
            leaves the other slots of each rank empty. docs/algorithm.md explains each.

    Raises:
        ValueError: a name is not of these forms.
    """

    cap: str
    policy: str = "F"

    def __post_init__(self) -> None:
        check_type(self.cap, str, "cap")
        check_type(self.policy, str, "policy")
        self.pack()

    @functools.lru_cache(1024)  # noqa: B019 - candidates are few, and equal ones share an entry
    def pack(self) -> int:
        """The candidate as one integer, as the solve op takes it (csrc/core/policy.h)."""
        rule, value = self._parse_cap()
        return rule << 56 | value << 16 | self._parse_policy()

    def _parse_cap(self) -> tuple[int, int]:
        if self.cap == "none":
            return _NO_COPIES, 0
        if match := re.fullmatch(r"(mean|node)\+([0-9]+(?:\.[0-9]+)?)%", self.cap):
            rule = _ABOVE_MEAN if match[1] == "mean" else _ABOVE_NODE
            percent = Fraction(match[2])
            if percent > MAX_PERCENT:
                raise ValueError(f"cap {self.cap!r}: expected at most {MAX_PERCENT} %")
            ppm = percent * PARTS_PER_MILLION / 100
            if ppm.denominator != 1:
                raise ValueError(f"cap {self.cap!r}: expected a multiple of 0.0001 %")
            return rule, int(ppm)
        if match := re.fullmatch(r"load#([1-9][0-9]*)", self.cap):
            if int(match[1]) > MAX_RANKS:
                raise ValueError(f"cap {self.cap!r}: expected load#1 to load#{MAX_RANKS}")
            return _AT_RANK_LOAD, int(match[1])
        raise ValueError(f"cap {self.cap!r}: expected 'mean+1%', 'node+1%', 'load#5' or 'none'")

    def _parse_policy(self) -> int:
        match = re.fullmatch(
            r"(?:(F0?)|(T)|H([012])([02])([01])([012])([02])([aA]?)(w?)(l?))(?:/([123]))?",
            self.policy,
        )
        if not match:
            raise ValueError(
                f"policy {self.policy!r}: expected 'F', 'F0', 'T', or 'H' with five digits like "
                "'H22112' (0-2, 0 or 2, 0-1, 0-2, 0 or 2), then a or A, w and l, in this order; "
                "behind any of them '/1' to '/3' for that many copies on a rank at most"
            )
        flat, transport, *digits, affinity, whole, local, most = match.groups()
        rank_copies = int(most or 0) << 14
        if flat:
            return rank_copies | (flat == "F") << 1
        if transport:
            return rank_copies | 1 << 12 | 1 << 1
        threshold, exporter, round_up, order, fit = (int(digit) for digit in digits)
        return (
            1
            | 1 << 1
            | threshold << 2
            | (exporter == 2) << 4
            | round_up << 5
            | order << 6
            | (fit == 2) << 8
            | {"": 0, "a": 1, "A": 2}[affinity] << 9
            | bool(local) << 11
            | bool(whole) << 13
            | rank_copies
        )


EMPTY_PLAN = Candidate("none")


SOLVERS = ("portfolio", "taot")

# A list for ``Balance(t)``, chosen by benchmarks/choose_portfolio.py: every prefix is what a greedy
# choice takes first. "0.5t" is half of the tolerance. Tighter caps than t sometimes need fewer
# copies by luck, looser ones serve where t cannot be met.
BALANCE = """
    mean+1t:H22122a mean+1t:F mean+1t:H00122aw mean+0.9t:F0 mean+1t:H10012 mean+1%:F0
    mean+1t:H00120a mean+1t:H10122A mean+20%:H02110 mean+1t:H02110aw mean+5%:F0 mean+1t:H20022
    mean+1t:H22122w mean+0.9t:H12122 mean+1t:H02000A mean+1t:H10120w mean+1%:H12112
    mean+0.75t:H22122 mean+0.2%:F0 mean+1t:H02112a mean+4t:H02002 mean+1t:H22122A mean+0.9t:H20122
    mean+1.5t:H02112 mean+0.9t:H12022 mean+1t:H10112aw mean+1t:H22010a mean+1t:H12120
    load#8:H20110 mean+1t:H00102a mean+0.75t:F mean+1t:H10000A mean+1t:H12002 mean+5%:H22020
    mean+0.5t:H10122 mean+0.75t:F0 mean+1t:H20012aw mean+0.75t:H20010 mean+2t:F0 mean+0.9t:H00100
    mean+1t:H12122aw mean+0.25t:F mean+0.75t:H10000 mean+1t:H22120 mean+1t:H22012A node+1t:H00002
    mean+1t:H20100A mean+4t:F0 mean+1t:H02112w mean+1t:H02022a mean+1t:H12110A mean+2t:H00110
    mean+0.5t:H02022 mean+1t:H22102 mean+1t:H10022 mean+0.75t:H02022 mean+1t:H20122
    mean+0.9t:H02112 mean+0.9t:H00020 mean+1t:H22102aw mean+0.9t:F mean+1t:H10120A
    mean+0.75t:H12022
""".split()

# The same for clusters of one node, where policies by nodes differ only in the fit (H00000 and
# H00002), so that more caps can be tried.
ONE_NODE = """
    mean+1t:H00002 mean+30%:H00000 mean+1%:H00000 mean+0.95t:H00000 mean+3%:H00002 mean+10%:H00000
    mean+0.8t:H00002 mean+0.95t:H00002 mean+2%:H00000 mean+0.6t:H00002 mean+0.5%:H00000
    mean+0.975t:H00002 mean+0.875t:H00000 load#15:H00000 mean+0.9t:H00002 mean+0.4t:H00002
    mean+1.75t:H00000 mean+0.7t:H00002 mean+3t:H00002 mean+0.85t:H00002 mean+0.75t:H00002
    mean+4t:H00000 mean+0.5t:H00002 mean+0.2t:H00002 mean+1%:H00002 mean+0.925t:H00002
    mean+1.1t:H00000 mean+0.55t:H00002 mean+0.775t:H00002 mean+0.65t:H00002 mean+1.5t:H00000
    mean+0.875t:H00002 mean+0.675t:H00002 mean+0.2%:H00000 mean+0.85t:H00000 mean+2t:H00000
    mean+0.1t:H00000 mean+0.725t:H00000 mean+1.25t:H00002 mean+0.45t:H00002 mean+0.25t:H00002
    mean+2.5t:H00002 mean+0.825t:H00002 mean+2.5t:H00000 mean+1.1t:H00002 load#2:H00000
    mean+1.25t:H00000 mean+0.05%:H00000
""".split()

# A list for ``Even``: every prefix of it is the best of its length over many loads.
GENERAL = tuple(
    Candidate(*text.split(":"))
    for text in """
    mean+0%:H22112 mean+5%:H22112 mean+1%:H02122 node+1%:H22112 mean+0.2%:H02122 mean+10%:H20122
    mean+2%:H22112 mean+0%:F mean+0.5%:H02122 mean+0.01%:H20122 mean+1%:H12120 mean+0.01%:F0
    mean+0.5%:H12012 mean+0.2%:H20020 mean+0.5%:F mean+0.04%:H10122 mean+2%:H20020
    mean+0.01%:H12012 mean+1%:H20122 load#5:H20020 mean+5%:H02122 mean+0.5%:H10122
    mean+0.2%:H12120 mean+2%:H12012 mean+0.2%:F0 mean+10%:H02122 mean+2%:H02122 mean+0.5%:H22112
    mean+0%:H10122 mean+6%:H12012 mean+20%:H22112 node+2%:H22112 mean+1%:F mean+1%:H22112
    mean+0.2%:H10022 mean+10%:H12120 mean+0.01%:H02122 mean+5%:H10022 mean+1%:H20020
    mean+0.025%:H10122 load#2:H22112 mean+0.2%:F mean+0.7%:F0 mean+2%:H20122 mean+1%:H10022
    mean+0.01%:H10022 mean+5%:H20122 mean+5%:F mean+0.5%:H12120 mean+0.01%:F mean+0.2%:H22112
    mean+0.06%:H12012 mean+0.5%:H20122 mean+0.04%:F0 mean+1.6%:H20122 mean+5%:H20020
    mean+0.4%:H02122 mean+2%:H10022 mean+0.2%:H10122 mean+10%:F mean+2%:F mean+1%:H12012
    mean+0.2%:H12012
    """.split()
)

# A list for ``Time``: every prefix is what a greedy choice takes first, over five model shapes on
# four clusters, three numbers of slots and three of tokens (benchmarks/choose_portfolio.py).
TIME = tuple(
    Candidate(*text.split(":"))
    for text in """
    mean+5%:H20122al mean+15%:H22112/1 mean+2%:F0/1 load#5:H12120wl mean+30%:H02122al/1
    mean+1%:H22112a/2 mean+10%:H10122wl/1 mean+50%:H22112/1 mean+2%:H10122Al node+0%:F0/1
    node+20%:F/1 mean+1%:H02122wl node+5%:F0/1 load#12:H20122l mean+5%:H12120w/1
    mean+2%:H22112/1 mean+1%:F0/1 load#3:F0/1 mean+20%:H12120l/2 mean+75%:H02122 node+2%:F/1
    mean+1%:H10122Al/2 mean+10%:H12120l/2 mean+0%:H12012/1 load#2:H12120Al/1 mean+5%:H12120/1
    mean+0%:F0/1 mean+15%:H12120Al/2 mean+5%:H02122al/1 mean+30%:H20122a/1 load#5:F0/1
    load#8:H12012w/2 mean+150%:F0 mean+1%:F/2 mean+10%:H02122a mean+2%:H20020l/2
    mean+15%:H22112w/1 mean+50%:H02122a load#20:H12120al/2 node+2%:F0/1 mean+2%:H12120w/2
    load#5:H12012/1 mean+5%:H12012Al/1 mean+5%:H20122Al/1 node+5%:F/1 mean+20%:H02122l/1
    mean+2%:H10122/2 mean+50%:H20122Al node+10%:F/1 mean+5%:F/1 mean+2%:H02122Al
    mean+10%:H22112Al/1 mean+1%:H22112/1 mean+10%:F/1 mean+1%:H20020l mean+2%:H20122/1
    load#20:F0/2 mean+0%:H02122wl mean+10%:F0/1 mean+15%:H20020a/1 mean+15%:H02122a
    mean+20%:H10122a load#8:F0/1 load#5:H22112w/1 load#20:H22112l mean+0%:H10122a/2
    """.split()
)

# Caps of "taot", in percent above the mean, and in parts of a tolerance. The paper's cap is the
# mean; the looser it is, the fewer copies.
_TRANSPORT_CAPS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
_TRANSPORT_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def transport_candidates(objective: Objective) -> tuple[Candidate, ...]:
    """What ``solver="taot"`` tries: excess and room matched by optimal transport, at some caps."""
    percent = list(_TRANSPORT_CAPS)
    if isinstance(objective, Balance):
        percent += [share * objective.tolerance * 100 for share in _TRANSPORT_SHARES]
    caps = dict.fromkeys(f"mean+{x:.4f}%" for x in percent)  # a tolerance of 0 gives one cap only
    return (EMPTY_PLAN, *(Candidate(cap, "T") for cap in caps))


def _with_smaller_limits(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Every candidate, and behind them all with fewer copies on a rank.

    What is tried with S slots is then tried with S + 1 too (up to 4), so a slot more never costs
    predicted time.
    """
    chosen = dict.fromkeys(candidates)
    for candidate in tuple(chosen):
        steps, _, most = candidate.policy.partition("/")
        for fewer in range(1, int(most or 4)):
            chosen.setdefault(Candidate(candidate.cap, f"{steps}/{fewer}"))
    return tuple(chosen)


def _at(text: str, tolerance_ppm: int) -> Candidate:
    """A candidate of BALANCE for a tolerance."""
    cap, policy = text.split(":")
    if match := re.fullmatch(r"(mean|node)\+([\d.]+)t", cap):
        ppm = min(round(float(match[2]) * tolerance_ppm), MAX_PERCENT * PARTS_PER_MILLION // 100)
        cap = f"{match[1]}+{ppm * 100 / PARTS_PER_MILLION:.4f}%"
    return Candidate(cap, policy)


@functools.lru_cache
def default_candidates(objective: Objective, num_nodes: int = 2) -> tuple[Candidate, ...]:
    """The candidates that ``solve`` tries when none are given: the empty plan first.

    ``num_nodes``: of the cluster. ``Balance`` has a list for one node, and one for more.
    """
    if isinstance(objective, Time):
        return (EMPTY_PLAN, *_with_smaller_limits(TIME))
    if isinstance(objective, Balance):
        templates = ONE_NODE if num_nodes == 1 else BALANCE
        return (EMPTY_PLAN, *(_at(text, objective.tolerance_ppm) for text in templates))
    return (EMPTY_PLAN, *GENERAL)


def choose_candidates(
    objective: Objective, solver: str, candidates: Sequence[Candidate] | None, num_nodes: int
) -> tuple[Candidate, ...]:
    """The given candidates, or those of the solver for so many nodes, behind the empty plan.

    Raises:
        TypeError: something that is no Candidate.
        ValueError: an unknown solver, candidates for a solver that has its own, or more candidates
            than a solve can take.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver={solver!r}; expected one of {', '.join(SOLVERS)}")
    if candidates is None:
        if solver == "taot":
            return transport_candidates(objective)
        return default_candidates(objective, num_nodes)
    if solver != "portfolio":
        raise ValueError(
            f"solver={solver!r} brings its own candidates; leave candidates=None, or use "
            "solver='portfolio'"
        )
    if not isinstance(candidates, Sequence):
        raise TypeError(
            f"candidates is a {type(candidates).__name__}; expected a list of topoep.Candidate"
        )
    for candidate in candidates:
        if not isinstance(candidate, Candidate):
            raise TypeError(
                f"candidates holds a {type(candidate).__name__}; expected topoep.Candidate"
            )
    if len(candidates) >= MAX_CANDIDATES:
        raise ValueError(
            f"{len(candidates)} candidates; expected at most {MAX_CANDIDATES - 1} besides the "
            "empty plan (kMaxCandidates)"
        )
    return (EMPTY_PLAN, *candidates)
