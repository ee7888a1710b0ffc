# SPDX-License-Identifier: Apache-2.0
"""Topology-aware load balancing for expert-parallel MoE training."""

from topoep._version import __version__
from topoep.balancer import Balancer
from topoep.cost_model import CostModel
from topoep.experts import BalancedExperts
from topoep.hardware import Hardware
from topoep.objective import Balance, Even, Time
from topoep.plan import Plan, solve
from topoep.portfolio import Candidate
from topoep.recorder import Recorder
from topoep.simulator.cluster import Cluster
from topoep.simulator.model import MoEModel
from topoep.topology import Topology
from topoep.trace import Trace

__all__ = [
    "Balance",
    "BalancedExperts",
    "Balancer",
    "Candidate",
    "Cluster",
    "CostModel",
    "Even",
    "Hardware",
    "MoEModel",
    "Plan",
    "Recorder",
    "Time",
    "Topology",
    "Trace",
    "__version__",
    "solve",
]
