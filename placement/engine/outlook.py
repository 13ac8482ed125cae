"""What the engine knows of load: the history of windows, the forecast, and the balance the live
layout would give it.

Responsible for asking `forecast` and `scoring`; decides nothing. Called by trigger and needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.engine.turn import Turn
from placement.forecast import forecast, observe
from placement.layout import ExpertLayout
from placement.load import LoadError, LoadWindow
from placement.planner.price import layer_seconds
from placement.policy.base import PolicyInput
from placement.scoring import layer_balancedness, rank_load
from placement.topology import NUM_PHASES

FloatArray = npt.NDArray[np.float64]


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


def expected_balance(turn: Turn) -> FloatArray:
    """Balancedness of each layer under the mean forecast, over ranks that may hold replicas:
    float64 [layers]."""
    scenarios, weights = scenarios_of(turn)
    demand = np.tensordot(weights, scenarios.sum(axis=1), axes=1)
    layout = turn.layout()
    loads = rank_load(layout, np.where(layout.replica_counts > 0, demand, 0.0))
    ranks = [r.rank for r in turn.state.ranks if r.holds and not r.draining]
    return layer_balancedness(loads[ranks])


def has_demand(window: LoadWindow) -> bool:
    """Whether anything was asked for in the window."""
    return bool(window.demand.any())


def realised_gain(
    turn: Turn, window: LoadWindow, before: ExpertLayout, after: ExpertLayout
) -> float:
    """Seconds a second that the window's own demand would have cost more on the layout before than
    on the one after.

    Only over layers that differ and whose experts all have replicas in both.
    """
    seconds = window.end_s - window.start_s
    if seconds <= 0.0 or before.num_ranks != after.num_ranks:
        return 0.0
    demand = window.demand.sum(axis=0).astype(np.float64)[None] / seconds
    request = PolicyInput(
        spec=turn.spec,
        topology=turn.topology(),
        layout=after,
        scenarios=demand,
        weights=np.ones(1, dtype=np.float64),
    )
    gain = 0.0
    hosts_differ = (before.hosts != after.hosts).any(axis=1)
    layers = np.flatnonzero(hosts_differ.reshape(before.num_layers, -1).any(axis=1))
    for layer in layers.tolist():
        was, now = (layer_seconds(x, layer, request) for x in (before, after))
        if was > 0.0 and now > 0.0:
            gain += was - now
    return gain
