# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron are the same with and without TopoEP."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.frameworks import megatron_cpu as mc
from tests.frameworks import te_standin
from tests.frameworks.environment import require
from tests.frameworks.plans import force, random_copies

require("megatron.core.dist_checkpointing")

from topoep.adapters import megatron as adapter  # noqa: E402


def described(sharded: dict) -> dict[str, str]:
    """What a sharded state dict says about each tensor, without the values."""
    fields = ("key", "dtype", "local_shape", "global_shape", "global_offset", "replica_id")
    return {
        name: str([getattr(entry, field, None) for field in fields])
        for name, entry in sharded.items()
    }


def state_dicts(rank: int, grouped: bool) -> None:
    mc.start(2)
    cfg = mc.config(2)
    build = te_standin.grouped_moe_layer if grouped else mc.moe_layer
    plain, balanced = build(cfg), build(cfg)
    for layer in (plain, balanced):
        mc.set_weights(layer, 1)
    adapter.enable(balanced)
    force(balanced.token_dispatcher.topoep.balancer, random_copies(1))
    for layer in (plain, balanced):
        layer(mc.tokens(rank))[0].sum().backward()
    assert list(plain.state_dict()) == list(balanced.state_dict())
    for name, value in plain.state_dict().items():
        if value is not None:
            assert torch.equal(value, balanced.state_dict()[name])
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in balanced.named_parameters()]
    if not grouped:  # the stand-in has no sharded form
        one, other = (layer.sharded_state_dict(prefix="layer.") for layer in (plain, balanced))
        assert described(one) == described(other)


@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
def test_state_dicts(grouped):
    run_ranks(4, state_dicts, grouped)


def save_and_load(rank: int, folder: str) -> None:
    from megatron.core import dist_checkpointing

    mc.start(2)
    cfg = mc.config(2, num_layers=2)
    balanced = mc.gpt(cfg)
    adapter.enable(balanced)
    force(mc.moe_layers(balanced)[0].token_dispatcher.topoep.balancer, random_copies(1))
    balanced(**mc.text(rank, 0)).mean().backward()
    with torch.no_grad():
        for parameter in balanced.parameters():
            if getattr(parameter, "allreduce", True):
                torch.distributed.all_reduce(parameter.grad)
            parameter -= 0.1 * parameter.grad
    dist_checkpointing.save(balanced.sharded_state_dict(), folder)
    plain = mc.gpt(cfg)
    state = dist_checkpointing.load(plain.sharded_state_dict(), folder)
    plain.load_state_dict(state, strict=False)
    again = mc.gpt(cfg)
    adapter.enable(again)
    again.load_state_dict(dist_checkpointing.load(again.sharded_state_dict(), folder), strict=False)
    losses = [model(**mc.text(rank, 1)).mean() for model in (balanced, plain, again)]
    assert losses[0] == losses[1] == losses[2]


def test_checkpoints_move_between_models_with_and_without(tmp_path):
    run_ranks(2, save_and_load, str(tmp_path))
