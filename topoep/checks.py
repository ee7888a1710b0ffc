# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several modules make."""

from __future__ import annotations

import operator
from typing import TypeVar

Instance = TypeVar("Instance")


def check_int(value: object, name: str) -> int:
    """The value as a Python int; raises TypeError for what is no whole number (floats, strings)."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected an int") from None


def check_type(value: object, expected: type[Instance], name: str) -> Instance:
    """The value; raises TypeError unless it is an instance of the type."""
    if not isinstance(value, expected):
        raise TypeError(
            f"{name} is a {type(value).__name__}; expected a {expected.__module__.split('.')[0]}."
            f"{expected.__name__}"
        )
    return value
