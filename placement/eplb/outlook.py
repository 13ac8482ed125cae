"""The load to plan for: scenarios made of `weight`, or forecast from `history`.

Responsible for turning what the caller counted into the forecasters' windows and their answer into
scenarios a layer. Must never look at a layout. Called by `placement.eplb`.

The caller's intervals have no length here; all are taken to be equally long. Up to
`SUB_WINDOWS_MAX` of them are looked at one by one; of a longer history neighbours are added up,
the newest ones complete, so that a history of any resolution gives at most that many. Four
neighbours make a window. Example: 10 intervals make the windows [0, 1], [2..5], [6..9], the first
filled up with its own mean.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from placement.eplb.arguments import Problem
from placement.eplb.tensors import FloatArray
from placement.forecast import forecast, initial_state, observe
from placement.load import LoadHistory, LoadWindow
from placement.topology import NUM_PHASES, Phase

SUB_WINDOWS_MAX: Final = 64
"""Intervals looked at one by one. What is older than 16 windows moves no forecaster."""
SUB_WINDOWS: Final = 4
"""Sub-windows of a window."""
_UNITS: Final = 1e9
"""Whole pairs that a layer's history is scaled to: forecasters count, and only shares matter."""


class Outlook(NamedTuple):
    """demand: float64 [scenarios, layers, experts], each layer's weighted mean sums to 1 or is all
    zero. weights: float64 [scenarios], summing to 1."""

    demand: FloatArray
    weights: FloatArray


def outlook(problem: Problem) -> Outlook:
    """Scenarios of the load to come.

    Without history `weight` is the one scenario. With it, the forecast is; `weight` then speaks
    only for layers in which the history has no load.
    """
    load = _shares(problem.load[None])
    if problem.history is None:
        return Outlook(load, np.ones(1))
    demand, weights = _forecast(_shares(problem.history), problem.counts.num_gpus)
    silent = ~problem.history.any(axis=(0, 2))
    demand[:, silent] = load[:, silent]
    mean = np.tensordot(weights, demand.sum(axis=2), axes=1)
    demand /= np.where(mean > 0, mean, 1.0)[None, :, None]
    return Outlook(demand, weights)


def _shares(load: FloatArray) -> FloatArray:
    """[intervals, layers, experts] scaled so that each layer sums to 1 over all intervals."""
    top = load.max(axis=(0, 2), keepdims=True)
    shares = load / np.where(top > 0, top, 1.0)  # first by the maximum: a sum may overflow
    total = shares.sum(axis=(0, 2), keepdims=True)
    scaled: FloatArray = shares / np.where(total > 0, total, 1.0)
    return scaled


def _forecast(history: FloatArray, num_gpus: int) -> tuple[FloatArray, FloatArray]:
    counts = np.rint(history * _UNITS).astype(np.int64)
    parts = _folded(counts)
    sub_windows = min(SUB_WINDOWS, len(parts))
    missing = -len(parts) % sub_windows
    if missing:
        mean = parts[: sub_windows - missing].mean(axis=0, keepdims=True).astype(np.int64)
        parts = np.concatenate((np.repeat(mean, missing, axis=0), parts))
    num_layers, num_experts = history.shape[1:]
    windows = parts.reshape(-1, sub_windows, num_layers, num_experts)
    state = initial_state(num_phases=NUM_PHASES, num_layers=num_layers, num_experts=num_experts)
    seen = LoadHistory(kept=len(windows))
    for index, window in enumerate(windows):
        closed = _window(index, window)
        state = observe(state, seen, closed, num_gpus)
        seen = seen.with_window(closed)
    found = forecast(state, seen)
    return found.demand.sum(axis=1), found.weights


def _folded(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> FloatArray:
    """Neighbouring intervals averaged, aligned at the newest: at most SUB_WINDOWS_MAX."""
    fold = -(-len(counts) // SUB_WINDOWS_MAX)
    starts = np.arange(len(counts) % fold, len(counts), fold)
    if starts[0] > 0:
        starts = np.concatenate(([0], starts))
    lengths = np.diff(np.append(starts, len(counts)))
    return np.add.reduceat(counts, starts, axis=0) / lengths[:, None, None]


def _window(index: int, demand: FloatArray) -> LoadWindow:
    sub_windows, num_layers, num_experts = demand.shape
    counted = np.zeros((sub_windows, NUM_PHASES, num_layers, num_experts), dtype=np.int64)
    counted[:, Phase.PREFILL] = np.rint(demand)
    return LoadWindow(
        index=index,
        start_s=float(index),
        end_s=float(index + 1),
        demand=counted,
        executed_pairs=counted.sum(axis=0),
        rank_pairs=np.zeros((0, num_layers), dtype=np.int64),
        rank_busy_s=np.zeros((0, NUM_PHASES), dtype=np.float64),
    )
