# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m topoep``."""

from __future__ import annotations

import argparse


def main() -> None:
    """Runs one command."""
    parser = argparse.ArgumentParser(
        prog="python -m topoep",
        description="Topology-aware load balancing for expert-parallel MoE training.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor",
        help="what was built, what this machine has, and what to do about missing parts",
    )
    arguments = parser.parse_args()
    if arguments.command == "doctor":
        from topoep.doctor import report

        print(report())


if __name__ == "__main__":
    main()
