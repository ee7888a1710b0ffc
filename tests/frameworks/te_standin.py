# SPDX-License-Identifier: Apache-2.0
"""Behaves as the grouped linear layer of TransformerEngine does, as far as gradients are concerned.

TransformerEngine needs a GPU. What TopoEP relies on is written down here from its public interface:

- the weights are parameters ``weight0``, ``weight1``, .. that are read by name at every call;
- with ``fuse_wgrad_accumulation`` the weight gradient is added to the ``main_grad`` that the weight
  had in forward, except in the first microbatch of a step, which overwrites it; autograd gets an
  uninitialised tensor, here NaN, and ``grad_added_to_main_grad`` is set;
- with delayed weight gradients backward leaves operands in a queue and returns what is not filled
  yet, again NaN; ``backward_dw`` takes the oldest, and then runs the hooks that were registered.
"""

from __future__ import annotations

import functools
from collections import deque

import torch
from torch import nn


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x, splits, first_microbatch, weights_are_fused, *tensors):
        count = len(splits)
        weights, biases = tensors[:count], tensors[count:]
        ctx.save_for_backward(x, *weights)
        ctx.module, ctx.splits, ctx.has_bias = module, splits, bool(biases)
        ctx.fused, ctx.overwrite = weights_are_fused, first_microbatch
        ctx.main_grads = [w.main_grad for w in weights] if weights_are_fused else None
        parts = [part @ w.t() for part, w in zip(x.split(splits), weights, strict=True)]
        if biases:
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad_y):
        x, *weights = ctx.saved_tensors
        rows, grads = x.split(ctx.splits), grad_y.split(ctx.splits)
        grad_x = torch.cat([g @ w for g, w in zip(grads, weights, strict=True)])
        wgrad = functools.partial(
            _weight_gradients, rows, grads, ctx.main_grads, ctx.overwrite, ctx.has_bias
        )
        results = [None] * len(weights)
        biases = [None] * (len(weights) if ctx.has_bias else 0)
        if weights[0].requires_grad:
            if ctx.module.delay_wgrad_compute:
                ctx.module.delayed.append(wgrad)
                results = [torch.full_like(weight, float("nan")) for weight in weights]
            else:
                results, biases = wgrad()
            if ctx.fused:
                for i, weight in enumerate(weights):
                    results[i] = None
                    if hasattr(weight, "grad_added_to_main_grad"):
                        weight.grad_added_to_main_grad = True
                        results[i] = torch.full_like(weight, float("nan"))
        return None, grad_x, None, None, None, *results, *biases


def _weight_gradients(rows, grads, main_grads, overwrite, has_bias):
    results = [g.t() @ part for g, part in zip(grads, rows, strict=True)]
    biases = [g.sum(0) for g in grads] if has_bias else []
    if main_grads is not None:
        for main, result in zip(main_grads, results, strict=True):
            main.copy_(result) if overwrite else main.add_(result)
    return results, biases


class GroupedLinear(nn.Module):
    """Builders of Megatron's TEGroupedMLP take it in the place of TEGroupedLinear."""

    def __init__(self, num_gemms, input_size, output_size, *, shard, config, bias, pg_collection,
                 **options):  # fmt: skip
        super().__init__()
        tp = pg_collection.expt_tp.size()
        if shard == "out":
            output_size //= tp
        else:
            input_size //= tp
        size = output_size, input_size
        self.num_gemms, self.config, self.use_bias = num_gemms, config, bias
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        self.delay_wgrad_compute = (
            config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
        )
        self.is_first_microbatch = True
        self.delayed: deque = deque()
        self.wgrad_accumulation_and_reduce_hooks: list = []
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(size)))
            if bias:
                self.register_parameter(f"bias{i}", nn.Parameter(torch.zeros(size[0])))
        for parameter in self.parameters():
            parameter.allreduce = False
            parameter.skip_backward_post_hook = self.delay_wgrad_compute

    def _tensors(self, name):
        return [getattr(self, f"{name}{i}") for i in range(self.num_gemms)]

    def forward(self, x, splits):
        weights = self._tensors("weight")
        biases = self._tensors("bias") if self.use_bias else []
        fused = self.fuse_wgrad_accumulation and weights[0].requires_grad
        first, self.is_first_microbatch = self.is_first_microbatch, False
        fused = fused and torch.is_grad_enabled()
        y = _GroupedLinear.apply(self, x, list(splits), first, fused, *weights, *biases)
        return y, None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook):
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    @torch.no_grad()
    def backward_dw(self):
        if not self.delay_wgrad_compute:
            return
        weights, biases = self.delayed.popleft()()
        if not self.fuse_wgrad_accumulation:
            for weight, grad in zip(self._tensors("weight"), weights, strict=True):
                weight.grad = grad
        for bias, grad in zip(self._tensors("bias") if self.use_bias else (), biases, strict=True):
            if bias.grad is None:
                bias.grad = grad
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


def grouped_moe_layer(cfg, layer_number: int = 1) -> nn.Module:
    """Megatron's MoELayer with its TEGroupedMLP on stand-in linear layers."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    submodules = GroupedMLPSubmodules(
        linear_fc1=functools.partial(GroupedLinear, shard="out"),
        linear_fc2=functools.partial(GroupedLinear, shard="in"),
    )
    experts = functools.partial(TEGroupedMLP, submodules=submodules)
    return MoELayer(cfg, MoESubmodules(experts=experts), layer_number=layer_number)
