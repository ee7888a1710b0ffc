# SPDX-License-Identifier: Apache-2.0
"""Improves plans that are too large to be solved exactly: random parts of them are."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from optimal import Copies, Ints, Problem, fewest_copies, weighted_copies

PART = 9  # ranks of a part
SIZE_OF_REST = 2  # of them that no copy connects with the others
FAR = 0.7  # how much later ranks of other nodes are taken than those of the same, 0 to 1


def restrict(
    problem: Problem, copies: Copies, ranks: Sequence[int]
) -> tuple[Problem, Ints, Ints, Copies]:
    """The problem of some ranks, with the copies that reach beyond them fixed.

    Returns:
        The part, the expert and the rank of its numbers, and the copies of the whole that are not
        decided in the part.
    """
    ranks = np.array(sorted(ranks))
    experts = np.flatnonzero(np.isin(problem.home, ranks))
    inside = set(ranks.tolist())
    fixed: Copies = {}
    load, slots = problem.load.copy(), problem.slots.copy()
    movable, reached = problem.movable.copy(), problem.reached.copy()
    for (expert, rank), tokens in copies.items():
        home = int(problem.home[expert])
        if home in inside and rank in inside:
            continue
        fixed[expert, rank] = tokens
        load[home] -= tokens
        load[rank] += tokens
        slots[rank] -= 1
        movable[expert] -= tokens
        reached[expert, problem.node[rank]] = True
    nodes, node = np.unique(problem.node[ranks], return_inverse=True)
    part = Problem(
        home=np.searchsorted(ranks, problem.home[experts]),
        movable=movable[experts],
        node=node,
        load=load[ranks],
        slots=slots[ranks],
        held=problem.held[np.ix_(experts, ranks)],
        reached=reached[np.ix_(experts, nodes)],
        cross_weight=problem.cross_weight,
    )
    return part, experts, ranks, fixed


def search(
    problem: Problem,
    cap: int,
    copies: Copies,
    *,
    seed: int = 0,
    time_limit: float = 60.0,
    size: int = PART,
    enough: int = 0,
) -> Copies:
    """Improves a plan by solving random parts of it exactly.

    A part is ``size`` ranks, most of them connected by copies. The copies among them are chosen
    anew by :func:`fewest_copies` with everything else fixed, at random among the best, so that the
    search drifts where it cannot improve.

    Args:
        problem: what may be copied where.
        cap: the largest load that is allowed.
        copies: a plan to start from.
        seed: of the random choices.
        time_limit: seconds.
        size: ranks of a part.
        enough: weighted copies at which the search ends.
    """
    rng = np.random.default_rng(seed)
    deadline = time.perf_counter() + time_limit
    while weighted_copies(problem, copies) > enough and time.perf_counter() < deadline:
        chosen = _random_part(problem, copies, size, rng)
        part, experts, ranks, fixed = restrict(problem, copies, chosen)
        answer = fewest_copies(
            part,
            cap,
            time_limit=min(5.0, deadline - time.perf_counter()),
            noise=rng.random(part.held.shape),
        )
        if answer.copies is None:
            continue
        found = {(int(experts[e]), int(ranks[r])): q for (e, r), q in answer.copies.items()}
        if weighted_copies(problem, fixed | found) <= weighted_copies(problem, copies):
            copies = fixed | found
    return copies


def _random_part(
    problem: Problem, copies: Copies, size: int, rng: np.random.Generator
) -> list[int]:
    """Ranks to solve anew: ranks that copies connect, then others, rather of the same nodes."""
    edges = [(int(problem.home[expert]), rank) for expert, rank in copies]
    start = edges[rng.integers(len(edges))]
    chosen = set(start)
    while len(chosen) < size - SIZE_OF_REST:
        near = {p for edge in edges for p in edge if chosen & set(edge)} - chosen
        if not near:
            break
        chosen.add(int(rng.choice(sorted(near))))
    far = ~np.isin(problem.node, problem.node[sorted(chosen)])
    for rank in np.argsort(rng.random(problem.num_ranks) + FAR * far):
        if len(chosen) < size:
            chosen.add(int(rank))
    return sorted(chosen)
