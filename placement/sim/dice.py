"""Chance, drawn from a seed: one stream for each thing that is drawn, so that a change of one
leaves the others as they were.

Responsible for cheap scalar draws: numbers come in blocks, for a world draws hundreds of thousands
one at a time. Called by every part of a world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")
_BLOCK = 2048


class Dice:
    """One stream of a seed. `rng` draws arrays from the same stream."""

    def __init__(self, seed: int, stream: int = 0) -> None:
        self.rng = np.random.default_rng([seed, stream])
        self._drawn: list[float] = []

    def unit(self) -> float:
        """A number in [0, 1)."""
        if not self._drawn:
            self._drawn = self.rng.random(_BLOCK).tolist()
        return self._drawn.pop()

    def between(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * self.unit()

    def around(self, mean: float) -> float:
        """A number between half and one and a half times the mean."""
        return mean * (0.5 + self.unit())

    def chance(self, share: float) -> bool:
        """True with this probability."""
        return self.unit() < share

    def below(self, limit: int) -> int:
        """An integer in [0, limit)."""
        return int(self.unit() * limit)

    def pick(self, among: Sequence[_T]) -> _T:
        """One of a sequence that is not empty."""
        return among[self.below(len(among))]
