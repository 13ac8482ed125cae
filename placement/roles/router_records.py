"""What crosses between the router's rules and their driver: settings in, jobs, sub-calls and
outcomes out.

Responsible for these plain records. Must never hold state. Called by `placement.roles.router` and
whoever drives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from placement.roles.assignment import (
    Bytes,
    Int32s,
    Int64s,
    LayerReplicas,
    Part,
    TableIndex,
    assign,
)
from placement.roles.calls import Cause

PAIR_COUNTERS = (
    "sent_pairs",
    "served_pairs",
    "retried_pairs",
    "hedged_pairs",
    "stale_pairs",
    "refused_pairs",
    "lost_pairs",
)
"""Counters of a RouterRole. sent = first + retried + hedged = served + stale + refused + lost + on
their way.
"""


@dataclass(frozen=True, slots=True)
class RouterRules:
    """Limits of the router's rules. Durations in seconds, shares in [0, 1]."""

    max_attempts: int = 3
    """Times the same pairs may be sent, the first time included; hedges apart, and what waited for
    a shard to come back."""
    retry_share: float = 0.2
    retries_least: int = 3
    """Retries on their way at once: at most `retry_share` of the open calls, but at least this
    many. Others wait.
    """
    budget_window_s: float = 10.0
    budget_least: int = 10
    """Retries in the window: at most `retry_share` of the calls made in it, but at least this many.
    Others wait."""
    retry_patience_s: float = 1.0
    """Longest wait of a call for room in the window; then its request fails. For others to end it
    waits as long as its deadline lets it."""
    attempt_timeout_s: float = 5.0
    """Longest wait for one sub-call beyond the backlog of its rank."""
    silence_s: float = 1.0
    silence_factor: float = 10.0
    """Where another replica exists, the wait is no longer than this many times the p95 of such
    calls, and at least `silence_s`; and it leaves half of the request's time."""
    fault_silence_s: float = 0.2
    """Silence counts as the shard's fault beyond that many times the p95, and at least this long;
    before a p95 is known, beyond `silence_s`."""
    retry_wait_s: float = 0.01
    """Wait before a retry that was not caused by a stale table, times its attempt."""
    hold_margin_s: float = 0.05
    """A call that no reachable rank can serve is held until one can, or until so little time is
    left (or a tenth of it): then its request fails, so that the caller is still told why."""
    hedge_after_s: float | None = None
    """Age of a call at which it is sent a second time; None = the p95 of recent calls of its
    size."""
    hedge_least_s: float = 0.002
    """Never younger than this."""
    hedge_share: float = 0.05
    """Hedged calls in `budget_window_s`, as a share of the calls made in it; 0 = never."""
    faults_to_eject: int = 5
    eject_s: float = 30.0
    eject_max_s: float = 300.0
    eject_share: float = 0.1
    """Ejection after so many faults of a shard in a row, for eject_s x times ejected, never above
    the share of ranks (at least 1).
    """
    rank_slowness: tuple[float, ...] = ()
    """How many times as long as the fastest device each rank's is declared to take, by rank; () =
    all alike."""
    memory_bound_pairs: float = 0.0
    """Pairs of an expert that take as long as reading it (`placement.cost.least_crossover`); 0 =
    reading costs nothing. Batches with at most so many pairs an active expert are memory-bound.
    """


class Acceptance(IntEnum):
    """What became of a table."""

    APPLIED = 0
    KNOWN = 1
    """This one or a newer one is in use already."""
    STALE_TERM = 2
    """From a controller whose term is lower than one seen."""
    MISFIT = 3
    """Of another model shape."""


class FailureKind(IntEnum):
    """Why a request cannot be finished."""

    NO_TABLE = 0
    NO_REPLICA = 1
    ATTEMPTS = 2
    WEIGHTS_CHANGED = 3
    BUSY = 4
    """Every rank that was asked had too much to do: the caller should wait."""
    UNREACHABLE = 5
    """Replicas are listed, but no rank that has them could be reached in time."""
    BUDGET = 6
    """There was no room for one more retry: much is failing."""


@dataclass(frozen=True, slots=True)
class Failure:
    """End of a request without a result."""

    kind: FailureKind
    detail: str


@dataclass(frozen=True, slots=True, eq=False)
class PlanJob:
    """One split to compute. `call_id` is None for a request's first one. Holds its epoch until
    committed or abandoned.
    """

    request_key: int
    layer: int
    call_id: int | None
    cause: Cause
    index: TableIndex
    replicas: LayerReplicas
    ids: Int32s
    valid: Bytes
    row_id: Int32s
    backlog: Int64s
    tie_offset: int
    memory_bound_pairs: float

    def run(self) -> tuple[Part, ...]:
        """The split. Touches nothing shared: safe in another thread."""
        return assign(
            self.replicas,
            self.ids,
            self.valid,
            self.row_id,
            self.backlog,
            self.tie_offset,
            self.memory_bound_pairs,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """One sub-call to send now. `timeout_s`: give it up, as lost by the shard's fault, after this
    time.
    """

    sub_id: int
    call_id: int
    request_key: int
    layer: int
    cause: Cause
    attempt: int
    incarnation: int
    term: int
    epoch: int
    timeout_s: float
    part: Part


@dataclass(frozen=True, slots=True)
class Retry:
    """A call to plan again after `wait_s` seconds."""

    request_key: int
    call_id: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """What an answer or a loss meant for its request. A late one means nothing."""

    request_key: int
    finished: bool = False
    failure: Failure | None = None
    held_call: int | None = None
    """A call that waits for a rank to come back."""
