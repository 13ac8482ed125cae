"""What the next window will ask for: forecasters, and which of them to believe in each layer.

Responsible for turning closed windows into demand *scenarios*, and for scoring forecasters on
what then came. Must never look at a layout. Called by the engine when a window closes (`observe`)
and when a target is wanted (`forecast`).

Forecasters. `last`: the last window. `window`: the mean of the kept windows. `ewma_short`,
`ewma_long`: exponentially smoothed windows. None is best everywhere: after a flip of domains
`last` is, under noise the means are.

Score. By the balance each would have given, without planning: cut the experts of a layer, in id
order, into as many pieces of equal *forecast* load as there are ranks (experts on a cut are
shared), put the load that *came* on those pieces, and take mean / maximum. It is the balance of a
layout that is perfect for the forecast, before a router levels. Example, two ranks: forecast [2,
1, 1], came [2, 2, 0]: the cut lies after expert 0, pieces get 2 and 2, score 1; had [0, 2, 2]
come, pieces get 0 and 4, score 0.5. Scores are smoothed over windows; each layer follows its
best.

Scenarios. One forecast of the mean, weight 1/2, and one for each sub-window of the last window,
together 1/2: the forecast plus what that sub-window deviated by. They keep a plan from being cut
to one mean that no batch has.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from placement.load import LoadError, LoadHistory, LoadWindow, demand_rate

FloatArray = npt.NDArray[np.float64]

FORECASTERS: Final = ("ewma_short", "last", "window", "ewma_long")
"""Names, in the order that breaks ties of score."""
SHORT_KEEP: Final = 0.5
"""Share of the old value that `ewma_short` keeps at each window: half of it is the last window."""
LONG_KEEP: Final = 0.875
"""The same for `ewma_long`: about eight windows."""
SCORE_KEEP: Final = 0.8
"""Share of the old score kept at each window: a forecaster wins or loses a layer within some five
windows.
"""
MEAN_WEIGHT: Final = 0.5
"""Weight of the mean scenario; the sub-windows share the rest."""


class ForecastState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What forecasters remember between windows; part of the engine's state.

    ewma_short, ewma_long: float64 [phases, layers, experts], pairs a second. scores: float64
    [forecasters, layers], smoothed balance in [0, 1], in order of FORECASTERS. windows_seen:
    windows observed.
    """

    ewma_short: FloatArray
    ewma_long: FloatArray
    scores: FloatArray
    windows_seen: int = 0


class Scenarios(NamedTuple):
    """Forecast demand.

    `demand` float64 [scenarios, phases, layers, experts] pairs a second, `weights` float64
    [scenarios] summing to 1, `chosen` int64 [layers], index in FORECASTERS of the forecaster each
    layer follows.
    """

    demand: FloatArray
    weights: FloatArray
    chosen: npt.NDArray[np.int64]


def initial_state(*, num_phases: int, num_layers: int, num_experts: int) -> ForecastState:
    """State before the first window: nothing known, all scores equal."""
    zeros = np.zeros((num_phases, num_layers, num_experts), dtype=np.float64)
    scores = np.zeros((len(FORECASTERS), num_layers), dtype=np.float64)
    return ForecastState(ewma_short=zeros, ewma_long=zeros.copy(), scores=scores)


def predict(name: str, state: ForecastState, history: LoadHistory) -> FloatArray:
    """Mean forecast of one forecaster: float64 [phases, layers, experts], pairs a second.

    `state` and `history` have both seen the same last window. Raises LoadError for an unknown
    name or without windows.
    """
    if not history.windows:
        raise LoadError("no closed window to forecast from; close one first")
    if name == "last":
        return demand_rate(history.windows[-1])
    if name == "window":
        mean: FloatArray = history.rates().mean(axis=0)
        return mean
    if name == "ewma_short":
        return state.ewma_short
    if name == "ewma_long":
        return state.ewma_long
    raise LoadError(f"forecaster {name!r} is not one of {', '.join(FORECASTERS)}")


def observe(
    state: ForecastState, history: LoadHistory, window: LoadWindow, num_ranks: int
) -> ForecastState:
    """State after a closed window: every forecast is scored on it, then the smoothed loads take
    it in.

    history: the windows before this one. num_ranks: ranks that can hold replicas, >= 1. Windows
    without demand in a layer leave the layer's scores alone; the first window scores nothing and
    starts the averages.
    """
    rate = demand_rate(window)
    if state.windows_seen == 0 or not history.windows:
        return ForecastState(
            ewma_short=rate,
            ewma_long=rate,
            scores=state.scores,
            windows_seen=state.windows_seen + 1,
        )
    came = rate.sum(axis=0)
    scores = state.scores.copy()
    for row, name in enumerate(FORECASTERS):
        given = balance_given(predict(name, state, history).sum(axis=0), came, num_ranks)
        fresh = (
            given
            if state.windows_seen == 1
            else SCORE_KEEP * scores[row] + (1 - SCORE_KEEP) * given
        )
        scores[row] = np.where(came.sum(axis=1) > 0, fresh, scores[row])
    return ForecastState(
        ewma_short=SHORT_KEEP * state.ewma_short + (1 - SHORT_KEEP) * rate,
        ewma_long=LONG_KEEP * state.ewma_long + (1 - LONG_KEEP) * rate,
        scores=scores,
        windows_seen=state.windows_seen + 1,
    )


def balance_given(forecast: npt.ArrayLike, came: npt.ArrayLike, num_ranks: int) -> FloatArray:
    """Balance that a layout perfect for `forecast` gives under the load that came: float64
    [layers], in (0, 1].

    forecast, came: [layers, experts]. Layers without load that came score 1. See the module's
    text for the rule.

    >>> balance_given([[2, 1, 1], [2, 1, 1]], [[2, 2, 0], [0, 2, 2]], num_ranks=2).tolist()
    [1.0, 0.5]
    """
    planned = np.asarray(forecast, dtype=np.float64)
    real = np.asarray(came, dtype=np.float64)
    cuts = np.arange(num_ranks + 1) / num_ranks
    scores = np.ones(real.shape[0], dtype=np.float64)
    for layer in range(real.shape[0]):
        total = float(real[layer].sum())
        if total <= 0:
            continue
        # Experts that the forecast leaves out have a place all the same: a billionth each.
        share = planned[layer] + max(float(planned[layer].sum()), 1.0) * 1e-9
        ends = np.concatenate(([0.0], np.cumsum(share) / share.sum()))
        pieces = np.diff(
            np.interp(cuts, ends, np.concatenate(([0.0], np.cumsum(real[layer]) / total)))
        )
        scores[layer] = 1.0 / (num_ranks * float(pieces.max()))
    return scores


def forecast(state: ForecastState, history: LoadHistory) -> Scenarios:
    """Scenarios for the next window, each layer after its best forecaster.

    `state` and `history` have both seen the last window. Raises LoadError without windows.
    """
    means = np.stack([predict(name, state, history) for name in FORECASTERS])
    chosen = np.argmax(state.scores, axis=0)
    mean = means[chosen, :, np.arange(means.shape[2])].transpose(1, 0, 2)
    deviations = _deviations(history.windows[-1])
    demand = np.concatenate((mean[None], np.maximum(mean[None] + deviations, 0.0)))
    weights = np.full(len(demand), (1 - MEAN_WEIGHT) / max(1, len(deviations)), dtype=np.float64)
    weights[0] = MEAN_WEIGHT
    return Scenarios(np.ascontiguousarray(demand), weights / weights.sum(), chosen)


def _deviations(window: LoadWindow) -> FloatArray:
    """Pairs a second by which each sub-window differs from the window's mean; sub-windows sum to
    zero.
    """
    rate = demand_rate(window)
    seconds = window.end_s - window.start_s
    if seconds <= 0:
        return np.zeros(window.demand.shape, dtype=np.float64)
    parts = window.demand.astype(np.float64) * (len(window.demand) / seconds)
    deviations: FloatArray = parts - rate[None]
    return deviations
