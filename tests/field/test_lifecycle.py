# SPDX-License-Identifier: Apache-2.0
"""Faults with checkpoints, reloading, and several versions of the truth."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import pytest
import torch

import topoep
from topoep import Topology


def make_layer(spare_slots: int = 2) -> topoep.BalancedExperts:
    torch.manual_seed(0)
    return topoep.BalancedExperts(8, 4, 4, topology=Topology(2, 2), spare_slots=spare_slots)


def step(layer: topoep.BalancedExperts, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 3, (9, 1), generator=generator) for _ in range(4)]
    xs = [torch.randn(9, 4, generator=generator) for _ in range(4)]
    ys = layer(xs, ids, [torch.ones(9, 1)] * 4)
    torch.autograd.backward([y.sum() for y in ys])
    return [y.detach() for y in ys]


# https://github.com/vllm-project/vllm/issues/47206
def test_maps_in_state_dict():
    layer = make_layer()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    step(layer, 0)
    after = layer.state_dict()
    assert list(before) == list(after) == ["gate_up_proj", "down_proj"]
    assert list(make_layer(spare_slots=0).state_dict()) == list(before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    file = io.BytesIO()
    torch.save(after, file)
    file.seek(0)
    fresh = make_layer()
    fresh.load_state_dict(torch.load(file))
    assert all(torch.equal(a, b) for a, b in zip(step(layer, 1), step(fresh, 1), strict=True))


# https://github.com/vllm-project/vllm/issues/55228
def test_reload_after_rebalance():
    """Weights loaded in the middle of training are those of the homes; copies follow at once."""
    layer = make_layer()
    other = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    step(layer, 0)
    layer.load_state_dict(other)
    fresh = make_layer()
    fresh.load_state_dict(other)
    assert all(torch.equal(a, b) for a, b in zip(step(layer, 0), step(fresh, 0), strict=True))


# https://github.com/vllm-project/vllm/issues/36267
# https://github.com/NVIDIA/Megatron-LM/issues/1839
def test_one_source_of_truth():
    counts = torch.full((4, 8), 10, dtype=torch.int32)
    counts[:, 0] = 90
    plan = topoep.solve(counts, Topology(2, 2), 2, rank=1)
    for field in dataclasses.fields(plan):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, field.name, None)
    plan.validate()
    plan.split().zero_()  # a copy of the caller's own
    plan.validate()
    drifted = dataclasses.replace(plan, copy_slots=plan.copy_slots.flip(0))
    with pytest.raises(ValueError, match="the copies of an expert are listed"):
        drifted.validate()


# Weight averages and best-model snapshots deep-copy a model in the middle of training.
def test_deep_copy_of_a_layer():
    layer = make_layer()
    step(layer, 0)
    average = copy.deepcopy(layer)
    assert average.balancer is layer.balancer
    with torch.no_grad():
        average.gate_up_proj.mul_(2)
    fresh = make_layer()
    assert torch.equal(step(layer, 1)[0], step(fresh, 1)[0])
    assert not torch.equal(step(average, 1)[0], step(fresh, 1)[0])
    with pytest.raises(TypeError, match=r"state_dict"):
        pickle.dumps(layer)
