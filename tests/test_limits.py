# SPDX-License-Identifier: Apache-2.0
"""Limits hold exactly where they say, name themselves beyond, and bad arguments are explained."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import topoep
from topoep import Balance, Balancer, Candidate, Even, Plan, Topology, ops

MAX_RANKS = 1024
MAX_EXPERTS = 4096
MAX_SPARE_SLOTS = 16
MAX_TOP_K = 64
MAX_CANDIDATES = 256
MAX_ROW_PARTS = 16
MAX_TOKENS = 2**31 - 1

EMPTY = Candidate("none").pack()
EVEN = Even().to_ints()
ONE_RANK = Topology(1, 1)
FOUR_RANKS = Topology(2, 2)


@contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    """An error of this kind, whose text has all these parts."""
    with pytest.raises(kind) as error:
        yield
    for part in parts:
        assert part in str(error.value)


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def raw_table(ranks: int) -> torch.Tensor:
    """The table of Topology.table() for one node, for more ranks than Topology takes."""
    places = torch.arange(ranks)
    return torch.cat([places, places, zeros(ranks), torch.tensor([0, ranks])]).int()


def raw_solve(
    counts: torch.Tensor, table: torch.Tensor, spare_slots: int = 1, candidates: int = 1
) -> tuple[torch.Tensor, ...]:
    return ops.solve(counts, table, spare_slots, [EMPTY] * candidates, EVEN, -1)


# ---- ranks ---------------------------------------------------------------------------------------


def test_the_most_ranks_make_a_plan() -> None:
    counts = torch.ones(MAX_RANKS, MAX_RANKS, dtype=torch.int32)
    counts[:, 5] = 100
    for topology in (Topology(MAX_RANKS // 8, 8), Topology(1, MAX_RANKS), Topology(MAX_RANKS, 1)):
        plan = topoep.solve(
            counts,
            topology,
            1,
            rank=MAX_RANKS - 1,
            candidates=[
                Candidate("mean+1%", "H22112"),
                Candidate("mean+1%", "F"),
            ],
        )
        stats = plan.stats()
        assert stats["copies"] > 0
        assert stats["max_load"] < stats["max_load_before"]
        assert plan.send is not None
        assert plan.send.sum() == counts[-1].sum()


def test_more_ranks_are_refused() -> None:
    too_many = MAX_RANKS + 1
    with refused(ValueError, "1025", "1024", "kMaxRanks"):
        Topology(too_many, 1)
    with refused(ValueError, "kMaxRanks"):
        Topology(node_of_rank=[0] * too_many)
    with refused(ValueError, "0 ranks", "kMaxRanks"):
        Topology(node_of_rank=[])
    counts = zeros(too_many, too_many)
    with refused(RuntimeError, "solve", "1025", "kMaxRanks"):
        raw_solve(counts, raw_table(too_many))
    with refused(RuntimeError, "split", "1025", "kMaxRanks"):
        ops.split(counts, raw_table(too_many), zeros(too_many, 1) - 1, zeros(too_many, 1))


# ---- experts -------------------------------------------------------------------------------------


def test_the_most_experts_make_a_plan() -> None:
    counts = torch.ones(4, MAX_EXPERTS, dtype=torch.int32)
    counts[:, MAX_EXPERTS - 1] = 5000
    plan = topoep.solve(counts, FOUR_RANKS, 2, Even(), rank=0)
    assert (plan.slot_expert == MAX_EXPERTS - 1).sum() == 3
    assert plan.stats()["max_load"] == -(-int(counts.sum()) // 4)
    plan.validate()
    ids = torch.arange(MAX_EXPERTS).reshape(-1, 64)
    counted, invalid = ops.histogram(ids, MAX_EXPERTS)
    assert (counted == 1).all()
    assert invalid == 0
    home = ops.reroute(ids, plan.send, plan.copy_offsets, plan.copy_slots, 4)
    assert home.unique().numel() == MAX_EXPERTS
    balancer = Balancer(FOUR_RANKS, MAX_EXPERTS)
    assert balancer.plan([ids] * 4).stats()["tokens"] == 4 * MAX_EXPERTS


def test_more_experts_are_refused() -> None:
    too_many = MAX_EXPERTS + 1
    with refused(ValueError, "4097", "4096", "kMaxExperts"):
        topoep.solve(zeros(1, too_many), ONE_RANK)
    with refused(ValueError, "kMaxExperts"):
        Balancer(ONE_RANK, too_many)
    with refused(ValueError, "kMaxExperts"):
        Balancer(ONE_RANK, 0)
    with refused(RuntimeError, "histogram", "4097", "kMaxExperts"):
        ops.histogram(zeros(1, 1), too_many)
    with refused(RuntimeError, "histogram", "kMaxExperts"):
        ops.histogram(zeros(1, 1), 0)
    with refused(RuntimeError, "solve", "4097", "kMaxExperts"):
        raw_solve(zeros(1, too_many), ONE_RANK.table())
    with refused(RuntimeError, "split", "4097", "kMaxExperts"):
        ops.split(zeros(1, too_many), ONE_RANK.table(), zeros(1, 1) - 1, zeros(1, 1))


# ---- spare slots ---------------------------------------------------------------------------------


def test_the_most_spare_slots_are_all_used() -> None:
    # Rank 0 has 32 experts of 100 tokens; half of them is more than 16 copies of 99 can take.
    counts = torch.zeros(2, 64, dtype=torch.int32)
    counts[:, :32] = 50
    plan = topoep.solve(counts, Topology(1, 2), MAX_SPARE_SLOTS, Even())
    assert plan.slot_expert.shape == (2, MAX_SPARE_SLOTS)
    assert plan.slot_expert[1].tolist() == list(range(MAX_SPARE_SLOTS))
    assert plan.stats()["max_load"] == 3200 - 16 * 99
    plan.validate()
    assert Balancer(FOUR_RANKS, 4, MAX_SPARE_SLOTS).num_physical_experts == 4 * 17


def test_more_spare_slots_are_refused() -> None:
    for wrong in (MAX_SPARE_SLOTS + 1, -1):
        with refused(ValueError, f"spare_slots={wrong}", "0 to 16", "kMaxSpareSlots"):
            topoep.solve(zeros(4, 8), FOUR_RANKS, wrong)
        with refused(ValueError, "kMaxSpareSlots"):
            Balancer(FOUR_RANKS, 8, wrong)
        with refused(RuntimeError, "solve", "kMaxSpareSlots"):
            raw_solve(zeros(4, 8), FOUR_RANKS.table(), wrong)
    with refused(RuntimeError, "split", "kMaxSpareSlots"):
        ops.split(zeros(4, 8), FOUR_RANKS.table(), zeros(4, 17) - 1, zeros(4, 17))


# ---- top-k ---------------------------------------------------------------------------------------


def balancer_and_plan() -> tuple[Balancer, Plan]:
    balancer = Balancer(FOUR_RANKS, 8)
    return balancer, balancer.plan([zeros(3, 2)] * 4)


def raw_reroute(ids: torch.Tensor) -> torch.Tensor:
    _, plan = balancer_and_plan()
    row = plan.for_rank(0)
    assert row.send is not None
    return ops.reroute(ids, row.send, plan.copy_offsets, plan.copy_slots, 4)


def test_the_largest_top_k_works() -> None:
    balancer = Balancer(FOUR_RANKS, 8)
    ids = [zeros(5, MAX_TOP_K)] * 4
    plan = balancer.plan(ids)
    assert plan.stats()["tokens"] == 4 * 5 * MAX_TOP_K
    assert all(tuple(p.shape) == (5, MAX_TOP_K) for p in balancer.reroute(ids, plan))
    assert ops.histogram(ids[0], 8)[0].sum() == 5 * MAX_TOP_K
    assert tuple(raw_reroute(ids[0]).shape) == (5, MAX_TOP_K)


@pytest.mark.parametrize("top_k", [0, MAX_TOP_K + 1])
def test_another_top_k_is_refused(top_k: int) -> None:
    balancer, plan = balancer_and_plan()
    ids = zeros(3, top_k)
    with refused(ValueError, f"top_k={top_k}", "1 to 64", "kMaxTopK"):
        balancer.plan([ids] * 4)
    with refused(ValueError, "kMaxTopK"):
        balancer.reroute([ids] * 4, plan)
    with refused(RuntimeError, "histogram", "kMaxTopK"):
        ops.histogram(ids, 8)
    with refused(RuntimeError, "reroute", "kMaxTopK"):
        raw_reroute(ids)


# ---- candidates ----------------------------------------------------------------------------------


def test_the_most_candidates_are_all_tried() -> None:
    # The empty plan is one of them. Only the last one lowers the load.
    counts = torch.tensor([[60, 0], [40, 0]]).int()
    topology = Topology(1, 2)
    given = [Candidate("load#1")] * (MAX_CANDIDATES - 2) + [Candidate("mean+0%")]
    plan = topoep.solve(counts, topology, 1, Even(), candidates=given)
    assert plan.stats()["candidate"] == MAX_CANDIDATES - 1
    assert plan.stats()["max_load"] == 50
    balanced = Balancer(topology, 2, 1, objective=Even(), candidates=given)
    assert balanced.plan_from_counts(counts).stats()["candidate"] == MAX_CANDIDATES - 1
    packed = [candidate.pack() for candidate in [Candidate("none"), *given]]
    stats = ops.solve(counts, topology.table(), 1, packed, EVEN, -1)[-1]
    assert stats[ops.STAT_NAMES.index("candidate")] == MAX_CANDIDATES - 1


def test_the_raw_op_refuses_more_candidates() -> None:
    with refused(RuntimeError, "257", "1 to 256", "kMaxCandidates"):
        raw_solve(zeros(4, 8), FOUR_RANKS.table(), candidates=MAX_CANDIDATES + 1)


def test_solve_refuses_more_candidates() -> None:
    with refused(ValueError, "kMaxCandidates"):
        topoep.solve(zeros(4, 8), FOUR_RANKS, candidates=[Candidate("none")] * MAX_CANDIDATES)


def test_a_balancer_refuses_more_candidates_when_it_is_made() -> None:
    with refused(ValueError, "kMaxCandidates"):
        Balancer(FOUR_RANKS, 8, candidates=[Candidate("none")] * MAX_CANDIDATES)


@pytest.mark.parametrize("packed", [[], [Candidate("mean+1%").pack()]])
def test_the_raw_op_wants_the_empty_plan_first(packed: list[int]) -> None:
    with refused(RuntimeError, "candidate"):
        ops.solve(zeros(4, 8), FOUR_RANKS.table(), 1, packed, EVEN, -1)


# ---- tensors per expert --------------------------------------------------------------------------


def weights_of(number: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(torch.ones(2, 3) for _ in range(number)) for _ in range(4)]


def test_the_most_tensors_per_expert_are_moved() -> None:
    balancer = Balancer(FOUR_RANKS, 8, 1)
    counts = torch.zeros(4, 8, dtype=torch.int32)
    counts[:, 0] = 100
    plan = balancer.plan_from_counts(counts)
    guests = balancer.replicate(weights_of(MAX_ROW_PARTS), plan)
    assert all(len(tensors) == MAX_ROW_PARTS for tensors in guests)
    assert all((t == 1).all() for tensors in guests[1:] for t in tensors)
    packed = ops.pack_rows([torch.ones(2, 4)] * MAX_ROW_PARTS, torch.tensor([1]))
    assert tuple(packed.shape) == (1, 16 * MAX_ROW_PARTS)
    out = [torch.zeros(2, 4) for _ in range(MAX_ROW_PARTS)]
    ops.unpack_rows_(out, torch.tensor([0]), packed)
    assert all(t[0].sum() == 4 and t[1].sum() == 0 for t in out)


@pytest.mark.parametrize("number", [0, MAX_ROW_PARTS + 1])
def test_the_raw_ops_refuse_other_numbers_of_tensors(number: int) -> None:
    tensors = [torch.ones(2, 4) for _ in range(number)]
    index = torch.tensor([0])
    with refused(RuntimeError, "pack_rows", f"{number}", "1 to 16", "kMaxRowParts"):
        ops.pack_rows(tensors, index)
    with refused(RuntimeError, "unpack_rows_", "kMaxRowParts"):
        ops.unpack_rows_(tensors, index, zeros(1, 16 * number, dtype=torch.uint8))


def test_a_balancer_refuses_more_tensors_per_expert() -> None:
    balancer, plan = balancer_and_plan()
    with refused(ValueError, "kMaxRowParts"):
        balancer.replicate(weights_of(MAX_ROW_PARTS + 1), plan)


def test_a_balancer_refuses_no_tensors_at_all() -> None:
    balancer, plan = balancer_and_plan()
    with refused(ValueError, "weights has 0 tensors", "1 to 16"):
        balancer.replicate(weights_of(0), plan)


# ---- tokens --------------------------------------------------------------------------------------


def counts_with_total(total: int) -> torch.Tensor:
    counts = np.zeros((4, 8), dtype=np.int64)
    counts[:, 0] = total // 4
    counts[3, 7] = total - counts.sum()
    return torch.from_numpy(counts).int()


def test_the_most_tokens_are_planned_exactly() -> None:
    counts = counts_with_total(MAX_TOKENS)
    for plan in (
        topoep.solve(counts, FOUR_RANKS, 2, Even()),
        Balancer(FOUR_RANKS, 8, 2, objective=Even()).plan_from_counts(counts),
    ):
        stats = plan.stats()
        assert stats["tokens"] == MAX_TOKENS
        assert stats["max_load"] == 2**29
        assert plan.split().sum(dtype=torch.int64) == MAX_TOKENS
        plan.validate()


def test_solve_refuses_more_tokens() -> None:
    with refused(ValueError, "2147483648", "2147483647", "kMaxTokens"):
        topoep.solve(counts_with_total(MAX_TOKENS + 1), FOUR_RANKS)


def test_a_balancer_refuses_counts_of_more_tokens() -> None:
    with refused(ValueError, "kMaxTokens"):
        Balancer(FOUR_RANKS, 8).plan_from_counts(counts_with_total(MAX_TOKENS + 1))


def test_the_raw_op_refuses_more_tokens_to_solve() -> None:
    for counts in (counts_with_total(MAX_TOKENS + 1), torch.full((4, 8), MAX_TOKENS).int()):
        with refused(RuntimeError, "solve", f"{counts.sum(dtype=torch.int64)}", "kMaxTokens"):
            raw_solve(counts, FOUR_RANKS.table())


def test_the_raw_op_refuses_more_tokens_to_split() -> None:
    with refused(RuntimeError, "split", "kMaxTokens"):
        ops.split(
            torch.full((4, 8), MAX_TOKENS).int(), FOUR_RANKS.table(), zeros(4, 1) - 1, zeros(4, 1)
        )


def test_more_ids_than_a_plan_counts_are_refused() -> None:
    many = zeros(1, 1).expand(2**25, 64)  # 2^31 ids without memory
    with refused(RuntimeError, "histogram", "2147483648", "kMaxTokens"):
        ops.histogram(many, 8)
    with refused(RuntimeError, "reroute", "2147483648", "kMaxTokens"):
        raw_reroute(many)


def test_a_balancer_refuses_ids_that_may_exceed_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every rank may have as many as this one, so the limit is per rank. Counting 2^31 ids would
    # take minutes: the check comes before it.
    balancer, plan = balancer_and_plan()
    most = MAX_TOKENS // 4
    monkeypatch.setattr(ops, "histogram", lambda ids, experts: (zeros(experts), zeros()))
    assert balancer.plan([zeros(1, 1).expand(most, 1)] * 4).stats()["tokens"] == 0
    with refused(ValueError, "536870912", "4 ranks", "kMaxTokens"):
        balancer.plan([zeros(1, 1).expand(most + 1, 1)] * 4)
    with refused(ValueError, "kMaxTokens"):
        balancer.reroute([zeros(1, 1).expand(most + 1, 1)] * 4, plan)


# ---- objectives and candidates -------------------------------------------------------------------


def test_the_ends_of_the_objectives_work() -> None:
    counts = counts_with_total(1000)
    for objective in (Balance(0.0, 1), Balance(1000.0, 1024), Even(1), Even(1024)):
        topoep.solve(counts, FOUR_RANKS, 1, objective).validate()
    assert topoep.solve(counts, FOUR_RANKS, 1, Balance(1000.0)).stats()["copies"] == 0


@pytest.mark.parametrize("make", [Balance, Even])
@pytest.mark.parametrize("weight", [0, 1025, -3])
def test_other_weights_of_a_copy_are_refused(make: Callable[..., object], weight: int) -> None:
    with refused(ValueError, f"cross_weight={weight}", "1 to 1024"):
        make(cross_weight=weight)


@pytest.mark.parametrize("tolerance", [-0.01, 1000.5, float("nan"), float("inf")])
def test_other_tolerances_are_refused(tolerance: float) -> None:
    with refused(ValueError, f"tolerance is {tolerance}", "from 0 to 1000"):
        Balance(tolerance)


@pytest.mark.parametrize("tolerance", [1e-7, 5e-324])
def test_tolerances_below_a_millionth_are_refused(tolerance: float) -> None:
    with refused(ValueError, f"tolerance is {tolerance}", "1e-06 or more, or 0"):
        Balance(tolerance)
    assert [Balance(t).tolerance_ppm for t in (0, 1e-6, 1 / 3)] == [0, 1, 333_333]


@pytest.mark.parametrize("cap", ["mean+0.00001%", "node+0.00001%", "mean+1.00005%"])
def test_caps_between_parts_per_million_are_refused(cap: str) -> None:
    with refused(ValueError, repr(cap), "a multiple of 0.0001 %"):
        Candidate(cap)
    for percent, ppm in (("0.0001", 1), ("1.00000", 10_000), ("100000", 10**9)):
        assert Candidate(f"mean+{percent}%").pack() >> 16 & (1 << 40) - 1 == ppm


@pytest.mark.parametrize(
    ("objective", "part"),
    [
        ([0, 10_000], "objective"),
        ([0, 10_000, 3, 4], "objective"),
        ([3, 0, 3], "objective kind"),
        ([2, 0, 3], "objective"),
        ([-1, 0, 3], "objective kind"),
        ([0, -1, 3], "tolerance_ppm"),
        ([0, 10**9 + 1, 3], "tolerance_ppm"),
        ([0, 0, 0], "cross_weight"),
        ([1, 0, 1025], "cross_weight"),
    ],
)
def test_the_raw_op_refuses_other_objectives(objective: list[int], part: str) -> None:
    with refused(RuntimeError, "solve", part):
        ops.solve(zeros(4, 8), FOUR_RANKS.table(), 1, [EMPTY], objective, -1)


@pytest.mark.parametrize("rank", [-2, 4])
def test_the_raw_op_refuses_ranks_that_do_not_exist(rank: int) -> None:
    with refused(RuntimeError, "solve", f"rank is {rank}", "-1 to 3"):
        ops.solve(zeros(4, 8), FOUR_RANKS.table(), 1, [EMPTY], EVEN, rank)


@pytest.mark.parametrize("cap", ["", "mean", "mean+1", "mean+-1%", "load#0", "load#", "Mean+1%",
                                 "mean+\u0661%", "node+1.\u0665%", "load#1\u0662"])  # fmt: skip
def test_caps_of_another_form_are_refused(cap: str) -> None:
    with refused(ValueError, repr(cap), "'mean+1%'", "'load#5'", "'none'"):
        topoep.solve(zeros(4, 8), FOUR_RANKS, candidates=[Candidate(cap)])


@pytest.mark.parametrize("policy", ["", "H", "H2211", "H32112", "H21112", "H22112b", "F1", "G"])
def test_policies_of_another_form_are_refused(policy: str) -> None:
    with refused(ValueError, repr(policy), "'F'", "'H22112'"):
        topoep.solve(zeros(4, 8), FOUR_RANKS, candidates=[Candidate("mean+1%", policy)])


def solved_unless_refused(counts: torch.Tensor, cap: str) -> Plan | None:
    try:
        return topoep.solve(counts, Topology(2, 1), 1, Even(), candidates=[Candidate(cap)])
    except ValueError:
        return None


@pytest.mark.parametrize("rule", ["mean", "node"])
@pytest.mark.parametrize("percent", [100_000, 900_000, 109_951_163, 500_000_000])
def test_huge_percents_are_computed_exactly_or_refused(rule: str, percent: int) -> None:
    # Neither the product of tokens and parts per million may wrap around, nor the packed candidate.
    # Below such a cap there is nothing to do.
    for hot in (MAX_TOKENS - 1, 2**30 + 2**28, 1000):
        counts = torch.tensor([[hot, 0], [0, 1]]).int()
        plan = solved_unless_refused(counts, f"{rule}+{percent}%")
        assert plan is None or plan.stats()["copies"] == 0


@pytest.mark.parametrize("k", [3, 1024, 1025, 2**40 - 1, 2**40 + 1])
def test_every_rank_load_beyond_the_last_is_the_least_or_refused(k: int) -> None:
    # docs/algorithm.md, section 2: the least load if k > R.
    counts = torch.tensor([[50, 0], [50, 40]]).int()
    plan = solved_unless_refused(counts, f"load#{k}")
    assert plan is None or plan.slot_tokens.tolist() == [[0], [30]]


# ---- wrong types and shapes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "kind", "parts"),
    [
        ([[1] * 8] * 4, TypeError, ["list", "torch.Tensor"]),
        (np.ones((4, 8), np.int32), TypeError, ["ndarray", "torch.Tensor"]),
        (zeros(4, 8, dtype=torch.int64), TypeError, ["torch.int64", "int32", "counts.to("]),
        (zeros(4, 8, dtype=torch.float32), TypeError, ["torch.float32", "int32"]),
        (zeros(4, 8, dtype=torch.bool), TypeError, ["torch.bool", "int32"]),
        (zeros(32), ValueError, ["(32,)", "[R, E]"]),
        (zeros(1, 4, 8), ValueError, ["(1, 4, 8)", "[R, E]"]),
        (zeros(3, 8), ValueError, ["(3, 8)", "(4, 8)"]),
        (zeros(8, 4), ValueError, ["(8, 4)", "(4, 4)"]),
        (zeros(4, 9), ValueError, ["9", "4 ranks", "nearest that works: 8"]),
        (zeros(4, 2), ValueError, ["2", "4 ranks", "nearest that works: 4"]),
        (zeros(4, 8) - 1, ValueError, ["counts[0, 0] is -1", "negative"]),
    ],
    ids=["list", "ndarray", "int64", "float", "bool", "1d", "3d", "ranks", "swapped", "indivisible",
         "too_few", "negative"],
)  # fmt: skip
def test_solve_explains_bad_counts(counts: Any, kind: type[Exception], parts: list[str]) -> None:
    with refused(kind, *parts):
        topoep.solve(counts, FOUR_RANKS)


def test_the_place_of_a_negative_count_is_named() -> None:
    counts = zeros(4, 8)
    counts[2, 5] = -7
    with refused(ValueError, "counts[2, 5] is -7"):
        topoep.solve(counts, FOUR_RANKS)
    with refused(ValueError, "counts[2, 5] is -7"):
        Balancer(FOUR_RANKS, 8).plan_from_counts(counts)
    with refused(RuntimeError, "counts[2, 5] is -7"):
        raw_solve(counts, FOUR_RANKS.table())


@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        (zeros(4, 8, dtype=torch.int64), ["counts", "Long", "Int"]),
        (zeros(8), ["counts", "2 dimensions"]),
        (zeros(4, 9), ["9 experts", "4 ranks"]),
        (zeros(2, 8), ["topology table", "2 ranks"]),
    ],
)
def test_the_raw_op_explains_bad_counts(counts: torch.Tensor, parts: list[str]) -> None:
    with refused(RuntimeError, "solve", *parts):
        raw_solve(counts, FOUR_RANKS.table())
    with refused(RuntimeError, "split", *parts):
        ops.split(counts, FOUR_RANKS.table(), zeros(4, 1) - 1, zeros(4, 1))


def test_the_raw_ops_explain_a_bad_table() -> None:
    table = FOUR_RANKS.table()
    with refused(RuntimeError, "topology", "Long"):
        raw_solve(zeros(4, 8), table.long())
    with refused(RuntimeError, "topology table", "4 ranks", "Topology.table()"):
        raw_solve(zeros(4, 8), table.repeat(2))
    with refused(RuntimeError, "topology table", "4 ranks", "Topology.table()"):
        raw_solve(zeros(4, 8), table[:-3])


def test_the_raw_split_explains_bad_slots() -> None:
    counts, table = zeros(4, 8), FOUR_RANKS.table()
    with refused(RuntimeError, "slot_expert", "slot_tokens"):
        ops.split(counts, table, zeros(4, 1), zeros(4, 2))
    with refused(RuntimeError, "slot_expert"):
        ops.split(counts, table, zeros(3, 1), zeros(3, 1))
    with refused(RuntimeError, "slot_tokens", "Long"):
        ops.split(counts, table, zeros(4, 1), zeros(4, 1, dtype=torch.int64))


WRONG_IDS = [
    (zeros(3, 2, dtype=torch.int16), TypeError, ["torch.int16", "int32 or int64", "ids.to("]),
    (zeros(3, 2, dtype=torch.uint8), TypeError, ["torch.uint8", "int32 or int64"]),
    (zeros(3, 2, dtype=torch.float32), TypeError, ["torch.float32", "int32 or int64"]),
    (zeros(3, 2, dtype=torch.bool), TypeError, ["torch.bool", "int32 or int64"]),
    (np.zeros((3, 2), np.int64), TypeError, ["ndarray", "torch.Tensor"]),
    (zeros(6), ValueError, ["(6,)", "[tokens, top_k]"]),
    (zeros(3, 2, 1), ValueError, ["(3, 2, 1)", "[tokens, top_k]"]),
]


@pytest.mark.parametrize(("ids", "kind", "parts"), WRONG_IDS)
def test_a_balancer_explains_bad_ids(ids: Any, kind: type[Exception], parts: list[str]) -> None:
    balancer, plan = balancer_and_plan()
    with refused(kind, "topk_ids", *parts):
        balancer.plan([ids] * 4)
    with refused(kind, "topk_ids", *parts):
        balancer.reroute([ids] * 4, plan)


@pytest.mark.parametrize("ids", [zeros(3, 2, dtype=torch.int16), zeros(3, 2, dtype=torch.float32)])
def test_the_raw_ops_explain_ids_of_another_type(ids: torch.Tensor) -> None:
    with refused(RuntimeError, "histogram", "int32 or int64"):
        ops.histogram(ids, 8)
    with refused(RuntimeError, "reroute", "int32 or int64"):
        raw_reroute(ids)


@pytest.mark.parametrize("ids", [zeros(6), zeros(3, 2, 1)])
def test_the_raw_ops_explain_ids_of_another_shape(ids: torch.Tensor) -> None:
    with refused(RuntimeError, "histogram", "[tokens, top_k]"):
        ops.histogram(ids, 8)
    with refused(RuntimeError, "reroute", "[tokens, top_k]"):
        raw_reroute(ids)


def test_the_raw_reroute_explains_tables_that_do_not_belong_together() -> None:
    ids = zeros(3, 2)
    good = (zeros(16), zeros(9), zeros(8))
    assert tuple(ops.reroute(ids, *good, 4).shape) == (3, 2)
    for send, offsets, slots, ranks in (
        (zeros(15), *good[1:], 4),
        (good[0], zeros(8), good[2], 4),
        (*good[:2], zeros(7), 4),
        (*good, 3),
        (*good, 0),
        (zeros(0), *good[1:], 4),
    ):
        with refused(RuntimeError, "reroute", "do not belong to one plan"):
            ops.reroute(ids, send, offsets, slots, ranks)
    with refused(RuntimeError, "send", "Long"):
        ops.reroute(ids, good[0].long(), *good[1:], 4)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_simulated_balancer_wants_ids_of_every_rank(number: int) -> None:
    balancer, plan = balancer_and_plan()
    with refused(ValueError, "topk_ids", "4 ranks", "list"):
        balancer.plan([zeros(3, 2)] * number)
    with refused(ValueError, "topk_ids", "4 ranks", "list"):
        balancer.reroute([zeros(3, 2)] * number, plan)
    with refused(ValueError, "topk_ids", "4 ranks", "list"):
        balancer.plan(zeros(3, 2))


def test_ids_on_another_device_than_the_plan_are_refused() -> None:
    balancer, plan = balancer_and_plan()
    with refused(ValueError, "meta", "cpu"):
        balancer.reroute([torch.zeros(3, 2, dtype=torch.int32, device="meta")] * 4, plan)


def test_plans_of_others_are_refused() -> None:
    balancer, _ = balancer_and_plan()
    ids = [zeros(3, 2)] * 4
    with refused(ValueError, "topoep.solve", "plan_from_counts"):
        balancer.reroute(ids, topoep.solve(zeros(4, 8), FOUR_RANKS))
    with refused(ValueError, "another Balancer"):
        balancer.reroute(ids, balancer_and_plan()[1])
    with refused(TypeError, "NoneType", "topoep.Plan"):
        balancer.reroute(ids, None)


@pytest.mark.parametrize("value", [torch.tensor(1), np.array(1), np.bool_(1), np.float32(1)])
def test_integers_are_those_of_python_or_numpy(value: Any) -> None:
    counts = zeros(4, 8)
    for call in (
        lambda: topoep.solve(counts, FOUR_RANKS, value),
        lambda: Balancer(FOUR_RANKS, 8, value),
        lambda: Balance(0.01, value),
        lambda: Topology(value, 2),
    ):
        with refused(TypeError, f"{value!r}", "expected an int (.item() gives"):
            call()


def test_small_integers_of_numpy_do_not_overflow() -> None:
    balancer = Balancer(Topology(1, 2), np.int16(252), np.int8(4))
    assert balancer.num_physical_experts == 2 * (126 + 4)
    assert type(balancer.config.spare_slots) is int


def test_nodes_may_come_as_a_tensor_or_an_array() -> None:
    for nodes in (torch.tensor([3, 3, 7, 7]), np.array([3, 3, 7, 7])):
        assert Topology(node_of_rank=nodes) == FOUR_RANKS


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({}, "num_nodes and ranks_per_node, or node_of_rank"),
        ({"num_nodes": 2}, "num_nodes and ranks_per_node, or node_of_rank"),
        ({"num_nodes": 2, "ranks_per_node": 0}, "at least 1"),
        ({"num_nodes": -1, "ranks_per_node": 2}, "at least 1"),
        ({"num_nodes": 1, "ranks_per_node": 1, "node_of_rank": [0]}, "not both"),
    ],
)
def test_a_topology_explains_bad_arguments(arguments: dict[str, Any], part: str) -> None:
    with refused(ValueError, part):
        Topology(**arguments)


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_lists_every_limit_of_the_core():
    root = Path(__file__).resolve().parents[1]
    page = (root / "docs/limits.md").read_text()
    header = (root / "csrc/core/limits.h").read_text()
    names = re.findall(r"constexpr \w+ (kMax\w+)", header)
    assert len(names) >= 8
    assert [name for name in names if f"`{name}`" not in page] == []
