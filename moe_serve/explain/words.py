"""Causes in words: one sentence with the numbers, and the next step.

Responsible for these words alone, so that page, CLI and alerts say the same. Must never judge.
Called by the controller, and by whoever cannot reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from moe_serve.explain.cause import Cause, Kind

NO_START: Final = "the controller does not start"
"""How a controller whose admin port answers begins to say that it cannot serve."""


def sentence(cause: Cause) -> str:
    """What it is, in one sentence."""
    return f"{_WHAT[cause.kind](cause)}; {_cost(cause)}"


def next_step(cause: Cause) -> str:
    """What to do about it, in one or two sentences."""
    return _NEXT[cause.kind](cause)


def controller_away() -> Cause:
    """The cause that only they can tell who cannot reach the controller."""
    return Cause(Kind.CONTROLLER_AWAY, 0.0, {})


def _cost(cause: Cause) -> str:
    if cause.kind is Kind.CONTROLLER_AWAY:
        return "routers go on with the table they have, nothing is rebalanced or repaired"
    return f"it costs {cause.share:.0%} of the time of requests"


def _hot_expert(cause: Cause) -> str:
    numbers = cause.evidence
    replicas = int(numbers["replicas"])
    held = "one replica" if replicas == 1 else f"{replicas} replicas"
    more = int(numbers["layers"]) - 1
    also = f" (and {more} layers more are like it)" if more > 1 else ""
    also = " (and one layer more is like it)" if more == 1 else also
    return (
        f"expert {cause.expert} of layer {cause.layer} is hot: rank {cause.rank} has "
        f"{numbers['times_even_share']:.1f} x its even share of the layer and answers last, with "
        f"{held} of the expert{also}"
    )


def _hot_expert_next(cause: Cause) -> str:
    return (
        "Let it have more replicas: `moe-serve plan` shows what would move; automatic plans do it "
        "by themselves unless they are paused (`moe-serve resume`) or too dear (`moe-serve events`)"
    )


def _imbalance(cause: Cause) -> str:
    return (
        f"load is uneven without one expert to blame: rank {cause.rank} has "
        f"{cause.evidence['times_even_share']:.1f} x its even share of layer {cause.layer} and "
        "answers last"
    )


def _imbalance_next(cause: Cause) -> str:
    return (
        "`moe-serve plan` shows what a better placement would move; `moe-serve events` says why "
        "nothing does"
    )


def _slow_rank(cause: Cause) -> str:
    more = int(cause.evidence["ranks"]) - 1
    also = f" (and {more} more)" if more else ""
    alone = cause.evidence["ranks_alike"] < 2
    others = "its profile says, compared with the other ranks" if alone else "others of its profile"
    return (
        f"rank {cause.rank} is slow{also}: it takes {cause.evidence['times_slower']:.1f} x as long "
        f"to compute a pair as {others}"
    )


def _slow_rank_next(cause: Cause) -> str:
    return (
        f"Look at the device and the node of rank {cause.rank} (clocks, heat, another job); "
        f"`moe-serve drain {cause.rank}` takes its replicas elsewhere meanwhile"
    )


def _copy(cause: Cause) -> str:
    numbers = cause.evidence
    source, target = int(numbers["source_rank"]), int(numbers["target_rank"])
    way = f"from rank {source} to rank {target}" if source >= 0 else f"into rank {target}"
    return (
        f"an expert is copied {way}, and rank {cause.rank} takes {numbers['times_slower']:.1f} x "
        "as long for requests meanwhile"
    )


def _copy_next(cause: Cause) -> str:
    return (
        "Wait until it is done (`moe-serve status --watch`), or stop further ones with "
        "`moe-serve pause`; a lower limits.copy_bytes_per_s leaves more for requests"
    )


def _overload(cause: Cause) -> str:
    numbers = cause.evidence
    if numbers["queue_share"] >= numbers["wait_share"] or numbers["refused_requests"]:
        return (
            f"more requests come than routers take: {int(numbers['waiting_requests'])} wait for a "
            f"permit now, {int(numbers['refused_requests'])} were refused"
        )
    return (
        f"every rank has a queue and computes {numbers['busy_share']:.0%} of the time: more comes "
        "than they can do"
    )


def _overload_next(cause: Cause) -> str:
    return (
        "Send less or add ranks (`moe-serve add-rank`); where ranks have room, raise "
        "limits.max_rows_in_flight or add routers"
    )


def _cold_start(cause: Cause) -> str:
    numbers = cause.evidence
    missing = int(numbers["experts_missing"])
    where = f"rank {cause.rank} " if cause.rank >= 0 else "a rank "
    if missing:
        return (
            f"{missing} experts have no replica until {where}has loaded them: requests that need "
            "them wait or fail"
        )
    if numbers["ranks_silent"] and not numbers["ranks_cold"]:
        return f"{where}does not answer, and requests wait for it"
    return f"{where}has only just begun to serve, or does not yet"


def _cold_start_next(cause: Cause) -> str:
    return (
        "Wait until it serves (`moe-serve status --watch` shows what it loads); with rebalance."
        "floor 2 and slots for it, every expert has a replica elsewhere meanwhile"
    )


def _memory(cause: Cause) -> str:
    numbers = cause.evidence
    if numbers["memory_errors"]:
        return (
            f"rank {cause.rank} had too little memory for {int(numbers['memory_errors'])} batches, "
            "which were computed in parts"
        )
    return (
        "experts cannot be spread for want of memory: no slot is free beyond what each expert needs"
    )


def _memory_next(cause: Cause) -> str:
    return (
        "Give ranks more slots (`moe-serve budget RANK BYTES`), add a rank (`moe-serve add-rank`), "
        "or lower rebalance.floor"
    )


def _controller_away(cause: Cause) -> str:
    return "the controller does not answer"


def _controller_away_next(cause: Cause) -> str:
    return (
        "Ray starts it again by itself; `moe-serve doctor` looks whether the service lives, "
        "`ray list actors` where its controller is, and its log says why it does not start"
    )


_WHAT: Final[Mapping[Kind, Callable[[Cause], str]]] = MappingProxyType(
    {
        Kind.HOT_EXPERT: _hot_expert,
        Kind.IMBALANCE: _imbalance,
        Kind.SLOW_RANK: _slow_rank,
        Kind.COPY: _copy,
        Kind.OVERLOAD: _overload,
        Kind.COLD_START: _cold_start,
        Kind.MEMORY: _memory,
        Kind.CONTROLLER_AWAY: _controller_away,
    }
)
_NEXT: Final[Mapping[Kind, Callable[[Cause], str]]] = MappingProxyType(
    {
        Kind.HOT_EXPERT: _hot_expert_next,
        Kind.IMBALANCE: _imbalance_next,
        Kind.SLOW_RANK: _slow_rank_next,
        Kind.COPY: _copy_next,
        Kind.OVERLOAD: _overload_next,
        Kind.COLD_START: _cold_start_next,
        Kind.MEMORY: _memory_next,
        Kind.CONTROLLER_AWAY: _controller_away_next,
    }
)
