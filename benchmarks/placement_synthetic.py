"""Made-up expert demand at a scale no recorded trace has: 58 layers, 256 experts, top-8.

Responsible for requests whose skew, drift between domains and variation from request to request are
like those of the recorded traces; for nothing else. Every figure from it is simulated. Called by
`placement_traces`.

Model. A layer's popularity within a domain is Zipf with an exponent drawn for each layer; which
expert is how popular is drawn for each domain, correlated between domains. A request multiplies the
popularity of its domain by lognormal noise. A quarter of a window draws its pairs from the mixture
of the requests in it.

What the recorded traces show, and what the constants below give with 64 experts and top-6 (the
shape of DeepSeek-V2-Lite), is checked by the tests of this module.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

DOMAINS: Final = ("first", "second", "third")
NUM_REQUESTS: Final = 390
TOTAL_TOKENS: Final = 200_000
ZIPF_LOW: Final = 0.3
ZIPF_HIGH: Final = 0.6
"""Range of a layer's Zipf exponent within a domain."""
DOMAIN_CORRELATION: Final = 0.2
"""How much of an expert's popularity the domains share: correlation of the scores that rank it."""
REQUEST_SPREAD: Final = 0.4
"""Standard deviation of the log of a request's share of an expert against its domain's."""
LENGTH_SPREAD: Final = 0.8
"""The same for a request's number of tokens."""
CAP_ROUNDS: Final = 64
"""Rounds in which pairs beyond one for each token and expert find another expert."""


class SyntheticRequest(NamedTuple):
    """A request's domain, tokens, and the seed of its noise."""

    domain: str
    tokens: int
    seed: tuple[int, ...]


class SyntheticSource(NamedTuple):
    """requests, and `popularity` float64 [domains, layers, experts] whose rows sum to 1."""

    requests: tuple[SyntheticRequest, ...]
    popularity: FloatArray


def synthetic_source(num_layers: int, num_experts: int, seed: int) -> SyntheticSource:
    """Requests of one seed. Another seed is another model and other requests."""
    generator = np.random.default_rng((seed, num_layers, num_experts))
    popularity = _popularity(generator, num_layers, num_experts)
    lengths = np.exp(generator.normal(0.0, LENGTH_SPREAD, NUM_REQUESTS))
    ends = np.rint(np.cumsum(lengths) / lengths.sum() * TOTAL_TOKENS).astype(np.int64)
    tokens = np.diff(ends, prepend=0)
    domain = generator.integers(0, len(DOMAINS), NUM_REQUESTS)
    return SyntheticSource(
        tuple(
            SyntheticRequest(DOMAINS[int(d)], int(n), (seed, 1, number))
            for number, (d, n) in enumerate(zip(domain, tokens, strict=True))
        ),
        popularity,
    )


def request_share(source: SyntheticSource, number: int) -> FloatArray:
    """Share of each expert in the pairs of a request: float64 [layers, experts], rows sum to 1."""
    request = source.requests[number]
    domain = source.popularity[DOMAINS.index(request.domain)]
    noise = np.random.default_rng(request.seed).normal(0.0, REQUEST_SPREAD, domain.shape)
    share = domain * np.exp(noise)
    result: FloatArray = share / share.sum(axis=1, keepdims=True)
    return result


def synthetic_counts(
    source: SyntheticSource, line: list[int], top_k: int, part_tokens: int, seed: int
) -> IntArray:
    """Pairs of consecutive parts of `part_tokens` tokens: int64 [parts, layers, experts].

    line: numbers of the requests in the order in which they arrive. Every part of every layer sums
    to part_tokens x top_k, and no expert has more than part_tokens. Tokens that fill no part are
    dropped.
    """
    ends = np.cumsum([source.requests[number].tokens for number in line])
    num_parts = int(ends[-1]) // part_tokens
    generator = np.random.default_rng((seed, 2))
    layers, experts = source.popularity.shape[1:]
    mixture = np.zeros((num_parts, layers, experts), dtype=np.float64)
    for number, end in zip(line, ends, strict=True):
        start = int(end) - source.requests[number].tokens
        share = request_share(source, number)
        for part in range(start // part_tokens, min(num_parts, -(-int(end) // part_tokens))):
            low, high = part * part_tokens, (part + 1) * part_tokens
            mixture[part] += share * (min(int(end), high) - max(start, low))
    return _draw(mixture, top_k, part_tokens, generator)


def _draw(
    mixture: FloatArray, top_k: int, part_tokens: int, generator: np.random.Generator
) -> IntArray:
    shares = mixture / mixture.sum(axis=-1, keepdims=True)
    counts = generator.multinomial(part_tokens * top_k, shares).astype(np.int64)
    for _ in range(CAP_ROUNDS):
        over = np.maximum(counts - part_tokens, 0)
        if not over.any():
            return counts
        counts -= over
        room = np.where(counts < part_tokens, shares, 0.0)
        room = room / room.sum(axis=-1, keepdims=True)
        counts += generator.multinomial(over.sum(axis=-1), room)
    raise ValueError(f"popularity too skewed for top-{top_k}: an expert is wanted twice by a token")


def _popularity(generator: np.random.Generator, num_layers: int, num_experts: int) -> FloatArray:
    exponent = generator.uniform(ZIPF_LOW, ZIPF_HIGH, (num_layers, 1))
    by_rank = np.arange(1, num_experts + 1, dtype=np.float64)[None] ** -exponent
    by_rank /= by_rank.sum(axis=1, keepdims=True)
    common = generator.normal(size=(num_layers, num_experts))
    own = generator.normal(size=(len(DOMAINS), num_layers, num_experts))
    score = np.sqrt(DOMAIN_CORRELATION) * common + np.sqrt(1 - DOMAIN_CORRELATION) * own
    rank = np.argsort(np.argsort(-score, axis=-1, kind="stable"), axis=-1, kind="stable")
    result: FloatArray = np.take_along_axis(np.broadcast_to(by_rank, own.shape), rank, axis=-1)
    return result
