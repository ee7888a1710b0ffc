# SPDX-License-Identifier: Apache-2.0
"""The time model against first principles: conservation, closed forms, monotony, agreement."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import topoep
from topoep import Cluster, CostModel, Hardware, MoEModel, Time, Topology
from topoep.hardware import HARDWARE
from topoep.simulator import MODELS, LayerModel, Placement, Setting, step_time
from topoep.simulator.links import Links
from topoep.simulator.placement import split_by_level
from topoep.simulator.step_time import attention_times

MODEL = MoEModel("test", 4, 512, 128, 32, 4, 10**6, 2048, vocabulary=1000)
PLAIN = {"planned": False, "rerouted": False}


def skewed(seed: int, batch: int, ranks: int, experts: int, tokens: int = 4096) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weight = np.exp(rng.standard_normal((batch, 1, experts)))
    share = weight / weight.sum(2, keepdims=True)
    return np.minimum(rng.poisson(tokens * 4 * share, (batch, ranks, experts)), tokens).astype(
        np.int32
    )


def plans(counts: np.ndarray, topology: Topology, spare_slots: int, objective=None):
    return [topoep.solve(torch.from_numpy(c), topology, spare_slots, objective) for c in counts]


def layer(topology: Topology, hardware: str | Hardware = "H800", **setting: object) -> LayerModel:
    cluster = Cluster(hardware, topology.num_nodes)
    return LayerModel(cluster, MODEL, topology, Setting(**setting))


@st.composite
def instances(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    nodes = draw(st.permutations([n for n, size in enumerate(sizes) for _ in range(size)]))
    experts = len(nodes) * draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(4, experts)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = rng.integers(0, draw(st.sampled_from([1, 5, 1000])) + 1, (2, len(nodes), experts))
    return Topology(node_of_rank=nodes), counts.astype(np.int32), top_k, draw(st.integers(0, 3))


# ---- conservation --------------------------------------------------------------------------------


@given(instances())
def test_every_token_is_sent_once_and_every_row_that_leaves_arrives(instance):
    topology, counts, top_k, spare_slots = instance
    placement = Placement.of_plans(plans(counts, topology, spare_slots))
    placement.check(counts)
    assert placement.loads.sum() == counts.sum()
    tokens = -(-counts.sum(2, dtype=np.int64) // top_k)
    links = Links(topology)
    pairs = links.rows(placement.split, tokens, dedup=False)
    nodes = np.asarray(topology.node_of_rank)
    crossing = placement.split * (nodes[:, None] != nodes)[None, :, :, None]
    staying = placement.split * (nodes[:, None] == nodes)[None, :, :, None]
    at_home = np.einsum("brrw->b", placement.split)
    # Exactly: these are whole numbers.
    assert pairs.nic_out.sum() == pairs.nic_in.sum() == crossing.sum()
    assert pairs.link_out.sum() == pairs.link_in.sum() == staying.sum() - at_home.sum()
    rows = links.rows(placement.split, tokens, dedup=True)
    assert math.isclose(rows.nic_out.sum(), rows.nic_in.sum(), rel_tol=1e-12, abs_tol=1e-9)
    assert math.isclose(rows.link_out.sum(), rows.link_in.sum(), rel_tol=1e-12, abs_tol=1e-9)
    assert rows.nic_out.sum() <= crossing.sum() + 1e-9, "a token crosses no more often than pairs"


@given(instances())
def test_quotas_of_a_plan_are_split_as_the_plan_splits_them(instance):
    topology, counts, _, spare_slots = instance
    for one, plan in zip(counts, plans(counts, topology, spare_slots), strict=True):
        ours = Placement.of_plans([plan])
        quota = np.zeros(one.shape, dtype=np.int64)
        rank, slot = np.nonzero(ours.experts[0] >= 0)
        quota[rank, ours.experts[0, rank, slot]] = ours.received[0, rank, slot]
        sent = split_by_level(one, quota, topology)
        assert np.array_equal(sent.sum(2).T, one)
        for r, w in zip(rank, slot, strict=True):
            assert np.array_equal(sent[ours.experts[0, r, w], :, r], ours.split[0, :, r, w])
        again = Placement.of_quotas(one[None], [quota], topology)
        again.check(one[None])
        assert np.array_equal(again.loads, ours.loads)


def test_a_plan_that_loses_tokens_is_found():
    counts = skewed(0, 1, 4, 8)
    placement = Placement.of_homes(counts)
    wrong = dataclasses.replace(placement, split=placement.split - (placement.split > 50))
    with pytest.raises(ValueError, match=r"rank 0 routes .* the plan sends"):
        wrong.check(counts)


def test_rows_of_sampled_tokens():
    """The expectation against tokens whose experts are drawn one by one."""
    topology = Topology(2, 4)
    rng = np.random.default_rng(1)
    tokens, experts, top_k = 2000, 128, 8
    weight = np.exp(0.7 * rng.standard_normal(experts))
    keys = rng.exponential(size=(8, tokens, experts)) / weight
    chosen = np.argsort(keys, axis=2)[..., :top_k]
    counts = np.stack([np.bincount(c.ravel(), minlength=experts) for c in chosen]).astype(np.int32)
    rows = Links(topology).rows(
        Placement.of_homes(counts[None]).split, np.full((1, 8), tokens), dedup=True
    )
    on_rank = np.zeros((8, tokens, 8), dtype=bool)
    for k in range(top_k):
        np.put_along_axis(on_rank, chosen[..., k : k + 1] // 16, True, axis=2)
    other_node = on_rank.reshape(8, tokens, 2, 4).any(3)
    crossing = np.array([other_node[r, :, 1 - r // 4].sum() for r in range(8)])
    assert np.allclose(rows.nic_out[0], crossing, rtol=0.02)
    # What arrives at its relay, the rank with the same index, does not pass an in-node link.
    arriving = [sum(on_rank[r, :, d].sum() for r in range(8) if r % 4 != d % 4) for d in range(8)]
    assert np.allclose(rows.link_in[0], arriving, rtol=0.05)


# ---- closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_balanced_input_takes_the_closed_form(name):
    nodes, ranks = (2, 8) if name != "GB200" else (1, 16)
    cluster = Cluster(name, nodes, ranks // nodes if name == "GB200" else None)
    total = cluster.num_ranks
    experts, tokens, top_k = 64, 4096, 4
    model = dataclasses.replace(MODEL, experts=experts)
    setting = Setting()
    topology = cluster.topology(total)
    counts = np.full((1, total, experts), tokens * top_k // experts, dtype=np.int32)
    predicted = LayerModel(cluster, model, topology, setting).predict(
        Placement.of_homes(counts), np.full((1, total), tokens), **PLAIN
    )
    kind = cluster.hardware
    d, i = model.hidden, model.intermediate
    group = experts // total
    rows = tokens * top_k
    gemm = 6 * d * i / (kind.efficiency * kind.flops)
    memory = (8 * d + 6 * i) / kind.memory_bandwidth
    forward = rows * (gemm + memory) + group * 96 * gemm
    backward = rows * (2 * gemm + 2.2 * memory)
    backward += group * (2 * 96 * gemm + 0.5 * 24 * d * i / kind.memory_bandwidth)
    share = 1 / experts * top_k
    in_node = total // topology.num_nodes
    to_rank = tokens * (1 - (1 - share) ** group)
    to_node = tokens * (1 - (1 - share) ** (group * in_node))
    nic = (topology.num_nodes - 1) * to_node * 2 * d / kind.nic_bandwidth
    # Of every other rank's tokens; those of the rank with the same index elsewhere arrive here.
    link = (total - topology.num_nodes) * to_rank * 2 * d / kind.link_bandwidth
    exchange = max(nic, link) + 25e-6 + (30e-6 if topology.num_nodes > 1 else 0)
    expected = forward + backward + 4 * exchange
    assert math.isclose(float(predicted.total[0]), expected, rel_tol=1e-9)
    assert float(predicted.interference[0]) == float(predicted.exposed_forward[0]) == 0


def test_copies_on_the_busiest_link_by_hand():
    topology = Topology(2, 2)
    model = layer(topology)
    # Expert 0 (home rank 0) on ranks 1, 2 and 3: one in-node copy, one pair, one fan-out.
    quota = np.zeros((1, 4, 8), dtype=np.int64)
    counts = np.full((1, 4, 8), 10, dtype=np.int32)
    quota[0] = np.where(np.arange(8) // 2 == np.arange(4)[:, None], 40, 0)
    quota[0, :, 0] = 10
    placement = Placement.of_quotas(counts, quota, topology)
    assert placement.sources[0, :, 2].tolist() == [-1, 0, 0, 2]
    copy, cross = 8.0, 3.0
    # Rank 0 sends a whole copy and one half of the pair; rank 2 half of it in, a whole copy out.
    assert model.busiest_link(placement, copy, cross).tolist() == [12.0]
    assert model.busiest_link(placement, 2.0, 5.0).tolist() == [5.0], "the pair, on the NICs"
    unsharded = layer(topology, sharded=False)
    assert unsharded.busiest_link(placement, copy, cross).tolist() == [8.0]


def test_one_rank_exchanges_nothing():
    model = layer(Topology(1, 1))
    times = model.predict(Placement.of_homes(np.full((1, 1, 4), 9, np.int32)), np.full((1, 1), 9))
    assert times.dispatch[0] == times.combine[0] == 0
    assert times.compute_forward[0] > 0


# ---- monotony ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["link_bandwidth", "nic_bandwidth", "memory_bandwidth", "flops", "grad_bandwidth"]
)
@given(seed=st.integers(0, 1000))
def test_faster_hardware_is_never_slower(field, seed):
    topology = Topology(2, 4)
    counts = skewed(seed, 2, 8, 32)
    placement = Placement.of_plans(plans(counts, topology, 2))
    last = None
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        value = getattr(HARDWARE["H800"], field) * factor
        model = layer(topology, dataclasses.replace(HARDWARE["H800"], **{field: value}))
        total = model.predict(placement, model.tokens(counts)).total
        assert last is None or (total <= last + 1e-15).all()
        last = total


@given(seed=st.integers(0, 1000), rank=st.integers(0, 7), expert=st.integers(0, 31))
def test_more_tokens_never_take_less_time(seed, rank, expert):
    topology = Topology(2, 4)
    counts = skewed(seed, 1, 8, 32)
    model = layer(topology)
    tokens = model.tokens(counts) + 2000
    before = model.predict(Placement.of_homes(counts), tokens, **PLAIN).total
    counts = counts.copy()
    counts[0, rank, expert] += 500
    after = model.predict(Placement.of_homes(counts), tokens, **PLAIN).total
    assert (after >= before - 1e-15).all()


# ---- the planner's constants come from the same objects ------------------------------------------


@pytest.mark.parametrize("name", sorted(HARDWARE))
@pytest.mark.parametrize("preset", sorted(MODELS))
def test_planner_and_simulator_have_the_same_costs(name, preset):
    model = MODELS[preset]
    cluster = Cluster(name, 1)
    simulated = LayerModel(cluster, model, Topology(1, 4), Setting(sharded=True))
    tokens = 4096
    derived = simulated.cost_model(tokens)
    own = CostModel.from_model(model.hidden, model.intermediate, hardware=name)
    _, attention = attention_times(cluster, model, Setting(), tokens)
    assert derived == dataclasses.replace(own, hide_grads=round(0.8e9 * attention))
    costs = simulated.costs
    assert derived.token == round(1e9 * (costs.row_forward + costs.row_backward))
    assert derived.copy == round(1e9 * costs.copy)
    assert derived.cross_copy == round(1e9 * costs.cross_copy)


@given(seed=st.integers(0, 200))
def test_planner_and_simulator_agree_on_compute_and_copies(seed):
    """Without network rows both sum up the same terms; they differ by rounding to nanoseconds."""
    topology = Topology(2, 4)
    counts = skewed(seed, 1, 8, 32, tokens=20000)
    model = layer(topology)
    cost = dataclasses.replace(model.cost_model(20000), network_row=0)
    plan = plans(counts, topology, 2, Time(cost))[0]
    placement = Placement.of_plans([plan])
    times = model.predict(placement, model.tokens(counts))
    transfers = times.exposed_forward + times.exposed_backward + times.exposed_grads
    home = LayerModel.predict(model, Placement.of_homes(counts), model.tokens(counts))
    groups = 4 * (model.costs.group_forward + model.costs.group_backward)  # homes: not the plan's
    ours = times.compute_forward + times.compute_backward + transfers + times.interference - groups
    stats = plan.stats()
    assert math.isclose(float(ours[0]), 1e-9 * int(stats["predicted_ns"]), rel_tol=0.02)
    before = home.compute_forward + home.compute_backward - groups
    assert math.isclose(float(before[0]), 1e-9 * int(stats["predicted_ns_before"]), rel_tol=0.02)


def test_copies_that_wait_are_exposed_and_recompute_costs_a_forward():
    topology = Topology(1, 4)
    counts = skewed(0, 1, 4, 32, tokens=16)
    placement = Placement.of_plans(plans(counts, topology, 2))
    assert (placement.sources >= 0).any()
    model = layer(topology, overlap=0.0)
    times = model.predict(placement, model.tokens(counts))
    weights = model.busiest_link(placement, model.costs.copy, model.costs.cross_copy)
    assert times.exposed_forward[0] == times.exposed_backward[0] == weights[0] > 0
    assert times.interference[0] == 0
    again = layer(topology, recompute="moe").predict(placement, model.tokens(counts))
    assert again.recompute[0] == again.dispatch[0] + again.compute_forward[0]


def test_a_step_is_layers_head_bubble_and_the_rest():
    cluster = Cluster("H800", 4)
    model = dataclasses.replace(MODEL, dense_layers=1, dense_intermediate=512)
    setting = Setting(microbatches=4, pipeline=2)
    forward, backward = attention_times(cluster, model, setting, 4096)
    without = dataclasses.replace(model, dense_layers=0, vocabulary=0)
    assert math.isclose(
        step_time(cluster, without, setting, 4096, 0.01),
        4 * (4 * (0.01 + forward + backward)) / 2 * (1 + 1 / 4) / 0.96,
        rel_tol=1e-12,
    )
    assert step_time(cluster, model, setting, 4096, 0.01) > step_time(
        cluster, without, setting, 4096, 0.01
    )
    full = dataclasses.replace(setting, recompute="full")
    assert math.isclose(
        step_time(cluster, without, full, 4096, 0.01)
        - step_time(cluster, without, setting, 4096, 0.01),
        4 * 4 * forward / 2 * 1.25 / 0.96,
        rel_tol=1e-9,
    )


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("Qwen3-30B-A3B", 30.5), ("Qwen3-235B-A22B", 235), ("GLM-4.5-Air", 106),
        ("DeepSeek-V2-Lite", 15.7), ("DeepSeek-V2", 236), ("DeepSeek-V3", 671),
        ("Kimi-K2", 1026), ("Mixtral-8x7B", 46.7), ("gpt-oss-120b", 116.8),
    ],
)  # fmt: skip
def test_presets_have_the_published_number_of_parameters(preset, billions):
    m = MODELS[preset]
    moe = 3 * m.hidden * (m.experts * m.intermediate + m.shared_intermediate)
    total = m.moe_layers * (moe + m.attention_weights + m.hidden * m.experts)
    total += m.dense_layers * (3 * m.hidden * m.dense_intermediate + m.attention_weights)
    total += 2 * m.vocabulary * m.hidden
    assert math.isclose(total / 1e9, billions, rel_tol=0.015)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster("H900"), "hardware 'H900'; presets are A100, H800"),
        (lambda: Cluster(3), "expected a topoep.Hardware"),
        (lambda: Cluster("H100", 0), "num_nodes=0"),
        (lambda: Cluster("H100", 1, 9), "ranks_per_node=9; a node of H100 has 8 GPUs"),
        (lambda: Cluster("H100", 200), "1600 ranks"),
        (lambda: Cluster.parse("4 H100"), "expected nodes x hardware"),
        (lambda: Cluster.parse("\u0662xH100"), "expected nodes x hardware"),
        (lambda: Cluster("H100", 2).topology(12), "no whole number of nodes"),
        (lambda: Cluster("H100", 2).topology(32), "2x8xH100 has 16"),
        (lambda: layer(Topology(1, 9)), "do not fit 1x8xH800"),
        (lambda: dataclasses.replace(HARDWARE["H100"], nic_bandwidth=-1), "nic_bandwidth is -1"),
        (lambda: dataclasses.replace(HARDWARE["H100"], flops=math.nan), "flops is nan"),
        (lambda: dataclasses.replace(HARDWARE["H100"], link_latency=-1.0), "of 0 or more"),
        (lambda: dataclasses.replace(HARDWARE["H100"], flops="1"), "expected a number"),
        (lambda: HARDWARE["A100"].flops_of("float8"), "A100 has no float8"),
        (lambda: MoEModel.preset("GPT"), "model 'GPT'; presets are Qwen3-30B-A3B"),
        (lambda: dataclasses.replace(MODEL, hidden=0), "hidden=0; expected at least 1"),
        (lambda: dataclasses.replace(MODEL, top_k=33), "top_k=33; expected 1 to 32"),
        (lambda: dataclasses.replace(MODEL, hidden=1.5), "hidden is 1.5"),
        (lambda: Setting(dtype="int8"), "dtype 'int8'"),
        (lambda: Setting(overlap=1.5), "overlap=1.5"),
        (lambda: Setting(outside_share=1.0), "outside_share=1.0"),
        (lambda: Setting(planning_us=-1), "planning_us=-1"),
        (lambda: Setting(microbatches=0), "microbatches=0"),
        (lambda: Setting(recompute="all"), "recompute='all'"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_clusters_and_models_from_numbers(tmp_path):
    assert Cluster.parse("4x8xH800") == Cluster("H800", 4)
    assert Cluster.parse("2xB200").num_ranks == 16
    assert Cluster.parse("GB200").num_ranks == 72
    assert Cluster.parse(Cluster("H800", 3, 4).name) == Cluster("H800", 3, 4)
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"preset": "H100", "nic_bandwidth": 2e10, "num_nodes": 2}))
    own = Cluster.parse(str(path))
    assert (own.hardware.nic_bandwidth, own.num_ranks) == (2e10, 16)
    values = dataclasses.asdict(HARDWARE["H100"]) | {"num_nodes": 3}
    path.write_text(json.dumps(values))
    assert Cluster.parse(str(path)) == Cluster("H100", 3)
    path.write_text(json.dumps({"preset": "Mixtral-8x7B", "moe_layers": 4}))
    assert MoEModel.parse(str(path)) == dataclasses.replace(MODELS["Mixtral-8x7B"], moe_layers=4)
    path.write_text(json.dumps(dataclasses.asdict(MODEL)))
    assert MoEModel.parse(str(path)) == MODEL
    for text, message in (
        ('{"preset": "H100", "nic_bandwidth": -2}', "own.json: Hardware.nic_bandwidth is -2"),
        ('{"preset": "H100", "speed": 2}', "speed"),
        ("[]", "expected a JSON object"),
        ("{", "no JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            Cluster.parse(str(path))
    path.write_text('{"preset": "GPT"}')
    with pytest.raises(ValueError, match="model 'GPT'"):
        MoEModel.parse(str(path))
