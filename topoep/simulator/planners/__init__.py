# SPDX-License-Identifier: Apache-2.0
"""The planners that a simulation compares, by name.

Those of others are restated from their public descriptions, to be compared with and to be read,
not to be fast; each module says where its rule comes from. What is compared is the plan: all get
the same transport, and tokens are split over holders in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from topoep.objective import Objective
from topoep.plan import PlanConfig, make_plan
from topoep.portfolio import choose_candidates
from topoep.simulator.placement import Placement
from topoep.simulator.planners import base, echo, eplb, llep, ultraep
from topoep.topology import Topology

Counts = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Simulated(ABC):
    """A planner that can be simulated.

    Args:
        name: as on the command line.
        label: for tables.
        planned: makes a plan for every microbatch.
        rerouted: rewrites ids.
        slow: restated in Python; a sample of the microbatches has to do.
        window: steps of history that it plans from; 0 for planners that see the microbatch itself.
    """

    name: str
    label: str
    planned: bool = True
    rerouted: bool = True
    slow: bool = False
    window: int = 0

    @abstractmethod
    def place(self, counts: Counts, history: Sequence[Counts | None]) -> Placement:
        """Places experts for counts ``[B, R, E]``.

        Args:
            counts: of B microbatches.
            history: for each of them the counts ``[R, E]`` of earlier steps, None if there are
                none.
        """


@dataclass(frozen=True, kw_only=True)
class NoCopies(Simulated):
    """Plain expert parallelism."""

    def place(self, counts: Counts, history: Sequence[Counts | None]) -> Placement:
        """See :class:`Simulated`."""
        return Placement.of_homes(counts)


@dataclass(frozen=True, kw_only=True)
class Solved(Simulated):
    """A planner of this package."""

    config: PlanConfig
    solver: str
    candidates: int | None = None

    def place(self, counts: Counts, history: Sequence[Counts | None]) -> Placement:
        """See :class:`Simulated`."""
        nodes = self.config.topology.num_nodes
        every = choose_candidates(self.config.objective, self.solver, None, nodes)
        candidates = every[: self.candidates]
        tensors = torch.from_numpy(np.ascontiguousarray(counts)).unbind()
        plans = [make_plan(self.config, tensor, candidates, None) for tensor in tensors]
        return Placement.of_plans(plans)


@dataclass(frozen=True, kw_only=True)
class Restated(Simulated):
    """Somebody else's planner, from its public description."""

    topology: Topology
    spare_slots: int
    plan: base.Planner
    slow: bool = True

    def place(self, counts: Counts, history: Sequence[Counts | None]) -> Placement:
        """See :class:`Simulated`."""
        quotas = []
        for one, past in zip(counts, history, strict=True):
            if self.window and past is None:
                quotas.append(base.home_quota(one))
            else:
                quotas.append(self.plan(one, self.topology, self.spare_slots, past))
        return Placement.of_quotas(counts, quotas, self.topology, moves_homes=self.window > 0)


#: Steps of history that EPLB plans from, and for which its plan then stays.
EPLB_WINDOW = 8

PLANNERS = ("none", "eplb", "llep", "echo", "ultraep", "taot", "topoep")


def make_planner(
    name: str,
    topology: Topology,
    experts: int,
    spare_slots: int,
    objective: Objective,
    candidates: int | None = None,
) -> Simulated:
    """The planner of that name.

    Args:
        name: one of ``PLANNERS``.
        topology: R ranks and their nodes.
        experts: E.
        spare_slots: S.
        objective: of TopoEP.
        candidates: how many of its candidates TopoEP tries; None: all.

    Raises:
        ValueError: an unknown name, or sizes that do not fit.
    """
    config = PlanConfig(topology, experts, spare_slots, objective)
    if name == "none":
        return NoCopies(name=name, label="none", planned=False, rerouted=False)
    if name == "topoep":
        return Solved(
            name=name, label="TopoEP", config=config, solver="portfolio", candidates=candidates
        )
    if name == "taot":
        return Solved(name=name, label="TAOT", config=config, solver="taot")
    restated: dict[str, tuple[str, base.Planner]] = {
        "eplb": ("EPLB", eplb.plan_hierarchical),
        "llep": ("LLEP-like", llep.plan),
        "echo": ("ECHO-like", echo.plan_one_shot),
        "ultraep": ("UltraEP-like", ultraep.plan_per_node),
    }
    if name not in restated:
        raise ValueError(f"planner {name!r}; expected one of {', '.join(PLANNERS)}")
    label, plan = restated[name]
    placed_ahead = name == "eplb"
    return Restated(
        name=name,
        label=label,
        topology=topology,
        spare_slots=spare_slots,
        plan=plan,
        planned=not placed_ahead,
        window=EPLB_WINDOW if placed_ahead else 0,
    )
