"""Whether the traffic has become another: change points at sub-window resolution.

Responsible for naming a shift and the sub-window that it began with. Must never forecast. Called by
`forecast` when a window closes.

The rule. Each phase keeps the mean share of every expert since the last shift, the *reference*, and
how far sub-windows *usually* lie from it: squared Hellinger distance, less what drawing so few
pairs makes of it, mean over layers. A sub-window is *off* where it lies `OFF_TIMES` as far. The
traffic has shifted where the last two sub-windows or more are off, or the last one is far off; the
shift began with the first of them. So a flip is found in its own window, or, where it fell into the
last sub-window, in the next. The reference then starts again from what came since.

Example. Sub-windows usually lie 0.02 from an old reference, off begins at 4 x 0.02 + 0.04 = 0.12.
A window's four lie at 0.02, 0.05, 0.61, 0.64: a shift, since the third.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from placement.forecast.kernels import blend_shares, distances
from placement.load import Counts, LoadWindow

FloatArray = npt.NDArray[np.float64]

OFF_TIMES: Final = 4.0
"""A sub-window is off where it lies this many times as far as usual ..."""
OFF_LEAST: Final = 0.04
"""... plus this much, so that very still traffic does not make trifles a shift."""
YOUNG: Final = 4.0
"""Sub-windows in the reference at which the bound is twice what it becomes."""
FAR_TIMES: Final = 2.0
"""A single last sub-window must lie this many times the bound of off."""
USUAL_KEEP: Final = 0.9
"""Share of the old usual distance that a sub-window which is not off leaves."""
NEAR_SHARE: Final = 0.5
"""A layer is near a shift from this share of the bound of off."""
REFERENCE_MAX: Final = 32.0
"""Sub-windows that the reference remembers about: slow drift is followed, not called a shift."""


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """A shift that was found.

    phase: value of Phase. layers: how many are off themselves. near: ids of the layers that are
    off or at least half as far, ascending: with few pairs a layer that shifted may not look off.
    distance: of the sub-windows since, mean over layers; usual: of those before. since_window:
    index of the window in which it began, since_part: its sub-window; found_window: index of the
    window at whose end it was found.
    """

    phase: int
    layers: int
    distance: float
    usual: float
    since_window: int
    since_part: int
    found_window: int
    near: tuple[int, ...] = ()


class ShiftState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What detection remembers.

    reference: float64 [phases, layers, experts], mean shares since the last shift. weight: float64
    [phases], sub-windows in it. usual: float64 [phases], -1 before any. parts_since: int64
    [phases], sub-windows since the last shift began, or since the first window; parts: sub-windows
    of a window. off_before: bool [phases], whether the last sub-window was off and waits for
    company. latest: the last shift found, of the phase that went farthest where several did at
    once.
    """

    reference: FloatArray
    weight: FloatArray
    usual: FloatArray
    parts_since: npt.NDArray[np.int64]
    off_before: npt.NDArray[np.bool_]
    parts: int = 0
    latest: Shift | None = None


def initial_shift(num_phases: int, num_layers: int, num_experts: int) -> ShiftState:
    """State before the first window."""
    return ShiftState(
        reference=np.zeros((num_phases, num_layers, num_experts), dtype=np.float64),
        weight=np.zeros(num_phases, dtype=np.float64),
        usual=np.full(num_phases, -1.0),
        parts_since=np.zeros(num_phases, dtype=np.int64),
        off_before=np.zeros(num_phases, dtype=np.bool_),
    )


def watch(state: ShiftState, window: LoadWindow) -> tuple[ShiftState, npt.NDArray[np.int64]]:
    """(state after a closed window, sub-window with which a shift began in each phase: int64
    [phases], 0 .. sub-windows - 1; -1 = the last one of the window before; sub-windows = none).
    """
    counts: Counts = np.ascontiguousarray(window.demand)
    parts, phases = counts.shape[:2]
    apart = np.zeros(counts.shape[:3], dtype=np.float64)
    distances(counts, state.reference, apart)
    next_reference = state.reference.copy()
    weight, usual = state.weight.copy(), state.usual.copy()
    since, before = state.parts_since + parts, state.off_before.copy()
    began = np.full(phases, parts, dtype=np.int64)
    latest = state.latest
    for phase in range(phases):
        own = counts[:, phase]
        if not own.any():
            continue
        if weight[phase] == 0:
            weight[phase] = _start(own, next_reference[phase], 0)
            usual[phase] = _spread(own, next_reference[phase])
            continue
        far, seen = _mean_distance(apart[:, phase])
        # A young reference is off itself, and what is usual is a guess, with few sub-windows seen.
        bound = OFF_TIMES * usual[phase] * (1.0 + YOUNG / weight[phase]) + OFF_LEAST
        first = _off_from(far, seen, bound)
        length = int(seen[first:].sum())
        waiting = bool(before[phase]) and first == 0 and length > 0
        if length >= 2 or (length == 1 and (waiting or far[first:].max() > FAR_TIMES * bound)):
            began[phase] = -1 if waiting else first
            found = _named(phase, apart[:, phase], first, window, usual[phase], int(began[phase]))
            if (
                latest is None
                or latest.found_window < window.index
                or (found.distance > latest.distance)
            ):
                latest = found
            weight[phase] = _start(own, next_reference[phase], first)
            since[phase] = parts - int(began[phase])
            before[phase] = False
            continue
        before[phase] = length == 1
        for part in np.nonzero(seen[:first])[0]:
            usual[phase] = USUAL_KEEP * usual[phase] + (1 - USUAL_KEEP) * min(far[part], bound)
        weight[phase] = blend_shares(
            own[:first], 0, next_reference[phase], float(weight[phase]), REFERENCE_MAX
        )
    after = ShiftState(
        reference=next_reference,
        weight=weight,
        usual=usual,
        parts_since=since,
        off_before=before,
        parts=parts,
        latest=latest,
    )
    return after, began


def _mean_distance(apart: FloatArray) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """(distance [sub-windows], mean over layers; which had anything to compare)."""
    known = apart >= 0.0
    seen: npt.NDArray[np.bool_] = np.any(known, axis=1)
    total = np.where(known, apart, 0.0).sum(axis=1)
    return total / np.maximum(known.sum(axis=1), 1), seen


def _off_from(far: FloatArray, seen: npt.NDArray[np.bool_], bound: float) -> int:
    """First of the last sub-windows that are all off; silent ones do not interrupt."""
    first = len(far)
    for part in range(len(far) - 1, -1, -1):
        if seen[part] and not far[part] > bound:
            break
        if seen[part]:
            first = part
    return first


def _start(counts: Counts, reference: FloatArray, first: int) -> float:
    """A reference of the sub-windows from `first` on, in place; returns its weight."""
    reference[:] = 0.0
    return float(blend_shares(counts, first, reference, 0.0, REFERENCE_MAX))


def _spread(counts: Counts, reference: FloatArray) -> float:
    """Mean distance of sub-windows from their own mean, as if they had not been in it."""
    apart = np.zeros((len(counts), 1, counts.shape[1]), dtype=np.float64)
    distances(np.ascontiguousarray(counts[:, None]), reference[None], apart)
    far, seen = _mean_distance(apart[:, 0])
    parts = int(seen.sum())
    return float(far[seen].mean()) * (parts / (parts - 1)) ** 2 if parts > 1 else 0.0


def _named(
    phase: int, apart: FloatArray, first: int, window: LoadWindow, usual: float, began: int
) -> Shift:
    known = apart[first:] >= 0.0
    each = np.where(known, apart[first:], 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    bound = OFF_TIMES * usual + OFF_LEAST
    return Shift(
        phase=phase,
        layers=int((each > bound).sum()),
        near=tuple(np.flatnonzero(each > NEAR_SHARE * bound).tolist()),
        distance=float(each[known.any(axis=0)].mean()),
        usual=float(usual),
        since_window=window.index if began >= 0 else window.index - 1,
        since_part=began if began >= 0 else len(window.demand) - 1,
        found_window=window.index,
    )
