"""Requests of a simulated world: who asks for which experts, how long they wait, what comes out.

Responsible for popularity that shifts, for callers that give up, repeat or ask for nonsense, and
for the oracle: the sum a request must get. Called by the world, which sends requests to routers.

The oracle. Every expert has a mark and every pair a value, both random 64-bit numbers; an expert
makes value x mark of a pair, and a row is the sum of its pairs, modulo 2^64. A pair that is lost,
doubled, or served by another expert makes another sum, but for one chance in 2^64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placement.sim.dice import Dice
from placement.topology import MoeSpec

VALID_SHARE = 0.97
"""Share of pairs that are valid."""
NONSENSE_SHARE = 0.01
"""Share of requests that name an expert that does not exist."""


@dataclass(slots=True, eq=False)
class Request:
    """One call of a layer: ids int32 [T, k], valid uint8 [T, k], values uint64 [T, k]. `counts`:
    whether it is demand, a caller's first attempt. patience_s: the caller cancels after it."""

    number: int
    layer: int
    ids: npt.NDArray[np.int32]
    valid: npt.NDArray[np.uint8]
    values: npt.NDArray[np.uint64]
    timeout_s: float
    patience_s: float
    counts: bool
    sound: bool

    def wanted(self, marks: npt.NDArray[np.uint64], num_experts: int) -> npt.NDArray[np.uint64]:
        """The oracle: uint64 [T], the sum of each row."""
        keys = self.layer * num_experts + self.ids
        made = np.where(self.valid != 0, self.values * marks[keys], np.uint64(0))
        total: npt.NDArray[np.uint64] = made.sum(axis=1, dtype=np.uint64)
        return total


class Traffic:
    """Draws requests. exponent: of Zipf's law; rows_max: of a request."""

    def __init__(
        self, spec: MoeSpec, dice: Dice, *, exponent: float, rows_max: int, deadline_s: float
    ) -> None:
        assert spec.top_k == 2, "a row has a first and a second choice"
        self._spec = spec
        self._dice = dice
        self._rows_max = rows_max
        self._deadline_s = deadline_s
        weight = 1.0 / np.arange(1, spec.num_experts + 1) ** exponent
        self._weight = weight / weight.sum()
        self._steps = np.cumsum(self._weight)
        self._order = np.zeros((spec.num_layers, spec.num_experts), dtype=np.int64)
        self._next = 0
        self.shift()

    def shift(self) -> None:
        """Other experts are popular from now on."""
        spec = self._spec
        self._order = np.stack(
            [self._dice.rng.permutation(spec.num_experts) for _ in range(spec.num_layers)]
        )

    def popularity(self) -> npt.NDArray[np.float64]:
        """Share of pairs that want each expert now: float64 [layers, experts]. The second choice of
        a row is another expert than its first, so shares are those of what is really drawn."""
        spec = self._spec
        first = self._weight
        again = first * first
        # A second choice that would be the first one again goes to the next rank of popularity.
        second = first - again + np.roll(again, 1)
        share = np.zeros((spec.num_layers, spec.num_experts))
        for layer in range(spec.num_layers):
            share[layer, self._order[layer]] = (first + second) / 2
        return share

    def draw(self) -> Request:
        """The next request."""
        spec, dice = self._spec, self._dice
        layer = dice.below(spec.num_layers)
        rows = 1 + dice.below(self._rows_max)
        shape = (rows, spec.top_k)
        place = np.searchsorted(self._steps, dice.rng.random(shape))
        place = np.minimum(place, spec.num_experts - 1)
        same = place[:, 1] == place[:, 0]
        place[same, 1] = (place[same, 1] + 1) % spec.num_experts
        ids = self._order[layer][place].astype(np.int32)
        valid = (dice.rng.random(shape) < VALID_SHARE).astype(np.uint8)
        sound = not dice.chance(NONSENSE_SHARE)
        if not sound:
            ids[dice.below(rows), 0] = dice.pick((-1, spec.num_experts, 1 << 30))
        hasty = dice.chance(0.05)
        timeout_s = dice.between(-0.002, 0.03) if hasty else dice.around(self._deadline_s)
        self._next += 1
        return Request(
            number=self._next,
            layer=layer,
            ids=ids,
            valid=valid,
            values=dice.rng.integers(1, 1 << 63, shape, dtype=np.uint64),
            timeout_s=timeout_s,
            patience_s=dice.between(0.0, 0.05) if dice.chance(0.03) else float("inf"),
            counts=not dice.chance(0.05),
            sound=sound,
        )
