# SPDX-License-Identifier: Apache-2.0
"""Plans of earlier builds: what must not change without an entry in CHANGELOG.md.

``python -m tests.golden`` writes plans.json anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import topoep
from tests.strategies import COUNT_KINDS, Case, make_case
from topoep import Balance, CostModel, Even, Time

FILE = Path(__file__).with_name("plans.json")

_TOPOLOGIES = {
    "2x4": [0, 0, 0, 0, 1, 1, 1, 1],
    "strided": [0, 1, 2, 0, 1, 2],
    "uneven": [0, 0, 0, 0, 0, 1, 1, 2],
    "4x8": [rank // 8 for rank in range(32)],
}
_COST = CostModel.from_model(2048, 768, "bfloat16", "H100")
_PLANNERS = {
    "balance": {"objective": Balance(0.01)},
    "even": {"objective": Even()},
    "time": {"objective": Time(_COST)},
    "taot": {"objective": Balance(0.01), "solver": "taot"},
}


def cases() -> Iterator[tuple[str, Case]]:
    """Every kind of load on every topology."""
    for name, nodes in _TOPOLOGIES.items():
        for kind in COUNT_KINDS:
            yield (
                f"{name} {kind}",
                make_case(kind, 2026, node_of_rank=nodes, home_slots=4, spare_slots=2),
            )


def digest(case: Case, planner: str) -> str:
    """Of everything that a plan says."""
    plan = topoep.solve(case.tensor, case.topology, case.spare_slots, **_PLANNERS[planner])
    parts = (plan.slot_expert, plan.slot_source, plan.slot_tokens, plan.split())
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts)).hexdigest()[:16]


def digests() -> dict[str, dict[str, str]]:
    """By case, then by planner."""
    return {name: {p: digest(case, p) for p in _PLANNERS} for name, case in cases()}


def kept() -> dict[str, dict[str, str]]:
    """The digests in plans.json."""
    loaded: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return loaded
