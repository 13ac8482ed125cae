"""Was every contribution added exactly once? Joined from two ledgers that the router does not
control alone.

Responsible for the join: what the front end asked for, what shards executed, which sub-calls' rows
the routers added. Pure; collects nothing itself. A contribution is (request, layer, row, k-slot).

Worked example: one row with two experts; rank 0 executes both, its reply is lost, rank 1 executes
both again as a retry and that reply is added. demanded 2, executed 4, retried 2, lost 0, doubled 0:
the lost reply was never combined.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_serve.ports import Cause

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Demanded:
    """Valid pairs of one answered request of one layer: row and k-slot, int64 [n]. `request_key` is
    the router's own number of the request."""

    router: str
    request_key: int
    layer: int
    row: I64
    pair_k: I64


@dataclass(frozen=True, slots=True)
class Executed:
    """Pairs of one sub-call that a shard executed and answered."""

    router: str
    call_id: int
    sub_id: int
    request_key: int
    layer: int
    cause: Cause
    row: I64
    pair_k: I64


@dataclass(frozen=True, slots=True)
class Combined:
    """Rows of one sub-call's reply that a router added, once for each time it added them."""

    router: str
    call_id: int
    sub_id: int
    row: I64


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Counts of contributions. Where nothing was lost, executed_pairs = demand_pairs + retried +
    hedged."""

    demand_pairs: int
    executed_pairs: int
    retried: int
    """Executions beyond the first of a contribution, sent because a reply was missing."""
    hedged: int
    """Executions beyond the first of a contribution, sent beside a running one."""
    resent: int
    """Executions whose first sending was refused (stale, draining) or lost before it ran: no work
    was done twice."""
    combined_pairs: int
    lost: int
    doubled: int
    unknown: int
    """Executed or combined contributions that belong to no answered request."""


Name = tuple[str, int, int, int]


@dataclass(slots=True)
class _Times:
    """How often a demanded contribution was executed, by cause, and added."""

    first: int = 0
    retry: int = 0
    hedge: int = 0
    added: int = 0


def audit(
    demanded: Iterable[Demanded], executed: Iterable[Executed], combined: Iterable[Combined]
) -> AuditResult:
    """Join the three and count."""
    added = _added_rows(combined)
    times: dict[Name, _Times] = {}
    for item in demanded:
        for row, k in zip(item.row.tolist(), item.pair_k.tolist(), strict=True):
            times[(item.router, item.request_key, row, k)] = _Times()
    unknown = joined = 0
    for entry in executed:
        rows = added.get((entry.router, entry.call_id, entry.sub_id), {})
        for row, k in zip(entry.row.tolist(), entry.pair_k.tolist(), strict=True):
            seen = times.get((entry.router, entry.request_key, row, k))
            if seen is None:
                unknown += 1
                continue
            seen.first += entry.cause == Cause.FIRST
            seen.retry += entry.cause == Cause.RETRY
            seen.hedge += entry.cause == Cause.HEDGE
            seen.added += rows.get(row, 0)
            joined += rows.get(row, 0)
    return _count(times.values(), joined, unknown)


def _count(times: Iterable[_Times], joined: int, unknown: int) -> AuditResult:
    demand = executed = retried = hedged = resent = lost = doubled = 0
    for seen in times:
        runs = seen.first + seen.retry + seen.hedge
        surplus = max(0, runs - 1)
        hedges = min(seen.hedge, surplus)
        demand += 1
        executed += runs
        hedged += hedges
        retried += surplus - hedges
        resent += runs - surplus if not seen.first else 0
        lost += seen.added == 0
        doubled += max(0, seen.added - 1)
    return AuditResult(
        demand_pairs=demand,
        executed_pairs=executed,
        retried=retried,
        hedged=hedged,
        resent=resent,
        combined_pairs=joined,
        lost=lost,
        doubled=doubled,
        unknown=unknown,
    )


def _added_rows(combined: Iterable[Combined]) -> dict[tuple[str, int, int], dict[int, int]]:
    added: dict[tuple[str, int, int], dict[int, int]] = {}
    for entry in combined:
        rows = added.setdefault((entry.router, entry.call_id, entry.sub_id), {})
        for row in entry.row.tolist():
            rows[row] = rows.get(row, 0) + 1
    return added
