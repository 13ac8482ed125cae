"""A request in a simulated router, the bounds of its queue, and words for refusals.

Responsible for these records. Holds no rule. Used by the router of a world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from placement.roles.admission import Verdict
from placement.roles.router_records import Dispatch, FailureKind
from placement.sim.clock import Timer
from placement.sim.traffic import Request

WHY = {
    FailureKind.NO_TABLE: "no_table",
    FailureKind.NO_REPLICA: "no_replica",
    FailureKind.ATTEMPTS: "attempts",
    FailureKind.WEIGHTS_CHANGED: "weights_changed",
    FailureKind.BUSY: "busy",
    FailureKind.UNREACHABLE: "unreachable",
    FailureKind.BUDGET: "budget",
}
VERDICTS = {
    Verdict.QUEUE_FULL: "queue_full",
    Verdict.TOO_LATE: "too_late",
    Verdict.CLOSED: "closed",
}

Answer = Callable[[str], None]
"""What the caller is told: "ok", or the code of a typed error."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the queue in front of a router."""

    permits_max: int = 8
    rows_max: int = 48
    queue_max: int = 6


@dataclass(slots=True, eq=False)
class Flight:
    """One request in a router. key: its number there. timers: deadline and the caller's
    patience."""

    key: int
    request: Request
    deadline_at_s: float
    answer: Answer
    timers: list[Timer] = field(default_factory=list)
    unsettled: dict[int, tuple[Dispatch, Timer]] = field(default_factory=dict)
