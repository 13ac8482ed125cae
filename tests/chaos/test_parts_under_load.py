"""What happens to parts and to their calls while calls of front ends are served: shards are killed,
a router is not told of new tables, and the controller's own calls get lost.

Every expert is held in two failure domains. Weights are markers, every output is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.bootstrap.local_ray import LocalRay
from moe_serve.ports import Cause, ShardChannel, SubCall, SubReply
from moe_serve.router.actor import wire_channels
from moe_serve.router.lanes import OnDisconnect
from moe_serve.shard.faults import FaultPoints
from placement.messages.history import AnyFact, TableInstalled, TablePublished
from placement.routing import RankAddress
from tests.chaos.faults import Faults
from tests.chaos.history import check_history, read_history
from tests.chaos.marker_service import (
    WORKLOAD,
    await_calm,
    both_ways,
    floor_of,
    is_empty,
    marker_config,
    nothing_moves,
    orphan_bytes,
    seconds_until,
)
from tests.chaos.rpc_loss import KINDS, Orders, RpcLoss
from tests.cut_off_router import CutOffRouter
from tests.marker_checkpoint import EXPERTS, LAYERS, TOP_K, marker_oracle, marker_rows
from tests.service_cluster import (
    Placement,
    Service,
    locations,
    part_pids,
    router_totals,
    running,
)
from tests.traffic import Arrays, Source, Traffic, Workload

RANKS, SLOTS, FLOOR = 4, 20, 2
"""A rank can hold all 16 experts, so one of each node may be emptied."""
PAIRS_SLOTS = 9
"""With so many a rank, one of them for copies on their way, every expert is held exactly twice."""
REROUTED_BAR_S, BALANCED_BAR_S, RESTORED_BAR_S, SPREAD_BAR_S = 1.0, 10.0, 30.0, 0.25
MIGRATIONS, BURST = 20, 150
SHORT_S = 10.0
"""Time of a call that may name an expert nobody holds: it ends by what the router knows, not by the
clock of a busy machine."""
EACH = 3
KILLS_MAX = 12
UNUSED = ("RouterPort.stop",)
"""A call that a service does not make which stays as it is. Its losses are played in process."""


@pytest.fixture(scope="module")
def service(
    ray_cluster: LocalRay,
    tmp_path_factory: pytest.TempPathFactory,
    losses: RpcLoss,
    history: Path,
) -> Iterator[Service]:
    config = marker_config(tmp_path_factory.mktemp("pairs"), "pairs", slots=SLOTS, floor=FLOOR)
    with running(config, drill=losses.drill(), history_dir=history) as deployed:
        yield deployed


@pytest.fixture(scope="module")
def faults(service: Service, history: Path) -> Iterator[Faults]:
    """Also what holds of the whole life of the service, whatever the tests did to it."""
    made = Faults(service)
    yield made
    await_calm(service)
    assert check_history(read_history(history), made.deeds) == []


def give_slots(service: Service, slots: int) -> None:
    """The same budget for every rank, none of them drained or away."""
    slot_bytes = await_calm(service).slot_bytes
    for rank in range(RANKS):
        service.admin.undrain(rank)
        service.admin.set_budget(rank, slots * slot_bytes)


def await_pairs(service: Service) -> Placement:
    """Nothing is wrong, and every expert is held by two ranks, one of each node."""
    give_slots(service, PAIRS_SLOTS)
    service.admin.resume()
    service.wait(
        "every expert is held twice, in two failure domains",
        # Before the ranks give slots up, two of one test before may hold everything.
        lambda p: (
            all(r.num_slots == PAIRS_SLOTS for r in p.ranks) and are_pairs(p) and nothing_moves(p)
        ),
        90.0,
    )
    return await_calm(service)


def are_pairs(placement: Placement) -> bool:
    held = locations(placement)
    return floor_of(placement) == (FLOOR, FLOOR) and {len(at) for at in held.values()} == {FLOOR}


def await_room(service: Service) -> Placement:
    """Nothing is wrong, and nothing moves but what is asked for."""
    service.admin.pause("the test moves experts itself")
    give_slots(service, SLOTS)
    return await_whole(service)


# -- shards that are killed ------------------------------------------------------------------------


def test_no_call_fails_when_a_shard_is_killed_while_it_computes(
    service: Service, faults: Faults
) -> None:
    start = await_pairs(service)
    with Traffic(both_ways(service, open_calls=2, pause_s=0.02), WORKLOAD) as traffic:
        # It computes most of the time, so that it dies with rows in work.
        faults.order_shard("rank 1", FaultPoints(delay_compute_s=0.03))
        traffic.more(100)
        traffic.slowest_s = 0.0
        dead = faults.kill_part("rank 1")
        traffic.more(100)
        rerouted_s = traffic.slowest_s

        def back() -> bool:
            found = service.placement()
            return are_pairs(found) and nothing_moves(found) and found.ranks[1].pid not in (0, dead)

        balanced_s = seconds_until("every expert is in two failure domains again", back, 90.0)
        traffic.more(50)
    end = await_calm(service)
    print(
        f"shard killed, all experts held twice: {traffic.requests} requests "
        f"({traffic.per_s:.0f}/s), {traffic.failed} failed; slowest call {rerouted_s:.2f} s (bar "
        f"{REROUTED_BAR_S:g}); two domains again after {balanced_s:.1f} s (bar {BALANCED_BAR_S:g})"
    )
    assert traffic.failures == []
    before, after = part_pids(start), part_pids(end)
    assert {part for part in before if before[part] != after[part]} == {"rank 1"}


def held_by(placement: Placement, ranks: set[int]) -> list[tuple[int, int]]:
    """(layer, expert) that only these ranks hold."""
    found = locations(placement)
    return [key for key, places in found.items() if {rank for rank, _ in places} <= ranks]


def some_of(keys: list[tuple[int, int]], others: bool, rng: np.random.Generator) -> Arrays:
    """A call with at least one of these experts, or with none of them."""
    layer = int(rng.choice([layer for layer, _ in keys]))
    named = {expert for of, expert in keys if of == layer}
    pool = sorted(set(range(EXPERTS)) - named) if others else sorted(named)
    rows = int(rng.integers(1, 5))
    ids = np.zeros((rows, TOP_K), np.int32)
    for row in ids:
        first = int(rng.choice(pool))
        more = [e for e in (pool if others else range(EXPERTS)) if e != first]
        row[:] = rng.permutation([first, int(rng.choice(more))])
    return layer, marker_rows(rng, rows), ids, rng.random((rows, TOP_K)).astype(np.float32)


def test_experts_that_nobody_holds_any_more_are_said_to_be_away_and_come_back(
    service: Service, faults: Faults
) -> None:
    start = await_pairs(service)
    pairs = [{a, b} for a in range(RANKS) for b in range(a + 1, RANKS)]
    ranks = max(pairs, key=lambda pair: len(held_by(start, pair)))
    lost = held_by(start, ranks)
    assert 0 < len(lost) < LAYERS * EXPERTS
    named = Traffic(
        both_ways(service),
        Workload(partial(some_of, lost, False), marker_oracle),
        timeout_s=SHORT_S,
    )
    with Traffic(both_ways(service), Workload(partial(some_of, lost, True), marker_oracle)) as rest:
        with named:
            dead = {faults.kill_part(f"rank {rank}") for rank in sorted(ranks)}

            def restored() -> bool:
                found = service.placement()
                return not found.missing and not dead & {r.pid for r in found.ranks}

            restored_s = seconds_until("no expert is missing", restored, 90.0)
            named.more(20)
            failed = named.failed
            named.more(50)
        rest.more(20)
    await_pairs(service)
    words = Counter(failure.split(": ")[1] for failure in named.failures)
    print(
        f"ranks {sorted(ranks)} killed, {len(lost)} experts held by nobody: {dict(words)} of "
        f"{named.requests + named.failed} calls that name them, {rest.failed} of "
        f"{rest.requests} others failed; restored after {restored_s:.1f} s (bar "
        f"{RESTORED_BAR_S:g}); slowest of the others {rest.slowest_s:.2f} s"
    )
    assert rest.failures == []
    assert set(words) <= {"Unavailable"}
    assert named.failed == failed, "calls failed after every expert was back"


# -- a router that is not told ---------------------------------------------------------------------


class Recording:
    """A channel that notes what is sent through it: for each pair of a request, how often again."""

    def __init__(self, channel: ShardChannel, again: dict[int, Counter[tuple[int, int]]]) -> None:
        self._channel = channel
        self._again = again

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def forward(self, call: SubCall) -> SubReply:
        pairs = self._again.setdefault(call.request_key, Counter())
        if call.cause == Cause.RETRY:
            pairs.update(
                zip(call.row_id[call.pair_row].tolist(), call.pair_k.tolist(), strict=True)
            )
        return await self._channel.forward(call)


def spread_s(facts: list[AnyFact], after_epoch: int) -> list[float]:
    """Seconds from a table's publication until each router uses it or a newer one."""
    published = {
        f.epoch: f.at_s for f in facts if isinstance(f, TablePublished) and f.epoch > after_epoch
    }
    used: dict[str, list[tuple[int, float]]] = {}
    for fact in facts:
        if isinstance(fact, TableInstalled) and "router" in fact.who:
            used.setdefault(fact.who, []).append((fact.epoch, fact.at_s))
    found = []
    for epoch, at_s in published.items():
        for installed in used.values():
            times = [t for e, t in installed if e >= epoch and t >= at_s]
            found += [min(times) - at_s] if times else []
    return sorted(found)


def empty_rank(service: Service, rank: int) -> None:
    """Move everything off a rank, then let it hold replicas again."""
    service.admin.drain(rank)
    service.wait(
        f"rank {rank} is empty",
        lambda p: is_empty(p, rank) and nothing_moves(p),
        90.0,
    )
    service.admin.undrain(rank)


def test_a_router_that_is_told_nothing_is_refused_or_right_during_twenty_migrations(
    service: Service, faults: Faults, history: Path
) -> None:
    start = await_room(service)
    again: dict[int, Counter[tuple[int, int]]] = {}
    inner = wire_channels(None)

    def channels(address: RankAddress, on_disconnect: OnDisconnect) -> Any:
        return Recording(inner(address, on_disconnect), again)

    cut_off = CutOffRouter(service.config, channels)
    first = start.ranks[0]
    address = RankAddress(
        rank=0, node=first.node, address=first.address, incarnation=first.incarnation
    )
    moves = int(start.moves_done.get("migrate", 0))
    bursts: list[Traffic] = []
    with cut_off.serving(address), Traffic(both_ways(service), WORKLOAD) as told:
        sources = [Source(cut_off.address, s, open_calls=2, pause_s=0.0) for s in (False, True)]
        rank = done = 0
        while done < MIGRATIONS:
            # Its calls begin where the experts of its table have been given up, and go on while
            # the next ones move.
            empty_rank(service, rank % RANKS)
            with Traffic(sources, WORKLOAD) as stale:
                stale.more(BURST)
                empty_rank(service, (rank + 1) % RANKS)
                stale.more(BURST)
            bursts.append(stale)
            rank += 2
            done = int(service.placement().moves_done["migrate"]) - moves
        told.more(20)
        counters = cut_off.counters
    end = await_calm(service)
    tries = Counter(max(pairs.values(), default=0) for pairs in again.values())
    once = (tries[0] + tries[1]) / max(1, tries.total())
    spread = spread_s(read_history(history), int(start.epoch))
    p99_s = spread[int(0.99 * (len(spread) - 1))] if spread else float("nan")
    named = {n: counters[n] for n in ("stale_pairs", "retried_pairs", "tables_fetched", "failed")}
    print(
        f"a router that is told nothing: {done} migrations, epochs {start.epoch} -> {end.epoch}; "
        f"{sum(b.requests for b in bursts)} requests through it in {len(bursts)} bursts, "
        f"{sum(b.failed for b in bursts)} failed; "
        f"requests by greatest number of retries of a pair {dict(sorted(tries.items()))}, "
        f"{100 * once:.2f}% with at most one (bar 99.9); {named}; told routers: {told.requests} "
        f"requests, {told.failed} failed; table spread p99 {p99_s:.3f} s over {len(spread)} (bar "
        f"{SPREAD_BAR_S:g})"
    )
    assert done >= MIGRATIONS
    assert [b.failures for b in bursts] == [[]] * len(bursts)
    assert told.failures == []
    assert counters["stale_pairs"] > 0
    assert counters["failed"] == 0
    assert once >= 0.999


# -- the controller's calls ------------------------------------------------------------------------


def end_of(placement: Placement) -> dict[str, Any]:
    """What the service has come to, without numbers that count lives."""
    return {
        "held": {key: [rank for rank, _ in at] for key, at in locations(placement).items()},
        "missing": list(placement.missing),
        "orphan bytes": orphan_bytes(placement),
        "slots": [rank.num_slots for rank in placement.ranks],
        "states": [rank.state for rank in placement.ranks],
        "routers": [router.state for router in placement.routers],
    }


def replaced(service: Service, faults: Faults, rank: int) -> None:
    """Kill a shard and wait until another one has its place."""
    dead = faults.kill_part(f"rank {rank}")
    service.wait(
        f"rank {rank} has another shard", lambda p: p.ranks[rank].pid not in (0, dead), 90.0
    )
    await_calm(service)


def next_controller(service: Service, faults: Faults) -> None:
    """Kill the controller and wait until another one knows all parts."""
    term, pid = service.placement().term, service.controller_pid()
    faults.kill_controller()
    faults.await_controller(term, pid)


def go_round(service: Service, faults: Faults, *, lives: bool = False) -> dict[str, Any]:
    """The first rank of each node is emptied, then the second one: in the end ranks 0 and 2 hold
    every expert. Budgets go down and up. lives: a shard and the controller are killed meanwhile."""
    budget = SLOTS * int(service.placement().slot_bytes)
    for away in ((0, 2), (1, 3)):
        for rank in range(RANKS):
            service.admin.undrain(rank)
        if lives:
            replaced(service, faults, away[0])
        for rank in away:
            service.admin.drain(rank)
            placement = service.placement()
            service.admin.set_budget(rank ^ 1, budget - placement.slot_bytes)
        if lives:
            next_controller(service, faults)
        service.wait(
            f"ranks {away} are empty, all else is there",
            lambda p, away=away: (
                nothing_moves(p) and not p.missing and all(is_empty(p, rank) for rank in away)
            ),
            120.0,
        )
        for rank in away:
            service.admin.set_budget(rank ^ 1, budget)
    return end_of(await_whole(service))


def await_whole(service: Service) -> Placement:
    """Calm, and every shard has said that it has all its slots again."""
    service.wait(
        "every rank has its slots again", lambda p: all(r.num_slots == SLOTS for r in p.ranks), 60.0
    )
    return await_calm(service)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_calls_of_the_controller_that_get_lost_change_nothing_in_the_end(
    service: Service, faults: Faults, losses: RpcLoss
) -> None:
    await_room(service)
    want = go_round(service, faults)
    assert all(at == [0, 2] for at in want["held"].values())

    def short() -> dict[tuple[str, str], int]:
        lost = losses.lost
        methods = {method for method, _ in lost} - set(UNUSED)
        return {(m, k): lost[m, k] for m in methods for k in KINDS if lost[m, k] < EACH}

    with Traffic(both_ways(service), WORKLOAD) as traffic:
        losses.order(Orders(each=EACH))
        one = go_round(service, faults, lives=True)
        for _ in range(KILLS_MAX):
            if not short():
                break
            # What is asked only of a part that is found, or made.
            next_controller(service, faults)
            if any("Shard" in method for method, _ in short()):
                replaced(service, faults, 0)  # which is not drained
            if any("SetRankSlots" in method for method, _ in short()):
                slot_bytes = int(service.placement().slot_bytes)
                service.admin.set_budget(1, (SLOTS - 1) * slot_bytes)  # which is empty
                service.wait("a slot less", lambda p: p.ranks[1].num_slots == SLOTS - 1)
                service.admin.set_budget(1, SLOTS * slot_bytes)
                await_whole(service)
        each = losses.lost
        losses.order(Orders(each=EACH, share=0.25, seed=1))
        # While calls still get lost, what was asked for may still be on its way.
        go_round(service, faults)
        losses.heal()
        traffic.more(20)
        service.wait("all ends as without lost calls", lambda p: end_of(p) == want, 120.0)
        end = end_of(await_whole(service))
    by_method: dict[str, list[int]] = {}
    for method in sorted({method for method, _ in each}):
        by_method[method] = [each[method, kind] for kind in KINDS]
    totals = router_totals(service.placement(), ("requests", "failed", "stale_pairs"))
    print(
        f"the controller's lost calls, by method {[str(k) for k in KINDS]}: {by_method}, then "
        f"{losses.lost.total() - each.total()} at random (25%); {traffic.requests} requests, "
        f"{traffic.failed} failed, slowest {traffic.slowest_s:.2f} s; routers {totals}"
    )
    assert traffic.failures == []
    assert short() == {}
    assert one == want
    assert end == want
    for rank in range(RANKS):
        service.admin.undrain(rank)
