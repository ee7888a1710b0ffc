# SPDX-License-Identifier: Apache-2.0
"""Simulation of traces through planners, the commands, the page and its look on a phone."""

from __future__ import annotations

import dataclasses
import html
import html.parser
import json
import re
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from topoep import Cluster, MoEModel, Trace, memory
from topoep.__main__ import main
from topoep.simulator import LayerModel, Placement, Setting, workloads
from topoep.simulator.advise import advise
from topoep.simulator.estimate import estimated_seconds
from topoep.simulator.page import page
from topoep.simulator.planners import EPLB_WINDOW, PLANNERS, NoCopies, make_planner
from topoep.simulator.reshape import regroup, rescale
from topoep.simulator.simulate import (
    Request,
    _history,
    count_copies,
    sampled_rows,
    simulate,
)
from topoep.simulator.sweep import Point, sweep
from topoep.simulator.workloads import GENERATORS, generate

CLUSTER = Cluster("H800", 2)
MODEL = MoEModel("test", 4, 1024, 512, 32, 4, 10**6, 2048, vocabulary=1000)
TOPOLOGY = CLUSTER.topology(16)


def trace(name: str = "lognormal", steps: int = 10, layers: int = 2, **options: object) -> Trace:
    sizes = {"top_k": 4, "tokens": 2048, "steps": steps, "layers": layers}
    return generate(name, TOPOLOGY, 32, **{**sizes, **options})


def request(**changes: object) -> Request:
    return Request(**{"trace": trace(), "cluster": CLUSTER, "model": MODEL, **changes})


# ---- generators ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_traces_have_the_tokens_and_the_skew_that_was_asked_for(name):
    if name == "hot_node":
        made = generate(name, TOPOLOGY, 32, top_k=2, tokens=2048, skew=1.6, steps=4, layers=2)
    else:
        made = trace(name, skew=1.5)
    assert made.node_of_rank == TOPOLOGY.node_of_rank
    assert made.meta["generator"] == name
    per_token = made.counts.sum() / made.counts.shape[0] / made.counts.shape[1] / 16 / made.top_k
    if name != "W4":
        assert per_token == pytest.approx(2048, rel=0.02)
    if "skew" in made.meta and name != "bursts":
        loads = made.rank_loads().sum(0)
        skew = (loads.max(1) / loads.mean(1)).mean()
        assert skew == pytest.approx(made.meta["skew"], rel=0.25 if name == "drift" else 0.05)
    assert not np.array_equal(made.counts[:, 0], made.counts[:, 1]) or name == "W0"


def test_uniform_routing_has_no_skew():
    made = generate("lognormal", TOPOLOGY, 32, top_k=4, tokens=10**5, skew=1.0, steps=1)
    assert made.imbalance().max() < 1.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "gauss"}, "generator 'gauss'; expected one of lognormal"),
        ({"skew": 0.5}, "skew=0.5"),
        ({"skew": 40.0}, "never has skew 40"),
        ({"steps": 0}, "steps=0"),
        ({"top_k": 33}, "top_k=33"),
    ],
)
def test_generators_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        trace(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 10**7}, "10000000 steps x 2 layers x 16 ranks x 32 experts would take 41.0 GB"),
        ({"steps": 10**9}, "steps=1000000000; expected 1 to 100000000"),
        ({"layers": 5000, "steps": 1}, "layers=5000; expected 1 to 4096"),
        ({"tokens": 10**8}, "16 ranks with top-4 route 6400000000 of them"),
        ({"tokens": 10**20}, "a plan covers at most 2147483647"),
        ({"tokens": 0}, "expected at least 1"),
    ],
)
def test_generators_refuse_sizes_before_they_make_anything(monkeypatch, options, message):
    monkeypatch.setattr(workloads, "skewed", None)
    with pytest.raises(ValueError, match=message):
        trace(**options)


def test_what_does_not_fit_into_memory_is_refused_before_it_is_made(monkeypatch):
    made = trace(steps=2)
    longer = dataclasses.replace(made, counts=np.tile(made.counts, (20, 1, 1, 1)), steps=None)
    monkeypatch.setattr(memory, "available_memory", lambda: 10**5)
    # 4 bytes x 100 x 2 x 16 x 32, and twice a layer's
    with pytest.raises(ValueError, match=r"would take 0\.000819 GB of memory; .* has 0\.0001 GB"):
        trace(steps=100)
    with pytest.raises(ValueError, match=r"the scaled trace would take 0\.000164 GB"):
        rescale(longer, 4)
    assert trace(steps=2).num_steps == 2


def test_memory_is_what_the_system_and_a_control_group_leave(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("v2", "v1", "meminfo")]
    monkeypatch.setattr(memory, "_GROUP_LIMITS", tuple(files[:2]))
    monkeypatch.setattr(memory, "_MEMINFO", files[2])
    assert memory.available_memory() is None
    memory.check_memory(10**18, "much", "nothing is known")
    files[2].write_text("MemTotal:  9 kB\nMemAvailable:   7 kB\n")
    files[0].write_text("max\n")
    assert memory.available_memory() == 7 * 1024
    files[1].write_text("4096\n")
    assert memory.available_memory() == 4096


def test_rescaling_beyond_a_plan_is_refused():
    made = trace(steps=2)
    with pytest.raises(ValueError, match=r"fullest microbatch would have 64\d{8} routed tokens"):
        rescale(made, 10**8)


def test_round_robin_deals_ids_in_turn():
    counts = workloads.megatron("W0", 4, 8, 0, 0, tokens=5, top_k=3)
    ids = np.arange(4 * 15).reshape(4, 15) % 8
    assert counts.tolist() == [np.bincount(row, minlength=8).tolist() for row in ids]


# ---- planners and their placements ---------------------------------------------------------------


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_sends_every_token_once(name):
    made = trace(steps=EPLB_WINDOW + 2)
    model = LayerModel(CLUSTER, MODEL, TOPOLOGY, Setting())
    from topoep import Time

    planner = make_planner(name, TOPOLOGY, 32, 2, Time(model.cost_model(2048)))
    counts = made.counts[EPLB_WINDOW:, 0]
    history = [made.counts[:EPLB_WINDOW, 0].sum(0)] * 2
    placement = planner.place(counts, history)
    placement.check(counts)
    assert np.array_equal(placement.loads.sum(1), counts.sum((1, 2)))
    before = Placement.of_homes(counts).loads.max(1)
    assert (placement.loads.max(1) <= before).all()
    if name != "none":
        assert (placement.loads.max(1) < before).all()
    nodes = np.asarray(TOPOLOGY.node_of_rank)
    copies = count_copies(placement, nodes, moved_homes=name == "eplb")
    fetched = placement.sources >= 0
    if name == "eplb":
        assert not fetched.any(), "what has been placed ahead is not fetched"
        assert copies.all.sum() > 0
    else:
        assert np.array_equal(copies.all, fetched.sum((1, 2)))
        across = fetched & (nodes[placement.sources] != nodes[None, :, None])
        assert np.array_equal(copies.cross, across.sum((1, 2)))
        home = nodes[np.maximum(placement.experts, 0) // placement.home_slots]
        elsewhere = fetched & (home != nodes[None, :, None])
        assert np.array_equal(copies.elsewhere, elsewhere.sum((1, 2)))
    if name == "ultraep":
        assert not copies.cross.any()


def test_history_is_the_last_full_window():
    counts = np.zeros((20, 2, 2, 2), dtype=np.int32)
    counts[:, 1, 0, 0] = 2 ** np.arange(20)
    made = Trace(counts, (0, 0), 1)
    assert _history(made, 7, 1, 8) is None
    for step, steps in ((8, range(8)), (15, range(8)), (16, range(8, 16)), (19, range(8, 16))):
        assert _history(made, step, 1, 8)[0, 0] == sum(2**i for i in steps)
    assert _history(made, 19, 1, 0) is None


def test_eplb_without_history_leaves_experts_at_home():
    result = simulate(request(trace=trace(steps=EPLB_WINDOW), planners=("eplb",)))
    assert result["eplb"].imbalance == result["none"].imbalance
    assert result["eplb"].copies == 0
    longer = simulate(request(trace=trace(steps=EPLB_WINDOW + 4), planners=("eplb",)))
    assert longer["eplb"].imbalance < 1.2 < longer["none"].imbalance
    assert longer["eplb"].microbatches == 8, "steps with a window of history"


@pytest.mark.parametrize("name", PLANNERS)
def test_where_nothing_is_routed_there_are_no_copies(name):
    made = trace(steps=EPLB_WINDOW + 8)
    counts = made.counts.copy()
    counts[0 if name != "eplb" else EPLB_WINDOW :] = 0  # EPLB has a window of tokens to plan from
    idle = dataclasses.replace(made, counts=counts)
    result = simulate(request(trace=idle, planners=(name,)))[name]
    assert (result.copies, result.imbalance, result.activation_bytes) == (0, 1, 0)


# ---- results -------------------------------------------------------------------------------------


def test_results_are_means_over_what_was_planned_for():
    asked = request(planners=("topoep",), samples=None)
    result = simulate(asked)
    made = asked.trace
    assert result["none"].imbalance == pytest.approx(made.imbalance().mean(), rel=1e-12)
    assert result["none"].imbalance_worst == pytest.approx(made.imbalance().max(), rel=1e-12)
    ours, plain = result["topoep"], result["none"]
    assert ours.microbatches == made.num_steps * made.num_layers
    assert ours.speedup == pytest.approx(plain.step_ms / ours.step_ms, rel=1e-12)
    assert ours.layer_speedup == pytest.approx(plain.layer_ms / ours.layer_ms, rel=1e-12)
    assert 1 < ours.speedup < ours.layer_speedup
    assert sum(ours.parts_ms.values()) == pytest.approx(ours.layer_ms, rel=1e-12)
    assert ours.weighted_copies == pytest.approx(ours.copies + 2 * ours.cross_copies)
    assert ours.spare_bytes == 2 * 3 * 1024 * 512 * (2 + 4)
    assert plain.spare_bytes == 0
    per_node = made.counts.reshape(-1, 2, 8, 2, 16).sum((2, 4))
    crossing = (per_node[:, 0, 1].sum() + per_node[:, 1, 0].sum()) / made.counts.sum()
    assert plain.cross_tokens == pytest.approx(crossing, rel=1e-12)


def test_threads_and_order_change_nothing():
    one, two = (
        [dataclasses.replace(p, plans_per_second=0) for p in simulate(r).planners]
        for r in (request(threads=1, slow_samples=4), request(threads=3, slow_samples=4))
    )
    assert one == two


def test_balanced_routing_gains_nothing_and_moves_nothing():
    counts = np.full((2, 2, 16, 32), 256, np.int32)
    even = Trace(counts, TOPOLOGY.node_of_rank, 4)
    result = simulate(request(trace=even, planners=("topoep", "taot")))
    for name in ("topoep", "taot"):
        assert result[name].copies == 0
        overhead = Setting().planning_us + Setting().reroute_us
        assert result[name].layer_ms == pytest.approx(
            result["none"].layer_ms + 1e-3 * overhead, rel=1e-9
        )


@pytest.mark.parametrize(
    ("steps", "layers", "samples", "window", "expected"),
    [
        (10, 2, None, 0, list(range(10))),
        (10, 2, 4, 0, [2, 7]),
        (10, 2, 1, 0, [5]),
        (10, 2, 100, 0, list(range(10))),
        (10, 2, 4, 8, [8, 9]),
        (8, 2, 4, 8, [2, 6]),
    ],
)
def test_samples_are_whole_steps_evenly_spaced(steps, layers, samples, window, expected):
    made = trace(steps=steps, layers=layers)
    rows = sampled_rows(made, samples, window)
    assert rows.tolist() == [s * layers + y for s in expected for y in range(layers)]


def test_samples_are_said():
    result = simulate(request(planners=("echo",), slow_samples=4, samples=8))
    assert result["none"].microbatches == 8
    assert result["echo"].microbatches == 4
    from topoep.simulator.table import notes

    text = " ".join(notes(result))
    assert "20 microbatches of a layer" in text
    assert "ECHO-like planned for 4" in text


def test_notes_explain_other_numbers_of_tokens_and_missing_slots():
    from topoep.simulator.table import notes

    drawn = simulate(request(trace=trace("W4"), planners=()))
    assert "at random for 2048 tokens per rank; " in " ".join(notes(drawn))
    assert "at random" not in " ".join(notes(simulate(request(trace=trace("W0"), planners=()))))
    scaled = simulate(request(trace=rescale(trace(), 1000), planners=()))
    assert "at random" not in " ".join(notes(scaled))
    assert "nothing can be copied" not in " ".join(notes(drawn))
    without = simulate(request(planners=("topoep",), spare_slots=0))
    assert "nothing can be copied" in " ".join(notes(without))
    assert without["topoep"].speedup < 1


def test_rescale_keeps_shares_and_regroup_keeps_routing():
    made = trace()
    scaled = rescale(made, 4096)
    assert scaled.counts.sum() / made.counts.sum() == pytest.approx(2, rel=1e-3)
    assert np.abs(scaled.counts - 2 * made.counts).max() <= 1 + 0.01 * made.counts.max()
    assert scaled.meta["scaled_to_tokens"] == 4096
    smaller = regroup(made, CLUSTER.topology(8))
    assert np.array_equal(smaller.counts, made.counts[:, :, :8])
    larger = regroup(made, Cluster("H800", 4).topology(32))
    assert np.array_equal(larger.counts[:, :, 16:], made.counts)


def test_sweep_covers_skews_and_ep_sizes():
    points = sweep(request())
    assert {point.ep for point in points} == {4, 8, 16}
    by_skew = sorted((p.imbalance, p.speedup) for p in points if p.ep == 16)
    assert len(by_skew) == 5
    assert by_skew[0][1] < 1 < by_skew[-1][1]
    assert [s for _, s in by_skew] == sorted(s for _, s in by_skew)
    recorded = dataclasses.replace(trace(), meta={})
    points = sweep(request(trace=recorded))
    assert sum(point.ep == 16 for point in points) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": dataclasses.replace(MODEL, experts=64)},
            "the trace has experts 32, test has 64",
        ),
        ({"model": dataclasses.replace(MODEL, top_k=2)}, "the trace has top-k 4, test has 2"),
        ({"cluster": Cluster("H800", 1)}, "16 ranks on 2 nodes .* do not fit 1x8xH800"),
        ({"trace": Trace(trace().counts[:, :, :1], TOPOLOGY.node_of_rank, 4, (0,))}, "1 of 16"),
        ({"samples": 0}, "samples=0"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        request(**changes)


# ---- advice --------------------------------------------------------------------------------------


def test_advice_takes_few_slots_and_says_where_it_does_not_pay():
    skewed = trace(steps=3, layers=2)
    even = np.full((3, 1, 16, 32), 256, np.int32)
    both = Trace(np.concatenate([skewed.counts, even], axis=1), TOPOLOGY.node_of_rank, 4)
    advice = advise(request(trace=both), [8])
    assert 1 <= advice.best.spare_slots <= 2
    most = max(trial.gain for trial in advice.trials if trial.ep == 16)
    assert most - 0.005 <= advice.best.gain
    assert advice.losing_layers == (2,)
    assert {trial.ep for trial in advice.trials} == {8, 16}
    assert {trial.spare_slots for trial in advice.trials} == set(range(9))
    assert [trial.ep for trial in advice.best_of_ep] == [16, 8]
    eight = advice.best_of_ep[1]
    assert eight.home_bytes == 2 * advice.best.home_bytes


def test_advice_for_even_routing_is_to_leave_it_off():
    even = Trace(np.full((2, 1, 16, 32), 256, np.int32), TOPOLOGY.node_of_rank, 4)
    advice = advise(request(trace=even), [])
    assert (advice.best.spare_slots, advice.best.objective) == (0, "-")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sleeper(NoCopies):
    """Takes its time."""

    seconds: float

    def place(self, counts, history):
        time.sleep(self.seconds * len(counts))
        return super().place(counts, history)


def test_the_estimate_is_the_time_of_all_microbatches():
    quick = Sleeper(name="quick", label="quick", seconds=0.02)
    slow = Sleeper(name="slow", label="slow", seconds=0.12, slow=True)
    asked = request(planners=(quick, slow), samples=500, slow_samples=None, threads=2)
    seconds = estimated_seconds(asked, 1000, 3)
    # Whole steps of three layers; two threads for what is not Python. A busy machine adds to it.
    assert 1 <= seconds["quick"] / (0.02 * 166 * 3 / 2) < 4
    assert 1 <= seconds["slow"] / (0.12 * 1000 * 3) < 2


# ---- the commands --------------------------------------------------------------------------------

GENERATED = (
    "--generator lognormal --cluster 2xH800 --model {t}/model.json --tokens 1024 --steps 10 "
    "--layers 2 --slow-samples 4"
).split()


def run(folder: Path, *arguments: str) -> int:
    (folder / "model.json").write_text(json.dumps(dataclasses.asdict(MODEL)))
    return main([argument.format(t=folder) for argument in arguments])


def test_simulate_prints_a_table_and_writes_json_and_pictures(tmp_path, capsys):
    out = ["--json", "{t}/a.json", "--plot", "{t}/a.png"]
    assert run(tmp_path, "simulate", *GENERATED, *out) == 0
    shown = capsys.readouterr().out
    for part in ("Predictions", "TopoEP", "EPLB", "LLEP", "ECHO", "UltraEP", "TAOT", "none"):
        assert part in shown
    content = json.loads((tmp_path / "a.json").read_text())
    assert [p["name"] for p in content["planners"]] == list(PLANNERS)
    ours = content["planners"][-1]
    assert f"{100 * (ours['speedup'] - 1):+.1f}%" in shown
    assert "…" not in shown, "the table fits 80 columns"
    assert content["note"].startswith("Predictions")
    assert len(content["by_skew_and_ep"]) == 15
    assert imread(tmp_path / "a.png").shape[1] > 1000
    assert run(tmp_path, "simulate", *GENERATED, "--plot", "{t}/a.svg", "--planners", "topoep") == 0
    assert "</svg>" in (tmp_path / "a.svg").read_text()


def test_commands_work_on_a_trace_without_tokens(tmp_path, capsys):
    made = trace(steps=EPLB_WINDOW + 2)
    empty = dataclasses.replace(made, counts=np.zeros_like(made.counts))
    empty.save(tmp_path / "empty.npz")
    options = "--trace {t}/empty.npz --cluster 2xH800 --model {t}/model.json".split()
    assert run(tmp_path, "simulate", *options, "--json", "{t}/a.json", "--html", "{t}/a.html") == 0
    content = json.loads((tmp_path / "a.json").read_text())
    assert [planner["copies"] for planner in content["planners"]] == [0] * len(PLANNERS)
    assert run(tmp_path, "trace", "plot", "{t}/empty.npz", "-o", "{t}/a.png") == 0
    capsys.readouterr()
    assert run(tmp_path, "advise", *options, "--samples", "4") == 0
    assert "Leave TopoEP off" in capsys.readouterr().out
    assert run(tmp_path, "simulate", *options, "--tokens", "4") == 1
    assert "no tokens to scale" in capsys.readouterr().err


def test_advise_prints_what_to_set(tmp_path, capsys):
    more = ["--tokens", "8192", "--json", "{t}/a.json", "--ep-sizes", "8"]
    assert run(tmp_path, "advise", *GENERATED, *more) == 0
    shown = capsys.readouterr().out
    advice = json.loads((tmp_path / "a.json").read_text())
    assert f"spare_slots={advice['best']['spare_slots']}" in shown
    assert "Gains +" in shown
    assert "Predictions" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate --generator W1 --cluster 2xH900 --model Mixtral-8x7B", "presets are A100"),
        ("simulate --generator W1 --cluster 2xH800 --model GPT", "presets are Qwen3"),
        ("simulate --generator W1 --cluster 2xH800", "needs --model"),
        (
            "simulate --generator W1 --cluster {t}/bad.json --model Mixtral-8x7B",
            "nic_bandwidth is -1",
        ),
        ("simulate --trace {t}/t.npz --cluster 1xH800 --model {t}/model.json", "do not fit"),
        ("simulate --trace {t}/t.npz --cluster 2xH800 --model Mixtral-8x7B", "experts 32"),
        ("simulate --trace {t}/t.npz --cluster 2xH800", "give --model"),
        ("simulate --generator W1 --cluster 3xH800 --model Mixtral-8x7B", "do not divide over 24"),
        ("simulate {g} --planners topoep,foo", "planner 'foo'"),
        ("simulate {g} --set overlap", "NAME=VALUE"),
        ("simulate {g} --set overlap=x", "expected a value like 0.8"),
        ("simulate {g} --set dedup=1", "expected a value like True"),
        ("simulate {g} --set overlap=2", "expected a share"),
        ("simulate {g} --spare-slots 17", "spare_slots=17"),
        ("simulate {g} --samples some", "'some'; expected a number"),
        ("simulate {g} --html {t}/a.pdf", "ends in .html"),
        ("simulate {g} --steps 10000000", "would take 41.0 GB"),
        ("simulate {g} --tokens 100000000", "a plan covers at most"),
        ("simulate {g} --steps 200000 --samples all --slow-samples all --max-minutes 2", "minutes"),
        ("simulate {g} --max-minutes 0", "--max-minutes is 0"),
        (
            "simulate --trace {t}/t.npz --cluster 2xH800 --model {t}/model.json --max-minutes 0",
            "--m",
        ),
        ("advise {g} --max-minutes 0", "lower --steps, --samples"),
        ("advise {g} --ep-sizes 5", "allow 2, 4, 8, 16"),
    ],
)
def test_commands_name_what_is_wrong(tmp_path, capsys, arguments, message):
    (tmp_path / "bad.json").write_text('{"preset": "H100", "nic_bandwidth": -1}')
    dataclasses.replace(trace(steps=1), meta={}).save(tmp_path / "t.npz")
    words = arguments.replace("{g}", " ".join(GENERATED)).split()
    assert run(tmp_path, *words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "advise"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.npz", "none.npz: No such file or directory; expected a trace that topoep.Recorder"),
        ("text.npz", "text.npz: no .npz file, or a damaged one"),
        ("other.npz", "neither a trace nor an .npz with an array 'counts'"),
    ],
)
def test_trace_files_that_cannot_be_used_end_with_2(tmp_path, capsys, command, name, message):
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "other.npz", other=np.ones(3))
    words = [command, "--trace", f"{{t}}/{name}", "--cluster", "2xH800", "--model", "GLM-4.5-Air"]
    assert run(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Errno" not in error
    assert error.count("\n") == 1


# ---- the page ------------------------------------------------------------------------------------


class Structure(html.parser.HTMLParser):
    """Collects tags, and checks that they are closed in order."""

    EMPTY = ("meta", "br", "img", "hr", "link", "input", "path", "use", "rect", "circle", "image")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


EVIL = "<script>alert('x')</script>\"&"


def evil_page() -> str:
    made = dataclasses.replace(trace(steps=2), meta={EVIL: EVIL})
    asked = request(trace=made, planners=("topoep",), model=dataclasses.replace(MODEL, name=EVIL))
    return page(simulate(asked), [Point(16, 1.0, 0.99), Point(16, 1.5, 1.1)])


def test_page_is_self_contained_escaped_and_well_formed():
    text = evil_page()
    assert EVIL not in text
    assert "&lt;script&gt;" in text
    structure = Structure()
    structure.feed(text)
    assert structure.open == []
    assert "script" not in structure.tags
    assert structure.tags.count("svg") == 2
    for tag, name, value in structure.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith("#"), (tag, name, value)
    assert not re.search(r"url\(\s*['\"]?(?!#)", text), "nothing is loaded"
    assert "@import" not in text
    assert ("meta", "name", "viewport") in structure.attributes
    assert "default-src 'none'" in text


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.mark.parametrize("width", [360, 1200])
def test_page_in_headless_chromium(tmp_path, width):
    """Drawn at the width of a phone and of a desk, in a frame: windows are at least 500 wide."""
    browser = chromium()
    if browser is None:
        warnings.warn("NO CHROMIUM: the page was not looked at in a browser", stacklevel=1)
        pytest.skip("no chromium on this machine: only the structure of the page was tested")
    # Writes what a browser makes of the page into the title, which --dump-dom shows.
    probe = """
        const seen = document.querySelector('iframe').contentDocument;
        document.title = JSON.stringify({
            wide: seen.documentElement.scrollWidth, view: seen.documentElement.clientWidth,
            svgs: [...seen.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width),
            hidden: getComputedStyle(seen.querySelector('.cards thead')).display });"""
    frame = (
        f'<!doctype html><title></title><body style="margin:0"><iframe width="{width}" '
        f'height="1400" style="border:0" srcdoc="{html.escape(evil_page())}" '
        f'onload="probe()"></iframe><script>function probe() {{{probe}}}</script>'
    )
    (tmp_path / "frame.html").write_text(frame)
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 500)},1400"]
    address = (tmp_path / "frame.html").as_uri()

    def look(*more: str) -> str:
        done = subprocess.run(
            [browser, *options, *more, address],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    dom = look("--virtual-time-budget=5000", "--dump-dom")
    found = re.search(r"<title>(\{.*?\})</title>", dom)
    assert found, dom[:300]
    seen = json.loads(found[1])
    assert seen["wide"] <= seen["view"] <= width, "nothing sticks out sideways"
    assert len(seen["svgs"]) == 2
    assert all(0.5 * seen["view"] < svg <= seen["view"] for svg in seen["svgs"])
    assert (seen["hidden"] == "none") == (width < 640), "a card per planner on a phone"

    look(f"--screenshot={tmp_path / 'page.png'}")
    picture = imread(tmp_path / "page.png")[:, :width, :3]
    assert picture.shape[1] == width
    assert 0.02 < (picture < 0.5).any(2).mean() < 0.5, "text and lines on a white page"
