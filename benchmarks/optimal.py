# SPDX-License-Identifier: Apache-2.0
"""How good a plan could be: exact plans and a lower bound.

Written to measure TopoEP's planner, and by other means than it: mixed-integer programs solved by
HiGHS (scipy.optimize.milp) and maximum flow. Seconds per instance.

The problem, in the words of docs/algorithm.md: choose copies (expert, rank), at most S per rank and
none of an expert on a rank that holds it, and tokens for each, so that one token of every expert
stays at home and no rank serves more than ``cap``. A plan costs ``copies + (cross_weight - 1) *
pairs``, a pair being an (expert, node other than its home node) that has a copy.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow

import topoep

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
#: Tokens of every copy (expert, rank).
Copies = dict[tuple[int, int], int]

MAX_RANKS_OF_CUTS = 12  # all sets of ranks are listed
MAX_CUTS_AT_ONCE = 50
INFEASIBLE = 2  # status of scipy.optimize.milp


# ---- the problem ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What may be copied where. A part of a larger problem is one too (local_search.py).

    Ranks and experts are numbered as by the user of topoep.
    """

    #: [E]: home rank.
    home: Ints
    #: [E]: tokens that may leave home.
    movable: Ints
    #: [R]: node.
    node: Ints
    #: [R]: tokens served if nothing is copied.
    load: Ints
    #: [R]: free slots.
    slots: Ints
    #: [E, R]: ranks that hold the expert: its home, and in a part also the copies that are fixed.
    held: Mask
    #: [E, N]: nodes that hold the expert, where a copy costs no more than one in the home node.
    reached: Mask
    cross_weight: int = 3

    @property
    def num_ranks(self) -> int:
        return len(self.load)

    @property
    def num_experts(self) -> int:
        return len(self.home)

    @property
    def ceil_mean(self) -> int:
        """What the fullest rank serves at least, whatever the plan."""
        return -(-int(self.load.sum()) // self.num_ranks)


def from_counts(
    counts: npt.NDArray[np.integer],
    topology: topoep.Topology,
    spare_slots: int,
    cross_weight: int = 3,
) -> Problem:
    """The problem that ``topoep.solve`` is given."""
    total = counts.sum(0, dtype=np.int64)
    node = np.array(topology.node_of_rank)
    ranks, experts = len(node), len(total)
    home = np.arange(experts) // (experts // ranks)
    return Problem(
        home=home,
        movable=np.maximum(total - 1, 0),
        node=node,
        load=np.bincount(home, weights=total, minlength=ranks).astype(np.int64),
        slots=np.full(ranks, spare_slots),
        held=home[:, None] == np.arange(ranks),
        reached=node[home][:, None] == np.arange(topology.num_nodes),
        cross_weight=cross_weight,
    )


def cap_within(problem: Problem, tolerance: float) -> int:
    """``within(T, R, ppm)`` of docs/algorithm.md."""
    tokens, ranks = int(problem.load.sum()), problem.num_ranks
    ppm = round(tolerance * 1_000_000)
    return max(problem.ceil_mean, tokens * (1_000_000 + ppm) // (ranks * 1_000_000))


def copies_of(plan: topoep.Plan) -> Copies:
    """The copies of a plan."""
    experts, tokens = plan.slot_expert.cpu().tolist(), plan.slot_tokens.cpu().tolist()
    return {
        (expert, rank): served
        for rank, row in enumerate(experts)
        for expert, served in zip(row, tokens[rank], strict=True)
        if expert >= 0
    }


def pairs_of(problem: Problem, copies: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Distinct (expert, node) that a copy has to reach over the network."""
    pairs = {(expert, int(problem.node[rank])) for expert, rank in copies}
    return {pair for pair in pairs if not problem.reached[pair]}


def weighted_copies(problem: Problem, copies: Iterable[tuple[int, int]]) -> int:
    """What a plan costs."""
    copies = list(copies)
    return len(copies) + (problem.cross_weight - 1) * len(pairs_of(problem, copies))


def loads(problem: Problem, copies: Copies) -> Ints:
    """[R]: tokens that every rank serves."""
    load = problem.load.copy()
    for (expert, rank), tokens in copies.items():
        load[problem.home[expert]] -= tokens
        load[rank] += tokens
    return load


def broken_rule(problem: Problem, copies: Copies, cap: int | None = None) -> str | None:
    """None, or the rule that the copies break."""
    moved = np.zeros(problem.num_experts, np.int64)
    used = np.zeros(problem.num_ranks, np.int64)
    for (expert, rank), tokens in copies.items():
        if problem.held[expert, rank]:
            return f"rank {rank} holds expert {expert} already"
        if tokens < 0:
            return f"the copy of expert {expert} on rank {rank} serves {tokens} tokens"
        moved[expert] += tokens
        used[rank] += 1
    if (used > problem.slots).any():
        return "a rank holds more copies than it has slots"
    if (moved > problem.movable).any():
        return "an expert keeps no token at home"
    if cap is not None and loads(problem, copies).max() > cap:
        return f"a rank serves more than {cap} tokens"
    return None


def place_tokens(problem: Problem, cap: int, holders: Iterable[tuple[int, int]]) -> Copies | None:
    """Tokens for given copies so that no rank serves more than cap; None if there are none.

    A maximum flow: source -> rank (its load) -> its experts (movable) -> ranks that hold a copy,
    and rank -> sink (cap). Tokens that arrive on a rank and leave again with an expert of that rank
    stand for as many of its own tokens that leave. The capacities are integers, so there is an
    integral maximum flow, and copies that it does not use are left out.
    """
    holders = sorted(set(holders))
    experts = sorted({expert for expert, _ in holders})
    ranks = problem.num_ranks
    of_expert = {expert: 1 + ranks + i for i, expert in enumerate(experts)}
    sink = 1 + ranks + len(experts)
    arcs = [(0, 1 + rank, int(problem.load[rank])) for rank in range(ranks)]
    arcs += [(1 + rank, sink, cap) for rank in range(ranks)]
    for expert in experts:
        movable = int(problem.movable[expert])
        arcs.append((1 + int(problem.home[expert]), of_expert[expert], movable))
    for expert, rank in holders:
        arcs.append((of_expert[expert], 1 + rank, int(problem.movable[expert])))
    tails, heads, capacity = zip(*arcs, strict=True)
    graph = csr_array((np.array(capacity, np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
    result = maximum_flow(graph, 0, sink)
    if result.flow_value < problem.load.sum():
        return None
    flow = result.flow.todok()
    tokens = {(e, r): int(flow.get((of_expert[e], 1 + r), 0)) for e, r in holders}
    return {copy: served for copy, served in tokens.items() if served > 0}


# ---- exact plans ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a solver found and what it proved."""

    #: The best plan, None if none was found.
    copies: Copies | None
    #: Its weighted copies or its largest load; infinite without a plan.
    value: float
    #: No plan is below it; infinite if there is none at all.
    bound: float

    @property
    def proved(self) -> bool:
        return self.value <= self.bound


class _Program:
    """The mixed-integer program.

    Variables: y[e, d] = 1 if d gets a copy of e, z[e, n] = 1 if a copy of e goes to node n, and the
    tokens q[e, d] of the copy, in units of the cap. Only y and z are integers: with the copies
    fixed, the q are a flow in a network (see :func:`place_tokens`) with integral capacities, so
    there are integral q whenever there are any.
    """

    def __init__(self, problem: Problem, cap: int | None) -> None:
        self.problem = problem
        self.scale = float(problem.ceil_mean if cap is None else cap)
        allowed = ~problem.held & (problem.movable > 0)[:, None] & (problem.slots > 0)
        self.copies = np.argwhere(allowed)
        experts, ranks = self.copies.T
        wanted = np.zeros(problem.reached.shape, bool)
        wanted[experts, problem.node[ranks]] = True
        pairs = np.argwhere(wanted & ~problem.reached)
        number = len(self.copies)
        self.y = np.full(problem.held.shape, -1)
        self.y[experts, ranks] = np.arange(number)
        self.z = np.full(problem.reached.shape, -1)
        self.z[tuple(pairs.T)] = number + np.arange(len(pairs))
        self.first_q = number + len(pairs)
        self.max_load = self.first_q + number  # used if no cap is given
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.limits: list[tuple[float, float]] = []
        self.copy_cost = np.zeros(self.max_load + 1)
        self.copy_cost[:number] = 1
        self.copy_cost[number : self.first_q] = problem.cross_weight - 1
        self._rules(cap)

    def row(
        self,
        columns: npt.ArrayLike,
        values: npt.ArrayLike,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> None:
        """low <= sum of values * columns <= high."""
        columns = np.asarray(columns, np.int64)
        values = np.broadcast_to(np.asarray(values, float), columns.shape)
        self.entries.append((np.full(len(columns), len(self.limits)), columns, values))
        self.limits.append((low, high))

    def _rules(self, cap: int | None) -> None:
        problem = self.problem
        experts, ranks = self.copies.T
        movable = problem.movable / self.scale
        for j, (expert, rank) in enumerate(self.copies):
            self.row([self.first_q + j, j], [1, -movable[expert]], high=0)
            pair = self.z[expert, problem.node[rank]]
            if pair >= 0:
                self.row([j, pair], [1, -1], high=0)
        for expert in np.unique(experts):
            self.row(self.first_q + np.flatnonzero(experts == expert), 1, high=movable[expert])
        for rank in range(problem.num_ranks):
            arrives = np.flatnonzero(ranks == rank)
            leaves = np.flatnonzero(problem.home[experts] == rank)
            self.row(arrives, 1, high=problem.slots[rank])
            columns = [*(self.first_q + arrives), *(self.first_q + leaves), self.max_load]
            values = [1] * len(arrives) + [-1] * len(leaves) + [-1 if cap is None else 0]
            self.row(columns, values, high=((cap or 0) - problem.load[rank]) / self.scale)

    def solve(
        self, cost: Floats, deadline: float, *, gap: float = 0.0, relaxed: bool = False
    ) -> OptimizeResult:
        """Minimises the cost; relaxed: as a linear program."""
        upper = np.full(len(cost), math.inf)
        upper[: self.first_q] = 1
        lower = np.zeros(len(cost))
        lower[self.max_load] = 1  # the scale is the least that the fullest rank can have
        rows, columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        shape = (len(self.limits), len(cost))
        low, high = np.array(self.limits).T
        return milp(
            cost,
            constraints=LinearConstraint(coo_array((values, (rows, columns)), shape), low, high),
            bounds=Bounds(lower, upper),
            integrality=np.zeros(len(cost)) if relaxed else (upper == 1).astype(int),
            options={
                "time_limit": max(deadline - time.perf_counter(), 0.1),
                "mip_rel_gap": gap,
            },
        )

    def chosen(self, x: Floats) -> list[tuple[int, int]]:
        """The copies of a solution."""
        return [(int(e), int(r)) for e, r in self.copies[x[: len(self.copies)] > 0.5]]

    def forbid(self, chosen: Sequence[tuple[int, int]]) -> None:
        """Asks for a copy besides these, which are too few (tokens were created by rounding)."""
        others = np.setdiff1d(np.arange(len(self.copies)), [self.y[copy] for copy in chosen])
        self.row(others, 1, low=1)

    def add_cuts(self, cap: int, cost: Floats, deadline: float) -> None:
        """Adds what the linear program violates, round by round, while its value rises.

        A set Q of ranks with load(Q) = |Q| cap + F, F > 0, must send F tokens out of Q. Expert e
        carries at most min(movable[e], F) of them, to one rank or to a whole node, so

            sum over e at home in Q, nodes n of min(1, movable[e] / F) * (
                z[e, n]  or  sum over d in n outside Q of y[e, d]) >= 1

        whichever of the two is taken for each (e, n). They are the directed cuts of Steiner trees,
        and what makes small instances fast.
        """
        problem = self.problem
        if problem.num_ranks > MAX_RANKS_OF_CUTS:
            return
        sets = np.arange(1 << problem.num_ranks)[:, None] >> np.arange(problem.num_ranks) & 1
        excess = sets @ (problem.load - cap)
        sets, excess = sets[excess > 0], excess[excess > 0]
        share = np.minimum(1, problem.movable[:, None] / excess) * sets.T[problem.home]  # [E, sets]
        members = [np.flatnonzero(problem.node == n) for n in range(problem.reached.shape[1])]
        before = -math.inf
        while time.perf_counter() < deadline:
            relaxed = self.solve(cost, deadline, relaxed=True)
            if relaxed.x is None or relaxed.fun <= before + 1e-4:
                return
            before = relaxed.fun
            y = np.where(self.y >= 0, relaxed.x[self.y], 0)
            z = np.where(self.z >= 0, relaxed.x[self.z], math.inf)
            by_rank = [y[:, m] @ (1 - sets[:, m]).T for m in members]  # [E, sets] each
            leaving = sum(np.minimum(by_rank[n], z[:, n, None]) for n in range(len(members)))
            left = (leaving * share).sum(0)
            worst = np.argsort(left, kind="stable")[:MAX_CUTS_AT_ONCE]
            for i in worst[left[worst] < 1 - 1e-3]:
                columns, values = [], []
                for expert, n in itertools.product(
                    np.flatnonzero(share[:, i]), range(len(members))
                ):
                    taken = self.y[expert, members[n][sets[i, members[n]] == 0]]
                    if len(taken) and z[expert, n] <= by_rank[n][expert, i]:
                        taken = self.z[expert, n, None]
                    columns.append(taken[taken >= 0])
                    values.append(np.full(len(columns[-1]), share[expert, i]))
                self.row(np.concatenate(columns), np.concatenate(values), low=1)


def fewest_copies(
    problem: Problem,
    cap: int,
    *,
    time_limit: float = 60.0,
    noise: Floats | None = None,
) -> Answer:
    """The plan with the fewest weighted copies among those with no rank above cap.

    Args:
        problem: what may be copied where.
        cap: the largest load that is allowed.
        time_limit: seconds; when they are over, value and bound may differ.
        noise: [E, R], in 0 .. 1: which of many plans of the same cost is taken. Copies cost up to
            0.4 in total more, so the weighted copies are still the fewest.
    """
    deadline = time.perf_counter() + time_limit
    if problem.load.max() <= cap:
        return Answer({}, 0, 0)
    if problem.load.sum() > cap * problem.num_ranks or not problem.slots.any():
        return Answer(None, math.inf, math.inf)
    program = _Program(problem, cap)
    cost = program.copy_cost.copy()
    program.add_cuts(cap, cost, time.perf_counter() + time_limit / 4)
    margin = 1e-4
    if noise is not None:
        margin += 0.4
        cost[: len(program.copies)] += 0.4 / problem.slots.sum() * noise[tuple(program.copies.T)]
    bound = 0
    while True:
        # Stop when no plan that is cheaper by a whole copy is left.
        result = program.solve(cost, deadline, gap=0.45 / len(program.copies))
        if result.status == INFEASIBLE:
            return Answer(None, math.inf, math.inf)
        bound = max(bound, _finite(result.mip_dual_bound, margin))
        if result.x is None:
            return Answer(None, math.inf, bound)
        copies = place_tokens(problem, cap, program.chosen(result.x))
        if copies is not None:
            return Answer(copies, weighted_copies(problem, copies), bound)
        program.forbid(program.chosen(result.x))


def _finite(bound: float | None, margin: float) -> int:
    """The least integer that a lower bound, uncertain by the margin, allows."""
    return math.ceil(bound - margin) if bound is not None and math.isfinite(bound) else 0


def lowest_max_load(problem: Problem, *, time_limit: float = 60.0) -> Answer:
    """The plan with the smallest largest load; value and bound differ when time is over."""
    deadline = time.perf_counter() + time_limit
    if not problem.slots.any():
        return Answer({}, int(problem.load.max()), int(problem.load.max()))
    program = _Program(problem, None)
    cost = np.zeros(len(program.copy_cost))
    cost[program.max_load] = 1
    bound = problem.ceil_mean
    while True:
        result = program.solve(cost, deadline, gap=0.4 / problem.ceil_mean)
        bound = max(bound, _finite((result.mip_dual_bound or 0) * program.scale, 0.05))
        if result.x is None:
            return Answer(None, math.inf, bound)
        chosen = program.chosen(result.x)
        claimed = math.ceil(result.x[program.max_load] * program.scale - 0.05)
        for value in (claimed, claimed + 1):
            copies = place_tokens(problem, max(value, problem.ceil_mean), chosen)
            if copies is not None:
                return Answer(copies, int(loads(problem, copies).max()), bound)
        program.forbid(chosen)


# ---- lower bound ---------------------------------------------------------------------------------


def experts_needed(movable: Ints, excess: int) -> int:
    """The fewest experts that carry the excess away."""
    if excess <= 0:
        return 0
    return int(np.searchsorted(np.cumsum(np.sort(movable)[::-1]), excess)) + 1


def lower_bound(problem: Problem, cap: int) -> int:
    """No plan without a load above cap has fewer weighted copies; simple, and so far below.

    An overloaded rank makes at least one copy of as many experts as it takes to carry its excess,
    and all ranks together take in the whole excess, each at most its room: in as many copies as the
    largest rooms that hold it. The same holds for nodes and pairs.
    """

    def most(members: list[Ints]) -> int:
        spare = np.array([len(m) * cap - int(problem.load[m].sum()) for m in members])
        export = sum(
            experts_needed(problem.movable[np.isin(problem.home, m)], -int(room))
            for m, room in zip(members, spare, strict=True)
        )
        rooms = np.maximum(spare, 0)
        return max(export, experts_needed(rooms, int(-spare[spare < 0].sum())))

    ranks = [np.array([rank]) for rank in range(problem.num_ranks)]
    nodes = [np.flatnonzero(problem.node == n) for n in range(problem.reached.shape[1])]
    return most(ranks) + (problem.cross_weight - 1) * most(nodes)
