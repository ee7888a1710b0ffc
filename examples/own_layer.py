# SPDX-License-Identifier: Apache-2.0
"""TopoEP in a hand-written MoE layer, with its own dispatch and its own experts.

Runs on 4 forked ranks, 2 nodes x 2, and compares with the layer without copies:

    python examples/own_layer.py
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import topoep

NODES, RANKS, EXPERTS, TOP_K, HIDDEN = 2, 4, 8, 2, 16


def dispatch(x, physical_ids, balancer):
    """Any expert-parallel dispatcher will do; this one is an all-to-all of sorted rows."""
    flat = physical_ids.flatten()
    order = flat.argsort(stable=True)
    send = flat.bincount(minlength=balancer.num_physical_experts).view(RANKS, -1)
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send)
    splits = send.sum(1).tolist(), recv.sum(1).tolist()
    (rows,) = balancer.transport.all_to_all([x[order // TOP_K]], [splits[0]], [splits[1]])
    return rows, recv, (order, splits)


def experts(rows, recv, weights):
    """One matrix per local slot; rows come by source rank, and by slot within a source."""
    slot = torch.arange(recv.shape[1]).repeat(RANKS).repeat_interleave(recv.flatten())
    by_slot = slot.argsort(stable=True)
    parts = rows[by_slot].split(recv.sum(0).tolist())
    done = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    return torch.empty_like(done).index_copy(0, by_slot, done)


def combine(rows, handle, topk_weights, balancer):
    """The way back, and the weighted sum over k."""
    order, (send, recv) = handle
    (rows,) = balancer.transport.all_to_all([rows], [recv], [send])
    rows = torch.empty_like(rows).index_copy(0, order, rows)
    return (rows.view(-1, TOP_K, HIDDEN) * topk_weights.unsqueeze(-1)).sum(1)


# --- the integration: what is TopoEP's is marked --------------------------------------------------
def moe_layer(x, topk_ids, topk_weights, weight, balancer):
    plan = balancer.plan(topk_ids)  #                                           TopoEP
    ids = balancer.reroute(topk_ids, plan)  #                                   TopoEP
    (guests,) = balancer.replicate((weight,), plan)  #                          TopoEP
    rows, recv, handle = dispatch(x, ids, balancer)
    y = experts(rows, recv, [*weight, *guests])  #             home experts first, then copies
    y = balancer.release(y, plan)  #                                            TopoEP
    return combine(y, handle, topk_weights, balancer), plan


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    weights = torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5
    home = EXPERTS // RANKS
    topology = topoep.Topology(num_nodes=NODES, ranks_per_node=RANKS // NODES)
    torch.manual_seed(rank)
    x = torch.randn(256, HIDDEN)
    scores = torch.rand(256, EXPERTS) + torch.linspace(0.8, 0, EXPERTS)  # expert 0 is hot
    topk_weights, topk_ids = scores.topk(TOP_K)
    results = {}
    for spare_slots in (0, 2):
        weight = weights[rank * home : (rank + 1) * home].clone().requires_grad_()
        balancer = topoep.Balancer(topology, EXPERTS, spare_slots, group=dist.group.WORLD)
        y, plan = moe_layer(x, topk_ids, topk_weights, weight, balancer)
        y.square().sum().backward()
        results[spare_slots] = y, weight.grad, plan.stats()
    torch.testing.assert_close(results[2][0], results[0][0])
    torch.testing.assert_close(results[2][1], results[0][1])
    if rank == 0:
        stats = results[2][2]
        print(
            "same outputs and gradients; imbalance "
            f"{stats['imbalance_before']:.2f} -> {stats['imbalance']:.2f} with "
            f"{stats['in_node_copies']} copies in nodes and {stats['cross_node_copies']} across"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{os.path.join(folder, 'store')}"
        mp.start_processes(main, args=(place,), nprocs=RANKS, start_method="fork")
