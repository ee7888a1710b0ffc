# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several modules make."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Sequence
from typing import TypeVar

Instance = TypeVar("Instance")


def check_int(value: object, name: str) -> int:
    """The value as a Python int.

    Raises:
        TypeError: it is no integer of Python or NumPy. Tensors and arrays of one element are none
            either: a GPU would have to be waited for, and what was checked could change later.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        hint = " (.item() gives the one of a tensor or array)" if hasattr(value, "item") else ""
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; expected an int{hint}")
    return int(value)


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


def check_range(value: object, name: str, least: int, most: int) -> int:
    """The value as an int; raises TypeError for other types, ValueError if it is out of range."""
    number = check_int(value, name)
    if not least <= number <= most:
        raise ValueError(f"{name}={number}; expected {least} to {most}")
    return number


def check_choice(value: object, name: str, choices: Sequence[str]) -> str:
    """The value; raises TypeError unless it is a string, ValueError unless it is a choice."""
    expected = f"expected one of {', '.join(choices)}"
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; {expected}")
    if value not in choices:
        raise ValueError(f"{name}={value!r}{closest(value, choices)}; {expected}")
    return value


def closest(name: str, names: Sequence[str]) -> str:
    """A question for a message, if one of the names is close to the one that was given."""
    matches = difflib.get_close_matches(name.lower(), names, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
