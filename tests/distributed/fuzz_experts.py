# SPDX-License-Identifier: Apache-2.0
"""Random layers on random ranks against the dense layer.

    python -m tests.distributed.fuzz_experts --first 1000 --number 500

A failure prints its seed; ``--first SEED --number 1`` runs it again.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch

from tests.distributed.ranks import RankError, run_ranks
from tests.distributed.test_experts import Setup, on_two_groups, on_world

TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 0.15, torch.float16: 0.03}


def random_setup(seed: int) -> tuple[Setup, bool]:
    """A setup, and whether two such groups run side by side."""
    draw = random.Random(seed)
    two_groups = draw.random() < 0.2
    ranks = draw.choice([2, 4] if two_groups else [2, 3, 4, 5, 8])
    nodes = [draw.randrange(3) for _ in range(ranks)]
    nodes = [sorted(set(nodes)).index(node) for node in nodes]
    microbatches = draw.randint(1, 3)
    dtype = draw.choice(list(TOLERANCES))
    layers = draw.randint(1, 3 if TOLERANCES[dtype] < 1e-3 else 1)
    # Plain checkpointing cannot tell microbatches in flight apart on a rank without tokens.
    recompute = draw.choice(["", "", "contexts" if microbatches > 1 else "layer"])
    setup = Setup(
        nodes=nodes,
        experts=ranks * draw.randint(1, 4),
        tokens=[draw.choice([0, 1, draw.randint(2, 40)]) for _ in range(ranks)],
        spare=draw.randint(0, 4),
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        policy=draw.choice(["refetch", "keep"]),
        layers=layers,
        microbatches=microbatches,
        in_flight=draw.randint(1, 3),
        recompute=recompute,
        frozen=draw.random() < 0.15,
        seed=seed,
    )
    return setup, two_groups


def run(seed: int) -> None:
    """Raises what a rank raises."""
    setup, two_groups = random_setup(seed)
    ranks = len(setup.nodes)
    if two_groups:
        strided = [list(range(first, 2 * ranks, 2)) for first in range(2)]
        run_ranks(2 * ranks, on_two_groups, strided, setup)
    else:
        run_ranks(ranks, on_world, setup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.number):
        try:
            run(seed)
        except RankError as error:
            failed += 1
            print(f"seed {seed}: {random_setup(seed)[0]}\n{error}", file=sys.stderr)
    print(f"{arguments.number} layers from seed {arguments.first}, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
