"""Virtual time: a heap of things to do, in order of time, and in a seeded order at the same
instant.

Responsible for time and order, so that nobody relies on luck. Called by the world.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from placement.sim.dice import Dice

Action = Callable[[], None]


class Timer:
    """Something that will be done at a time, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Do it no more."""
        self.action = None


class VirtualClock:
    """`at(time, action)` and `run_until(time)`. Actions at one instant run in an order drawn from
    the dice. `actions_run` counts what was done, not what was cancelled."""

    def __init__(self, dice: Dice, start_s: float = 0.0) -> None:
        self._dice = dice
        self._heap: list[tuple[float, float, int, Timer]] = []
        self._count = 0
        self.now_s = start_s
        self.actions_run = 0

    def at(self, at_s: float, action: Action) -> Timer:
        """Run the action at that time, or now where that is over."""
        self._count += 1
        timer = Timer(action)
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._dice.unit(), self._count, timer))
        return timer

    def after(self, delay_s: float, action: Action) -> Timer:
        """Run the action after a delay."""
        return self.at(self.now_s + delay_s, action)

    def run_until(self, end_s: float) -> None:
        """Run everything that is due up to and including `end_s`; the time is then `end_s`."""
        while self._heap and self._heap[0][0] <= end_s:
            at_s, _, _, timer = heapq.heappop(self._heap)
            if timer.action is not None:
                self.now_s = at_s
                self.actions_run += 1
                timer.action()
        self.now_s = max(self.now_s, end_s)
