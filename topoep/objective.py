# SPDX-License-Identifier: Apache-2.0
"""What a plan is asked to be good at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from topoep.checks import check_int, check_number, check_type
from topoep.cost_model import CostModel

PARTS_PER_MILLION = 1_000_000
_BALANCE, _EVEN, _TIME = 0, 1, 2  # ObjectiveKind in csrc/core/objective.h
_MAX_CROSS_WEIGHT = 1024


def _check_weight(cross_weight: int) -> None:
    check_int(cross_weight, "cross_weight")
    if not 1 <= cross_weight <= _MAX_CROSS_WEIGHT:
        raise ValueError(
            f"cross_weight={cross_weight}; expected 1 to {_MAX_CROSS_WEIGHT}: what a copy between "
            "nodes costs, in copies inside a node"
        )


@dataclass(frozen=True)
class Balance:
    """Fewest weighted copies with the fullest rank within a tolerance of the mean.

    If no candidate plan is within the tolerance, the one with the least maximum load is taken.

    Args:
        tolerance: allowed imbalance: max load <= floor(mean * (1 + tolerance)), or the mean rounded
            up where that is more. Rounded to a millionth; 0 for the least that integers allow.
        cross_weight: what a copy that crosses nodes costs, in copies inside a node.

    Raises:
        ValueError: the tolerance is not in [0, 1000], or positive but rounds to 0 millionths;
            cross_weight is not in 1 .. 1024.
    """

    tolerance: float = 0.01
    cross_weight: int = 3

    def __post_init__(self) -> None:
        check_number(self.tolerance, "tolerance", 1000.0, "(0.01 for 1 %)")
        if self.tolerance > 0 and self.tolerance_ppm == 0:
            raise ValueError(
                f"tolerance is {self.tolerance!r}; tolerances are counted in millionths: expected "
                "1e-06 or more, or 0 for the least that integers allow"
            )
        _check_weight(self.cross_weight)

    @property
    def tolerance_ppm(self) -> int:
        """The tolerance in parts per million."""
        return round(self.tolerance * PARTS_PER_MILLION)

    def largest_load(self, tokens: Tensor, ranks: int) -> Tensor:
        """The largest rank load within the tolerance (docs/algorithm.md, section 2).

        Args:
            tokens: integers of any shape: routed tokens of plans.
            ranks: R.

        Returns:
            int64, in the shape and on the device of ``tokens``.
        """
        tokens = tokens.long()
        least = (tokens + ranks - 1) // ranks
        parts = PARTS_PER_MILLION + self.tolerance_ppm
        return least.maximum(tokens * parts // (ranks * PARTS_PER_MILLION))

    def to_ints(self) -> list[int]:
        """The objective as the solve op takes it."""
        return [_BALANCE, self.tolerance_ppm, self.cross_weight]


@dataclass(frozen=True)
class Even:
    """Least maximum load first, then fewest weighted copies.

    Args:
        cross_weight: what a copy that crosses nodes costs, in copies inside a node.

    Raises:
        ValueError: cross_weight is not in 1 .. 1024.
    """

    cross_weight: int = 3

    def __post_init__(self) -> None:
        _check_weight(self.cross_weight)

    def to_ints(self) -> list[int]:
        """The objective as the solve op takes it."""
        return [_EVEN, 0, self.cross_weight]


@dataclass(frozen=True)
class Time:
    """Least predicted time of the layer, forward and backward (docs/cost-model.md).

    Copies that do not pay are not made; candidates that copy for locality take part.

    Args:
        cost_model: what the parts of the layer cost.
        cross_weight: for ``stats()["weighted_copies"]`` only.

    Raises:
        TypeError: cost_model is no CostModel.
        ValueError: cross_weight is not in 1 .. 1024.
    """

    cost_model: CostModel
    cross_weight: int = 3

    def __post_init__(self) -> None:
        check_type(self.cost_model, CostModel, "cost_model")
        _check_weight(self.cross_weight)

    def to_ints(self) -> list[int]:
        """The objective as the solve op takes it."""
        return [_TIME, 0, self.cross_weight, *self.cost_model.to_ints()]


Objective = Balance | Even | Time


def check_objective(objective: Objective | None) -> Objective:
    """The objective, ``Balance()`` for None; raises TypeError for anything else."""
    if objective is None:
        return Balance()
    if not isinstance(objective, Objective):
        raise TypeError(
            f"objective is a {type(objective).__name__}; expected topoep.Balance, Even or Time"
        )
    return objective
