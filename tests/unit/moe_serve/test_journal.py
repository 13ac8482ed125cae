"""The journal: durable order, damage, fullness, the fence between two controllers, bounds."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from moe_serve.controller.journal import Journal, move_aside, open_journal
from moe_serve.controller.journal_rows import (
    Row,
    RowKind,
    Starts,
    StateSnapshot,
    epoch_row,
    part_row,
    snapshot_row,
    transition_row,
)
from moe_serve.controller.journal_store import (
    INPUTS_FILE,
    STATE_FILE,
    JournalDamaged,
    JournalFull,
    StateStore,
)
from moe_serve.controller.settings import JournalLimits
from moe_serve.errors import StaleTerm, StartRefused
from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine
from placement.messages.effects import Transition
from placement.planner.plan import StepKind
from tests.builders import make_spec, make_topology

LIMITS = JournalLimits()


def snapshot(term: int = 1, at_s: float = 1.0) -> StateSnapshot:
    engine = RebalanceEngine(
        make_spec(),
        make_topology([3, 3]),
        RebalanceConfig(),
        term=term,
        first_epoch=1,
        start_s=0.0,
    )
    return StateSnapshot(
        term=term,
        epoch=0,
        at_s=at_s,
        engine=engine.snapshot(),
        parts=("s:shard:0:1",),
        epochs_published=0,
    )


def transition(step_id: int, at_s: float = 2.0) -> Transition:
    return Transition(
        at_s=at_s,
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


async def opened(folder: Path, term: int = 1, limits: JournalLimits = LIMITS) -> Journal:
    journal, _ = await open_journal(folder, "s", limits)
    await journal.intend_term(term)
    await journal.open_term(
        term, snapshot_row(snapshot(term)), owner="here", starts=Starts("b", (1.0,))
    )
    return journal


@pytest.mark.asyncio
async def test_what_was_committed_is_there_again(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.commit([transition_row(transition(1)), epoch_row(7, 2.0)])
    await journal.commit([part_row("s:router:r:2", 3.0)])
    await journal.commit([part_row("s:shard:0:1", 4.5, gone=True)])
    await journal.close()
    journal, image = await open_journal(tmp_path, "s", LIMITS)
    await journal.close()
    assert image.snapshot is not None
    assert [t.step_id for t in image.transitions] == [1]
    assert image.parts == ("s:router:r:2",)
    assert (image.epoch, image.epochs_published, image.last_at_s) == (7, 1, 4.5)
    assert (image.intended_term, image.owner, image.closed) == (1, "here", False)


@pytest.mark.asyncio
async def test_a_snapshot_supersedes_what_was_before(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    for number in range(4):
        await journal.commit([transition_row(transition(number))])
        await journal.commit([snapshot_row(snapshot(at_s=10.0 + number))])
    await journal.commit([transition_row(transition(9, at_s=20.0))])
    await journal.close()
    rows = sqlite3.connect(tmp_path / STATE_FILE).execute("SELECT count(*) FROM log").fetchone()
    assert rows == (4,), "two snapshots, one transition between, one after"
    journal, image = await open_journal(tmp_path, "s", LIMITS)
    await journal.close()
    assert [t.step_id for t in image.transitions] == [9]


@pytest.mark.asyncio
async def test_a_controller_of_a_lower_term_cannot_write_any_more(tmp_path: Path) -> None:
    first = await opened(tmp_path, term=1)
    second = await opened(tmp_path, term=2)
    with pytest.raises(StaleTerm) as caught:
        await first.commit([transition_row(transition(1))])
    assert caught.value.term == 2
    await second.commit([transition_row(transition(2))])
    with pytest.raises(StaleTerm):
        await first.open_term(1, snapshot_row(snapshot(1)), owner="here", starts=Starts())
    for journal in (first, second):
        await journal.close()


def test_only_the_term_that_owns_the_journal_writes_to_it(tmp_path: Path) -> None:
    """Nor does a higher one that has not opened it: its owner may be writing still."""
    with closing(StateStore(tmp_path, "s")) as store:
        store.open_term(2, snapshot_row(snapshot(2)), {})
        for term in (1, 3):
            with pytest.raises(StaleTerm) as caught:
                store.append(term, [transition_row(transition(1))])
            assert caught.value.term == 2
        store.append(2, [transition_row(transition(2))])
    with closing(StateStore(tmp_path, "s")) as store:
        assert len(store.rows) == 2, "the snapshot, and what its owner wrote"


@pytest.mark.asyncio
async def test_what_the_owner_wrote_after_it_was_read_is_read_before_a_term_opens(
    tmp_path: Path,
) -> None:
    first = await opened(tmp_path, term=1)
    second, _ = await open_journal(tmp_path, "s", LIMITS)
    await first.commit([transition_row(transition(7))])
    with pytest.raises(StaleTerm, match="wrote to the journal after it was read"):
        await second.open_term(2, snapshot_row(snapshot(2)), owner="here", starts=Starts())
    await first.commit([transition_row(transition(8))])  # nothing of the second was written
    await second.close()

    again, image = await open_journal(tmp_path, "s", LIMITS)
    assert [t.step_id for t in image.transitions] == [7, 8]
    await again.open_term(2, snapshot_row(snapshot(2)), owner="here", starts=Starts())
    for journal in (first, again):
        await journal.close()


@pytest.mark.asyncio
async def test_a_full_disk_fails_the_commit_whole(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.close()
    room = (tmp_path / STATE_FILE).stat().st_size + 40_000  # for a snapshot, not for what follows
    tight = JournalLimits(state_bytes_max=room)
    journal, _ = await open_journal(tmp_path, "s", tight)
    await journal.open_term(2, snapshot_row(snapshot(2)), owner="here", starts=Starts())
    with pytest.raises(JournalFull):
        await journal.commit([transition_row(transition(1)), part_row("x" * 100_000, 1.0)])
    await journal.close()
    journal, image = await open_journal(tmp_path, "s", LIMITS)
    await journal.close()
    assert image.transitions == ()


def test_a_commit_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    no_time = Row(RowKind.PART, float("nan"), b"s:shard:0:2")  # which the table does not take
    with closing(StateStore(tmp_path, "s")) as store:
        store.open_term(1, snapshot_row(snapshot(1)), {})
        with pytest.raises(sqlite3.IntegrityError):
            store.append(1, [transition_row(transition(1)), no_time])
        store.append(1, [transition_row(transition(2))])
    with closing(StateStore(tmp_path, "s")) as store:
        assert [row.body for row in store.rows[1:]] == [transition_row(transition(2)).body]


def damage(folder: Path, statement: str) -> None:
    db = sqlite3.connect(folder / STATE_FILE)
    db.execute(statement)
    db.commit()
    db.close()


@pytest.mark.asyncio
async def test_a_torn_last_record_is_dropped_and_told(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.commit([transition_row(transition(1))])
    await journal.commit([transition_row(transition(2))])
    await journal.close()
    damage(tmp_path, "UPDATE log SET body = x'00' WHERE seq = (SELECT max(seq) FROM log)")
    journal, image = await open_journal(tmp_path, "s", LIMITS)
    await journal.close()
    assert image.dropped_tail
    assert [t.step_id for t in image.transitions] == [1]


@pytest.mark.asyncio
async def test_a_journal_whose_last_record_was_torn_is_gone_on_with(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.commit([transition_row(transition(1))])
    await journal.close()
    damage(tmp_path, "UPDATE log SET body = x'00' WHERE seq = (SELECT max(seq) FROM log)")
    journal = await opened(tmp_path, term=2)
    await journal.commit([transition_row(transition(2))])
    await journal.close()
    journal, image = await open_journal(tmp_path, "s", LIMITS)
    await journal.close()
    assert not image.dropped_tail, "that was told once"
    assert [t.step_id for t in image.transitions] == [2]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE log SET body = x'00' WHERE seq = 2",
        "UPDATE log SET checksum = 0 WHERE seq = 1",
        "UPDATE log SET body = x'00' WHERE seq >= 3",
        "DELETE FROM log WHERE seq = 2",
    ],
)
async def test_other_damage_is_refused_in_one_line(tmp_path: Path, statement: str) -> None:
    journal = await opened(tmp_path)
    for number in range(3):
        await journal.commit([transition_row(transition(number))])
    await journal.close()
    damage(tmp_path, statement)
    with pytest.raises(JournalDamaged) as caught:
        await open_journal(tmp_path, "s", LIMITS)
    assert "\n" not in caught.value.message
    assert "move state.db" in caught.value.message


@pytest.mark.asyncio
async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(JournalDamaged):
        await open_journal(tmp_path, "s", LIMITS)


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).mkdir()
    with pytest.raises(StartRefused, match="cannot be opened") as caught:
        await open_journal(tmp_path, "s", LIMITS)
    assert not isinstance(caught.value, JournalDamaged)


@pytest.mark.asyncio
async def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.commit([transition_row(transition(n)) for n in range(400)])
    await journal.close()
    file = tmp_path / STATE_FILE
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(JournalDamaged):
        await open_journal(tmp_path, "s", LIMITS)


@pytest.mark.asyncio
async def test_another_service_is_refused_the_folder(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.close()
    with pytest.raises(StartRefused, match="state_dir of its own"):
        await open_journal(tmp_path, "other", LIMITS)


@pytest.mark.asyncio
async def test_damaged_inputs_cost_replay_only(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.close()
    (tmp_path / INPUTS_FILE).write_bytes(b"rubbish" * 1000)
    journal, image = await open_journal(tmp_path, "s", LIMITS)
    await journal.close()
    assert image.snapshot is not None
    assert (tmp_path / f"aside-{INPUTS_FILE}").exists()


def inputs_of(folder: Path) -> list[tuple[int, str, bytes]]:
    db = sqlite3.connect(folder / INPUTS_FILE)
    rows = db.execute("SELECT segment, kind, body FROM inputs ORDER BY seq").fetchall()
    db.close()
    return rows


@pytest.mark.asyncio
async def test_inputs_stand_in_segments_that_begin_with_a_snapshot(tmp_path: Path) -> None:
    limits = JournalLimits(segment_bytes=100, inputs_bytes_max=350)
    journal = await opened(tmp_path, limits=limits)
    for number in range(12):
        at_s = float(number)
        if journal.wants_segment(at_s):
            journal.begin_segment(at_s, b"S")
        journal.append_input(at_s, bytes([number]) * 60)
        await asyncio.sleep(0)
    await journal.close()
    rows = inputs_of(tmp_path)
    segments = sorted({s for s, _, _ in rows})
    assert segments[0] > 1, "whole old segments are gone"
    assert sum(len(b) for _, _, b in rows) <= 350 + 121
    for segment in segments:
        kinds = [k for s, k, _ in rows if s == segment]
        assert kinds[0] == "snapshot"
        assert set(kinds[1:]) == {"event"}
    bodies = [b[0] for _, k, b in rows if k == "event"]
    assert bodies == list(range(bodies[0], 12)), "in order, none missing"


@pytest.mark.asyncio
async def test_inputs_that_come_too_fast_are_cut_until_the_next_segment(tmp_path: Path) -> None:
    limits = JournalLimits(queue_max=3)
    journal, _ = await open_journal(tmp_path, "s", limits)
    journal.append_input(0.0, b"no segment is open")
    assert journal.inputs_cut == 1
    journal.begin_segment(0.0, b"S")
    for _number in range(500):
        journal.append_input(0.0, bytes(1000))
    assert journal.inputs_cut > 1
    assert not journal.wants_segment(0.1), "not at once: a segment begins with a whole snapshot"
    await journal.close()


@pytest.mark.asyncio
async def test_an_input_is_written_before_a_later_commit(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    journal.begin_segment(0.0, b"S")
    journal.append_input(1.0, b"first")
    await journal.commit([transition_row(transition(1))])
    assert [b for _, _, b in inputs_of(tmp_path)] == [b"S", b"first"]
    await journal.close()


@pytest.mark.asyncio
async def test_a_closed_journal_keeps_its_numbers(tmp_path: Path) -> None:
    journal = await opened(tmp_path, term=4)
    await journal.mark_closed()
    await journal.close()
    journal, image = await open_journal(tmp_path, "s", LIMITS)
    await journal.close()
    assert (image.closed, image.intended_term) == (True, 4)


@pytest.mark.asyncio
async def test_moving_aside_leaves_an_empty_place(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.close()
    move_aside(tmp_path)
    journal, image = await open_journal(tmp_path, "s", LIMITS)
    await journal.close()
    assert image.empty


@pytest.mark.asyncio
async def test_inputs_that_cannot_be_written_never_hold_up_a_commit(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    with closing(sqlite3.connect(tmp_path / INPUTS_FILE)) as other:
        other.execute("DROP TABLE inputs")
        other.commit()
    journal.begin_segment(1.0, b"snapshot")
    journal.append_input(1.0, b"event")
    async with asyncio.timeout(5.0):
        await journal.commit([transition_row(transition(1))])
    assert journal.inputs_cut > 0
    await journal.close()
