# SPDX-License-Identifier: Apache-2.0
"""The recorder sees every call once, keeps to its memory, and never blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import topoep
from topoep import BalancedExperts, Balancer, Recorder, Topology, Trace
from topoep.trace import merge

TOPOLOGY = Topology(1, 2)
SETTING = {"num_experts": 4, "top_k": 2, "topology": TOPOLOGY}


def ids(seed: int, tokens: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, 4, generator=generator).topk(2).indices


def histogram(tensor: torch.Tensor) -> list[int]:
    return torch.bincount(tensor[tensor >= 0], minlength=4).tolist()


def test_each_rank_writes_its_file_and_merge_joins_them(tmp_path):
    for rank in range(2):
        with Recorder(tmp_path / f"{rank}.npz", rank=rank, **SETTING, meta={"run": "x"}) as rec:
            for step in range(3):
                for layer in ("a", "b"):
                    rec.record(layer, ids(step * 4 + rank * 2 + (layer == "b")))
    whole = merge([Trace.load(tmp_path / f"{rank}.npz") for rank in range(2)])
    assert whole.counts.shape == (3, 2, 2, 4)
    for step, layer, rank in np.ndindex(3, 2, 2):
        assert whole.counts[step, layer, rank].tolist() == histogram(
            ids(step * 4 + rank * 2 + layer)
        )
    assert whole.meta["layers"] == ["a", "b"]
    assert whole.meta["run"] == "x"
    assert whole.meta["left_out"] == 0


def test_layers_are_hooked_and_recomputations_are_not_counted(tmp_path):
    torch.manual_seed(0)
    layer = BalancedExperts(4, 8, 16, topology=TOPOLOGY, spare_slots=1)
    weights = [torch.rand(6, 2) for _ in range(2)]
    routed = [ids(1), ids(2)]
    with Recorder(tmp_path / "t.npz", **SETTING) as rec:
        rec.attach(layer)
        for _ in range(2):
            xs = [torch.rand(6, 8, requires_grad=True) for _ in range(2)]
            # Without the early stop a recomputation runs the layer to its end, and so the hook.
            with set_checkpoint_early_stop(False):
                out = checkpoint(
                    lambda a, b: layer([a, b], routed, weights), *xs, use_reentrant=False
                )
                sum(y.sum() for y in out).backward()
    layer([torch.rand(6, 8)] * 2, routed, weights)  # after the end: not recorded
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.counts.tolist() == [[[histogram(r) for r in routed]]] * 2


def test_a_balancer_tells_about_its_plans(tmp_path):
    balancer = Balancer(TOPOLOGY, 4, 1)
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    with Recorder(tmp_path / "t.npz", **SETTING) as rec:
        rec.attach(balancer)
        for step in range(2):
            for i, layer in enumerate(layers):
                balancer.plan([ids(10 * step + i), ids(50 + i)], layer=layer)
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.counts[1, 1].tolist() == [histogram(ids(11)), histogram(ids(51))]
    assert trace.counts.shape == (2, 2, 2, 4)


def test_any_module_with_a_function_that_finds_the_ids(tmp_path):
    class Router(nn.Module):
        def forward(self, x, *, seed):
            return x, ids(seed)

    router = Router()
    with Recorder(tmp_path / "t.npz", rank=1, **SETTING) as rec:
        rec.attach(router, topk_ids=lambda args, kwargs, output: output[1])
        router(torch.zeros(1), seed=3)
        with pytest.raises(TypeError, match="Give topk_ids="):
            rec.attach(router)
    assert Trace.load(tmp_path / "t.npz").counts.tolist() == [[[histogram(ids(3))]]]


def test_every_and_max_steps_bound_what_is_kept(tmp_path):
    with Recorder(tmp_path / "t.npz", rank=0, **SETTING, max_steps=2, every=3) as rec:
        for step in range(10):
            rec.record(0, ids(step))
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.steps == (0, 3)
    assert trace.counts[:, 0, 0].tolist() == [histogram(ids(0)), histogram(ids(3))]
    assert trace.meta["left_out"] == 2, "steps 6 and 9"


def test_microbatches_that_lack_a_layer_are_left_out(tmp_path):
    rec = Recorder(tmp_path / "t.npz", rank=0, **SETTING)
    for step in range(3):
        rec.record("a", ids(step))
        if step < 2:
            rec.record("b", ids(step))
    assert rec.trace().num_steps == 2
    rec.record("b", ids(2))
    rec.close()
    assert Trace.load(tmp_path / "t.npz").num_steps == 3


class Failing(nn.Module):
    """A layer that routes by a seed, and raises for some."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.fails_at = -1

    def forward(self, step: int) -> torch.Tensor:
        if step == self.fails_at:
            raise RuntimeError("out of memory")
        return ids(10 * step + self.number)


def train(layers: list[Failing], steps: int) -> None:
    for step in range(steps):
        try:
            for layer in layers:
                layer(step)
        except RuntimeError:
            continue


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("failing", [0, 2, 4])
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_a_layer_ends_with_an_error_is_left_out(
    tmp_path, caplog, layer, failing, every
):
    layers = [Failing(number) for number in range(3)]
    layers[layer].fails_at = failing
    rec = Recorder(tmp_path / "t.npz", rank=0, **SETTING, every=every)
    for module in layers:
        rec.attach(module, topk_ids=lambda args, kwargs, output: output)
    train(layers, 7)
    rec.close()
    trace = Trace.load(tmp_path / "t.npz")
    happened = [step for step in range(7) if step != failing]  # of which there are routed ids
    if layer:  # the first layer has begun the step, so it has a number
        happened.insert(failing, failing)
    kept = [n for n in range(0, len(happened), every) if happened[n] != failing]
    assert trace.steps == tuple(kept)
    for number, counts in zip(kept, trace.counts[:, :, 0], strict=True):
        step = happened[number]
        assert counts.tolist() == [histogram(ids(10 * step + i)) for i in range(3)]
    assert trace.meta["incomplete"] == ([failing] if layer else [])
    messages = [r.message for r in caplog.records if r.name == "topoep"]
    if layer:
        assert len(messages) == 1
        assert f"left out of the trace: {failing}" in messages[0]
    else:
        assert not messages


def interleaved(groups: int, first: int = 0) -> list[tuple[str, int]]:
    """Calls (layer, microbatch) of a rank with two chunks of layers, two microbatches at a time."""
    calls = []
    for group in range(groups):
        for chunk in ("ab", "cd"):
            for microbatch in (first + 2 * group, first + 2 * group + 1):
                calls += [(layer, microbatch) for layer in chunk]
    return calls


def test_pipelines_that_alternate_between_microbatches(tmp_path, caplog):
    with Recorder(tmp_path / "t.npz", rank=0, **SETTING) as rec:
        for layer, step in interleaved(4):
            rec.record(layer, ids(10 * step + ord(layer)))
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.steps == (2, 3, 4, 5, 6, 7), "the first show that microbatches alternate"
    for step, counts in zip(trace.steps, trace.counts[:, :, 0], strict=True):
        assert counts.tolist() == [histogram(ids(10 * step + ord(layer))) for layer in "abcd"]
    assert trace.meta["left_out"] == 2
    assert not [r for r in caplog.records if r.name == "topoep"]


def test_a_step_that_fails_while_microbatches_alternate_ends_the_trace(tmp_path, caplog):
    with Recorder(tmp_path / "t.npz", rank=0, **SETTING) as rec:
        calls = interleaved(2) + interleaved(1, first=4)[:5] + interleaved(2, first=6)
        for layer, step in calls:
            rec.record(layer, ids(10 * step + ord(layer)))
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.steps == (2, 3)
    assert trace.meta["left_out"] == 2 + 4
    messages = [r.message for r in caplog.records if r.name == "topoep"]
    assert len(messages) == 1
    assert "last called equally often before step 4: the last 4 steps" in messages[0]


def test_merge_ends_where_ranks_disagree_about_a_step(tmp_path, caplog):
    parts = []
    for rank, failing in enumerate((3, 4)):
        with Recorder(tmp_path / f"{rank}.npz", rank=rank, **SETTING) as rec:
            for step in range(6):
                rec.record("a", ids(step))
                if step != failing:
                    rec.record("b", ids(step))
        parts.append(Trace.load(tmp_path / f"{rank}.npz"))
    caplog.clear()
    assert merge(parts).steps == (0, 1, 2)
    assert "the trace ends before step 3" in caplog.text
    assert merge([parts[0], _of_rank(parts[0], 1)]).steps == (0, 1, 2, 4, 5)
    parts[1].meta["incomplete"] = "3"
    with pytest.raises(ValueError, match="incomplete='3'; expected a list"):
        merge(parts)


def _of_rank(trace: Trace, rank: int) -> Trace:
    return dataclasses.replace(trace, ranks=(rank,))


def test_nothing_waits_when_the_thread_cannot_keep_up(tmp_path, monkeypatch):
    monkeypatch.setattr(topoep.recorder, "_QUEUE", 2)
    rec = Recorder(tmp_path / "t.npz", rank=0, **SETTING, max_steps=50)
    taken = rec._queue.get

    import threading

    gate = threading.Event()
    started = threading.Event()

    def slow_get():
        item = taken()
        started.set()
        gate.wait()
        return item

    monkeypatch.setattr(rec._queue, "get", slow_get)
    rec.record("a", ids(0))  # taken by the get that is running already
    for step in range(1, 50):
        rec.record("a", ids(step))
        if step == 1:
            started.wait()
    gate.set()
    trace = rec.trace()
    assert 2 <= trace.num_steps <= 5
    assert trace.meta["left_out"] == 50 - trace.num_steps
    for step, row in zip(trace.steps, trace.counts[:, 0, 0], strict=True):
        assert row.tolist() == histogram(ids(step))
    rec.close()


def test_a_failure_of_the_thread_is_raised(tmp_path):
    rec = Recorder(tmp_path / "t.npz", rank=0, **SETTING)
    rec.record("a", ids(0))
    rec._queue.join()
    rec._counts[0] = np.zeros((1, 1, 9), np.int32)  # counts no longer fit
    rec.record("a", ids(1))
    rec._queue.join()
    with pytest.raises(RuntimeError, match="thread has failed"):
        rec.record("a", ids(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank 2; expected 0 to 1"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"num_experts": 5}, "5 experts; expected a multiple of 2 ranks"),
        ({"top_k": 5}, "top_k=5"),
        ({"meta": {"a": object()}}, "JSON"),
        ({"topology": 3}, "topology"),
    ],
)
def test_bad_settings(tmp_path, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Recorder(tmp_path / "t.npz", **{**SETTING, **change})


def test_bad_calls(tmp_path):
    rec = Recorder(tmp_path / "t.npz", **SETTING, max_bytes=4 * 1000 * 2 * 4)
    with pytest.raises(ValueError, match="ids of 1 ranks; this recorder holds 2"):
        rec.record("a", ids(0))
    with pytest.raises(ValueError, match=r"expected int32 or int64"):
        rec.record("a", [ids(0).float(), ids(0)])
    with pytest.raises(ValueError, match="nothing recorded"):
        rec.save()
    rec.record("a", [ids(0), ids(0)])
    with pytest.raises(ValueError, match="2 layers x 1000 steps x 2 ranks x 4 experts"):
        rec.record("b", [ids(0), ids(0)])
    rec.close()
    rec.close()
    with pytest.raises(RuntimeError, match="closed"):
        rec.record("a", [ids(0), ids(0)])
