# SPDX-License-Identifier: Apache-2.0
"""The machines that a simulation runs on."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from topoep.checks import check_int
from topoep.hardware import Hardware, find_hardware
from topoep.topology import MAX_RANKS, Topology

_MAX_FILE = 2**20


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of one kind of GPU.

    Args:
        hardware: a preset's name (``topoep.hardware.HARDWARE``) or a :class:`topoep.Hardware`.
        num_nodes: N.
        ranks_per_node: GPUs used of each node; all of them if None.

    Raises:
        TypeError: hardware is neither a name nor a Hardware, or a count is no int.
        ValueError: an unknown preset, or a count that is not positive or does not fit.

    Example:
        >>> topoep.Cluster("H800", num_nodes=4).num_ranks
        32
    """

    hardware: Hardware
    num_nodes: int
    ranks_per_node: int

    def __init__(
        self, hardware: str | Hardware, num_nodes: int = 1, ranks_per_node: int | None = None
    ) -> None:
        kind = find_hardware(hardware)
        used = kind.ranks_per_node if ranks_per_node is None else ranks_per_node
        if check_int(num_nodes, "num_nodes") < 1:
            raise ValueError(f"num_nodes={num_nodes}; expected at least 1")
        if not 1 <= check_int(used, "ranks_per_node") <= kind.ranks_per_node:
            raise ValueError(
                f"ranks_per_node={used}; a node of {kind.name} has {kind.ranks_per_node} GPUs"
            )
        if num_nodes * used > MAX_RANKS:
            raise ValueError(f"{num_nodes * used} ranks; expected at most {MAX_RANKS} (kMaxRanks)")
        object.__setattr__(self, "hardware", kind)
        object.__setattr__(self, "num_nodes", num_nodes)
        object.__setattr__(self, "ranks_per_node", used)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A cluster from what a user types: ``4x8xH800``, ``2xB200``, or a JSON file.

        The file holds an object with the arguments of :class:`topoep.Hardware`, or only some of
        them and ``preset``, and ``num_nodes`` and ``ranks_per_node``.

        Raises:
            OSError: the file cannot be read.
            ValueError: something else, or numbers that make no cluster.
        """
        if text.endswith(".json"):
            return cls._from_json(read_object(Path(text)), text)
        match = re.fullmatch(r"(?:(\d{1,4})x)?(?:(\d{1,4})x)?([A-Za-z]\w*)", text, re.ASCII)
        if not match:
            raise ValueError(
                f"cluster {text!r}; expected nodes x hardware (4xH800), nodes x ranks per node x "
                "hardware (4x8xH800), or a .json file"
            )
        first, second, name = match.groups()
        return cls(name, int(first or 1), int(second) if second else None)

    @classmethod
    def _from_json(cls, values: dict[str, object], path: str) -> Cluster:
        try:
            num_nodes = values.pop("num_nodes", 1)
            ranks = values.pop("ranks_per_node", None)
            preset = values.pop("preset", None)
            if preset is None:
                kind = Hardware(**{"name": "own", "ranks_per_node": ranks, **values})  # type: ignore[arg-type]
            else:
                kind = dataclasses.replace(find_hardware(preset), **values)  # type: ignore[arg-type]
            return cls(kind, num_nodes, ranks)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None

    @property
    def num_ranks(self) -> int:
        """GPUs."""
        return self.num_nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """As :meth:`parse` takes it."""
        return f"{self.num_nodes}x{self.ranks_per_node}x{self.hardware.name}"

    def topology(self, ranks: int) -> Topology:
        """The topology of one expert-parallel group of consecutive GPUs.

        Raises:
            ValueError: the group is larger than the cluster, or no whole number of nodes.
        """
        if not 1 <= check_int(ranks, "ranks") <= self.num_ranks:
            raise ValueError(f"{ranks} expert-parallel ranks; {self.name} has {self.num_ranks}")
        if ranks <= self.ranks_per_node:
            return Topology(1, ranks)
        if ranks % self.ranks_per_node:
            raise ValueError(
                f"{ranks} expert-parallel ranks are no whole number of nodes of "
                f"{self.ranks_per_node} ranks ({self.name})"
            )
        return Topology(ranks // self.ranks_per_node, self.ranks_per_node)

    def check_fits(self, topology: Topology) -> None:
        """Raises ValueError unless the cluster has such nodes."""
        sizes = [len(topology.ranks_of_node(node)) for node in range(topology.num_nodes)]
        if topology.num_nodes > self.num_nodes or max(sizes) > self.ranks_per_node:
            raise ValueError(
                f"{topology.num_ranks} ranks on {topology.num_nodes} nodes (up to {max(sizes)} "
                f"each) do not fit {self.name}: {self.num_nodes} nodes of {self.ranks_per_node}"
            )


def read_object(path: Path) -> dict[str, object]:
    """Reads a small JSON file that holds an object.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, or holds something else.
    """
    if path.stat().st_size > _MAX_FILE:
        raise ValueError(f"{path}: larger than {_MAX_FILE} bytes")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return values
