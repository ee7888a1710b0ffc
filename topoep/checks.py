# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several modules make."""

from __future__ import annotations

import math
import numbers
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


def check_number(value: object, name: str, most: float = math.inf, unit: str = "") -> float:
    """The value as a float from 0 to ``most``.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, above ``most``, infinite or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected a number")
    number = float(value)
    if not 0 <= number <= most or math.isinf(number):
        upper = "of 0 or more" if math.isinf(most) else f"from 0 to {most:g}"
        raise ValueError(f"{name} is {value!r}; expected a number {upper}{unit and f' {unit}'}")
    return number


def check_type(value: object, expected: type[Instance], name: str) -> Instance:
    """The value; raises TypeError unless it is an instance of the type."""
    if not isinstance(value, expected):
        package = expected.__module__.split(".")[0]
        prefix = "" if package == "builtins" else f"{package}."
        raise TypeError(
            f"{name} is a {type(value).__name__}; expected a {prefix}{expected.__name__}"
        )
    return value
