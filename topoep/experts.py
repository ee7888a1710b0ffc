# SPDX-License-Identifier: Apache-2.0
"""A drop-in experts module: routed tokens in, combined expert outputs out, over any group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from topoep import ops
from topoep.balancer import Balancer, TensorOrList, WeightsOrList
from topoep.objective import Objective
from topoep.plan import Plan
from topoep.topology import Topology
from topoep.transports.base import Weights


class BalancedExperts(nn.Module):
    """SwiGLU experts under expert parallelism, with hot experts copied for each microbatch.

    Replaces the experts of an MoE layer: the router stays outside. Plans, reroutes, sends every
    token to the rank that computes it, computes home experts first and copies second, and combines
    each token's outputs in order of k, so the result does not depend on where they were computed.

    Parameters are those of the home experts only: ``gate_up_proj [H, 2I, D]`` and
    ``down_proj [H, D, I]``; copies never appear in ``state_dict`` or in an optimizer. With a
    balancer that simulates all ranks, dimension 0 holds the home experts of all of them.

    Args:
        num_experts: E.
        hidden_size: D.
        intermediate_size: I.
        balancer: shared by the layers of a model; made from the next four arguments if None.
        topology: as for :class:`topoep.Balancer`; from the group if None.
        group: the expert-parallel process group; None simulates all ranks in this process.
        spare_slots: S.
        objective: as for :class:`topoep.Balancer`.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: a balancer is given together with arguments for one, or for another number of
            experts; or neither balancer, topology nor group is given.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        balancer: Balancer | None = None,
        topology: Topology | None = None,
        group: dist.ProcessGroup | None = None,
        spare_slots: int | None = None,
        objective: Objective | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if balancer is None:
            if topology is None and group is None:
                raise ValueError("BalancedExperts needs balancer=, topology= or group=")
            balancer = Balancer(
                Topology.from_group(group) if topology is None else topology,
                num_experts,
                2 if spare_slots is None else spare_slots,
                group=group,
                objective=objective,
            )
        elif any(given is not None for given in (topology, group, spare_slots, objective)):
            raise ValueError("give balancer=, or topology, group, spare_slots and objective")
        if balancer.num_experts != num_experts:
            raise ValueError(
                f"num_experts={num_experts}, but the balancer is for {balancer.num_experts}"
            )
        self.balancer = balancer
        held = len(balancer.held_ranks) * balancer.config.experts_per_rank

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        self.gate_up_proj = parameter(held, 2 * intermediate_size, hidden_size)
        self.down_proj = parameter(held, hidden_size, intermediate_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights as torch.nn.Linear does.

        An expert's weights follow from torch's seed and the expert's number: ranks with the same
        seed get different experts, and the model does not depend on the number of ranks.
        """
        bal = self.balancer
        home = bal.config.experts_per_rank
        experts = [rank * home + i for rank in bal.held_ranks for i in range(home)]
        for parameter in (self.gate_up_proj, self.down_proj):
            seed = int(torch.randint(2**62, ()))
            bound = parameter.shape[-1] ** -0.5
            for weight, expert in zip(parameter.detach(), experts, strict=True):
                generator = torch.Generator(weight.device).manual_seed(seed + expert)
                weight.uniform_(-bound, bound, generator=generator)

    def forward(
        self,
        x: TensorOrList,
        topk_ids: TensorOrList,
        topk_weights: TensorOrList,
        plan: Plan | None = None,
    ) -> TensorOrList:
        """Applies the experts.

        Args:
            x: ``[T, D]``; T may differ from rank to rank and may be 0.
            topk_ids: int32 or int64 ``[T, K]``; pairs with -1 or an id out of range add nothing.
            topk_weights: ``[T, K]``, any floating dtype.
            plan: from ``balancer.plan(topk_ids)``; made here if None.

        Returns:
            ``[T, D]``: for each token the sum over k of weight times expert output. For a balancer
            that simulates all ranks every argument is a list with an entry per rank, and so is the
            result.

        Raises:
            TypeError, ValueError: shapes or dtypes that do not fit, or a plan for other ids.
        """
        bal = self.balancer
        local = bal.transport.name == "local"
        xs, ids, weights = (
            [t] if isinstance(t, Tensor) else list(t) for t in (x, topk_ids, topk_weights)
        )
        for triple in zip(xs, ids, weights, strict=True):
            self._check_inputs(*triple)
        if plan is None:
            plan = bal.plan(ids if local else ids[0], layer=self)
        else:
            _check_plan_is_for(plan, ids, bal)
        rerouted = bal.reroute(ids if local else ids[0], plan)
        physical = [rerouted] if isinstance(rerouted, Tensor) else list(rerouted)
        rows = [plan if plan.rank == rank else plan.for_rank(rank) for rank in bal.held_ranks]

        orders = [_sort_pairs(i, p, bal) for i, p in zip(ids, physical, strict=True)]
        send = [_rank_splits(row.host.send, bal.config.num_ranks) for row in rows]
        recv = [row.host.recv.sum(1).tolist() for row in rows]
        tokens = [
            ops.expand(x_, pair_of_row, row_of_pair)[: sum(splits)]
            for x_, (pair_of_row, row_of_pair), splits in zip(xs, orders, send, strict=True)
        ]
        bal.debug_check("dispatch", plan)
        arrived = bal.transport.all_to_all(tokens, send, recv)
        outputs = self._compute(arrived, rows, plan)
        returned = bal.transport.all_to_all(outputs, recv, send)
        combined = []
        for y, (pair_of_row, row_of_pair), w in zip(returned, orders, weights, strict=True):
            dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
            used = ops.combine(y, pair_of_row[: y.shape[0]], row_of_pair, w.to(dtype))
            combined.append(bal.history(self).mark(used, plan))
        return combined if local else combined[0]

    def _compute(self, arrived: list[Tensor], rows: list[Plan], plan: Plan) -> list[Tensor]:
        """Runs each held rank's experts on the rows that arrived; rows keep their order."""
        bal = self.balancer
        home_slots = bal.config.experts_per_rank
        homes: list[Weights] = list(
            zip(self.gate_up_proj.split(home_slots), self.down_proj.split(home_slots), strict=True)
        )
        local = bal.transport.name == "local"
        weights: WeightsOrList = homes if local else homes[0]
        fetched = bal.replicate(weights, plan)
        guests = list(fetched) if isinstance(fetched, list) else [fetched]
        outputs = []
        for x, row, home, guest in zip(arrived, rows, homes, guests, strict=True):
            order, counts = _group_by_slot(row)
            parts = list(x.index_select(0, order).split(counts))
            done = [
                _swiglu(part, home[0][i], home[1][i]) for i, part in enumerate(parts[:home_slots])
            ]
            done += [
                _swiglu(part, guest[0][i], guest[1][i]) for i, part in enumerate(parts[home_slots:])
            ]
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=order.device)
            outputs.append(torch.cat(done).index_select(0, inverse))
        released = bal.release(outputs if local else outputs[0], plan)
        return [released] if isinstance(released, Tensor) else list(released)

    def _check_inputs(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        hidden = self.gate_up_proj.shape[-1]
        if x.dim() != 2 or x.shape[1] != hidden:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected [tokens, {hidden}]")
        if x.dtype != self.gate_up_proj.dtype:
            raise TypeError(f"x has dtype {x.dtype}, the experts {self.gate_up_proj.dtype}")
        if not weights.is_floating_point():
            raise TypeError(f"topk_weights has dtype {weights.dtype}; expected a floating dtype")
        if ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
            raise ValueError(
                f"topk_ids {tuple(ids.shape)} and topk_weights {tuple(weights.shape)} must both be "
                f"[tokens, top_k] for {x.shape[0]} tokens"
            )


def _check_plan_is_for(plan: Plan, ids: Sequence[Tensor], bal: Balancer) -> None:
    for rank, tensor in zip(bal.held_ranks, ids, strict=True):
        counts, _ = ops.histogram(tensor, bal.num_experts)
        if not torch.equal(counts, plan.counts[rank]):
            raise ValueError(
                f"the plan was not made for the topk_ids of rank {rank}: their counts differ"
            )


def _sort_pairs(ids: Tensor, physical: Tensor, bal: Balancer) -> tuple[Tensor, Tensor]:
    """Orders (token, k) pairs by physical id, then by token; pairs without an expert last.

    Which pairs have one is seen from the routed ids: an id out of range is passed through by
    reroute, and may look like a physical id afterwards.

    Returns:
        int64 ``[T * K]``: the pair of each row, and int64 ``[T, K]``: the row of each pair, -1 for
        pairs without an expert.
    """
    valid = (ids >= 0) & (ids < bal.num_experts)
    key = torch.where(valid, physical, bal.num_physical_experts).flatten()
    pair_of_row = torch.argsort(key, stable=True)
    row_of_pair = torch.empty_like(pair_of_row)
    row_of_pair[pair_of_row] = torch.arange(len(pair_of_row), device=ids.device)
    return pair_of_row, torch.where(valid, row_of_pair.view(ids.shape), -1)


def _rank_splits(send: npt.NDArray[np.int32], num_ranks: int) -> list[int]:
    """Rows for each rank, from tokens for each physical expert."""
    splits: list[int] = send.reshape(num_ranks, -1).sum(1).tolist()
    return splits


def _group_by_slot(row: Plan) -> tuple[Tensor, list[int]]:
    """The order that groups received rows by local slot, and the rows of each slot.

    Rows arrive by source rank, and by slot within a source.
    """
    assert row.recv is not None
    num_ranks, width = row.recv.shape
    slots = torch.arange(width, device=row.recv.device).repeat(num_ranks)
    total = int(row.host.recv.sum())
    slot_of_row = torch.repeat_interleave(slots, row.recv.flatten(), output_size=total)
    return torch.argsort(slot_of_row, stable=True), row.host.recv.sum(0).tolist()


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
