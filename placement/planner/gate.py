"""The gate: which layers are worth planning now, and which of a plan's moves may start.

Responsible for comparisons in one unit, seconds, layer by layer. Computes no load and no plan.
Called by the engine at each window and after each automatic target.

A plan saves `gain_s_per_s` seconds of serving a second and costs `cost_s` seconds of rank time for
its copies. It *pays* where gain x expected life exceeds the cost. It is *started* only once the
seconds already lost against it (*regret*, decayed each window so that a passing wave is forgotten)
have reached that cost: the rule of the ski rental problem, which never loses more than about twice
what the best plan in hindsight would have lost. A detected shift needs no regret: what was lost
before it says nothing of what comes. Worked example: gain 0.02, window 2 s, decay 0.9, cost 0.1:
regret after windows 1, 2, 3 is 0.04, 0.076, 0.108; the plan starts after the third.

Why noise moves nothing. A plan fits the window it was made from, noise included, so its predicted
gain is never below zero. Therefore:

- *Band.* A layer is watched from the moment its balance falls below `start` until it is back at
  `start` + band; a plan must save at least the band's share of its layer's seconds, and regret must
  exceed the cost by what a band costs in a window.
- *Measured regret.* A target that is not started yet is kept, and each window that comes is charged
  with what that target would have saved on the window's own demand, which may be less than nothing.
  Only where there is no such target yet is a prediction charged, and then at `PREDICTED_SHARE`.
  Regret must also stand out from what chance would add up to: what the target's gain differs by
  from scenario to scenario, or what a window fell short of its promise, whichever is more. By how
  many deviations follows from `FALSE_ALARMS`, shared by all layers: 4.1 for one, 5.0 for 58; with
  regret `LARGE` times the threshold `LARGE_DEVIATIONS` are enough.
- *A last word.* Decay bounds regret at some ten windows' worth, so a small gain may never reach its
  cost, or reach it by noise. After `WAIT_WINDOWS_MAX` windows the mean of what was measured
  decides: it stands out, pays over the plan's life and is half of what is promised, or the layer
  rests.
- *Rest.* A layer whose plan ended rests for the cool-down, or until it has lost, against a layout
  in balance, what its moves cost (*stake*): a rest, too, is the rule of ski rental. One for which
  nothing worth having was found rests for 2, 4, ... `REST_WINDOWS_MAX` windows, after a last word
  at once for `2 ** LAST_WORD_WEIGHT` and more, unless its balance falls by another band. A shift
  ends a rest.
- *Failures.* Moves that did not bring `FAILED_SHARE` of what they promised were made for load that
  had gone. Such a layer is *wary* for a while: its next targets are asked for the last windows one
  by one and for the windows in which moves failed, so that they serve the load that comes back.
  After more than `FAILED_MAX` failures its cool-down grows, and a shift alone starts no moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from placement.planner.plan import LayerFigure

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

PREDICTED_SHARE = 0.5
"""Share at which a gain that is only predicted counts as regret."""
FALSE_ALARMS = 1e-4
"""Moves that chance alone may start, of all layers, a window."""
LARGE = 4.0
"""Regret this many times the threshold ..."""
LARGE_DEVIATIONS = 1.0
"""... need exceed no more than as many standard deviations: to be wrong costs a quarter of it."""
REST_WINDOWS_MAX = 512
"""Longest rest of a layer for which nothing worth having was found, in windows."""
WAIT_WINDOWS_MAX = 12
"""Windows in a row that moves may wait for regret."""
MEASURED_SHARE = 0.5
"""Share of the predicted gain that must have been measured for a last word in favour."""
LAST_WORD_WEIGHT = 5
"""Fruitless plans that a last word against the moves counts for."""
FAILED_SHARE = 0.25
"""A layer's moves have failed if they brought less than this share of what they promised."""
FAILED_KEEP = 0.95
"""Share of a failure that is remembered from window to window."""
WARY_FROM = 0.5
"""Failures from which a layer is wary: one is remembered for 14 windows."""
FAILED_MAX = 2.5
"""Failures above which a cool-down grows, and a shift alone starts no moves."""
FAILED_REST_WINDOWS_MAX = 8
"""Longest cool-down that failures give, in windows: what is there may be no better."""


class GateState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the gate remembers of each layer; part of the engine's state. All arrays are [layers].

    regret_s: float64. swing: float64, variance of regret by chance. watched: out of balance and not
    yet back. rest_until_s: float64, time before which it is not planned again. fruitless: int64,
    times in a row. failed: float64, failures,
    fading. waited: int64, windows in a row that its moves wait for regret. balance_then: float64,
    lowest balance of a fruitless plan. stake_s: float64, cost of its last moves; lost_s: float64,
    seconds lost against balance while it cooled down from them. hoped_s_per_s, noise_s_per_s:
    float64, what its last target promised to save, and by how much a window's saving differs by
    chance.
    """

    regret_s: FloatArray
    swing: FloatArray
    watched: BoolArray
    rest_until_s: FloatArray
    fruitless: IntArray
    failed: FloatArray
    waited: IntArray
    balance_then: FloatArray
    stake_s: FloatArray
    lost_s: FloatArray
    hoped_s_per_s: FloatArray
    noise_s_per_s: FloatArray

    @property
    def wary(self) -> BoolArray:
        """Layers whose last moves failed."""
        return self.failed >= WARY_FROM


class Terms(NamedTuple):
    """Settings of the gate: see `RebalanceConfig`. parts: sub-windows of a window."""

    start: float
    band: float
    window_s: float
    decay: float
    plan_life_s: float
    cooldown_s: float
    parts: int = 1

    @property
    def stop(self) -> float:
        """Balance at which a watched layer is left alone again."""
        return min(1.0, self.start + self.band)


class Verdict(StrEnum):
    """What the gate says to moves that belong together: the name of a record's rule."""

    REGRET_REACHED = "regret_reached"
    PAYS_IN_TIME = "pays_in_time"
    SHIFT = "shift"
    GAIN_BELOW_COST = "gain_below_cost"
    GAIN_BELOW_BAND = "gain_below_band"
    REGRET_BELOW_COST = "regret_below_cost"

    @property
    def starts(self) -> bool:
        """Whether the moves may start."""
        return self in (Verdict.REGRET_REACHED, Verdict.PAYS_IN_TIME, Verdict.SHIFT)


def initial_gate(num_layers: int) -> GateState:
    """Nothing lost, nothing watched, nothing resting."""
    return GateState(
        regret_s=np.zeros(num_layers, np.float64),
        swing=np.zeros(num_layers, np.float64),
        watched=np.zeros(num_layers, np.bool_),
        rest_until_s=np.full(num_layers, -np.inf, np.float64),
        fruitless=np.zeros(num_layers, np.int64),
        failed=np.zeros(num_layers, np.float64),
        waited=np.zeros(num_layers, np.int64),
        balance_then=np.ones(num_layers, np.float64),
        stake_s=np.zeros(num_layers, np.float64),
        lost_s=np.zeros(num_layers, np.float64),
        hoped_s_per_s=np.zeros(num_layers, np.float64),
        noise_s_per_s=np.zeros(num_layers, np.float64),
    )


# -- windows -------------------------------------------------------------------------------------


def charge(
    gate: GateState, saved_s_per_s: FloatArray, lost_s_per_s: FloatArray, terms: Terms
) -> GateState:
    """Regret after one more window: decayed, plus what each layer's kept target would have saved in
    it: 0 where there is none, below 0 where it would have lost. lost_s_per_s: what layers that cool
    down lost in it against balance."""
    regret = gate.regret_s * terms.decay + saved_s_per_s * terms.window_s
    short = np.maximum(gate.noise_s_per_s, gate.hoped_s_per_s - saved_s_per_s)
    noise_s = np.where(saved_s_per_s != 0.0, short * terms.window_s, 0.0)
    swing = gate.swing * terms.decay**2 + noise_s**2
    return msgspec.structs.replace(
        gate,
        regret_s=regret,
        swing=swing,
        failed=gate.failed * FAILED_KEEP,
        lost_s=gate.lost_s + lost_s_per_s * terms.window_s,
    )


def watch(gate: GateState, balance: FloatArray, kept: BoolArray, terms: Terms) -> GateState:
    """Watch layers that fell below `start`; leave alone those back at `stop`, and forget their
    regret unless a target is kept that changes them (`kept`)."""
    watched = (gate.watched | (balance < terms.start)) & (balance < terms.stop)
    return msgspec.structs.replace(
        gate,
        watched=watched,
        regret_s=np.where(watched | kept, gate.regret_s, 0.0),
        swing=np.where(watched | kept, gate.swing, 0.0),
        waited=np.where(watched, gate.waited, 0),
        # Forgotten step by step: a layer on the edge would start anew whenever noise lifts it.
        fruitless=np.where(watched, gate.fruitless, np.maximum(gate.fruitless - 1, 0)),
        balance_then=np.where(watched | (gate.fruitless > 0), gate.balance_then, 1.0),
    )


def due(
    gate: GateState, balance: FloatArray, shifted: BoolArray, at_s: float, terms: Terms
) -> BoolArray:
    """Layers to plan now: watched and not resting."""
    worse = (gate.fruitless > 0) & (balance < gate.balance_then - terms.band)
    woken = shifted | worse | ((gate.fruitless == 0) & (gate.lost_s > gate.stake_s))
    found: BoolArray = gate.watched & ((at_s >= gate.rest_until_s) | woken)
    return found


# -- targets -------------------------------------------------------------------------------------


def foresee(
    gate: GateState, figures: Sequence[LayerFigure], fresh: BoolArray, terms: Terms
) -> GateState:
    """Remember what targets promise and by how much chance moves it, a window's share of that of
    its sub-windows; charge predictions of layers for which no target was kept before (`fresh`)."""
    regret, swing = gate.regret_s.copy(), gate.swing.copy()
    hoped, noise = gate.hoped_s_per_s.copy(), gate.noise_s_per_s.copy()
    for figure in figures:
        layer, worth = figure.layer, figure.worth_s_per_s
        hoped[layer] = figure.gain_s_per_s
        noise[layer] = figure.spread_s_per_s / math.sqrt(terms.parts)
        if fresh[layer]:
            regret[layer] += terms.window_s * (PREDICTED_SHARE * worth if worth > 0.0 else worth)
            swing[layer] += (noise[layer] * terms.window_s) ** 2
    return msgspec.structs.replace(
        gate, regret_s=regret, swing=swing, hoped_s_per_s=hoped, noise_s_per_s=noise
    )


class Weighed(NamedTuple):
    """Moves that belong together on the scales, and the verdict. Seconds; gain is a second."""

    layers: tuple[int, ...]
    gain_s_per_s: float
    cost_s: float
    regret_s: float
    threshold_s: float
    verdict: Verdict


def weigh(
    gate: GateState, figures: Sequence[LayerFigure], shifted: BoolArray, terms: Terms
) -> Weighed:
    """Weigh layers whose moves belong together."""
    gain = sum(f.worth_s_per_s for f in figures)
    cost = sum(f.cost_s for f in figures)
    # What only frees memory follows no noise.
    band = terms.band * sum(f.seconds_per_s for f in figures if f.writes)
    regret = float(sum(gate.regret_s[f.layer] for f in figures))
    threshold = cost + band * terms.window_s
    if not pays(gain, cost, terms.plan_life_s):
        verdict = Verdict.GAIN_BELOW_COST
    elif gain < band:
        verdict = Verdict.GAIN_BELOW_BAND
    elif regret >= threshold and stands_out(gate, figures, regret, threshold):
        verdict = Verdict.REGRET_REACHED
    elif _has_shown(gate, figures, gain, cost, regret, terms):
        verdict = Verdict.PAYS_IN_TIME
    elif any(shifted[f.layer] and gate.failed[f.layer] < FAILED_MAX for f in figures):
        verdict = Verdict.SHIFT
    else:
        verdict = Verdict.REGRET_BELOW_COST
    return Weighed(tuple(f.layer for f in figures), gain, cost, regret, threshold, verdict)


def stands_out(
    gate: GateState, figures: Sequence[LayerFigure], regret_s: float, threshold_s: float
) -> bool:
    """Whether regret is more than chance makes of savings whose mean is zero."""
    noise_s = math.sqrt(sum(gate.swing[f.layer] for f in figures))
    if regret_s >= LARGE * threshold_s:
        return regret_s >= LARGE_DEVIATIONS * noise_s
    # Of a bell curve at most exp(-u^2 / 2) / 2 lies above u.
    return regret_s >= noise_s * math.sqrt(2.0 * math.log(len(gate.swing) / (2.0 * FALSE_ALARMS)))


def _has_shown(
    gate: GateState,
    figures: Sequence[LayerFigure],
    gain_s_per_s: float,
    cost_s: float,
    regret_s: float,
    terms: Terms,
) -> bool:
    """Whether the mean gain measured over enough windows speaks for the moves."""
    if max(int(gate.waited[f.layer]) for f in figures) < WAIT_WINDOWS_MAX:
        return False
    if not stands_out(gate, figures, regret_s, math.inf):
        return False
    seen = sum(terms.decay**n for n in range(WAIT_WINDOWS_MAX + 1))
    measured = regret_s / (seen * terms.window_s)
    return measured >= MEASURED_SHARE * gain_s_per_s and pays(measured, cost_s, terms.plan_life_s)


def fruitless(  # the gate's terms and what was seen
    gate: GateState,
    layers: Sequence[int],
    balance: FloatArray,
    at_s: float,
    terms: Terms,
    *,
    times: int = 1,
) -> GateState:
    """Let layers rest for which nothing worth having was found; the longer, the more often. times:
    fruitless plans that this one counts for."""
    index = np.array(layers, dtype=np.int64)
    count, rest, then = gate.fruitless.copy(), gate.rest_until_s.copy(), gate.balance_then.copy()
    regret, waited, swing = gate.regret_s.copy(), gate.waited.copy(), gate.swing.copy()
    count[index] += times
    regret[index], waited[index], swing[index] = 0.0, 0, 0.0
    windows = np.minimum(2.0 ** np.minimum(count[index], 62), REST_WINDOWS_MAX)
    # Half a window less: the driver's clock does not close windows to the microsecond.
    rest[index] = at_s + (windows - 0.5) * terms.window_s
    then[index] = np.minimum(then[index], balance[index])
    return msgspec.structs.replace(
        gate,
        regret_s=regret,
        swing=swing,
        waited=waited,
        fruitless=count,
        rest_until_s=rest,
        balance_then=then,
    )


def waits(gate: GateState, layers: Sequence[int]) -> tuple[GateState, tuple[int, ...]]:
    """Count one more window that the moves of these layers wait for regret; those that have waited
    too long."""
    waited, index = gate.waited.copy(), np.array(layers, dtype=np.int64)
    waited[index] += 1
    too_long = tuple(index[waited[index] > WAIT_WINDOWS_MAX].tolist())
    return msgspec.structs.replace(gate, waited=waited), too_long


def moved(gate: GateState, costs: Mapping[int, float], at_s: float, terms: Terms) -> GateState:
    """Layers whose moves have ended: nothing is lost against a layout they have; they cool down.
    costs: seconds of their copies, by layer."""
    index = np.array(list(costs), dtype=np.int64)
    stake, lost = gate.stake_s.copy(), gate.lost_s.copy()
    stake[index], lost[index] = list(costs.values()), 0.0
    regret, rest, times = gate.regret_s.copy(), gate.rest_until_s.copy(), gate.fruitless.copy()
    waited, then = gate.waited.copy(), gate.balance_then.copy()
    swing = gate.swing.copy()
    regret[index], times[index], waited[index], then[index] = 0.0, 0, 0, 1.0
    swing[index] = 0.0
    rest[index] = at_s + terms.cooldown_s
    return msgspec.structs.replace(
        gate,
        regret_s=regret,
        swing=swing,
        rest_until_s=rest,
        fruitless=times,
        waited=waited,
        balance_then=then,
        stake_s=stake,
        lost_s=lost,
    )


def paid_back(
    gate: GateState,
    promised: dict[int, float],
    brought: dict[int, float],
    at_s: float,
    terms: Terms,
) -> tuple[GateState, tuple[int, ...]]:
    """Note which layers' moves did not bring what they promised, and let those that fail again and
    again rest longer; these layers."""
    failed, rest = gate.failed.copy(), gate.rest_until_s.copy()
    layers = tuple(
        layer
        for layer, gain in promised.items()
        if gain > 0.0 and brought.get(layer, gain) < FAILED_SHARE * gain
    )
    for layer in layers:
        failed[layer] += 1.0
        if failed[layer] > FAILED_MAX:
            windows = min(2.0 ** int(failed[layer]), FAILED_REST_WINDOWS_MAX)
            rest[layer] = max(rest[layer], at_s + (windows - 0.5) * terms.window_s)
    return msgspec.structs.replace(gate, failed=failed, rest_until_s=rest), layers


# -- one plan as a whole -------------------------------------------------------------------------


def pays(gain_s_per_s: float, cost_s: float, plan_life_s: float) -> bool:
    """Whether the predicted saving over the expected life exceeds the cost of the copies."""
    return gain_s_per_s > 0.0 and gain_s_per_s * plan_life_s > cost_s
