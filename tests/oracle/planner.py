# SPDX-License-Identifier: Apache-2.0
"""The planner of docs/algorithm.md, sections 1 to 8, in plain Python and by no other source.

Written to be compared with the page line by line: one function per step, lists and loops, the words
of the page. It is slow on purpose. Sections 5b and 7b have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from tests.oracle.match_transport import match_transport
from tests.oracle.predicted_time import Costs, predicted_time

Counts = Sequence[Sequence[int]]

PARTS_PER_MILLION = 1_000_000
SAVED_ROOM_LIMIT = 2**22 - 1
NEVER_LOCAL = 2**31 - 1
MAX_RANK_COPIES = 16
MOST_CLAIMED = 2**18 - 2


# ---- what goes in and comes out ------------------------------------------------------------------


class Objective(NamedTuple):
    """Section 7: ``kind`` is "balance", "even" or "time"; the tolerance is in parts per million."""

    kind: str
    tolerance: int = 0
    cross_weight: int = 3
    costs: Costs | None = None  # of "time"


class Policy(NamedTuple):
    """Section 4: the letter and the digits of a policy."""

    nodes_first: bool
    near_first: bool
    threshold: int = 0
    exporter: int = 0
    round_up: bool = False
    item_order: int = 0
    fit: int = 0
    affinity: str = ""
    whole_rooms: bool = False
    local: bool = False
    transport: bool = False
    rank_copies: int = MAX_RANK_COPIES


class Copy(NamedTuple):
    """A copy by planner expert id and position."""

    expert: int
    position: int
    tokens: int


@dataclass(frozen=True)
class Solved:
    """What one candidate comes to, in planner ids."""

    cap: int | None  # None for the rule "none"
    copies: list[Copy]
    home: list[int]
    load: list[int]
    steps: int
    counts: Counts  # by position and planner expert id

    @property
    def max_load(self) -> int:
        return max(self.load)

    def tokens_moved(self, layout: Layout) -> Iterator[tuple[tuple[int, int], int]]:
        """((source position, holder position), tokens) of all experts, by the split."""
        quotas = [{layout.home_position(e): at_home} for e, at_home in enumerate(self.home)]
        for c in self.copies:
            quotas[c.expert][c.position] = c.tokens
        for expert, quota in enumerate(quotas):
            tokens = [row[expert] for row in self.counts]
            if len(quota) > 1:
                yield from split_expert(tokens, quota, layout).items()
            else:
                (home,) = quota
                yield from (((source, home), amount) for source, amount in enumerate(tokens))


@dataclass(frozen=True)
class Plan:
    """Section 8, in the ids of the outside."""

    slot_expert: list[list[int]]
    slot_source: list[list[int]]
    slot_tokens: list[list[int]]
    copies_of: list[list[int]]  # per expert: physical ids of its copies, in list order
    winner: int
    cap: int | None  # None for the empty plan, for which the page names no cap
    tokens: int
    max_load_before: int
    max_load: int
    copies: int
    pairs: int
    steps: int
    predicted_ns_before: int
    predicted_ns: int


# ---- section 1: ids ------------------------------------------------------------------------------


class Layout:
    """Positions and planner expert ids, and the way back."""

    def __init__(self, node_of_rank: Sequence[int], num_experts: int, spare_slots: int) -> None:
        self.num_ranks = len(node_of_rank)
        self.home_slots = num_experts // self.num_ranks
        self.spare_slots = spare_slots
        self.num_experts = num_experts
        self.rank_at = sorted(range(self.num_ranks), key=lambda rank: (node_of_rank[rank], rank))
        self.position_of = [self.rank_at.index(rank) for rank in range(self.num_ranks)]
        self.node = [node_of_rank[rank] for rank in self.rank_at]
        self.nodes = sorted(set(node_of_rank))
        self.positions_of_node = {
            node: [p for p in range(self.num_ranks) if self.node[p] == node] for node in self.nodes
        }

    def home_position(self, expert: int) -> int:
        return expert // self.home_slots

    def home_node(self, expert: int) -> int:
        return self.node[self.home_position(expert)]

    def home_experts(self, position: int) -> range:
        return range(position * self.home_slots, (position + 1) * self.home_slots)

    def outside_expert(self, expert: int) -> int:
        position, i = divmod(expert, self.home_slots)
        return self.rank_at[position] * self.home_slots + i

    def planner_expert(self, expert: int) -> int:
        rank, i = divmod(expert, self.home_slots)
        return self.position_of[rank] * self.home_slots + i

    def planner_counts(self, counts: Counts) -> list[list[int]]:
        """Counts by position and planner expert id."""
        outside = [self.outside_expert(e) for e in range(self.num_experts)]
        return [[int(counts[rank][e]) for e in outside] for rank in self.rank_at]


# ---- section 2: input of all candidates ----------------------------------------------------------


def within(tokens: int, ranks: int, ppm: int) -> int:
    ceiling = -(-tokens // ranks)
    return max(ceiling, tokens * (PARTS_PER_MILLION + ppm) // (ranks * PARTS_PER_MILLION))


def parse_percent(text: str) -> int:
    """The x of "mean+x%" in parts per million."""
    return round(Fraction(text) * PARTS_PER_MILLION / 100)


def cap_of(text: str, load: Sequence[int], layout: Layout) -> int:
    """The cap of a rule other than "none"."""
    tokens = sum(load)
    mean = within(tokens, layout.num_ranks, 0)
    if text.startswith("load#"):
        k = int(text.removeprefix("load#"))
        return max(mean, sorted(load, reverse=True)[min(k, len(load)) - 1])
    rule, percent = text.removesuffix("%").split("+")
    ppm = parse_percent(percent)
    if rule == "mean":
        return within(tokens, layout.num_ranks, ppm)
    assert rule == "node", text
    of_nodes = [
        within(sum(load[p] for p in positions), len(positions), ppm)
        for positions in layout.positions_of_node.values()
    ]
    return max(mean, *of_nodes)


def parse_policy(text: str) -> Policy:
    text, _, most = text.partition("/")
    rank_copies = int(most) if most else MAX_RANK_COPIES
    if text in ("F", "F0"):
        return Policy(nodes_first=False, near_first=text == "F", rank_copies=rank_copies)
    if text == "T":
        return Policy(False, True, transport=True, rank_copies=rank_copies)
    assert text[0] == "H", text
    digits = [int(digit) for digit in text[1:6]]
    suffix = text[6:]
    return Policy(
        True,
        True,
        digits[0],
        digits[1],
        digits[2] == 1,
        digits[3],
        digits[4],
        affinity="".join(letter for letter in suffix if letter in "aA"),
        whole_rooms="w" in suffix,
        local="l" in suffix,
        rank_copies=rank_copies,
    )


# ---- section 3: state of a candidate -------------------------------------------------------------


class State:
    """The tokens, slots and copies of one candidate while it is being solved."""

    def __init__(self, counts: Counts, layout: Layout, cap: int, policy: Policy) -> None:
        self.counts = counts  # by position and planner expert id
        self.layout = layout
        self.cap = cap
        self.policy = policy
        self.home = [sum(row[e] for row in counts) for e in range(layout.num_experts)]
        self.load = [
            sum(self.home[e] for e in layout.home_experts(p)) for p in range(layout.num_ranks)
        ]
        self.usable_slots = min(layout.spare_slots, policy.rank_copies)
        self.free = [self.usable_slots] * layout.num_ranks
        self.copies: dict[tuple[int, int], int] = {}  # (expert, position) -> tokens
        self.steps = 0

    def excess(self, p: int) -> int:
        return self.load[p] - self.cap

    def room(self, p: int) -> int:
        return max(self.cap - self.load[p], 0) if self.free[p] > 0 else 0

    def holds(self, p: int, expert: int) -> bool:
        return self.layout.home_position(expert) == p or (expert, p) in self.copies

    def hottest(self, p: int) -> int | None:
        return self._most_home_tokens(self.layout.home_experts(p))

    def hottest_not_on(self, p: int, d: int) -> int | None:
        experts = self.layout.home_experts(p)
        return self._most_home_tokens(e for e in experts if not self.holds(d, e))

    def _most_home_tokens(self, experts: Iterable[int]) -> int | None:
        best = min(experts, key=lambda e: (-self.home[e], e), default=None)
        return best if best is not None and self.home[best] > 1 else None

    def place(self, expert: int, d: int, tokens: int) -> None:
        """Position d holds a copy of the expert with so many tokens."""
        assert not self.holds(d, expert)
        assert self.free[d] > 0
        assert tokens > 0
        self.copies[expert, d] = tokens
        self.free[d] -= 1
        self.load[d] += tokens

    def take_from_home(self, expert: int, tokens: int) -> None:
        self.home[expert] -= tokens
        self.load[self.layout.home_position(expert)] -= tokens

    def give_to_home(self, expert: int, tokens: int) -> None:
        self.take_from_home(expert, -tokens)


# ---- section 4, step A: between nodes ------------------------------------------------------------


@dataclass
class Import:
    """An entry of a node's import list."""

    expert: int
    tokens: int


def tokens_from(state: State, node: int, expert: int) -> int:
    """from(n, e)."""
    return sum(state.counts[p][expert] for p in state.layout.positions_of_node[node])


def least_local_tokens(layout: Layout, costs: Costs) -> int:
    """From so many tokens on, a copy across nodes costs less than the tokens."""
    if costs.network_row == 0:
        return NEVER_LOCAL
    ranks = -(-layout.num_ranks // len(layout.nodes))
    return -(-(2 * costs.cross_copy + costs.cross_grad) * ranks // (4 * costs.network_row))


def import_local(state: State, costs: Costs, imports: dict[int, list[Import]]) -> None:
    """For locality first."""
    layout = state.layout
    least = max(least_local_tokens(layout, costs), 2)
    for n in layout.nodes:
        wanted = [
            (tokens, e)
            for e in range(layout.num_experts)
            if layout.home_node(e) != n and (tokens := tokens_from(state, n, e)) >= least
        ]
        wanted.sort(key=lambda one: (-one[0], one[1]))
        for tokens, e in wanted[: len(layout.positions_of_node[n]) * state.usable_slots]:
            imports[n].append(Import(e, tokens - 1))
            state.take_from_home(e, tokens - 1)


def smallest_useful_room(state: State) -> int:
    if state.policy.threshold == 0:
        return 0
    wanted = sum(max(load - state.cap, 0) for load in state.load)
    if state.policy.threshold == 2:
        wanted += wanted // 8
    ascending = sorted(state.load)
    for k in range(1, len(ascending) + 1):
        last = ascending[k - 1]
        if last >= state.cap or k * state.cap - sum(ascending[:k]) >= wanted:
            return max(state.cap - last, 0)
    return 0


def node_room(state: State, positions: Sequence[int], smallest: int) -> int:
    own = sum(max(state.load[p] - state.cap, 0) for p in positions)
    everything = sum(max(state.cap - state.load[p], 0) for p in positions)
    usable = 0
    for p in sorted(positions, key=lambda p: (state.load[p], p)):
        v = max(state.cap - state.load[p], 0)
        if v >= smallest or (everything >= own and usable < own):
            usable += v
    return usable - own


def choose_source(state: State, positions: Sequence[int], surplus: int) -> int | None:
    """Step A.2."""
    sources = [(p, e) for p in positions if (e := state.hottest(p)) is not None]
    if state.policy.exporter == 0:
        return _first(sources, lambda p, e: (-state.home[e], p))

    def cover_fit(p: int, e: int) -> tuple[int, int, int]:
        excess = state.excess(p)
        amount = min(excess, state.home[e] - 1)
        if excess > 0 and amount >= surplus:
            return 1, amount, p
        if excess > 0:
            return 2, -amount, p
        return 3, -excess, p

    return _first(sources, cover_fit)


def _first(
    sources: Sequence[tuple[int, int]], key: Callable[[int, int], tuple[int, ...]]
) -> int | None:
    best = min(sources, key=lambda source: key(*source), default=None)
    return None if best is None else best[0]


def tokens_to_export(state: State, source: int, expert: int, surplus: int) -> tuple[int, int]:
    """Step A.3: (tokens, least)."""
    excess = state.excess(source)
    limit = state.home[expert] - 1
    least = min(surplus, limit)
    if state.policy.round_up and excess > 0:
        return min(max(least, excess), limit), least
    return least, least


def choose_importer(
    state: State,
    exporter: int,
    expert: int,
    tokens: int,
    least: int,
    rooms: dict[int, int],
    imports: dict[int, list[Import]],
) -> int | None:
    """Step A.4."""
    layout = state.layout
    nodes = [
        n
        for n in layout.nodes
        if n != exporter
        and rooms[n] > 0
        and len(imports[n]) < len(layout.positions_of_node[n]) * state.usable_slots
    ]
    if state.policy.affinity:
        fitting = [n for n in nodes if state.policy.affinity == "A" or rooms[n] >= tokens]
        if fitting:

            def saved(n: int) -> int:
                return min(tokens, rooms[n], tokens_from(state, n, expert))

            return min(fitting, key=lambda n: (-saved(n), min(rooms[n], SAVED_ROOM_LIMIT), n))
    for amount in (tokens, least):
        fitting = [n for n in nodes if rooms[n] >= amount]
        if fitting:
            return min(fitting, key=lambda n: (rooms[n], n))
    return min(nodes, key=lambda n: (-rooms[n], n), default=None)


def place_nodes(state: State, costs: Costs | None) -> dict[int, list[Import]]:
    """Step A: the import list of every node."""
    layout = state.layout
    imports: dict[int, list[Import]] = {n: [] for n in layout.nodes}
    if state.policy.local:
        assert costs is not None
        import_local(state, costs, imports)
    smallest = smallest_useful_room(state)
    rooms = {
        n: node_room(state, layout.positions_of_node[n], smallest)
        - sum(entry.tokens for entry in imports[n])
        for n in layout.nodes
    }
    ascending = {
        n: sorted(layout.positions_of_node[n], key=lambda p: (state.load[p], p))
        for n in layout.nodes
    }
    while min(rooms.values()) < 0:
        state.steps += 1
        exporter = min(layout.nodes, key=lambda n: (rooms[n], n))
        surplus = -rooms[exporter]
        source = choose_source(state, layout.positions_of_node[exporter], surplus)
        if source is None:
            rooms[exporter] = 0
            continue
        expert = state.hottest(source)
        assert expert is not None
        tokens, least = tokens_to_export(state, source, expert, surplus)
        importer = choose_importer(state, exporter, expert, tokens, least, rooms, imports)
        if importer is None:
            rooms[exporter] = 0
            continue
        m = min(tokens, rooms[importer])
        if state.policy.whole_rooms and len(imports[importer]) < len(ascending[importer]):
            room = state.cap - state.load[ascending[importer][len(imports[importer])]]
            m = min(m, room) if room > 0 else m
        imports[importer].append(Import(expert, m))
        state.take_from_home(expert, m)
        rooms[exporter] += m
        rooms[importer] -= m
    return imports


# ---- section 5, steps B and C --------------------------------------------------------------------


@dataclass
class Item:
    """What has to go somewhere: an import (``expert``) or the excess of a rank (``rank``)."""

    a: int
    expert: int | None = None
    rank: int | None = None
    index: int = 0  # in the import list, or the position
    live: bool = True

    @property
    def is_import(self) -> bool:
        return self.expert is not None


@dataclass
class Domain:
    """The ranks that one refine works on."""

    positions: list[int]
    is_node: bool
    items: list[Item] = field(default_factory=list)
    slack: int = 0
    handled: int = 0


def next_item(items: Sequence[Item], item_order: int) -> Item | None:
    """Step B.1."""

    def order(item: Item) -> tuple[int, int, bool, int]:
        in_class = {0: 0, 1: 0 if item.is_import else 1, 2: 1 if item.is_import else 0}[item_order]
        return in_class, -item.a, not item.is_import, item.index

    return min((item for item in items if item.live and item.a > 0), key=order, default=None)


def is_wasteful(state: State, domain: Domain, d: int, a: int) -> bool:
    room = state.room(d)
    return state.free[d] == 1 and a < room and room - a > domain.slack


def near_ranks(state: State, domain: Domain, x: Item) -> set[int]:
    """The ranks that come before the others; none in step B and for policy F0."""
    if domain.is_node or not state.policy.near_first:
        return set()
    assert x.rank is not None
    layout = state.layout
    nodes = {layout.node[x.rank]}
    expert = state.hottest(x.rank)
    nodes |= {layout.node[p] for p in domain.positions if (expert, p) in state.copies}
    return {p for p in domain.positions if layout.node[p] in nodes}


def choose(state: State, domain: Domain, x: Item) -> int | None:
    """Step B.2."""
    ranks = [
        d
        for d in domain.positions
        if state.room(d) > 0
        and d != x.rank
        and not (x.expert is not None and state.holds(d, x.expert))
    ]
    looked_at = [d for d in ranks if not is_wasteful(state, domain, d, x.a)] or ranks
    near = near_ranks(state, domain, x)
    fitting = [d for d in looked_at if state.room(d) >= x.a]
    if fitting:
        return min(fitting, key=lambda d: (d not in near, state.room(d), d))
    if state.policy.fit == 2 and domain.is_node:
        pairs = [
            (state.room(p) + state.room(q), p)
            for p in looked_at
            for q in looked_at
            if p != q and state.room(p) >= state.room(q) and state.room(p) + state.room(q) >= x.a
        ]
        if pairs:
            return min(pairs)[1]
    return min(looked_at, key=lambda d: (d not in near, -state.room(d), d), default=None)


def choose_overfill(state: State, domain: Domain, expert: int, a: int) -> int | None:
    """The f of step B.3."""

    def can(f: int) -> bool:
        above = state.load[f] + a - state.cap
        hottest = state.hottest(f)
        return (
            state.free[f] > 0
            and not state.holds(f, expert)
            and above > 0
            and hottest is not None
            and state.home[hottest] - 1 >= above
        )

    ranks = [f for f in domain.positions if can(f)]
    return min(ranks, key=lambda f: (state.load[f], f), default=None)


def fill_slot(state: State, domain: Domain, expert: int, d: int, tokens: int) -> None:
    """A copy on d; room that d's last slot leaves behind is lost to the domain."""
    state.place(expert, d, tokens)
    if state.free[d] == 0:
        domain.slack -= max(state.cap - state.load[d], 0)


def place_import(state: State, domain: Domain, x: Item) -> None:
    """Step B.3."""
    assert x.expert is not None
    d = choose(state, domain, x)
    if d is None or is_wasteful(state, domain, d, x.a):
        f = choose_overfill(state, domain, x.expert, x.a)
        if f is not None:
            state.place(x.expert, f, x.a)
            x.live, x.a = False, 0
            make_item(domain, f, state.excess(f))
            return
    if d is None:
        x.live = False  # dead, with a > 0
        return
    m = min(x.a, state.room(d))
    fill_slot(state, domain, x.expert, d, m)
    x.a -= m


def make_item(domain: Domain, rank: int, excess: int) -> None:
    """A rank becomes an item, or the item it was before gets this excess."""
    for item in domain.items:
        if item.rank == rank:
            item.a, item.live = excess, True
            return
    domain.items.append(Item(excess, rank=rank, index=rank))


def relieve_rank(state: State, domain: Domain, x: Item) -> None:
    """Step B.4."""
    s = x.rank
    assert s is not None
    d = choose(state, domain, x)
    e = None if d is None else state.hottest_not_on(s, d)
    if d is None or e is None:
        x.live, x.a = False, 0
        return
    m = min(x.a, state.room(d))
    if is_wasteful(state, domain, d, x.a) and state.free[s] > 0:
        m = state.room(d)
    m = min(m, state.home[e] - 1)
    state.take_from_home(e, m)
    fill_slot(state, domain, e, d, m)
    x.a = max(x.a - m, 0)


def refine(
    state: State, positions: list[int], is_node: bool, imports: Sequence[Import]
) -> tuple[list[Import], int]:
    """Steps B and C; returns the dead imports with what is left of them, and items handled."""
    domain = Domain(positions, is_node)
    domain.items = [
        Item(entry.tokens, expert=entry.expert, index=i) for i, entry in enumerate(imports)
    ]
    domain.items += [
        Item(state.excess(p), rank=p, index=p) for p in positions if state.excess(p) > 0
    ]
    domain.slack = sum(state.room(p) for p in positions) - sum(item.a for item in domain.items)
    while (x := next_item(domain.items, state.policy.item_order)) is not None:
        domain.handled += 1
        if x.is_import:
            place_import(state, domain, x)
        else:
            relieve_rank(state, domain, x)
    dead = [
        Import(item.expert, item.a)
        for item in domain.items
        if item.expert is not None and not item.live and item.a > 0
    ]
    return dead, domain.handled


# ---- section 6, step D: drop superfluous copies --------------------------------------------------

Slot = tuple[int, int]  # position and number; a smaller pair is a lower slot


class Way(NamedTuple):
    """Where the tokens of a copy would go."""

    over: int
    positions: list[int]  # home, and where `over` is passed on to
    slots: list[Slot]  # of the copies along which it is


@dataclass
class Edge:
    """A copy as a link between the rank that holds it and the home of its expert."""

    expert: int
    rank: int
    home: int

    def end(self, p: int) -> int:
        return self.home if p == self.rank else self.rank


class Dropping:
    """State of step D; a position's copies are numbered in the order in which they were made."""

    def __init__(self, state: State, allowed: int) -> None:
        self.state = state
        self.limit = max(state.cap, allowed, *state.load)
        self.edges: dict[Slot, Edge] = {}
        for expert, p in state.copies:
            number = sum(slot[0] == p for slot in self.edges)
            self.edges[p, number] = Edge(expert, p, state.layout.home_position(expert))

    def room(self, p: int) -> int:
        return max(self.limit - self.state.load[p], 0)

    def movable(self, slot: Slot, p: int) -> int:
        """What can leave p along a copy."""
        edge = self.edges[slot]
        if p == edge.home:
            return self.state.home[edge.expert] - 1
        return self.state.copies[edge.expert, edge.rank]

    def best_hop(self, p: int, takes: Callable[[int], int]) -> tuple[int, Slot | None]:
        """The most that p can give along one copy to a rank that takes it, and the copy."""
        hops = [
            (min(self.movable(slot, p), takes(edge.end(p))), slot)
            for slot, edge in self.edges.items()
            if p in (edge.rank, edge.home)
        ]
        return min(hops, key=lambda hop: (-hop[0], hop[1]), default=(0, None))

    def reach(self, p: int) -> tuple[int, Slot | None]:
        """What p can take, and the copy along which it passes it on."""
        given, slot = self.best_hop(p, self.room)
        return (given, slot) if given > self.room(p) else (self.room(p), None)

    def way(self, slot: Slot, reach: Sequence[tuple[int, Slot | None]]) -> Way | None:
        edge = self.edges[slot]
        h = edge.home
        over = self.state.copies[edge.expert, edge.rank] - self.room(h)
        if over <= 0:
            return Way(over, [h], [])
        if self.state.policy.local:
            return None
        given, first = self.best_hop(h, lambda p: reach[p][0])
        if given < over or first is None or first == slot:
            return None
        to = self.edges[first].end(h)
        if self.room(to) >= over:
            return Way(over, [h, to], [first])
        second = reach[to][1]
        assert second is not None
        last = self.edges[second].end(to)
        return None if last == h or second == slot else Way(over, [h, to, last], [first, second])

    def drop(self, slot: Slot, way: Way) -> None:
        edge = self.edges[slot]
        tokens = self.state.copies[edge.expert, edge.rank]
        self.serve_more(slot, -tokens)
        for p, hop in zip(way.positions, way.slots, strict=False):
            self.serve_more(hop, way.over if p == self.edges[hop].home else -way.over)

    def serve_more(self, slot: Slot, tokens: int) -> None:
        """The copy serves so many tokens more, and its home so many less."""
        edge = self.edges[slot]
        self.state.copies[edge.expert, edge.rank] += tokens
        self.state.load[edge.rank] += tokens
        self.state.take_from_home(edge.expert, tokens)
        if self.state.copies[edge.expert, edge.rank] == 0:
            del self.state.copies[edge.expert, edge.rank]
            del self.edges[slot]


def drop_superfluous_copies(dropping: Dropping) -> None:
    state = dropping.state
    while True:
        state.steps += 1
        reach = [dropping.reach(p) for p in range(len(state.load))]
        ways = {s: w for s in dropping.edges if (w := dropping.way(s, reach)) is not None}
        if not ways:
            return
        tokens = {s: state.copies[e.expert, e.rank] for s, e in dropping.edges.items()}
        claims: dict[int, list[tuple[int, Slot]]] = {}
        for slot, way in ways.items():
            for p in {slot[0], *way.positions}:
                claims.setdefault(p, []).append((min(tokens[slot], MOST_CLAIMED), slot))
        first = {p: min(claim)[1] for p, claim in claims.items()}
        for slot, way in ways.items():
            if all(first[p] == slot for p in {slot[0], *way.positions}):
                dropping.drop(slot, way)


# ---- section 6b, step E: exchange copies ---------------------------------------------------------

MAX_HOPS = 4
MAX_PIECES = 8


def path_from_home(dropping: Dropping, emptied: Slot) -> list[tuple[int, Slot, int]] | None:
    """(from, copy, to) of the shortest path that takes tokens of a copy from its home."""
    load, limit = dropping.state.load, dropping.limit
    home, own = dropping.edges[emptied].home, emptied[0]
    if load[home] < limit:
        return []
    paths: dict[int, list[tuple[int, Slot, int]]] = {home: []}
    for _ in range(MAX_HOPS):
        fresh: dict[int, list[tuple[int, Slot, int]]] = {}
        for slot in sorted(dropping.edges):
            edge = dropping.edges[slot]
            for p in (edge.home, edge.rank):
                to = edge.end(p)
                is_new = slot != emptied and p in paths and to not in paths
                if is_new and dropping.movable(slot, p) > 0:
                    fresh.setdefault(to, [*paths[p], (p, slot, to)])
        takers = [p for p in fresh if p == own or load[p] < limit]
        if takers:
            return fresh[min(takers)]
        paths |= fresh
    return None


def exchange_copies(dropping: Dropping) -> None:
    state = dropping.state
    turn = {s: state.copies[e.expert, e.rank] for s, e in dropping.edges.items()}
    for slot in sorted(turn, key=lambda s: (turn[s], s)):
        if slot not in dropping.edges:
            continue
        state.steps += 1
        for _ in range(MAX_PIECES):
            path = path_from_home(dropping, slot) if slot in dropping.edges else None
            if path is None:
                break
            state.steps += 1
            taker = path[-1][2] if path else dropping.edges[slot].home
            m = dropping.movable(slot, slot[0])
            if taker != slot[0]:
                m = min(m, dropping.limit - state.load[taker])
            for p, hop, _ in path:
                m = min(m, dropping.movable(hop, p))
            dropping.serve_more(slot, -m)
            for p, hop, _ in path:
                dropping.serve_more(hop, m if p == dropping.edges[hop].home else -m)


# ---- a candidate ---------------------------------------------------------------------------------


def steps_b(state: State, imports: dict[int, list[Import]]) -> None:
    """Step B in every node, and the way home of dead imports."""
    layout = state.layout
    dead: list[Import] = []
    most = 0
    for node in layout.nodes:
        dead_here, handled = refine(state, layout.positions_of_node[node], True, imports[node])
        dead += dead_here
        most = max(most, handled)
    state.steps += most
    for entry in dead:
        state.give_to_home(entry.expert, entry.tokens)


def allowed_load(objective: Objective, load: Sequence[int]) -> int:
    """A rank load that costs the objective nothing."""
    if objective.kind == "balance":
        return within(sum(load), len(load), objective.tolerance)
    return 0


def solve_candidate(
    counts: Counts, layout: Layout, cap_text: str, policy_text: str, objective: Objective
) -> Solved:
    """Sections 3 to 6 for one (cap, policy) on planner counts."""
    policy = parse_policy(policy_text)
    policy = policy._replace(local=policy.local and objective.costs is not None)
    state = State(counts, layout, 0, policy)
    if cap_text != "none":
        state.cap = cap_of(cap_text, state.load, layout)
        if policy.transport:
            match_transport(state)
        elif policy.nodes_first:
            steps_b(state, place_nodes(state, objective.costs))
        state.steps += refine(state, list(range(layout.num_ranks)), False, [])[1]
        dropping = Dropping(state, allowed_load(objective, state.load))
        drop_superfluous_copies(dropping)
        if len(state.copies) >= layout.num_ranks and not policy.local:
            exchange_copies(dropping)
    copies = [Copy(e, p, tokens) for (e, p), tokens in sorted(state.copies.items())]
    cap = None if cap_text == "none" else state.cap
    return Solved(cap, copies, state.home, state.load, state.steps, counts)


# ---- section 7: choosing the winner --------------------------------------------------------------


def count_pairs(copies: Sequence[Copy], layout: Layout) -> int:
    """Distinct (expert, node other than its home node)."""
    pairs = {(c.expert, layout.node[c.position]) for c in copies}
    return sum(node != layout.home_node(expert) for expert, node in pairs)


def time_of(solved: Solved, layout: Layout, objective: Objective) -> int:
    """Predicted nanoseconds; 0 for objectives that have none."""
    return 0 if objective.costs is None else predicted_time(solved, layout, objective.costs)


def key(
    solved: Solved, empty: Solved, layout: Layout, objective: Objective
) -> tuple[int, int, int]:
    if objective.kind == "time":
        return int(solved.max_load > empty.max_load), time_of(solved, layout, objective), 0
    pairs = count_pairs(solved.copies, layout)
    weighted = len(solved.copies) + (objective.cross_weight - 1) * pairs
    if objective.kind == "balance" and solved.max_load <= allowed_load(objective, solved.load):
        return 0, weighted, solved.max_load
    return 1, solved.max_load, weighted


def solve(
    counts: Counts,
    node_of_rank: Sequence[int],
    spare_slots: int,
    objective: Objective,
    candidates: Sequence[tuple[str, str]],
) -> Plan:
    """The best plan of the empty one and the candidates (cap, policy)."""
    layout = Layout(node_of_rank, len(counts[0]), spare_slots)
    by_position = layout.planner_counts(counts)
    every = [
        solve_candidate(by_position, layout, *texts, objective)
        for texts in [("none", "F"), *candidates]
    ]
    winner = min(range(len(every)), key=lambda i: (key(every[i], every[0], layout, objective), i))
    return describe(every[winner], every[0], winner, layout, objective)


# ---- section 8: what the plan says ---------------------------------------------------------------


def source_of(expert: int, position: int, copies: Sequence[Copy], layout: Layout) -> int:
    """The position that a copy is fetched from."""
    node = layout.node[position]
    if node == layout.home_node(expert):
        return layout.home_position(expert)
    holders = [c.position for c in copies if c.expert == expert]
    first = min(p for p in holders if layout.node[p] == node)
    return layout.home_position(expert) if first == position else first


def describe(
    solved: Solved, empty: Solved, winner: int, layout: Layout, objective: Objective
) -> Plan:
    slot_expert, slot_source, slot_tokens = [], [], []
    physical: dict[tuple[int, int], int] = {}  # (expert, position) -> physical id
    width = layout.home_slots + layout.spare_slots
    for rank in range(layout.num_ranks):
        position = layout.position_of[rank]
        here = [c for c in solved.copies if c.position == position]
        here.sort(key=lambda c: layout.outside_expert(c.expert))
        empty_slots = layout.spare_slots - len(here)
        slot_expert.append([layout.outside_expert(c.expert) for c in here] + [-1] * empty_slots)
        sources = [source_of(c.expert, position, solved.copies, layout) for c in here]
        slot_source.append([layout.rank_at[p] for p in sources] + [-1] * empty_slots)
        slot_tokens.append([c.tokens for c in here] + [0] * empty_slots)
        for slot, c in enumerate(here):
            physical[c.expert, position] = rank * width + layout.home_slots + slot
    copies_of: list[list[int]] = [[] for _ in range(layout.num_experts)]
    for expert, position in sorted(physical):
        copies_of[layout.outside_expert(expert)].append(physical[expert, position])
    return Plan(
        slot_expert=slot_expert,
        slot_source=slot_source,
        slot_tokens=slot_tokens,
        copies_of=copies_of,
        winner=winner,
        cap=solved.cap,
        tokens=sum(solved.load),
        max_load_before=empty.max_load,
        max_load=solved.max_load,
        copies=len(solved.copies),
        pairs=count_pairs(solved.copies, layout),
        steps=solved.steps,
        predicted_ns_before=time_of(empty, layout, objective),
        predicted_ns=time_of(solved, layout, objective),
    )


def overlaps(tokens: Sequence[int], quotas: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source, holder, overlap) of two lines of segments that start together."""
    result = []
    source_start = 0
    for source, length in enumerate(tokens):
        holder_start = 0
        for holder, quota in enumerate(quotas):
            start = max(source_start, holder_start)
            end = min(source_start + length, holder_start + quota)
            if end > start:
                result.append((source, holder, end - start))
            holder_start += quota
        source_start += length
    return result


def split_expert(
    tokens: Sequence[int], quota_of: dict[int, int], layout: Layout
) -> dict[tuple[int, int], int]:
    """(source position, holder position) -> tokens, for one expert and {holder: quota}."""
    left = list(tokens)
    quota = dict(sorted(quota_of.items()))
    result: dict[tuple[int, int], int] = {}

    def serve(source: int, holder: int, amount: int) -> None:
        result[source, holder] = result.get((source, holder), 0) + amount
        left[source] -= amount
        quota[holder] -= amount

    for p in quota:
        serve(p, p, min(left[p], quota[p]))
    for positions in [*layout.positions_of_node.values(), list(range(layout.num_ranks))]:
        holders = [p for p in positions if p in quota]
        laid = overlaps([left[p] for p in positions], [quota[p] for p in holders])
        for i, j, amount in laid:
            serve(positions[i], holders[j], amount)
    assert not any(left)
    assert not any(quota.values())
    return result


def split(
    counts: Counts,
    node_of_rank: Sequence[int],
    slot_expert: Sequence[Sequence[int]],
    slot_tokens: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Tokens [rank, physical expert]."""
    layout = Layout(node_of_rank, len(counts[0]), len(slot_expert[0]))
    width = layout.home_slots + layout.spare_slots
    copies_of: list[list[tuple[int, int]]] = [[] for _ in range(layout.num_experts)]
    for rank in range(layout.num_ranks):
        for slot, expert in enumerate(slot_expert[rank]):
            if expert >= 0:
                copies_of[expert].append((rank, slot))
    result = [[0] * (layout.num_ranks * width) for _ in range(layout.num_ranks)]
    for expert in range(layout.num_experts):
        home_rank, i = divmod(expert, layout.home_slots)
        if not copies_of[expert]:
            for rank in range(layout.num_ranks):
                result[rank][home_rank * width + i] = int(counts[rank][expert])
            continue
        home = layout.position_of[home_rank]
        tokens = [int(counts[rank][expert]) for rank in layout.rank_at]
        physical = {home: home_rank * width + i}
        quota = {home: sum(tokens)}
        for rank, slot in copies_of[expert]:
            position = layout.position_of[rank]
            physical[position] = rank * width + layout.home_slots + slot
            quota[position] = slot_tokens[rank][slot]
            quota[home] -= slot_tokens[rank][slot]
        for (source, holder), amount in split_expert(tokens, quota, layout).items():
            result[layout.rank_at[source]][physical[holder]] += amount
    return result


def cross_node_tokens(row_by_rank: Sequence[Sequence[int]], node_of_rank: Sequence[int]) -> int:
    """Tokens of a split [rank, physical expert] that leave their node."""
    width = len(row_by_rank[0]) // len(node_of_rank)
    return sum(
        tokens
        for rank, row in enumerate(row_by_rank)
        for physical, tokens in enumerate(row)
        if node_of_rank[rank] != node_of_rank[physical // width]
    )
