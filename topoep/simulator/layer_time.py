# SPDX-License-Identifier: Apache-2.0
"""Predicted time of one MoE layer, forward and backward. docs/simulator.md lists the formulas.

Exchanges are barriers, so the layer is a sum of maxima: the slowest link of the dispatch, then the
fullest rank, then the slowest link of the combine. Everything here is a prediction.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from topoep.cost_model import CostModel
from topoep.expert_costs import ExpertCosts
from topoep.simulator.cluster import Cluster
from topoep.simulator.links import Links, Rows
from topoep.simulator.model import MoEModel
from topoep.simulator.placement import Placement
from topoep.simulator.setting import Setting
from topoep.simulator.step_time import attention_times
from topoep.topology import Topology

Floats = npt.NDArray[np.float64]

_ROW_BYTES = 2  # bf16, per element of a row


@dataclass(frozen=True)
class LayerTimes:
    """Predicted seconds of B microbatches, each ``[B]``; in the order in which they happen.

    ``compute`` is the fullest rank's. What a transfer is longer than what hides it is ``exposed``;
    ``interference`` is by how much hidden transfers slow down the rest.
    """

    planning: Floats
    dispatch: Floats
    compute_forward: Floats
    exposed_forward: Floats
    combine: Floats
    combine_backward: Floats
    compute_backward: Floats
    exposed_backward: Floats
    dispatch_backward: Floats
    exposed_grads: Floats
    interference: Floats
    recompute: Floats

    @property
    def forward(self) -> Floats:
        """Forward, without its share of the interference."""
        return (
            self.planning
            + self.dispatch
            + self.compute_forward
            + self.exposed_forward
            + self.combine
        )

    @property
    def total(self) -> Floats:
        """Forward and backward."""
        parts = [getattr(self, field.name) for field in dataclasses.fields(self)]
        total: Floats = np.sum(parts, axis=0)
        return total

    @classmethod
    def join(cls, parts: list[LayerTimes]) -> LayerTimes:
        """Of the microbatches of all parts, one after another."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class LayerModel:
    """Predicts the time of one MoE layer.

    Args:
        cluster: the machines.
        model: the model; its number of experts is not used.
        topology: of one expert-parallel group.
        setting: the rest.
    """

    def __init__(
        self, cluster: Cluster, model: MoEModel, topology: Topology, setting: Setting
    ) -> None:
        cluster.check_fits(topology)
        self.cluster, self.model, self.topology, self.setting = cluster, model, topology, setting
        self.costs = ExpertCosts.of(
            model.hidden,
            model.intermediate,
            setting.dtype,
            cluster.hardware,
            setting.sharded,
            setting.gemm_dtype,
        )
        self.links = Links(topology)

    def cost_model(self, tokens: int) -> CostModel:
        """The planner's constants for these machines and this model.

        Args:
            tokens: of a rank; decides how much attention hides the gradients' way home.
        """
        _, attention = attention_times(self.cluster, self.model, self.setting, tokens)
        derived = CostModel.from_model(
            self.model.hidden,
            self.model.intermediate,
            self.setting.dtype,
            self.cluster.hardware,
            sharded=self.setting.sharded,
            dedup=self.setting.dedup,
            overlap=self.setting.overlap,
            hide_grads_us=1e6 * self.setting.overlap * attention,
            gemm_dtype=self.setting.gemm_dtype,
        )
        return dataclasses.replace(derived, interference=round(1000 * self.setting.interference))

    def tokens(self, counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Tokens of each source rank ``[B, R]``, from counts ``[B, R, E]``."""
        tokens: npt.NDArray[np.int64] = -(-counts.sum(2, dtype=np.int64) // self.model.top_k)
        return tokens

    def predict(
        self,
        placement: Placement,
        tokens: npt.NDArray[np.int64],
        planned: bool = True,
        rerouted: bool = True,
    ) -> LayerTimes:
        """The predicted times.

        Args:
            placement: of B microbatches.
            tokens: int64 ``[B, R]`` from :meth:`tokens`.
            planned: whether a plan is made for each microbatch.
            rerouted: whether ids are rewritten.
        """
        setting, costs = self.setting, self.costs
        batch = len(tokens)
        rows = self.links.rows(placement.split, tokens, setting.dedup)
        dispatch = self.exchange(rows, setting.dispatch_bytes)
        back = self.exchange(rows, _ROW_BYTES)
        loads = placement.loads.astype(np.float64)
        groups = placement.groups
        forward = (loads * costs.row_forward + groups * costs.group_forward).max(1)
        backward = (loads * costs.row_backward + groups * costs.group_backward).max(1)

        weights = self.busiest_link(placement, costs.copy, costs.cross_copy)
        grads = self.busiest_link(placement, costs.grad, costs.cross_grad)
        home_rows = self._home_rows(placement)
        _, attention = attention_times(
            self.cluster, self.model, setting, float(tokens.mean()) if tokens.size else 0.0
        )
        exposed_forward = _beyond(weights, setting.overlap * costs.row_forward * home_rows)
        exposed_backward = _beyond(weights, setting.overlap * costs.row_backward * home_rows)
        exposed_grads = _beyond(grads, np.full(batch, setting.overlap * attention))
        hidden = 2 * weights + grads - exposed_forward - exposed_backward - exposed_grads
        planning = 1e-6 * (planned * setting.planning_us + rerouted * setting.reroute_us)
        again = dispatch + forward if setting.recompute != "none" else np.zeros(batch)
        return LayerTimes(
            planning=np.full(batch, planning),
            dispatch=dispatch,
            compute_forward=forward,
            exposed_forward=exposed_forward,
            combine=back,
            combine_backward=back,
            compute_backward=backward,
            exposed_backward=exposed_backward,
            dispatch_backward=back,
            exposed_grads=exposed_grads,
            interference=setting.interference * hidden,
            recompute=again,
        )

    def exchange(self, rows: Rows, element_bytes: int) -> Floats:
        """Seconds of one exchange ``[B]``: the busiest NIC or in-node link, and its latency."""
        kind = self.cluster.hardware
        row = element_bytes * self.model.hidden
        nic = np.maximum(rows.nic_out, rows.nic_in).max(1) * row
        nic *= kind.ranks_per_node / (kind.nics_per_node * kind.nic_bandwidth)
        link = np.maximum(rows.link_out, rows.link_in).max(1) * row / kind.link_bandwidth
        latency = kind.link_latency if self.topology.num_ranks > 1 else 0.0
        latency += kind.nic_latency if self.topology.num_nodes > 1 else 0.0
        slowest: Floats = np.maximum(nic, link) + latency
        return slowest

    def busiest_link(self, placement: Placement, copy: float, cross: float) -> Floats:
        """Seconds on the busiest link for all copies ``[B]`` (docs/algorithm.md, section 7b)."""
        sources = placement.sources
        batch, ranks, _ = sources.shape
        nodes = np.asarray(self.topology.node_of_rank)
        fetched = sources >= 0
        if not fetched.any():
            return np.zeros(batch)
        across = fetched & (nodes[sources] != nodes[None, :, None])
        inside = fetched & ~across
        b, rank, slot = np.nonzero(inside)
        copies_out = np.zeros((batch, ranks))
        np.add.at(copies_out, (b, sources[b, rank, slot]), 1)
        copies_in = inside.sum(2)
        b, rank, slot = np.nonzero(across)
        exports, imports = np.zeros((batch, ranks)), across.sum(2)
        np.add.at(exports, (b, sources[b, rank, slot]), 1)
        pairs = np.zeros((2, batch, self.topology.num_nodes))
        np.add.at(pairs[0], (b, nodes[sources[b, rank, slot]]), 1)
        np.add.at(pairs[1], (b, nodes[rank]), 1)
        edge = copy * (1 - 1 / self.links.node_sizes[nodes]) if self.setting.sharded else 0.0
        busiest = np.maximum(copies_out * copy + exports * edge, copies_in * copy + imports * edge)
        slowest: Floats = np.maximum(busiest.max(1), pairs.max((0, 2)) * cross)
        return slowest

    def _home_rows(self, placement: Placement) -> Floats:
        """Least rows of home experts among ranks with copies ``[B]``; 0 where there is none."""
        home = placement.received[..., : placement.home_slots].sum(2, dtype=np.float64)
        guests = (placement.sources >= 0).max(2)
        least: Floats = np.where(guests, home, np.inf).min(1)
        return np.where(np.isinf(least), 0.0, least)

    def spare_bytes(self, spare_slots: int) -> int:
        """Memory of S spare slots on a rank: weights, and gradients during backward."""
        return spare_slots * (self.costs.weight_bytes + self.costs.grad_bytes)

    def activation_bytes(self, placement: Placement) -> npt.NDArray[np.int64]:
        """Bytes that the experts of the fullest rank keep for backward ``[B]``, bf16.

        Input and output of an expert, gate, up, and their product.
        """
        row = _ROW_BYTES * (2 * self.model.hidden + 3 * self.model.intermediate)
        largest: npt.NDArray[np.int64] = placement.loads.max(1) * row
        return largest


def _beyond(transfer: Floats, hidden_by: Floats) -> Floats:
    """What a transfer is longer than what hides it; 0 where nothing is transferred."""
    return np.where(transfer > 0, np.maximum(transfer - hidden_by, 0), 0)
