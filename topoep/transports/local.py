# SPDX-License-Identifier: Apache-2.0
"""All ranks simulated in one process, on the CPU or on one GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topoep.topology import Topology
from topoep.transports.host import HostTransport


class LocalTransport(HostTransport):
    """Moves data between simulated ranks by indexing. For tests, examples and planning."""

    name = "local"

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.held = tuple(range(topology.num_ranks))

    def gather_config(self, values: Tensor) -> Tensor:
        """See :meth:`Transport.gather_config`."""
        return values.expand(len(self.held), -1)

    def exchange(self, counts: Sequence[Tensor]) -> Tensor:
        """See :meth:`Transport.exchange`."""
        return torch.stack(list(counts))

    def all_to_all(
        self,
        rows: Sequence[Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """See :meth:`Transport.all_to_all`."""
        parts = [r.split(list(splits)) for r, splits in zip(rows, send_splits, strict=True)]
        return [torch.cat([parts[source][target] for source in self.held]) for target in self.held]
