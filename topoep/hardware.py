# SPDX-License-Identifier: Apache-2.0
"""Kinds of GPUs in their nodes: the one source of hardware figures for planner and simulator.

docs/cost-model.md names the source of every number.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from topoep.checks import check_int, check_number, check_type

SIZE_OF = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1}

_COUNTS = ("nics_per_node", "ranks_per_node", "shard_nics")
_MAY_BE_ZERO = ("half_rows", "link_latency", "nic_latency")


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU in its node, the NVLink domain.

    Bandwidths are bytes/s of one direction; both directions work at the same time.

    Args:
        name: for messages.
        flops: dense bf16 FLOP/s, peak.
        efficiency: share of it that grouped GEMMs reach on many rows.
        memory_bandwidth: bytes/s that memory-bound kernels reach.
        link_bandwidth: bytes/s of a rank in its node, one direction, as collectives reach it.
        nic_bandwidth: bytes/s of one NIC, one direction, as collectives reach it.
        nics_per_node: NICs that share a node's network traffic.
        ranks_per_node: GPUs of a node.
        grad_bandwidth: bytes/s at which a rank pulls gradients inside its node.
        flops_fp8: dense fp8 FLOP/s, peak; None where there is none.
        half_rows: the efficiency curve: m rows per expert reach m / (m + half_rows) of
            ``efficiency``.
        link_latency: seconds that an exchange inside a node takes besides its bytes.
        nic_latency: seconds that an exchange across nodes takes besides that.
        shard_nics: NICs that carry one network copy together; all of a node if None.

    Raises:
        TypeError: a field is no number, or one that counts is no int.
        ValueError: a field is not positive and finite, or the efficiency is above 1.
    """

    name: str
    flops: float
    efficiency: float
    memory_bandwidth: float
    link_bandwidth: float
    nic_bandwidth: float
    nics_per_node: int
    ranks_per_node: int
    grad_bandwidth: float
    flops_fp8: float | None = None
    half_rows: float = 96.0
    link_latency: float = 25e-6
    nic_latency: float = 30e-6
    shard_nics: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = f"Hardware.{field.name}", getattr(self, field.name)
            if field.name == "name" or (value is None and field.default is None):
                continue
            number = check_number(value, name, 1.0 if field.name == "efficiency" else math.inf)
            if number == 0 and field.name not in _MAY_BE_ZERO:
                raise ValueError(f"{name} is {value!r}; expected a positive number")
            if field.name in _COUNTS:
                check_int(value, name)

    def flops_of(self, dtype: str) -> float:
        """Peak FLOP/s of dense GEMMs; float32 stands for TF32, at half the rate of bf16.

        Raises:
            ValueError: an unknown dtype, or float8 where the hardware has none.
        """
        check_dtype(dtype)
        if dtype == "float8":
            if self.flops_fp8 is None:
                raise ValueError(f"{self.name} has no float8 GEMMs; use gemm_dtype='bfloat16'")
            return self.flops_fp8
        return self.flops / 2 if dtype == "float32" else self.flops


def check_dtype(dtype: str) -> str:
    """The dtype; raises ValueError for an unknown one."""
    if dtype not in SIZE_OF:
        raise ValueError(f"dtype {dtype!r}; expected one of {', '.join(SIZE_OF)}")
    return dtype


def _preset(
    name: str, flops: float, efficiency: float, memory: float, link: float, fp8: float | None
) -> Hardware:
    return Hardware(
        name,
        flops=flops * 1e12,
        efficiency=efficiency,
        memory_bandwidth=0.75 * memory * 1e12,
        link_bandwidth=link * 1e9,
        nic_bandwidth=43.5e9,
        nics_per_node=8,
        ranks_per_node=8,
        grad_bandwidth=min(link, 170.0) * 1e9,
        flops_fp8=None if fp8 is None else fp8 * 1e12,
    )


#: Presets by name. Peak FLOP/s and memory bandwidth are from data sheets; the bandwidths of links
#: are what published all-to-alls and weight transfers reach (docs/cost-model.md).
HARDWARE = {
    hardware.name: hardware
    for hardware in (
        _preset("A100", 312, 0.62, 2.04, 240, None),
        _preset("H800", 989, 0.62, 3.35, 155, 1979),
        _preset("H100", 989, 0.62, 3.35, 320, 1979),
        _preset("H200", 989, 0.62, 4.8, 320, 1979),
        _preset("B200", 2250, 0.50, 8.0, 680, 4500),
        # NVL72: the rack is one NVLink domain; a copy that leaves it goes over its tray's NICs.
        dataclasses.replace(
            _preset("GB200", 2500, 0.50, 8.0, 680, 5000),
            nics_per_node=72,
            ranks_per_node=72,
            shard_nics=4,
        ),
    )
}


def find_hardware(hardware: str | Hardware) -> Hardware:
    """The hardware itself, or the preset of that name.

    Raises:
        TypeError: neither a name nor a :class:`Hardware`.
        ValueError: an unknown preset.
    """
    if not isinstance(hardware, str):
        return check_type(hardware, Hardware, "hardware")
    if hardware not in HARDWARE:
        raise ValueError(
            f"hardware {hardware!r}; presets are {', '.join(HARDWARE)}, anything else takes a "
            "topoep.Hardware"
        )
    return HARDWARE[hardware]
