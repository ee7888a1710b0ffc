# SPDX-License-Identifier: Apache-2.0
"""The settings of a demo."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from topoep.balancer import MAX_TOP_K
from topoep.plan import MAX_EXPERTS, MAX_SPARE_SLOTS
from topoep.topology import Topology

_AT_LEAST_ONE = (
    "steps",
    "nodes",
    "ranks_per_node",
    "batch",
    "sequence",
    "layers",
    "experts",
    "top_k",
    "hidden",
    "heads",
    "intermediate",
)


@dataclass(frozen=True)
class DemoConfig:
    """Two training runs that differ in nothing but the spare slots.

    Args:
        steps: optimizer steps of each run.
        nodes: N. The nodes are simulated; all ranks may share one machine.
        ranks_per_node: G.
        spare_slots: S of the balanced run; the plain run has none.
        batch: sequences of each rank and step.
        sequence: bytes of each sequence.
        layers: MoE layers.
        experts: E, in each layer.
        top_k: K.
        hidden: D.
        heads: of the attention.
        intermediate: I, the FFN width of one expert.
        learning_rate: the peak, after warm-up.
        seed: of weights and batches.
        text: the file to train on; the documentation that comes with Python if None.
        output: the folder that files are written to.

    Raises:
        ValueError: a value is out of range, or two do not fit each other.
    """

    steps: int = 100
    nodes: int = 2
    ranks_per_node: int = 4
    spare_slots: int = 2
    batch: int = 4
    sequence: int = 128
    layers: int = 4
    experts: int = 32
    top_k: int = 2
    hidden: int = 128
    heads: int = 4
    intermediate: int = 128
    learning_rate: float = 3e-3
    seed: int = 0
    text: Path | None = None
    output: Path = Path("demo-output")

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 1 <= self.spare_slots <= MAX_SPARE_SLOTS:
            raise ValueError(
                f"spare_slots is {self.spare_slots}; expected 1 to {MAX_SPARE_SLOTS} (the run "
                "without any is always made too)"
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected 0 or more")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; expected more than 0")
        if self.experts > MAX_EXPERTS:
            raise ValueError(f"experts is {self.experts}; expected at most {MAX_EXPERTS}")
        if self.experts % self.num_ranks:
            raise ValueError(
                f"{self.experts} experts do not divide over {self.num_ranks} ranks "
                f"({self.nodes} nodes x {self.ranks_per_node})"
            )
        if self.top_k > min(self.experts, MAX_TOP_K):
            raise ValueError(
                f"top_k is {self.top_k}; expected at most {min(self.experts, MAX_TOP_K)}"
            )
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}; expected a multiple of {self.heads} heads")

    @property
    def num_ranks(self) -> int:
        """R = N * G."""
        return self.nodes * self.ranks_per_node

    @property
    def topology(self) -> Topology:
        """The simulated nodes: blocks of consecutive ranks."""
        return Topology(self.nodes, self.ranks_per_node)

    @property
    def bytes_per_expert(self) -> int:
        """Of the float32 weights of one expert: gate, up and down projection."""
        return 3 * self.hidden * self.intermediate * 4

    def to_json(self) -> dict[str, int | float | str]:
        """What the runs depend on, for files; paths are left out."""
        values = asdict(self)
        del values["text"], values["output"]
        return values
