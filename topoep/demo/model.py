# SPDX-License-Identifier: Apache-2.0
"""A small byte-level transformer whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topoep.balancer import Balancer
from topoep.demo.config import DemoConfig
from topoep.demo.text import VOCABULARY
from topoep.experts import BalancedExperts
from topoep.plan import Plan


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, sequence, D]`` to the same shape."""
        parts = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return mixed


class MoE(nn.Module):
    """A softmax router over experts that are balanced for every microbatch.

    There is no auxiliary loss: the router is free to prefer some experts.
    """

    #: The plan of the latest forward pass.
    plan: Plan

    def __init__(self, config: DemoConfig, balancer: Balancer) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = BalancedExperts(
            config.experts, config.hidden, config.intermediate, balancer=balancer
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, sequence, D]`` to the same shape."""
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        # experts(..) would plan by itself; the demo wants to look at the plan afterwards.
        self.plan = self.experts.balancer.plan(ids, layer=self.experts)
        y: Tensor = self.experts(tokens, ids, weights, self.plan)
        return y.view_as(x)


class Block(nn.Module):
    """Attention, then experts, each around a residual connection."""

    def __init__(self, config: DemoConfig, balancer: Balancer) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden)
        self.moe = MoE(config, balancer)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, sequence, D]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.moe(self.moe_norm(x))
        return y


class ByteModel(nn.Module):
    """Predicts the next byte.

    Dense parameters are the same on every rank, experts belong to one rank each. Both follow from
    the seed alone (see ``BalancedExperts.reset_parameters``).
    """

    def __init__(self, config: DemoConfig, balancer: Balancer) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList([Block(config, balancer) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 ``[batch, sequence]`` to logits ``[batch, sequence, 256]``."""
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def moes(self) -> list[MoE]:
        """The MoE layers, first to last."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def dense_parameters(self) -> list[nn.Parameter]:
        """All parameters but those of the experts."""
        of_experts = {id(p) for moe in self.moes() for p in moe.experts.parameters()}
        return [p for p in self.parameters() if id(p) not in of_experts]
