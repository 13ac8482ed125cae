"""What the engine knows of load: the history of windows, the forecast, and the balance the live
layout would give it.

Responsible for asking `forecast` and `scoring`; decides nothing. Called by trigger and needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from placement.cost import seconds_per_pair
from placement.engine.turn import Turn
from placement.forecast import forecast, mean_forecast, observe
from placement.layout import ExpertLayout
from placement.load import LoadError, LoadWindow, demand_rate
from placement.planner.price import layer_seconds, leveled_pairs
from placement.policy.base import PolicyInput
from placement.topology import NUM_PHASES

FloatArray = npt.NDArray[np.float64]

PAST_WEIGHT = FAILED_WEIGHT = 0.25
"""Weight of the kept windows, and of those in which moves failed, in a target for wary layers; the
forecast has the rest."""
FAILURES_KEPT = 3
"""Failures remembered of each layer: load that flips does so between few states."""
PAST_KEEP = 0.8
"""Weight of a kept window over that of the next one."""


def take_window(turn: Turn, window: LoadWindow) -> None:
    """Let the history and the forecasters see a closed window. Raises LoadError for another model's
    shape."""
    state = turn.state
    want = (NUM_PHASES, turn.spec.num_layers, turn.spec.num_experts)
    if window.demand.ndim != 4 or window.demand.shape[1:] != want:
        raise LoadError(
            f"window {window.index}: demand has shape {window.demand.shape}, "
            f"want [sub_windows, {want[0]}, {want[1]}, {want[2]}]"
        )
    ranks = sum(r.holds and not r.draining for r in state.ranks)
    history = state.history.with_window(window)
    state.forecast = observe(state.forecast, state.history, window, max(1, ranks))
    state.history = history


def scenarios_of(turn: Turn) -> tuple[FloatArray, FloatArray]:
    """(scenarios [n, phases, layers, experts] pairs a second, weights [n]); one scenario of zeros
    before any window."""
    if not turn.state.history.windows:
        shape = (1, NUM_PHASES, turn.spec.num_layers, turn.spec.num_experts)
        return np.zeros(shape, dtype=np.float64), np.ones(1, dtype=np.float64)
    found = forecast(turn.state.forecast, turn.state.history)
    return found.demand, found.weights


def wary_scenarios(turn: Turn) -> tuple[FloatArray, FloatArray]:
    """`scenarios_of`, and for layers whose last moves failed also the kept windows one by one, the
    newest with the most weight, and the windows in which they failed; the other layers see their
    mean forecast there."""
    scenarios, weights = scenarios_of(turn)
    wary = turn.state.gate.wary
    if not wary.any() or not turn.state.history.windows:
        return scenarios, weights
    mean = np.tensordot(weights, scenarios, axes=1)
    past = turn.state.history.rates()
    recency = PAST_KEEP ** np.arange(len(past), dtype=np.float64)[::-1]
    recency *= PAST_WEIGHT / recency.sum()
    failed = turn.state.failed_demand
    assert failed is not None, "a layer is wary, yet no moves have failed"
    seen = wary & failed.any(axis=(1, 3))
    extra = np.concatenate(
        (
            np.where(wary[:, None], past, mean),
            np.where(seen[:, None, :, None], failed, mean),
        )
    )
    shares = np.full(len(failed), FAILED_WEIGHT / len(failed))
    weights = weights * (1.0 - PAST_WEIGHT - FAILED_WEIGHT)
    return np.concatenate((scenarios, extra)), np.concatenate((weights, recency, shares))


def remember_failure(turn: Turn, window: LoadWindow, layers: Sequence[int]) -> None:
    """Moves of these layers failed in the window: its demand is what they did not serve."""
    if not layers:
        return
    rate, known, index = demand_rate(window), turn.state.failed_demand, list(layers)
    failed = np.zeros((FAILURES_KEPT, *rate.shape)) if known is None else known.copy()
    failed[1:, :, index] = failed[:-1, :, index]
    failed[0, :, index] = rate[:, index].transpose(1, 0, 2)
    turn.state.failed_demand = failed


def expected_balance(turn: Turn) -> FloatArray:
    """Fair / slowest rank's seconds of each layer under the mean forecast and the router's split,
    over ranks that may hold replicas: float64 [layers], 1 where nothing is expected.

    With equal ranks it is balancedness. Looked at each window, so layers stay compiled.
    """
    demand = mean_forecast(turn.state.forecast, turn.state.history).sum(axis=0)
    demand[turn.layout().replica_counts == 0] = 0.0
    per_pair = seconds_per_pair(turn.spec, turn.topology())
    usable = np.array([r.holds and not r.draining for r in turn.state.ranks])
    fair_s = demand.sum(axis=1) / float((1.0 / per_pair[usable]).sum())
    balance = np.ones(turn.spec.num_layers, dtype=np.float64)
    for layer in np.flatnonzero(fair_s > 0.0).tolist():
        loads = leveled_pairs(turn.compiled(layer), demand[layer]) * per_pair
        slowest_s = float(loads[usable].max())
        if slowest_s > 0.0:
            balance[layer] = min(1.0, float(fair_s[layer]) / slowest_s)
    return balance


def has_demand(window: LoadWindow) -> bool:
    """Whether anything was asked for in the window."""
    return int(window.demand.max(initial=0)) > 0


def saving_by_layer(
    turn: Turn, window: LoadWindow, before: ExpertLayout, after: ExpertLayout, layers: Iterable[int]
) -> dict[int, float]:
    """Seconds a second that the window's own demand would have cost more on the layout before than
    on the one after, by layer.

    Only over layers whose experts all have replicas in both.
    """
    seconds = window.end_s - window.start_s
    if seconds <= 0.0 or before.num_ranks != after.num_ranks:
        return {}
    request = PolicyInput(
        spec=turn.spec,
        topology=turn.topology(),
        layout=after,
        scenarios=window.demand.sum(axis=0).astype(np.float64)[None] / seconds,
        weights=np.ones(1, dtype=np.float64),
    )
    saved: dict[int, float] = {}
    for layer in layers:
        was, now = (layer_seconds(x, layer, request) for x in (before, after))
        if was > 0.0 and now > 0.0:
            saved[layer] = was - now
    return saved


def saved_by_candidate(turn: Turn, window: LoadWindow) -> FloatArray:
    """What the kept target would have saved in the window: float64 [layers], 0 where none is kept.
    One that uses a rank which is no longer there is kept no longer."""
    saved = np.zeros(turn.spec.num_layers, dtype=np.float64)
    kept, layout = turn.state.candidate, turn.layout()
    if kept is None:
        return saved
    used = set(np.nonzero(kept.slots >= 0)[0].tolist())
    gone = {r.rank for r in turn.state.ranks if r.draining or not r.holds}
    if used & gone or len(kept.slots) != len(turn.state.ranks):
        turn.state.candidate = None
        return saved
    target = ExpertLayout(kept.slots, turn.spec.num_layers, turn.spec.num_experts)
    for layer, gain in saving_by_layer(turn, window, layout, target, kept.layers).items():
        saved[layer] = gain
    return saved
