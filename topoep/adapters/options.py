# SPDX-License-Identifier: Apache-2.0
"""The options that all adapters take, checked when an adapter is turned on, and their JSON forms.

A framework may read its options from JSON. What a balancer takes as an object can therefore be
given as a JSON object with the arguments of its class::

    "objective": "even"                             topoep.Even()
    "objective": {"name": "balance", "tolerance": 0.02}
                                                    topoep.Balance(tolerance=0.02)
    "objective": {"name": "time", "cost_model": {"hidden": 4096, "intermediate": 1408}}
                                                    Time(CostModel.from_model(hidden=4096, ..))
    "topology": {"num_nodes": 4, "ranks_per_node": 8}
                                                    topoep.Topology(num_nodes=4, ranks_per_node=8)
    "candidates": [{"cap": "mean+1%", "policy": "F"}]
                                                    [topoep.Candidate("mean+1%", "F")]

A cost model is that of ``CostModel.from_model`` where ``hidden`` is given, of
``CostModel.measured`` where ``token_us`` is, and the constants themselves otherwise.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import nn

from topoep.balancer import MAX_SLOT_BUFFERS, REPLICA_POLICIES
from topoep.checks import check_choice, check_int, check_range, check_type, closest
from topoep.cost_model import CostModel
from topoep.objective import Balance, Even, Objective, Time, check_objective
from topoep.plan import MAX_SPARE_SLOTS, Plan
from topoep.portfolio import SOLVERS, Candidate, choose_candidates
from topoep.topology import Topology
from topoep.transports import TRANSPORTS
from topoep.transports.plane import DEFAULT_COMM_SMS, PlaneSettings

Made = TypeVar("Made")

#: Called with a layer's module and each plan made for it.
OnPlan = Callable[[nn.Module, Plan], None]

_OBJECTIVES: dict[str, Callable[..., Objective]] = {"balance": Balance, "even": Even, "time": Time}


@dataclass(frozen=True)
class BalancerOptions:
    """The arguments of a :class:`topoep.Balancer` that a framework does not decide.

    The topology is that of the group (:meth:`topoep.Topology.from_group`) if None. Objects may be
    given in their JSON form (see the module).

    Raises:
        TypeError, ValueError: names the option, what it is, and what is expected.
    """

    spare_slots: int = 2
    topology: Topology | None = None
    transport: str = "auto"
    objective: Objective | None = None
    replica_policy: str = "refetch"
    slot_buffers: int = 1
    comm_sms: int = DEFAULT_COMM_SMS
    solver: str = "portfolio"
    candidates: Sequence[Candidate] | None = None

    def __post_init__(self) -> None:
        for name, read in (
            ("topology", _topology),
            ("objective", _objective),
            ("candidates", _candidates),
        ):
            object.__setattr__(self, name, read(getattr(self, name)))
        check_range(self.spare_slots, "spare_slots", 0, MAX_SPARE_SLOTS)
        check_choice(self.transport, "transport", TRANSPORTS)
        check_choice(self.replica_policy, "replica_policy", REPLICA_POLICIES)
        check_range(self.slot_buffers, "slot_buffers", 1, MAX_SLOT_BUFFERS)
        nodes = 1 if self.topology is None else self.topology.num_nodes
        PlaneSettings(comm_sms=check_int(self.comm_sms, "comm_sms")).roles(nodes)
        check_choice(self.solver, "solver", SOLVERS)
        choose_candidates(check_objective(self.objective), self.solver, self.candidates, nodes)


def read_options(
    adapter: str, given: Mapping[str, Any], on_plan: OnPlan | None, others: Sequence[str] = ()
) -> BalancerOptions:
    """The options that an adapter was called with.

    Args:
        adapter: its function, for messages.
        given: what a balancer is to be made with.
        on_plan: is checked, too.
        others: what the adapter takes besides.

    Raises:
        TypeError: an option that does not exist, or of another type.
        ValueError: a value that is not possible.
    """
    names = [field.name for field in dataclasses.fields(BalancerOptions)]
    _check_names(adapter, given, [*others, "on_plan", *names])
    _check_on_plan(on_plan)
    return BalancerOptions(**given)


def _check_names(what: str, given: Mapping[str, Any], accepted: Sequence[str]) -> None:
    for name in given:
        if name not in accepted:
            raise TypeError(
                f"{what} has no option {name!r}{closest(name, accepted)}; expected some of "
                f"{', '.join(accepted)}"
            )


def _check_on_plan(on_plan: object) -> None:
    """Raises TypeError unless it can be called with a module and a plan."""
    if on_plan is None:
        return
    if not callable(on_plan):
        raise TypeError(
            f"on_plan is a {type(on_plan).__name__}; expected a function that takes a layer's "
            "module and a plan (it cannot be given as JSON)"
        )
    try:
        signature = inspect.signature(on_plan)
    except (TypeError, ValueError):  # some built-in functions do not say
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            f"on_plan takes {signature}; expected a function that takes a layer's module and a plan"
        ) from None


# ---- JSON forms ----------------------------------------------------------------------------------


def _make(what: str, make: Callable[..., Made], given: Mapping[str, Any]) -> Made:
    """Calls with the members of a JSON object, whose names are checked first."""
    parameters = inspect.signature(make).parameters
    _check_names(what, given, list(parameters))
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in given
    ]
    if missing:
        raise TypeError(f"{what} lacks {', '.join(missing)}; expected {', '.join(parameters)}")
    try:
        return make(**given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}: {error}") from None


def _topology(given: object) -> Topology | None:
    if isinstance(given, Mapping):
        return _make("topology", Topology, given)
    if given is None or isinstance(given, Topology):
        return given
    raise TypeError(
        f"topology is a {type(given).__name__}; expected a topoep.Topology, or in JSON "
        '{"num_nodes": .., "ranks_per_node": ..} or {"node_of_rank": [..]}'
    )


def _objective(given: object) -> Objective | None:
    if isinstance(given, str):
        given = {"name": given}
    if isinstance(given, Mapping):
        members = dict(given)
        name = check_choice(members.pop("name", None), "objective.name", tuple(_OBJECTIVES))
        if isinstance(members.get("cost_model"), Mapping):
            members["cost_model"] = _cost_model(members["cost_model"])
        return _make(f"objective {name!r}", _OBJECTIVES[name], members)
    if given is None or isinstance(given, Objective):
        return given
    raise TypeError(
        f"objective is a {type(given).__name__}; expected a topoep.Balance, Even or Time, or in "
        'JSON {"name": "balance", "tolerance": ..}, {"name": "even"} or {"name": "time", '
        '"cost_model": {..}}'
    )


def _cost_model(given: Mapping[str, Any]) -> CostModel:
    make: Callable[..., CostModel] = CostModel
    if "hidden" in given or "intermediate" in given:
        make = CostModel.from_model
    elif "token_us" in given:
        make = CostModel.measured
    return _make("objective.cost_model", make, given)


def _candidates(given: object) -> tuple[Candidate, ...] | None:
    """A tuple, so that options can be compared and hashed."""
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(
            f"candidates is a {type(given).__name__}; expected a list of topoep.Candidate, or in "
            'JSON [{"cap": "mean+1%", "policy": "F"}, ..]'
        )
    return tuple(
        _make(f"candidates[{i}]", Candidate, item)
        if isinstance(item, Mapping)
        else check_type(item, Candidate, f"candidates[{i}]")
        for i, item in enumerate(cast(Sequence[object], given))
    )
