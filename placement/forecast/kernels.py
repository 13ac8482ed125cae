"""Arithmetic of forecasters, compiled: balance that a forecast would have given, distance of
sub-windows from the load they are compared with, scenarios.

Responsible for loops over phases, layers and experts. Must never choose a forecaster or name a
shift. Called by `forecast` and `forecast.shift`.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

UNFORESEEN = 1e-9
"""Share of a layer's forecast that every expert has at least: what is left out has a place."""


@njit(cache=True, nogil=True, error_model="numpy")
def worst_piece(planned: FloatArray, came: FloatArray, total: float, num_ranks: int) -> float:
    """Largest load that came on one of `num_ranks` pieces of equal planned load; experts in id
    order, those on a cut shared. planned, came: [E].
    """
    foreseen = 0.0
    for expert in range(planned.shape[0]):
        foreseen += planned[expert]
    floor = max(foreseen, 1.0) * UNFORESEEN
    width = (foreseen + floor * planned.shape[0]) / num_ranks
    worst, load, room = 0.0, 0.0, width
    for expert in range(planned.shape[0]):
        left, rest = planned[expert] + floor, came[expert]
        while left > room:
            part = rest * (room / left)
            worst = max(worst, load + part)
            rest -= part
            left -= room
            load, room = 0.0, width
        load += rest
        room -= left
    return min(max(worst, load), total)


@njit(cache=True, nogil=True, error_model="numpy")
def balances(planned: FloatArray, came: FloatArray, num_ranks: int, given: FloatArray) -> None:
    """Balance that a forecaster would have given: planned and came [P, L, E], given [P, L], results
    in (0, 1]; -1 where nothing came.
    """
    for phase in range(came.shape[0]):
        for layer in range(came.shape[1]):
            total = came[phase, layer].sum()
            given[phase, layer] = -1.0
            if total > 0.0:
                worst = worst_piece(planned[phase, layer], came[phase, layer], total, num_ranks)
                given[phase, layer] = total / (num_ranks * worst)


@njit(cache=True, nogil=True, error_model="numpy")
def fold(
    counts: IntArray, weights: FloatArray, seconds: float, rate: FloatArray, recent: FloatArray
) -> None:
    """Sub-windows of a window in one pass: their sum a second into `rate`, their weighted sum into
    `recent`. counts: [Q, P, L, E]. weights: [Q]. rate, recent: [P, L, E]. seconds > 0.
    """
    for phase in range(counts.shape[1]):
        for layer in range(counts.shape[2]):
            whole, weighted = rate[phase, layer], recent[phase, layer]
            whole[:] = 0.0
            weighted[:] = 0.0
            for part in range(counts.shape[0]):
                weight = weights[part]
                for expert in range(counts.shape[3]):
                    count = float(counts[part, phase, layer, expert])
                    whole[expert] += count
                    weighted[expert] += weight * count
            for expert in range(counts.shape[3]):
                whole[expert] /= seconds


@njit(cache=True, nogil=True, error_model="numpy")
def blend(
    old: FloatArray, keep: float, new: FloatArray, weight: float, blended: FloatArray
) -> None:
    """keep x old + weight x new into `blended`; all [L, E]."""
    for layer in range(old.shape[0]):
        for expert in range(old.shape[1]):
            blended[layer, expert] = keep * old[layer, expert] + weight * new[layer, expert]


@njit(cache=True, nogil=True, error_model="numpy")
def lead(
    queued: IntArray,
    prefill: FloatArray,
    decode: FloatArray,
    usual: FloatArray,
    most: float,
    led: FloatArray,
) -> None:
    """`prefill_leads`. queued: [L, E], prefill pairs that wait. prefill, decode: [L, E], pairs a
    second of the last window. usual: [P, L, E], long means. most: limit of an expert's ratio. led:
    [P, L, E], results, every row with the sum of its last one.
    """
    experts = prefill.shape[1]
    shape = np.empty(experts)
    for layer in range(prefill.shape[0]):
        waiting = queued[layer].sum()
        came = prefill[layer].sum()
        for expert in range(experts):
            led[0, layer, expert] = prefill[layer, expert]
            if waiting > 0:
                led[0, layer, expert] = queued[layer, expert] * (came / waiting)
        before, after = usual[0, layer].sum(), usual[1, layer].sum()
        total = 0.0
        for expert in range(experts):
            ratio = 1.0
            if usual[0, layer, expert] > 0.0:
                share = usual[1, layer, expert] / after if after > 0.0 else 0.0
                ratio = share / (usual[0, layer, expert] / before)
            shape[expert] = prefill[layer, expert] * min(max(ratio, 1.0 / most), most)
            total += shape[expert]
        led[1, layer] = decode[layer]
        if total > 0.0:
            scale = decode[layer].sum() / total
            for expert in range(experts):
                led[1, layer, expert] = shape[expert] * scale


@njit(cache=True, nogil=True, error_model="numpy")
def add_weighted(counts: IntArray, weights: FloatArray, total: FloatArray) -> None:
    """Add weights[q] x sub-window q of one phase to `total` [L, E]. counts: [Q, L, E]."""
    for part in range(counts.shape[0]):
        weight = weights[part]
        for layer in range(counts.shape[1]):
            for expert in range(counts.shape[2]):
                total[layer, expert] += weight * counts[part, layer, expert]


@njit(cache=True, nogil=True, error_model="numpy")
def distances(counts: IntArray, reference: FloatArray, apart: FloatArray) -> None:
    """Squared Hellinger distance of each sub-window from the reference, less what the sub-window's
    own drawing makes of it.

    counts: [Q, P, L, E], pairs. reference: [P, L, E], shares (rows sum to 1, or are zero). apart:
    [Q, P, L], results in [0, 2]; -1 where either has nothing.

    n pairs drawn from m experts lie (m - 1) / (4 n) apart from the shares they are drawn from, on
    average: with few pairs everything looks like a shift otherwise.
    """
    root = np.zeros(reference.shape[2])
    for phase in range(counts.shape[1]):
        for layer in range(counts.shape[2]):
            held = 0
            for expert in range(root.shape[0]):
                root[expert] = np.sqrt(reference[phase, layer, expert])
                held += reference[phase, layer, expert] > 0.0
            for part in range(counts.shape[0]):
                total = counts[part, phase, layer].sum()
                if total == 0 or held == 0:
                    apart[part, phase, layer] = -1.0
                    continue
                scale = 1.0 / total
                common = 0.0
                for expert in range(root.shape[0]):
                    common += np.sqrt(counts[part, phase, layer, expert] * scale) * root[expert]
                noise = (held - 1) / (4.0 * total)
                apart[part, phase, layer] = max(0.0, 2.0 - 2.0 * common - noise)


@njit(cache=True, nogil=True, error_model="numpy")
def blend_shares(counts: IntArray, first: int, old: FloatArray, weight: float, cap: float) -> float:
    """Take the shares of one phase's sub-windows from `first` on into a running mean; returns its
    new weight.

    counts: [Q, L, E]. old: [L, E], changed in place. weight: sub-windows it holds, at most `cap`.
    """
    for part in range(first, counts.shape[0]):
        weight = min(weight + 1.0, cap)
        for layer in range(counts.shape[1]):
            total = counts[part, layer].sum()
            if total > 0:
                scale, step = 1.0 / total, 1.0 / weight
                for expert in range(counts.shape[2]):
                    share = counts[part, layer, expert] * scale
                    old[layer, expert] += (share - old[layer, expert]) * step
    return weight


@njit(cache=True, nogil=True, error_model="numpy")
def centre_rows(
    shares: FloatArray, seen: BoolArray, held: int, group: int, weights: FloatArray, out: FloatArray
) -> None:
    """Mean that each sub-window of a layer deviates from: that of those since the last shift, or,
    before it, that of its group of `group` neighbours.

    shares: [Q, E], newest first, rows sum to 1 where seen [Q]. held: sub-windows since the shift.
    weights: [Q]. out: [Q, E], results.
    """
    first = 0
    while first < shares.shape[0]:
        last = min(held if first < held else first + group, shares.shape[0])
        row, total = out[first], 0.0
        row[:] = 0.0
        for part in range(first, last):
            if seen[part]:
                total += weights[part]
                for expert in range(shares.shape[1]):
                    row[expert] += weights[part] * shares[part, expert]
        if total > 0.0:
            row /= total
        for part in range(first + 1, last):
            out[part] = row
        first = last


@njit(cache=True, nogil=True, error_model="numpy")
def deviate(
    counts: IntArray,
    held: IntArray,
    group: int,
    weights: FloatArray,
    mean: FloatArray,
    amplify: float,
    demand: FloatArray,
) -> None:
    """Scenarios: the mean forecast, plus what sub-windows deviated by, amplified.

    counts: [Q, P, L, E], pairs of the sub-windows, newest first. held: [P], how many of them came
    since the last shift, at least 1. group: as in `centre_rows`. weights: [Q]. mean: [P, L, E],
    pairs a second. demand: [Q, P, L, E], results, every row with the sum of its mean.
    """
    parts, experts = counts.shape[0], counts.shape[3]
    shares, centre = np.zeros((parts, experts)), np.zeros((parts, experts))
    seen = np.zeros(parts, np.bool_)
    for phase in range(mean.shape[0]):
        for layer in range(mean.shape[1]):
            wanted = mean[phase, layer].sum()
            for part in range(parts):
                total = counts[part, phase, layer].sum()
                seen[part] = total > 0
                scale = 1.0 / total if total > 0 else 0.0
                for expert in range(experts):
                    shares[part, expert] = counts[part, phase, layer, expert] * scale
            centre_rows(shares, seen, held[phase], group, weights, centre)
            for part in range(parts):
                row = demand[part, phase, layer]
                row[:] = mean[phase, layer]
                if not seen[part] or wanted <= 0.0:
                    continue
                summed = 0.0
                for expert in range(experts):
                    apart = shares[part, expert] - centre[part, expert]
                    row[expert] = max(0.0, row[expert] + amplify * wanted * apart)
                    summed += row[expert]
                row *= wanted / summed


def warm() -> None:
    """Compile what is called from Python, with the types it is called with: counts of a closed
    window may not be written."""
    mean = np.ones((2, 1, 2))
    for frozen in (False, True):
        counts = np.ones((2, 2, 1, 2), dtype=np.int64)
        counts.setflags(write=not frozen)
        add_weighted(counts[:, 0], np.ones(2), mean[0].copy())
        fold(counts, np.ones(2), 1.0, mean.copy(), mean.copy())
        lead(counts[0, 0], mean[0], mean[0], mean, 2.0, mean.copy())
        distances(counts, mean, np.zeros((2, 2, 1)))
        blend_shares(counts[:, 0], 0, mean[0].copy(), 0.0, 2.0)
    balances(mean, mean, 1, np.zeros((2, 1)))
    blend(mean[0], 0.5, mean[0], 0.5, mean[0].copy())
    counts, held = np.ones((2, 2, 1, 2), dtype=np.int64), np.ones(2, dtype=np.int64)
    deviate(counts, held, 1, np.ones(2), mean, 1.0, np.zeros((2, 2, 1, 2)))
