# SPDX-License-Identifier: Apache-2.0
"""A buffer that keeps DeepEP 2's documented contract, over any torch.distributed backend.

Compact layout: a token arrives once at every rank that holds one of its experts, with the local ids
of the experts it selects there and -1 for the others. Combining sums what the ranks return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from topoep.transports.base import Transport


@dataclass
class Handle:
    """What combine needs, and the counts that DeepEP gives on the host."""

    num_recv_tokens_per_expert_list: list[int]
    token_of_row: Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int


class StandInBuffer:
    """dispatch and combine of ``deep_ep.ElasticBuffer``; both differentiable here."""

    def __init__(self, transport: Transport, num_topk: int, num_max_tokens_per_rank: int) -> None:
        self.transport = transport
        self.num_topk = num_topk
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.ranks = transport.topology.num_ranks

    def dispatch(
        self, x: Tensor, *, topk_idx: Tensor, topk_weights: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Handle, None]:
        assert x.dtype == torch.bfloat16
        assert x.dim() == 2
        assert topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape == (len(x), self.num_topk)
        assert 1 <= self.num_topk <= 32
        assert len(x) <= self.num_max_tokens_per_rank
        assert 0 < num_experts <= 2048
        assert num_experts % self.ranks == 0
        width = num_experts // self.ranks
        assert width <= 256
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        for row in topk_idx.tolist():
            chosen = [expert for expert in row if expert >= 0]
            assert len(set(chosen)) == len(chosen), "an expert twice in a row"

        rank_of = torch.where(topk_idx >= 0, topk_idx // width, -1)
        rows = [(rank_of == rank).any(-1).nonzero().flatten() for rank in range(self.ranks)]
        token_of_row = torch.cat(rows)
        to = torch.arange(self.ranks).repeat_interleave(torch.tensor([len(r) for r in rows]))
        here = rank_of[token_of_row] == to[:, None]
        local = torch.where(here, topk_idx[token_of_row] % width, -1)
        weights = torch.where(here, topk_weights[token_of_row], 0)
        sent = torch.tensor([len(r) for r in rows])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.transport.group)
        splits = [sent.tolist()], [received.tolist()]
        (recv_x,) = self.transport.all_to_all([x[token_of_row]], *splits)
        (recv_ids,) = self.transport.all_to_all([local], *splits)
        (recv_weights,) = self.transport.all_to_all([weights], *splits)
        counts = torch.bincount(recv_ids[recv_ids >= 0], minlength=width).tolist()
        handle = Handle(counts, token_of_row, *splits[0], *splits[1], len(x))
        return recv_x, recv_ids, recv_weights, handle, None

    def combine(self, y: Tensor, handle: Handle) -> tuple[Tensor, None, None]:
        (returned,) = self.transport.all_to_all([y], [handle.received], [handle.sent])
        total = y.new_zeros(handle.num_tokens, y.shape[1], dtype=torch.float32)
        return total.index_add(0, handle.token_of_row, returned.float()).to(y.dtype), None, None
