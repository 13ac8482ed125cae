"""How long what is being computed may take before a shard says that it has stalled.

Responsible for that one limit. Must never end, refuse or start anything: it is asked. Fed by the
shard's core from the thread that computes; asked by its watch, from another thread.

Worked example: batches of this size took 0.2 s, so this one may take ten times as long, but at
least `STALL_LEAST_S`: 3 s. 5 s after it began, `late_s` is 5; once it ended, 0.
"""

from __future__ import annotations

import math

STALL_LEAST_S = 3.0
"""No work counts as stalled before this time, however short it should be: a busy machine may keep
a thread waiting for as long."""
STALL_FACTOR = 10.0
"""Times its estimate that a batch may take."""
STALL_UNKNOWN_S = 60.0
"""Time that a batch may take while nothing is known of its like."""
STALL_ROW_S = 10.0
"""Time that the rows of proofs and probes between two batches may take."""
_NOTHING = (math.nan, math.inf)
"""When nothing began, and until when that is in order."""


class Stall:
    """What is computed now and until when that is in order. Both times are read and written as
    one pair, which is atomic, so no lock is needed."""

    def __init__(self) -> None:
        self._times = _NOTHING

    def began(self, expected_s: float, at_s: float) -> None:
        """A batch that should take `expected_s` (0 = unknown) is being computed."""
        known = 0.0 < expected_s < math.inf
        allowed_s = max(STALL_LEAST_S, STALL_FACTOR * expected_s) if known else STALL_UNKNOWN_S
        self._times = (at_s, at_s + allowed_s)

    def rows_began(self, at_s: float) -> None:
        """Proofs and probes are being computed."""
        self._times = (at_s, at_s + STALL_ROW_S)

    def ended(self) -> None:
        """Nothing is being computed."""
        self._times = _NOTHING

    def late_s(self, at_s: float) -> float:
        """Seconds for which something has been computed where that is too long, else 0."""
        began_s, limit_s = self._times
        return at_s - began_s if at_s > limit_s else 0.0
