"""Whom a retry or hedge of a call may ask, and the words for a request that nobody can serve.

Responsible for these questions about one call and one table. Must never hold state. Called by
`placement.roles.router`.
"""

from __future__ import annotations

import numpy as np

from placement.roles.assignment import Int32s, TableIndex
from placement.roles.calls import Call, Ended, OpenRequest
from placement.roles.router_records import Failure, FailureKind

_NAMED_MAX = 8
"""Experts that an error names; the others are as good as those."""


def failed_by(call: Call, index: TableIndex) -> frozenset[int]:
    """Ranks that failed this call, unless what made them fail has changed: a newer table, or a new
    life of the shard.
    """
    return frozenset(
        rank
        for rank, refusal in call.refused_by.items()
        if index.incarnation.get(rank) == refusal.incarnation
        and not (refusal.why is Ended.STALE and index.table.order > refusal.order)
    )


def same_nodes(call: Call, index: TableIndex) -> frozenset[int]:
    """Ranks on the nodes that have the call already, and the ranks that do wherever they are."""
    asked = {sub.rank for cover in call.covers.values() for sub in cover.subs}
    nodes = {index.node.get(rank) for rank in asked}
    return frozenset(rank for rank, node in index.node.items() if rank in asked or node in nodes)


def experts_of(request: OpenRequest, call: Call) -> list[int]:
    """Experts that a call asks for, ascending."""
    ids = request.ids[call.row_id]
    return [int(expert) for expert in np.unique(ids[call.pairs != 0])]


def out_of_reach(
    index: TableIndex, layer: int, experts: list[int], avoid: frozenset[int]
) -> list[int]:
    """Those of the experts that have replicas, but none off the avoided ranks."""
    found = []
    for expert in experts:
        ranks = [rank for rank, _, _ in index.table.replicas(layer, expert)]
        if ranks and avoid.issuperset(ranks):
            found.append(expert)
    return found


def missing(index: TableIndex, layer: int, ids: Int32s) -> Failure | None:
    """What to answer where an expert of `ids` has no listed replica."""
    if index.complete(layer):
        return None
    found = index.missing(layer, np.unique(ids).astype(np.int64))
    if not found:
        return None
    return Failure(FailureKind.NO_REPLICA, f"layer {layer} has no ready replica of {_named(found)}")


def unservable(request: OpenRequest, call: Call, index: TableIndex) -> Failure | None:
    """Why nobody that the table names can serve a call again, None where somebody may."""
    if index.table.weights_version != request.weights_version:
        return Failure(FailureKind.WEIGHTS_CHANGED, "the model's weights changed meanwhile")
    return missing(index, request.layer, request.ids[call.row_id][call.pairs != 0])


def unreachable(layer: int, experts: list[int], call: Call) -> Failure:
    """What to answer where a call was held to the end."""
    named = _named(experts) if experts else "its experts"
    why = _refusals(call) or "their connections are broken"
    return Failure(
        FailureKind.UNREACHABLE, f"layer {layer}: no rank with {named} could be reached ({why})"
    )


def gave_up(request: OpenRequest, call: Call) -> Failure:
    """What to answer where a call has used its attempts up."""
    only_busy = all(refusal.why is Ended.REFUSED for refusal in call.refused_by.values())
    return Failure(
        FailureKind.BUSY if only_busy else FailureKind.ATTEMPTS,
        f"layer {request.layer}, {_named(experts_of(request, call))}: {_rows(call)} failed "
        f"{call.attempt} times ({_refusals(call)})",
    )


def over_budget(request: OpenRequest, call: Call) -> Failure:
    """What to answer where too much is retried already."""
    return Failure(
        FailureKind.BUDGET,
        f"layer {request.layer}, {_named(experts_of(request, call))}: {_rows(call)} failed "
        f"({_refusals(call)}) and too much is failing to try again",
    )


def _named(experts: list[int]) -> str:
    more = " ..." if len(experts) > _NAMED_MAX else ""
    return "expert " + ", ".join(map(str, experts[:_NAMED_MAX])) + more


def _rows(call: Call) -> str:
    return f"{call.row_id.shape[0]} rows"


def _refusals(call: Call) -> str:
    return ", ".join(
        f"rank {rank} {refusal.why.name.lower()}"
        for rank, refusal in sorted(call.refused_by.items())
    )
