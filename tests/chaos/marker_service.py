"""The service of marker experts that chaos tests break, its load, and what must hold of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_serve.config import ServiceConfig
from tests.marker_checkpoint import (
    EXPERTS,
    LAYERS,
    TOP_K,
    marker_oracle,
    marker_rows,
    write_marker_checkpoint,
)
from tests.service_cluster import NODES, Placement, Service, service_config, wait_until
from tests.traffic import Source, Workload, draw

COPY_BYTES_PER_S = 8192
"""An expert of 768 bytes takes a tenth of a second, so that copies can be caught on their way."""
WORKLOAD = Workload(
    lambda rng: draw(rng, marker_rows, layers=LAYERS, experts=EXPERTS, top_k=TOP_K), marker_oracle
)


def marker_config(
    scratch: Path,
    service: str,
    *,
    slots: int,
    floor: int,
    rebalance: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    nodes: Sequence[Mapping[str, str]] = NODES,
) -> ServiceConfig:
    """16 experts of known factors on two ranks a node; routers on the head, which stays."""
    return service_config(
        service,
        str(write_marker_checkpoint(scratch / f"{service}-weights")),
        scratch / service,
        slots=slots,
        rebalance={"drain_wait_s": 1.0, "floor": floor, **(rebalance or {})},
        limits={"copy_bytes_per_s": COPY_BYTES_PER_S, **(limits or {})},
        nodes=nodes,
        router_node="a",
    )


def both_ways(service: Service, **how: Any) -> list[Source]:
    """Unary and stream through every router."""
    return [Source(a, stream, **how) for a in service.routers for stream in (False, True)]


def orphan_bytes(placement: Placement) -> int:
    """Bytes that shards hold beyond the listed replicas, by their own last report."""
    return sum(
        int(rank.resident_bytes) + int(rank.reserved_bytes) - listed(rank) * placement.slot_bytes
        for rank in placement.ranks
    )


def nothing_moves(placement: Placement) -> bool:
    """No slot is between empty and listed."""
    return all(slot.state in ("", "LISTED") for rank in placement.ranks for slot in rank.slots)


def is_empty(placement: Placement, rank: int) -> bool:
    """The rank holds nothing, and nothing is on its way to it."""
    return all(slot.layer < 0 for slot in placement.ranks[rank].slots)


def listed(rank: Any) -> int:
    """Replicas of a rank in the table."""
    return sum(slot.state == "LISTED" for slot in rank.slots)


def await_calm(service: Service, timeout_s: float = 90.0) -> Placement:
    """Nothing moves, no expert is missing, every part answers, and shards hold the listed replicas
    and not one byte more. (A controller that was restarted often calls itself degraded.)"""

    def calm(placement: Placement) -> bool:
        return (
            placement.state in ("steady", "paused", "degraded")
            and not placement.missing
            and all(rank.pid and rank.state in ("up", "draining") for rank in placement.ranks)
            and nothing_moves(placement)
            and orphan_bytes(placement) == 0
        )

    return service.wait(
        "nothing moves, nothing is missing, no byte is held for nothing", calm, timeout_s
    )


def floor_of(placement: Placement) -> tuple[int, int]:
    """Fewest listed replicas of any expert, and the fewest failure domains they are in."""
    ranks: dict[tuple[int, int], list[int]] = {}
    domain = {rank.rank: rank.failure_domain for rank in placement.ranks}
    for rank in placement.ranks:
        for slot in rank.slots:
            if slot.state == "LISTED":
                ranks.setdefault((slot.layer, slot.expert), []).append(rank.rank)
    if len(ranks) < LAYERS * EXPERTS:
        return 0, 0
    return (
        min(len(found) for found in ranks.values()),
        min(len({domain[rank] for rank in found}) for found in ranks.values()),
    )


def seconds_until(what: str, holds: Any, timeout_s: float = 60.0) -> float:
    """How long it takes until a condition holds."""
    began_s = time.monotonic()
    wait_until(what, holds, timeout_s)
    return time.monotonic() - began_s
