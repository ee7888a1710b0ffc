# SPDX-License-Identifier: Apache-2.0
"""Random plans through the CPU form, the kernels and the oracle: all must agree.

    python -m tests.fuzz_plans --plans 100000 --kernels 2000 --first 1

Every seed is a configuration (up to 64 ranks, 1024 experts, 8 slots, any node table), counts of any
kind, an objective and candidates. The plan must keep every rule, rerouting must fill its quotas
exactly, the oracle (where its size allows) and the kernels under a random schedule must give the
same plan bit for bit. A failure prints its seed; ``--first SEED --plans 1`` runs it again.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

import topoep
from tests import strategies
from tests.emulation.harness import Schedule
from tests.kernels.kernels import Kernels
from tests.strategies import Case, make_case
from tests.test_planner_oracle import check
from topoep import Balance, Candidate, Even, Plan, Time, ops
from topoep.objective import Objective
from topoep.portfolio import EMPTY_PLAN

ORACLE_EXPERTS, ORACLE_RANKS = 96, 16  # the oracle is plain Python
KERNEL_EXPERTS, KERNEL_RANKS = 256, 32  # the emulation takes a second for more
TOP_K = 4


@dataclass(frozen=True)
class Problem:
    """What a seed stands for."""

    case: Case
    objective: Objective
    candidates: list[Candidate]


def problem_of(seed: int) -> Problem:
    """Small shapes mostly, large ones now and then."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([rng.integers(1, 9), rng.integers(1, 65)], p=[0.8, 0.2]))
    nodes = int(rng.integers(1, min(ranks, 9) + 1))
    node = rng.integers(0, nodes, ranks)
    arrangement = rng.integers(3)
    node = np.sort(node) if arrangement == 0 else node
    node = np.arange(ranks) % nodes if arrangement == 1 else node
    node = np.unique(node, return_inverse=True)[1]
    most = max(1024 // ranks, 1)
    home_slots = int(rng.choice([rng.integers(1, 6), rng.integers(1, most + 1)], p=[0.8, 0.2]))
    case = make_case(
        str(rng.choice(list(strategies.COUNT_KINDS))),
        seed,
        node_of_rank=[int(n) for n in node],
        home_slots=min(home_slots, most),
        spare_slots=int(rng.integers(0, 9)),
    )
    objectives = (
        Balance(float(rng.choice([0.0, 0.001, 0.01, 0.1, 1.0])), int(rng.integers(1, 10))),
        Even(int(rng.integers(1, 10))),
        Time(strategies.random_cost_model(seed)),
        Time(strategies.EAGER_COSTS),
    )
    candidates = [
        Candidate(str(rng.choice(strategies.CAPS)), str(rng.choice(strategies.POLICIES)))
        for _ in range(int(rng.integers(1, 5)))
    ]
    return Problem(case, objectives[int(rng.integers(len(objectives)))], candidates)


def run_plan(seed: int) -> Plan:
    """One plan: rules, quotas, oracle. Raises AssertionError or ValueError."""
    problem = problem_of(seed)
    case = problem.case
    if case.num_ranks <= ORACLE_RANKS and case.num_experts <= ORACLE_EXPERTS:
        plan = check(case, problem.objective, problem.candidates)
    else:
        plan = topoep.solve(
            case.tensor,
            case.topology,
            case.spare_slots,
            problem.objective,
            candidates=problem.candidates,
        )
    plan.validate()
    stats = plan.stats()
    assert int(stats["max_load"]) <= int(stats["max_load_before"])
    rank = seed % case.num_ranks
    if 0 < int(case.counts[rank].sum()) < 20_000:
        check_quotas(plan.for_rank(rank), case, rank, seed)
    return plan


def check_quotas(plan: Plan, case: Case, rank: int, seed: int) -> None:
    """Ids with the rank's counts are rerouted to exactly the tokens that the plan sends."""
    ids = strategies.ids_of_counts(case.counts[rank], TOP_K, seed, torch.int64)
    assert plan.send is not None
    rerouted = ops.reroute(ids, plan.send, plan.copy_offsets, plan.copy_slots, case.num_ranks)
    arrived = torch.bincount(rerouted[rerouted >= 0], minlength=plan.config.num_physical_experts)
    assert torch.equal(arrived.int(), plan.send)


def run_kernels(seed: int) -> None:
    """Solve and split kernels under a random schedule against the CPU form."""
    problem = problem_of(seed)
    case = problem.case
    if case.num_ranks > KERNEL_RANKS or case.num_experts > KERNEL_EXPERTS:
        return
    kernels = Kernels(Schedule(seed, ("in_order", "random")[seed % 2], 0), num_sms=1 + seed % 4)
    packed = [candidate.pack() for candidate in (EMPTY_PLAN, *problem.candidates)]
    arguments = (
        case.tensor,
        case.topology.table(),
        case.spare_slots,
        packed,
        problem.objective.to_ints(),
        seed % case.num_ranks,
    )
    for got, expected in zip(kernels.solve(*arguments), ops.solve(*arguments), strict=True):
        assert torch.equal(got, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--kernels", type=int, default=0, help="so many of them by the kernels too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    failed = copies = 0
    seeds = range(arguments.first, arguments.first + arguments.plans)
    for seed in track(seeds, "plans", console=console, disable=not console.is_terminal):
        try:
            copies += int(run_plan(seed).stats()["copies"]) > 0
            if seed - arguments.first < arguments.kernels:
                run_kernels(seed)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed += 1
            print(f"seed {seed}: {problem_of(seed)}\n{traceback.format_exc()}", file=sys.stderr)
    print(
        f"{arguments.plans} plans from seed {arguments.first}, {copies} with copies, "
        f"{min(arguments.kernels, arguments.plans)} by the kernels, {failed} failed"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
