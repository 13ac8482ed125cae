"""The offline optimum of a small placement game, and what a layout costs under the exact split.

The game: one layer of `num_experts` experts on `num_ranks` equal ranks of `slots_per_rank` slots.
In each window one pays max_over_mean of the window's demand on one's layout, under the exact split,
and `price` for each slot written between windows. Layouts that differ only in the names of ranks
cost the same, so a *state* is a layout up to relabelling of ranks; the distance of two states is
the fewest writes over all relabellings. Example: 6 experts, 4 ranks, 2 slots give 375 states.

Why no state with an empty slot or a duplicate: whoever empties a slot may as well keep what is in
it, for free, so the optimum over full states is the optimum over all layouts.

Exact split: the least possible maximum is max over sets R of ranks of (demand of the experts whose
replicas all lie in R) / |R| (a minimum cut of the split's flow), so 15 sums price a state on 4
ranks.

Responsible for states, distances, costs and the dynamic programme. Must never look at a policy.
Called by the ratio benchmark and its tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, combinations_with_replacement, permutations
from math import comb

import numpy as np
import numpy.typing as npt
from numba import njit

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

STATES_MAX = 5_000
"""Above it the table of distances (bytes, squared) and a step of the programme grow too dear."""


@dataclass(frozen=True)
class Game:
    """Sizes of the game. Raises ValueError where the slots do not hold all experts, a rank would
    need a duplicate, or there are more than STATES_MAX states."""

    num_experts: int = 6
    num_ranks: int = 4
    slots_per_rank: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.slots_per_rank <= self.num_experts:
            raise ValueError(
                f"slots_per_rank must lie in [1, {self.num_experts} experts], got "
                f"{self.slots_per_rank}"
            )
        if self.num_ranks * self.slots_per_rank < self.num_experts:
            raise ValueError(
                f"{self.num_ranks} ranks x {self.slots_per_rank} slots do not hold "
                f"{self.num_experts} experts"
            )
        rows = comb(self.num_experts, self.slots_per_rank)
        bound = comb(rows + self.num_ranks - 1, self.num_ranks)
        if bound > STATES_MAX:
            raise ValueError(f"up to {bound} states; at most {STATES_MAX} are kept, choose less")

    @cached_property
    def states(self) -> IntArray:
        """Bit mask of the experts of each rank, ascending in a state: int64 [states, ranks]."""
        rows = sorted(
            sum(1 << expert for expert in row)
            for row in combinations(range(self.num_experts), self.slots_per_rank)
        )
        everyone = (1 << self.num_experts) - 1
        return np.array(
            [
                state
                for state in combinations_with_replacement(rows, self.num_ranks)
                if np.bitwise_or.reduce(state) == everyone
            ],
            dtype=np.int64,
        )

    @cached_property
    def writes(self) -> npt.NDArray[np.uint8]:
        """Fewest slot writes from state to state: uint8 [states, states]."""
        orders = np.array(list(permutations(range(self.num_ranks))), dtype=np.int64)
        return _distances(self.states, orders)

    @cached_property
    def within(self) -> IntArray:
        """Experts whose replicas all lie in a set of ranks, by state: int64 [states, 2^ranks - 1]
        masks. Column s is the set with bit mask s + 1."""
        return np.array([_within(state, self.num_experts) for state in self.states])

    def number_of(self, rows: Sequence[int]) -> int:
        """State of a layout given as one mask of experts a rank, in any order of ranks.

        Raises ValueError where it is none (an empty slot, a missing expert).
        """
        found = np.flatnonzero((self.states == np.sort(np.asarray(rows))).all(axis=1))
        if not len(found):
            raise ValueError(f"{list(rows)} is not a full layout of this game")
        return int(found[0])

    def costs(self, demand: npt.ArrayLike) -> FloatArray:
        """max_over_mean of every state for every window: float64 [windows, states].

        demand: [windows, experts], pairs; a window without any costs 1 everywhere.
        """
        pairs = np.asarray(demand, dtype=np.float64)
        sums = pairs @ _members(self.num_experts).T
        sizes = np.array([bin(s).count("1") for s in range(1, 1 << self.num_ranks)], dtype=float)
        worst = np.zeros((len(pairs), len(self.states)))
        for column, size in enumerate(sizes):
            worst = np.maximum(worst, sums[:, self.within[:, column]] / size)
        mean = pairs.sum(axis=1, keepdims=True) / self.num_ranks
        return np.where(mean > 0, worst / np.where(mean > 0, mean, 1.0), 1.0)


def layout_cost(rows: Sequence[int], demand: npt.ArrayLike) -> float:
    """max_over_mean of any layout (one mask of experts a rank, empty slots allowed) for one window.

    demand: [experts], pairs. Two ranks hold experts 0, 1 and 1, 2; expert 1 can be shared:

    >>> layout_cost([0b011, 0b110], [2, 8, 0])
    1.0
    >>> layout_cost([0b011, 0b110], [6, 0, 2])
    1.5

    Raises ValueError where an expert with demand has no replica.
    """
    pairs = np.asarray(demand, dtype=np.float64)
    if any(pairs[e] > 0 and not any(row >> e & 1 for row in rows) for e in range(len(pairs))):
        raise ValueError(f"an expert with demand {pairs.tolist()} has no replica in {list(rows)}")
    total = float(pairs.sum())
    if total <= 0.0:
        return 1.0
    sums = _members(len(pairs)) @ pairs
    inside = _within(np.asarray(rows), len(pairs))
    sizes = np.array([bin(s).count("1") for s in range(1, 1 << len(rows))], dtype=float)
    return float((sums[inside] / sizes).max()) * len(rows) / total


@dataclass(frozen=True, eq=False)
class Optimum:
    """Least sum of max_over_mean and price x writes, and one way to it. path: state in each
    window."""

    total: float
    writes: int
    path: IntArray


def optimum(game: Game, costs: FloatArray, start: int, price: float) -> Optimum:
    """Dynamic programme over all states: move (or not) before each window, then pay it.

    costs: float64 [windows, states] of `Game.costs`. start: state before the first window. Ties go
    to the lowest state.
    """
    value, came_from = _programme(costs, game.writes, start, price)
    path = np.empty(len(costs), dtype=np.int64)
    at = int(np.argmin(value))
    total = float(value[at])
    for window in range(len(costs) - 1, -1, -1):
        path[window] = at
        at = int(came_from[window, at])
    steps = np.concatenate(([start], path))
    writes = int(game.writes[steps[:-1], steps[1:]].astype(np.int64).sum())
    return Optimum(total, writes, path)


def work_step(served: FloatArray, writes: npt.ArrayLike, price: float) -> FloatArray:
    """Work function after a window: least cost of serving all windows so far and ending in a state.

    served: float64 [states], the work function before the window plus the window's costs.
    """
    after: FloatArray = (served[:, None] + price * np.asarray(writes)).min(axis=0)
    return after


@lru_cache(maxsize=8)
def _members(num_experts: int) -> FloatArray:
    """Row m: 1 for the experts in mask m. float64 [2^experts, experts]."""
    masks = np.arange(1 << num_experts)
    return (masks[:, None] >> np.arange(num_experts) & 1).astype(np.float64)


def _within(state: IntArray, num_experts: int) -> IntArray:
    everyone = (1 << num_experts) - 1
    out = []
    for ranks in range(1, 1 << len(state)):
        outside = 0
        for rank, mask in enumerate(state.tolist()):
            if not ranks >> rank & 1:
                outside |= mask
        out.append(everyone & ~outside)
    return np.array(out, dtype=np.int64)


@njit(cache=True, nogil=True)
def _distances(states: IntArray, orders: IntArray) -> npt.NDArray[np.uint8]:
    n, ranks = states.shape
    out = np.zeros((n, n), np.uint8)
    for a in range(n):
        for b in range(n):
            best = 255
            for order in orders:
                count = 0
                for rank in range(ranks):
                    fresh = states[b, order[rank]] & ~states[a, rank]
                    while fresh:
                        fresh &= fresh - 1
                        count += 1
                best = min(best, count)
            out[a, b] = best
    return out


@njit(cache=True, nogil=True)
def _programme(
    costs: FloatArray, writes: npt.NDArray[np.uint8], start: int, price: float
) -> tuple[FloatArray, npt.NDArray[np.int32]]:
    windows, n = costs.shape
    came_from = np.zeros((windows, n), np.int32)
    value = np.full(n, np.inf)
    value[start] = 0.0
    fresh = np.empty(n)
    for window in range(windows):
        for b in range(n):
            best, best_at = np.inf, 0
            for a in range(n):
                cost = value[a] + price * writes[a, b]
                if cost < best:
                    best, best_at = cost, a
            fresh[b] = best + costs[window, b]
            came_from[window, b] = best_at
        value[:] = fresh
    return value, came_from
