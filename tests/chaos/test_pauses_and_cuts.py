"""Parts that stand still, are slow, or cannot reach each other, and a node that is gone.

Head + 3 nodes: routers and controller on the head, two ranks on each other node, every expert in
two failure domains. Routers reach shards through a proxy, the controller its parts through calls
that may be ordered to get lost. Times are printed beside their bars.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.bootstrap.controller_parts import controller_settings
from moe_serve.bootstrap.fleet import NAMESPACE, RayFleet, kill_actor
from moe_serve.bootstrap.local_ray import LocalRay
from moe_serve.bootstrap.parts import PartsPlan, moe_spec
from moe_serve.bootstrap.record import service_dir
from moe_serve.cli.admin import AdminTarget, GrpcAdmin
from moe_serve.controller.actor import ControllerActor
from moe_serve.errors import MoeServeError
from moe_serve.shard.actor import SHARD_ENV_VARS
from moe_serve.shard.faults import FaultPoints
from tests.chaos.cluster import Nodes, more_nodes
from tests.chaos.faults import Faults
from tests.chaos.history import CUT_OFF, Deeds, check_history, read_history
from tests.chaos.marker_service import (
    WORKLOAD,
    await_calm,
    both_ways,
    floor_of,
    is_empty,
    marker_config,
    nothing_moves,
    seconds_until,
)
from tests.chaos.proxy import Proxy
from tests.chaos.rpc_loss import Orders, RpcLoss
from tests.service_cluster import (
    Placement,
    Service,
    actor_pid,
    part_pids,
    router_totals,
    running,
    wait_until,
)
from tests.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SITES = ({"moe.node": "b"}, {"moe.node": "c"}, {"moe.node": "d"})
SLOTS, FLOOR = 12, 2
"""Two nodes hold all 16 experts twice."""
AWAY_S, SHORT_CUT_S, LONG_CUT_S = 120.0, 5.0, 60.0
OUT_BAR_S, FLOOR_BAR_S, HEALED_BAR_S, EJECTED_BAR_S = 5.0, 60.0, 5.0, 10.0
SLOW_S = 0.5
"""A call that takes longer has waited for a part that does not answer."""
STRAGGLER_S = 0.1


@pytest.fixture(scope="module")
def nodes(ray_cluster: LocalRay) -> Iterator[Nodes]:
    with more_nodes(ray_cluster) as made:
        yield made


@pytest.fixture(scope="module")
def faults(
    nodes: Nodes, losses: RpcLoss, history: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faults]:
    config = marker_config(
        tmp_path_factory.mktemp("apart"), "apart", slots=SLOTS, floor=FLOOR, nodes=SITES
    )
    with Proxy() as proxy:
        drill = losses.drill(socks_proxy=proxy.address)
        with running(config, drill=drill, history_dir=history) as service:
            made = Faults(service, proxy)
            try:
                yield made
            finally:
                made.end_all()
            await_calm(service)
            found = check_history(read_history(history), made.deeds)
            assert not found, "\n".join(found)


@pytest.fixture
def service(faults: Faults) -> Service:
    """The service, with every expert in two failure domains."""
    service = faults.service
    for rank in range(len(service.placement().ranks)):
        service.admin.undrain(rank)
    service.admin.resume()
    await_floor(service)
    return service


def at_floor(placement: Placement) -> bool:
    return min(floor_of(placement)) >= FLOOR and nothing_moves(placement)


def await_floor(service: Service, timeout_s: float = 120.0) -> Placement:
    service.wait("every expert is in two failure domains", at_floor, timeout_s)
    return await_calm(service)


def quantile_s(took: list[tuple[float, float]], share: float) -> float:
    return float(np.quantile([seconds for _, seconds in took], share)) if took else float("nan")


def out_after_s(traffic: Traffic, since_s: float) -> float:
    """Until the last call ended that had waited for a part which does not answer."""
    return max((end - since_s for end, took in list(traffic.took) if took > SLOW_S), default=0.0)


def loaded(service: Service) -> Traffic:
    return Traffic(both_ways(service, open_calls=2, pause_s=0.03), WORKLOAD)


# -- the controller --------------------------------------------------------------------------------


def test_calls_are_served_while_the_controller_stands_still(
    service: Service, faults: Faults
) -> None:
    start = service.placement()
    with loaded(service) as traffic:
        time.sleep(20.0)
        before = list(traffic.took)
        traffic.took.clear()
        with faults.paused("controller"):
            time.sleep(AWAY_S)
        away = list(traffic.took)
        end = await_floor(service)
        traffic.more(50)
    print(
        f"controller stopped for {AWAY_S:g} s: {traffic.requests} requests, {traffic.failed} "
        f"failed; p99 {1e3 * quantile_s(before, 0.99):.1f} ms before, "
        f"{1e3 * quantile_s(away, 0.99):.1f} ms meanwhile (bar +-5%); slowest "
        f"{traffic.slowest_s:.2f} s"
    )
    assert traffic.failures == []
    assert part_pids(end) == part_pids(start)


@contextmanager
def second_controller(service: Service, deeds: Deeds, history: Path) -> Iterator[GrpcAdmin]:
    """One more controller of the same service, under another name."""
    import ray

    config = service.config
    spec, layers = moe_spec(config)
    plan = PartsPlan(
        config=config,
        spec=spec,
        checkpoint_layers=layers,
        state_dir=str(service_dir(config.service, config.state_dir)),
        wire_keys=None,
        history_dir=str(history),
    )
    name = f"{config.service}:second"
    kind: Any = ray.remote(ControllerActor)
    handle = kind.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        label_selector={"moe.node": "a"},
        runtime_env={"env_vars": {**SHARD_ENV_VARS, "CUDA_VISIBLE_DEVICES": ""}},
    ).remote(controller_settings(plan), RayFleet(plan))
    try:
        said = ray.get(handle.start.remote(), timeout=90.0)
        assert not said["fault"], said
        admin = GrpcAdmin(AdminTarget(said["admin_address"]))
        yield admin
        admin.close()
    finally:
        deeds.kill(actor_pid(name))
        kill_actor(name)


def test_a_controller_that_stood_still_is_fenced_by_the_next(
    service: Service, faults: Faults, history: Path
) -> None:
    start = service.placement()
    service.admin.drain(0)
    with loaded(service) as traffic:
        old = faults.pause_controller()
        try:
            with second_controller(service, faults.deeds, history) as admin:
                wait_until(
                    "the second controller has finished what the first began",
                    lambda: is_empty(admin.placement(), 0) and nothing_moves(admin.placement()),
                    90.0,
                )
                seconds = admin.placement().term
                faults.resume(old)
                # Whatever it still had in mind is refused; it learns that it is not alone.
                found = service.wait(
                    "the first one has claimed a term of its own",
                    lambda p: p.term > seconds,
                    90.0,
                )
        finally:
            faults.resume(old)
        service.admin.undrain(0)
        end = await_floor(service)
        traffic.more(50)
    print(
        f"two controllers: terms {start.term}, {seconds}, {found.term}, {end.term}; "
        f"{traffic.requests} requests, {traffic.failed} failed, slowest {traffic.slowest_s:.2f} s"
    )
    assert start.term < seconds < found.term
    assert traffic.failures == []
    assert part_pids(end) == part_pids(start)


# -- shards and nodes ------------------------------------------------------------------------------


def test_a_shard_that_stands_still_is_passed_by_and_replaced(
    service: Service, faults: Faults
) -> None:
    start = service.placement()
    with loaded(service) as traffic:
        traffic.more(50)
        paused_s = time.monotonic()
        pid = faults.pause_part("rank 1")
        floor_s = seconds_until(
            "another process has its place, and the floor holds",
            lambda: faults.pids().get("rank 1", pid) != pid and at_floor(service.placement()),
            120.0,
        )
        traffic.more(50)
        out_s = out_after_s(traffic, paused_s)
        faults.resume(pid)
        traffic.more(50)
    end = await_floor(service)
    print(
        f"shard stopped: out of rotation after {out_s:.1f} s (bar {OUT_BAR_S:g}), floor again "
        f"after {floor_s:.1f} s; {traffic.requests} requests, {traffic.failed} failed, slowest "
        f"{traffic.slowest_s:.2f} s"
    )
    assert traffic.failures == []
    before, after = part_pids(start), part_pids(end)
    assert {part for part in before if before[part] != after[part]} == {"rank 1"}


def test_no_call_fails_when_a_node_is_gone(service: Service, faults: Faults, nodes: Nodes) -> None:
    start = service.placement()
    gone = {rank.rank for rank in start.ranks if rank.node == "d"}
    with loaded(service) as traffic:
        time.sleep(10.0)
        before = traffic.per_s
        count = traffic.requests
        for rank in sorted(gone):
            faults.deeds.kill(faults.pid(f"rank {rank}"))
        killed_s = time.monotonic()
        nodes.kill("d")

        def restored() -> bool:
            found = service.placement()
            return all(found.ranks[r].state != "up" for r in gone) and at_floor(found)

        floor_s = seconds_until("every expert is in two failure domains", restored, 120.0)
        during = (traffic.requests - count) / (time.monotonic() - killed_s)
        traffic.more(50)
        nodes.add("d")
        back = service.wait(
            "the node's ranks are back",
            lambda p: all(r.state == "up" and r.pid for r in p.ranks) and at_floor(p),
            120.0,
        )
        traffic.more(50)
    print(
        f"one of three nodes killed ({len(gone)} of {len(start.ranks)} ranks): floor restored "
        f"after {floor_s:.1f} s (bar {FLOOR_BAR_S:g}); {traffic.requests} requests, "
        f"{traffic.failed} failed, slowest {traffic.slowest_s:.2f} s; {before:.0f}/s before, "
        f"{during:.0f}/s until the floor was there again"
    )
    assert traffic.failures == []
    assert {r.rank for r in back.ranks if r.node == "d"} == gone


def test_a_slow_shard_is_passed_by_and_taken_back(service: Service, faults: Faults) -> None:
    names = ("hedged_pairs", "demand_pairs", "ejections", "failed")
    with loaded(service) as traffic:
        time.sleep(10.0)
        base = quantile_s(traffic.took, 0.99)
        traffic.took.clear()
        before = router_totals(service.placement(), names)
        faults.order_shard("rank 2", FaultPoints(delay_compute_s=STRAGGLER_S))
        since_s = time.monotonic()
        time.sleep(30.0)
        slow = [end for end, took in list(traffic.took) if took >= STRAGGLER_S]
        ejected_s = max(slow, default=since_s) - since_s
        late = quantile_s([t for t in list(traffic.took) if t[0] > since_s + EJECTED_BAR_S], 0.99)
        after = router_totals(service.placement(), names)
        faults.order_shard("rank 2")
        traffic.more(100)
    did = {name: after[name] - before[name] for name in names}
    print(
        f"straggler of {STRAGGLER_S:g} s: p99 {1e3 * base:.1f} ms before, {1e3 * late:.1f} ms from "
        f"{EJECTED_BAR_S:g} s on (bar twice); last slow call after {ejected_s:.1f} s (bar "
        f"{EJECTED_BAR_S:g}); {did}, hedged "
        f"{100 * did['hedged_pairs'] / max(1.0, did['demand_pairs']):.1f}% of pairs (bar 5); "
        f"{traffic.requests} requests, {traffic.failed} failed"
    )
    assert traffic.failures == []


# -- cuts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_s", [SHORT_CUT_S, LONG_CUT_S])
@pytest.mark.parametrize(
    ("there", "back"), [(True, True), (True, False), (False, True)], ids=["both", "to", "from"]
)
def test_calls_are_right_while_routers_and_a_shard_are_parted(
    service: Service, faults: Faults, there: bool, back: bool, cut_s: float
) -> None:
    part = "rank 3"
    with loaded(service) as traffic:
        traffic.more(50)
        cut_at_s = time.monotonic()
        address = faults.cut(part, there=there, back=back)
        time.sleep(cut_s)
        out_s = out_after_s(traffic, cut_at_s)
        healed_at_s = time.monotonic()
        faults.heal(address)
        traffic.more(50)
        end = await_floor(service)
        slow = [e for e, took in list(traffic.took) if took > SLOW_S and e > healed_at_s]
        traffic.more(50)
    ways = " and ".join(way for way, cut in (("to it", there), ("from it", back)) if cut)
    print(
        f"routers and a shard parted ({ways}) for {cut_s:g} s: no call waits for it after "
        f"{out_s:.1f} s (bar {OUT_BAR_S:g}), none after healing for longer than "
        f"{max(slow, default=healed_at_s) - healed_at_s:.1f} s (bar {HEALED_BAR_S:g}); "
        f"{traffic.requests} requests, {traffic.failed} failed, slowest {traffic.slowest_s:.2f} s; "
        f"epoch {end.epoch}"
    )
    assert traffic.failures == []


@pytest.mark.parametrize("cut_s", [SHORT_CUT_S, LONG_CUT_S])
def test_a_router_that_the_controller_does_not_reach_serves_rightly(
    service: Service, faults: Faults, losses: RpcLoss, cut_s: float
) -> None:
    service.admin.pause("the test moves experts itself")
    start = service.placement()
    with loaded(service) as traffic:
        losses.order(Orders(cut=("router-0",)))
        cut_at_s = time.monotonic()
        rank = 0
        while time.monotonic() < cut_at_s + cut_s:
            service.admin.drain(rank)
            service.wait(
                f"rank {rank} is empty",
                lambda p, rank=rank: is_empty(p, rank) and nothing_moves(p),
                90.0,
            )
            service.admin.undrain(rank)
            rank = (rank + 1) % len(start.ranks)
        losses.heal()
        faults.deeds.faults.append((CUT_OFF, "router-0", cut_at_s, time.monotonic()))
        healed_s = seconds_until("both routers use the newest table", lambda: both_newest(service))
        traffic.more(50)
    end = await_calm(service)
    moved = {k: int(n) - int(start.moves_done.get(k, 0)) for k, n in end.moves_done.items()}
    totals = router_totals(end, ("failed", "stale_pairs", "retried_pairs", "tables_fetched"))
    print(
        f"router and controller parted for {cut_s:g} s: {moved}; {traffic.requests} requests, "
        f"{traffic.failed} failed, slowest {traffic.slowest_s:.2f} s; newest table everywhere "
        f"{healed_s:.1f} s after healing (bar {HEALED_BAR_S:g}); routers {totals}"
    )
    assert traffic.failures == []


def both_newest(service: Service) -> bool:
    try:
        found = service.placement()
    except MoeServeError:
        return False
    return all(r.state == "up" and r.applied_epoch == found.epoch for r in found.routers)
