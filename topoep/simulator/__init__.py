# SPDX-License-Identifier: Apache-2.0
"""Predicts what plans gain: routing, a cluster and a model in, time, bytes and memory out.

Every result is a prediction; docs/simulator.md gives the formulas, their sources and their known
misses.
"""

from topoep.simulator.cluster import Cluster
from topoep.simulator.layer_time import LayerModel, LayerTimes
from topoep.simulator.model import MODELS, MoEModel
from topoep.simulator.placement import Placement
from topoep.simulator.setting import Setting
from topoep.simulator.step_time import step_time

__all__ = [
    "MODELS",
    "Cluster",
    "LayerModel",
    "LayerTimes",
    "MoEModel",
    "Placement",
    "Setting",
    "step_time",
]
