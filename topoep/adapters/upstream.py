# SPDX-License-Identifier: Apache-2.0
"""What the adapters check about a framework before they hook into it."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable
from typing import Any


def check_version(package: str, minimum: str, below: str) -> None:
    """Raises unless a supported version of the package is installed.

    Args:
        package: name of the distribution, for example ``megatron-core``.
        minimum: the first version supported, for example ``"0.19"``.
        below: the first version that is not.

    Raises:
        ImportError: it is missing, or another version; the message names the supported ones.
    """
    supported = f"{package} >= {minimum}, < {below}"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"this adapter needs {supported}, which is not installed") from None
    if not _release(minimum) <= _release(found) < _release(below):
        raise ImportError(f"this adapter supports {supported}; {package} {found} is installed")


def check_parameters(function: Callable[..., Any], *names: str) -> None:
    """Raises unless a function of the framework takes exactly these parameters, in this order.

    Hooks are called with, or call on to, what they replace: a parameter that upstream adds or
    renames must stop the set-up rather than a training step.

    Args:
        function: an unbound method or a function.
        names: of its parameters, without ``self``.

    Raises:
        ImportError: the signature is another one.
    """
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    if parameters != list(names):
        raise ImportError(
            f"{function.__module__}.{function.__qualname__} takes ({', '.join(parameters)}); this "
            f"adapter was written for ({', '.join(names)}). The framework has changed: use a "
            "version that docs/integration.md lists, or a newer TopoEP"
        )


def _release(version: str) -> tuple[int, ...]:
    """``"0.19.2rc1+cpu"`` -> (0, 19, 2): suffixes do not decide whether a version is supported."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
