"""What the engine knows of load: the history of windows, the forecast, and the balance the live
layout would give it.

Responsible for asking `forecast` and `scoring`; decides nothing. Called by trigger and needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from placement.cost import seconds_per_pair
from placement.engine.runs import terms_of
from placement.engine.turn import Turn
from placement.forecast import forecast, mean_forecast, observe
from placement.layout import ExpertLayout
from placement.load import LoadError, LoadWindow
from placement.planner.price import compiled_of, slowest_of_layers, slowest_seconds
from placement.policy.base import PolicyInput
from placement.policy.incremental import priced_demand
from placement.split import CompiledLayer
from placement.topology import NUM_PHASES

FloatArray = npt.NDArray[np.float64]

FAILURES_KEPT = 3
"""Failures remembered of each layer: load that flips does so between few states."""
CALL_KEEP = 0.8
"""Share of the old mean size of calls that a window leaves: layers near the crossover must not be
priced now as one regime, now as the other."""
WARY_KEEP = 0.9
"""Weight of what a wary layer is planned for over that of what stands before it."""


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
    """`scenarios_of`; but layers whose last moves failed are planned for whole windows one by one
    instead of sub-windows around the forecast: the forecast, then the windows in which moves failed
    and the kept windows by turns, newest first. A mean of two kinds of load is neither."""
    scenarios, weights = scenarios_of(turn)
    wary = turn.state.gate.wary
    if not wary.any() or not turn.state.history.windows:
        return scenarios, weights
    mean = np.tensordot(weights, scenarios, axes=1)
    failed = turn.state.failed_demand
    assert failed is not None, "a layer is wary, yet no moves have failed"
    past = turn.state.history.rates()[::-1]
    failed = np.where(failed.any(axis=(1, 3), keepdims=True), failed, mean)
    rows = [mean]
    for age in range(max(len(past), len(failed))):
        rows += [*failed[age : age + 1], *past[age : age + 1]]
    more = len(rows) - len(scenarios)
    if more > 0:  # early windows: the other layers see their mean there
        scenarios = np.concatenate((scenarios, np.broadcast_to(mean, (more, *mean.shape))))
        weights = np.concatenate((weights, weights[-1] * WARY_KEEP ** np.arange(1, more + 1)))
        weights /= weights.sum()
    for number in range(len(scenarios)):
        scenarios[number][:, wary] = rows[number % len(rows)][:, wary]
    return scenarios, weights


def remember_failure(turn: Turn, layers: Sequence[int]) -> None:
    """Moves of these layers failed in the last window: its demand is what they did not serve."""
    if not layers:
        return
    rate, known, index = turn.state.forecast.last, turn.state.failed_demand, list(layers)
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
    per_pair, fair_s = _fair_seconds(turn, demand)
    slowest_s = slowest_of_layers(turn.stacked(), demand, per_pair)
    asked = (fair_s > 0.0) & (slowest_s > 0.0)
    share = np.divide(fair_s, slowest_s, out=np.ones_like(fair_s), where=asked)
    balance: FloatArray = np.minimum(share, 1.0)
    return balance


def has_demand(turn: Turn) -> bool:
    """Whether anything was asked for in the last window."""
    return bool(turn.state.forecast.last.any())


def saving_by_layer(
    turn: Turn, before: ExpertLayout, after: ExpertLayout, layers: Iterable[int]
) -> dict[int, float]:
    """Seconds a second that the last window's own demand would have cost more on the layout before
    than on the one after, by layer.

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
        {layer: (compiled_of(before, layer), compiled_of(after, layer)) for layer in whole},
    )


def saved_by_candidate(turn: Turn) -> FloatArray:
    """What the kept target would have saved in the last window: float64 [layers], 0 where none is
    kept. One that uses a rank which is no longer there is kept no longer."""
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
    for layer, gain in _saved(turn, pairs).items():
        saved[layer] = gain
    return saved


def lost_while_resting(turn: Turn) -> FloatArray:
    """What layers that cool down lost in the last window against a layout in balance: float64
    [layers], seconds a second; 0 for the others."""
    lost = np.zeros(turn.spec.num_layers, dtype=np.float64)
    gate = turn.state.gate
    cooling = (turn.at_s < gate.rest_until_s) & (gate.fruitless == 0)
    if not cooling.any():
        return lost
    demand = _priced(turn, turn.state.forecast.last)
    demand[~cooling] = 0.0
    demand[turn.layout().replica_counts == 0] = 0.0
    per_pair, fair_s = _fair_seconds(turn, demand)
    slowest_s = slowest_of_layers(turn.stacked(), demand, per_pair)
    return np.maximum(slowest_s - fair_s / max(terms_of(turn.config).stop, 1e-9), lost)


def _fair_seconds(turn: Turn, demand: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(seconds of a pair on each rank, 0 where no replica may be; seconds a second of each layer
    [layers] if the others shared its demand evenly)."""
    per_pair = seconds_per_pair(turn.spec, turn.topology())
    usable = np.array([r.holds and not r.draining for r in turn.state.ranks])
    together = float((1.0 / per_pair[usable]).sum())
    fair_s = demand.sum(axis=1) / together if together > 0.0 else np.zeros(len(demand))
    per_pair[~usable] = 0.0
    return per_pair, fair_s


def _saved(
    turn: Turn, layers: Mapping[int, tuple[CompiledLayer, CompiledLayer]]
) -> dict[int, float]:
    """Seconds a second that the last window's demand costs more on the first of each two than on
    the second; nothing for layers that nobody asked for."""
    if not layers:
        return {}
    demand = _priced(turn, turn.state.forecast.last)
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
