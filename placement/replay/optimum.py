"""The offline optimum of a small instance: the cheapest way through all windows, all known at once.

Responsible for one number to divide by. Exact: dynamic programming over every layout of one layer.
Plans nothing. Called by `comparison` and benchmarks.

The cost of a path is the sum over windows of max_over_mean under the exact split + price x slots
written. A state is one set of experts a rank; writes from one state to the next are added up rank
by rank, so a step of the program relaxes one rank after the other. The exact split needs no
splitter: with whole pairs, the least maximum is the largest ceil(pairs of S / ranks that host any
of S) over all sets S of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout

FloatArray = npt.NDArray[np.float64]

STATES_MAX: Final = 1 << 18
"""Layouts of the program: 4 ranks of 2 slots and 6 experts have 50,625."""
CELLS_MAX: Final = 1 << 24
"""Layouts x sets of experts: bytes of the table of hosts."""


def offline_optimum(
    start: ExpertLayout,
    capacity: Sequence[int],
    counts: npt.NDArray[np.int64],
    prices: Sequence[float],
) -> tuple[float, ...] | None:
    """Least cost from `start` through all windows, by price; None where the instance is too large
    (more than one layer, STATES_MAX, CELLS_MAX).

    capacity: slots of each rank that may be filled. counts: int64 [windows, experts]. The optimum
    may write before the first window. Writes take no time and need no staging.
    """
    if start.num_layers > 1:
        return None
    held = [frozenset(row[row >= 0].tolist()) for row in start.slots]
    choices = _choices(held, capacity, start.num_experts)
    if choices is None:
        return None
    hosts = _hosts(choices, start.num_experts)
    served = [_max_over_mean(window, hosts) for window in counts]
    return tuple(_cheapest(choices, held, served, price) for price in prices)


def _choices(
    held: Sequence[frozenset[int]], capacity: Sequence[int], num_experts: int
) -> list[list[frozenset[int]]] | None:
    """Sets a rank may hold. Never fewer experts than at first: to give one up saves nothing."""
    states = 1
    choices: list[list[frozenset[int]]] = []
    for now, most in zip(held, capacity, strict=True):
        sizes = range(len(now), max(len(now), min(most, num_experts)) + 1)
        found: list[frozenset[int]] = []
        for size in sizes:
            for members in combinations(range(num_experts), size):
                found.append(frozenset(members))
                if states * len(found) > STATES_MAX:
                    return None
        states *= len(found)
        choices.append(found)
    return choices if states << num_experts <= CELLS_MAX else None


def _hosts(choices: Sequence[Sequence[frozenset[int]]], num_experts: int) -> npt.NDArray[np.uint8]:
    """Ranks that host any expert of a set, for each set (as bits) and state: uint8 [sets, states
    by rank...]."""
    shape = tuple(len(sets) for sets in choices)
    hosts = np.zeros((1 << num_experts, *shape), dtype=np.uint8)
    bits = np.arange(1 << num_experts)
    for rank, sets in enumerate(choices):
        mask = np.array([sum(1 << e for e in held) for held in sets])
        hit = (bits[:, None] & mask) != 0
        along = [1] * len(shape)
        along[rank] = len(sets)
        hosts += hit.reshape(len(bits), *along).astype(np.uint8)
    return hosts


def _max_over_mean(counts: npt.NDArray[np.int64], hosts: npt.NDArray[np.uint8]) -> FloatArray:
    """Of one window, for each state: 1 without load, infinite where an expert has no host."""
    num_ranks = hosts.ndim - 1
    worst = np.zeros(hosts.shape[1:], dtype=np.float64)
    for bits in range(1, len(hosts)):
        pairs = sum(int(count) for e, count in enumerate(counts) if bits >> e & 1)
        by_hosts = np.array([np.inf, *(-(-pairs // n) for n in range(1, num_ranks + 1))])
        np.maximum(worst, by_hosts[hosts[bits]], out=worst)
    mean = float(counts.sum()) / num_ranks
    return worst / mean if mean > 0 else np.where(np.isinf(worst), np.inf, 1.0)


def _cheapest(
    choices: Sequence[Sequence[frozenset[int]]],
    held: Sequence[frozenset[int]],
    served: Sequence[FloatArray],
    price: float,
) -> float:
    prices = [
        np.array([[price * len(after - before) for after in sets] for before in sets])
        for sets in choices
    ]
    cost = np.full(tuple(len(sets) for sets in choices), np.inf)
    cost[tuple(sets.index(now) for sets, now in zip(choices, held, strict=True))] = 0.0
    for window in served:
        flat = cost
        for table in prices:
            # The rank in turn is the first axis, and the last one when it is done.
            before = flat.reshape(len(table), -1)
            after = np.full_like(before, np.inf)
            for row, paid in zip(before, table, strict=True):
                np.minimum(after, row + paid[:, None], out=after)
            flat = np.ascontiguousarray(after.T)
        cost = flat.reshape(cost.shape) + window
    return float(cost.min())
