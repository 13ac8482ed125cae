"""A cause as data, and the two thresholds that all of them share.

Responsible for the form alone. Made by the modules that find causes, read by `words` and by whoever
shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SHARE_MIN: Final = 0.2
"""Share of the time of requests that a cause must cost before it is named."""
TIMES_SLOWER_MIN: Final = 1.75
"""How many times slower than what was measured beside it something must be. Between ranks that are
alike, measured within 20 % of the truth, it is 1.2 / 0.8 = 1.5 at most."""


class Kind(StrEnum):
    """What holds requests up."""

    HOT_EXPERT = "hot_expert"
    IMBALANCE = "imbalance"
    SLOW_RANK = "slow_rank"
    COPY = "copy"
    OVERLOAD = "overload"
    COLD_START = "cold_start"
    MEMORY = "memory"
    CONTROLLER_AWAY = "controller_away"


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause. share: of the time of requests that would not have been spent without it, 0 to 1.
    rank, layer, expert: -1 = none in particular. evidence: the numbers it was found by, their names
    carry units."""

    kind: Kind
    share: float
    evidence: Mapping[str, float]
    rank: int = -1
    layer: int = -1
    expert: int = -1


def named(share: float) -> bool:
    """Whether so large a share is worth a name."""
    return share >= SHARE_MIN
