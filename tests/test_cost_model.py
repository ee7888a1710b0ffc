# SPDX-License-Identifier: Apache-2.0
"""Constants of the cost model and predicted time, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topoep
from tests import strategies
from tests.strategies import Case, examples
from topoep import Candidate, CostModel, Hardware, Time, Topology, ops
from topoep.cost_model import MAX_COST, MAX_INTERFERENCE
from topoep.hardware import HARDWARE
from topoep.portfolio import EMPTY_PLAN

# Round numbers: 0.5 TFLOP/s, 86 GB/s of memory, 1 GB/s links and NICs, 2 NICs for 4 ranks.
ROUND = Hardware("round", 1e12, 0.5, 86e9, 1e9, 1e9, 2, 4, 0.5e9)
FREE = CostModel(
    token=0, instance=0, copy=0, cross_copy=0, grad=0, cross_grad=0, network_row=0, interference=0
)
COSTS = [f.name for f in dataclasses.fields(CostModel) if f.name not in ("interference", "sharded")]


# ---- from the shape of the model -----------------------------------------------------------------


def test_the_formulas_give_what_a_calculator_gives() -> None:
    # An expert of 3 * 100 * 10 weights. A row: GEMMs of 6000 FLOP, 12 ns; 860 bytes, 10 ns.
    assert CostModel.from_model(100, 10, hardware=ROUND) == CostModel(
        token=3 * 12 + 32,
        instance=3 * 96 * 12 + 140,  # half of 8 bytes for each weight: 12000 bytes, 139.5 ns
        copy=6000,
        cross_copy=3000,  # over 2 NICs
        grad=24000,  # 12000 bytes at half the bandwidth
        cross_grad=6000,
        network_row=100,  # a quarter of 200 bytes, 4 ranks on 2 NICs
        hide_forward=18,  # 0.8 * 22 = 17.6
        hide_backward=37,  # 0.8 * 46 = 36.8
        hide_grads=500_000,
        interference=100,
        sharded=True,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sharded": False}, {"cross_copy": 6000, "cross_grad": 12000, "sharded": False}),
        ({"dedup": False}, {"network_row": 400}),
        ({"overlap": 0.0}, {"hide_forward": 0, "hide_backward": 0}),
        ({"overlap": 0.5}, {"hide_forward": 11, "hide_backward": 23}),
        ({"hide_grads_us": 1.5}, {"hide_grads": 1500}),
        ({"hide_grads_us": 0}, {"hide_grads": 0}),
        ({"dtype": "float32"}, {"copy": 12000, "cross_copy": 6000}),
        ({"dtype": "float8"}, {"copy": 3000, "cross_copy": 1500}),
    ],
    ids=str,
)
def test_an_option_changes_what_it_names_and_nothing_else(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    standard = CostModel.from_model(100, 10, hardware=ROUND)
    changed = CostModel.from_model(100, 10, hardware=ROUND, **options)
    assert changed == dataclasses.replace(standard, **expected)


def test_nothing_is_free_however_small() -> None:
    tiny = CostModel.from_model(1, 1, hardware=dataclasses.replace(ROUND, flops=1e20))
    assert min(getattr(tiny, name) for name in COSTS if not name.startswith("hide")) == 1


def test_presets_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "cost-model.md").read_text()
    number = r"\s*(\d+(?:\.\d+)?)"
    row = (
        rf"\|\s*(\w+)\s*\|{number} TF\s*\|{number}\s*\|{number}\s*\|{number}[^|]*\|{number} x (\d+)"
    )
    listed = {}
    for name, *numbers in re.findall(row, page):
        tflops, efficiency, memory, link, nic, nics = map(float, numbers)
        listed[name] = (tflops, efficiency, 0.75 * memory, link, min(link, 170), nic, nics, nics)
    presets = {
        name: (h.flops / 1e12, h.efficiency, h.memory_bandwidth / 1e12, h.link_bandwidth / 1e9,
               h.grad_bandwidth / 1e9, h.nic_bandwidth / 1e9, h.nics_per_node, h.ranks_per_node)
        for name, h in HARDWARE.items()
    }  # fmt: skip
    assert len(presets) == 6
    assert presets.keys() == listed.keys()
    for name, values in presets.items():
        assert values == pytest.approx(listed[name])


@pytest.mark.parametrize("hardware", HARDWARE)
def test_a_preset_is_taken_by_its_name(hardware: str) -> None:
    model = CostModel.from_model(4096, 1536, hardware=hardware)
    assert model == CostModel.from_model(4096, 1536, hardware=HARDWARE[hardware])
    # The page: a copy in bytes weighs as much as 3 I tokens of D elements.
    tokens = 4096 * 1536 * 3 * 2 / HARDWARE[hardware].link_bandwidth
    assert model.copy == pytest.approx(tokens * 1e9, abs=1)


@settings(max_examples=examples(200))
@given(
    st.integers(1, 8192),
    st.integers(1, 8192),
    st.sampled_from(list(HARDWARE)),
    st.sampled_from(
        ["flops", "memory_bandwidth", "link_bandwidth", "nic_bandwidth", "grad_bandwidth"]
    ),
    st.floats(1.0, 10.0),
    st.booleans(),
)
def test_faster_hardware_never_costs_more(
    hidden: int, intermediate: int, name: str, part: str, factor: float, sharded: bool
) -> None:
    slow = HARDWARE[name]
    fast = dataclasses.replace(slow, **{part: getattr(slow, part) * factor})
    a, b = (CostModel.from_model(hidden, intermediate, "bfloat16", h, sharded=sharded)
            for h in (slow, fast))  # fmt: skip
    for field in COSTS:  # of what hides transfers there is less, too
        assert getattr(b, field) <= getattr(a, field)
    larger = CostModel.from_model(hidden + 1, intermediate + 1, hardware=slow, sharded=sharded)
    for field in COSTS:
        assert getattr(a, field) <= getattr(larger, field)


# ---- measured ------------------------------------------------------------------------------------

MEASURED = {"token_us": 3.0, "copy_us": 100.0, "cross_copy_us": 150.0, "network_row_us": 0.25}


def test_measured_microseconds_become_nanoseconds() -> None:
    assert CostModel.measured(**MEASURED) == CostModel(
        token=3000,
        instance=0,
        copy=100_000,
        cross_copy=150_000,
        grad=200_000,  # twice the weights in bf16, where nothing was measured
        cross_grad=300_000,
        network_row=250,
        hide_forward=800,  # a third of the token, 0.8 of that
        hide_backward=1600,
        hide_grads=0,
    )
    given = CostModel.measured(
        **MEASURED,
        instance_us=1.5,
        grad_us=7,
        cross_grad_us=8,
        forward_share=0.5,
        overlap=1.0,
        hide_grads_us=9,
        sharded=False,
    )
    assert given == CostModel(
        3000, 1500, 100_000, 150_000, 7000, 8000, 250, 1500, 1500, 9000, sharded=False
    )


# ---- errors: the name, what was given, what was expected -----------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"hidden": 0}, ValueError, "hidden=0, intermediate=10; both must be positive"),
        ({"intermediate": -1}, ValueError, "hidden=100, intermediate=-1; both must be positive"),
        ({"hidden": 10.0}, TypeError, "hidden is 10.0, a float; expected an int"),
        ({"dtype": "int8"}, ValueError, "dtype 'int8'; expected one of bfloat16, .*float8"),
        (
            {"hardware": "H1000"},
            ValueError,
            "hardware 'H1000'; presets are A100, .*topoep.Hardware",
        ),
        ({"hardware": 8}, TypeError, "hardware is a int; expected a topoep.Hardware"),
        ({"sharded": 1}, TypeError, "sharded is a int; expected a bool"),
        ({"dedup": None}, TypeError, "dedup is a NoneType; expected a bool"),
        ({"overlap": 1.5}, ValueError, "overlap is 1.5; expected a number from 0 to 1"),
        ({"overlap": "most"}, TypeError, "overlap is 'most', a str; expected a number"),
        ({"hide_grads_us": -1}, ValueError, "hide_grads_us is -1; .* of 0 or more microseconds"),
        ({"hide_grads_us": math.inf}, ValueError, "hide_grads_us is inf; expected a number"),
        (
            {"hidden": 10**6, "intermediate": 10**6},
            ValueError,
            r"CostModel.token=\d+; expected 0 to 536870912 ns \(kMaxCost\)",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_from_model_says_what_is_wrong(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    shape = {"hidden": 100, "intermediate": 10, "hardware": ROUND}
    with pytest.raises(kind, match=message):
        CostModel.from_model(**(shape | arguments))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"token_us": -1.0}, ValueError, "token_us is -1.0; expected a number from 0 to"),
        ({"copy_us": math.nan}, ValueError, "copy_us is nan; expected a number from 0 to"),
        ({"cross_copy_us": 1e9}, ValueError, r"0 to 536871 microseconds \(kMaxCost\)"),
        ({"network_row_us": None}, TypeError, "network_row_us is None, a NoneType"),
        ({"instance_us": True}, TypeError, "instance_us is True, a bool; expected a number"),
        ({"grad_us": math.inf}, ValueError, "grad_us is inf"),
        ({"cross_grad_us": "9"}, TypeError, "cross_grad_us is '9', a str; expected a number"),
        ({"copy_us": 5e5}, ValueError, r"CostModel.grad=1000000000; expected .*kMaxCost"),
        ({"forward_share": 1.1}, ValueError, "forward_share is 1.1; expected .* from 0 to 1"),
        ({"overlap": -0.1}, ValueError, "overlap is -0.1; expected .* from 0 to 1"),
        ({"hide_grads_us": -2}, ValueError, "hide_grads_us is -2; expected a number from 0 to"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_measured_says_what_is_wrong(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        CostModel.measured(**(MEASURED | arguments))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"flops": 0}, ValueError, "Hardware.flops is 0; expected a positive number"),
        ({"efficiency": 62}, ValueError, "Hardware.efficiency is 62; expected .* from 0 to 1"),
        ({"memory_bandwidth": -1.0}, ValueError, "Hardware.memory_bandwidth is -1.0"),
        ({"nic_bandwidth": math.nan}, ValueError, "Hardware.nic_bandwidth is nan"),
        ({"link_bandwidth": "fast"}, TypeError, "Hardware.link_bandwidth is 'fast', a str"),
        ({"nics_per_node": 0.5}, TypeError, "Hardware.nics_per_node is 0.5, a float; .* an int"),
        ({"ranks_per_node": 0}, ValueError, "Hardware.ranks_per_node is 0; .* positive number"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_hardware_says_what_is_wrong(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        dataclasses.replace(ROUND, **arguments)


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COSTS)
def test_a_cost_is_taken_up_to_its_limit(name: str) -> None:
    assert getattr(dataclasses.replace(FREE, **{name: MAX_COST}), name) == MAX_COST
    for wrong in (MAX_COST + 1, -1):
        with pytest.raises(ValueError, match=rf"CostModel.{name}={wrong}; .*\(kMaxCost\)"):
            dataclasses.replace(FREE, **{name: wrong})
    with pytest.raises(TypeError, match=f"CostModel.{name} is 1.0, a float; expected an int"):
        dataclasses.replace(FREE, **{name: 1.0})


def test_interference_is_taken_up_to_its_limit() -> None:
    assert dataclasses.replace(FREE, interference=MAX_INTERFERENCE).interference == 1000
    for wrong in (1001, -1):
        with pytest.raises(ValueError, match=rf"CostModel.interference={wrong}; .*kMaxInterf"):
            dataclasses.replace(FREE, interference=wrong)
    with pytest.raises(TypeError, match="sharded is a int; expected a bool"):
        dataclasses.replace(FREE, sharded=1)


def test_the_op_keeps_the_limits_too() -> None:
    counts, table = torch.zeros(1, 1, dtype=torch.int32), Topology(1, 1).table()
    ints = Time(FREE).to_ints()
    for index, wrong, message in (
        (3, MAX_COST + 1, "objective.3. is 536870913; expected 0 to 536870912 .kMaxCost."),
        (12, -1, "objective.12. is -1; expected 0 to"),
        (13, 1001, "interference is 1001; expected 0 to 1000 .kMaxInterference."),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.solve(
                counts,
                table,
                0,
                [EMPTY_PLAN.pack()],
                [*ints[:index], wrong, *ints[index + 1 :]],
                -1,
            )
    with pytest.raises(RuntimeError, match="objective has 14 numbers, expected 15"):
        ops.solve(counts, table, 0, [EMPTY_PLAN.pack()], ints[:-1], -1)


def test_the_largest_costs_of_the_largest_loads_are_no_overflow() -> None:
    # 2^31 - 1 tokens on one expert that all comes over the network: nearly 2^60 ns of compute and
    # 2^62 of tokens, which is told as 2^61.
    counts = torch.zeros(2, 2, dtype=torch.int32)
    counts[1, 0] = 2**31 - 1
    most = dict.fromkeys(COSTS, MAX_COST)
    objective = Time(CostModel(**most, interference=MAX_INTERFERENCE))
    plan = topoep.solve(counts, Topology(2, 1), 1, objective, candidates=[])
    assert int(plan.stats()["predicted_ns_before"]) == 2**61
    compute = Time(dataclasses.replace(FREE, token=MAX_COST))
    plan = topoep.solve(counts, Topology(2, 1), 1, compute, candidates=[])
    assert int(plan.stats()["predicted_ns_before"]) == (2**31 - 1) * 2**29
    tokens = Time(dataclasses.replace(FREE, network_row=2**27))
    plan = topoep.solve(counts, Topology(2, 1), 1, tokens, candidates=[])
    assert int(plan.stats()["predicted_ns_before"]) == (2**31 - 1) * 2**27 * 4


# ---- predicted time ------------------------------------------------------------------------------
# The plan of the README, nodes 0 0 1 1: expert 0 of rank 0 is copied to ranks 1, 2 and 3, 80 tokens
# each. Loads 480 160 160 160 become 240 each, tokens into nodes 320 and 160 become 160 each. Rank 0
# serves a copy in its node and one across, rank 2 fetches across and serves rank 3. The home
# experts of a rank compute 160 tokens.

COUNTS = torch.full((4, 8), 20, dtype=torch.int32)
COUNTS[:, 0] = 100
TOKEN = 10_000


def predicted(**costs: Any) -> tuple[int, int]:
    """Without and with the copies of the plan above."""
    objective = Time(dataclasses.replace(FREE, token=TOKEN, **costs))
    candidates = [Candidate("mean+0%", "H22112")]
    plan = topoep.solve(COUNTS, Topology(2, 2), 1, objective, candidates=candidates)
    assert plan.slot_source.flatten().tolist() == [-1, 0, 0, 2]
    stats = plan.stats()
    return int(stats["predicted_ns_before"]), int(stats["predicted_ns"])


@pytest.mark.parametrize(
    ("costs", "before", "after"),
    [
        ({}, 0, 0),
        ({"instance": 7}, 0, 7),
        ({"network_row": 3}, 160 * 3 * 4, 80 * 3 * 4),
        # Rank 0 sends a whole copy, and half of another: the other half leaves by its own NIC.
        ({"copy": 101}, 0, 2 * (101 + 51)),
        ({"copy": 101, "sharded": False}, 0, 2 * 101),
        ({"cross_copy": 500}, 0, 2 * 500),
        ({"copy": 101, "cross_copy": 153}, 0, 2 * 153),
        ({"grad": 101}, 0, 101 + 51),
        ({"cross_grad": 300}, 0, 300),
        ({"cross_grad": 300, "hide_grads": 100}, 0, 200),
        ({"cross_grad": 300, "hide_grads": 100, "interference": 55}, 0, 205),
        ({"cross_grad": 300, "hide_grads": 400, "interference": 1000}, 0, 300),
        ({"cross_copy": 500, "hide_forward": 2}, 0, 180 + 500),
        ({"cross_copy": 500, "hide_backward": 3}, 0, 500 + 20),
        ({"cross_copy": 500, "hide_backward": 4}, 0, 500),
        ({"cross_copy": 500, "hide_forward": 2, "hide_backward": 3, "interference": 10}, 0, 208),
    ],
    ids=str,
)
def test_each_term_of_predicted_time(costs: dict[str, Any], before: int, after: int) -> None:
    assert predicted(**costs) == (480 * TOKEN + before, 240 * TOKEN + after)


@settings(max_examples=examples(200))
@given(strategies.cases(), strategies.cost_models(), st.sampled_from(COSTS), st.data())
def test_predicted_time_grows_with_every_cost(
    case: Case, model: CostModel, name: str, data: st.DataObject
) -> None:
    # For what hides transfers, and for policies whose copies depend on costs, it need not.
    if name.startswith("hide"):
        name = "token"
    candidates = [Candidate("mean+1%", "H22112"), Candidate("mean+5%", "F"), Candidate("node+0%")]
    cost = getattr(model, name)
    more = dataclasses.replace(model, **{name: data.draw(st.integers(cost, MAX_COST))})
    times = []
    for costs in (model, more):
        plan = topoep.solve(
            case.tensor, case.topology, case.spare_slots, Time(costs), candidates=candidates
        )
        times.append({k: int(v) for k, v in plan.stats().items() if k.startswith("predicted")})
    assert times[0]["predicted_ns_before"] <= times[1]["predicted_ns_before"]
    assert times[0]["predicted_ns"] <= times[1]["predicted_ns"]


@settings(max_examples=examples(200))
@given(
    strategies.cases(kinds=[kind for kind in strategies.COUNT_KINDS if kind != "huge"]),
    strategies.cost_models(),
    st.data(),
)
def test_predicted_time_without_copies_grows_with_every_load(
    case: Case, model: CostModel, data: st.DataObject
) -> None:
    counts = case.tensor
    more = counts.clone()
    rank = data.draw(st.integers(0, case.num_ranks - 1))
    expert = data.draw(st.integers(0, case.num_experts - 1))
    room = 2**31 - 1 - int(counts.sum(dtype=torch.int64))
    more[rank, expert] += data.draw(st.integers(0, max(min(room, 1000), 0)))
    times = [
        int(
            topoep.solve(c, case.topology, case.spare_slots, Time(model), candidates=[]).stats()[
                "predicted_ns"
            ]
        )
        for c in (counts, more)
    ]
    assert times[0] <= times[1]
