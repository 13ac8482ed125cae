"""Faults that tests order from a shard, given as data in its settings.

Responsible for naming them. Production settings hold none. Called by commands and copy jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

FAIL_POINTS = frozenset({"reserve", "copy", "verify", "release", "corrupt"})
"""The first four answer the command with StepFailed(io); `corrupt` flips one bit of each copy
before it is verified."""


@dataclass(frozen=True, slots=True)
class FaultPoints:
    """`delay_copy_s`: each copy waits so long before its first byte. `fail`: names of FAIL_POINTS.

    Raises ValueError for an unknown name.
    """

    delay_copy_s: float = 0.0
    fail: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = self.fail - FAIL_POINTS
        if unknown:
            raise ValueError(f"fail: {sorted(unknown)} are none of {sorted(FAIL_POINTS)}")
