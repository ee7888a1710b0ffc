# SPDX-License-Identifier: Apache-2.0
"""losses.json and trace.npz; the package docstring describes both."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from topoep._version import __version__
from topoep.demo.launch import DemoResult
from topoep.demo.summary import summarize
from topoep.demo.training import RunResult
from topoep.trace import Trace

FORMAT = 1


def write_losses(result: DemoResult, path: Path) -> None:
    """Writes both runs' losses, with what is needed to repeat them."""
    content = {
        "format": FORMAT,
        "config": result.config.to_json(),
        "text": {"name": result.text.name, "bytes": len(result.text.data)},
        "versions": {
            "topoep": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "plain": _run(result, result.plain),
        "topoep": _run(result, result.balanced),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _run(result: DemoResult, run: RunResult) -> dict[str, object]:
    return {
        "summary": asdict(summarize(result.config, run)),
        "parameters_sha256": run.parameters_sha256,
        "loss": run.losses.tolist(),
        "step_seconds": run.step_seconds.tolist(),
    }


def write_trace(result: DemoResult, path: Path) -> None:
    """Writes the counts of every step and layer of the TopoEP run."""
    config = result.config
    meta = {
        "topoep": __version__,
        "text": result.text.name,
        "bytes_per_expert": config.bytes_per_expert,
        **config.to_json(),
    }
    counts = result.balanced.counts
    Trace(counts, config.topology.node_of_rank, config.top_k, meta=meta).save(path)
