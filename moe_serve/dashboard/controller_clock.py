"""The controller's date, now: by its clock, not by that of the page's machine.

Decisions and moves are dated by the controller. "The last 60 seconds" of them, and how long ago one
was, must be counted from the same clock, and machines differ by minutes.

Worked example: the newest window ended at second 500 of the controller and is 2 s old, so it is
second 502 there. Its newest decision has the second 490 and the date 12:00:00, so it is 12:00:12
there. Here it is 12:01:42: the controller's clock is ahead by -90 s.

Seconds of two lives of a controller cannot be compared: they stand still while it is down. Windows
and decisions are put together only where one connection told both; until then the difference of the
connection before is taken, and at first none.

Responsible for that difference, and for telling where the present life began. Must never be read by
what guards or waits: a clock that is set changes it. Called by `feed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from moe_serve.rpc import placement_pb2 as pb

SKEW_MIN_S: Final = 1.0
"""A smaller difference, and a smaller change of it, is the way of a message: dates do not jump."""


class ControllerClock:
    """Tell it each connection, and every window and decision. clock_s: monotonic seconds; wall_s:
    seconds since the Unix epoch. Both of the page."""

    def __init__(self, clock_s: Callable[[], float], wall_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._wall_s = wall_s
        self._ahead_s = 0.0
        self._zero_s: float | None = None
        """The page's monotonic second at the controller's second 0, in its present life."""
        self._zero_wall_s: float | None = None
        """The controller's date at its second 0."""
        self._began_s: float | None = None
        """The page's monotonic second at which the present life began."""

    def now_s(self) -> float:
        """Seconds since the Unix epoch, at the controller."""
        return self.date_of(self._wall_s())

    def date_of(self, wall_s: float) -> float:
        """A date of the page's clock as the controller's clock has it."""
        return wall_s + self._ahead_s

    def life_began_s(self) -> float:
        """The controller's second at which its present life began, infinite until that is known:
        no earlier second has a date that could be told from now."""
        if self._zero_s is None or self._began_s is None:
            return math.inf
        return self._began_s - self._zero_s

    def connected(self) -> None:
        """What comes now may be of another life of the controller."""
        self._zero_s = self._zero_wall_s = self._began_s = None

    def placement(self, placement: pb.GetPlacementResponse) -> None:
        """A placement has come."""
        self._began_s = self._clock_s() - placement.uptime_s

    def window(self, load: pb.GetLoadResponse) -> bool:
        """A window has come. Whether it is the first of its connection."""
        first = self._zero_s is None
        self._zero_s = self._clock_s() - load.age_s - load.end_s
        self._compare()
        return first

    def record(self, record: pb.DecisionRecord) -> None:
        """A decision has come; they come in order."""
        self._zero_wall_s = record.wall_time_s - record.at_s
        self._compare()

    def _compare(self) -> None:
        if self._zero_s is None or self._zero_wall_s is None:
            return
        ahead_s = self._zero_wall_s + (self._clock_s() - self._zero_s) - self._wall_s()
        if math.isfinite(ahead_s) and abs(ahead_s - self._ahead_s) > SKEW_MIN_S:
            self._ahead_s = ahead_s
