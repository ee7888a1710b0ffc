# SPDX-License-Identifier: Apache-2.0
"""Other planners for the same problem, restated from their public descriptions.

They are written to be compared with and to be read, not to be fast. Each module says where its
rule comes from and what of it is certain. What is compared is the plan; how the others move weights
and tokens is not part of this.
"""

from baselines import moonep, taot, two_stage
from topoep.simulator.planners import echo, eplb, llep, no_balancing, ultraep
from topoep.simulator.planners.base import Baseline

BASELINES = (
    Baseline("no balancing", no_balancing.plan),
    Baseline("EPLB hierarchical", eplb.plan_hierarchical, moves_homes=True),
    Baseline("EPLB global", eplb.plan_global, moves_homes=True),
    Baseline("two-stage (paper)", two_stage.plan),
    Baseline("LLEP-like", llep.plan, slots="any"),
    Baseline("ECHO one-shot", echo.plan_one_shot),
    Baseline("ECHO bin packing", echo.plan_bin_packing, slots="one"),
    Baseline("TAOT", taot.plan),
    Baseline("UltraEP one domain", ultraep.plan_one_domain),
    Baseline("UltraEP per node", ultraep.plan_per_node),
    Baseline("MoonEP", moonep.plan, slots="home"),
)
