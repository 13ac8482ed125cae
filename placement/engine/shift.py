"""A shift of demand, as the forecast sees it: for how long it counts, and in which words a record
names it.

Responsible for reading the forecast's word on shifts. Detects nothing itself. Called by trigger and
decision.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from placement.engine.turn import Turn
from placement.planner.gate import BoolArray
from placement.topology import Phase

FRESH_WINDOWS = 2
"""Windows for which a shift counts, that in which it was found included: one plan may not hold all
that it takes."""


class ShiftSeen(NamedTuple):
    """layers: bool [layers], whose demand has just shifted; all, where only their sum shows it.
    words, numbers: for a record; empty where nothing shifted."""

    layers: BoolArray
    words: str
    numbers: dict[str, float]


def shift_seen(turn: Turn) -> ShiftSeen:
    """What the forecast says after the last window."""
    state, layers = turn.state, turn.spec.num_layers
    found = state.forecast.shift.latest
    if found is None or not 0 <= state.forecast.last_index - found.found_window < FRESH_WINDOWS:
        return ShiftSeen(np.zeros(layers, np.bool_), "", {})
    shifted = np.zeros(layers, np.bool_)
    shifted[list(found.near) or slice(None)] = True
    phase = Phase(found.phase).name.lower()
    return ShiftSeen(
        shifted,
        f"{phase} shifted in {found.layers} of {layers} layers in window {found.since_window}, "
        f"part {found.since_part}: {found.distance:.3g} from before, usual is {found.usual:.3g}",
        {
            "shift_phase": float(found.phase),
            "shift_layers": float(found.layers),
            "shift_distance": found.distance,
            "shift_usual_distance": found.usual,
            "shift_since_window": float(found.since_window),
            "shift_since_part": float(found.since_part),
        },
    )
