# SPDX-License-Identifier: Apache-2.0
"""Stands in for the triton kernels that megatron-core and torchtitan import where triton is absent.

Both import these two modules on the way to their MoE layers, whether a kernel will run or not.
Installed into the test environment as a .pth file; does nothing where triton is installed. It does
not pretend to be triton itself: torch would believe that and fail.
"""

import importlib.util
import sys
import types

MODULES = (
    "megatron.core.transformer.moe.ops.paged_stash",
    "torchtitan.distributed.minimal_async_ep.kernels",
)


class _Absent:
    """A kernel that raises as soon as it is used."""

    def __init__(self, name):
        self.name = name

    def __getitem__(self, grid):
        raise RuntimeError(f"the triton kernel {self.name} needs triton, which is not installed")

    __call__ = __getitem__


class _Kernels(types.ModuleType):
    GLOBAL_BLOCK_SIZE = 1024

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


def install():
    """Seeds the two modules, unless triton is there."""
    if importlib.util.find_spec("triton") is None:
        for name in MODULES:
            sys.modules[name] = _Kernels(name)
