# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several modules make."""

from __future__ import annotations

import math
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
        package = expected.__module__.split(".")[0]
        full = expected.__name__ if package == "builtins" else f"{package}.{expected.__name__}"
        raise TypeError(f"{name} is a {type(value).__name__}; expected a {full}")
    return value


def check_number(value: object, name: str) -> float:
    """The value as a float; raises TypeError or ValueError unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected a number")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value}; expected a finite number")
    return float(value)
