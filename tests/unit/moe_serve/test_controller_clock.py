"""The wall clock jumps; no lease, deadline or count of restarts moves with it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import moe_serve
from moe_serve.controller import book, clock
from placement.messages.events import DrainAsked
from tests.fakes.controller import controller, make_cluster, make_settings, until

HOUR_S = 3600.0
PACKAGE = Path(moe_serve.__path__[0])
FOR_PEOPLE = {
    "controller/clock.py",  # `wall_s`, used by the book alone
    "cli/commands/events.py",  # `--since` counts back from now, for people
    "cli/commands/explain.py",  # the date of the answer in `-o json`
    "dashboard/feed.py",  # dates on the page
    "telemetry/logs.py",  # dates of log lines
    "telemetry/otel.py",  # dates of spans
    "weights/host_cache.py",  # compared with the times of files, which are wall-clock times
}
"""Modules that may ask what time it is."""
WALL = re.compile(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow|today)\(|\bCLOCK_REALTIME\b")


def test_only_modules_that_show_dates_to_people_read_the_wall_clock() -> None:
    found = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if WALL.search(file.read_text(encoding="utf-8"))
    }
    assert found <= FOR_PEOPLE, found - FOR_PEOPLE
    users = [
        file.name
        for file in (PACKAGE / "controller").glob("*.py")
        if "wall_s" in file.read_text(encoding="utf-8")
    ]
    assert sorted(users) == ["befores.py", "book.py", "clock.py", "figures.py"]


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Moves the wall clock of this process by some seconds, for everything that reads it."""
    real, by = clock.wall_s, [0.0]
    real_time = time.time  # noqa: TID251  # it is what jumps
    monkeypatch.setattr(book, "wall_s", lambda: real() + by[0])
    monkeypatch.setattr(time, "time", lambda: real_time() + by[0])

    def to(seconds: float) -> None:
        by[0] = seconds

    return to


@pytest.mark.asyncio
@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
async def test_a_jump_while_it_runs_loses_nobody_and_ends_no_wait_early(
    tmp_path: Path,
    jump,  # type: ignore[no-untyped-def]
    by_s: float,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        router = cluster.router()
        assert router is not None
        router.held = True  # a removal waits for it, until a deadline
        await rig.service.life.driver.ask(lambda n: DrainAsked(at_s=0.0, request_id=n, rank=1))
        await until(lambda: bool(rig.state.removing))
        before_s, parts = rig.service.life.clock.now_s(), cluster.living()
        jump(by_s)
        await until(lambda: rig.state.run is None)
        took_s = rig.service.life.clock.now_s() - before_s
        assert 0.3 < took_s < 60.0, "the wait for the router is its own, to its end"
        assert cluster.living() == parts
        rules = {kept.record.rule for kept in rig.service.book.newest(1000)}
        assert not rules & {"rank_lost", "rank_suspected", "router_lost"}, rules


@pytest.mark.asyncio
@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
async def test_a_jump_between_restarts_neither_hides_them_nor_invents_any(
    tmp_path: Path,
    jump,  # type: ignore[no-untyped-def]
    by_s: float,
) -> None:
    cluster, paused, at_s = make_cluster(), [], []
    settings = make_settings(tmp_path, restarts_max=2)
    for number in range(4):
        jump(number * by_s)
        async with controller(settings, cluster) as rig:
            await rig.ready()
            paused.append(rig.state.paused)
            at_s.append(rig.service.life.clock.now_s())
    assert paused == [False, False, False, True]
    assert at_s == sorted(at_s), "driver time never goes back"


@pytest.mark.asyncio
async def test_starts_before_the_machine_was_booted_again_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    settings = make_settings(tmp_path, restarts_max=1)
    for boot in ("one", "two", "three"):
        monkeypatch.setattr("moe_serve.controller.beginning.boot_id", lambda name=boot: name)
        async with controller(settings, cluster) as rig:
            await rig.ready()
            assert not rig.state.paused


@pytest.mark.asyncio
async def test_a_service_that_people_end_and_start_again_has_not_restarted(tmp_path: Path) -> None:
    cluster = make_cluster()
    settings = make_settings(tmp_path, restarts_max=1)
    for _ in range(3):
        async with controller(settings, cluster) as rig:
            await rig.ready()
            assert not rig.state.paused
            await rig.service.down()
