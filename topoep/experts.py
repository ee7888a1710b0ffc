# SPDX-License-Identifier: Apache-2.0
"""A drop-in experts module: routed tokens in, combined expert outputs out, over any group."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from topoep import ops
from topoep.balancer import Balancer, PendingReplicas, TensorOrList
from topoep.checks import check_int, check_type
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
        num_chunks: with more than one, the tokens of the copies are dispatched while those of home
            experts are computed, and home experts are divided into ``num_chunks - 1`` parts that
            overlap likewise. Results are the same bit for bit.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: a balancer is given together with arguments for one, or for another number of
            experts; neither balancer, topology nor group is given; or there are more chunks than
            home experts allow.
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
        num_chunks: int = 1,
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
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if check_int(size, name) < 1:
                raise ValueError(f"{name}={size}; expected at least 1")
        self.balancer = balancer
        self.num_chunks = num_chunks
        self._last_plan: weakref.ref[Plan] | None = None
        self._chunks = _slot_ranges(check_int(num_chunks, "num_chunks"), balancer)
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
            seed = int(torch.randint(2**62, (), device="cpu"))
            bound = parameter.shape[-1] ** -0.5
            if parameter.is_meta:
                continue  # to be drawn again on a device, after to_empty()
            for weight, expert in zip(parameter.detach(), experts, strict=True):
                generator = torch.Generator(weight.device).manual_seed(seed + expert)
                weight.uniform_(-bound, bound, generator=generator)

    # What it does depends on the plan, so a compiler has nothing to gain here: it breaks its graph.
    @torch.compiler.disable
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
        if not len(xs) == len(ids) == len(weights) == len(bal.held_ranks):
            raise ValueError(
                f"x, topk_ids and topk_weights have {len(xs)}, {len(ids)} and {len(weights)} "
                f"entries; expected one for each of {len(bal.held_ranks)} ranks"
            )
        for triple in zip(xs, ids, weights, strict=True):
            self._check_inputs(*triple)
        if plan is None:
            plan = bal.plan(ids if local else ids[0], layer=self)
        else:
            _check_plan_is_for(plan, ids, bal)
        self._last_plan = weakref.ref(plan)
        rerouted = bal.reroute(ids if local else ids[0], plan)
        physical = [rerouted] if isinstance(rerouted, Tensor) else list(rerouted)
        rows = [plan if plan.rank == rank else plan.for_rank(rank) for rank in bal.held_ranks]

        transport = bal.transport
        homes = self._home_weights()
        # The copies first: they are on their way while tokens are, and while home experts compute.
        fetched = bal.replicate_async(homes if local else homes[0], plan, since=xs[0])
        orders = [_sort_pairs(i, p, self._chunks, bal) for i, p in zip(ids, physical, strict=True)]
        rows_of = [
            ops.expand(x_, pair_of_row, row_of_pair)
            for x_, (pair_of_row, row_of_pair) in zip(xs, orders, strict=True)
        ]
        flights, splits, start = [], [], [0] * len(rows)
        for first, last in self._chunks:
            send = [_rank_splits(row.host.send, bal, first, last) for row in rows]
            recv = [row.host.recv[:, first:last].sum(1).tolist() for row in rows]
            tokens = [
                x_[at : at + sum(count)] for x_, at, count in zip(rows_of, start, send, strict=True)
            ]
            start = [at + sum(count) for at, count in zip(start, send, strict=True)]
            flights.append(transport.start_all_to_all(tokens, send, recv))
            splits.append((send, recv))
        returning = []
        for (first, last), flight, (send, recv) in zip(self._chunks, flights, splits, strict=True):
            outputs = self._compute(flight(), rows, homes, fetched, first, last)
            if last > bal.config.experts_per_rank:
                outputs = _as_list(bal.release(outputs if local else outputs[0], plan))
            returning.append(transport.start_all_to_all(outputs, recv, send))
        returned = [flight() for flight in returning]
        combined: list[Tensor] = []
        for i, ((pair_of_row, row_of_pair), w) in enumerate(zip(orders, weights, strict=True)):
            parts = [chunk[i] for chunk in returned]
            y = parts[0] if len(parts) == 1 else torch.cat(parts)
            dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
            used = ops.combine(y, pair_of_row[: y.shape[0]], row_of_pair, w.to(dtype))
            combined.append(bal.history(self).mark(used, plan))
        return bal.prefetch(combined if local else combined[0], plan)

    @torch.compiler.disable  # as forward
    def prefetch(self, hidden: TensorOrList) -> TensorOrList:
        """Identity whose backward starts to fetch the copies of the last forward pass again.

        For hidden states that are computed later, say the output of the next block: the copies then
        travel while that block is in backward. Without it they travel beside the gradients of this
        layer's own output. Call it on every rank. How far up it may be placed, and what it raises,
        is said at :meth:`topoep.Balancer.prefetch`, which also takes a plan: use that one where
        microbatches alternate between layers.

        Args:
            hidden: hidden states; a list with an entry per rank where ranks are simulated.
        """
        if self._last_plan is None:
            raise RuntimeError("prefetch comes after a forward pass of the layer; there was none")
        plan = self._last_plan()
        # Without autograd nothing keeps the plan, and nothing will be fetched.
        return hidden if plan is None else self.balancer.prefetch(hidden, plan)

    def _home_weights(self) -> list[Weights]:
        """The weights of each held rank's home experts."""
        bal = self.balancer
        parameters = [self.gate_up_proj, self.down_proj]
        # A wrapper that keeps parameters in one flat buffer must find them there again.
        own = [p for p in parameters if _owns_storage(p)]
        if own:
            bal.share_weights(own)
        size = bal.config.experts_per_rank
        return list(zip(*(parameter.split(size) for parameter in parameters), strict=True))

    def _compute(
        self,
        arrived: list[Tensor],
        rows: list[Plan],
        homes: list[Weights],
        fetched: PendingReplicas,
        first: int,
        last: int,
    ) -> list[Tensor]:
        """Runs the experts in slots ``first .. last - 1`` on each held rank's rows for them.

        Home experts first, then copies. Rows keep their order.
        """
        home_slots = self.balancer.config.experts_per_rank
        done: list[list[Tensor]] = []
        parts_of, inverses = [], []
        for x, row in zip(arrived, rows, strict=True):
            order, counts = _group_by_slot(row, first, last)
            parts_of.append(x.index_select(0, order).split(counts))
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=order.device)
            inverses.append(inverse)
        for parts, home in zip(parts_of, homes, strict=True):
            done.append(
                [
                    _swiglu(parts[slot - first], home[0][slot], home[1][slot])
                    for slot in range(first, min(last, home_slots))
                ]
            )
        if last > home_slots:
            guests = fetched.wait()
            held_guests = guests if isinstance(guests, list) else [guests]
            for parts, guest, outputs in zip(parts_of, held_guests, done, strict=True):
                outputs += [
                    _swiglu(parts[slot - first], guest[0][i], guest[1][i])
                    for i, slot in enumerate(range(home_slots, last))
                ]
        return [
            torch.cat(outputs).index_select(0, inverse)
            for outputs, inverse in zip(done, inverses, strict=True)
        ]

    def _check_inputs(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        hidden = self.gate_up_proj.shape[-1]
        for name, value in (("x", x), ("topk_ids", ids), ("topk_weights", weights)):
            check_type(value, Tensor, name)
        if x.dim() != 2 or x.shape[1] != hidden:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected [tokens, {hidden}]")
        # Under autocast the GEMMs convert both.
        if x.dtype != self.gate_up_proj.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"x has dtype {x.dtype}, the experts {self.gate_up_proj.dtype}; convert x, or run "
                "under torch.autocast"
            )
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


def _slot_ranges(num_chunks: int, bal: Balancer) -> list[tuple[int, int]]:
    """The slots of each chunk: the copies are the last one, home experts are shared out."""
    home = bal.config.experts_per_rank
    if num_chunks == 1:
        return [(0, bal.config.slots_per_rank)]
    parts = num_chunks - 1 if bal.spare_slots > 0 else num_chunks
    if not 1 <= parts <= home:
        raise ValueError(
            f"num_chunks={num_chunks}; expected 1 to {home + (bal.spare_slots > 0)}: the "
            f"{home} home experts of a rank, and one chunk for its copies"
        )
    bounds = [home * i // parts for i in range(parts + 1)]
    ranges = list(itertools.pairwise(bounds))
    return ranges + ([(home, home + bal.spare_slots)] if bal.spare_slots > 0 else [])


def _sort_pairs(
    ids: Tensor, physical: Tensor, chunks: Sequence[tuple[int, int]], bal: Balancer
) -> tuple[Tensor, Tensor]:
    """Orders (token, k) pairs by chunk, physical id and token; pairs without an expert last.

    Which pairs have one is seen from the routed ids: an id out of range is passed through by
    reroute, and may look like a physical id afterwards.

    Returns:
        int64 ``[T * K]``: the pair of each row, and int64 ``[T, K]``: the row of each pair, -1 for
        pairs without an expert.
    """
    valid = (ids >= 0) & (ids < bal.num_experts)
    slot = physical % bal.config.slots_per_rank
    key = physical.clone()
    for first, _ in chunks[1:]:
        key += (slot >= first).to(key.dtype) * bal.num_physical_experts
    key = torch.where(valid, key, len(chunks) * bal.num_physical_experts).flatten()
    pair_of_row = torch.argsort(key, stable=True)
    row_of_pair = torch.empty_like(pair_of_row)
    row_of_pair[pair_of_row] = torch.arange(len(pair_of_row), device=ids.device)
    return pair_of_row, torch.where(valid, row_of_pair.view(ids.shape), -1)


def _rank_splits(send: npt.NDArray[np.int32], bal: Balancer, first: int, last: int) -> list[int]:
    """Rows for each rank in slots ``first .. last - 1``, from tokens for each physical expert."""
    by_rank = send.reshape(bal.config.num_ranks, -1)
    splits: list[int] = by_rank[:, first:last].sum(1).tolist()
    return splits


def _group_by_slot(row: Plan, first: int, last: int) -> tuple[Tensor, list[int]]:
    """The order that groups received rows by local slot, and the rows of each slot.

    Rows arrive by source rank, and by slot within a source.
    """
    assert row.recv is not None
    counts = row.recv[:, first:last]
    num_ranks, width = counts.shape
    slots = torch.arange(width, device=counts.device).repeat(num_ranks)
    on_host = row.host.recv[:, first:last]
    slot_of_row = torch.repeat_interleave(slots, counts.flatten(), output_size=int(on_host.sum()))
    return torch.argsort(slot_of_row, stable=True), on_host.sum(0).tolist()


def _owns_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _as_list(value: TensorOrList) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
