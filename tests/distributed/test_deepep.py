# SPDX-License-Identifier: Apache-2.0
"""A layer over a dispatcher with DeepEP's interface, and the limits that are checked before it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import topoep
from tests.distributed.deepep_standin import StandInBuffer
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import make_problem, make_weights
from topoep.adapters import deepep

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 16, 32


def experts(x: Tensor, ids: Tensor, weights: Tensor, tables: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Weighted sum of a row's local experts, in float32."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    for slot, (gate_up, down) in enumerate(tables):
        row, k = (ids == slot).nonzero(as_tuple=True)
        gate, up = F.linear(x[row].float(), gate_up).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down) * weights[row, k, None]
        y = y.index_add(0, row, out)
    return y.to(x.dtype)


def run_layer(rank: int, spare_slots: int, tokens: int) -> tuple[list[Tensor], int]:
    ranks = dist.get_world_size()
    topology = topoep.Topology(2, ranks // 2)
    balancer = topoep.Balancer(topology, EXPERTS, spare_slots, group=dist.group.WORLD)
    deepep.limits.check(balancer, TOP_K)
    buffer = StandInBuffer(balancer.transport, TOP_K, num_max_tokens_per_rank=64)
    problem = make_problem(rank, tokens, TOP_K, EXPERTS, HIDDEN, torch.float32)
    if tokens > 3:
        problem.ids[3, 1] = -1
        problem.ids[2, 0] = EXPERTS + 5  # looks like a physical id
    home = EXPERTS // ranks
    weights = [
        w[rank * home : (rank + 1) * home].clone().requires_grad_()
        for w in make_weights(EXPERTS, HIDDEN, WIDTH, torch.float32)
    ]
    x = problem.x.to(torch.bfloat16).requires_grad_()
    plan = balancer.plan(problem.ids)
    arguments = deepep.dispatch_arguments(balancer, problem.ids, plan)
    copies = balancer.replicate(tuple(weights), plan)
    recv_x, recv_ids, recv_weights, handle, _ = buffer.dispatch(
        x, topk_weights=problem.weights, **arguments
    )
    assert handle.num_recv_tokens_per_expert_list == deepep.received_counts(plan).tolist()
    tables = [*zip(*weights, strict=True), *zip(*copies, strict=True)]
    y = balancer.release(experts(recv_x, recv_ids, recv_weights, tables), plan)
    out, _, _ = buffer.combine(y, handle)
    out.backward(problem.grad_y.to(torch.bfloat16))
    return [out.detach(), x.grad, *(w.grad for w in weights)], int(plan.stats()["copies"])


def compare(rank: int, tokens: list[int]) -> int:
    expected, _ = run_layer(rank, 0, tokens[rank])
    got, copies = run_layer(rank, 2, tokens[rank])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)  # the tokens are bfloat16
    return copies


@pytest.mark.parametrize("tokens", [[40, 40], [40, 33, 40, 40], [40, 0, 0, 7]], ids=str)
def test_equals_the_layer_without_copies(tokens):
    assert min(run_ranks(len(tokens), compare, tokens)) > 0


def simulated(experts: int = 8, spare_slots: int = 2) -> topoep.Balancer:
    return topoep.Balancer(topoep.Topology(2, 2), experts, spare_slots)


def test_limits_are_checked_at_set_up():
    deepep.limits.check(simulated(), 32)
    with pytest.raises(ValueError, match="33 top_k for a dispatcher that takes 1 to 32"):
        deepep.limits.check(simulated(), 33)
    with pytest.raises(ValueError, match=r"257 experts per rank, 1 spare slots on each of 4 ranks"):
        deepep.limits.check(simulated(1024, 1), 8)
    small = deepep.DispatchLimits(experts=15)
    with pytest.raises(ValueError, match=r"16 physical experts, 2 spare slots .* takes 1 to 15"):
        small.check(simulated(), 2)
    with pytest.raises(ValueError, match="4 ranks for a dispatcher that takes 1 to 3"):
        deepep.DispatchLimits(ranks=3).check(simulated(), 2)


def reject_duplicates(rank: int) -> None:
    balancer = topoep.Balancer(topoep.Topology(1, 2), 4, 1, group=dist.group.WORLD)
    ids = torch.tensor([[0, 1, -1], [-1, -1, 2], [3, 1, 3]])
    plan = balancer.plan(ids)
    with pytest.raises(ValueError, match=r"token 2 selects \[3, 1, 3\]"):
        deepep.dispatch_arguments(balancer, ids, plan)
    allowed = deepep.dispatch_arguments(balancer, ids[:2], balancer.plan(ids[:2]))
    assert (allowed["topk_idx"] == -1).tolist() == (ids[:2] == -1).tolist()


def test_an_expert_selected_twice_is_refused():
    run_ranks(2, reject_duplicates)


def test_counts_need_the_plan_of_a_rank():
    plan = topoep.solve(torch.ones(4, 8, dtype=torch.int32), topoep.Topology(2, 2))
    with pytest.raises(ValueError, match="for_rank"):
        deepep.received_counts(plan)
    assert deepep.received_counts(plan.for_rank(1)).tolist() == [4, 4, 0, 0]
