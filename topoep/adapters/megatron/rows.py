# SPDX-License-Identifier: Apache-2.0
"""Rows of home experts and of copies, apart and together, copied only where there are both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split_rows(rows: Tensor, home_rows: int) -> tuple[Tensor, Tensor]:
    """The first rows and the rest, as :func:`torch.split`; no rows cost nothing in backward."""
    home, guest = _Split.apply(rows, home_rows)
    return home, guest


def join_rows(home: Tensor, guest: Tensor) -> Tensor:
    """Undoes :func:`split_rows`. Depends on both, even where one has no rows."""
    joined: Tensor = _Join.apply(home, guest)
    return joined


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, home_rows: int) -> tuple[Tensor, Tensor]:
        # Not as views of rows: a view that a custom function returns must not be written to.
        return rows.detach()[:home_rows], rows.detach()[home_rows:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _concatenate(grads[0], grads[1]), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, home: Tensor, guest: Tensor) -> Tensor:
        ctx.home_rows = len(home)
        return _concatenate(home, guest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0][: ctx.home_rows], grads[0][ctx.home_rows :]


def _concatenate(home: Tensor, guest: Tensor) -> Tensor:
    if len(guest) == 0:
        return home.view_as(home)
    if len(home) == 0:
        return guest.view_as(guest)
    return torch.cat([home, guest])
