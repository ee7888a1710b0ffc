# SPDX-License-Identifier: Apache-2.0
"""transformers' own models with TopoEP and with transformers' own all-to-all, on forked ranks."""

from __future__ import annotations

import importlib.metadata
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import topoep
from tests.distributed.ranks import run_ranks
from tests.frameworks import plans
from tests.frameworks.comparison import check_equal, gradients
from tests.frameworks.environment import require

transformers = require("transformers")

# Imported before forking: the ranks would each import it again.
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from transformers.distributed import DistributedConfig, expert_parallel  # noqa: E402

from topoep.adapters import transformers as adapter  # noqa: E402

EXPERTS, TOP_K, VOCABULARY = 8, 2, 96
HIDDEN = 64  # a multiple of the vector length: the last rows' silu would be rounded in another way


def config_of(name: str, layers: int = 2) -> Any:
    """A tiny model of the family, whose experts all have EXPERTS x TOP_K."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_experts_per_tok": TOP_K,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if name == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **sizes, num_experts=EXPERTS, moe_intermediate_size=HIDDEN, head_dim=8
        )
    if name == "mixtral":
        return transformers.MixtralConfig(**sizes, num_local_experts=EXPERTS)
    if name == "gpt_oss":
        return transformers.GptOssConfig(**sizes, num_local_experts=EXPERTS, head_dim=8)
    sizes["num_key_value_heads"] = 4
    return transformers.DeepseekV3Config(
        **sizes,
        n_routed_experts=EXPERTS,
        moe_intermediate_size=HIDDEN,
        n_group=2,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


def by_rows(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts that compute every row on its own, so that its result does not depend on others.

    What the tests compare bit for bit is then the same wherever a copy computed it; a GEMM of
    another number of rows may round differently.
    """
    outputs = torch.zeros_like(hidden_states)
    for k in range(top_k_index.shape[1]):
        expert = top_k_index[:, k].clamp(max=self.num_experts - 1)
        here = (top_k_index[:, k] < self.num_experts)[:, None]
        h = self._apply_gate((self.gate_up_proj[expert] * hidden_states[:, None]).sum(-1))
        y = (self.down_proj[expert] * h[:, None]).sum(-1)
        outputs = outputs + torch.where(here, y * top_k_weights[:, k, None], 0)
    return outputs


transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS.register("by_rows", by_rows)


def widen_routers(model: Any) -> None:
    """Makes some experts hot, and biases not zero."""
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            parameter.data.mul_(20)
        if name.endswith("proj_bias"):
            parameter.data.normal_(std=0.1)


def build(
    name: str, implementation: str, *, experts: str = "by_rows", layers: int = 2, tp: int = 1
) -> Any:
    """The model with its experts over all ranks, the same weights every time."""
    torch.manual_seed(0)
    config = config_of(name, layers)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts)
    widen_routers(model)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
    ep_mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))["ep"]
    plan = model._expand_parallel_plan(model.ep_plan)
    expert_parallel.apply_expert_parallelism(
        model, ep_mesh, mesh["tp"], plan, ep_implementation=implementation
    )
    return model


def batch(rank: int, seed: int = 0, tokens: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(3, VOCABULARY, (2, tokens), generator=generator)


def run(model: Any, rank: int, seed: int = 0, tokens: int = 12) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of the embedded input, after forward and backward."""
    logits, embedded, loss = forward(model, batch(rank, seed, tokens))
    loss.backward()
    return logits.detach(), embedded.grad


def forward(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the embedded input, which will have a gradient, and the loss."""
    embedded: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: embedded.append(output)
    )
    out = model(input_ids=ids, labels=ids)
    hook.remove()
    embedded[0].retain_grad()
    return out.logits, embedded[0], out.loss


def balancer_of(model: Any) -> topoep.Balancer:
    balancers = {layer.balancer for layer in adapter.layers(model)}
    assert len(balancers) == 1
    return balancers.pop()


def check_model(rank: int, name: str, experts: str) -> list[int]:
    """Equal to the untouched model, with every kind of plan; returns the copies of each plan."""
    adapter.register(topology=topoep.Topology(2, dist.get_world_size() // 2))
    expected_model = build(name, "all_to_all", experts=experts)
    expected = run(expected_model, rank), gradients(expected_model)
    model = build(name, "topoep", experts=experts)
    balancer = balancer_of(model)
    copies = []
    for choose in (plans.no_copies, plans.random_copies(1), plans.random_copies(2)):
        made = plans.force(balancer, choose)
        model.zero_grad()
        check_equal(
            (run(model, rank), gradients(model)),
            expected,
            weights=choose is plans.no_copies,
            rows=experts == "by_rows",
        )
        assert len(made) == len(adapter.layers(model))
        copies.append(sum(int((plan.slot_tokens > 0).sum()) for plan in made))
    return copies


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_equals_the_untouched_model_with_any_plan(name, ranks):
    for copies in run_ranks(ranks, check_model, name, "by_rows"):
        assert copies[0] == 0
        assert min(copies[1:]) > 0


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_other_implementations_of_the_experts(experts):
    for copies in run_ranks(2, check_model, "qwen3_moe", experts):
        assert min(copies[1:]) > 0


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_with_biases_and_transposed_weights(experts):
    for copies in run_ranks(2, check_model, "gpt_oss", experts):
        assert min(copies[1:]) > 0


def check_training(rank: int) -> tuple[list[float], list[float], float]:
    """Ten optimizer steps with the planner's own plans; losses, and the copies made."""
    seen = []
    adapter.register(spare_slots=1, on_plan=lambda module, plan: seen.append(plan.stats()))
    losses = []
    for implementation in ("all_to_all", "topoep"):
        model = build("qwen3_moe", implementation)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for step in range(10):
            ids = batch(rank, step)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                if not hasattr(parameter, "to_local"):
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            losses.append(float(loss))
    assert len(seen) == 20
    assert all(stats["imbalance"] <= stats["imbalance_before"] for stats in seen)
    return losses[:10], losses[10:], float(sum(stats["copies"] for stats in seen))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_optimizer_steps_give_equal_losses(ranks):
    for expected, got, copies in run_ranks(ranks, check_training):
        assert copies > 0
        assert got == pytest.approx(expected, rel=1e-5)
        assert abs(expected[-1] - expected[0]) > 1e-3, "the model does not train"


def check_interleaved(rank: int, checkpoint: bool) -> None:
    """Three microbatches forward, then backward in the same order."""
    adapter.register()
    results = []
    for implementation in ("all_to_all", "topoep"):
        model = build("qwen3_moe", implementation)
        model.train()
        if implementation == "topoep":
            plans.force(balancer_of(model), plans.random_copies(3))
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outputs = []
        for seed in range(3):
            outputs.append(forward(model, batch(rank, seed)))
        for _, _, loss in outputs:
            loss.backward()
        tensors = [t for logits, embedded, _ in outputs for t in (logits, embedded.grad)]
        results.append((tensors, gradients(model)))
    check_equal(results[1], results[0])


@pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaved_microbatches(ranks, checkpoint):
    run_ranks(ranks, check_interleaved, checkpoint)


def check_checkpointed(rank: int) -> int:
    """A recomputation uses the plan of its forward pass and plans nothing."""
    adapter.register()
    model = build("qwen3_moe", "topoep", layers=3)
    model.train()
    made = plans.force(balancer_of(model), plans.random_copies(5))
    expected = run(model, rank), gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    plans.force(balancer_of(model), plans.random_copies(5))
    check_equal((run(model, rank), gradients(model)), expected, weights=True)
    return len(made)


def test_checkpointed_layers_reuse_their_plans():
    assert run_ranks(2, check_checkpointed) == [3, 3]


def check_few_tokens(rank: int) -> None:
    """One rank routes a single token, and most ranks get none."""
    adapter.register(spare_slots=1)
    results = []
    for implementation in ("all_to_all", "topoep"):
        model = build("qwen3_moe", implementation)
        experts = model.model.layers[0].mlp.experts
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(0 if rank else 5, 32, generator=generator).requires_grad_()
        ids = torch.tensor([[0, 1]] * 5)[: len(x)]
        weights = torch.rand(len(x), TOP_K, generator=generator).requires_grad_()
        if implementation == "topoep":
            plans.force(balancer_of(model), lambda b, c: [[]] * (b.config.num_ranks - 1) + [[0]])
        y = experts(x, ids, weights)
        y.sum().backward()
        results.append(([y.detach(), x.grad, weights.grad], gradients(model)))
    check_equal(results[1], results[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_without_tokens(ranks):
    run_ranks(ranks, check_few_tokens)


def check_frozen_and_evaluation(rank: int) -> None:
    adapter.register()
    results = []
    for implementation in ("all_to_all", "topoep"):
        model = build("mixtral", implementation)
        if implementation == "topoep":
            plans.force(balancer_of(model), plans.random_copies(6))
        ids = batch(rank)
        with torch.no_grad():
            evaluated = model(input_ids=ids).logits
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts.down_proj" not in name)
        partly = run(model, rank), gradients(model)
        assert not any("down_proj" in name for name in partly[1])
        model.zero_grad()
        for layer in model.model.layers:
            layer.mlp.experts.requires_grad_(False)
        frozen = run(model, rank), gradients(model)
        assert not any("experts" in name for name in frozen[1])
        with torch.inference_mode():
            inferred = model(input_ids=ids).logits
        tensors = [evaluated, inferred, *partly[0], *frozen[0]]
        results.append((tensors, partly[1] | {f"{n} frozen": g for n, g in frozen[1].items()}))
    check_equal(results[1], results[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_frozen_experts_and_evaluation_without_gradients(ranks):
    run_ranks(ranks, check_frozen_and_evaluation)


def check_two_models(rank: int) -> None:
    """A student and a frozen teacher, whose layers alternate in the shared spare slots."""
    adapter.register()
    results = []
    for implementation in ("all_to_all", "topoep"):
        models = [build(name, implementation) for name in ("qwen3_moe", "mixtral")]
        if implementation == "topoep":
            assert balancer_of(models[0]) is balancer_of(models[1])
            plans.force(balancer_of(models[0]), plans.random_copies(7))
        ids = batch(rank)
        outs = [model(input_ids=ids, labels=ids) for model in models]
        (outs[0].loss + outs[1].loss).backward()
        grads = {f"{i} {n}": g for i in (0, 1) for n, g in gradients(models[i]).items()}
        results.append(([out.logits for out in outs], grads))
    check_equal(results[1], results[0])


def test_two_models_in_one_process():
    run_ranks(2, check_two_models)


def check_shared_batch(rank: int) -> None:
    """Ranks 0 and 1 hold one batch, ranks 2 and 3 another, of 5 tokens in all."""
    adapter.register()
    results = []
    for implementation in ("all_to_all", "topoep"):
        model = build("qwen3_moe", implementation, tp=2)
        if implementation == "topoep":
            plans.force(balancer_of(model), plans.random_copies(8))
        generator = torch.Generator().manual_seed(rank // 2)
        x = torch.randn(5, 32, generator=generator).requires_grad_()
        ids = torch.rand(5, EXPERTS, generator=generator).topk(TOP_K).indices
        weights = torch.rand(5, TOP_K, generator=generator).requires_grad_()
        experts = model.model.layers[0].mlp.experts
        y = experts(x, ids, weights)
        y.backward(torch.randn(5, 32, generator=generator))
        results.append(([y.detach(), x.grad, weights.grad], gradients(model)))
    check_equal(results[1], results[0])


def test_ranks_that_share_a_batch():
    run_ranks(4, check_shared_batch)


def check_fsdp(rank: int, path: str, ep: int) -> None:
    """from_pretrained with FSDP, training, generate, and save_pretrained."""
    # transformers looks for torchrun's variables.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    adapter.register(topology=topoep.Topology(2, ep // 2))
    size = dist.get_world_size()
    results, saved, generated = [], [], []
    for implementation in ("all_to_all", "topoep"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            experts_implementation="by_rows",
            distributed_config=DistributedConfig(
                fsdp_size=size, ep_size=ep, ep_implementation=implementation
            ),
        )
        if implementation == "topoep":
            made = plans.force(balancer_of(model), plans.random_copies(9))
        tensors, grads = run(model, rank), gradients(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        results.append((tensors, grads, run(model, rank)))
        model.eval()
        prompt = batch(rank, 7, tokens=4 + rank)
        generated.append(model.generate(prompt, max_new_tokens=5, do_sample=False))
        folder = f"{path}/{implementation}"
        model.save_pretrained(folder)
        dist.barrier()
        saved.append(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())
    assert sum(int((plan.slot_tokens > 0).sum()) for plan in made) > 0
    check_equal(results[1][:2], results[0][:2])
    for a, b in zip(results[1][2], results[0][2], strict=True):  # after a step they may differ
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert torch.equal(generated[1], generated[0])
    assert generated[0].shape[1] > 4 + rank
    assert saved[1].keys() == saved[0].keys()
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_fsdp_generate_and_save(name, ranks, ep, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    widen_routers(model)
    model.save_pretrained(tmp_path)
    run_ranks(ranks, check_fsdp, str(tmp_path), ep)


def check_rejected_parameter(rank: int) -> str:
    adapter.register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of("mixtral", layers=1))
    model.model.layers[0].mlp.experts.scale = torch.nn.Parameter(torch.ones(3))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    plan = model._expand_parallel_plan(model.ep_plan)
    with pytest.raises(ValueError) as caught:
        expert_parallel.apply_expert_parallelism(
            model, mesh["ep"], mesh["tp"], plan, ep_implementation="topoep"
        )
    return str(caught.value)


def test_a_parameter_that_is_not_per_expert_is_rejected():
    for message in run_ranks(2, check_rejected_parameter):
        assert re.search(r"MixtralExperts\.scale has the local shape \(3,\); expected 4", message)


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "4.57.1")
    with pytest.raises(ImportError, match=r"transformers >= 5\.24, < 6; transformers 4\.57\.1 is"):
        adapter.register()


@pytest.mark.parametrize("method", ["__call__", "_dispatch_tokens", "_combine_tokens"])
def test_a_changed_signature_is_noticed_at_once(monkeypatch, method):
    def changed(self, hidden_states, top_k_index, top_k_weights, capacity):
        raise AssertionError("not called")

    monkeypatch.setattr(expert_parallel.AllToAllEP, method, changed)
    with pytest.raises(ImportError, match="capacity"):
        adapter.register()


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="spare_slot"):
        adapter.register(spare_slot=3)
