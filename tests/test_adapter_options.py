# SPDX-License-Identifier: Apache-2.0
"""Options of adapters are checked when an adapter is turned on, and may be given as JSON."""

from __future__ import annotations

import json

import pytest
from torch import nn

from topoep import Balance, Candidate, CostModel, Even, Time, Topology
from topoep.adapters import deepspeed, megatron, transformers
from topoep.adapters.options import BalancerOptions, read_options

# Whether a framework is installed does not matter: options are looked at first.
ADAPTERS = {
    "deepspeed.enable": lambda **options: deepspeed.enable(nn.Identity(), **options),
    "megatron.enable": lambda **options: megatron.enable(nn.Identity(), **options),
    "transformers.register": transformers.register,
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spare_slot": 2}, r"has no option 'spare_slot' \(did you mean 'spare_slots'\?\)"),
        ({"onplan": print}, r"has no option 'onplan' \(did you mean 'on_plan'\?\)"),
        ({"xyz": 1}, r"has no option 'xyz'; expected some of .*on_plan, spare_slots, topology"),
        ({"on_plan": "print"}, r"on_plan is a str; expected a function .* cannot be given as JSON"),
        ({"on_plan": lambda plan: None}, r"on_plan takes \(plan\); expected a function that takes"),
        ({"spare_slots": "2"}, "spare_slots is '2', a str; expected an int"),
        ({"transport": None}, "transport is None, a NoneType; expected one of auto, nccl"),
        ({"topology": 4}, r'topology is a int; .* in JSON \{"num_nodes"'),
        ({"objective": 0.01}, r'objective is a float; .* in JSON \{"name": "balance"'),
        ({"candidates": "mean+1%"}, r'candidates is a str; .* in JSON \[\{"cap"'),
        ({"candidates": [1]}, r"candidates\[0\] is a int; expected a topoep.Candidate"),
    ],
)
def test_options_of_another_name_or_type(adapter, options, message):
    with pytest.raises(TypeError, match=message) as caught:
        ADAPTERS[adapter](**options)
    if "has no option" in message:
        assert str(caught.value).startswith(adapter)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spare_slots": 17}, "spare_slots=17; expected 0 to 16"),
        ({"transport": "NCLL"}, r"transport='NCLL' \(did you mean 'nccl'\?\); expected one of"),
        ({"replica_policy": "fetch"}, r"replica_policy='fetch' \(did you mean 'refetch'\?\)"),
        ({"slot_buffers": 0}, "slot_buffers=0; expected 1 to 64"),
        ({"comm_sms": 1}, "comm_sms=1; expected at least 2"),
        ({"comm_sms": 2, "topology": Topology(2, 2)}, "comm_sms=2; expected at least 3"),
        ({"solver": "tout"}, r"solver='tout' \(did you mean 'taot'\?\)"),
        ({"solver": "taot", "candidates": []}, "brings its own candidates"),
    ],
)
def test_options_out_of_range(adapter, options, message):
    with pytest.raises(ValueError, match=message):
        ADAPTERS[adapter](**options)


def test_functions_that_see_plans():
    for on_plan in (lambda layer, plan: None, lambda *both: None, print, max, nn.Identity()):
        read_options("adapter", {}, on_plan)


COSTS = {
    "token": 1,
    "instance": 2,
    "copy": 3,
    "cross_copy": 4,
    "grad": 5,
    "cross_grad": 6,
    "network_row": 7,
}
MEASURED = {"token_us": 1.0, "copy_us": 2.0, "cross_copy_us": 3.0, "network_row_us": 0.5}
MODEL = {"hidden": 1024, "intermediate": 512, "hardware": "H800"}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("objective", '"even"', Even()),
        ("objective", '{"name": "balance", "tolerance": 0.02}', Balance(0.02)),
        ("objective", '{"name": "even", "cross_weight": 5}', Even(5)),
        *(
            ("objective", json.dumps({"name": "time", "cost_model": costs}), Time(make(**costs)))
            for costs, make in (
                (COSTS, CostModel),
                (MEASURED, CostModel.measured),
                (MODEL, CostModel.from_model),
            )
        ),
        ("topology", '{"num_nodes": 2, "ranks_per_node": 4}', Topology(2, 4)),
        ("topology", '{"node_of_rank": [0, 1, 0, 1]}', Topology(node_of_rank=[0, 1, 0, 1])),
        (
            "candidates",
            '[{"cap": "mean+1%"}, {"cap": "load#2", "policy": "H22112"}]',
            (Candidate("mean+1%"), Candidate("load#2", "H22112")),
        ),
        ("objective", "null", None),
    ],
)
def test_objects_as_json(name, text, expected):
    options = read_options("adapter", {name: json.loads(text)}, None)
    assert getattr(options, name) == expected
    made = BalancerOptions(**{name: expected})
    assert options == made
    assert hash(options) == hash(made)
    assert repr(options) == repr(made), "layers with the same options share a balancer by this"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"objective": "balanced"}, ValueError, r"objective.name='balanced' .*mean 'balance'"),
        ({"objective": {"tolerance": 1}}, TypeError, "objective.name is None"),
        (
            {"objective": {"name": "balance", "tolerence": 1}},
            TypeError,
            r"objective 'balance' has no option 'tolerence' \(did you mean 'tolerance'\?\)",
        ),
        (
            {"objective": {"name": "balance", "tolerance": -1}},
            ValueError,
            "objective 'balance': tolerance is -1",
        ),
        ({"objective": {"name": "time"}}, TypeError, "objective 'time' lacks cost_model"),
        (
            {"objective": {"name": "time", "cost_model": {"hidden": 4}}},
            TypeError,
            "objective.cost_model lacks intermediate",
        ),
        (
            {"objective": {"name": "time", "cost_model": {**MODEL, "hardware": "H900"}}},
            ValueError,
            "objective.cost_model: hardware 'H900'; presets are",
        ),
        ({"topology": {"nodes": 2}}, TypeError, "topology has no option 'nodes'"),
        ({"topology": {"num_nodes": 2}}, ValueError, "topology: Topology needs num_nodes and"),
        ({"candidates": [{"policy": "F"}]}, TypeError, r"candidates\[0\] lacks cap"),
        ({"candidates": [{"cap": "x"}]}, ValueError, r"candidates\[0\]: cap 'x': expected"),
    ],
)
def test_json_that_does_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        read_options("adapter", options, None)
