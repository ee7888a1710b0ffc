# SPDX-License-Identifier: Apache-2.0
"""The baselines make the plans that their descriptions say, and the measures measure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topoep
from tests import strategies
from tests.strategies import Case, examples

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from baselines import BASELINES, moonep, taot, two_stage
from baselines.score import least_max_load, quota_of_plan, score

from topoep.simulator import workloads as loads
from topoep.simulator.planners import echo, eplb, llep, no_balancing, ultraep
from topoep.simulator.planners.base import Baseline, home_quota

# Two nodes of two ranks with two experts each. Rank loads 200, 140, 20 and 40, the mean is 100.
TOTALS = [150, 50, 70, 70, 20, 0, 40, 0]
TOPOLOGY = topoep.Topology(2, 2)


def counts_of(totals: list[int], scale: int = 1) -> np.ndarray:
    """Every rank sends a quarter of the tokens of every expert, the rest comes from rank 0."""
    total = np.array(totals, dtype=np.int32) * scale
    counts = np.tile(total // 4, (4, 1))
    counts[0] += total - counts.sum(0)
    return counts


def moved(quota: np.ndarray) -> dict[tuple[int, int], int]:
    """(expert, rank): tokens, of all copies."""
    home = np.arange(8) // 2
    ranks, experts = np.nonzero(quota)
    return {
        (int(e), int(r)): int(quota[r, e])
        for r, e in zip(ranks, experts, strict=True)
        if r != home[e]
    }


def loads_of(quota: np.ndarray) -> list[int]:
    return quota.sum(1).tolist()


# ---- worked by hand ------------------------------------------------------------------------------


def test_no_balancing_serves_everything_at_home():
    quota = no_balancing.plan(counts_of(TOTALS), TOPOLOGY, 2)
    assert moved(quota) == {}
    assert loads_of(quota) == [200, 140, 20, 40]


def test_echo_one_shot_drops_the_flow_that_finds_no_slot():
    # Spill: 100 of expert 0, 40 of expert 3. Spare: 80 on rank 2, 60 on rank 3. Laid end to end,
    # expert 0 covers rank 2 and 20 of rank 3, expert 3 the rest of rank 3, which keeps the larger.
    quota = echo.plan_one_shot(counts_of(TOTALS), TOPOLOGY, 1)
    assert moved(quota) == {(0, 2): 80, (3, 3): 40}
    assert loads_of(quota) == [120, 100, 100, 80]
    quota = echo.plan_one_shot(counts_of(TOTALS), TOPOLOGY, 2)
    assert moved(quota) == {(0, 2): 80, (0, 3): 20, (3, 3): 40}
    assert loads_of(quota) == [100, 100, 100, 100]


def test_echo_bin_packing_takes_from_the_first_bucket_that_is_not_empty():
    # Buckets are 14 wide: expert 0 (100) in the first, expert 3 (40) in the sixth. Rank 2 takes 80
    # of expert 0, whose rest of 20 goes to the seventh; rank 3 then finds expert 3 first.
    quota = echo.plan_bin_packing(counts_of(TOTALS), TOPOLOGY, 1)
    assert moved(quota) == {(0, 2): 80, (3, 3): 40}
    # With 100 and 90 to spill and spares of 95 each, the rest of 5 finds no rank.
    quota = echo.plan_bin_packing(counts_of([140, 60, 50, 140, 0, 5, 5, 0]), TOPOLOGY, 1)
    assert moved(quota) == {(0, 2): 95, (3, 3): 90}


def test_taot_fills_slots_in_rounds():
    # Both cold ranks propose expert 0; it takes the one where more tokens fit. Rank 3 then proposes
    # expert 3 (40 tokens) rather than the 20 left of expert 0, for which a second round is needed.
    quota = taot.plan(counts_of(TOTALS), TOPOLOGY, 1)
    assert moved(quota) == {(0, 2): 80, (3, 3): 40}
    quota = taot.plan(counts_of(TOTALS), TOPOLOGY, 2)
    assert moved(quota) == {(0, 2): 80, (0, 3): 20, (3, 3): 40}


def test_taot_prefers_the_own_node():
    # Two hot ranks with 60 too much, two cold ones with room for 60: the nodes decide.
    counts = counts_of([110, 50, 60, 100, 40, 0, 40, 0])
    crossed = topoep.Topology(node_of_rank=[0, 1, 1, 0])
    assert moved(taot.plan(counts, crossed, 1)) == {(0, 3): 60, (3, 2): 60}
    assert moved(taot.plan(counts, topoep.Topology(node_of_rank=[0, 1, 0, 1]), 1)) == {
        (0, 2): 60,
        (3, 3): 60,
    }


def test_ultraep_searches_when_few_large_copies_do_not_fit():
    # At 1, 3 and 5 % above the mean rank 0 needs both cold ranks and rank 1 finds none. The search
    # ends at 11000, where rank 2 alone takes what rank 0 has too much.
    quota = ultraep.plan_one_domain(counts_of(TOTALS, 100), TOPOLOGY, 1)
    assert moved(quota) == {(0, 2): 9000, (2, 3): 3000}
    assert max(loads_of(quota)) == 11000


def test_ultraep_keeps_copies_in_the_node():
    # Node means 17000 and 3000: one per cent above them is 17170 and 3030.
    quota = ultraep.plan_per_node(counts_of(TOTALS, 100), TOPOLOGY, 1)
    assert moved(quota) == {(0, 1): 2830, (6, 2): 970}
    assert loads_of(quota) == [17170, 16830, 2970, 3030]


def test_moonep_fills_every_rank_by_one_donor():
    # Rank 0 fills rank 2 with 80; rank 1, now the hottest, fills rank 3 with 60 and is 20 short,
    # which rank 0 gives.
    quota = moonep.plan(counts_of(TOTALS), TOPOLOGY, 0)
    assert moved(quota) == {(0, 2): 80, (0, 1): 20, (2, 3): 60}
    assert loads_of(quota) == [100, 100, 100, 100]


def test_moonep_gives_the_first_ranks_the_odd_tokens():
    quota = moonep.plan(counts_of([151, 51, 70, 70, 20, 0, 40, 0]), TOPOLOGY, 0)
    assert loads_of(quota) == [101, 101, 100, 100]


def test_llep_spills_to_the_least_loaded_rank():
    # Expert 0 keeps 5000 next to the waiting expert 1, fills rank 2 and gives 2000 to rank 3, which
    # expert 2 fills up.
    quota = llep.plan(counts_of(TOTALS, 100), TOPOLOGY, 0)
    assert moved(quota) == {(0, 2): 8000, (0, 3): 2000, (2, 3): 4000}
    assert loads_of(quota) == [10000, 10000, 10000, 10000]


def test_llep_forces_what_fits_nowhere_onto_the_least_loaded_rank():
    # Rooms of 500 are too small for pieces of 1024 tokens, so rank 1 gets all 1500 of expert 0.
    # Expert 2 then has room for 8500 at home, its 1000 fit nowhere either; at last 500 fit exactly.
    quota = llep.plan(counts_of([11500, 0, 9500, 0, 9500, 0, 9500, 0]), TOPOLOGY, 0)
    assert moved(quota) == {(0, 1): 1500, (2, 2): 1000, (4, 3): 500}
    assert loads_of(quota) == [10000, 10000, 10000, 10000]


def test_two_stage_copies_for_traffic_then_halves_differences():
    # Node 1 sends 7500 tokens to expert 0 and 3500 to experts 2 and 3, more than 3072 each; its two
    # slots take experts 0 and 2. Loads are then 12500, 10500, 9500, 7500. Rank 0 gives rank 1 half
    # of the difference; rank 3 has no slot left for anything of rank 2.
    quota = two_stage.plan(counts_of(TOTALS, 100), TOPOLOGY, 1)
    assert moved(quota) == {(0, 2): 7500, (2, 3): 3500, (0, 1): 1000}
    assert loads_of(quota) == [11500, 11500, 9500, 7500]


def test_two_stage_without_worthwhile_traffic_balances_inside_nodes_only():
    quota = two_stage.plan(counts_of(TOTALS), TOPOLOGY, 1)
    assert loads_of(quota) == [170, 170, 30, 30]


def test_eplb_global():
    # Replicas: expert 0 three times 50, experts 2 and 3 twice 35. Packed largest first: expert 0 on
    # ranks 0, 1, 2; expert 1 on 3; 6 on 0; 2 on 1 and 2; 3 on 3 and 1; 4 on 2.
    quota = eplb.plan_global(counts_of(TOTALS), TOPOLOGY, 1)
    assert quota.tolist() == [
        [50, 0, 0, 0, 0, 0, 40, 0],
        [50, 0, 35, 35, 0, 0, 0, 0],
        [50, 0, 35, 0, 20, 0, 0, 0],
        [0, 50, 0, 35, 0, 0, 0, 0],
    ]


def test_eplb_hierarchical():
    # Node 0 gets experts 0, 6, 4 and 7 (210 tokens), node 1 gets 2, 3, 1 and 5. The third replica
    # of expert 0 goes to rank 0, where there is one already.
    quota = eplb.plan_hierarchical(counts_of(TOTALS), TOPOLOGY, 1)
    assert quota.tolist() == [
        [100, 0, 0, 0, 0, 0, 0, 0],
        [50, 0, 0, 0, 20, 0, 40, 0],
        [0, 50, 0, 35, 0, 0, 0, 0],
        [0, 0, 70, 35, 0, 0, 0, 0],
    ]


def test_eplb_plans_from_history():
    history = counts_of([100, 100, 100, 100, 100, 100, 100, 100])
    quota = eplb.plan_global(counts_of(TOTALS), TOPOLOGY, 0, history)
    assert loads_of(quota) == [170, 50, 110, 70]  # experts dealt out in order: 0 and 4, 1 and 5, ..


# ---- figures that others published ---------------------------------------------------------------


def figures(baseline: Callable[..., np.ndarray], kind: str, ranks: int, skew: float) -> list[float]:
    """Mean copies, weighted copies as published, and imbalance with two slots."""
    topology = topoep.Topology(ranks // 8, 8)
    found = []
    for seed in range(3):
        counts = loads.skewed(kind, ranks, 256, skew, seed, 1)[0]
        found.append(score(counts, topology, baseline(counts, topology, 2), 2))
    columns = [(s.copies, s.published, s.imbalance) for s in found]
    return [float(value) for value in np.mean(columns, 0)]


@pytest.mark.parametrize(("skew", "published"), [(1.51, 38), (2.01, 46), (3.03, 51)])
def test_ultraep_makes_as_many_copies_as_its_readme_says(skew: float, published: int):
    copies, _, imbalance = figures(ultraep.plan_one_domain, "zipf_rank", 64, skew)
    assert copies == pytest.approx(published, abs=4)
    assert imbalance == pytest.approx(1.01, abs=1e-4)


@pytest.mark.parametrize(("ranks", "least", "most"), [(16, 15, 18), (32, 37, 44)])
def test_taot_costs_what_its_paper_says(ranks: int, least: int, most: int):
    # For 10 to 50 % of initial imbalance. The paper's loads are not public: about its range.
    for skew in (1.1, 1.3, 1.5):
        _, weighted, _ = figures(taot.plan, "lognormal", ranks, skew)
        assert least - 5 <= weighted <= most + 5


@pytest.mark.parametrize(("ranks", "least", "most"), [(16, 24, 30), (32, 71, 75)])
def test_echo_costs_what_the_taot_paper_says(ranks: int, least: int, most: int):
    for skew in (1.1, 1.3, 1.5):
        _, weighted, _ = figures(echo.plan_one_shot, "lognormal", ranks, skew)
        assert least - 5 <= weighted <= most + 5


# ---- measures ------------------------------------------------------------------------------------


def test_a_second_copy_in_a_remote_node_is_fanned_out():
    counts = counts_of(TOTALS)
    quota = home_quota(counts)
    for rank, tokens in ((1, 30), (2, 30), (3, 10)):
        quota[0, 0] -= tokens
        quota[rank, 0] += tokens
    found = score(counts, TOPOLOGY, quota, 1)
    assert (found.copies, found.pairs, found.cross_copies) == (3, 1, 2)
    assert (found.weighted, found.published) == (5, 7)
    assert (found.max_load, found.imbalance) == (170, 1.7)
    assert found.fault is None


def test_moved_homes_cost_nothing_but_are_counted():
    counts = counts_of(TOTALS)
    quota = home_quota(counts)[[2, 3, 0, 1]]  # the nodes change places
    found = score(counts, TOPOLOGY, quota, 0, moves_homes=True)
    assert (found.weighted, found.published, found.moved_homes) == (0, 0, 6)
    assert score(counts, TOPOLOGY, quota, 0).fault == "more copies than slots"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ((0, 0, 1), "quotas do not sum to the counts"),
        ((3, 1, -1), "negative quota"),
    ],
)
def test_faults_are_found(change: tuple[int, int, int], fault: str):
    counts = counts_of(TOTALS)
    quota = home_quota(counts)
    rank, expert, tokens = change
    quota[rank, expert] += tokens
    assert score(counts, TOPOLOGY, quota, 2).fault == fault


@given(strategies.cases())
@settings(max_examples=examples(60))
def test_measures_agree_with_the_statistics_of_a_plan(case: Case):
    plan = topoep.solve(case.tensor, case.topology, case.spare_slots)
    found = score(case.counts, case.topology, quota_of_plan(plan), case.spare_slots)
    stats = plan.stats()
    assert found.fault is None
    assert found.max_load == stats["max_load"]
    assert found.cross_tokens == stats["cross_node_tokens"]
    # A copy without tokens is none here, and TopoEP makes none.
    assert (found.copies, found.pairs) == (stats["copies"], stats["cross_node_copies"])
    assert found.weighted == stats["weighted_copies"]
    assert found.imbalance == pytest.approx(float(stats["imbalance"]))


@given(strategies.cases())
@settings(max_examples=examples(60))
def test_no_plan_is_below_the_lower_bound(case: Case):
    plan = topoep.solve(case.tensor, case.topology, case.spare_slots, topoep.Even())
    bound = least_max_load(case.counts, case.spare_slots)
    assert -(-int(case.counts.sum()) // case.num_ranks) <= bound <= plan.stats()["max_load"]


def test_lower_bound_counts_slots():
    # Rank 0 has four experts of 100; the others can take one each: 100 stay, and 300 is one too
    # many for the mean of 100 only if a rank has no slot.
    counts = np.zeros((4, 16), dtype=np.int32)
    counts[0, :4] = 100
    assert least_max_load(counts, 1) == 100
    assert least_max_load(counts, 0) == 400
    counts[0, :4] = 60
    counts[0, 4:] = 10  # ranks 1 to 3 have 40, rank 0 has 240, the mean is 90
    assert least_max_load(counts, 1) == 90
    counts = np.zeros((2, 16), dtype=np.int32)
    counts[0, :8] = 10  # one slot takes 10 of 80
    assert least_max_load(counts, 1) == 70


# ---- all baselines on everything -----------------------------------------------------------------


def limit_of(baseline: Baseline, case: Case) -> int | None:
    limits = {"spare": case.spare_slots, "one": 1, "home": case.home_slots, "any": None}
    return limits[baseline.slots]


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda b: b.name)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_tokens_are_conserved_and_slots_suffice(baseline: Baseline, data: st.DataObject):
    case = data.draw(st.one_of(strategies.cases(), strategies.tiny_cases()))
    before = case.counts.copy()
    history = None
    if data.draw(st.booleans()):
        history = np.roll(case.counts, 1, axis=1)
    quota = baseline.plan(case.counts, case.topology, case.spare_slots, history)
    assert quota.shape == case.counts.shape
    found = score(case.counts, case.topology, quota, limit_of(baseline, case), baseline.moves_homes)
    assert found.fault is None
    assert (case.counts == before).all()
    again = baseline.plan(case.counts, case.topology, case.spare_slots, history)
    assert (quota == again).all()


@given(strategies.cases())
@settings(max_examples=examples(60))
def test_moonep_is_exact(case: Case):
    loads_after = moonep.plan(case.counts, case.topology, 0).sum(1)
    assert loads_after.max() - loads_after.min() <= 1


@given(strategies.cases())
@settings(max_examples=examples(60))
def test_ultraep_per_node_crosses_no_nodes(case: Case):
    quota = ultraep.plan_per_node(case.counts, case.topology, case.spare_slots)
    assert score(case.counts, case.topology, quota, case.spare_slots).pairs == 0


# ---- loads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(loads.FAMILIES))
@pytest.mark.parametrize("target", [1.3, 3.0])
def test_skew_is_what_was_asked_for(kind: str, target: float):
    counts = loads.skewed(kind, 32, 256, target, seed=5)
    assert counts.shape == (2, 32, 256)
    assert counts.dtype == np.int32
    assert (counts == loads.skewed(kind, 32, 256, target, seed=5)).all()
    assert (counts != loads.skewed(kind, 32, 256, target, seed=6)).any()
    for microbatch in counts:
        assert loads.skew(microbatch.sum(0), 32) == pytest.approx(target, rel=0.04)
        assert microbatch.max() <= loads.TOKENS
        assert microbatch.sum() == pytest.approx(32 * loads.TOKENS * loads.TOP_K, rel=0.01)


def test_skew_that_cannot_be_reached_is_refused():
    with pytest.raises(ValueError, match="never has skew 40"):
        loads.skewed("zipf_rank", 32, 256, 40.0, seed=0)


def test_zipf_rank_heats_one_node_and_its_shuffle_does_not():
    per_node = loads.skewed("zipf_rank", 32, 256, 3.0, 0)[0].sum(0).reshape(4, -1).sum(1)
    assert (np.diff(per_node) < 0).all()
    shuffled = loads.skewed("zipf_rank_shuf", 32, 256, 3.0, 0)[0].sum(0).reshape(32, -1).sum(1)
    assert (np.diff(shuffled) > 0).any()


def test_megatron_patterns():
    def rank_loads(workload: str, step: int = 0) -> np.ndarray:
        return loads.megatron(workload, 16, 128, 0, step).sum(0).reshape(16, 8).sum(1)

    assert set(loads.MEGATRON) == {f"W{i}" for i in range(8)}
    assert len(set(rank_loads("W0").tolist())) == 1
    hot = rank_loads("W1")
    assert hot[:4].min() > 3 * hot[4:].max()
    assert rank_loads("W2")[0] > 5 * rank_loads("W2")[1:].max()
    for even in ("W3", "W4"):
        assert rank_loads(even).max() < 1.05 * rank_loads(even).mean()
    sent = loads.megatron("W4", 16, 128, 0, 0).sum(1)
    assert sent.max() > 1.5 * sent.min()
    assert rank_loads("W5")[8:].max() == 0
    places = [int(rank_loads("W6", step).argmax()) for step in range(30)]
    assert [places[i] for i in range(0, 30, 3)] == [places[i + 2] for i in range(0, 30, 3)]
    assert len(set(places)) > 2
    skews = [rank_loads("W7", step).max() / rank_loads("W7", step).mean() for step in range(8)]
    assert [skew > 2 for skew in skews] == [False, False, False, True] * 2


def test_sequences_change_and_history_is_the_last_full_window():
    for make in (loads.drifting, loads.bursty):
        sequence = make(8, 64, 1.5, 3, 12)
        assert sequence.shape == (12, 8, 64)
        assert (sequence == make(8, 64, 1.5, 3, 12)).all()
    numbered = np.arange(7, dtype=np.int32).reshape(7, 1, 1)
    pairs = [(int(c.item()), int(h.item())) for c, h in loads.with_history(numbered, 2)]
    assert pairs == [(2, 1), (3, 1), (4, 5), (5, 5), (6, 9)]


def test_concentrated_load():
    counts = loads.concentrated(8, 64, 80, 4, 2, seed=0)
    share = counts[..., :4].sum() / counts.sum()
    assert share == pytest.approx(0.8, abs=0.01)
    assert (counts.sum(2) == loads.TOKENS * 2).all()


def test_no_baseline_is_worth_more_than_topoep_on_the_worked_example():
    for baseline in BASELINES:
        if baseline.moves_homes:
            continue
        counts = counts_of(TOTALS, 100)
        quota = baseline.plan(counts, TOPOLOGY, 2)
        theirs = score(counts, TOPOLOGY, quota, None)
        tolerance = theirs.imbalance - 1 + 1e-6
        plan = topoep.solve(torch.from_numpy(counts), TOPOLOGY, 2, topoep.Balance(tolerance))
        assert plan.stats()["weighted_copies"] <= theirs.weighted, baseline.name
