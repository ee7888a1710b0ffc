# SPDX-License-Identifier: Apache-2.0
"""Trains a small MoE language model twice, without and with TopoEP, and shows both side by side.

Run ``python -m topoep.demo``, or ``torchrun --nproc-per-node 8 -m topoep.demo``, or call
:func:`run_demo`. Three files are written to the output folder:

``demo.png``
    Rank loads before and after balancing, and the imbalance over the steps.

``losses.json``
    ``format`` (1), ``config``, ``text``, ``versions``, and for each of the runs ``plain`` and
    ``topoep``: ``loss`` and ``step_seconds`` (one number per step), ``parameters_sha256`` and
    ``summary`` (the numbers of the table on screen, see
    :class:`topoep.demo.summary.RunSummary`).

``trace.npz``
    What the routers of the TopoEP run did, from which every plan can be made again with
    :func:`topoep.solve`: the layout of :mod:`topoep.trace`. ``meta`` holds ``text``,
    ``bytes_per_expert``, and every setting of :class:`DemoConfig`, sizes and seed among them.
"""

from topoep.demo.config import DemoConfig
from topoep.demo.launch import DemoResult, RankError, run_demo
from topoep.demo.training import Progress, RunResult, train

__all__ = [
    "DemoConfig",
    "DemoResult",
    "Progress",
    "RankError",
    "RunResult",
    "run_demo",
    "train",
]
