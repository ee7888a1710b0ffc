# SPDX-License-Identifier: Apache-2.0
"""``python -m topoep.demo``."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import torch.distributed as dist

from topoep.demo.config import DemoConfig
from topoep.demo.launch import RankError, run_demo
from topoep.demo.text import load_text

_EXTRAS = ("rich", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Args:
        arguments: of the command line; those of this process if None.

    Returns:
        The exit code.
    """
    first = not dist.is_torchelastic_launched() or os.environ["RANK"] == "0"
    # All ranks under torchrun find the same mistakes; one of them says so.
    with nullcontext() if first else redirect_stderr(io.StringIO()):
        config = _parse(arguments)
        missing = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
        if missing:
            print(
                f"the demo needs {' and '.join(missing)}: pip install 'topoep[demo]'",
                file=sys.stderr,
            )
            return 1
    if not first:
        run_demo(config)
        return 0
    try:
        _run_and_show(config)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what a shell expects after an interrupt
    return 0


def _run_and_show(config: DemoConfig) -> None:
    from rich.console import Console

    from topoep.demo.files import write_losses, write_trace
    from topoep.demo.plot import plot_demo
    from topoep.demo.screen import TrainingScreen, show_result, show_setting

    console = Console()
    show_setting(console, config, load_text(config))
    with TrainingScreen(console, config) as screen:
        result = run_demo(config, screen)
    show_result(console, result)
    for name, write in (
        ("demo.png", plot_demo),
        ("losses.json", write_losses),
        ("trace.npz", write_trace),
    ):
        path = config.output / name
        write(result, path)
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _parse(arguments: Sequence[str] | None) -> DemoConfig:
    """Reads and checks the arguments; ends the process with code 2 if one is bad."""
    default = DemoConfig()
    parser = argparse.ArgumentParser(
        prog="python -m topoep.demo",
        description="Trains a small MoE language model twice from one seed, with plain expert "
        "parallelism and with TopoEP, on simulated nodes, and shows both side by side.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def number(flag: str, help_text: str) -> None:
        value = getattr(default, flag[2:].replace("-", "_"))
        parser.add_argument(flag, type=type(value), default=value, metavar="N", help=help_text)

    number("--steps", "optimizer steps of each run")
    number("--nodes", "simulated nodes")
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="ranks of each node; the processes of torchrun divided by the nodes, or "
        f"{default.ranks_per_node}",
        default=argparse.SUPPRESS,  # no "(default: None)" in the help
    )
    number("--spare-slots", "copies that a rank can hold in the TopoEP run")
    number("--batch", "sequences of each rank and step")
    number("--sequence", "bytes of each sequence")
    number("--layers", "MoE layers")
    number("--experts", "experts of each layer, a multiple of the ranks")
    number("--top-k", "experts of each token")
    number("--hidden", "width of the model")
    number("--heads", "attention heads")
    number("--intermediate", "width of an expert")
    number("--learning-rate", "peak learning rate of AdamW")
    number("--seed", "of weights and batches")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to train on; the documentation that comes with Python if not given",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=default.output, help="folder to write to"
    )
    given = vars(parser.parse_args(arguments))
    if dist.is_torchelastic_launched():
        world = int(os.environ["WORLD_SIZE"])
        given.setdefault("ranks_per_node", max(world // max(given["nodes"], 1), 1))
    try:
        config = DemoConfig(**given)
        if dist.is_torchelastic_launched() and config.num_ranks != world:
            raise ValueError(
                f"{config.nodes} nodes x {config.ranks_per_node} ranks do not fit the {world} "
                "processes of torchrun"
            )
        load_text(config)
        config.output.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot write to {config.output}: {error.strerror}")
    return config


if __name__ == "__main__":
    sys.exit(main())
