# SPDX-License-Identifier: Apache-2.0
"""Shapes at the limits, and more nodes than a warp has lanes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import topoep


@pytest.mark.parametrize(
    ("nodes", "width", "experts", "spare_slots"),
    [(128, 8, 1024, 2), (33, 8, 528, 2), (1024, 1, 1024, 1), (64, 16, 4096, 1)],
)
def test_large_shapes(nodes: int, width: int, experts: int, spare_slots: int) -> None:
    ranks = nodes * width
    rng = np.random.default_rng(nodes)
    popular = np.exp(rng.standard_normal(experts))
    share = popular / popular.sum() * 2048
    counts = torch.from_numpy(rng.poisson(share, (ranks, experts)).astype(np.int32))
    total = counts.sum(0)
    before = total.view(ranks, -1).sum(1).max()
    candidates = [topoep.Candidate("mean+1%", policy) for policy in ("H22112a", "F")]
    topology = topoep.Topology(nodes, width)
    plan = topoep.solve(counts, topology, spare_slots, topoep.Even(), candidates=candidates)

    experts_of, tokens = plan.slot_expert.long(), plan.slot_tokens.long()
    used = experts_of >= 0
    home = torch.arange(experts) // (experts // ranks)
    rank = torch.arange(ranks)[:, None].expand_as(experts_of)
    assert used.sum() == plan.stats()["copies"] > ranks // 4
    assert (home[experts_of[used]] != rank[used]).all()
    pairs = experts_of[used] * ranks + rank[used]
    assert len(pairs.unique()) == len(pairs)
    moved = torch.zeros(experts, dtype=torch.int64).index_add_(0, experts_of[used], tokens[used])
    kept = total - moved
    assert (kept >= (total > 0)).all()
    load = kept.view(ranks, -1).sum(1) + (tokens * used).sum(1)
    assert load.sum() == total.sum()
    assert load.max() == plan.stats()["max_load"] < before


def test_more_ranks_than_the_limit_name_it() -> None:
    with pytest.raises(ValueError, match="kMaxRanks"):
        topoep.Topology(129, 8)
