"""One deliberate fault in combining, to show that the checks outside the router would find a real
one.

Passed as data in the router's settings, for tests and the demo's `--inject`; production settings
leave it out. Responsible for damaging exactly one request. Must never be on by default. Called by
`dispatch`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from placement.roles.calls import Contribution


class FaultKind(StrEnum):
    """What happens to one row of one partial sum."""

    DROP_ONE = "drop-one"
    DOUBLE_ONE = "double-one"


@dataclass(frozen=True, slots=True)
class ContributionFault:
    """The fault, and how many requests pass before it."""

    kind: FaultKind
    skip_requests: int = 0


class FaultInjector:
    """Applies a fault to one request."""

    def __init__(self, fault: ContributionFault) -> None:
        self._fault = fault
        self._seen = 0

    def apply(self, contributions: tuple[Contribution, ...]) -> tuple[Contribution, ...]:
        """The contributions to add; those of one request are damaged."""
        if not contributions:
            return contributions
        self._seen += 1
        if self._seen != self._fault.skip_requests + 1:
            return contributions
        first = contributions[0]
        if self._fault.kind is FaultKind.DOUBLE_ONE:
            again = replace(first, row_id=first.row_id[:1], take=first.take[:1])
            return (*contributions, again)
        return (replace(first, row_id=first.row_id[1:], take=first.take[1:]), *contributions[1:])
