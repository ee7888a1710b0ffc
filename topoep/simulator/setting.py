# SPDX-License-Identifier: Apache-2.0
"""How the model is trained: what is neither the model nor the machines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from topoep.checks import check_int
from topoep.hardware import check_dtype

_RECOMPUTE = ("none", "moe", "full")
_SHARES = ("overlap", "interference", "outside_share")
_COUNTS = ("sequence", "microbatches", "pipeline", "dispatch_bytes")


@dataclass(frozen=True)
class Setting:
    """Assumptions of a simulation; docs/simulator.md names sources and what each changes.

    Args:
        dtype: of the expert weights that are copied.
        gemm_dtype: in which the experts compute.
        dispatch_bytes: bytes per element that the dispatch sends (2 for bf16, 1 for fp8); the other
            three exchanges send bf16.
        sequence: tokens of a sequence, for the attention.
        dedup: the dispatcher sends a token once per node and per rank, as DeepEP does; otherwise
            once per expert, straight to its rank.
        sharded: weights that cross nodes are cut over the NICs of a node.
        overlap: share of the home experts' compute, and of attention's backward, that hides
            transfers.
        interference: slow-down of what runs beside a hidden transfer, as a share of its time.
        planning_us: counts, their exchange and the solve, per layer, forward only.
        reroute_us: rewriting the ids, likewise.
        fixed_forward_us: launches and host work of a layer.
        fixed_backward_us: the same in backward.
        recompute: ``none``, ``moe`` (dispatch and experts once more in backward) or ``full``.
        microbatches: per step and pipeline stage.
        pipeline: stages.
        outside_share: share of the step that is optimizer and data parallelism.

    Raises:
        TypeError: a number of another type.
        ValueError: a number out of range.
    """

    dtype: str = "bfloat16"
    gemm_dtype: str = "bfloat16"
    dispatch_bytes: int = 2
    sequence: int = 4096
    dedup: bool = True
    sharded: bool = True
    overlap: float = 0.8
    interference: float = 0.1
    planning_us: float = 100.0
    reroute_us: float = 37.0
    fixed_forward_us: float = 250.0
    fixed_backward_us: float = 350.0
    recompute: str = "none"
    microbatches: int = 16
    pipeline: int = 1
    outside_share: float = 0.04

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_dtype(self.gemm_dtype)
        if self.recompute not in _RECOMPUTE:
            raise ValueError(
                f"recompute={self.recompute!r}; expected one of {', '.join(_RECOMPUTE)}"
            )
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in _COUNTS:
                if check_int(value, name) < 1:
                    raise ValueError(f"{name}={value}; expected at least 1")
            elif name in _SHARES:
                if not 0 <= value <= 1 or (name == "outside_share" and value == 1):
                    raise ValueError(f"{name}={value}; expected a share, 0 to 1")
            elif name.endswith("_us") and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value}; expected microseconds, 0 or more")
