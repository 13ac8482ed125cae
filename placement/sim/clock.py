"""Virtual time: a heap of things to do, in order of time, and in a seeded order at the same
instant.

Responsible for time and order, so that nobody relies on luck. Called by the world.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np


class VirtualClock:
    """`at(time, action)` and `run_until(time)`. Actions at one instant run in an order drawn from
    the generator."""

    def __init__(self, rng: np.random.Generator, start_s: float = 0.0) -> None:
        self._rng = rng
        self._heap: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = 0
        self.now_s = start_s
        self.actions_run = 0

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Run the action at that time, or now where that is over."""
        self._count += 1
        entry = (max(at_s, self.now_s), float(self._rng.random()), self._count, action)
        heapq.heappush(self._heap, entry)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run the action after a delay."""
        self.at(self.now_s + delay_s, action)

    def run_until(self, end_s: float) -> None:
        """Run everything that is due up to and including `end_s`; the time is then `end_s`."""
        while self._heap and self._heap[0][0] <= end_s:
            at_s, _, _, action = heapq.heappop(self._heap)
            self.now_s = at_s
            self.actions_run += 1
            action()
        self.now_s = max(self.now_s, end_s)
