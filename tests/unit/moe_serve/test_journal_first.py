"""Nothing reaches a shard before the journal says it: looked up on disk as each message arrives."""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from moe_serve.controller.driver import Driver
from moe_serve.controller.journal_rows import Row, RowKind, image_of
from placement.messages.codec import encode
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    Effects,
    PublishTable,
    ReleaseSlot,
    ReserveSlot,
    ShardCommand,
    VerifyExpert,
)
from placement.messages.events import BudgetAsked
from placement.migration import AddState, RemoveState
from placement.routing import RoutingTable
from tests.fakes.controller import controller, make_cluster, make_settings, until
from tests.fakes.fleet import FakeShardPort

FOLLOWS_FROM: dict[type, set[str]] = {
    ReserveSlot: {AddState.RESERVED},
    CopyExpert: {AddState.COPYING},
    VerifyExpert: {AddState.COPYING, RemoveState.RECALLED},
    AbortAdd: {AddState.ABORTING},
    ReleaseSlot: {RemoveState.DRAINED},
}


class Watch:
    """Compares what shards are told with what is on disk then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: Counter[str] = Counter()
        self.early: list[str] = []

    def rows(self) -> list[Row]:
        with closing(sqlite3.connect(self.folder / "state.db")) as log:
            rows = log.execute("SELECT kind, at_s, body FROM log ORDER BY seq").fetchall()
        return [Row(RowKind(kind), at_s, body) for kind, at_s, body in rows]

    def command(self, command: ShardCommand) -> None:
        wanted = FOLLOWS_FROM.get(type(command))
        if wanted is None:
            return
        self.seen[type(command).__name__] += 1
        states = self.states_of(command.step_id)  # type: ignore[union-attr]
        if not states & wanted:
            self.early.append(f"{command}: the journal says {sorted(states)}")

    def states_of(self, step_id: int) -> set[str]:
        """States of a step that the journal names: the one in the newest snapshot, which stands for
        all rows before it, and those of later transitions."""
        image = image_of(self.rows(), {}, 0.0, dropped_tail=False)
        states = {t.after for t in image.transitions if t.step_id == step_id}
        if image.snapshot is not None:
            state = image.snapshot.engine.state
            steps = {**state.parked, **(state.run.steps if state.run is not None else {})}
            states |= {steps[step_id].state} if step_id in steps else set()
        return states

    def table(self, table: RoutingTable) -> None:
        self.seen["table"] += 1
        epoch = image_of(self.rows(), {}, 0.0, dropped_tail=False).epoch
        if epoch < table.epoch:
            self.early.append(f"table {table.epoch}: the journal says {epoch}")


@pytest.mark.asyncio
async def test_what_a_shard_is_told_is_in_the_journal_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path)
    execute, install_table = FakeShardPort.execute, FakeShardPort.install_table

    async def watched_execute(self, term, command):  # type: ignore[no-untyped-def]
        watch.command(command)
        return await execute(self, term, command)

    async def watched_table(self, table):  # type: ignore[no-untyped-def]
        watch.table(table)
        return await install_table(self, table)

    monkeypatch.setattr(FakeShardPort, "execute", watched_execute)
    monkeypatch.setattr(FakeShardPort, "install_table", watched_table)
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        for rank in (0, 1):
            before, shard = rig.state.epoch, cluster.shard(rank)
            assert shard is not None
            cluster.die(shard.name)
            await until(lambda before=before: rig.state.epoch > before)
            await rig.ready()
    assert watch.early == []
    assert watch.seen["ReserveSlot"] >= 4
    assert watch.seen["CopyExpert"] >= 4
    assert watch.seen["table"] >= 4


@pytest.mark.asyncio
async def test_every_change_of_a_step_is_a_row_before_anything_follows_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of steps that end without a command: a journal that tells only some of it is none."""
    watch, seen, missing = Watch(tmp_path), Counter[str](), list[str]()
    carry_out = Driver._carry_out

    def watched(self, effects):  # type: ignore[no-untyped-def]
        if effects.transitions:
            rows = {row.body for row in watch.rows() if row.kind is RowKind.TRANSITION}
            seen.update(f"{t.kind}: {t.after}" for t in effects.transitions)
            missing.extend(str(t) for t in effects.transitions if encode(t) not in rows)
        carry_out(self, effects)

    monkeypatch.setattr(Driver, "_carry_out", watched)
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        cluster.copy_s, cluster.demand = 0.3, {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: bool(rig.state.copying))
        busy = rig.state.run.steps[min(rig.state.copying)].step.slot.rank
        await rig.service.life.driver.ask(
            lambda n: BudgetAsked(at_s=0.0, request_id=n, rank=(busy + 1) % 3, budget_bytes=3000)
        )
        cluster.copy_s, cluster.demand = 0.0, {}
        await until(lambda: seen["add: aborted"] > 0 and rig.state.run is None)
        shard = cluster.shard(busy)
        assert shard is not None
        cluster.die(shard.name)
        await until(lambda: rig.state.ranks[busy].incarnation > shard.slots.incarnation)
        await rig.ready()
    assert missing == []
    assert {f"add: {s}" for s in AddState if s != AddState.PLANNED} <= seen.keys()


@pytest.mark.asyncio
async def test_a_table_that_follows_from_no_step_has_its_number_in_the_journal_too(
    tmp_path: Path,
) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        await rig.ready()
        driver, table = rig.service.life.driver, rig.service.life.publisher.newest
        assert table is not None
        effects = Effects(commands=(PublishTable(table=table),))
        rows = driver._rows(driver.engine, effects, 1.0)
        assert [r.body for r in rows if r.kind is RowKind.EPOCH] == [str(table.epoch).encode()]
