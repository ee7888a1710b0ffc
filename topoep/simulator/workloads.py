# SPDX-License-Identifier: Apache-2.0
"""Token counts to plan for: what routers do, what others measure with, and what is awkward.

Every generator is deterministic from its seed and gives int32 counts ``[.., R, E]``: tokens that
source rank r routes to expert e, whose home is rank ``e // (E / R)``. Unless said otherwise a rank
has 8192 tokens and top-8 routing.

Sources, as far as they are others' ideas:

- ``lognormal`` popularity with its width bisected to a given skew: DeepEP pull request 393, which
  found it the best fit to DeepSeek-V3; vLLM issue 57598 does the same.
- ``zipf_rank``: the generator of UltraEP's tests. Rank i is hot as 1 / i^a and its j-th expert as
  1 / j^4, so the hot ranks are neighbours and node 0 holds all of them.
- ``MEGATRON`` W0 to W7: the patterns of Megatron-LM pull request 7488. What each isolates is public
  there; the constants are ours.
- ``concentrated``: the scenario of the LLEP paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from topoep.memory import check_memory
from topoep.plan import MAX_TOKENS
from topoep.topology import Topology
from topoep.trace import MAX_BYTES, MAX_LAYERS, MAX_STEPS, Trace

Counts = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float64]

TOKENS = 8192
TOP_K = 8

_LOCAL_SKEW = 4.0  # of the experts of one rank in zipf_rank
_HOT_NODE_SIGMA = 0.5  # of the experts in hot_node, besides the node's own heat
_MAX_KNOB = 8.0
_SKEW_ERROR = 0.02  # a generated skew may miss its target by this much


def inclusion(weights: Weights, top_k: int) -> Weights:
    """Probability of each expert to be among the k distinct ones of a token.

    Drawing without replacement is close to independent draws with 1 - exp(-rate * weight) and the
    rate at which they sum to k; unlike k times the share it never exceeds one.
    """

    def expected(rate: float) -> float:
        return float((1 - np.exp(-rate * weights)).sum())

    low, high = 0.0, 1.0
    while expected(high) < top_k:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) < top_k else (low, middle)
    return 1 - np.exp(-high * weights)


def sample(
    probability: Weights, ranks: int, rng: np.random.Generator, tokens: int = TOKENS
) -> Counts:
    """Counts ``[R, E]`` of ranks that all like the same experts."""
    return rng.binomial(tokens, probability.clip(0, 1), (ranks, len(probability))).astype(np.int32)


def skew(load: npt.NDArray[np.number], ranks: int) -> float:
    """Largest rank load over the mean, from loads per expert ``[E]``."""
    per_rank = load.reshape(ranks, -1).sum(1)
    return float(per_rank.max() / per_rank.mean())


# ---- popularity with a given skew ----------------------------------------------------------------
# A family gives the weights of the experts for one knob, on which the skew grows.

_Family = Callable[[float], Weights]


def _lognormal(ranks: int, experts: int, node_ranks: int, rng: np.random.Generator) -> _Family:
    normal = rng.standard_normal(experts)
    return lambda knob: np.exp(knob * normal)


def _zipf(ranks: int, experts: int, order: npt.NDArray[np.int64]) -> _Family:
    local = 1 / np.arange(1, experts // ranks + 1) ** _LOCAL_SKEW
    return lambda knob: np.outer((1 / np.arange(1, ranks + 1) ** knob)[order], local).ravel()


def _zipf_rank(ranks: int, experts: int, node_ranks: int, rng: np.random.Generator) -> _Family:
    return _zipf(ranks, experts, np.arange(ranks))


def _zipf_rank_shuf(ranks: int, experts: int, node_ranks: int, rng: np.random.Generator) -> _Family:
    return _zipf(ranks, experts, rng.permutation(ranks))


def _hot_node(ranks: int, experts: int, node_ranks: int, rng: np.random.Generator) -> _Family:
    noise = _HOT_NODE_SIGMA * rng.standard_normal(experts)
    hot = np.arange(experts) // (experts // ranks) < node_ranks
    return lambda knob: np.exp(noise + knob * hot)


FAMILIES = {
    "lognormal": _lognormal,
    "zipf_rank": _zipf_rank,
    "zipf_rank_shuf": _zipf_rank_shuf,
    "hot_node": _hot_node,
}


def popularity(
    kind: str,
    ranks: int,
    experts: int,
    target: float,
    rng: np.random.Generator,
    node_ranks: int = 8,
    top_k: int = TOP_K,
) -> tuple[Weights, Weights]:
    """Weights ``[E]`` of a kind, and the inclusion probabilities ``[E]`` that they lead to.

    The largest rank load over the mean is ``target`` in expectation.

    Raises:
        ValueError: no width of this kind of popularity is as skewed as that.
    """
    for _ in range(50):  # some draws cannot be that skewed: every expert gets at most all tokens
        family = FAMILIES[kind](ranks, experts, node_ranks, rng)
        low, high = 0.0, _MAX_KNOB
        for _ in range(40):
            middle = (low + high) / 2
            reached = skew(inclusion(family(middle), top_k), ranks)
            low, high = (middle, high) if reached < target else (low, middle)
        weights = family(high)
        probability = inclusion(weights, top_k)
        if abs(skew(probability, ranks) / target - 1) <= _SKEW_ERROR:
            return weights, probability
    raise ValueError(f"{kind} over {ranks} ranks and {experts} experts never has skew {target}")


def skewed(
    kind: str,
    ranks: int,
    experts: int,
    target: float,
    seed: int,
    microbatches: int = 2,
    node_ranks: int = 8,
    tokens: int = TOKENS,
    top_k: int = TOP_K,
) -> Counts:
    """Microbatches ``[M, R, E]`` of one skewed popularity of ``FAMILIES``."""
    rng = np.random.default_rng(seed)
    _, probability = popularity(kind, ranks, experts, target, rng, node_ranks, top_k)
    return np.stack([sample(probability, ranks, rng, tokens) for _ in range(microbatches)])


# ---- sequences -----------------------------------------------------------------------------------


def drifting(
    ranks: int,
    experts: int,
    target: float,
    seed: int,
    steps: int = 24,
    memory: float = 0.95,
    tokens: int = TOKENS,
    top_k: int = TOP_K,
) -> Counts:
    """Lognormal popularity that wanders: ``[steps, R, E]``.

    The logarithms follow z' = memory * z + sqrt(1 - memory^2) * normal, so their width stays what
    the first step needs for ``target`` while other experts become the hot ones.
    """
    rng = np.random.default_rng(seed)
    log_weight = np.log(popularity("lognormal", ranks, experts, target, rng, top_k=top_k)[0])
    width = log_weight.std()
    sequence = []
    for _ in range(steps):
        sequence.append(sample(inclusion(np.exp(log_weight), top_k), ranks, rng, tokens))
        change = width * rng.standard_normal(experts)
        log_weight = memory * log_weight + np.sqrt(1 - memory**2) * change
    return np.stack(sequence)


def bursty(
    ranks: int,
    experts: int,
    target: float,
    seed: int,
    steps: int = 24,
    chance: float = 1 / 6,
    tokens: int = TOKENS,
    top_k: int = TOP_K,
) -> Counts:
    """A steady lognormal popularity, and now and then two experts that are 20 times as popular.

    A burst lasts one to three steps; ``[steps, R, E]``.
    """
    rng = np.random.default_rng(seed)
    steady, _ = popularity("lognormal", ranks, experts, target, rng, top_k=top_k)
    boost, left = np.ones(experts), 0
    sequence = []
    for _ in range(steps):
        if left == 0:
            boost = np.ones(experts)
            if rng.random() < chance:
                boost[rng.choice(experts, 2, replace=False)] = 20.0
                left = int(rng.integers(1, 4))
        left = max(left - 1, 0)
        sequence.append(sample(inclusion(steady * boost, top_k), ranks, rng, tokens))
    return np.stack(sequence)


# ---- Megatron-LM's patterns ----------------------------------------------------------------------

MEGATRON = {
    "W0": "round robin",
    "W1": "the first quarter of the experts is hot for 3 of 4 tokens",
    "W2": "a contiguous block of experts, as many as a rank holds, is hot for 3 of 4 tokens",
    "W3": "every other expert is hot for 3 of 4 tokens",
    "W4": "even experts, ragged sources",
    "W5": "half of the experts, and so half of the ranks, get nothing",
    "W6": "a hot block that moves every 3 steps",
    "W7": "even, but W1 in one of 4 steps",
}


def megatron(
    workload: str,
    ranks: int,
    experts: int,
    seed: int,
    step: int,
    tokens: int = TOKENS,
    top_k: int = TOP_K,
) -> Counts:
    """Counts ``[R, E]`` of one step of a pattern of ``MEGATRON``."""
    rng = np.random.default_rng([seed, step, int(workload[1:])])
    even = np.ones(experts)
    block = max(experts // ranks, top_k)
    if workload == "W0":
        routed = tokens * top_k
        first = np.arange(ranks)[:, None] * routed  # the ids go on from rank to rank
        one_more = (np.arange(experts) - first) % experts < routed % experts
        return (routed // experts + one_more).astype(np.int32)
    if workload == "W4":
        own = (tokens * rng.normal(0.5, 0.35, ranks).clip(0, 1)).astype(np.int64)
        share = inclusion(even, top_k)
        return rng.binomial(own[:, None], share, (ranks, experts)).astype(np.int32)
    if workload == "W5":
        alive = np.arange(experts) < experts // 2
        return sample(inclusion(even * alive, top_k), ranks, rng, tokens)
    hot = np.zeros(experts, dtype=bool)
    if workload == "W1" or (workload == "W7" and step % 4 == 3):
        hot[: experts // 4] = True
    elif workload == "W2":
        hot[:block] = True
    elif workload == "W3":
        hot[::2] = True
    elif workload == "W6":
        place = int(np.random.default_rng([seed, step // 3]).integers(experts // block))
        hot[place * block : (place + 1) * block] = True
    if not hot.any():
        return sample(inclusion(even, top_k), ranks, rng, tokens)
    chosen = int(tokens * 0.75)
    return sample(inclusion(even * hot, top_k), ranks, rng, chosen) + sample(
        inclusion(even, top_k), ranks, rng, tokens - chosen
    )


# ---- others --------------------------------------------------------------------------------------


def concentrated(
    ranks: int,
    experts: int,
    percent: int,
    hot_experts: int,
    top_k: int,
    seed: int,
    microbatches: int = 2,
) -> Counts:
    """The LLEP scenario: this many percent of all routed tokens go to the first few experts.

    ``[M, R, E]``. The scenario is synthetic: it ignores that a token's experts are distinct.
    """
    rng = np.random.default_rng([seed, percent, hot_experts])
    share = np.full(experts, (1 - percent / 100) / (experts - hot_experts))
    share[:hot_experts] = percent / 100 / hot_experts
    return rng.multinomial(TOKENS * top_k, share, (microbatches, ranks)).astype(np.int32)


def domain(
    ranks: int, experts: int, width: float, rng: np.random.Generator, node_ranks: int = 8
) -> Counts:
    """Counts ``[R, E]`` of nodes that each have a lognormal popularity of their own."""
    weights = np.exp(width * rng.standard_normal((ranks // node_ranks, experts)))
    parts = [sample(inclusion(weight, TOP_K), node_ranks, rng) for weight in weights]
    return np.concatenate(parts)


def collapsed(ranks: int, experts: int, rng: np.random.Generator, heat: float = 200.0) -> Counts:
    """Counts ``[R, E]`` of a router that sends nearly everything to a few experts."""
    weights = np.ones(experts)
    weights[: max(2, experts // 32)] = heat
    return sample(inclusion(weights, TOP_K), ranks, rng)


def with_history(sequence: Counts, window: int) -> Iterator[tuple[Counts, Counts]]:
    """(counts, history) of every step that has a full window behind it.

    The history is the sum over the last full window, as a balancer sees it that plans anew after
    every ``window`` steps.
    """
    for step in range(window, len(sequence)):
        begin = (step // window - 1) * window
        yield sequence[step], sequence[begin : begin + window].sum(0, dtype=np.int64)


# ---- by name -------------------------------------------------------------------------------------

GENERATORS = (*FAMILIES, "drift", "bursts", *MEGATRON)


def generate(
    name: str,
    topology: Topology,
    experts: int,
    *,
    top_k: int = TOP_K,
    tokens: int = TOKENS,
    skew: float = 1.5,
    steps: int = 8,
    layers: int = 4,
    seed: int = 0,
    report: Callable[[int, int], None] | None = None,
) -> Trace:
    """A generated trace.

    Args:
        name: one of ``GENERATORS``.
        topology: R ranks and their nodes; for ``hot_node`` the first node is the hot one.
        experts: E, a multiple of R.
        top_k: experts per token.
        tokens: of a rank; but for W0 every count is drawn, so that there are a few more or less
            (in W4 about half).
        skew: largest rank load over the mean, for all but the W patterns. 1 is uniform routing.
        steps: microbatches.
        layers: each with a popularity of its own.
        seed: of everything.
        report: called with the number of layers that are made, and of all.

    Raises:
        ValueError: an unknown name, sizes that do not fit each other or this machine's memory, or a
            skew that cannot be reached.
    """
    if name not in GENERATORS:
        raise ValueError(f"generator {name!r}; expected one of {', '.join(GENERATORS)}")
    ranks = topology.num_ranks
    if experts % ranks:
        raise ValueError(f"{experts} experts do not divide over {ranks} ranks")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k}; expected 1 to {experts}")
    if not 1 <= skew < float("inf"):
        raise ValueError(f"skew={skew}; the fullest rank has at least the mean, 1")
    check_sizes(steps, layers, ranks, experts)
    if not 1 <= tokens * top_k * ranks <= MAX_TOKENS:
        raise ValueError(
            f"tokens={tokens}: {ranks} ranks with top-{top_k} route {tokens * top_k * ranks} of "
            f"them in a microbatch; expected at least 1, and a plan covers at most {MAX_TOKENS} "
            "(kMaxTokens)"
        )
    node_ranks = len(topology.ranks_of_node(0))
    sizes = {"tokens": tokens, "top_k": top_k}
    counts = np.empty((steps, layers, ranks, experts), dtype=np.int32)
    for layer in range(layers):
        if report is not None:
            report(layer, layers)
        own = seed * MAX_LAYERS + layer
        if name in MEGATRON:
            part = np.stack(
                [megatron(name, ranks, experts, own, step, **sizes) for step in range(steps)]
            )
        elif name == "drift":
            part = drifting(ranks, experts, skew, own, steps, **sizes)
        elif name == "bursts":
            part = bursty(ranks, experts, skew, own, steps, **sizes)
        else:
            part = skewed(name, ranks, experts, skew, own, steps, node_ranks, **sizes)
        counts[:, layer] = part
    meta = {"generator": name, "seed": seed, "tokens": tokens}
    if name not in MEGATRON:
        meta["skew"] = skew
    return Trace(counts, topology.node_of_rank, top_k, meta=meta)


def check_sizes(steps: int, layers: int, ranks: int, experts: int) -> None:
    """Raises ValueError if a trace of these sizes cannot be made, with what it would take."""
    for what, value, most in (("steps", steps, MAX_STEPS), ("layers", layers, MAX_LAYERS)):
        if not 1 <= value <= most:
            raise ValueError(f"{what}={value}; expected 1 to {most}")
    shape = f"{steps} steps x {layers} layers x {ranks} ranks x {experts} experts"
    total = np.dtype(np.int32).itemsize * steps * layers * ranks * experts
    if total > MAX_BYTES:
        raise ValueError(
            f"{shape} would take {total / 1e9:.1f} GB of memory; a trace may take at most "
            f"{MAX_BYTES / 1e9:.1f} GB (MAX_BYTES): lower steps or layers"
        )
    # While a layer is made there are its steps one by one and joined besides.
    check_memory(total + 2 * total // layers, shape, "lower steps or layers")
