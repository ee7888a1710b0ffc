# SPDX-License-Identifier: Apache-2.0
"""Every plan keeps the rules of a plan, whatever the counts, the topology and the candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topoep
from tests import strategies
from tests.strategies import Case, examples, expert_of_physical
from topoep import Balance, Candidate, Even, Plan, Time, Topology
from topoep.objective import Objective
from topoep.portfolio import default_candidates
from topoep.validate import PlanArrays, validate_plan

TABLES = ("slot_expert", "slot_source", "slot_tokens", "copy_offsets", "copy_slots", "_stats")


@st.composite
def plans(
    draw: st.DrawFn,
    case: st.SearchStrategy[Case] | None = None,
    candidate: st.SearchStrategy[list[Candidate] | None] | None = None,
) -> Plan:
    """Plans of the default list or of a few candidates."""
    if case is None:
        case = st.one_of(strategies.cases(kinds=strategies.SKEWED_KINDS), strategies.tiny_cases())
    if candidate is None:
        few = st.lists(strategies.candidates(), min_size=1, max_size=3)
        candidate = st.one_of(st.none(), few)
    return solved(draw(case), draw(strategies.objectives()), draw(candidate))


def solved(
    case: Case,
    objective: Objective | None = None,
    candidates: list[Candidate] | None = None,
    rank: int | None = None,
) -> Plan:
    return topoep.solve(
        case.tensor, case.topology, case.spare_slots, objective, rank=rank, candidates=candidates
    )


def load_before(plan: Plan) -> np.ndarray:
    total = plan.counts.numpy().sum(0, dtype=np.int64)
    return total.reshape(plan.config.num_ranks, -1).sum(1)


def load_after(plan: Plan) -> np.ndarray:
    received = plan.split().numpy().sum(0, dtype=np.int64)
    return received.reshape(plan.config.num_ranks, -1).sum(1)


def stat(plan: Plan, name: str) -> int:
    return int(plan.stats()[name])


def within(tokens: int, ranks: int, ppm: int) -> int:
    return max(-(-tokens // ranks), tokens * (10**6 + ppm) // (ranks * 10**6))


def assert_same(one: Plan, other: Plan) -> None:
    for name in TABLES:
        first, second = getattr(one, name), getattr(other, name)
        assert torch.equal(first, second), f"{name}: {first.tolist()} and {second.tolist()}"


# ---- slots ---------------------------------------------------------------------------------------


@settings(max_examples=examples(1500))
@given(plans())
def test_home_slots_stay_and_no_rank_holds_an_expert_twice(plan: Plan) -> None:
    config = plan.config
    holders = expert_of_physical(plan).reshape(config.num_ranks, config.slots_per_rank)
    slots = plan.slot_expert.numpy()
    assert slots.shape == (config.num_ranks, config.spare_slots)
    assert ((slots >= -1) & (slots < config.num_experts)).all()
    for held in holders:
        experts = held[held >= 0].tolist()
        assert len(set(experts)) == len(experts)


@settings(max_examples=examples(500))
@given(plans())
def test_slots_are_sorted_with_the_empty_ones_last(plan: Plan) -> None:
    slots = plan.slot_expert.numpy().astype(np.int64)
    in_order = np.where(slots < 0, plan.config.num_experts, slots)
    assert (np.diff(in_order, axis=1) >= 0).all()
    empty = slots < 0
    assert (plan.slot_source.numpy()[empty] == -1).all()
    assert (plan.slot_tokens.numpy()[empty] == 0).all()
    assert (plan.slot_tokens.numpy()[~empty] > 0).all(), "a copy without tokens is no copy"


@settings(max_examples=examples(500))
@given(plans())
def test_the_lists_of_copies_are_the_slots_seen_by_expert(plan: Plan) -> None:
    config = plan.config
    offsets, slots = plan.copy_offsets.tolist(), plan.copy_slots.tolist()
    holders = expert_of_physical(plan)
    assert offsets[0] == 0
    assert offsets[-1] == int((plan.slot_expert >= 0).sum())
    for expert in range(config.num_experts):
        listed = slots[offsets[expert] : offsets[expert + 1]]
        home = expert // config.experts_per_rank
        holding = [
            p for p in np.flatnonzero(holders == expert) if p // config.slots_per_rank != home
        ]
        assert sorted(listed) == holding
        node = [config.topology.node_of_rank[p // config.slots_per_rank] for p in listed]
        assert node == sorted(node), "copies are listed node by node"


@settings(max_examples=examples(500))
@given(plans())
def test_a_copy_comes_from_its_home_or_the_first_holder_of_its_node(plan: Plan) -> None:
    config = plan.config
    node = config.topology.node_of_rank
    slots, sources = plan.slot_expert.tolist(), plan.slot_source.tolist()
    for rank in range(config.num_ranks):
        for expert, source in zip(slots[rank], sources[rank], strict=True):
            if expert < 0:
                continue
            home = expert // config.experts_per_rank
            in_node = [r for r in range(config.num_ranks) if node[r] == node[rank]]
            first = next(r for r in in_node if expert in slots[r])
            expected = home if node[home] == node[rank] or first == rank else first
            assert source == expected


# ---- quotas --------------------------------------------------------------------------------------


@settings(max_examples=examples(1500))
@given(plans())
def test_quotas_are_not_negative_and_sum_to_the_counts(plan: Plan) -> None:
    split = plan.split().numpy().astype(np.int64)
    holders = expert_of_physical(plan)
    assert split.shape == (plan.config.num_ranks, plan.config.num_physical_experts)
    assert (split >= 0).all()
    assert (split[:, holders < 0] == 0).all(), "an empty slot is given tokens"
    served = np.zeros(plan.counts.shape, np.int64)
    for physical in np.flatnonzero(holders >= 0):
        served[:, holders[physical]] += split[:, physical]
    np.testing.assert_array_equal(served, plan.counts.numpy())


@settings(max_examples=examples(500))
@given(plans())
def test_a_copy_serves_its_quota_and_the_home_keeps_a_token(plan: Plan) -> None:
    config = plan.config
    received = plan.split().numpy().sum(0, dtype=np.int64).reshape(config.num_ranks, -1)
    np.testing.assert_array_equal(received[:, config.experts_per_rank :], plan.slot_tokens.numpy())
    copied = np.unique(plan.slot_expert.numpy())
    at_home = received[:, : config.experts_per_rank].reshape(-1)
    assert (at_home[copied[copied >= 0]] > 0).all()


# ---- never worse ---------------------------------------------------------------------------------


@settings(max_examples=examples(1500))
@given(plans())
def test_no_plan_is_worse_than_no_copies(plan: Plan) -> None:
    before, after = int(load_before(plan).max()), int(load_after(plan).max())
    assert after <= before
    assert stat(plan, "max_load_before") == before
    assert stat(plan, "max_load") == after
    if stat(plan, "copies") > 0:
        lower = after < before or saves_time(plan)
        assert lower, "copies that lower neither the largest load nor the time are waste"


def saves_time(plan: Plan) -> bool:
    """Whether a plan for ``Time`` is one that pays: copies for locality leave loads as they are."""
    is_time = isinstance(plan.config.objective, Time)
    return is_time and stat(plan, "predicted_ns") < stat(plan, "predicted_ns_before")


def is_empty(plan: Plan) -> bool:
    return bool(
        (plan.slot_expert == -1).all()
        and (plan.slot_source == -1).all()
        and (plan.slot_tokens == 0).all()
        and (plan.copy_offsets == 0).all()
        and (plan.copy_slots == -1).all()
        and stat(plan, "candidate") == 0
        and stat(plan, "copies") == 0
    )


@settings(max_examples=examples(500))
@given(
    strategies.cases(kinds=["zeros", "equal"]),
    strategies.objectives(),
    st.one_of(st.none(), st.lists(strategies.candidates(), max_size=4)),
)
def test_empty_and_equal_counts_give_the_empty_plan(
    case: Case, objective: Objective, candidates: list[Candidate] | None
) -> None:
    plan = solved(case, objective, candidates)
    assert is_empty(plan) or saves_time(plan)


@settings(max_examples=examples(300))
@given(strategies.node_tables(), st.integers(1, 6), st.integers(0, 10**6), strategies.objectives())
def test_equal_rank_loads_of_unequal_experts_give_the_empty_plan(
    node: tuple[int, ...], home_slots: int, seed: int, objective: Objective
) -> None:
    # Every rank has the same experts in another order: ranks are balanced, experts are not.
    rng = np.random.default_rng(seed)
    loads = np.concatenate([rng.permutation(2 ** np.arange(home_slots)) for _ in node])
    counts = rng.multinomial(np.ones(len(loads), int) * loads, np.full(len(node), 1 / len(node))).T
    case = strategies.written_case(counts, node_of_rank=node, spare_slots=2)
    plan = solved(case, objective)
    assert is_empty(plan) or saves_time(plan)


@settings(max_examples=examples(300))
@given(strategies.cases(kinds=strategies.SKEWED_KINDS))
def test_loads_within_the_tolerance_give_the_empty_plan(case: Case) -> None:
    before = case.counts.sum(0, dtype=np.int64).reshape(case.num_ranks, -1).sum(1)
    if before.sum() == 0:
        return  # covered above
    tolerance = float(before.max() * case.num_ranks / before.sum() - 1) + 1e-3
    assert is_empty(solved(case, Balance(tolerance)))


@contextmanager
def rows_sent(balancer: topoep.Balancer) -> Iterator[list[int]]:
    """Counts the rows that the transport sends in each of its calls."""
    sent: list[int] = []
    original = balancer.transport.all_to_all

    def counting(rows: Any, send_splits: Any, recv_splits: Any) -> Any:
        sent.append(sum(sum(splits) for splits in send_splits))
        return original(rows, send_splits, recv_splits)

    balancer.transport.all_to_all = counting  # type: ignore[method-assign]
    yield sent
    balancer.transport.all_to_all = original  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["zeros", "equal", "one_expert"])
def test_the_empty_plan_moves_no_bytes(kind: str) -> None:
    case = strategies.make_case(kind, 3, node_of_rank=[0, 1, 0, 1], home_slots=2, spare_slots=2)
    balancer = topoep.Balancer(case.topology, case.num_experts, case.spare_slots)
    plan = balancer.plan_from_counts(case.tensor)
    weights = [(torch.randn(2, 3),) for _ in range(4)]
    with rows_sent(balancer) as sent:
        balancer.replicate(weights, plan)
    assert sum(sent) == stat(plan, "copies")
    assert (sum(sent) == 0) == (kind != "one_expert")


@settings(max_examples=examples(200))
@given(strategies.cases(), strategies.objectives())
def test_the_empty_plan_is_candidate_zero(case: Case, objective: Objective) -> None:
    for candidates in ([], [Candidate("none")], [Candidate("none", "H22112")] * 3):
        plan = solved(case, objective, candidates)
        assert is_empty(plan)
        assert stat(plan, "max_load") == stat(plan, "max_load_before")


# ---- the ends of the ranges ----------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(plans(strategies.cases(spare_slots=st.just(0))))
def test_without_spare_slots_the_plan_is_empty(plan: Plan) -> None:
    assert is_empty(plan)
    assert plan.slot_expert.shape == (plan.config.num_ranks, 0)
    plan.validate()


@settings(max_examples=examples(200))
@given(plans(strategies.cases(nodes=st.just((0,)))))
def test_a_single_rank_has_the_empty_plan(plan: Plan) -> None:
    assert is_empty(plan)
    assert float(plan.stats()["imbalance"]) == 1.0
    plan.validate()


@settings(max_examples=examples(200))
@given(plans(strategies.cases(nodes=strategies.node_tables(max_nodes=1))))
def test_a_single_node_never_crosses_the_network(plan: Plan) -> None:
    plan.validate()
    assert stat(plan, "cross_node_copies") == 0
    assert stat(plan, "cross_node_tokens") == 0
    assert stat(plan, "cross_node_tokens_before") == 0


@settings(max_examples=examples(200))
@given(plans(strategies.cases(home_slots=st.just(1))))
def test_one_expert_per_rank_works(plan: Plan) -> None:
    assert plan.config.experts_per_rank == 1
    plan.validate()


def test_one_hot_expert_per_rank_is_spread() -> None:
    # Row "one expert per rank" of the field: the hot one must not stay where it is.
    case = strategies.written_case([[80, 0, 0, 0]] * 4, node_of_rank=[0, 0, 0, 0], spare_slots=1)
    plan = solved(case)
    assert plan.slot_expert.tolist() == [[-1], [0], [0], [0]]
    assert load_after(plan).tolist() == [80, 80, 80, 80]


@settings(max_examples=examples(300))
@given(plans(strategies.cases(kinds=["dead_experts", "single_tokens"])))
def test_experts_without_tokens_are_never_copied(plan: Plan) -> None:
    plan.validate()
    dead = np.flatnonzero(plan.counts.numpy().sum(0, dtype=np.int64) < 2)
    assert not np.isin(plan.slot_expert.numpy(), dead).any()


# ---- the same input, the same plan ---------------------------------------------------------------


@settings(max_examples=examples(300))
@given(strategies.cases(kinds=strategies.SKEWED_KINDS), st.integers(0, 2**32 - 1))
def test_swapping_sources_of_a_node_leaves_the_copies_alone(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = np.arange(case.num_ranks)
    for node in set(case.node_of_rank):
        members = np.flatnonzero(np.array(case.node_of_rank) == node)
        order[members] = rng.permutation(members)
    plan = solved(case)
    swapped = topoep.solve(case.tensor[order], case.topology, case.spare_slots)
    for name in ("slot_expert", "slot_source", "slot_tokens", "copy_slots"):
        assert torch.equal(getattr(plan, name), getattr(swapped, name)), name


@settings(max_examples=examples(200))
@given(strategies.cases(kinds=["equal", "few_values", "powers_of_two", "one_rank"]))
def test_swapping_equal_sources_gives_the_same_plan(case: Case) -> None:
    # The same counts, produced in another order: nothing but the integers may matter.
    counts = case.tensor
    counts[:] = counts[0].clone()
    plan = topoep.solve(counts, case.topology, case.spare_slots)
    reversed_rows = counts.flip(0).contiguous().flip(0)
    assert_same(plan, topoep.solve(reversed_rows, case.topology, case.spare_slots))
    transposed = counts.T.contiguous().T
    assert_same(plan, topoep.solve(transposed, case.topology, case.spare_slots))


@settings(max_examples=examples(300))
@given(strategies.cases(kinds=strategies.SKEWED_KINDS))
def test_ranks_numbered_node_by_node_give_the_same_plan(case: Case) -> None:
    """A strided topology is a block topology with other names for the ranks."""
    order = sorted(range(case.num_ranks), key=lambda rank: (case.node_of_rank[rank], rank))
    columns = np.arange(case.num_experts).reshape(case.num_ranks, -1)[order].reshape(-1)
    blocks = topoep.solve(
        torch.from_numpy(case.counts[order][:, columns].copy()),
        Topology(node_of_rank=[case.node_of_rank[rank] for rank in order]),
        case.spare_slots,
    )
    plan = solved(case)
    assert torch.equal(plan._stats, blocks._stats)
    for position, rank in enumerate(order):
        here = zip(plan.slot_expert[rank].tolist(), plan.slot_tokens[rank].tolist(), strict=True)
        there = zip(
            [int(columns[e]) if e >= 0 else -1 for e in blocks.slot_expert[position].tolist()],
            blocks.slot_tokens[position].tolist(),
            strict=True,
        )
        assert sorted(here) == sorted(there)


@settings(max_examples=examples(100))
@given(strategies.cases(kinds=strategies.SKEWED_KINDS), st.integers(1, 1000))
def test_numbers_of_nodes_matter_by_their_order_only(case: Case, stride: int) -> None:
    sparse = Topology(node_of_rank=[node * stride - 3 for node in case.node_of_rank])
    assert_same(solved(case), topoep.solve(case.tensor, sparse, case.spare_slots))


@pytest.mark.parametrize("kind", strategies.COUNT_KINDS)
def test_a_hundred_solves_are_identical(kind: str) -> None:
    case = strategies.make_case(
        kind, 11, node_of_rank=[0, 1, 2, 0, 1, 2, 2, 2, 0], home_slots=4, spare_slots=2
    )
    first = solved(case, rank=4)
    for _ in range(99):
        again = solved(case, rank=4)
        assert_same(first, again)
        assert torch.equal(first.send, again.send)
        assert torch.equal(first.recv, again.recv)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("objective", [Balance(), Balance(0.0), Even()], ids=str)
def test_the_number_of_threads_does_not_matter(objective: Objective) -> None:
    for seed in strategies.seeds(40, 500):
        case = strategies.random_case(seed, strategies.SKEWED_KINDS)
        with torch_threads(1):
            one = solved(case, objective, rank=0)
            split = one.split()
        with torch_threads(2):
            two = solved(case, objective, rank=0)
            assert torch.equal(split, two.split()), case
        assert torch.equal(one.send, two.send), case
        assert torch.equal(one.recv, two.recv), case
        for name in TABLES:
            assert torch.equal(getattr(one, name), getattr(two, name)), (case, name)


@settings(max_examples=examples(200))
@given(strategies.cases(kinds=strategies.SKEWED_KINDS), strategies.objectives(), st.data())
def test_the_plan_is_the_same_for_every_rank(
    case: Case, objective: Objective, data: st.DataObject
) -> None:
    plan = solved(case, objective)
    assert plan.rank is None
    assert plan.send is None
    assert plan.recv is None
    split = plan.split()
    rank = data.draw(st.integers(0, case.num_ranks - 1))
    of_rank = solved(case, objective, rank=rank)
    assert of_rank.rank == rank
    assert_same(plan, of_rank)
    assert torch.equal(of_rank.send, split[rank])
    assert torch.equal(of_rank.recv, split[:, rank * case.width : (rank + 1) * case.width])


@settings(max_examples=examples(200))
@given(strategies.cases(kinds=strategies.SKEWED_KINDS), st.data())
def test_for_rank_gives_what_solving_for_the_rank_gives(case: Case, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, case.num_ranks - 1))
    first = data.draw(st.one_of(st.none(), st.integers(0, case.num_ranks - 1)))
    moved = solved(case, rank=first).for_rank(rank)
    direct = solved(case, rank=rank)
    assert moved.rank == rank
    assert torch.equal(moved.send, direct.send)
    assert torch.equal(moved.recv, direct.recv)
    assert moved.send.shape == direct.send.shape
    assert moved.recv.is_contiguous()
    assert_same(moved, direct)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    case = strategies.make_case("equal", 0, node_of_rank=[0] * 4, home_slots=1, spare_slots=1)
    with pytest.raises(ValueError, match=f"rank {rank}; expected 0 to 3"):
        solved(case, rank=rank)
    with pytest.raises(ValueError, match=f"rank {rank}; expected 0 to 3"):
        solved(case).for_rank(rank)


@settings(max_examples=examples(200))
@given(strategies.cases(), st.data())
def test_shapes_depend_on_the_configuration_only(case: Case, data: st.DataObject) -> None:
    config = {"node_of_rank": case.node_of_rank, "home_slots": case.home_slots}
    kind = data.draw(st.sampled_from(list(strategies.COUNT_KINDS)))
    same_size = strategies.make_case(kind, 5, spare_slots=case.spare_slots, **config)
    rank = data.draw(st.integers(0, case.num_ranks - 1))
    one, two = solved(case, rank=rank), solved(same_size, Even(), rank=rank)
    physical = case.num_ranks * case.width
    expected = {
        "slot_expert": (case.num_ranks, case.spare_slots),
        "slot_source": (case.num_ranks, case.spare_slots),
        "slot_tokens": (case.num_ranks, case.spare_slots),
        "copy_offsets": (case.num_experts + 1,),
        "copy_slots": (case.num_ranks * case.spare_slots,),
        "send": (physical,),
        "recv": (case.num_ranks, case.width),
    }
    for plan in (one, two):
        for name, shape in expected.items():
            tensor = getattr(plan, name)
            assert tuple(tensor.shape) == shape, name
            assert tensor.dtype == torch.int32, name
        assert all(value.dim() == 0 for value in plan.stats().values())
        assert plan.num_invalid.dim() == 0
        assert tuple(plan.split().shape) == (case.num_ranks, physical)


@settings(max_examples=examples(100))
@given(strategies.cases(), strategies.objectives())
def test_solving_leaves_the_counts_alone(case: Case, objective: Objective) -> None:
    counts = case.tensor
    topoep.solve(counts, case.topology, case.spare_slots, objective, rank=0)
    assert (counts.numpy() == case.counts).all()


# ---- statistics and promises ---------------------------------------------------------------------


@settings(max_examples=examples(1000))
@given(plans())
def test_statistics_say_what_the_plan_is(plan: Plan) -> None:
    config = plan.config
    node = config.topology.node_of_rank
    stats = {name: value.item() for name, value in plan.stats().items()}
    experts = plan.slot_expert.tolist()
    copies = [(e, node[rank]) for rank, row in enumerate(experts) for e in row if e >= 0]
    remote = {(e, n) for e, n in copies if n != node[e // config.experts_per_rank]}
    assert stats["tokens"] == plan.counts.sum(dtype=torch.int64)
    assert stats["copies"] == len(copies)
    assert stats["cross_node_copies"] == len(remote)
    assert stats["in_node_copies"] == len(copies) - len(remote)
    weight = config.objective.cross_weight
    assert stats["weighted_copies"] == len(copies) + (weight - 1) * len(remote)
    assert stats["invalid"] == 0
    mean = stats["tokens"] / config.num_ranks
    for name, load in (("imbalance_before", load_before(plan)), ("imbalance", load_after(plan))):
        assert stats[name] == pytest.approx(load.max() / mean if mean else 1.0, rel=1e-12)
    assert stats["imbalance"] >= 1.0 - 1e-12


def alone(case: Case, objective: Objective, candidate: Candidate) -> Plan:
    """The plan of one candidate, or the empty plan where the objective prefers it."""
    return solved(case, objective, [candidate])


@settings(max_examples=examples(60))
@given(
    strategies.cases(kinds=strategies.SKEWED_KINDS),
    st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3]),
    st.sampled_from([1, 3, 20]),
    st.one_of(st.none(), st.lists(strategies.candidates(), min_size=1, max_size=6)),
)
def test_the_tolerance_is_kept_by_the_fewest_copies_if_any_candidate_keeps_it(
    case: Case, tolerance: float, weight: int, candidates: list[Candidate] | None
) -> None:
    objective = Balance(tolerance, weight)
    plan = solved(case, objective, candidates)
    default = default_candidates(objective, case.topology.num_nodes)
    tried = default if candidates is None else candidates
    every = [alone(case, objective, candidate) for candidate in (Candidate("none"), *tried)]
    allowed = within(stat(plan, "tokens"), case.num_ranks, round(tolerance * 10**6))
    reached = [stat(p, "max_load") for p in every]
    if min(reached) <= allowed:
        assert stat(plan, "max_load") <= allowed
        assert load_after(plan).max() <= allowed
        copies = [
            stat(p, "copies") + (weight - 1) * stat(p, "cross_node_copies")
            for p in every
            if stat(p, "max_load") <= allowed
        ]
        assert stat(plan, "weighted_copies") == min(copies)
    else:
        assert stat(plan, "max_load") == min(reached)


@settings(max_examples=examples(40))
@given(strategies.cases(kinds=strategies.SKEWED_KINDS), st.sampled_from([1, 3]))
def test_even_takes_the_least_largest_load(case: Case, weight: int) -> None:
    objective = Even(weight)
    plan = solved(case, objective)
    every = [alone(case, objective, candidate) for candidate in default_candidates(objective)]
    least = min(stat(p, "max_load") for p in every)
    assert stat(plan, "max_load") == least
    copies = [
        stat(p, "copies") + (weight - 1) * stat(p, "cross_node_copies")
        for p in every
        if stat(p, "max_load") == least
    ]
    assert stat(plan, "weighted_copies") == min(copies)


def test_the_lower_index_wins_between_equal_candidates() -> None:
    case = strategies.written_case([[6, 0], [3, 1]], node_of_rank=[0, 0], spare_slots=1)
    twice = [Candidate("load#1"), *[Candidate("mean+0%", policy) for policy in ("F0", "F")] * 2]
    plan = solved(case, Even(), twice)
    assert stat(plan, "copies") == 1
    assert stat(plan, "candidate") == 2


# ---- validate ------------------------------------------------------------------------------------


@settings(max_examples=examples(1000))
@given(plans())
def test_validate_accepts_every_plan(plan: Plan) -> None:
    plan.validate()


HOT = strategies.written_case(
    [[40, 1, 30, 1, 1, 1, 1, 1]] * 4, node_of_rank=[0, 0, 1, 1], spare_slots=2
)
SOLVED = "the counts are those that were solved"
SLOTS_HOLD = "a spare slot holds an expert or -1"
ONE_HOLDER = "at most one copy of an expert on a rank"
SOURCE = "a copy comes from its home or the first holder of its node"
QUOTAS = "quotas of every rank and expert sum to the counts"
SERVES = "a copy serves the tokens its slot says"
TOKENS = "a copy serves tokens, an empty slot none"
LISTED = "the copies of an expert are listed node by node"
ROW = "send and recv are the row and column of the rank"
NEVER_WORSE = "never worse than no copies"


def first_copy(plan: Plan) -> tuple[int, int]:
    rank, slot = torch.nonzero(plan.slot_expert >= 0)[0].tolist()
    return rank, slot


def changed(plan: Plan, field: str, place: tuple[int, ...], value: int) -> Plan:
    tensor = getattr(plan, field).clone()
    assert int(tensor[place]) != value, "this would change nothing"
    tensor[place] = value
    return dataclasses.replace(plan, **{field: tensor})


def an_id_beyond_the_experts(plan: Plan) -> Plan:
    return changed(plan, "slot_expert", first_copy(plan), plan.config.num_experts)


def an_id_below_minus_one(plan: Plan) -> Plan:
    return changed(plan, "slot_expert", first_copy(plan), -2)


def a_copy_of_a_home_expert(plan: Plan) -> Plan:
    rank, slot = first_copy(plan)
    return changed(plan, "slot_expert", (rank, slot), rank * plan.config.experts_per_rank)


def two_copies_of_one_expert(plan: Plan) -> Plan:
    rank, slot = first_copy(plan)
    slot_expert = plan.slot_expert.clone()
    slot_expert[rank] = int(slot_expert[rank, slot])
    return dataclasses.replace(plan, slot_expert=slot_expert)


def a_copy_from_another_rank(plan: Plan) -> Plan:
    rank, slot = first_copy(plan)
    wrong = next(r for r in range(4) if r not in (rank, int(plan.slot_source[rank, slot])))
    return changed(plan, "slot_source", (rank, slot), wrong)


def an_empty_slot_with_a_source(plan: Plan) -> Plan:
    place = torch.nonzero(plan.slot_expert < 0)[0].tolist()
    return changed(plan, "slot_source", tuple(place), 0)


def a_quota_above_the_counts(plan: Plan) -> Plan:
    rank, slot = first_copy(plan)
    total = int(plan.counts[:, plan.slot_expert[rank, slot]].sum())
    return changed(plan, "slot_tokens", (rank, slot), total + 1)


def a_negative_quota(plan: Plan) -> Plan:
    return changed(plan, "slot_tokens", first_copy(plan), -1)


def tokens_in_an_empty_slot(plan: Plan) -> Plan:
    place = torch.nonzero(plan.slot_expert < 0)[0].tolist()
    return changed(plan, "slot_tokens", tuple(place), 1)


def a_quota_that_overloads_the_copy(plan: Plan) -> Plan:
    """All tokens of expert 0 on rank 3, together with all of expert 2."""
    slot_expert = torch.full_like(plan.slot_expert, -1)
    slot_source = torch.full_like(plan.slot_source, -1)
    slot_tokens = torch.zeros_like(plan.slot_tokens)
    slot_expert[3] = torch.tensor([0, 2], dtype=torch.int32)
    slot_source[3] = torch.tensor([0, 1], dtype=torch.int32)
    slot_tokens[3] = plan.counts.sum(0, dtype=torch.int32)[[0, 2]]
    return dataclasses.replace(
        plan, slot_expert=slot_expert, slot_source=slot_source, slot_tokens=slot_tokens
    )


@pytest.mark.parametrize(
    ("corrupt", "rule"),
    [
        (an_id_beyond_the_experts, SLOTS_HOLD),
        (an_id_below_minus_one, SLOTS_HOLD),
        (a_copy_of_a_home_expert, ONE_HOLDER),
        (two_copies_of_one_expert, ONE_HOLDER),
        (a_copy_from_another_rank, SOURCE),
        (an_empty_slot_with_a_source, SOURCE),
        (a_quota_above_the_counts, QUOTAS),
        (a_negative_quota, TOKENS),
        (tokens_in_an_empty_slot, TOKENS),
        (a_quota_that_overloads_the_copy, NEVER_WORSE),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_validate_names_the_rule_that_a_corrupted_plan_breaks(
    corrupt: Callable[[Plan], Plan], rule: str
) -> None:
    plan = solved(HOT)
    plan.validate()
    with pytest.raises(ValueError, match=f"breaks the rule '{rule}'"):
        corrupt(plan).validate()


def arrays(plan: Plan, split: np.ndarray) -> PlanArrays:
    return PlanArrays(
        node_of_rank=plan.config.topology.node_of_rank,
        counts=plan.counts.numpy(),
        slot_expert=plan.slot_expert.numpy(),
        slot_source=plan.slot_source.numpy(),
        slot_tokens=plan.slot_tokens.numpy(),
        copy_offsets=plan.copy_offsets.numpy(),
        copy_slots=plan.copy_slots.numpy(),
        rank=None,
        send=None,
        recv=None,
        stats={name: int(value) for name, value in plan.stats().items()},
        split=lambda: split,
    )


def split_with(plan: Plan, changes: dict[tuple[int, int], int]) -> np.ndarray:
    split = plan.split().numpy()
    for place, change in changes.items():
        split[place] += change
    return split


def test_validate_names_the_rule_that_a_corrupted_split_breaks() -> None:
    plan = solved(HOT)
    validate_plan(arrays(plan, plan.split().numpy()))
    holders = expert_of_physical(plan)
    empty = int(np.flatnonzero(holders < 0)[0])
    home, copy = (int(p) for p in np.flatnonzero(holders == holders[plan.copy_slots[0]])[:2])
    giver = int(np.flatnonzero(plan.split().numpy()[:, home] > 0)[0])
    corruptions = [
        ({(0, empty): 1}, QUOTAS),
        ({(giver, home): -1}, QUOTAS),
        ({(giver, home): -(10**6), (giver, copy): 10**6}, QUOTAS),
        ({(giver, home): -1, (giver, copy): 1}, SERVES),
    ]
    for changes, rule in corruptions:
        with pytest.raises(ValueError, match=f"breaks the rule '{rule}'"):
            validate_plan(arrays(plan, split_with(plan, changes)))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({(0, 1): 1}, "tokens"),
        ({(0, 0): -1, (0, 2): 1}, "max_load_before"),
        ({(0, 0): -1, (2, 0): 1}, "cross_node_tokens_before"),
    ],
    ids=["more tokens", "experts of two ranks", "ranks of two nodes"],
)
def test_validate_notices_counts_that_were_changed_in_place(changes, name) -> None:
    plan = solved(HOT)
    plan.validate()
    for place, change in changes.items():
        plan.counts[place] += change
    with pytest.raises(ValueError, match=f"'{SOLVED}': the counts give {name} = .* clone"):
        plan.validate()


@pytest.mark.parametrize(
    ("field", "rule"),
    [("copy_offsets", LISTED), ("copy_slots", LISTED), ("send", ROW), ("recv", ROW)],
)
def test_validate_rejects_tables_that_contradict_the_slots(field: str, rule: str) -> None:
    # Rerouting reads these, not the slots: a plan that passes here must be safe to use.
    plan = solved(HOT, rank=0)
    tensor = getattr(plan, field)
    place = tuple(torch.nonzero(tensor > 0)[0].tolist())
    with pytest.raises(ValueError, match=f"breaks the rule '{rule}'"):
        changed(plan, field, place, int(tensor[place]) - 1).validate()


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.05, 0.3, 1000.0])
def test_stats_say_whether_the_tolerance_was_met(tolerance):
    def met(counts: torch.Tensor, spare_slots: int) -> torch.Tensor:
        stats = topoep.solve(counts, Topology(2, 1), spare_slots, Balance(tolerance)).stats()
        assert stats["tolerance_met"].dtype == torch.bool
        # docs/algorithm.md, section 2, in Python's integers.
        tokens, ppm = int(counts.sum()), round(tolerance * 10**6)
        limit = max(-(-tokens // 2), tokens * (10**6 + ppm) // (2 * 10**6))
        assert bool(stats["tolerance_met"]) == (int(stats["max_load"]) <= limit)
        return stats["tolerance_met"]

    assert met(torch.zeros(2, 2, dtype=torch.int32), 0)
    assert met(torch.tensor([[51, 0], [0, 50]]).int(), 0), "the mean rounded up"
    uneven = torch.tensor([[60, 20], [60, 20]]).int()
    assert met(uneven, 1)
    assert bool(met(uneven, 0)) == (tolerance >= 0.5)
    large = torch.tensor([[2**30, 2**29], [0, 0]]).int()
    assert bool(met(large, 0)) == (tolerance >= 0.34)
    assert "tolerance_met" not in topoep.solve(uneven, Topology(2, 1), 1, Even()).stats()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_ranks_may_be_small_numpy_integers(dtype: type) -> None:
    """Their products would overflow: rank * slots per rank is 200 here."""
    counts = torch.full((32, 256), 7, dtype=torch.int32)
    counts[:, 0] = 900
    topology = topoep.Topology(8, 4)
    plan = topoep.solve(counts, topology, 2)
    for row in (plan.for_rank(dtype(20)), topoep.solve(counts, topology, 2, rank=dtype(20))):
        row.validate()
        assert type(row.rank) is int
        assert torch.equal(row.recv, plan.for_rank(20).recv)
