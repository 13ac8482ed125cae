"""Seconds in one byte, to 4 %: for figures that people look at and nothing decides by.

0 is no time at all, or none told. n > 0 is 2^-20 s * 2^((n - 1) / 9): about 1 us to 5 minutes.

Responsible for this scale. Must never raise: every byte has a meaning and every number a byte.
Called by `codec`.

Worked example: 2^-20 s is 1, twice as long is 10, and 10 ms are 121, read as 9.85 ms.
"""

from __future__ import annotations

import math
from typing import Final

_STEPS: Final = 9
"""Steps of the scale to twice the time: each is 8 %."""
_LEAST_S: Final = 2.0**-20
SECONDS_OF: Final = (0.0, *(_LEAST_S * 2 ** (n / _STEPS) for n in range(255)))
"""What each byte means."""
_MOST_S: Final = SECONDS_OF[-1]


def byte_of(seconds: float) -> int:
    """The byte that comes nearest; what the scale cannot hold is its end."""
    if seconds >= _MOST_S:
        return 255
    if not seconds > _LEAST_S / 2:
        return 0
    return max(1, 1 + round(_STEPS * math.log2(seconds / _LEAST_S)))
