# SPDX-License-Identifier: Apache-2.0
"""The functions through which Megatron calls DeepEP and HybridEP, on gloo.

Both need GPUs. These keep to what their documentation asks for and promises, and check it: one row
per token and destination rank for DeepEP, with the local experts of the row next to it; rows by
local expert for HybridEP; the same number of experts on every rank; float32 probabilities.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from topoep import Topology
from topoep.transports.c10d import C10dTransport


def install() -> None:
    """Puts them in the place of the imports that fail without the packages."""
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.fused_dispatch = fused_dispatch
    token_dispatcher.fused_combine = fused_combine
    token_dispatcher.set_deepep_num_sms = lambda num_sms: None
    token_dispatcher.hybrid_ep_dispatch = hybrid_ep_dispatch
    token_dispatcher.hybrid_ep_combine = hybrid_ep_combine


def _exchange(rows, send, recv, group):
    size = dist.get_world_size(group)
    transport = C10dTransport(Topology(num_nodes=1, ranks_per_node=size), group)
    return transport.all_to_all([rows], [send], [recv])[0]


def _receive_sizes(send, group):
    received = torch.empty(len(send), dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor(send), group=group)
    return received.tolist()


def fused_dispatch(
    x, token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream
):
    size = dist.get_world_size(group)
    assert num_experts % size == 0
    assert token_probs.dtype == torch.float32
    ordered = token_indices.sort(1).values
    assert not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(), "distinct"
    local = num_experts // size
    rank_of = torch.where(token_indices >= 0, token_indices // local, -1)
    tokens = [(rank_of == rank).any(1).nonzero().flatten() for rank in range(size)]
    send = [len(t) for t in tokens]
    recv = _receive_sizes(send, group)
    token = torch.cat(tokens)
    target = torch.arange(size).repeat_interleave(torch.tensor(send)).unsqueeze(1)
    mine = rank_of[token] == target
    indices = torch.where(mine, token_indices[token] % local, -1)
    probs = torch.where(mine, token_probs[token], 0.0)
    rows, probs, indices = (_exchange(t, send, recv, group) for t in (x[token], probs, indices))
    counts = torch.bincount(indices[indices >= 0], minlength=local)
    return rows, indices, probs, counts, (token, send, recv, len(x))


def fused_combine(x, group, handle, async_finish, allocate_on_comm_stream):
    token, send, recv, length = handle
    rows = _exchange(x, recv, send, group)
    return rows.new_zeros(length, x.shape[1]).index_add(0, token, rows), None


def hybrid_ep_dispatch(
    x,
    routing_map,
    probs,
    group,
    num_local_experts,
    num_permuted_tokens=None,
    fused=False,
    **options,
):
    size = dist.get_world_size(group)
    assert routing_map.shape == probs.shape == (len(x), size * num_local_experts)
    assert probs.dtype == torch.float32
    assert num_permuted_tokens is None
    expert, token = routing_map.T.nonzero(as_tuple=True)
    send = torch.bincount(expert // num_local_experts, minlength=size).tolist()
    recv = _receive_sizes(send, group)
    local = _exchange(expert % num_local_experts, send, recv, group)
    order = local.argsort(stable=True)
    rows = _exchange(x[token], send, recv, group)[order]
    row_probs = _exchange(probs[token, expert], send, recv, group)[order]
    counts = torch.bincount(local, minlength=num_local_experts)
    return rows, row_probs, None, counts, (token, order, send, recv, len(x), group)


def hybrid_ep_combine(x, handle, num_permuted_tokens, pad_multiple, fused=False):
    token, order, send, recv, length, group = handle
    assert int(num_permuted_tokens) == len(x)
    arrived = torch.empty_like(x).index_copy(0, order, x)
    rows = _exchange(arrived, recv, send, group)
    return rows.new_zeros(length, x.shape[1]).index_add(0, token, rows)
