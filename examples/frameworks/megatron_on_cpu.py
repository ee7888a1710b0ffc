# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron-Core run on CPU tensors and gloo, for the example and the tests.

Megatron calls CUDA in a few places on its way through a model. Nothing here is needed on a GPU.
"""

from __future__ import annotations

import contextlib

import torch
import torch._dynamo
import torch.distributed as dist


class _Stream:
    """There is one stream on the CPU, and everything on it is done."""

    def __init__(self, *args, **options):
        pass

    def __eq__(self, other):
        return isinstance(other, _Stream)

    def __hash__(self):
        return 0

    def __getattr__(self, name):
        return lambda *args, **options: self


def use_cpu() -> None:
    """Replaces, in this process, what Megatron needs of CUDA and of NCCL."""
    _replace_cuda()
    _replace_lists_of_uneven_tensors()
    _replace_rng()


def _cpu(device):
    return "cpu" if device == "cuda" else device


def _replace_cuda() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    torch._dynamo.config.disable = True  # a compiled line of the router takes ten seconds per rank
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream=None: contextlib.nullcontext()
    torch.cuda.synchronize = lambda device=None: None
    zeros, tensor_of = torch.zeros, torch.tensor
    torch.zeros = lambda *size, device=None, **options: zeros(*size, device=_cpu(device), **options)
    torch.tensor = lambda data, device=None, **options: tensor_of(
        data, device=_cpu(device), **options
    )
    type_of = torch.Tensor.type  # the distributed optimizer compares names of CUDA tensor types
    torch.Tensor.type = lambda self, *to, **options: (
        type_of(self, *to, **options) if to or options else f"torch.cuda{type_of(self)[5:]}"
    )

    def to_host(tensor, as_numpy=False, record_stream=False):
        # Upstream's leaves CPU tensors as they are, and its callers then need numpy arrays.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _replace_lists_of_uneven_tensors() -> None:
    """NCCL takes lists of tensors of different lengths, gloo does not."""

    def all_gather(outputs, tensor, group=None):
        for source, output in enumerate(outputs):
            if source == dist.get_rank(group):
                output.copy_(tensor)
            dist.broadcast(output, group_src=source, group=group)

    def reduce_scatter(output, inputs, group=None):
        for target, tensor in enumerate(inputs):
            sum_ = tensor.clone()
            dist.all_reduce(sum_, group=group)
            if target == dist.get_rank(group):
                output.copy_(sum_)

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _replace_rng() -> None:
    """Megatron's tracker keeps states of a CUDA generator."""
    from megatron.core.tensor_parallel import random

    state = torch.zeros(1, dtype=torch.uint8)
    torch.cuda.get_rng_state = random._get_cuda_rng_state = lambda *args, **options: state
    torch.cuda.set_rng_state = random._set_cuda_rng_state = lambda *args, **options: None
