# SPDX-License-Identifier: Apache-2.0
"""The same routing with other numbers of tokens or ranks."""

from __future__ import annotations

import dataclasses

import numpy as np

from topoep.memory import check_memory
from topoep.plan import MAX_TOKENS
from topoep.topology import Topology
from topoep.trace import Trace


def rescale(trace: Trace, tokens: int) -> Trace:
    """The same routing with another number of tokens per rank and microbatch, on average.

    Every count is multiplied and rounded to the nearest integer, so shares stay what they are
    within half a token.

    Raises:
        ValueError: tokens is not positive or more than a plan covers, the trace is empty, or there
            is no memory for another one of its size.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens}; expected at least 1")
    routed = trace.counts.sum((2, 3), dtype=np.int64)
    if not routed.any():
        raise ValueError("the trace holds no tokens to scale")
    factor = tokens * trace.top_k * trace.num_ranks / float(routed.mean())
    fullest = int(routed.max()) * factor
    if fullest > MAX_TOKENS:
        raise ValueError(
            f"tokens={tokens}: the fullest microbatch would have {fullest:.0f} routed tokens; a "
            f"plan covers at most {MAX_TOKENS} (kMaxTokens)"
        )
    check_memory(trace.counts.nbytes, "the scaled trace", "scale a part of it")
    counts = np.empty_like(trace.counts)
    for step, values in enumerate(trace.counts):  # step by step: counts can be gigabytes
        counts[step] = np.rint(values * factor)
    meta = {**trace.meta, "scaled_to_tokens": tokens}
    return dataclasses.replace(trace, counts=counts, meta=meta)


def regroup(trace: Trace, topology: Topology) -> Trace:
    """The same routing over another number of expert-parallel ranks.

    With fewer ranks the first of them stay; with more, ranks are repeated in turn: source ranks
    route alike, since data is dealt to them at random.

    Raises:
        ValueError: E does not divide over the ranks.
    """
    ranks = topology.num_ranks
    sources = np.arange(ranks) % trace.num_ranks
    meta = {**trace.meta, "regrouped_from_ranks": trace.num_ranks}
    return Trace(
        np.ascontiguousarray(trace.counts[:, :, sources]),
        topology.node_of_rank,
        trace.top_k,
        meta=meta,
    )
