"""Driver time: monotonic seconds that go on where the journal ended.

Responsible for time that never runs backwards over a restart. A journal's times stay comparable
with those that follow. Called by everything in the controller that needs a time.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


class DriverClock:
    """`base_s`: driver time at which this clock begins."""

    def __init__(self, base_s: float) -> None:
        self._offset_s = base_s - time.monotonic()

    def now_s(self) -> float:
        """Driver time."""
        return time.monotonic() + self._offset_s


def wall_s() -> float:
    """Seconds since the Unix epoch, for people only."""
    return datetime.now(UTC).timestamp()
