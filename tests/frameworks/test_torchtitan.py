# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own model, parallelised by torchtitan, with TopoEP and without, on forked ranks."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import topoep
from tests.distributed.ranks import run_ranks
from tests.frameworks import plans
from tests.frameworks.comparison import check_equal, gradients
from tests.frameworks.environment import require

require("torchtitan")

# Imported before forking: the ranks would each import it again.
import spmd_types._dist  # noqa: E402
from torchtitan.config import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.config.override import parse_cli_imports  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder  # noqa: E402
from torchtitan.distributed.utils import get_spmd_context  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import (  # noqa: E402
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config  # noqa: E402

from examples.frameworks.torchtitan_on_cpu import (  # noqa: E402
    dims_on_cpu,
    reduce_over_gloo,
    small_model,
)
from topoep.adapters import torchtitan as adapter  # noqa: E402
from topoep.adapters.options import BalancerOptions  # noqa: E402

EXPERTS, TOP_K, VOCABULARY, WIDTH = 8, 2, 96, 32
HIDDEN = 64  # a multiple of the vector length: the last rows' silu would be rounded in another way
OVERRIDE = "topoep.adapters.torchtitan.balance"


class ExpertsByRows(GroupedExperts):
    """Experts in float32 that compute every row on its own.

    torchtitan's compute in bfloat16, where a gradient summed in two parts differs by more than
    1e-6, and in a GEMM, whose rows may depend on their number.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:  # noqa: N803
        w1, w2, w3 = (
            w.to_local() if hasattr(w, "to_local") else w
            for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        slots = torch.arange(len(w1)).repeat_interleave(num_tokens_per_expert_E)
        x = x_RD[: len(slots), None]
        h = F.silu((w1[slots] * x).sum(-1)) * (w3[slots] * x).sum(-1)
        y = (w2[slots] * h[:, None]).sum(-1)
        return F.pad(y, (0, 0, 0, len(x_RD) - len(slots)))  # rows of padding


class PaddingDispatcher(AllToAllTokenDispatcher):
    """Pads the rows of every expert to a multiple of 4, as dispatchers for quantised GEMMs do.

    Notes for how many experts it allocates buffers.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def init_buffer(self) -> None:
        self.allocated_for = self.num_experts

    def _permute(self, rows: Tensor, counts: Tensor) -> tuple[Any, Tensor, Any, Tensor]:
        shape, rows, indices, per_slot = super()._permute(rows, counts)
        padded = (per_slot // 4 + 1) * 4  # at least one row of padding, also where there is none
        begin = padded.cumsum(0) - padded - (per_slot.cumsum(0) - per_slot)
        places = torch.arange(len(rows)) + begin.repeat_interleave(per_slot)
        out = rows.new_zeros(int(padded.sum()) + 3, rows.shape[1])
        return shape, out.index_copy(0, places, rows), (indices, places), padded

    def _unpermute(self, rows: Tensor, shape: Any, indices: tuple[Tensor, Tensor]) -> Tensor:
        return super()._unpermute(rows[indices[1]], shape, indices[0])


def config_of(layers: int, by_rows: bool) -> Any:
    """torchtitan's Qwen3-MoE for debugging, smaller."""
    config = small_model(
        layers=layers,
        width=WIDTH,
        expert_width=HIDDEN,
        experts=EXPERTS,
        top_k=TOP_K,
        head_dim=8,
        vocabulary=VOCABULARY,
    )
    for layer in config.layers:
        if by_rows:
            experts = layer.moe.routed_experts.inner_experts
            layer.moe.routed_experts.inner_experts = ExpertsByRows.Config(
                dim=WIDTH, hidden_dim=HIDDEN, num_experts=EXPERTS, param_init=experts.param_init
            )
    return config


def build(
    balanced: bool,
    *,
    layers: int = 2,
    by_rows: bool = True,
    ep: int | None = None,
    fsdp: bool = False,
    checkpointing: Any = None,
    backend: str = "partial_dtensor",
    padding: bool = False,
    **options: Any,
) -> Any:
    """The model over all ranks as torchtitan's trainer builds it, the same weights every time."""
    size = dist.get_world_size()
    ep = size if ep is None else ep
    dims = dims_on_cpu(size, ep, backend)
    config = config_of(layers, by_rows)
    for layer in config.layers if padding else ():
        layer.moe.routed_experts.token_dispatcher = PaddingDispatcher.Config(
            num_experts=EXPERTS, top_k=TOP_K
        )
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
    if balanced:
        options.setdefault("topology", topoep.Topology(2, ep // 2))
        lines = apply_overrides(OverrideConfig(imports=[(OVERRIDE, options)]), config)
        assert len(lines) == layers
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    for layer in model.layers.values():
        layer.moe.router.gate.weight.data.mul_(50)  # so that some experts are hot
    dims.build_mesh()
    if backend == "spmd_types":
        spmd_types._dist.dist.all_to_all = all_to_all_over_gloo
    model.parallelize(dims)
    if checkpointing is not None:
        checkpointing.Config().build().apply(model)
    if fsdp:
        apply_fsdp_to_decoder(
            model,
            dims.get_mesh(["fsdp"]),
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
            pp_enabled=False,
            ep_degree=ep,
            edp_mesh=dims.get_optional_mesh(["efsdp"]),
            reshard_after_forward_policy="always",
        )
        reduce_over_gloo(model)
    model.context = get_spmd_context(parallel_dims=dims)
    return model


def all_to_all_over_gloo(
    outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
) -> None:
    """What spmd_types calls, and gloo has not for chunks of several sizes."""
    received = torch.cat([torch.empty_like(chunk) for chunk in outputs])
    dist.all_to_all_single(
        received,
        torch.cat([chunk.contiguous() for chunk in inputs]),
        [len(chunk) for chunk in outputs],
        [len(chunk) for chunk in inputs],
        group=group,
    )
    for chunk, part in zip(outputs, received.split([len(c) for c in outputs]), strict=True):
        chunk.copy_(part)


def batch(rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(VOCABULARY, (2, 12), generator=generator)


def forward(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the embedded input, which will have a gradient, and the loss."""
    embedded: list[Tensor] = []
    hook = model.tok_embeddings.register_forward_hook(
        lambda module, inputs, output: embedded.append(output)
    )
    logits = model(ids)
    hook.remove()
    if embedded[0].requires_grad:
        embedded[0].retain_grad()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return logits, embedded[0], loss


def run(model: Any, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of the embedded input, after forward and backward."""
    with model.context():
        logits, embedded, loss = forward(model, batch(rank, seed))
        loss.backward()
    return logits.detach(), embedded.grad


def balancer_of(model: Any) -> topoep.Balancer:
    balancers = {layer.balancer for layer in adapter.layers(model)}
    assert len(balancers) == 1
    return balancers.pop()


def check_model(
    rank: int, by_rows: bool, ep: int, fsdp: bool, backend: str = "partial_dtensor"
) -> list[int]:
    """Equal to the untouched model with every kind of plan; returns the copies of each plan."""
    expected_model = build(False, by_rows=by_rows, ep=ep, fsdp=fsdp, backend=backend)
    expected = run(expected_model, rank), gradients(expected_model)
    model = build(True, by_rows=by_rows, ep=ep, fsdp=fsdp, backend=backend)
    assert model.state_dict().keys() == expected_model.state_dict().keys()
    copies = []
    for choose in (plans.no_copies, plans.random_copies(1), plans.random_copies(2)):
        made = plans.force(balancer_of(model), choose)
        model.zero_grad()
        check_equal(
            (run(model, rank), gradients(model)),
            expected,
            weights=choose is plans.no_copies,
            rows=by_rows,
            tolerance=1e-6 if by_rows else 2e-2,  # bfloat16
        )
        copies.append(sum(int((plan.slot_tokens > 0).sum()) for plan in made))
    for mine, other in zip(adapter.layers(model), expected_model.layers.values(), strict=True):
        assert mine.inner_experts.num_experts == EXPERTS
        assert torch.equal(
            other.moe.tokens_per_expert_E * 3,
            next(
                layer.moe.tokens_per_expert_E
                for layer in model.layers.values()
                if layer.moe.routed_experts is mine
            ),
        ), "the counts for the expert bias are not those of logical experts"
    return copies


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 4)])
@pytest.mark.parametrize("by_rows", [True, False], ids=["float32", "bfloat16"])
def test_equals_the_untouched_model_with_any_plan(ranks, ep, by_rows):
    for copies in run_ranks(ranks, check_model, by_rows, ep, False):
        assert copies[0] == 0
        assert min(copies[1:]) > 0


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 4), (4, 2)])
def test_with_experts_that_fsdp_shards(ranks, ep):
    for copies in run_ranks(ranks, check_model, True, ep, True):
        assert min(copies[1:]) > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_with_the_spmd_types_backend(ranks):
    # Without FSDP: its annotations need a newer torch than 2.13 there, with or without TopoEP.
    for copies in run_ranks(ranks, check_model, True, ranks, False, "spmd_types"):
        assert min(copies[1:]) > 0


def check_padding(rank: int) -> None:
    expected_model = build(False, padding=True)
    expected = run(expected_model, rank), gradients(expected_model)
    model = build(True, padding=True)
    for layer in adapter.layers(model):
        assert layer.token_dispatcher.allocated_for == balancer_of(model).num_physical_experts
    for choose in (plans.no_copies, plans.random_copies(1), plans.random_copies(2)):
        plans.force(balancer_of(model), choose)
        model.zero_grad()
        got = run(model, rank), gradients(model)
        check_equal(got, expected, weights=choose is plans.no_copies)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_dispatcher_that_pads_and_allocates_buffers(ranks):
    run_ranks(ranks, check_padding)


def check_training(rank: int) -> tuple[list[float], list[float], float]:
    """Ten optimizer steps with the planner's own plans; losses, and the copies made."""
    seen = []
    losses = []
    for balanced in (False, True):
        options = (
            {"spare_slots": 1, "on_plan": lambda module, plan: seen.append(plan.stats())}
            if balanced
            else {}
        )
        model = build(balanced, by_rows=False, fsdp=True, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for step in range(10):
            _, _, loss = forward(model, batch(rank, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert len(seen) == 20
    assert all(stats["imbalance"] <= stats["imbalance_before"] for stats in seen)
    return losses[:10], losses[10:], float(sum(stats["copies"] for stats in seen))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_optimizer_steps_give_equal_losses(ranks):
    for expected, got, copies in run_ranks(ranks, check_training):
        assert copies > 0
        assert got == pytest.approx(expected, rel=1e-3)  # the experts compute in bfloat16
        assert abs(expected[-1] - expected[0]) > 1e-2, "the model does not train"


def check_checkpointing(rank: int, policy: Any, fsdp: bool) -> int:
    """Three microbatches in flight, recomputed: one plan for each layer and microbatch."""
    results = []
    for balanced in (False, True):
        model = build(balanced, checkpointing=policy, fsdp=fsdp)
        model.train()
        if balanced:
            made = plans.force(balancer_of(model), plans.random_copies(3))
        runs = [forward(model, batch(rank, seed)) for seed in range(3)]
        for _, _, loss in runs:
            loss.backward()
        tensors = [t for logits, embedded, _ in runs for t in (logits, embedded.grad)]
        results.append((tensors, gradients(model)))
    check_equal(results[1], results[0])
    return len(made)


@pytest.mark.parametrize("policy", [None, FullAC, SelectiveAC], ids=["plain", "full", "selective"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaved_microbatches(ranks, policy):
    assert run_ranks(ranks, check_checkpointing, policy, False) == [6] * ranks


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC], ids=["full", "selective"])
def test_checkpointing_with_fsdp(policy):
    assert run_ranks(2, check_checkpointing, policy, True) == [6] * 2


def check_one_busy_rank(rank: int, by_rows: bool) -> None:
    """All tokens go to the first two experts: other ranks have none, or only a copy's."""
    results = []
    for balanced in (False, True):
        model = build(balanced, by_rows=by_rows, layers=1)
        if balanced:
            copies = lambda b, c: [[]] * (b.config.num_ranks - 1) + [[0]]  # noqa: E731
            plans.force(balancer_of(model), copies)
        bias = torch.zeros(EXPERTS)
        bias[:2] = 100
        model.layers["0"].moe.expert_bias_E = bias
        results.append((run(model, rank), gradients(model)))
    check_equal(results[1], results[0], rows=by_rows, tolerance=1e-6 if by_rows else 2e-2)


@pytest.mark.parametrize("by_rows", [True, False], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_without_tokens(ranks, by_rows):
    run_ranks(ranks, check_one_busy_rank, by_rows)


def check_frozen_and_evaluation(rank: int) -> None:
    results = []
    for balanced in (False, True):
        model = build(balanced)
        if balanced:
            plans.force(balancer_of(model), plans.random_copies(6))
        with torch.no_grad():
            evaluated = model(batch(rank))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("w2_EDF" not in name)
        partly = run(model, rank), gradients(model)
        assert not any("w2_EDF" in name for name in partly[1])
        model.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        frozen = run(model, rank), gradients(model)
        assert not any("experts" in name for name in frozen[1])
        grads = partly[1] | {f"{name} frozen": grad for name, grad in frozen[1].items()}
        results.append(([evaluated, *partly[0], *frozen[0]], grads))
    check_equal(results[1], results[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_frozen_experts_and_evaluation_without_gradients(ranks):
    run_ranks(ranks, check_frozen_and_evaluation)


def check_two_models(rank: int) -> None:
    results = []
    for balanced in (False, True):
        models = [build(balanced, layers=layers) for layers in (1, 2)]
        if balanced:
            assert balancer_of(models[0]) is balancer_of(models[1])
            plans.force(balancer_of(models[0]), plans.random_copies(7))
        outs = [forward(model, batch(rank)) for model in models]
        (outs[0][2] + outs[1][2]).backward()
        grads = {f"{i} {n}": g for i in (0, 1) for n, g in gradients(models[i]).items()}
        results.append(([logits for logits, _, _ in outs], grads))
    check_equal(results[1], results[0])


def test_two_models_in_one_process():
    run_ranks(2, check_two_models)


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.2.2")
    with pytest.raises(ImportError, match=r"torchtitan >= 0\.3, < 0\.4; torchtitan 0\.2\.2 is"):
        importlib.reload(adapter)


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (RoutedExperts, "forward"),
        (GroupedExperts, "forward"),
        (LocalTokenDispatcher, "dispatch"),
        (LocalTokenDispatcher, "wire_meshes"),
    ],
)
def test_a_changed_signature_is_noticed_before_the_model_is_built(monkeypatch, cls, method):
    def changed(self, x_RD, capacity):  # noqa: N803
        raise AssertionError("not called")

    monkeypatch.setattr(cls, method, changed)
    with pytest.raises(ImportError, match="capacity"):
        apply_overrides(OverrideConfig(imports=[OVERRIDE]), config_of(1, False))


def apply_from_command_line(options: str) -> Any:
    config = config_of(1, False)
    apply_overrides(OverrideConfig(imports=parse_cli_imports([f"{OVERRIDE}={options}"])), config)
    [routed] = [found[1] for found in config.traverse(adapter.BalancedRoutedExperts.Config)]
    return routed.options


def test_options_on_the_command_line_are_objects_in_their_json_form():
    options = apply_from_command_line(
        '{"spare_slots": 3, "objective": {"name": "balance", "tolerance": 0.02}, '
        '"topology": {"num_nodes": 2, "ranks_per_node": 4}, "candidates": [{"cap": "mean+1%"}]}'
    )
    assert options == BalancerOptions(
        spare_slots=3,
        objective=topoep.Balance(0.02),
        topology=topoep.Topology(2, 4),
        candidates=[topoep.Candidate("mean+1%")],
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('{"spare_slot": 3}', r"torchtitan.balance has no option 'spare_slot' .*'spare_slots'"),
        ('{"on_plan": "log"}', "on_plan is a str"),
        ('{"objective": {"name": "balance", "tol": 1}}', "objective 'balance' has no option 'tol'"),
    ],
)
def test_options_that_do_not_fit_are_refused_when_the_override_is_applied(options, message):
    with pytest.raises(TypeError, match=message):
        apply_from_command_line(options)
