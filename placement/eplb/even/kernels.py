"""The search under the equal split, compiled. Called only by `placement.eplb.even`.

Score of a state: weighted sum over scenarios of the hottest gpu's load, plus `_SPREAD` times the
weighted mean of squared loads over the even load, which decides between states whose hottest gpu is
the same. Ties: the first change found, in order of slot and expert.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

BoolArray = npt.NDArray[np.bool_]

_SPREAD = 0.01
_STEP_MIN = 1e-9
"""Share of the even load by which a change must lower the score; rounding stays below it."""


class State(NamedTuple):
    """Everything a change is judged by.

    rows: int64 [gpus, slots]. demand: float64 [scenarios, experts]. weights: float64 [scenarios].
    replicas: int64 [experts]. hosts: int64 [experts, replicas], the gpu of each of the first
    `replicas`. holds: bool [gpus, experts]. loads: float64 [scenarios, gpus]. order: int64
    [scenarios, gpus], gpus from hottest to coolest. touched: bool [gpus] and change: float64
    [scenarios, gpus] are scratch, all False and 0 between calls.
    """

    rows: npt.NDArray[np.int64]
    demand: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    replicas: npt.NDArray[np.int64]
    hosts: npt.NDArray[np.int64]
    holds: npt.NDArray[np.bool_]
    loads: npt.NDArray[np.float64]
    order: npt.NDArray[np.int64]
    touched: npt.NDArray[np.bool_]
    change: npt.NDArray[np.float64]


def make_state(
    rows: npt.NDArray[np.int64],
    demand: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
) -> State:
    """State of rows whose figures are not counted yet; the arrays are taken as they are."""
    num_gpus, num_experts = len(rows), demand.shape[1]
    return State(
        rows=rows,
        demand=demand,
        weights=weights,
        replicas=np.zeros(num_experts, dtype=np.int64),
        hosts=np.zeros((num_experts, rows.size), dtype=np.int64),
        holds=np.zeros((num_gpus, num_experts), dtype=np.bool_),
        loads=np.zeros((len(demand), num_gpus), dtype=np.float64),
        order=np.zeros((len(demand), num_gpus), dtype=np.int64),
        touched=np.zeros(num_gpus, dtype=np.bool_),
        change=np.zeros((len(demand), num_gpus), dtype=np.float64),
    )


@njit(cache=True, nogil=True)
def _recount(state: State) -> None:
    """Everything anew from the rows: figures are a function of the state, not of the way to it."""
    rows, count, hosts = state.rows, state.replicas, state.hosts
    count[:] = 0
    state.holds[:] = False
    state.loads[:] = 0.0
    for g in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            expert = rows[g, i]
            hosts[expert, count[expert]] = g
            count[expert] += 1
            state.holds[g, expert] = True
    for s in range(state.demand.shape[0]):
        for g in range(rows.shape[0]):
            for i in range(rows.shape[1]):
                state.loads[s, g] += state.demand[s, rows[g, i]] / count[rows[g, i]]
        state.order[s] = np.argsort(-state.loads[s], kind="mergesort")


@njit(cache=True, nogil=True)
def _gain(state: State, fair: float) -> float:
    """Score lost by the change in scratch, which is cleared. Positive is better."""
    touched, change, loads = state.touched, state.change, state.loads
    num_gpus = loads.shape[1]
    gain = 0.0
    for s in range(loads.shape[0]):
        top = 0.0
        for place in range(num_gpus):
            if not touched[state.order[s, place]]:
                top = loads[s, state.order[s, place]]
                break
        squares = 0.0
        for g in range(num_gpus):
            if touched[g]:
                after = loads[s, g] + change[s, g]
                top = max(top, after)
                squares += loads[s, g] * loads[s, g] - after * after
                change[s, g] = 0.0
        lost = loads[s, state.order[s, 0]] - top
        gain += state.weights[s] * (lost + _SPREAD * squares / (num_gpus * fair))
    touched[:] = False
    return gain


@njit(cache=True, nogil=True)
def _overwrite_gain(state: State, fair: float, g: int, victim: int, expert: int) -> float:
    """A slot of g holds `expert` instead of `victim`, which has another replica."""
    count, demand = state.replicas, state.demand
    for k in range(count[expert]):
        state.touched[state.hosts[expert, k]] = True
    for k in range(count[victim]):
        state.touched[state.hosts[victim, k]] = True
    state.touched[g] = True
    for s in range(demand.shape[0]):
        less = demand[s, expert] / (count[expert] + 1) - demand[s, expert] / count[expert]
        more = demand[s, victim] / (count[victim] - 1) - demand[s, victim] / count[victim]
        for k in range(count[expert]):
            state.change[s, state.hosts[expert, k]] += less
        for k in range(count[victim]):
            state.change[s, state.hosts[victim, k]] += more
        state.change[s, g] += demand[s, expert] / (count[expert] + 1)
        state.change[s, g] -= demand[s, victim] / (count[victim] - 1)
    return _gain(state, fair)


@njit(cache=True, nogil=True)
def _exchange_gain(
    state: State, fair: float, g: int, expert: int, other_g: int, other: int
) -> float:
    """g gives `expert` to other_g and takes `other`."""
    state.touched[g] = True
    state.touched[other_g] = True
    for s in range(state.demand.shape[0]):
        shift = state.demand[s, expert] / state.replicas[expert]
        shift -= state.demand[s, other] / state.replicas[other]
        state.change[s, g] -= shift
        state.change[s, other_g] += shift
    return _gain(state, fair)


@njit(cache=True, nogil=True)
def _hot(state: State) -> tuple[BoolArray, BoolArray]:
    """Which gpus are the hottest of a scenario, and which experts lie on such a gpu."""
    hot = np.zeros(state.rows.shape[0], np.bool_)
    on_hot = np.zeros(state.demand.shape[1], np.bool_)
    for s in range(state.loads.shape[0]):
        hot[state.order[s, 0]] = True
    for g in range(state.rows.shape[0]):
        if hot[g]:
            for i in range(state.rows.shape[1]):
                on_hot[state.rows[g, i]] = True
    return hot, on_hot


@njit(cache=True, nogil=True)
def _best_overwrite(
    state: State, fair: float, hot: BoolArray, on_hot: BoolArray
) -> tuple[float, int, int, int]:
    """(gain, gpu, slot, expert) of the best slot write, gpu -1 where none lowers the score.

    Only changes that touch a hottest gpu can lower it: an expert of such a gpu goes elsewhere, or a
    surplus replica leaves it.
    """
    best = (_STEP_MIN * fair, -1, -1, -1)
    for g in range(state.rows.shape[0]):
        for i in range(state.rows.shape[1]):
            victim = state.rows[g, i]
            if state.replicas[victim] < 2:
                continue
            for expert in range(state.demand.shape[1]):
                if state.holds[g, expert] or not (hot[g] or on_hot[expert]):
                    continue
                gain = _overwrite_gain(state, fair, g, victim, expert)
                if gain > best[0]:
                    best = (gain, g, i, expert)
    return best


@njit(cache=True, nogil=True)
def _best_exchange(state: State, fair: float, hot: BoolArray) -> tuple[float, int, int, int, int]:
    """(gain of a write, gpu, slot, other gpu, its slot) of the best exchange with a hottest gpu."""
    rows = state.rows
    best = (_STEP_MIN * fair, -1, -1, -1, -1)
    for g in range(rows.shape[0]):
        if not hot[g]:
            continue
        for i in range(rows.shape[1]):
            for other_g in range(rows.shape[0]):
                if other_g == g or state.holds[other_g, rows[g, i]]:
                    continue
                for j in range(rows.shape[1]):
                    if state.holds[g, rows[other_g, j]]:
                        continue
                    gain = _exchange_gain(state, fair, g, rows[g, i], other_g, rows[other_g, j]) / 2
                    if gain > best[0]:
                        best = (gain, g, i, other_g, j)
    return best


@njit(cache=True, nogil=True)
def _step(state: State, fair: float, writes_left: int) -> bool:
    """Make the best change. Whether there was one."""
    rows = state.rows
    hot, on_hot = _hot(state)
    gain, g, i, expert = _best_overwrite(state, fair, hot, on_hot)
    if writes_left > 1:
        traded, from_g, from_i, other_g, j = _best_exchange(state, fair, hot)
        if from_g >= 0 and traded > gain:
            rows[from_g, from_i], rows[other_g, j] = rows[other_g, j], rows[from_g, from_i]
            return True
    if g < 0:
        return False
    rows[g, i] = expert
    return True


@njit(cache=True, nogil=True)
def _top(state: State) -> float:
    total = 0.0
    for s in range(state.loads.shape[0]):
        total += state.weights[s] * state.loads[s, state.order[s, 0]]
    return total


@njit(cache=True, nogil=True)
def descend(state: State, writes: int, enough: float, gain_min: float) -> None:
    """Change `state.rows` in place; see the package's text for the rule."""
    rows = state.rows
    start = rows.copy()
    kept = rows.copy()
    _recount(state)
    fair = 0.0
    for s in range(state.demand.shape[0]):
        fair += state.weights[s] * state.demand[s].sum() / rows.shape[0]
    lowest = _top(state)
    if fair >= enough * lowest:
        return
    written = 0
    for _ in range(4 * rows.size):
        # No state has a hottest gpu below the even load, so this many writes cannot pay any more.
        if written >= writes or fair + gain_min * fair * written >= lowest:
            break
        if not _step(state, fair, writes - written):
            break
        _recount(state)
        written = (rows != start).sum()
        price = _top(state) + gain_min * fair * written
        if price < lowest - _STEP_MIN * fair:
            lowest = price
            kept[:] = rows
    rows[:] = kept


def warm() -> None:
    """Compile every kernel by planning for two gpus of two slots."""
    rows = np.array([[0, 1], [0, 2]], dtype=np.int64)
    descend(make_state(rows, np.array([[2.0, 5.0, 3.0]]), np.ones(1)), 4, 1.0, 0.0)
