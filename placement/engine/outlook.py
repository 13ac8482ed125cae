"""What the engine knows of load: the history of windows, the forecast, and the balance the live
layout would give it.

Responsible for asking `forecast` and `scoring`; decides nothing. Called by trigger and needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from placement.cost import seconds_per_pair
from placement.engine.turn import Turn
from placement.forecast import forecast, mean_forecast, observe
from placement.layout import ExpertLayout
from placement.load import LoadError, LoadWindow, demand_rate
from placement.planner.price import compiled_of, slowest_seconds
from placement.policy.base import PolicyInput
from placement.policy.incremental import priced_demand
from placement.split import CompiledLayer
from placement.topology import NUM_PHASES

FloatArray = npt.NDArray[np.float64]

PAST_WEIGHT = FAILED_WEIGHT = 0.25
"""Weight of the kept windows, and of those in which moves failed, in a target for wary layers; the
forecast has the rest."""
FAILURES_KEPT = 3
"""Failures remembered of each layer: load that flips does so between few states."""
CALL_KEEP = 0.8
"""Share of the old mean size of calls that a window leaves: layers near the crossover must not be
priced now as one regime, now as the other."""
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
    state.call_tokens = _call_tokens(turn, window)
    state.forecast = observe(state.forecast, state.history, window, max(1, ranks))
    state.history = history


def _call_tokens(turn: Turn, window: LoadWindow) -> tuple[float, float]:
    """Mean tokens of a layer call after a window; a phase that nobody called keeps its own."""
    if not any(window.calls):
        return turn.state.call_tokens
    found = list(turn.state.call_tokens)
    pairs = window.demand.sum(axis=(0, 2, 3)).tolist()
    for phase, calls in enumerate(window.calls):
        if calls > 0:
            tokens = pairs[phase] / (turn.spec.top_k * calls)
            old = found[phase]
            found[phase] = CALL_KEEP * old + (1.0 - CALL_KEEP) * tokens if old > 0.0 else tokens
    return found[0], found[1]


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
    demand = _priced(turn, mean_forecast(turn.state.forecast, turn.state.history))
    demand[turn.layout().replica_counts == 0] = 0.0
    per_pair = seconds_per_pair(turn.spec, turn.topology())
    usable = np.array([r.holds and not r.draining for r in turn.state.ranks])
    fair_s = demand.sum(axis=1) / float((1.0 / per_pair[usable]).sum())
    per_pair[~usable] = 0.0
    balance = np.ones(turn.spec.num_layers, dtype=np.float64)
    for layer in np.flatnonzero(fair_s > 0.0).tolist():
        slowest_s = slowest_seconds(turn.compiled(layer), demand[layer : layer + 1], per_pair)
        if slowest_s[0] > 0.0:
            balance[layer] = min(1.0, float(fair_s[layer] / slowest_s[0]))
    return balance


def has_demand(window: LoadWindow) -> bool:
    """Whether anything was asked for in the window."""
    return bool(window.demand.any())


def saving_by_layer(
    turn: Turn, window: LoadWindow, before: ExpertLayout, after: ExpertLayout, layers: Iterable[int]
) -> dict[int, float]:
    """Seconds a second that the window's own demand would have cost more on the layout before than
    on the one after, by layer.

    Only over layers whose experts all have replicas in both.
    """
    if before.num_ranks != after.num_ranks:
        return {}
    whole = [
        layer
        for layer in layers
        if before.replica_counts[layer].all() and after.replica_counts[layer].all()
    ]
    return _saved(
        turn,
        window,
        {layer: (compiled_of(before, layer), compiled_of(after, layer)) for layer in whole},
    )


def saved_by_candidate(turn: Turn, window: LoadWindow) -> FloatArray:
    """What the kept target would have saved in the window: float64 [layers], 0 where none is kept.
    One that uses a rank which is no longer there is kept no longer."""
    saved = np.zeros(turn.spec.num_layers, dtype=np.float64)
    kept, layout = turn.state.candidate, turn.layout()
    if kept is None:
        return saved
    used = set(np.flatnonzero((kept.slots >= 0).any(axis=1)).tolist())
    gone = {r.rank for r in turn.state.ranks if r.draining or not r.holds}
    if used & gone or len(kept.slots) != len(turn.state.ranks):
        turn.state.candidate = None
        return saved
    whole = [layer for layer in kept.layers if layout.replica_counts[layer].all()]
    pairs = {layer: (turn.compiled(layer), turn.compiled_candidate(layer)) for layer in whole}
    for layer, gain in _saved(turn, window, pairs).items():
        saved[layer] = gain
    return saved


def _saved(
    turn: Turn, window: LoadWindow, layers: Mapping[int, tuple[CompiledLayer, CompiledLayer]]
) -> dict[int, float]:
    """Seconds a second that the window's demand costs more on the first of each two than on the
    second; nothing for layers that nobody asked for."""
    if not layers or window.end_s <= window.start_s:
        return {}
    demand = _priced(turn, demand_rate(window))
    per_pair = seconds_per_pair(turn.spec, turn.topology())
    saved: dict[int, float] = {}
    for layer, two in layers.items():
        row = demand[layer : layer + 1]
        was, now = (float(slowest_seconds(compiled, row, per_pair)[0]) for compiled in two)
        if was > 0.0:
            saved[layer] = was - now
    return saved


def _priced(turn: Turn, demand: FloatArray) -> FloatArray:
    """Demand [phases, layers, experts] over both phases, in the measure that policies lower:
    float64 [layers, experts], pairs a second or what costs as much."""
    request = PolicyInput(
        spec=turn.spec,
        topology=turn.topology(),
        layout=turn.layout(),
        scenarios=demand[None],
        weights=np.ones(1, dtype=np.float64),
        batch_tokens=turn.state.call_tokens,
    )
    priced: FloatArray = priced_demand(request)[0]
    return priced
