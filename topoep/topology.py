# SPDX-License-Identifier: Apache-2.0
"""Which rank lives on which node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from topoep.checks import check_int

MAX_RANKS = 1024  # kMaxRanks in csrc/core/limits.h


@dataclass(frozen=True, init=False)
class Topology:
    """The two-level network: ranks, and the node of each.

    Give either the sizes of a uniform cluster, whose nodes are blocks of consecutive ranks, or the
    node of every rank, in any arrangement (EP groups are often strided over the nodes) and with
    nodes of any size. Node numbers need not be dense.

    Args:
        num_nodes: N.
        ranks_per_node: G; R = N * G.
        node_of_rank: the node of each rank, instead of the two sizes.

    Raises:
        ValueError: neither or both forms are given, a size is not positive, or there are more than
            ``MAX_RANKS`` ranks.

    Example:
        >>> topo = topoep.Topology(num_nodes=2, ranks_per_node=4)
        >>> topoep.Topology(node_of_rank=[0, 1, 0, 1]).ranks_of_node(0)
        (0, 2)
    """

    #: Node of each rank, renumbered 0 .. N - 1 in ascending order of the numbers given.
    node_of_rank: tuple[int, ...]
    _tables: dict[torch.device, Tensor] = field(compare=False, repr=False)

    def __init__(
        self,
        num_nodes: int | None = None,
        ranks_per_node: int | None = None,
        *,
        node_of_rank: Sequence[int] | Tensor | None = None,
    ) -> None:
        if node_of_rank is None:
            if num_nodes is None or ranks_per_node is None:
                raise ValueError(
                    "Topology needs num_nodes and ranks_per_node, or node_of_rank (a node for "
                    "every rank)"
                )
            check_int(num_nodes, "num_nodes")
            check_int(ranks_per_node, "ranks_per_node")
            if num_nodes < 1 or ranks_per_node < 1:
                raise ValueError(
                    f"num_nodes={num_nodes} and ranks_per_node={ranks_per_node}: both must be at "
                    "least 1"
                )
            if num_nodes * ranks_per_node > MAX_RANKS:
                raise ValueError(
                    f"{num_nodes * ranks_per_node} ranks; expected 1 to {MAX_RANKS} (kMaxRanks)"
                )
            node_of_rank = [rank // ranks_per_node for rank in range(num_nodes * ranks_per_node)]
        elif num_nodes is not None or ranks_per_node is not None:
            raise ValueError("give num_nodes and ranks_per_node, or node_of_rank, not both")
        if not isinstance(node_of_rank, Iterable):
            raise TypeError(
                f"node_of_rank is a {type(node_of_rank).__name__}; expected a node for every rank, "
                "such as [0, 0, 1, 1]"
            )
        if isinstance(node_of_rank, Tensor):
            node_of_rank = node_of_rank.tolist()
        nodes = [check_int(node, "a node of node_of_rank") for node in node_of_rank]
        if not 1 <= len(nodes) <= MAX_RANKS:
            raise ValueError(f"{len(nodes)} ranks; expected 1 to {MAX_RANKS} (kMaxRanks)")
        dense = {node: i for i, node in enumerate(sorted(set(nodes)))}
        object.__setattr__(self, "node_of_rank", tuple(dense[node] for node in nodes))
        object.__setattr__(self, "_tables", {})

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None = None) -> Topology:
        """The topology of a process group: ranks with the same host name share a node.

        One collective over the group (an object all-gather). ``TOPOEP_NODE`` in a rank's
        environment replaces its host name, for machines where that is not the NVLink domain.

        Args:
            group: the EP group; the default group if None.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            ValueError: this process is not in the group.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "Topology.from_group needs torch.distributed: call init_process_group first, or "
                "describe the cluster with Topology(num_nodes=.., ranks_per_node=..)"
            )
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a member of the group given to from_group")
        names: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(names, os.environ.get("TOPOEP_NODE", socket.gethostname()), group)
        first_seen = {name: i for i, name in reversed(list(enumerate(names)))}
        return cls(node_of_rank=[first_seen[name] for name in names])

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        """N."""
        return max(self.node_of_rank) + 1

    def ranks_of_node(self, node: int) -> tuple[int, ...]:
        """The ranks of one node, ascending."""
        return tuple(r for r in range(self.num_ranks) if self.node_of_rank[r] == node)

    @property
    def rank_order(self) -> tuple[int, ...]:
        """Ranks node by node, in which order the planner breaks ties and NCCL numbers them."""
        return tuple(sorted(range(self.num_ranks), key=lambda r: (self.node_of_rank[r], r)))

    def table(self, device: torch.device | str = "cpu") -> Tensor:
        """The tables that the ops take, in one int32 tensor on ``device``, made once per device.

        Ranks in node-major order (R), the place of each rank in it (R), the node of each place (R),
        the first place of each node and R (N + 1).
        """
        device = torch.device(device)
        if device not in self._tables:
            order = self.rank_order
            place = [0] * self.num_ranks
            for position, rank in enumerate(order):
                place[rank] = position
            nodes = [self.node_of_rank[rank] for rank in order]
            begin = [nodes.index(node) for node in range(self.num_nodes)] + [self.num_ranks]
            values = [*order, *place, *nodes, *begin]
            self._tables[device] = torch.tensor(values, dtype=torch.int32, device=device)
        return self._tables[device]
