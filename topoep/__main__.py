# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m topoep``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from topoep.commands import advise, simulate, trace
from topoep.commands.arguments import CommandError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: of the command line; those of this process if None.

    Returns:
        The exit code: 0, 2 for a trace file that cannot be used (and from argparse), else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m topoep",
        description="Topology-aware load balancing for expert-parallel MoE training.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="what was built, what this machine has, and what to do about missing parts",
    )
    doctor.set_defaults(run=_doctor)
    trace.add_parser(commands)
    simulate.add_parser(commands)
    advise.add_parser(commands)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except CommandError as error:
        return _failed(given, error, error.code)
    except OSError as error:  # without the number that its own text begins with
        named = f"{error.filename}: " if error.filename else ""
        return _failed(given, f"{named}{error.strerror or error}")
    except (TypeError, ValueError) as error:
        return _failed(given, error)
    except KeyboardInterrupt:
        return 130  # what a shell expects after an interrupt
    return 0


def _failed(given: argparse.Namespace, message: object, code: int = 1) -> int:
    print(f"topoep {given.command}: {message}", file=sys.stderr)
    return code


def _doctor(given: argparse.Namespace) -> None:
    from topoep.doctor import report

    print(report())


if __name__ == "__main__":
    sys.exit(main())
