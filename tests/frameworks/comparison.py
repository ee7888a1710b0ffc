# SPDX-License-Identifier: Apache-2.0
"""Comparing a model with TopoEP with the untouched one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Outputs and input gradients, and the gradients of parameters by name.
Results = tuple[Sequence[Tensor], dict[str, Tensor]]


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gradients(model: Any) -> dict[str, Tensor]:
    """Of all parameters, by name."""
    return {
        name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }


def check_equal(
    got: Results,
    expected: Results,
    *,
    weights: bool = False,
    rows: bool = True,
    tolerance: float = 1e-6,
) -> None:
    """Bit for bit: the experts' gradients with ``weights``, everything else with ``rows``.

    The rest must agree within the tolerance.
    """
    assert got[1].keys() == expected[1].keys()
    pairs = [(None, a, b) for a, b in zip(got[0], expected[0], strict=True)]
    pairs += [(name, got[1][name], grad) for name, grad in expected[1].items()]
    for name, a, b in pairs:
        if weights or (rows and "experts" not in (name or "")):
            assert torch.equal(a, b), f"{name or 'output'}: {(a - b).abs().max()}"
        else:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
