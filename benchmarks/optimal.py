# SPDX-License-Identifier: Apache-2.0
"""How good a plan could be: exact plans, a lower bound, and local search.

Written to measure TopoEP's planner, and by other means than it: mixed-integer programs solved by
HiGHS (scipy.optimize.milp), column generation, maximum flow. Seconds per instance.

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
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, linprog, milp
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components, maximum_flow

import topoep

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
#: Tokens of every copy (expert, rank).
Copies = dict[tuple[int, int], int]

MAX_RANKS_OF_ALL_CUTS = 16
MAX_RANKS_OF_NODE = 12


# ---- the problem ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What may be copied where. A part of a larger problem is one too, see :func:`restrict`.

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

    Beyond the rules:

    - **Order.** Exchanging all copies of two experts of one home gives a plan of the same cost if
      the one with more tokens may move more. So the experts of a home can be asked to move tokens
      in the order of what they may move.
    - **Cuts.** A set Q of ranks with load(Q) = |Q| cap + F, F > 0, must send F tokens out of Q.
      Expert e carries at most min(movable[e], F) of them, to one rank or to a whole node, so

          sum over e at home in Q, nodes n of min(1, movable[e] / F) * (
              z[e, n]  or  sum over d in n outside Q of y[e, d]) >= 1

      whichever of the two is taken for each (e, n). They are the directed cuts of Steiner trees,
      and what makes small instances fast: those that the linear program violates are added until it
      violates none, or time is short.
    """

    def __init__(self, problem: Problem, cap: int | None) -> None:
        self.problem = problem
        self.scale = float(problem.ceil_mean if cap is None else cap)
        allowed = ~problem.held & (problem.movable > 0)[:, None] & (problem.slots > 0)
        self.copies = np.argwhere(allowed)
        experts, ranks = self.copies.T
        wanted = np.zeros(problem.reached.shape, bool)
        wanted[experts, problem.node[ranks]] = True
        self.pairs = np.argwhere(wanted & ~problem.reached)
        number = len(self.copies)
        self.y = np.full(problem.held.shape, -1)
        self.y[experts, ranks] = np.arange(number)
        self.z = np.full(problem.reached.shape, -1)
        self.z[tuple(self.pairs.T)] = number + np.arange(len(self.pairs))
        self.first_q = number + len(self.pairs)
        self.max_load = self.first_q + number if cap is None else -1
        self.size = self.first_q + number + (cap is None)
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self._rules(cap)
        self._order()

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
        self.entries.append((np.full(len(columns), len(self.low)), columns, values))
        self.low.append(low)
        self.high.append(high)

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
            arrives, leaves = np.flatnonzero(ranks == rank), problem.home[experts] == rank
            self.row(arrives, 1, high=problem.slots[rank])
            columns = [self.first_q + arrives, self.first_q + np.flatnonzero(leaves)]
            values = [np.ones(len(arrives)), -np.ones(leaves.sum())]
            if cap is None:
                columns, values = [*columns, [self.max_load]], [*values, [-1]]
            room = (cap or 0) - problem.load[rank]
            self.row(np.concatenate(columns), np.concatenate(values), high=room / self.scale)

    def _order(self) -> None:
        """Experts of one home that the rest of a larger plan treats alike."""
        problem = self.problem
        alike: dict[tuple[int, bytes, bytes], list[int]] = {}
        for expert in np.unique(self.copies[:, 0]):
            held, reached = problem.held[expert].tobytes(), problem.reached[expert].tobytes()
            alike.setdefault((int(problem.home[expert]), held, reached), []).append(int(expert))
        for experts in alike.values():
            experts.sort(key=lambda expert: (-problem.movable[expert], expert))
            for more, less in itertools.pairwise(experts):
                q_less, q_more = (self.first_q + self.y[e][self.y[e] >= 0] for e in (less, more))
                signs = np.repeat([1.0, -1.0], [len(q_less), len(q_more)])
                self.row(np.concatenate([q_less, q_more]), signs, high=0)

    def cost(self) -> Floats:
        """What y and z cost."""
        cost = np.zeros(self.size)
        cost[: len(self.copies)] = 1
        cost[len(self.copies) : self.first_q] = self.problem.cross_weight - 1
        return cost

    def matrix(self) -> coo_array:
        rows, columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        return coo_array((values, (rows, columns)), shape=(len(self.low), self.size)).tocsc()

    def upper(self) -> Floats:
        upper = np.ones(self.size)
        upper[self.first_q :] = math.inf
        return upper

    def solve(
        self, cost: Floats, time_limit: float, *, gap: float = 0.0, relaxed: bool = False
    ) -> OptimizeResult:
        """Minimises the cost; relaxed: as a linear program."""
        upper = np.ones(self.size)
        upper[self.first_q :] = math.inf
        integral = np.zeros(self.size)
        if not relaxed:
            integral[: self.first_q] = 1
        lower = np.zeros(self.size)
        if self.max_load >= 0:
            lower[self.max_load] = 1  # the scale is the mean, rounded up
        rows, columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self.low), self.size)).tocsc()
        return milp(
            cost,
            constraints=LinearConstraint(matrix, self.low, self.high),
            bounds=Bounds(lower, upper),
            integrality=integral,
            options={"time_limit": max(time_limit, 0.1), "mip_rel_gap": gap},
        )

    def chosen(self, x: Floats) -> list[tuple[int, int]]:
        """The copies of a solution."""
        return [(int(e), int(r)) for e, r in self.copies[x[: len(self.copies)] > 0.5]]

    def forbid(self, chosen: Sequence[tuple[int, int]]) -> None:
        """Asks for a copy besides these, which are too few (tokens were created by rounding)."""
        others = np.setdiff1d(np.arange(len(self.copies)), [self.y[copy] for copy in chosen])
        self.row(others, 1, low=1)

    def add_cuts(self, cap: int, cost: Floats, deadline: float, rounds: int = 12) -> None:
        """Adds what the linear program violates, round by round, while its value rises."""
        cuts = _Cuts(self.problem, cap)
        if not cuts.number:
            return
        before = -math.inf
        for _ in range(rounds):
            relaxed = self.solve(cost, deadline - time.perf_counter(), relaxed=True)
            if relaxed.x is None or time.perf_counter() > deadline:
                return
            if relaxed.fun <= before + 1e-4 or not cuts.add_violated(self, relaxed.x):
                return
            before = relaxed.fun


class _Cuts:
    """The sets of ranks that must export: all, or those inside a node and unions of nodes."""

    def __init__(self, problem: Problem, cap: int) -> None:
        self.problem = problem
        nodes = problem.reached.shape[1]
        self.members = [np.flatnonzero(problem.node == n) for n in range(nodes)]
        widths = [len(ranks) for ranks in self.members]
        # A set is a number per node: the bit mask of its ranks there.
        if problem.num_ranks <= MAX_RANKS_OF_ALL_CUTS:
            masks = np.meshgrid(*(np.arange(1 << width) for width in widths), indexing="ij")
            self.masks = np.stack([mask.reshape(-1) for mask in masks], axis=1)
        else:
            full = np.array([(1 << width) - 1 for width in widths])
            unions = _bits(np.arange(1 << min(nodes, 12)), nodes) * full
            inside = [
                np.eye(nodes, dtype=int)[n] * mask
                for n, width in enumerate(widths)
                for mask in range(1 << min(width, MAX_RANKS_OF_NODE))
            ]
            self.masks = np.concatenate([unions, np.array(inside)])
        excess = np.zeros(len(self.masks), np.int64)
        for n, ranks in enumerate(self.members):
            bits = _bits(np.arange(1 << widths[n]), widths[n])
            excess += (bits @ (problem.load[ranks] - cap))[self.masks[:, n]]
        self.masks, self.excess = self.masks[excess > 0], excess[excess > 0]
        self.number = len(self.masks)
        place = np.zeros(problem.num_ranks, np.int64)
        for ranks in self.members:
            place[ranks] = np.arange(len(ranks))
        home = problem.home
        self.inside = (self.masks[:, problem.node[home]] >> place[home] & 1).astype(bool).T
        self.carried = np.minimum(1, problem.movable[:, None] / self.excess) * self.inside
        order = np.argsort(-problem.movable)
        covered = np.cumsum(problem.movable[order, None] * self.inside[order], axis=0)
        uncovered = (covered < self.excess) & self.inside[order]
        self.experts_needed = 1 + uncovered.sum(0)

    def add_violated(self, program: _Program, x: Floats, most: int = 50) -> int:
        """Adds the most violated cuts; returns how many."""
        y = np.where(program.y >= 0, x[program.y], 0)
        z = np.where(program.z >= 0, x[program.z], math.inf)
        leaving = np.zeros(self.inside.shape)
        for n, ranks in enumerate(self.members):
            outside = 1 - _bits(np.arange(1 << len(ranks)), len(ranks))
            leaving += np.minimum(y[:, ranks] @ outside.T, z[:, n, None])[:, self.masks[:, n]]
        by_tokens = (leaving * self.carried).sum(0)
        by_experts = (leaving * self.inside).sum(0) / self.experts_needed
        left = np.minimum(by_tokens, by_experts)
        worst = np.argsort(left, kind="stable")[:most]
        worst = worst[left[worst] < 1 - 1e-3]
        for i in worst:
            if by_tokens[i] <= by_experts[i]:
                value, need = self.carried[:, i], 1
            else:
                value, need = self.inside[:, i].astype(float), int(self.experts_needed[i])
            columns, values = [], []
            for n, ranks in enumerate(self.members):
                outside = ranks[_bits(self.masks[i, n], len(ranks)) == 0]
                copies = np.where(program.y[:, outside] >= 0, y[:, outside], 0).sum(1)
                use_pair = (z[:, n] <= copies) & (program.z[:, n] >= 0) & (len(outside) > 0)
                for expert in np.flatnonzero(value):
                    if use_pair[expert]:
                        taken = program.z[expert, n, None]
                    else:
                        taken = program.y[expert, outside]
                    taken = taken[taken >= 0]
                    columns.append(taken)
                    values.append(np.full(len(taken), value[expert]))
            program.row(np.concatenate(columns), np.concatenate(values), low=need)
        return len(worst)


def _bits(masks: npt.ArrayLike, width: int) -> Ints:
    """The bits of numbers, lowest first, in a last axis."""
    return np.asarray(masks, np.int64)[..., None] >> np.arange(width) & 1


def fewest_copies(
    problem: Problem,
    cap: int,
    *,
    time_limit: float = 60.0,
    at_least: int = 0,
    noise: Floats | None = None,
) -> Answer:
    """The plan with the fewest weighted copies among those with no rank above cap.

    Args:
        problem: what may be copied where.
        cap: the largest load that is allowed.
        time_limit: seconds; when they are over, value and bound may differ.
        at_least: a lower bound that is known.
        noise: [E, R], in 0 .. 1: which of many plans of the same cost is taken. Copies cost up to
            0.4 in total more, so the weighted copies are still the fewest.
    """
    deadline = time.perf_counter() + time_limit
    if problem.load.max() <= cap:
        return Answer({}, 0, 0)
    if problem.load.sum() > cap * problem.num_ranks or not problem.slots.any():
        return Answer(None, math.inf, math.inf)
    program = _Program(problem, cap)
    cost = program.cost()
    program.add_cuts(cap, cost, time.perf_counter() + time_limit / 4)
    margin = 1e-4
    if noise is not None:
        margin += 0.4
        cost[: len(program.copies)] += 0.4 / problem.slots.sum() * noise[tuple(program.copies.T)]
    bound = at_least
    while True:
        # Stop when no plan that is cheaper by a whole copy is left.
        gap = 0.45 / (at_least or len(program.copies))
        result = program.solve(cost, deadline - time.perf_counter(), gap=gap)
        if result.status == 2:
            return Answer(None, math.inf, math.inf)
        if result.mip_dual_bound is not None and math.isfinite(result.mip_dual_bound):
            bound = max(bound, math.ceil(result.mip_dual_bound - margin))
        if result.x is None:
            return Answer(None, math.inf, bound)
        copies = place_tokens(problem, cap, program.chosen(result.x))
        if copies is not None:
            return Answer(copies, weighted_copies(problem, copies), bound)
        program.forbid(program.chosen(result.x))


def lowest_max_load(
    problem: Problem, *, time_limit: float = 60.0, at_most: int | None = None
) -> Answer:
    """The plan with the smallest largest load.

    Args:
        problem: what may be copied where.
        time_limit: seconds; when they are over, value and bound may differ.
        at_most: a largest load that some plan is known to reach.
    """
    deadline = time.perf_counter() + time_limit
    cap = int(problem.load.max()) if at_most is None else at_most
    if cap == problem.ceil_mean or not problem.slots.any():
        return Answer(None if at_most is not None else {}, cap, cap)
    program = _Program(problem, None)
    cost = np.zeros(program.size)
    cost[program.max_load] = 1
    # Plans that reach at most `cap` fulfil the cuts for it.
    program.add_cuts(cap, cost + 1e-6 * program.cost(), time.perf_counter() + time_limit / 4)
    bound = problem.ceil_mean
    while True:
        gap = 0.4 / problem.ceil_mean
        result = program.solve(cost, deadline - time.perf_counter(), gap=gap)
        if result.mip_dual_bound is not None and math.isfinite(result.mip_dual_bound):
            bound = max(bound, math.ceil(result.mip_dual_bound * program.scale - 0.05))
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


class Groups:
    """Sets of ranks that can serve themselves, and what their copies cost at least.

    Take any plan with no load above cap and join the home rank and the ranks of every copy. Let g
    be a set of ranks that this connects, in m nodes; call the ranks of g in one node a part. Then

    - tokens never leave g, so load(g) <= |g| cap;
    - |g| ranks are not connected by less than |g| - 1 copies, and a rank above cap needs as many
      copies as it takes experts to carry its excess, the largest first;
    - m nodes are not connected by less than m - 1 pairs, and a part above its share of cap needs
      as many pairs as it takes experts to carry the excess of the part.

    So g costs at least

        c(g) = max(|g| - 1, sum over its ranks of experts needed)
             + (cross_weight - 1) max(m - 1, sum over its parts of experts needed),

    and a plan costs at least the cheapest partition of all ranks into groups with load(g) <= |g|
    cap. The same reasoning with sums of zero counts the payments that settle debts.
    """

    def __init__(self, problem: Problem, cap: int) -> None:
        self.problem = problem
        self.pair_cost = problem.cross_weight - 1
        nodes = problem.reached.shape[1]
        self.members = [np.flatnonzero(problem.node == n) for n in range(nodes)]
        largest = max(len(ranks) for ranks in self.members)
        if largest > MAX_RANKS_OF_NODE:
            raise ValueError(
                f"a node of {largest} ranks; all sets of ranks of a node are listed, so "
                f"expected at most {MAX_RANKS_OF_NODE}"
            )
        self.place = np.concatenate([np.arange(len(ranks)) for ranks in self.members])[
            np.argsort(np.concatenate(self.members))
        ]
        of_rank = [problem.movable[problem.home == r] for r in range(problem.num_ranks)]
        needed = np.array(
            [_experts_needed(of_rank[r], problem.load[r] - cap) for r in range(problem.num_ranks)]
        )
        self.num_overloaded = int((needed > 0).sum())
        self.bits = [_bits(np.arange(1 << len(ranks)), len(ranks)) for ranks in self.members]
        #: Per node and part: ranks, cap - load, experts needed - ranks, and the same for the part.
        self.size = [bits.sum(1) for bits in self.bits]
        self.slack = [
            bits @ (cap - problem.load[r]) for bits, r in zip(self.bits, self.members, strict=True)
        ]
        self.more_copies = [
            bits @ (needed[r] - 1) for bits, r in zip(self.bits, self.members, strict=True)
        ]
        self.more_pairs = []
        for ranks, bits, slack in zip(self.members, self.bits, self.slack, strict=True):
            more = np.where(bits.any(1), -1, 0)
            for part in np.flatnonzero(slack < 0):
                movable = np.concatenate([of_rank[r] for r in ranks[bits[part] == 1]])
                more[part] += _experts_needed(movable, -slack[part])
            self.more_pairs.append(more)

    def costs(self, parts: Ints) -> Ints:
        """c(g) of groups given as the bit mask of their part in each node, [.., N]."""
        at = [parts[..., n] for n in range(len(self.members))]
        size = sum(self.size[n][part] for n, part in enumerate(at))
        more_copies = sum(self.more_copies[n][part] for n, part in enumerate(at))
        more_pairs = sum(self.more_pairs[n][part] for n, part in enumerate(at))
        nodes = (parts > 0).sum(-1)
        copies = size + np.maximum(-1, more_copies)
        pairs = nodes + np.maximum(-1, more_pairs)
        return np.where(size > 0, copies + self.pair_cost * pairs, 0)

    def slacks(self, parts: Ints) -> Ints:
        """|g| cap - load(g) of groups, [.., N]."""
        return sum(self.slack[n][parts[..., n]] for n in range(len(self.members)))

    def parts_of(self, ranks: Sequence[int]) -> Ints:
        """[N]: a group as the bit mask of its part in each node."""
        parts = np.zeros(len(self.members), np.int64)
        np.add.at(parts, self.problem.node[ranks], 1 << self.place[ranks])
        return parts

    def matrix(self, parts: Ints) -> Floats:
        """[groups, R]: who is in which group."""
        matrix = np.zeros((len(parts), self.problem.num_ranks))
        for n, ranks in enumerate(self.members):
            matrix[:, ranks] = self.bits[n][parts[:, n]]
        return matrix


def _experts_needed(movable: Ints, excess: int) -> int:
    """The fewest experts that carry the excess."""
    if excess <= 0:
        return 0
    carried = np.cumsum(np.sort(movable)[::-1])
    return int(np.searchsorted(carried, excess)) + 1


_UNIT = 5040  # prices are integers of this many per copy


def lower_bound(
    problem: Problem, cap: int, *, time_limit: float = 60.0, known: int | None = None
) -> int:
    """No plan without a load above cap has fewer weighted copies.

    The cheapest partition of the ranks into groups (:class:`Groups`) is bounded by its linear
    program, solved by column generation (Gilmore and Gomory 1961). Its dual gives every rank a
    price u; if u(g) <= c(g) + d for all groups, then every partition costs at least the sum of all
    prices less d for every group with u(g) > c(g). Prices of ranks that are not above cap are never
    positive, so such a group contains a rank that is. The prices are rounded to integers, and the
    largest u(g) - c(g) is found exactly by a dynamic program over the nodes that keeps, of all
    parts chosen so far, those that no other exceeds in both price and slack. So the result is
    valid at any time and whatever linprog returned; more iterations make it larger. Prices are
    smoothed towards the best ones so far (Wentges 1997).

    Args:
        problem: what may be copied where, without copies that are fixed.
        cap: the largest load that is allowed.
        time_limit: seconds.
        known: a plan that is known costs this much; the search ends when that is proved optimal.
    """
    if problem.load.max() <= cap:
        return 0
    if problem.load.sum() > cap * problem.num_ranks:
        raise ValueError(f"no plan has all loads within {cap}: the mean is above it")
    groups = Groups(problem, cap)
    deadline = time.perf_counter() + time_limit
    parts = _first_groups(groups)
    overloaded = problem.load > cap
    center = overloaded * _UNIT  # c(g) is at least the number of ranks above cap
    best = int(center.sum())
    while True:
        solution = linprog(
            -np.ones(problem.num_ranks),
            A_ub=groups.matrix(parts),
            b_ub=groups.costs(parts),
            bounds=[(0, 60) if over else (-60, 0) for over in overloaded],
            method="highs",
        )
        found = np.floor(solution.x * _UNIT + 1e-6).astype(np.int64)
        new = np.zeros((0, parts.shape[1]), np.int64)
        for weight in (0.7, 0.0):
            prices = np.rint(weight * center + (1 - weight) * found).astype(np.int64)
            worst, candidates = _dearest_groups(groups, prices)
            value = int(prices.sum()) - groups.num_overloaded * worst
            if value > best:
                best, center = value, prices
            paid = groups.matrix(candidates) @ found
            new = candidates[paid > groups.costs(candidates) * _UNIT]
            if len(new):
                break
        bound = -(-best // _UNIT)
        reached = math.ceil(-solution.fun - 1e-6)  # the linear program with all groups is below
        if not len(new) or bound >= reached or (known is not None and bound >= known):
            return bound
        if time.perf_counter() > deadline:
            return bound
        parts = np.unique(np.concatenate([parts, new]), axis=0)


def _first_groups(groups: Groups) -> Ints:
    """Groups inside a node, pairs of ranks, and all ranks together."""
    ranks, nodes = groups.problem.num_ranks, len(groups.members)
    inside = [np.eye(nodes, dtype=np.int64)[n] * np.arange(1, len(groups.size[n]))[:, None]
              for n in range(nodes)]  # fmt: skip
    pairs = [groups.parts_of([p, q]) for p in range(ranks) for q in range(p)]
    everything = [len(size) - 1 for size in groups.size]
    parts = np.concatenate([*inside, np.array(pairs).reshape(-1, nodes), [everything]])
    return np.unique(parts[groups.slacks(parts) >= 0], axis=0)


def _dearest_groups(groups: Groups, prices: Ints, most: int = 300) -> tuple[int, Ints]:
    """The largest price(g) - c(g) over all groups, at least 0, and groups where it is positive."""
    pair_cost = groups.pair_cost
    # Above these sums, a group can not come back to where connecting its ranks costs more.
    most_copies = sum(int(more.max()) for more in groups.more_copies)
    most_pairs = sum(int(more.max()) for more in groups.more_pairs)
    options = []
    for n, ranks in enumerate(groups.members):
        price = groups.bits[n] @ (prices[ranks] - _UNIT) - pair_cost * _UNIT * (groups.size[n] > 0)
        table = _Table(price, groups.slack[n], groups.more_copies[n], groups.more_pairs[n])
        options.append(table.undominated())
    price_left = np.cumsum([0] + [table.price.max() for _, table in options[::-1]])[::-1]
    slack_left = np.cumsum([0] + [table.slack.max() for _, table in options[::-1]])[::-1]
    state = _Table(*(np.zeros(1, np.int64) for _ in range(4)))
    history = []
    for n, (part, table) in enumerate(options):
        combined = _Table(
            *(
                (a[:, None] + b).reshape(-1)
                for a, b in zip(state.columns, table.columns, strict=True)
            )
        )
        combined.more_copies = np.maximum(combined.more_copies, -1 - most_copies)
        combined.more_pairs = np.maximum(combined.more_pairs, -1 - most_pairs)
        hope = combined.price + price_left[n + 1] > -(1 + pair_cost) * _UNIT
        hope &= combined.slack + slack_left[n + 1] >= 0
        kept = np.flatnonzero(hope)
        if not len(kept):
            return 0, np.zeros((0, len(groups.members)), np.int64)
        best, state = combined.take(kept).undominated()
        kept = kept[best]
        history.append((kept // len(part), part[kept % len(part)]))
    excess = state.price - _UNIT * (
        np.maximum(-1, state.more_copies) + pair_cost * np.maximum(-1, state.more_pairs)
    )
    found = np.flatnonzero((state.slack >= 0) & (excess > 0))
    found = found[np.argsort(-excess[found], kind="stable")]
    worst = int(excess[found[0]]) if len(found) else 0
    at, columns = found[:most], []
    for before, part in history[::-1]:
        columns.append(part[at])
        at = before[at]
    return worst, np.stack(columns[::-1], axis=1)


@dataclass
class _Table:
    """Sets of parts; price is less what size and nodes cost."""

    price: Ints
    slack: Ints
    more_copies: Ints
    more_pairs: Ints

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        return self.price, self.slack, self.more_copies, self.more_pairs

    def take(self, rows: Ints) -> _Table:
        return _Table(*(column[rows] for column in self.columns))

    def undominated(self) -> tuple[Ints, _Table]:
        """Rows that no other with the same counts exceeds in price and slack, and their numbers."""
        kind = np.unique(self.more_copies * 2**20 + self.more_pairs, return_inverse=True)[1]
        order = np.lexsort((-self.slack, -self.price, kind))
        level = self.slack[order] + kind[order] * (np.ptp(self.slack) + 1)
        keep = np.ones(len(order), bool)
        keep[1:] = level[1:] > np.maximum.accumulate(level)[:-1]
        return order[keep], self.take(order[keep])


# ---- local search --------------------------------------------------------------------------------


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


def groups_of(problem: Problem, copies: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Ranks that copies connect; ranks without copies are groups of one."""
    joined = np.array([(problem.home[expert], rank) for expert, rank in copies]).reshape(-1, 2)
    size = problem.num_ranks
    graph = coo_array((np.ones(len(joined)), joined.T.astype(int)), shape=(size, size))
    number, label = connected_components(graph, directed=False)
    return [np.flatnonzero(label == i).tolist() for i in range(number)]


def search(
    problem: Problem,
    cap: int,
    copies: Copies,
    *,
    seed: int = 0,
    time_limit: float = 60.0,
    size: int = 9,
    enough: int = 0,
) -> Copies:
    """Improves a plan by solving random parts of it exactly.

    A part is whole groups of the plan, near each other, up to ``size`` ranks; or, of a larger
    group, ranks that are connected. Its copies are chosen anew by :func:`fewest_copies` with
    everything else fixed, at random among the best, so that the search drifts where it cannot
    improve.

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
        chosen = _random_part(problem, cap, copies, size, rng)
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
    problem: Problem, cap: int, copies: Copies, size: int, rng: np.random.Generator
) -> list[int]:
    """Ranks to solve anew: groups that share nodes, filled up with ranks without copies."""
    groups = [group for group in groups_of(problem, copies) if len(group) > 1]
    start = groups[rng.integers(len(groups))]
    if len(start) > size:
        start = _connected_ranks(problem, copies, start, size, rng)
    chosen, nodes = list(start), set(problem.node[start].tolist())
    others = groups_of(problem, copies)
    far = [not nodes & set(problem.node[group].tolist()) for group in others]
    order = sorted(range(len(others)), key=lambda i: rng.random() + 0.7 * far[i])
    for i in order:
        if len(chosen) + len(others[i]) <= size and not set(others[i]) & set(chosen):
            chosen += others[i]
    return chosen


def _connected_ranks(
    problem: Problem, copies: Copies, group: list[int], size: int, rng: np.random.Generator
) -> list[int]:
    """Some ranks of a group that its copies connect."""
    edges = [(int(problem.home[expert]), rank) for expert, rank in copies]
    chosen = [int(rng.choice(group))]
    while len(chosen) < size:
        near = {p for edge in edges for p in edge if set(edge) & set(chosen)} - set(chosen)
        chosen.append(int(rng.choice(sorted(near))))
    return chosen
