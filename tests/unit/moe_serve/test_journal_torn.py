"""A journal that a crash tore at any byte, or whose bytes changed: what was committed last is
whole or gone, and other damage is refused."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from moe_serve.controller.journal_rows import Row, RowKind, epoch_row, part_row
from moe_serve.controller.journal_store import STATE_FILE, JournalDamaged, StateStore

HEADER, FRAME_HEADER = 32, 24
COMMITS = 6


def part_name(number: int) -> str:
    """Longer than a page, for some commits."""
    return f"s:shard:{number}:1" + "x" * (900 if number % 2 == 0 else 0)


def commit(store: StateStore, number: int) -> None:
    """Two rows that belong together."""
    store.append(1, [epoch_row(number, float(number)), part_row(part_name(number), float(number))])


def written(folder: Path) -> bytes:
    """A journal of which only the beginning is in `state.db`: returns its write-ahead log."""
    with closing(
        sqlite3.connect(folder / STATE_FILE)
    ) as db:  # small pages, so few bytes to tear at
        db.execute("PRAGMA page_size = 512")
        db.execute("VACUUM")
    store = StateStore(folder, "s")
    store.open_term(1, Row(RowKind.PART, 0.0, b"s:shard:0:1"), {})
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for number in range(1, COMMITS + 1):
        commit(store, number)
    wal = (folder / f"{STATE_FILE}-wal").read_bytes()
    for name in (STATE_FILE, f"{STATE_FILE}-wal"):  # as a crash leaves them: never closed
        shutil.copy(folder / name, folder / f"kept-{name}")
    store.close()
    return wal


def torn(folder: Path, wal: bytes) -> StateStore:
    """The journal as it is opened after a crash that left these bytes."""
    for suffix in ("", "-wal", "-shm"):
        (folder / f"{STATE_FILE}{suffix}").unlink(missing_ok=True)
    shutil.copy(folder / f"kept-{STATE_FILE}", folder / STATE_FILE)
    (folder / f"{STATE_FILE}-wal").write_bytes(wal)
    return StateStore(folder, "s")


def commits_in(store: StateStore) -> int:
    """How many commits it holds; each is there whole, and none without those before it."""
    bodies = [(row.kind, row.body) for row in store.rows][1:]
    wanted = [
        pair
        for number in range(1, COMMITS + 1)
        for pair in (
            (RowKind.EPOCH, epoch_row(number, 0.0).body),
            (RowKind.PART, part_name(number).encode()),
        )
    ]
    assert bodies == wanted[: len(bodies)], "in their order, with none left out"
    assert len(bodies) % 2 == 0, "half a commit is none"
    return len(bodies) // 2


def lengths(wal: bytes, *, every_byte: bool) -> list[int]:
    """Where to tear: every byte, or around each frame's edges and at some bytes between."""
    if every_byte:
        return list(range(len(wal) + 1))
    size = int.from_bytes(wal[8:12], "big") + FRAME_HEADER
    edges = range(HEADER, len(wal) + 1, size)
    near = {edge + by for edge in edges for by in (-1, 0, 1, FRAME_HEADER)}
    anywhere = random.Random(7).sample(range(len(wal) + 1), 20)
    return sorted({0, 1, HEADER - 1, *near, *anywhere} & set(range(len(wal) + 1)))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "every_byte",
    [pytest.param(False, id="edges"), pytest.param(True, id="every byte", marks=pytest.mark.slow)],
)
def test_a_journal_torn_anywhere_holds_a_prefix_of_whole_commits(
    tmp_path: Path, every_byte: bool
) -> None:
    wal = written(tmp_path)
    held = []
    for length in lengths(wal, every_byte=every_byte):
        store = torn(tmp_path, wal[:length])
        held.append(commits_in(store))
        commit(store, 99)  # and it can be gone on with
        store.close()
    assert held == sorted(held), "a longer rest never holds less"
    assert (held[0], held[-1]) == (0, COMMITS)
    assert len(set(held)) == COMMITS + 1, "every commit was torn off once"


def test_bytes_that_a_crash_left_behind_the_end_are_not_read(tmp_path: Path) -> None:
    wal = written(tmp_path)
    (tmp_path / "other").mkdir()
    older = written(tmp_path / "other")[HEADER:]  # another use of the file, with another salt
    for junk in (b"\0" * 4096, b"\xff" * 5000, older):
        store = torn(tmp_path, wal + junk)
        assert commits_in(store) == COMMITS
        store.close()


def flips(wal: bytes, *, every_byte: bool) -> list[int]:
    """Bytes of all but the last commit: every one, or some of each field of each frame."""
    size = page_bytes(wal) + FRAME_HEADER
    end = commit_ends(wal)[-2]
    if every_byte:
        return list(range(end))
    fields = (0, 4, 7, 8, 12, 16, 20, 23, FRAME_HEADER, FRAME_HEADER + 100, size - 1)
    frames = range(HEADER, end, size)
    header = (0, 3, 4, 9, 10, 16, 20, 24, 28)
    return [*header, *(frame + field for frame in frames for field in fields)]


def page_bytes(wal: bytes) -> int:
    return int.from_bytes(wal[8:12], "big")


def commit_ends(wal: bytes) -> list[int]:
    """Where each commit ends, in order."""
    size = page_bytes(wal) + FRAME_HEADER
    frames = range(HEADER, len(wal), size)
    return [frame + size for frame in frames if any(wal[frame + 4 : frame + 8])]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "every_byte",
    [pytest.param(False, id="fields"), pytest.param(True, id="every byte", marks=pytest.mark.slow)],
)
def test_a_flipped_byte_before_the_last_commit_is_refused_and_never_forgets_commits(
    tmp_path: Path, every_byte: bool
) -> None:
    wal = written(tmp_path)
    forgotten = []
    for at in flips(wal, every_byte=every_byte):
        changed = bytearray(wal)
        changed[at] ^= 0x10
        try:
            store = torn(tmp_path, bytes(changed))
        except JournalDamaged:
            continue
        if commits_in(store) < COMMITS:
            forgotten.append(at)
        store.close()
    assert forgotten == []


def test_a_flipped_byte_in_the_last_commit_costs_that_one_at_most(tmp_path: Path) -> None:
    wal = written(tmp_path)
    opened = 0
    for at in range(commit_ends(wal)[-2], len(wal), 61):
        changed = bytearray(wal)
        changed[at] ^= 0x10
        try:
            store = torn(tmp_path, bytes(changed))
        except JournalDamaged:  # what no crash could have left
            continue
        opened += 1
        assert commits_in(store) >= COMMITS - 1
        store.close()
    assert opened > 0


def test_frames_written_out_of_order_when_the_machine_stops_are_a_torn_end(tmp_path: Path) -> None:
    wal = written(tmp_path)
    begin, size = commit_ends(wal)[-2], page_bytes(wal) + FRAME_HEADER
    assert len(wal) - begin >= 2 * size, "the last commit has frames to mix up"
    for lost in range(begin, len(wal), size):
        changed = bytearray(wal)
        changed[lost : lost + size] = bytes(size)
        store = torn(tmp_path, bytes(changed))
        assert commits_in(store) == COMMITS - 1
        store.close()


FLIPS = {
    "body": "UPDATE log SET body = :flipped || substr(body, 2) WHERE seq = :seq",
    "time": "UPDATE log SET at_s = at_s + 1e-9 WHERE seq = :seq",
    "sign of the time": "UPDATE log SET at_s = -1.0 - at_s WHERE seq = :seq",
    "kind": "UPDATE log SET kind = 'part_gone' WHERE seq = :seq",
    "checksum": "UPDATE log SET checksum = checksum + 1 WHERE seq = :seq",
}


@pytest.mark.parametrize("what", FLIPS)
@pytest.mark.parametrize("seq", range(1, 6))
def test_a_bit_that_flips_in_any_record_but_the_last_is_refused(
    tmp_path: Path, seq: int, what: str
) -> None:
    store = StateStore(tmp_path, "s")
    store.open_term(1, Row(RowKind.PART, 0.0, b"s:shard:0:1"), {})
    for number in range(1, 3):
        commit(store, number)
    store.close()
    with closing(StateStore(tmp_path, "s")) as store:
        whole = list(store.rows)
    assert len(whole) == 5
    flipped = bytes([whole[seq - 1].body[0] ^ 1])
    with closing(sqlite3.connect(tmp_path / STATE_FILE)) as db:
        db.execute(FLIPS[what], {"seq": seq, "flipped": flipped})
        # SQLite joins bytes as text.
        db.execute("UPDATE log SET body = CAST(body AS BLOB)")
        db.commit()
    if seq < len(whole):
        with pytest.raises(JournalDamaged, match=f"record {seq} fails its checksum") as caught:
            StateStore(tmp_path, "s")
        assert "\n" not in caught.value.message
    else:
        with closing(StateStore(tmp_path, "s")) as store:
            assert store.dropped_tail
            assert store.rows == whole[:-1], "what was committed before is as it was"
