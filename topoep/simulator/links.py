# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens on every link when plans are carried out.

Two kinds of dispatchers. With ``dedup`` (DeepEP's normal kernels) a token crosses to another node
once, from its rank's NIC to the NIC of the rank with the same index there, which passes it on over
the in-node links, once to every rank that needs it. Without (a plain all-to-all) every routed pair
goes from the token's rank straight to the expert's.

Which experts a token combines is not recorded, so how often two of them are on one rank or node is
an expectation: a token of rank r goes to an expert with probability tokens / T_r, independent of
its other experts. Sampled tokens (128 experts, top-8) need up to 2 % more rows on NICs, and up to
5 % more on in-node links, than this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from topoep.topology import Topology

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Rows on links for B microbatches, each ``[B, R]``, of one exchange."""

    nic_out: Floats
    nic_in: Floats
    link_out: Floats
    link_in: Floats


class Links:
    """Who sends through whose links, for one topology."""

    def __init__(self, topology: Topology) -> None:
        nodes = np.asarray(topology.node_of_rank)
        ranks, count = len(nodes), topology.num_nodes
        self.num_nodes = count
        self.same_node = nodes[:, None] == nodes  # [R, R]
        self.order = np.argsort(nodes, kind="stable")
        in_order = bool((self.order == np.arange(ranks)).all())
        self._sorted: slice | npt.NDArray[np.int64] = slice(None) if in_order else self.order
        self.begin = np.searchsorted(nodes[self.order], np.arange(count))
        self.node_sizes = np.bincount(nodes, minlength=count)
        index = np.empty(ranks, dtype=np.int64)  # of a rank in its node
        members = [np.flatnonzero(nodes == node) for node in range(count)]
        for ranks_of_node in members:
            index[ranks_of_node] = np.arange(len(ranks_of_node))
        # relay[r, n]: the rank of node n that passes on what rank r sends there.
        self.relay = np.stack([m[index % len(m)] for m in members], axis=1)
        own = np.arange(ranks)
        self.relay[own, nodes] = own
        self.elsewhere = nodes[:, None] != np.arange(count)  # [R, N]
        # Over the in-node link goes what does not arrive at the relay itself.
        self.passed_on = (self.relay[:, nodes] != own).astype(np.float64)  # [R, R]
        self._to_relay = np.zeros((ranks * count, ranks))
        self._to_relay[np.arange(ranks * count), self.relay.ravel()] = 1

    def rows(
        self, split: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64], dedup: bool
    ) -> Rows:
        """Rows of one exchange.

        Args:
            split: int32 ``[B, R, R, W]``: routed pairs of source rank, for a rank's W experts.
            tokens: int64 ``[B, R]``: tokens of each source rank.
            dedup: see the module.
        """
        if not dedup:
            return self._rows_of_pairs(split.sum(3, dtype=np.float64))
        batch = len(tokens)
        share = 1 / np.maximum(tokens, 1)[:, :, None]
        missed = 1 - split[..., 0] * share  # probability that a token is not for that rank
        for slot in range(1, split.shape[3]):
            missed *= 1 - split[..., slot] * share
        np.maximum(missed, 0, out=missed)
        count = tokens[:, :, None].astype(np.float64)
        to_node = count * (1 - np.multiply.reduceat(missed[..., self._sorted], self.begin, axis=2))
        to_node *= self.elsewhere
        passed = count * (1 - missed) * self.passed_on
        per_node = np.add.reduceat(passed[..., self._sorted], self.begin, axis=2)
        return Rows(
            nic_out=to_node.sum(2),
            nic_in=to_node.reshape(batch, -1) @ self._to_relay,
            link_out=per_node.reshape(batch, -1) @ self._to_relay,
            link_in=passed.sum(1),
        )

    def _rows_of_pairs(self, pairs: Floats) -> Rows:
        between = pairs * ~self.same_node
        inside = pairs * (self.same_node & ~np.eye(pairs.shape[1], dtype=bool))
        return Rows(between.sum(2), between.sum(1), inside.sum(2), inside.sum(1))
