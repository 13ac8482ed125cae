"""A disk that is full or may not be written: what stops, what does not, and what is said of it."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from moe_serve.controller import driver as driver_module
from moe_serve.controller.journal_rows import Row, RowKind, StateSnapshot
from moe_serve.controller.journal_store import JournalFull, StateStore, raise_full
from moe_serve.controller.service import ControllerService
from moe_serve.errors import FailedPrecondition
from placement.engine import RebalanceEngine
from placement.engine.state import EngineState, RankStatus
from placement.messages.codec import decode_as, encode
from placement.messages.effects import AnyCommand, Effects, PublishTable, ReplaceRouter
from placement.messages.events import (
    AnyEvent,
    ApplyAsked,
    BudgetAsked,
    DrainAsked,
    PauseAsked,
    RankRemoveAsked,
    ResumeAsked,
    UndrainAsked,
)
from placement.routing import RoutingTable
from tests.fakes.controller import Rig, controller, make_cluster, make_settings, shards, until
from tests.fakes.fleet import FakeFleet

ROOT = Path(__file__).resolve().parents[3]
HOT = {0: 400, 1: 10, 2: 10, 3: 10}


@dataclass
class Disk:
    """What SQLite meets. `full`: it takes nothing of the state log. `refuses`: rows it has no room
    for, once. `refused`: rows of each commit it had no room for. `took`: all that it has taken
    since."""

    full: bool = False
    refuses: Callable[[list[Row]], bool] | None = None
    refused: list[list[Row]] = field(default_factory=list)
    took: list[Row] = field(default_factory=list)

    def takes(self, rows: list[Row]) -> bool:
        """Whether there is room for these."""
        if self.full or (self.refuses is not None and self.refuses(rows)):
            self.refuses = None
            self.refused.append(rows)
            self.took.clear()
            return False
        self.took += rows
        return True


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk that a test fills and empties."""
    found = Disk()
    write = StateStore._transact

    def transact(store: StateStore, **given: object) -> None:
        if not found.takes(list(given["rows"])):  # type: ignore[call-overload]
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise_full(error, store._path.parent)
        write(store, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(StateStore, "_transact", transact)
    return found


def commands(rig: Rig) -> list[int]:
    return [len(shard.executed) for shard in shards(rig.cluster)]


@pytest.mark.asyncio
async def test_a_full_disk_stops_new_moves_and_nothing_else(tmp_path: Path, disk: Disk) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        driver = rig.service.life.driver
        disk.full = True
        cluster.demand = HOT
        await until(lambda: bool(driver.problem))
        await until(lambda: rig.state.paused)
        assert any("no new moves" in p for p in rig.service.describe()["problems"])
        sent = commands(rig)
        await asyncio.sleep(0.3)
        assert sent == commands(rig), "nothing follows from what is not on disk"
        assert rig.service.describe()["ready"]
        disk.full = False  # what was withheld is written and done
        await until(lambda: not driver.problem)
        await until(lambda: not rig.state.paused)
        # A plan that could not be written for long was aborted and is tried again.
        await until(
            lambda: len(rig.listed(0)) >= 2 and all(rig.listed(e) for e in range(4)), wait_s=20.0
        )


@pytest.mark.asyncio
async def test_a_rank_emptied_while_the_disk_was_full_is_ended_after_routers_have_heard_of_it(
    tmp_path: Path, disk: Disk
) -> None:
    cluster = make_cluster()
    settings = make_settings(tmp_path)
    settings = replace(settings, config=msgspec.structs.replace(settings.config, floor=2))
    async with controller(settings, cluster) as rig:
        await rig.ready()
        await until(lambda: all(len(rig.listed(e)) == 2 for e in range(4)))
        await until(lambda: rig.state.run is None)
        removed = await rig.service.life.driver.ask(
            lambda n: RankRemoveAsked(at_s=0.0, request_id=n, rank=1, accept_lower_floor=True)
        )
        assert removed.code == "ok"
        disk.full = True
        await until(lambda: rig.state.ranks[1].status is RankStatus.REMOVED, wait_s=30.0)
        router, shard = cluster.router(), cluster.shard(1)
        assert router is not None
        assert shard is not None, "its end is not on disk"
        assert 1 in {a.rank for a in router.table.ranks}  # type: ignore[union-attr]
        disk.full = False
        await until(lambda: 1 not in {a.rank for a in router.table.ranks})  # type: ignore[union-attr]
        assert cluster.shard(1) is shard, "calls under the older table may be on their way"
        await until(lambda: cluster.shard(1) is None)
        assert all(rig.listed(e) for e in range(4))


MOVING: list[Callable[[int], AnyEvent]] = [
    lambda n: BudgetAsked(at_s=0.0, request_id=n, rank=0, budget_bytes=3000),
    lambda n: DrainAsked(at_s=0.0, request_id=n, rank=1),
    lambda n: UndrainAsked(at_s=0.0, request_id=n, rank=1),
    lambda n: ApplyAsked(at_s=0.0, request_id=n, plan_id="p"),
    lambda n: ResumeAsked(at_s=0.0, request_id=n),
]


def wishes(state: EngineState) -> bytes:
    """All that an operator's request could have changed."""
    return encode([(r.drained_by, r.budget_bytes, r.wanted_slots, r.slots) for r in state.ranks])


@pytest.mark.asyncio
@pytest.mark.parametrize("known", [False, True], ids=["found out by it", "known before"])
@pytest.mark.parametrize("make", MOVING, ids=["budget", "drain", "undrain", "apply", "resume"])
async def test_what_moves_is_refused_at_once_and_is_not_done_later(
    tmp_path: Path, disk: Disk, make: Callable[[int], AnyEvent], known: bool
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        driver = rig.service.life.driver
        if isinstance(make(1), ResumeAsked | ApplyAsked):
            await driver.ask(lambda n: PauseAsked(at_s=0.0, request_id=n, reason="quiet"))
        before = wishes(rig.state)
        disk.full = True
        # A plan nobody computed and a rank that is not drained alone write nothing.
        if known or isinstance(make(1), ApplyAsked | UndrainAsked):
            with pytest.raises(FailedPrecondition):
                await driver.ask(lambda n: DrainAsked(at_s=0.0, request_id=n, rank=2))
            assert driver.problem
        sent, began_s = commands(rig), asyncio.get_running_loop().time()
        with pytest.raises(FailedPrecondition, match=r"disk is full.*free space.*ask again"):
            await driver.ask(make)
        assert asyncio.get_running_loop().time() - began_s < 2.0, "not after the caller's time"
        assert wishes(rig.state) == before
        disk.full = False
        await until(lambda: not driver.problem)
        await asyncio.sleep(0.1)
        assert wishes(rig.state) == before, "whoever was refused is not obeyed later"
        assert commands(rig) == sent


@pytest.mark.asyncio
async def test_a_refusal_holds_where_there_is_room_again_before_the_turn_of_the_request(
    tmp_path: Path,
) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        await rig.ready()
        driver, before = rig.service.life.driver, wishes(rig.state)
        asking = asyncio.ensure_future(
            driver.ask(lambda n: DrainAsked(at_s=0.0, request_id=n, rank=2))
        )
        await asyncio.sleep(0)  # it waits in the queue now
        driver.problem = "no new moves: the disk is full"
        driver._refuse_moving()
        driver.problem = ""
        with pytest.raises(FailedPrecondition, match="disk is full"):
            await asking
        await driver.ask(lambda n: PauseAsked(at_s=0.0, request_id=n, reason="after it"))
        assert wishes(rig.state) == before


@pytest.mark.asyncio
async def test_a_pause_is_obeyed_on_a_full_disk_and_outlives_it(tmp_path: Path, disk: Disk) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        driver = rig.service.life.driver
        disk.full = True
        with pytest.raises(FailedPrecondition):
            await driver.ask(lambda n: DrainAsked(at_s=0.0, request_id=n, rank=1))
        await until(lambda: rig.state.paused)
        await driver.ask(lambda n: PauseAsked(at_s=0.0, request_id=n, reason="and stay so"))
        disk.full = False
        await until(lambda: not driver.problem)
        await asyncio.sleep(0.1)
        assert rig.state.paused


def tell_a_pause(rows: list[Row]) -> bool:
    """Whether these rows tell that automatic plans are paused."""
    told = [decode_as(r.body, StateSnapshot) for r in rows if r.kind is RowKind.SNAPSHOT]
    return any(one.engine.state.paused for one in told)


async def pause_while_full(rig: Rig, disk: Disk) -> None:
    """A pause is asked for, its snapshot is refused twice, and then there is room again."""
    disk.full = True
    await rig.service.life.driver.ask(lambda n: PauseAsked(at_s=0.0, request_id=n, reason="quiet"))
    await until(lambda: sum(map(tell_a_pause, disk.refused)) >= 2)
    disk.full = False


@pytest.mark.asyncio
async def test_a_pause_on_a_full_disk_is_on_disk_once_there_is_room(
    tmp_path: Path, disk: Disk
) -> None:
    """Nothing was withheld: the snapshot that was refused is made again all the same."""
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        await pause_while_full(rig, disk)
        await until(lambda: not rig.service.life.driver.problem)
        assert rig.state.paused
    async with controller(make_settings(tmp_path), cluster) as rig:
        assert rig.state.paused


@pytest.mark.asyncio
async def test_what_a_refused_commit_had_to_tell_is_told_with_the_next_one(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "FULL_RETRY_S", 3600.0)
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        await rig.ready()
        disk.refuses = tell_a_pause
        await rig.service.life.driver.ask(
            lambda n: PauseAsked(at_s=0.0, request_id=n, reason="quiet please")
        )
        assert disk.refuses is None
        # A window is closed, and no commit waits for the one that was refused.
        await until(lambda: tell_a_pause(disk.took))


@pytest.mark.asyncio
async def test_what_was_withheld_is_carried_out_in_its_order(tmp_path: Path) -> None:
    class Started:
        """An executor that only notes what it is told to do."""

        def __init__(self) -> None:
            self.names: list[str] = []

        def publish(self, table: RoutingTable) -> None:
            raise AssertionError(table)

        def start(self, command: AnyCommand) -> None:
            assert isinstance(command, ReplaceRouter)
            self.names.append(command.router)

    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        await rig.ready()
        driver = rig.service.life.driver
        started, usual = Started(), driver._executor
        for pair in (("a", "b"), ("c",), ("d", "e")):
            commands = tuple(ReplaceRouter(router=name) for name in pair)
            driver._durable.withhold(Effects(commands=commands))
        driver._executor = started
        await driver._carry_out_withheld()
        driver._executor = usual
        assert started.names == ["a", "b", "c", "d", "e"]


@pytest.mark.asyncio
async def test_a_table_of_a_refused_request_is_not_counted_as_sent(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        await rig.ready()
        step, table = RebalanceEngine.step, rig.service.life.publisher.newest
        assert table is not None

        def step_with_a_table(engine: RebalanceEngine, event: AnyEvent) -> Effects:
            effects = step(engine, event)
            if not isinstance(event, DrainAsked):
                return effects
            commands = (*effects.commands, PublishTable(table=table))
            return msgspec.structs.replace(effects, commands=commands)

        monkeypatch.setattr(RebalanceEngine, "step", step_with_a_table)
        driver, book = rig.service.life.driver, rig.service.book
        counted, disk.full = book.epochs_published, True
        with pytest.raises(FailedPrecondition):
            await driver.ask(lambda n: DrainAsked(at_s=0.0, request_id=n, rank=1))
        assert book.epochs_published == counted


@pytest.mark.asyncio
async def test_a_request_that_was_refused_replays_as_if_nobody_had_asked(
    tmp_path: Path, disk: Disk
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        disk.full = True
        with pytest.raises(FailedPrecondition):
            await rig.service.life.driver.ask(lambda n: DrainAsked(at_s=0.0, request_id=n, rank=1))
        disk.full = False
    inputs = sqlite3.connect(tmp_path / "inputs.db")
    bodies = b"".join(body for (body,) in inputs.execute("SELECT body FROM inputs"))
    inputs.close()
    assert b"DrainAsked" not in bodies
    assert b"RankJoined" in bodies


@pytest.mark.asyncio
async def test_a_start_on_a_full_disk_is_told_in_one_line_and_touches_nothing(
    tmp_path: Path, disk: Disk
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        epoch = rig.state.epoch
    before, terms = cluster.living(), set(cluster.terms)
    disk.full = True
    service = ControllerService(make_settings(tmp_path), FakeFleet(cluster), serve_admin=False)
    with pytest.raises(JournalFull) as caught:
        await service.start()
    assert "\n" not in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert "free space there" in caught.value.message
    assert cluster.living() == before, "the parts serve on"
    assert cluster.terms == terms, "no term that no journal knows"
    disk.full = False  # the next try goes on where the journal ended
    async with controller(make_settings(tmp_path), cluster, owner=service._owner) as rig:
        await rig.ready()
        assert rig.state.epoch >= epoch
        assert rig.service.life.beginning.owner == service._owner
        assert cluster.living() == before


REAL_DISK = """
import asyncio, os, sqlite3, subprocess, sys
from pathlib import Path
from moe_serve.controller.journal import open_journal
from moe_serve.controller.journal_rows import part_row
from moe_serve.controller.journal_store import JournalFull
from moe_serve.controller.settings import JournalLimits
from moe_serve.errors import MoeServeError

folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)], check=True)

async def commit(journal, text):
    try:
        await journal.commit([part_row(text, 1.0)])
    except JournalFull as error:
        return error.message
    return "ok"

async def start(where):
    "What a controller that starts there says: it opens the journal and notes a term."
    try:
        journal, _ = await open_journal(where, "s", JournalLimits())
    except (MoeServeError, OSError) as error:
        return str(error)
    try:
        await journal.intend_term(7)
    except MoeServeError as error:
        return error.message
    finally:
        await journal.close()
    return "ok"

async def main():
    journal, _ = await open_journal(folder, "s", JournalLimits())
    print("first", await commit(journal, "a"))
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(b"x" * 4096)
        except OSError:
            pass
    said = [await commit(journal, "b" * 20_000) for _ in range(30)]
    print("full", said[-1])
    await journal.close()
    print("start", await start(folder))
    print("fresh", await start(folder / "fresh"))
    filler.unlink()
    print("again", await start(folder), await start(folder / "fresh"))
    journal, _ = await open_journal(folder, "s", JournalLimits())
    print("room", await commit(journal, "c" * 20_000))
    await journal.close()
    journal, image = await open_journal(folder, "s", JournalLimits())
    await journal.close()
    kept = sum(one == "ok" for one in said)
    print("kept", len(image.parts) == min(kept, 1) + 2)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        journal, _ = await open_journal(folder, "s", JournalLimits())
        print("read-only", await commit(journal, "d"))
        await journal.close()
    except MoeServeError as error:
        print("read-only", error.message)

asyncio.run(main())
"""


@pytest.mark.timeout(240)
def test_a_real_disk_that_is_full_or_read_only_is_told_apart_from_damage(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    allowed = [unshare or "", "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*allowed, "true"], check=False).returncode:
        pytest.skip("no file systems may be mounted here")
    folder = tmp_path / "state"
    folder.mkdir()
    done = subprocess.run(
        [*allowed, sys.executable, "-c", REAL_DISK, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["first"] == lines["room"] == "ok"
    assert "cannot be written" in lines["full"]
    for what in ("start", "fresh"):
        assert "cannot be written" in lines[what], "full is not damaged"
    assert lines["again"] == "ok ok", "and once there is room a start succeeds"
    assert lines["kept"] == "True", "what was not refused is there, and nothing else"
    assert str(folder) in lines["read-only"]
    assert "may write" in lines["read-only"] or "make it writable" in lines["read-only"]


@pytest.mark.asyncio
async def test_what_was_refused_twice_is_told_with_the_next_commit(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only by the retry: the controller may die before it."""
    monkeypatch.setattr(driver_module, "FULL_RETRY_S", 3600.0)
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        await pause_while_full(rig, disk)
        before = cluster.router()
        assert before is not None
        cluster.die(before.name)
        await until(lambda: cluster.router() not in {None, before})
        await until(lambda: tell_a_pause(disk.took))
