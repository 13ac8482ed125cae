"""Right experts whatever happens: marker weights while every expert moves at least twice.

Traffic goes through two routers, unary and stream, while ranks are emptied one after another. A
third router is cut off from the controller: it hears of a new table only from a shard that refuses
it, so its calls are stale, retried, and must be right all the same.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.ports import RowStatus
from placement.messages.history import Fact
from placement.routing import RankAddress, RoutingTable
from tests.chaos.history import check_history, read_history
from tests.chaos.planted_history import PLANTED, never_answered
from tests.cut_off_router import CutOffRouter
from tests.marker_checkpoint import (
    EXPERTS,
    LAYERS,
    TOP_K,
    factor,
    marker_oracle,
    marker_rows,
    write_marker_checkpoint,
)
from tests.service_cluster import (
    Placement,
    Service,
    locations,
    router_totals,
    service_config,
)
from tests.traffic import TOLERANCE, Source, Traffic, Workload, draw, error_of

RANKS = 4
SLOTS = 8
"""Three ranks hold all 16 experts, with room for the fourth to be empty."""
COPY_BYTES_PER_S = 4096
"""An expert of 768 bytes takes about 0.2 s, so that calls are served during copies."""
ROUNDS_MAX = 12
"""Of two ranks each."""
BURST = 24
HISTORY = "history"
"""Folder of the facts that all processes note."""

WORKLOAD = Workload(
    lambda rng: draw(rng, marker_rows, layers=LAYERS, experts=EXPERTS, top_k=TOP_K), marker_oracle
)


@pytest.fixture(scope="module")
def service(deploy_service: Any, scratch: Path) -> Service:
    checkpoint = write_marker_checkpoint(scratch / "marker")
    deployed: Service = deploy_service(
        service_config(
            "marker",
            str(checkpoint),
            scratch / "state",
            slots=SLOTS,
            rebalance={"drain_wait_s": 1.0, "floor": 1},
            limits={"copy_bytes_per_s": COPY_BYTES_PER_S},
        ),
        history_dir=scratch / HISTORY,
    )
    # What moves here is asked for; plans of the controller's own would only blur the count.
    deployed.admin.pause("the test moves experts itself")
    return deployed


def both_ways(service: Service) -> list[Source]:
    return [Source(address, stream) for address in service.routers for stream in (False, True)]


class Watch:
    """Looks at the placement while something moves, and counts calls answered during copies."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._before: int | None = None
        self.during_copies = 0

    def look(self, placement: Placement) -> None:
        copying = any(slot.state == "COPYING" for rank in placement.ranks for slot in rank.slots)
        answered = self._traffic.requests
        if copying and self._before is not None:
            self.during_copies += answered - self._before
        self._before = answered if copying else None


def empty_rank(service: Service, rank: int, watch: Watch) -> None:
    """Move everything off a rank, then let it hold replicas again."""
    service.admin.drain(rank)

    def done(placement: Placement) -> bool:
        watch.look(placement)
        left = [slot for slot in placement.ranks[rank].slots if slot.layer >= 0]
        return not left and placement.state == "paused"

    service.wait(f"rank {rank} is empty", done)
    service.admin.undrain(rank)


def burst(router: CutOffRouter) -> Traffic:
    """Calls through the router that nobody told of the newest table."""
    sources = [
        Source(router.address, stream, open_calls=4, pause_s=0.0) for stream in (False, True)
    ]
    traffic = Traffic(sources, WORKLOAD)
    with traffic:
        traffic.more(BURST)
    return traffic


def refilled(old: RoutingTable, new: RoutingTable) -> list[tuple[int, int, int, int, int, int]]:
    """(rank, slot, old key, old tag, new key, new tag) of slots that hold another expert now."""

    def held(table: RoutingTable) -> dict[tuple[int, int], tuple[int, int]]:
        keys = np.repeat(np.arange(LAYERS * EXPERTS), np.diff(table.replica_ptr))
        rows = zip(keys, table.replica_rank, table.replica_slot, table.replica_tag, strict=True)
        return {(int(r), int(s)): (int(k), int(t)) for k, r, s, t in rows}

    before, after = held(old), held(new)
    return [
        (*place, *before[place], *after[place])
        for place in sorted(before.keys() & after.keys())
        if before[place][0] != after[place][0]
    ]


def check_fence(router: CutOffRouter, old: RoutingTable, new: RoutingTable) -> int:
    """Slots that were filled again: the old tag is refused, the new one served with the new
    expert's weights. Returns how many there were."""
    found = refilled(old, new)
    for rank, slot, old_key, old_tag, key, tag in found:
        address = new.address(rank)
        assert address is not None
        _, reply = router.ask_slot(address, *divmod(old_key, EXPERTS), slot, old_tag)
        assert reply.row_status.tolist() == [RowStatus.STALE]
        assert reply.partial.shape[0] == 0
        assert (reply.term, reply.epoch) == new.order
        row, reply = router.ask_slot(address, *divmod(key, EXPERTS), slot, tag)
        assert reply.row_status.tolist() == [RowStatus.SERVED]
        want = factor(*divmod(key, EXPERTS)) * row.astype(np.float64)
        assert error_of(reply.partial, want) <= TOLERANCE
    return len(found)


def test_outputs_are_right_while_every_expert_moves_twice(service: Service, scratch: Path) -> None:
    start = service.wait_quiet()
    assert len(locations(start)) == LAYERS * EXPERTS
    moved: Counter[tuple[int, int]] = Counter(dict.fromkeys(locations(start), 0))
    cut_off = CutOffRouter(service.config, history_dir=scratch / HISTORY)
    burst_requests, reused, worst = 0, 0, 0.0
    first = next(rank for rank in start.ranks if rank.rank == 0)
    address = RankAddress(
        rank=0, node=first.node, address=first.address, incarnation=first.incarnation
    )
    traffic = Traffic(both_ways(service), WORKLOAD)
    with cut_off.serving(address), traffic:
        watch = Watch(traffic)
        rounds = 0
        while min(moved.values()) < 2:
            assert rounds < ROUNDS_MAX, f"experts that did not move twice: {moved}"
            # The second rank is emptied into slots that the first one gave up: to the cut-off
            # router these are still the former experts'.
            for rank in (2 * rounds % RANKS, (2 * rounds + 1) % RANKS):
                before = locations(service.placement())
                empty_rank(service, rank, watch)
                after = locations(service.placement())
                moved.update(key for key in after if set(after[key]) - set(before[key]))
            old = cut_off.table
            stale = burst(cut_off)
            assert stale.failures == []
            assert cut_off.table.order > old.order, "the cut-off router learnt nothing"
            reused += check_fence(cut_off, old, cut_off.table)
            burst_requests += stale.requests
            worst = max(worst, stale.worst)
            rounds += 1
        traffic.more(20)
        counters = cut_off.counters
    end = service.wait_quiet()
    totals = router_totals(end, ("requests", "failed", "retried_pairs", "stale_pairs"))
    kinds = {k: int(n) - int(start.moves_done.get(k, 0)) for k, n in end.moves_done.items()}
    print(
        f"marker: {traffic.requests} requests ({traffic.per_s:.0f}/s, {watch.during_copies} during "
        f"copies), {burst_requests} through the cut-off router; worst deviation "
        f"{max(worst, traffic.worst):.1e}; {rounds} rounds, {sum(moved.values())} moves {kinds}, "
        f"{reused} slots reused; routers {totals}; cut-off router: "
        f"{ {n: counters[n] for n in ('retried_pairs', 'stale_pairs', 'tables_fetched')} }"
    )
    assert traffic.failures == []
    assert all(traffic.sent[s.address, s.stream] for s in traffic.sources)
    assert watch.during_copies >= 20
    assert min(moved.values()) >= 2
    assert kinds["migrate"] + kinds.get("replicate", 0) >= sum(moved.values())
    assert reused >= rounds
    assert counters["stale_pairs"] >= rounds
    assert counters["retried_pairs"] >= rounds
    assert counters["failed"] == totals["failed"] == 0
    # Every promise of the simulation, on the facts that the real processes noted.
    facts = read_history(scratch / HISTORY)
    assert check_history(facts) == []
    check_that_faults_are_found(facts)


def check_that_faults_are_found(facts: Sequence[Fact]) -> None:
    """What is planted into the very facts that were content is found in them."""
    for plant, promise in PLANTED:
        if plant is never_answered:
            continue  # its time may not be over yet
        with contextlib.redirect_stdout(io.StringIO()):
            found = check_history(plant(facts))
        assert any(what.startswith(f"{promise}:") for what in found), (plant.__name__, found)
