"""The demo follows a controller over loopback, also one that is restarted meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from moe_serve.demo.watch import Watcher
from tests.fakes.placement_service import FakePlacementService, serve


async def until(condition: Callable[[], bool], wait_s: float = 30.0) -> None:
    ends_s = asyncio.get_running_loop().time() + wait_s
    while not condition():
        assert asyncio.get_running_loop().time() < ends_s, "what was waited for did not come"
        await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_controller_that_is_restarted_is_followed_on_and_nothing_is_told_twice() -> None:
    service = FakePlacementService()
    service.close_window()
    service.record("in_balance", "kept")
    server, address = await serve(service)
    told: list[Any] = []
    watcher = Watcher(address, told.append)
    watcher.start()
    seen = watcher.seen
    await until(lambda: len(told) == 1 and 1 in seen.windows and seen.placement is not None)
    await server.stop(0)
    service.close_window()
    service.record("replicate", "done")
    server, _ = await serve(service, int(address.rsplit(":", 1)[1]))
    assert service.load is not None
    imbalance = service.load.imbalance
    await until(lambda: len(told) == 2 and seen.imbalance == imbalance)
    assert [record.seq for record in told] == [1, 2]
    assert seen.records == told
    assert set(seen.windows) == {1, 2}
    counts = seen.windows[2]
    assert (counts.pairs == service.demand.sum(axis=0)).all()
    assert (counts.rank_pairs == service.rank_pairs).all()
    assert await asyncio.to_thread(watcher.stop) is seen
    assert not any(thread.is_alive() for thread in watcher._threads)
    await server.stop(0)


@pytest.mark.asyncio
async def test_a_window_that_does_not_fit_its_shape_is_not_kept_and_ends_nothing() -> None:
    service = FakePlacementService()
    service.close_window()
    assert service.load is not None
    service.load.executed = service.load.executed[:-8]
    server, address = await serve(service)
    watcher = Watcher(address, lambda _record: None)
    watcher.start()
    await until(lambda: service.calls.count("WatchLoad") > 1)
    assert watcher.seen.windows == {}
    service.close_window()
    await until(lambda: set(watcher.seen.windows) == {2})
    await asyncio.to_thread(watcher.stop)
    await server.stop(0)


@pytest.mark.asyncio
async def test_time_in_which_moves_run_is_one_span_a_plan_and_ends_with_the_demo() -> None:
    service = FakePlacementService()
    server, address = await serve(service)
    watcher = Watcher(address, lambda _record: None)
    watcher.start()
    seen = watcher.seen

    async def shows(state: str) -> None:
        service.state = state
        service.tell()
        await until(lambda: seen.placement is not None and seen.placement.state == state)

    await shows("steady")
    await shows("moving")
    moved_on_s = time.monotonic()
    service.epoch += 1
    service.tell()
    await until(lambda: seen.placement.epoch == service.epoch)
    assert seen.moving == [], "it still moves"
    await shows("steady")
    await until(lambda: len(seen.moving) == 1)
    assert seen.moving[0][0] < moved_on_s < seen.moving[0][1], "news of a plan begins no other span"
    await shows("moving")
    await asyncio.to_thread(watcher.stop)
    assert len(seen.moving) == 2
    assert all(began_s <= ended_s for began_s, ended_s in seen.moving)
    await server.stop(0)
