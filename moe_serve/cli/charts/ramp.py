"""A ramp of colours for heat: dark blue to yellow, its lightness growing evenly, so that it reads
alike with any colour vision and in grey. Pure. Called by the heat map's drawings.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Colour = tuple[int, int, int]

_STOPS: Final = (
    (0, 34, 78),
    (18, 53, 112),
    (59, 73, 108),
    (87, 93, 109),
    (112, 113, 115),
    (138, 134, 120),
    (165, 156, 116),
    (195, 179, 105),
    (225, 204, 85),
    (254, 232, 56),
)
NUM_STEPS: Final = 240
"""Colours of the ramp; a palette of 256 has room for ink and paper beside them."""


def _ramp() -> tuple[Colour, ...]:
    places = np.linspace(0.0, 1.0, len(_STOPS))
    wanted = np.linspace(0.0, 1.0, NUM_STEPS)
    parts = [np.interp(wanted, places, [stop[part] for stop in _STOPS]) for part in range(3)]
    found = np.rint(np.stack(parts, axis=1)).astype(int).tolist()
    return tuple((int(red), int(green), int(blue)) for red, green, blue in found)


RAMP: Final = _ramp()
"""From the least to the most."""


def steps_of(levels: npt.NDArray[np.float64], steps: int = NUM_STEPS) -> npt.NDArray[np.int64]:
    """Levels in [0, 1] as numbers in [0, steps); -1 where there is none (NaN).

    >>> steps_of(np.array([0.0, 0.55, 1.0, np.nan]), 10).tolist()
    [0, 5, 9, -1]
    """
    known = np.nan_to_num(np.clip(levels, 0.0, 1.0))
    found = np.minimum((known * steps).astype(np.int64), steps - 1)
    return np.where(np.isnan(levels), -1, found)
