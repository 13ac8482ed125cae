"""Targets of what the controller writes down and sends: messages, snapshots, journal."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from moe_serve.cli.recordings import is_journal, read_segments
from moe_serve.controller.journal import open_journal
from moe_serve.controller.journal_rows import (
    JournalImage,
    Row,
    RowKind,
    Starts,
    StateSnapshot,
    epoch_row,
    image_of,
    part_row,
    snapshot_row,
    transition_row,
)
from moe_serve.controller.journal_store import INPUTS_FILE, STATE_FILE
from moe_serve.controller.settings import JournalLimits
from moe_serve.errors import MoeServeError, StartRefused
from placement.config import RebalanceConfig
from placement.engine import EngineSnapshot, RebalanceEngine
from placement.messages import effects as ef
from placement.messages import events as ev
from placement.messages.codec import (
    decode_as,
    decode_command,
    decode_effects,
    decode_event,
    encode,
)
from placement.messages.effects import Effects, Transition
from placement.planner.plan import StepKind
from tests.builders import (
    make_address,
    make_demand,
    make_layout,
    make_request,
    make_spec,
    make_table,
    make_topology,
    make_window,
)
from tests.fuzz import mutations
from tests.fuzz.target import Mutate, Target, joined, pieces, refused, scratch

SPEC = make_spec()
LAYOUT = make_layout([[0, 1, -1], [2, 3, -1]])
ROWS_MAX = 8


def round_trip(data: bytes, decode: Callable[[bytes], Any]) -> bool:
    """What is read is written in bytes that are read as the same."""
    try:
        found = decode(data)
    except msgspec.ValidationError as error:
        return refused(error)
    sent = encode(found)
    assert sorted_sets(encode(decode(sent))) == sorted_sets(sent)
    return True


def sorted_sets(data: bytes) -> bytes:
    """The only values whose order is not kept are the sets of a snapshot."""
    tree = msgspec.msgpack.decode(data)
    state = tree.get("state") if isinstance(tree, dict) else None
    if isinstance(state, dict):
        for name in ("copying", "removing"):
            state[name] = sorted(state[name])
    return msgspec.msgpack.encode(tree)


def event(data: bytes) -> bool:
    return round_trip(data, decode_event)


def command(data: bytes) -> bool:
    return round_trip(data, decode_command)


def effects(data: bytes) -> bool:
    return round_trip(data, decode_effects)


def snapshot(data: bytes) -> bool:
    return round_trip(data, lambda given: decode_as(given, EngineSnapshot))


def event_seeds() -> list[bytes]:
    made = [
        ev.TimerFired(at_s=1.5),
        ev.WindowClosed(at_s=2.0, window=make_window(SPEC, make_demand(SPEC, {2: 70.0}))),
        ev.RankJoined(
            at_s=0.0,
            rank=1,
            node="n",
            failure_domain="d",
            profile="p",
            num_slots=3,
            address=make_address(1),
            resident=(ev.ResidentSlot(slot=0, tag=4, layer=0, expert=2, verified=True),),
        ),
        ev.StepFailed(at_s=1.0, step_id=1, code="digest", detail="x"),
        ev.DrainAsked(at_s=1.0, request_id=1, rank=0),
        ev.PlanAsked(at_s=1.0, request_id=1, policy="static", max_moves=3),
        ev.PlanAsked(at_s=1.0, request_id=1, target=((0, 1), (2,))),
    ]
    return [encode(one) for one in made]


def commands() -> list[Any]:
    source = ef.CopySource(rank=1, slot=0, slot_tag=9, address=make_address(1))
    return [
        ef.ComputeTarget(
            request_id=1,
            layout_revision=2,
            cause="auto",
            policy="static",
            input=make_request(SPEC, make_topology([3, 3]), LAYOUT),
            deadline_s=3.0,
        ),
        ef.CopyExpert(
            step_id=1,
            rank=0,
            incarnation=1,
            slot=2,
            slot_tag=3,
            layer=0,
            expert=1,
            source=source,
            timeout_s=1.0,
        ),
        ef.PublishTable(table=make_table(LAYOUT)),
        ef.WakeAt(at_s=9.0),
        ef.Answer(request_id=1, code="ok", message="done"),
    ]


def a_transition(step_id: int = 1) -> Transition:
    return Transition(
        at_s=2.0,
        plan_id="p",
        step_id=step_id,
        kind=StepKind.ADD,
        rank=0,
        slot=0,
        layer=0,
        expert=1,
        event="begun",
        before="planned",
        after="reserved",
    )


def effects_seeds() -> list[bytes]:
    return [
        encode(Effects(transitions=(a_transition(),), commands=tuple(commands()[1:]), records=()))
    ]


@cache
def engine_snapshot() -> EngineSnapshot:
    """An engine in the middle of something: ranks joined, a window closed."""
    engine = RebalanceEngine(
        SPEC, make_topology([3, 3]), RebalanceConfig(), term=1, first_epoch=1, start_s=0.0
    )
    for rank in (0, 1):
        engine.step(
            ev.RankJoined(
                at_s=0.5,
                rank=rank,
                node=f"node{rank}",
                failure_domain=f"node{rank}",
                profile="small",
                num_slots=3,
                address=make_address(rank),
            )
        )
    engine.step(ev.WindowClosed(at_s=2.0, window=make_window(SPEC, make_demand(SPEC))))
    return engine.snapshot()


# ------------------------------------------------------------------------------------- the journal
KINDS = tuple(RowKind)
ROW = struct.Struct("<Bd")


def of_row(row: Row) -> bytes:
    return ROW.pack(KINDS.index(row.kind), row.at_s) + row.body


def journal_rows(data: bytes) -> bool:
    """Rows whose checksums hold, whatever they hold: an image, or the two errors that the journal
    turns into one line."""
    rows = []
    meta, *parts = pieces(data, ROWS_MAX)
    for part in parts:
        if len(part) < ROW.size:
            continue
        kind, at_s = ROW.unpack_from(part)
        rows.append(Row(KINDS[kind % len(KINDS)], at_s, part[ROW.size :]))
    words = meta.decode("utf-8", "replace").split("|")
    settings = dict(zip(("intended_term", "starts", "admin_port"), words, strict=False))
    try:
        image = image_of(rows, settings, 0.0, dropped_tail=False)
    except (msgspec.DecodeError, ValueError) as error:
        return refused(error)
    look_at(image)
    return True


def look_at(image: JournalImage) -> None:
    assert 0 <= image.epoch < 2**63
    assert 0 <= image.intended_term < 2**63
    assert 0 <= image.admin_port < 65_536
    if image.snapshot is not None:
        sent = encode(image.snapshot.engine)
        assert decode_as(sent, EngineSnapshot).state.term == image.snapshot.engine.state.term


def a_snapshot() -> StateSnapshot:
    return StateSnapshot(
        term=1,
        epoch=3,
        at_s=1.0,
        engine=engine_snapshot(),
        parts=("s:shard:0:1",),
        epochs_published=2,
    )


def some_rows() -> list[Row]:
    return [
        snapshot_row(a_snapshot()),
        transition_row(a_transition()),
        epoch_row(7, 2.0),
        part_row("s:router:r:2", 3.0),
        part_row("s:shard:0:1", 4.5, gone=True),
    ]


def rows_seeds() -> list[bytes]:
    rows = [of_row(row) for row in some_rows()]
    return [
        joined([b"1|1.000 2.000|8080", *rows]),
        joined([b"0", *rows[1:]]),
        joined([b"2", rows[0]]),
    ]


def _row_body(data: bytes, rng: Any) -> bytes:
    return data[: ROW.size] + mutations.msgpack(data[ROW.size :], rng)


# ---------------------------------------------------------------------------------- files of SQLite
@cache
def journal_files() -> tuple[bytes, bytes]:
    """`state.db` and `inputs.db` of a closed journal."""

    async def write(path: Path) -> None:
        journal, _ = await open_journal(path, "s", JournalLimits())
        await journal.intend_term(1)
        rows = some_rows()
        await journal.open_term(1, rows[0], owner="here", starts=Starts("boot", (1.0,)))
        await journal.commit(rows[1:])
        journal.begin_segment(1.0, encode(engine_snapshot()))
        for seed in event_seeds():
            journal.append_input(2.0, seed)
        await journal.close()

    path = scratch() / "first"
    asyncio.run(write(path))
    found = []
    for name in (STATE_FILE, INPUTS_FILE):
        with closing(sqlite3.connect(path / name)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("VACUUM")
        found.append((path / name).read_bytes())
    return found[0], found[1]


def fresh(name: str) -> Path:
    path = scratch() / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    return path


def journal_file(data: bytes) -> bool:
    """A byte says which of the two files of a journal is replaced: it opens, or is refused with one
    line; one whose inputs are damaged opens."""
    path = fresh("opened")
    state, inputs = journal_files()
    replaces_state = not data or data[0] % 2 == 0
    (path / STATE_FILE).write_bytes(data[1:] if replaces_state else state)
    (path / INPUTS_FILE).write_bytes(inputs if replaces_state else data[1:])

    async def opened() -> JournalImage:
        journal, image = await open_journal(path, "s", JournalLimits())
        await journal.close()
        return image

    try:
        image = asyncio.run(opened())
    except StartRefused as error:
        fault = error
    else:
        look_at(image)
        return True
    assert "\n" not in str(fault)
    assert replaces_state, "damaged inputs cost replay only"
    return refused(fault)


def recording_journal(data: bytes) -> bool:
    """An inputs log that somebody sent: segments, or one typed error."""
    path = scratch() / "recording.db"
    path.write_bytes(data)
    try:
        if not is_journal(path):
            return False
        segments = read_segments(path)
    except MoeServeError as error:
        return refused(error)
    assert sum(len(segment.snapshot_bytes) for segment in segments) <= len(data)
    return True


def _cells(data: bytes, rng: Any) -> bytes:
    """One value of one row of a database as another, by SQLite itself."""
    if rng.random() < 0.6:
        return mutations.raw(data, rng)
    values: tuple[Any, ...] = (0, -1, 2**62, 1.5, "text", b"", b"\x80", "9" * 5000)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        try:
            db.deserialize(data)
            tables = {
                name: [row[1] for row in db.execute(f"PRAGMA table_info({name})")]
                for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                if name in ("meta", "log", "inputs")
            }
            name = rng.choice(sorted(tables))
            column = rng.choice(tables[name])
            rows = [row[0] for row in db.execute(f"SELECT {column} FROM {name}")]  # noqa: S608
            old = rng.choice(rows)
            value = rng.choice(values)
            if isinstance(old, bytes) and rng.random() < 0.7:
                value = mutations.msgpack(old, rng)
            db.execute(f"UPDATE {name} SET {column} = ? WHERE {column} IS ?", (value, old))  # noqa: S608
            return bytes(db.serialize())
        except (sqlite3.Error, MemoryError, *mutations.UNREADABLE):
            return mutations.raw(data, rng)


ROWS: Mutate = mutations.of_pieces(ROWS_MAX, mutations.raw, _row_body)
TARGETS = (
    Target("event", event, event_seeds, mutations.msgpack),
    Target("command", command, lambda: [encode(one) for one in commands()], mutations.msgpack),
    Target("effects", effects, effects_seeds, mutations.msgpack),
    Target("snapshot", snapshot, lambda: [encode(engine_snapshot())], mutations.msgpack),
    Target("journal_rows", journal_rows, rows_seeds, ROWS),
    Target(
        "journal_file",
        journal_file,
        lambda: [bytes([number]) + file for number, file in enumerate(journal_files())],
        mutations.behind(1, _cells),
        base_bytes=4 << 20,
        max_bytes=65_536,
        examples=60,
    ),
    Target(
        "recording_journal",
        recording_journal,
        lambda: [journal_files()[1]],
        _cells,
        base_bytes=1 << 20,
        max_bytes=65_536,
        examples=100,
    ),
)
