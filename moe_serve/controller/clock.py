"""Driver time: monotonic seconds that go on where the journal ended.

Responsible for time that never runs backwards over a restart. A journal's times stay comparable
with those that follow. The wall clock, which people and programs set as they like, is for people:
nothing is decided by it. Called by everything in the controller that needs a time.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DriverClock:
    """`base_s`: driver time at which this clock begins."""

    def __init__(self, base_s: float) -> None:
        self._offset_s = base_s - time.monotonic()

    def now_s(self) -> float:
        """Driver time."""
        return time.monotonic() + self._offset_s


def boot_s() -> float:
    """Seconds since this machine was booted; every process reads the same clock."""
    return time.monotonic()


def boot_id() -> str:
    """Names this boot of this machine, "" where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def wall_s() -> float:
    """Seconds since the Unix epoch, for people only."""
    return datetime.now(UTC).timestamp()
