"""What the next window will ask for: forecasters, and which of them to believe in each layer and
phase.

Responsible for turning closed windows into demand *scenarios*, for scoring forecasters on what then
came, and for naming shifts of the traffic (`forecast.shift`). Must never look at a layout. Called
by the engine when a window closes (`observe`) and when a target is wanted (`forecast`).

Forecasters. `quarters`: recency-weighted sub-windows. `last`: the last window. `window`: the mean
of as many windows as the history keeps. `ewma_short`, `ewma_long`: exponentially smoothed windows.
`change_point`: as `quarters`, but of what came since the last shift only. `prefill_leads`: prefill
from the pairs that waited in routers when the window closed; decode from the prefill just seen,
each expert scaled by how much more decode used to want it than prefill. None is best everywhere:
after a flip of domains the quick ones are, under noise the means.

Score. By the balance each would have given, without planning: cut the experts of a layer, in id
order, into as many pieces of equal *forecast* load as there are ranks (experts on a cut are
shared), put the load that *came* on those pieces, and take mean / maximum. It is the balance of a
layout that is perfect for the forecast, before a router levels. Example, two ranks: forecast [2,
1, 1], came [2, 2, 0]: the cut lies after expert 0, pieces get 2 and 2, score 1; had [0, 2, 2]
come, pieces get 0 and 4, score 0.5. Scores are smoothed over windows. Each layer follows, in each
phase, the best by the mean of its own score and all layers': layers see the same traffic, and one
layer's scores are noisy. For `FRESH_WINDOWS` after a shift a phase follows `change_point`: the
scores are those of other traffic then.

Scenarios. The last sub-windows, newest heaviest: the forecast plus what each deviated by,
amplified; those since the last shift from their common mean, those before it from the mean of
their neighbours. How requests differ within a domain tells how those of the next will; where
domains lie does not. No batch looks like a mean; and few sub-windows show less than all that may
come.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from placement.forecast.kernels import add_weighted, balances, blend, deviate, fold, lead
from placement.forecast.shift import Shift, ShiftState, initial_shift, watch
from placement.load import LoadError, LoadHistory, LoadWindow
from placement.topology import Phase

FloatArray = npt.NDArray[np.float64]

FORECASTERS: Final = (
    "quarters",
    "ewma_short",
    "last",
    "window",
    "ewma_long",
    "change_point",
    "prefill_leads",
)
"""Names, in the order that breaks ties of score."""
PART_KEEP: Final = 0.9
"""Share of the old value that `quarters` and `change_point` keep at each sub-window."""
SHORT_KEEP: Final = 0.5
"""Share of the old value that `ewma_short` keeps at each window: half of it is the last window."""
LONG_KEEP: Final = 0.875
"""The same for `ewma_long`: about eight windows."""
SCORE_KEEP: Final = 0.8
"""Share of the old score kept at each window: a forecaster wins or loses a layer within some five
windows.
"""
MARGIN: Final = 0.002
"""Balance by which another forecaster must beat `quarters`."""
FRESH_WINDOWS: Final = 2
"""Windows after a shift in which scores count for nothing."""
SCENARIOS: Final = 12
"""Sub-windows that scenarios are made of, where there are as many."""
AMPLIFY: Final = 1.5
"""Factor on deviations of sub-windows."""
LEAD_SCALE_MAX: Final = 8.0
"""Most by which an expert's share may differ between prefill and decode."""


class ForecastState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What forecasters remember between windows; part of the engine's state.

    quarters, last, mean, ewma_short, ewma_long, change_point: float64 [phases, layers, experts],
    pairs a second, of the forecasters of these names (`mean`: of `window`). scores: float64
    [forecasters, phases, layers], smoothed balance in [0, 1], in order of FORECASTERS. shift: what
    detection remembers. windows_seen: windows observed; last_index: index of the last one.
    """

    quarters: FloatArray
    last: FloatArray
    mean: FloatArray
    ewma_short: FloatArray
    ewma_long: FloatArray
    change_point: FloatArray
    scores: FloatArray
    shift: ShiftState
    windows_seen: int = 0
    last_index: int = -1


class Scenarios(NamedTuple):
    """Forecast demand.

    `demand` float64 [scenarios, phases, layers, experts] pairs a second, `weights` float64
    [scenarios] summing to 1, `chosen` int64 [phases, layers], index in FORECASTERS of the
    forecaster each layer follows, `shift` the shift found at the end of the last window, if any.
    """

    demand: FloatArray
    weights: FloatArray
    chosen: npt.NDArray[np.int64]
    shift: Shift | None = None


def initial_state(*, num_phases: int, num_layers: int, num_experts: int) -> ForecastState:
    """State before the first window: nothing known, all scores equal."""
    zeros = np.zeros((num_phases, num_layers, num_experts), dtype=np.float64)
    return ForecastState(
        quarters=zeros,
        last=zeros,
        mean=zeros,
        ewma_short=zeros,
        ewma_long=zeros,
        change_point=zeros,
        scores=np.zeros((len(FORECASTERS), num_phases, num_layers), dtype=np.float64),
        shift=initial_shift(num_phases, num_layers, num_experts),
    )


def predict(name: str, state: ForecastState, history: LoadHistory) -> FloatArray:
    """Mean forecast of one forecaster: float64 [phases, layers, experts], pairs a second.

    `state` and `history` have both seen the same last window. Raises LoadError for an unknown
    name or without windows.
    """
    if not history.windows:
        raise LoadError("no closed window to forecast from; close one first")
    kept = {
        "quarters": state.quarters,
        "last": state.last,
        "window": state.mean,
        "ewma_short": state.ewma_short,
        "ewma_long": state.ewma_long,
        "change_point": state.change_point,
    }
    if name in kept:
        return kept[name]
    if name == "prefill_leads":
        return _led(state, history.windows[-1])
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
    rate, recent = _folded(window)
    shift, began = watch(state.shift, window)
    parts = len(window.demand)
    if state.windows_seen == 0 or not history.windows:
        began[:] = 0
        started = _since_shift(state.quarters, window, window, began, recent)
        return ForecastState(
            quarters=started,
            last=rate,
            mean=rate,
            ewma_short=rate,
            ewma_long=rate,
            change_point=started,
            scores=state.scores,
            shift=shift,
            windows_seen=state.windows_seen + 1,
            last_index=window.index,
        )
    before = history.windows[-1]
    given = np.empty_like(state.scores)
    for number, name in enumerate(FORECASTERS):
        balances(predict(name, state, history), rate, num_ranks, given[number])
    fresh = given
    if state.windows_seen > 1:
        fresh = SCORE_KEEP * state.scores + (1.0 - SCORE_KEEP) * given
    since = min(state.windows_seen + 1, history.kept)
    unbroken = np.full_like(began, parts)
    return ForecastState(
        quarters=_since_shift(state.quarters, before, window, unbroken, recent),
        last=rate,
        mean=_smooth(state.mean, rate, 1.0 - 1.0 / since),
        ewma_short=_smooth(state.ewma_short, rate, SHORT_KEEP),
        ewma_long=_smooth(state.ewma_long, rate, LONG_KEEP),
        change_point=_since_shift(state.change_point, before, window, began, recent),
        scores=np.where(given >= 0.0, fresh, state.scores),
        shift=shift,
        windows_seen=state.windows_seen + 1,
        last_index=window.index,
    )


def balance_given(forecast: npt.ArrayLike, came: npt.ArrayLike, num_ranks: int) -> FloatArray:
    """Balance that a layout perfect for `forecast` gives under the load that came: float64
    [layers], in (0, 1].

    forecast, came: [layers, experts]. Layers without load that came score 1. See the module's
    text for the rule.

    >>> balance_given([[2, 1, 1], [2, 1, 1]], [[2, 2, 0], [0, 2, 2]], num_ranks=2).round(6).tolist()
    [1.0, 0.5]
    """
    planned = np.ascontiguousarray(forecast, dtype=np.float64)[None]
    real = np.ascontiguousarray(came, dtype=np.float64)[None]
    given = np.empty(real.shape[:2], dtype=np.float64)
    balances(planned, real, num_ranks, given)
    return np.where(given[0] < 0.0, 1.0, given[0])


def choose(state: ForecastState) -> npt.NDArray[np.int64]:
    """Forecaster that each layer follows in each phase: int64 [phases, layers], index in
    FORECASTERS.
    """
    scores = 0.5 * state.scores + 0.5 * state.scores.mean(axis=2, keepdims=True)
    scores[FORECASTERS.index("quarters")] += MARGIN
    chosen: npt.NDArray[np.int64] = np.argmax(scores, axis=0)
    fresh = state.shift.parts_since < FRESH_WINDOWS * state.shift.parts
    chosen[fresh] = FORECASTERS.index("change_point")
    return chosen


def mean_forecast(state: ForecastState, history: LoadHistory) -> FloatArray:
    """The mean that `forecast`'s scenarios lie around: float64 [phases, layers, experts], pairs a
    second. Cheap: for what looks at the load every window.

    Raises LoadError without windows.
    """
    return _mean(choose(state), state, history)


def forecast(state: ForecastState, history: LoadHistory) -> Scenarios:
    """Scenarios for the next window, around `mean_forecast`.

    `state` and `history` have both seen the last window. Raises LoadError without windows.
    """
    mean = mean_forecast(state, history)
    counts = _last_parts(history)
    weights = PART_KEEP ** np.arange(len(counts), dtype=np.float64)
    weights /= weights.sum()
    demand = np.empty((len(counts), *mean.shape), dtype=np.float64)
    known = np.where(state.shift.weight > 0, state.shift.parts_since, len(counts))
    held = np.clip(known, 1, len(counts))
    group = len(history.windows[-1].demand)
    deviate(counts, held, group, weights, mean, AMPLIFY, demand)
    latest = state.shift.latest
    found = latest if latest is not None and latest.found_window == state.last_index else None
    return Scenarios(demand, weights, choose(state), found)


def _mean(chosen: npt.NDArray[np.int64], state: ForecastState, history: LoadHistory) -> FloatArray:
    mean = predict(FORECASTERS[0], state, history).copy()
    for number in sorted(set(chosen.reshape(-1).tolist()) - {0}):
        follows = chosen == number
        mean[follows] = predict(FORECASTERS[number], state, history)[follows]
    return mean


def _last_parts(history: LoadHistory) -> npt.NDArray[np.int64]:
    """Pairs of the last sub-windows, newest first: int64 [Q, phases, layers, experts]."""
    wanted = -(-SCENARIOS // len(history.windows[-1].demand))
    parts = [window.demand for window in history.windows[-wanted:]]
    return np.ascontiguousarray(np.concatenate(parts)[::-1][:SCENARIOS])


def _led(state: ForecastState, window: LoadWindow) -> FloatArray:
    """`prefill_leads`; where there is nothing to lead, the last window."""
    led = np.empty_like(state.last)
    queued = window.queued[Phase.PREFILL]
    prefill, decode = state.last[Phase.PREFILL], state.last[Phase.DECODE]
    lead(queued, prefill, decode, state.ewma_long, LEAD_SCALE_MAX, led)
    return led


def _smooth(old: FloatArray, new: FloatArray, keep: float) -> FloatArray:
    smoothed = np.empty_like(old)
    for phase in range(len(old)):
        blend(old[phase], keep, new[phase], 1.0 - keep, smoothed[phase])
    return smoothed


def _folded(window: LoadWindow) -> tuple[FloatArray, FloatArray]:
    """(pairs a second of a window, what it adds to recency-weighted sub-windows), both float64
    [phases, layers, experts]."""
    rate, recent = (np.zeros(window.demand.shape[1:], dtype=np.float64) for _ in range(2))
    seconds, parts = window.end_s - window.start_s, len(window.demand)
    if seconds > 0:
        weights = (1.0 - PART_KEEP) * PART_KEEP ** np.arange(parts, dtype=np.float64)[::-1]
        fold(window.demand, weights * _parts_a_second(window), seconds, rate, recent)
    return rate, recent


def _since_shift(
    old: FloatArray,
    before: LoadWindow,
    window: LoadWindow,
    began: npt.NDArray[np.int64],
    recent: FloatArray,
) -> FloatArray:
    """Recency-weighted sub-windows after a window, begun anew where a phase shifted: `began` as
    `watch` says it. before: the window before. recent: what the window adds where none shifted.
    """
    parts = len(window.demand)
    result = np.empty_like(old)
    for phase, first in enumerate(began.tolist()):
        if first == parts:
            blend(old[phase], PART_KEEP**parts, recent[phase], 1.0, result[phase])
            continue
        ages = np.arange(parts, dtype=np.float64)[::-1]
        weights = (ages < parts - first) * PART_KEEP**ages
        oldest = PART_KEEP**parts if first < 0 else 0.0
        scale = 1.0 / (float(weights.sum()) + oldest)
        weights *= scale
        result[phase] = 0.0
        if first < 0:
            last = np.array([oldest * scale * _parts_a_second(before)])
            add_weighted(before.demand[-1:, phase], last, result[phase])
        add_weighted(window.demand[:, phase], weights * _parts_a_second(window), result[phase])
    return result


def _parts_a_second(window: LoadWindow) -> float:
    """Sub-windows a second: what their counts are multiplied by to become rates; 0 in a window of
    no length.
    """
    seconds = window.end_s - window.start_s
    return len(window.demand) / seconds if seconds > 0 else 0.0


__all__ = [
    "FORECASTERS",
    "ForecastState",
    "Scenarios",
    "Shift",
    "ShiftState",
    "balance_given",
    "choose",
    "forecast",
    "initial_state",
    "mean_forecast",
    "observe",
    "predict",
]
