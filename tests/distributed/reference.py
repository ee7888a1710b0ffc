# SPDX-License-Identifier: Apache-2.0
"""The layer that everything is compared with: all experts in one process, no parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Problem:
    """One rank's tokens, their routing, and the gradient that comes back."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    grad_y: Tensor


def make_weights(
    experts: int, hidden: int, width: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, D] and down [E, D, I] of all experts."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(experts, 2 * width, hidden, generator=generator, dtype=torch.float64)
    down = torch.randn(experts, hidden, width, generator=generator, dtype=torch.float64)
    return (gate_up * hidden**-0.5).to(dtype), (down * width**-0.5).to(dtype)


def make_problem(
    rank: int,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    dtype: torch.dtype,
    seed: int = 0,
    hot: float = 3.0,
) -> Problem:
    """Skewed routing with distinct experts per token, the same hot experts on every rank."""
    shared = torch.Generator().manual_seed(seed)
    popularity = torch.softmax(torch.randn(experts, generator=shared) * hot, 0)
    own = torch.Generator().manual_seed(1000 * seed + rank + 1)
    if tokens:
        noise = torch.rand(tokens, experts, generator=own).log().neg()
        ids = (noise / popularity).topk(top_k, largest=False).indices
    else:
        ids = torch.zeros(0, top_k, dtype=torch.int64)
    draw = {"generator": own, "dtype": torch.float64}
    return Problem(
        x=torch.randn(tokens, hidden, **draw).to(dtype),
        ids=ids,
        weights=torch.rand(tokens, top_k, **draw).to(dtype),
        grad_y=torch.randn(tokens, hidden, **draw).to(dtype),
    )


def dense_layer(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum over k of weight times expert output; ids out of range add nothing."""
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, k = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down[expert])
        y = y.index_add(0, token, out * weights[token, k].unsqueeze(1))
    return y
