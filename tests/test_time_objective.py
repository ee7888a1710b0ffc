# SPDX-License-Identifier: Apache-2.0
"""With the objective Time only those copies are made that pay, and those that pay are made."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topoep
from tests import strategies
from tests.strategies import Case, examples
from topoep import Candidate, CostModel, Even, Plan, Time, Topology
from topoep.hardware import HARDWARE
from topoep.portfolio import GENERAL

# (hidden, intermediate) of experts, from small to very large ones.
SHAPES = {
    "Qwen3-30B-A3B": (2048, 768),
    "DeepSeek-V3": (7168, 2048),
    "gpt-oss-120b": (2880, 2880),
    "Mixtral-8x7B": (4096, 14336),
}
NODES = Topology(4, 4)
EXPERTS = 64


def stat(plan: Plan, name: str) -> int:
    return int(plan.stats()[name])


def figures(plan: Plan, *names: str) -> tuple[int, ...]:
    return tuple(stat(plan, name) for name in names)


def routed(popularity: np.ndarray, seed: int, tokens: int = 16384) -> torch.Tensor:
    """int32 [R, E] of ranks that draw so many routed ids each; popularity is [E] or [R, E]."""
    rng = np.random.default_rng(seed)
    rows = np.broadcast_to(popularity, (NODES.num_ranks, EXPERTS))
    counts = [rng.multinomial(tokens, row / row.sum()) for row in rows]
    return torch.from_numpy(np.stack(counts).astype(np.int32))


def uniform(seed: int) -> torch.Tensor:
    return routed(np.ones(EXPERTS), seed)


def near_balance(seed: int) -> torch.Tensor:
    """A few percent between the fullest rank and the mean."""
    return routed(np.random.default_rng(seed).lognormal(0, 0.1, EXPERTS), seed)


def hot_rank(seed: int) -> torch.Tensor:
    """One rank of every node is hot, the nodes are even."""
    popularity = np.ones((4, 4, EXPERTS // 16))
    popularity[:, seed % 4] = 4
    return routed(popularity.ravel(), seed)


def hot_node(seed: int) -> torch.Tensor:
    """One node is hot, the ranks inside it are even."""
    popularity = np.ones((4, EXPERTS // 4))
    popularity[seed % 4] = 4
    return routed(popularity.ravel(), seed)


def collapsed(seed: int) -> torch.Tensor:
    """Nearly all tokens of all ranks go to the same few experts."""
    rng = np.random.default_rng(seed)
    popularity = np.full(EXPERTS, 0.01)
    popularity[rng.choice(EXPERTS, 6, replace=False)] = 1
    return routed(popularity, seed)


def domain_skewed(seed: int) -> torch.Tensor:
    """Each node's tokens prefer 4 experts of its own, which live anywhere; all ranks are even."""
    favourites = np.random.default_rng(seed).permutation(EXPERTS)[:16].reshape(4, 4)
    popularity = np.ones((16, EXPERTS))
    for rank in range(16):
        popularity[rank, favourites[rank // 4]] = 24
    return routed(popularity, seed)


# ---- the right answer ----------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", [name for name in HARDWARE if name != "A100"])
@pytest.mark.parametrize("seed", range(3))
def test_no_copy_where_none_pays(hardware: str, seed: int) -> None:
    # Large experts near balance: a planner that always balances copies, and loses time. (On an A100
    # tokens take so long that four copies pay.)
    counts = near_balance(seed)
    model = CostModel.from_model(*SHAPES["Mixtral-8x7B"], hardware=hardware)
    plan = topoep.solve(counts, NODES, 2, Time(model))
    assert figures(plan, "copies", "candidate") == (0, 0)
    assert stat(plan, "predicted_ns") == stat(plan, "predicted_ns_before")
    assert stat(topoep.solve(counts, NODES, 2, Even()), "copies") > 0


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("seed", range(3))
def test_copies_inside_nodes_where_the_nodes_are_even(hardware: str, seed: int) -> None:
    # Without sharding a single NIC carries a copy that crosses, several times as long as a link.
    model = CostModel.from_model(*SHAPES["DeepSeek-V3"], hardware=hardware, sharded=False)
    plan = topoep.solve(hot_rank(seed), NODES, 2, Time(model))
    copies, across = figures(plan, "copies", "cross_node_copies")
    assert copies > 0
    assert across == 0
    assert stat(plan, "max_load") < 0.6 * stat(plan, "max_load_before")
    assert stat(plan, "predicted_ns") < 0.8 * stat(plan, "predicted_ns_before")


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("seed", range(3))
def test_copies_between_nodes_where_a_node_is_hot(hardware: str, seed: int) -> None:
    model = CostModel.from_model(*SHAPES["Qwen3-30B-A3B"], hardware=hardware)
    plan = topoep.solve(hot_node(seed), NODES, 2, Time(model))
    assert stat(plan, "cross_node_copies") > 0
    assert stat(plan, "max_load") < 0.6 * stat(plan, "max_load_before")
    assert stat(plan, "predicted_ns") < 0.8 * stat(plan, "predicted_ns_before")


def test_the_price_of_the_network_decides_between_the_two() -> None:
    # The same counts: a hot node with uneven ranks.
    counts = hot_node(0) + hot_rank(1)
    cheap = CostModel.from_model(*SHAPES["Qwen3-30B-A3B"])
    dear = dataclasses.replace(cheap, cross_copy=2**29, cross_grad=2**29)
    assert stat(topoep.solve(counts, NODES, 2, Time(cheap)), "cross_node_copies") > 0
    copies, across = figures(
        topoep.solve(counts, NODES, 2, Time(dear)), "copies", "cross_node_copies"
    )
    assert copies > 0
    assert across == 0


# ---- never slower than plain expert parallelism --------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [uniform, near_balance], ids=lambda make: make.__name__)
def test_even_routing_is_never_slower_than_without_copies(shape: str, make) -> None:
    # Predicted time leaves out planning, which is the same for every plan.
    for hardware, dedup, seed in itertools.product(("H800", "B200"), (True, False), range(3)):
        model = CostModel.from_model(*SHAPES[shape], hardware=hardware, dedup=dedup)
        plan = topoep.solve(make(seed), NODES, 2, Time(model))
        assert stat(plan, "predicted_ns") <= stat(plan, "predicted_ns_before")
        assert stat(plan, "max_load") <= stat(plan, "max_load_before")
        if make is uniform and dedup:
            assert stat(plan, "copies") == 0


@settings(max_examples=examples(300))
@given(
    strategies.cases(),
    strategies.cost_models(),
    st.one_of(st.none(), st.lists(strategies.candidates(), max_size=4)),
)
def test_the_winner_is_never_slower_than_without_copies(
    case: Case, model: CostModel, candidates: list[Candidate] | None
) -> None:
    plan = topoep.solve(
        case.tensor, case.topology, case.spare_slots, Time(model), candidates=candidates
    )
    assert stat(plan, "predicted_ns") <= stat(plan, "predicted_ns_before")
    assert stat(plan, "max_load") <= stat(plan, "max_load_before")
    if stat(plan, "copies") > 0:
        assert stat(plan, "predicted_ns") < stat(plan, "predicted_ns_before")


@settings(max_examples=examples(200))
@given(
    strategies.cases(kinds=strategies.SKEWED_KINDS),
    strategies.cost_models(),
    st.lists(strategies.candidates(), min_size=1, max_size=4),
)
def test_the_winner_is_the_fastest_candidate(
    case: Case, model: CostModel, candidates: list[Candidate]
) -> None:
    def time(chosen: list[Candidate]) -> int:
        plan = topoep.solve(
            case.tensor, case.topology, case.spare_slots, Time(model), candidates=chosen
        )
        return stat(plan, "predicted_ns")

    assert time(candidates) == min(time([candidate]) for candidate in candidates)


# ---- locality ------------------------------------------------------------------------------------

# Two nodes of one rank; each rank uses both experts alike, so that loads are even and 1000 tokens
# cross the network each way.
BOTH = torch.full((2, 2), 1000, dtype=torch.int32)


def copied_for_locality(cross_copy: int, cross_grad: int, network_row: int = 1) -> Plan:
    model = CostModel(
        token=10, instance=0, copy=0, cross_copy=cross_copy, grad=0, cross_grad=cross_grad,
        network_row=network_row, interference=0,
    )  # fmt: skip
    return topoep.solve(BOTH, Topology(2, 1), 1, Time(model))


def test_even_loads_are_copied_where_the_tokens_cost_more_than_the_weights() -> None:
    # All but one token stay: 4 exchanges of 1 token instead of 1000, for 2 * 1000 + 1992 ns.
    plan = copied_for_locality(1000, 1992)
    assert plan.slot_expert.tolist() == [[1], [0]]
    assert plan.slot_tokens.tolist() == [[999], [999]]
    assert plan.split().tolist() == [[1000, 999, 1, 0], [1, 0, 1000, 999]]
    assert figures(plan, "cross_node_tokens_before", "cross_node_tokens") == (2000, 2)
    assert figures(plan, "predicted_ns_before", "predicted_ns") == (24_000, 20_000 + 4 + 3992)


@pytest.mark.parametrize(
    ("cross_copy", "cross_grad", "network_row"),
    [
        (1000, 1996, 1),  # as long as without
        (1000, 2001, 1),  # longer
        (0, 4001, 1),  # not even tried: 1001 tokens would be worth it
        (1000, 1992, 0),  # the network is free
    ],
)
def test_even_loads_stay_where_the_weights_cost_more(
    cross_copy: int, cross_grad: int, network_row: int
) -> None:
    plan = copied_for_locality(cross_copy, cross_grad, network_row)
    assert figures(plan, "copies", "cross_node_tokens") == (0, 2000)


@pytest.mark.parametrize("make", [collapsed, domain_skewed], ids=lambda make: make.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_skewed_sources_stop_crossing_the_network(make, seed: int) -> None:
    counts = make(seed)
    model = CostModel.from_model(*SHAPES["Qwen3-30B-A3B"], hardware="H800", dedup=False)
    plan = topoep.solve(counts, NODES, 2, Time(model))
    general = topoep.solve(counts, NODES, 2, Time(model), candidates=GENERAL)
    before, across = figures(plan, "cross_node_tokens_before", "cross_node_tokens")
    # Without copies for locality the network carries nearly all that it did.
    assert across < 0.5 * before
    assert across < 0.6 * stat(general, "cross_node_tokens")
    assert stat(plan, "predicted_ns") < 0.7 * stat(general, "predicted_ns")
    # A network that is free needs no relief.
    free = Time(dataclasses.replace(model, network_row=0))
    unmoved = topoep.solve(counts, NODES, 2, free)
    assert stat(unmoved, "cross_node_tokens") > across
