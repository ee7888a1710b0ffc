# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies and generators of token counts, shared by the tests.

Everything that is drawn prints as the call that makes it again, so that a failure can be pasted
into a shell: ``make_case("lognormal", 17, node_of_rank=(0, 1), home_slots=2, spare_slots=1)``.

``TOPOEP_TEST_EXAMPLES`` (a factor, 1 if not set) scales the number of examples of every test that
uses :func:`examples`.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from topoep import Balance, Candidate, CostModel, Even, Plan, Time, Topology
from topoep.cost_model import MAX_COST, MAX_INTERFERENCE
from topoep.hardware import HARDWARE
from topoep.objective import Objective

Matrix = npt.NDArray[np.floating]

MAX_RANKS, MAX_HOME_SLOTS, MAX_SPARE_SLOTS = 24, 8, 8
MAX_TOKENS = 2**31 - 1

_SCALE = float(os.environ.get("TOPOEP_TEST_EXAMPLES", "1"))


def examples(number: int) -> int:
    """This many examples, scaled by TOPOEP_TEST_EXAMPLES."""
    return max(1, round(number * _SCALE))


# ---- token counts --------------------------------------------------------------------------------
# Each generator takes a random generator, the node of every rank and E, and gives weights or counts
# [R, E]; make_counts rounds them down. Kinds differ in what they are hard on: ties, slots, nodes,
# large numbers, single tokens.

Generate = Callable[[np.random.Generator, Sequence[int], int], Matrix]


def _zeros(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    return np.zeros((len(node), experts))


def _equal(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Nothing but ties."""
    return np.full((len(node), experts), float(rng.integers(1, 20)))


def _one_expert(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """All tokens on one expert: more than all spare slots can take."""
    counts = np.zeros((len(node), experts))
    counts[:, rng.integers(experts)] = rng.integers(0, 500, len(node))
    return counts


def _one_rank(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """A rank whose home experts are all hot."""
    home_slots = experts // len(node)
    counts = rng.integers(0, 4, (len(node), experts)).astype(float)
    first = rng.integers(len(node)) * home_slots
    counts[:, first : first + home_slots] += rng.integers(20, 200)
    return counts


def _one_node(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """A node that must export, with uneven ranks inside."""
    hot = rng.choice(node)
    home_slots = experts // len(node)
    weight = np.where(np.repeat(np.asarray(node) == hot, home_slots), rng.integers(2, 9), 1)
    return _lognormal(rng, node, experts) * weight


def _uneven_nodes(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Every node has its own level of load: several exporters and importers."""
    home_slots = experts // len(node)
    level = rng.lognormal(0, 1, max(node) + 1)
    return _lognormal(rng, node, experts) * np.repeat(level[list(node)], home_slots)


def _near_sources(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Each node's tokens like experts of their own: where tokens come from matters."""
    popular = rng.lognormal(0, 2, (max(node) + 1, experts))
    return rng.lognormal(0, 0.3, (len(node), 1)) * popular[list(node)] * 20


def _lognormal(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """What routers do: few hot experts, a long tail."""
    popular = rng.lognormal(0, rng.uniform(0.3, 2.5), experts)
    return rng.lognormal(0, 0.3, (len(node), experts)) * popular * 20


def _powers_of_two(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Many exact fits and ties."""
    return 2.0 ** rng.integers(-1, 9, (len(node), experts))


def _few_values(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Ties between experts, ranks and nodes without everything being equal."""
    return np.tile(rng.choice([0.0, 1.0, 2.0, 12.0], experts), (len(node), 1))


def _single_tokens(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Experts with one token, which never leaves its home."""
    chosen: Matrix = rng.random((len(node), experts)) < rng.choice([0.02, 0.2])
    return chosen.astype(float)


def _small_totals(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Every comparison that is off by one shows."""
    counts = np.zeros((len(node), experts))
    counts[rng.integers(0, len(node), experts), np.arange(experts)] = rng.integers(0, 7, experts)
    return counts


def _crumbs(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Ranks whose load is many experts with a token each, which cannot be given away."""
    crumbs = rng.random(len(node)) < 0.4
    totals = np.where(np.repeat(crumbs, experts // len(node)), 1, rng.integers(0, 3, experts))
    counts = np.zeros((len(node), experts))
    counts[rng.integers(0, len(node), experts), np.arange(experts)] = totals
    return counts


def _dead_experts(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Most experts get nothing."""
    return _lognormal(rng, node, experts) * (rng.random(experts) < 0.2)


def _silent_ranks(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Some source ranks have no tokens."""
    return _lognormal(rng, node, experts) * (rng.random((len(node), 1)) < 0.5)


def _huge(rng: np.random.Generator, node: Sequence[int], experts: int) -> Matrix:
    """Just below the largest total that one plan counts."""
    weights = _uneven_nodes(rng, node, experts) + 1e-3
    scaled: Matrix = weights * (MAX_TOKENS / weights.sum() * (1 - 1e-9))
    return scaled


COUNT_KINDS: dict[str, Generate] = {
    "zeros": _zeros,
    "equal": _equal,
    "one_expert": _one_expert,
    "one_rank": _one_rank,
    "one_node": _one_node,
    "uneven_nodes": _uneven_nodes,
    "near_sources": _near_sources,
    "lognormal": _lognormal,
    "powers_of_two": _powers_of_two,
    "few_values": _few_values,
    "single_tokens": _single_tokens,
    "small_totals": _small_totals,
    "crumbs": _crumbs,
    "dead_experts": _dead_experts,
    "silent_ranks": _silent_ranks,
    "huge": _huge,
}

#: Kinds whose loads differ, so that a planner has something to do.
SKEWED_KINDS = tuple(kind for kind in COUNT_KINDS if kind not in ("zeros", "equal"))


def make_counts(
    kind: str, seed: int, node_of_rank: Sequence[int], num_experts: int
) -> npt.NDArray[np.int32]:
    """int32 ``[R, E]`` of a kind of ``COUNT_KINDS``."""
    weights = COUNT_KINDS[kind](np.random.default_rng(seed), node_of_rank, num_experts)
    return np.minimum(weights, 1e9 if kind != "huge" else MAX_TOKENS).astype(np.int32)


# ---- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The input of a plan."""

    counts: npt.NDArray[np.int32] = field(repr=False)
    node_of_rank: tuple[int, ...]
    spare_slots: int
    recipe: str = field(repr=False)

    def __repr__(self) -> str:
        return self.recipe

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.recipe)  # hypothesis would print the fields of a dataclass

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_experts(self) -> int:
        return int(self.counts.shape[1])

    @property
    def home_slots(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def width(self) -> int:
        """Local physical experts of a rank, H + S."""
        return self.home_slots + self.spare_slots

    @property
    def topology(self) -> Topology:
        return Topology(node_of_rank=self.node_of_rank)

    @property
    def tensor(self) -> torch.Tensor:
        """The counts as the product takes them."""
        return torch.from_numpy(self.counts.copy())


def make_case(
    kind: str, seed: int, *, node_of_rank: Sequence[int], home_slots: int, spare_slots: int
) -> Case:
    """A case with generated counts."""
    counts = make_counts(kind, seed, node_of_rank, len(node_of_rank) * home_slots)
    recipe = (
        f"make_case({kind!r}, {seed}, node_of_rank={tuple(node_of_rank)}, "
        f"home_slots={home_slots}, spare_slots={spare_slots})"
    )
    return Case(counts, tuple(node_of_rank), spare_slots, recipe)


def written_case(
    counts: Sequence[Sequence[int]], *, node_of_rank: Sequence[int], spare_slots: int
) -> Case:
    """A case with counts written out."""
    rows = [[int(c) for c in row] for row in counts]
    recipe = f"written_case({rows}, node_of_rank={tuple(node_of_rank)}, spare_slots={spare_slots})"
    return Case(np.array(rows, dtype=np.int32), tuple(node_of_rank), spare_slots, recipe)


def random_case(seed: int, kinds: Sequence[str] = tuple(COUNT_KINDS)) -> Case:
    """A case from a seed alone, for sweeps without hypothesis."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, MAX_RANKS + 1))
    nodes = int(rng.integers(1, 7))
    node = rng.integers(0, nodes, ranks)
    arrangement = rng.integers(3)
    if arrangement == 0:
        node = np.sort(node)  # blocks, of uneven sizes
    elif arrangement == 1:
        node = np.arange(ranks) % nodes  # strided
    node = np.unique(node, return_inverse=True)[1]
    return make_case(
        str(rng.choice(list(kinds))),
        seed,
        node_of_rank=[int(n) for n in node],
        home_slots=int(rng.integers(1, MAX_HOME_SLOTS + 1)),
        spare_slots=int(rng.choice([0, 1, 1, 2, 2, 3, 4, MAX_SPARE_SLOTS])),
    )


def node_tables(
    min_ranks: int = 1, max_ranks: int = MAX_RANKS, max_nodes: int = 6
) -> st.SearchStrategy[tuple[int, ...]]:
    """The node of every rank, dense, with nodes of any sizes: blocks, strided or mixed."""

    def dense(nodes: Sequence[int]) -> tuple[int, ...]:
        order = sorted(set(nodes))
        return tuple(order.index(n) for n in nodes)

    sizes = st.integers(min_ranks, max_ranks)
    mixed = sizes.flatmap(lambda r: st.lists(st.integers(0, max_nodes - 1), min_size=r, max_size=r))
    blocks = mixed.map(sorted)
    strided = st.builds(
        lambda r, n: [rank % n for rank in range(r)], sizes, st.integers(1, max_nodes)
    )
    return st.one_of(mixed, blocks, strided).map(dense)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = tuple(COUNT_KINDS),
    nodes: st.SearchStrategy[tuple[int, ...]] | None = None,
    home_slots: st.SearchStrategy[int] | None = None,
    spare_slots: st.SearchStrategy[int] | None = None,
) -> Case:
    """Cases of up to 24 ranks with generated counts."""
    return make_case(
        draw(st.sampled_from(list(kinds))),
        draw(st.integers(0, 2**32 - 1)),
        node_of_rank=draw(node_tables() if nodes is None else nodes),
        home_slots=draw(st.integers(1, MAX_HOME_SLOTS) if home_slots is None else home_slots),
        spare_slots=draw(st.integers(0, MAX_SPARE_SLOTS) if spare_slots is None else spare_slots),
    )


@st.composite
def tiny_cases(draw: st.DrawFn, *, max_ranks: int = 4, max_tokens: int = 12) -> Case:
    """Cases whose every count is drawn, which shrink to the smallest counter-example."""
    node = draw(node_tables(max_ranks=max_ranks, max_nodes=3))
    experts = len(node) * draw(st.integers(1, 3))
    row = st.lists(st.integers(0, max_tokens), min_size=experts, max_size=experts)
    return written_case(
        draw(st.lists(row, min_size=len(node), max_size=len(node))),
        node_of_rank=node,
        spare_slots=draw(st.integers(0, 2)),
    )


# ---- candidates and objectives -------------------------------------------------------------------

#: All policies that a candidate can name: those of any objective, those that copy for locality
#: under ``Time``, and matching by transport.
PLAIN_POLICIES = (
    "F",
    "F0",
    *(
        "H" + "".join(digits)
        for digits in itertools.product("012", "02", "01", "012", "02", ("", "a", "A", "w", "aw"))
    ),
)
LOCAL_POLICIES = tuple(policy + "l" for policy in PLAIN_POLICIES if policy[0] == "H")
RANK_LIMITS = ("/1", "/2", "/3")
#: Every sixteenth policy with each of the limits.
LIMITED_POLICIES = tuple(
    policy + limit
    for policy in ("F", "F0", "T", *PLAIN_POLICIES[2::16], *LOCAL_POLICIES[::16])
    for limit in RANK_LIMITS
)
POLICIES = (*PLAIN_POLICIES, *LOCAL_POLICIES, "T", *LIMITED_POLICIES)

#: Caps of every rule, tight and loose.
CAPS = (
    "mean+0%", "mean+0.01%", "mean+1%", "mean+7.5%", "mean+40%",
    "node+0%", "node+1%", "node+12%",
    "load#1", "load#2", "load#3", "load#7", "load#100",
)  # fmt: skip


def candidates() -> st.SearchStrategy[Candidate]:
    """Any cap with any policy, half of them with a limit on the copies of a rank."""
    kinds = [PLAIN_POLICIES, LOCAL_POLICIES, ("T",)]
    policies = st.builds(
        operator.add,
        st.one_of(*map(st.sampled_from, kinds)),
        st.one_of(st.just(""), st.sampled_from(RANK_LIMITS)),
    )
    return st.builds(Candidate, st.sampled_from(CAPS), policies)


#: What fields of random cost models are drawn from: nothing, small numbers, what models and
#: hardware give, and the most that is allowed.
COSTS = (0, 1, 7, 100, 20_000, 3_000_000, MAX_COST)
INTERFERENCES = (0, 1, 100, 999, MAX_INTERFERENCE)
_COST_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(CostModel)
    if field.name not in ("interference", "sharded")
)


#: Tokens are all that costs, and a handful of them is worth a copy for locality: the plan of a
#: candidate wins wherever it lowers the largest load, so that it can be compared.
EAGER_COSTS = CostModel(
    token=1000, instance=0, copy=0, cross_copy=1, grad=0, cross_grad=0, network_row=1
)


def random_cost_model(seed: int) -> CostModel:
    """A cost model from a seed alone, for sweeps without hypothesis."""
    rng = np.random.default_rng(seed)
    fields = {name: int(rng.choice(COSTS)) for name in _COST_FIELDS}
    return CostModel(
        **fields, interference=int(rng.choice(INTERFERENCES)), sharded=bool(rng.integers(2))
    )


def cost_models() -> st.SearchStrategy[CostModel]:
    """Any constants, and those of real shapes, for which no term is negligible."""
    any_constants = st.builds(
        CostModel,
        **{name: st.sampled_from(COSTS) for name in _COST_FIELDS},
        interference=st.sampled_from(INTERFERENCES),
        sharded=st.booleans(),
    )
    sizes = st.sampled_from([1, 16, 512, 2048, 7168])
    real = st.builds(
        CostModel.from_model,
        sizes,
        sizes,
        hardware=st.sampled_from(list(HARDWARE)),
        sharded=st.booleans(),
    )
    return st.one_of(any_constants, real)


def objectives() -> st.SearchStrategy[Objective]:
    """All kinds, tolerances from none to one that everything meets."""
    weights = st.sampled_from([1, 2, 3, 8, 1024])
    tolerances = st.sampled_from([0.0, 0.0001, 0.01, 0.02, 0.1, 0.5, 1000.0])
    return st.one_of(
        st.builds(Balance, tolerances, weights),
        st.builds(Even, weights),
        st.builds(Time, cost_models(), weights),
    )


# ---- plans and ids -------------------------------------------------------------------------------


def expert_of_physical(plan: Plan) -> npt.NDArray[np.int64]:
    """The expert behind every physical id, -1 behind an empty slot."""
    config = plan.config
    home = np.arange(config.num_experts).reshape(config.num_ranks, config.experts_per_rank)
    return np.concatenate([home, plan.slot_expert.numpy()], axis=1).reshape(-1).astype(np.int64)


def ids_of_counts(
    counts_of_rank: npt.NDArray[np.integer], top_k: int, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """Routed ids ``[T, K]`` with these counts in random order, the last row padded with -1."""
    ids = np.repeat(np.arange(len(counts_of_rank)), counts_of_rank)
    rows = -(-len(ids) // top_k)
    padded = np.full(rows * top_k, -1)
    padded[: len(ids)] = np.random.default_rng(seed).permutation(ids)
    return torch.from_numpy(padded.reshape(rows, top_k)).to(dtype)


def odd_ids(num_experts: int) -> st.SearchStrategy[int]:
    """Ids that are no expert: padding, just beyond the last, far beyond, negative."""
    return st.sampled_from([-1, num_experts, num_experts + 5, 2**30, 2**31 - 1, -2, -(2**31)])


@st.composite
def routed_ids(
    draw: st.DrawFn, num_experts: int, *, max_tokens: int = 12, max_top_k: int = 64
) -> torch.Tensor:
    """int32 or int64 ``[T, K]`` from T = 0, with repeated and odd ids, in any memory layout."""
    rows, top_k = draw(st.integers(0, max_tokens)), draw(st.integers(1, max_top_k))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    few = rng.choice(num_experts, min(num_experts, 3))
    values = rng.choice([few[0], *few, *range(num_experts)], (rows, top_k))
    odd = draw(st.lists(odd_ids(num_experts), max_size=4))
    values = np.where(
        rng.random((rows, top_k)) < 0.15, rng.choice([*odd, -1], (rows, top_k)), values
    )
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return in_layout(torch.from_numpy(values).to(dtype), draw(st.sampled_from(LAYOUTS)))


LAYOUTS = ("contiguous", "every_second_column", "every_second_row", "transposed", "offset")


def in_layout(ids: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in memory of another layout, with other ids in between."""
    rows, top_k = ids.shape
    if layout == "contiguous":
        return ids.clone()
    if layout == "transposed":
        return ids.T.contiguous().T
    if layout == "every_second_column":
        view = ids.new_full((rows, 2 * top_k), 0)[:, ::2]
    elif layout == "every_second_row":
        view = ids.new_full((2 * rows, top_k), 0)[::2]
    else:
        assert layout == "offset", layout
        view = ids.new_full((rows + 2, top_k + 3), 0)[1 : rows + 1, 2 : top_k + 2]
    view.copy_(ids)
    return view


def seeds(number: int, start: int = 0) -> Iterator[int]:
    """Seeds of a sweep of this many cases, scaled like :func:`examples`."""
    return iter(range(start, start + examples(number)))
