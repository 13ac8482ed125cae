"""The two SQLite files of the journal: `state.db` (every commit on disk before it returns) and
`inputs.db` (fast; losing its tail costs replay, not safety).

Responsible for SQL, damage and fullness. Used from one thread at a time, the writer's. Must never
decode what rows mean. Called by journal only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from moe_serve.controller.journal_rows import Row, RowKind, checksum, is_time
from moe_serve.controller.journal_wal import lost_commits
from moe_serve.errors import MoeServeError, StaleTerm, StartRefused

FORMAT = "5"
STATE_FILE = "state.db"
INPUTS_FILE = "inputs.db"
STARTS_KEPT = 16
_FULL_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
_CLOSED_CODES = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY})
"""What says nothing about the bytes of the file: no file there and none can be made, or another
process holds it."""
_NO_NUMBERS = (TypeError, ValueError, OverflowError)
"""What columns raise that hold something else than their numbers."""

_STATE_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (
  seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, at_s REAL NOT NULL, checksum INTEGER NOT NULL,
  body BLOB NOT NULL);
"""
_INPUTS_SCHEMA = """
CREATE TABLE IF NOT EXISTS inputs (
  seq INTEGER PRIMARY KEY, segment INTEGER NOT NULL, kind TEXT NOT NULL, at_s REAL NOT NULL,
  body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS inputs_segment ON inputs (segment);
"""


class JournalFull(MoeServeError):
    """The disk takes no more. What was not written must not be carried out."""

    code = "RESOURCE_EXHAUSTED"


class JournalDamaged(StartRefused):
    """The journal is not what was written, beyond a torn last record."""


def raise_full(error: sqlite3.Error, folder: Path) -> None:
    """Raise JournalFull where the error means that the disk takes no more; return otherwise."""
    if _code(error) in _FULL_CODES:
        raise JournalFull(
            f"the journal in {folder} cannot be written: {error}; free space there, or make it "
            "writable"
        ) from error


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


class StateStore:
    """`state.db`. Raises JournalDamaged where it is not whole, StartRefused where it cannot be
    opened; a bad last row is dropped and counts as torn."""

    def __init__(self, folder: Path, service_id: str, bytes_max: int = 0) -> None:
        self._path = folder / STATE_FILE
        self.dropped_tail = False
        wal = self._path.with_name(f"{STATE_FILE}-wal")
        try:
            # Looked at before SQLite does, who would drop what it cannot read.
            if wal.exists() and lost_commits(wal.read_bytes()):
                raise self._damaged("its write-ahead log is not what was written")
            self._db = _connect(self._path, "FULL", _STATE_SCHEMA)
            if bytes_max:
                self._db.execute(f"PRAGMA max_page_count = {max(1, bytes_max // 4096)}")
            found = [str(row[0]) for row in self._db.execute("PRAGMA quick_check(1)")]
            if found != ["ok"]:
                raise self._damaged(found[0])
            self._check_meta(service_id)
            self.rows = self._read()
            self._newest_read = self._newest()
        except sqlite3.DatabaseError as error:
            raise_full(error, folder)
            if _code(error) in _CLOSED_CODES:
                raise StartRefused(
                    f"journal {self._path} cannot be opened: {error}; state_dir must be a folder "
                    "that the controller may write, and no other program may hold its files"
                ) from error
            raise self._damaged(str(error)) from error
        except UnicodeDecodeError as error:
            # SQLite quotes the file in what it says, and Python could not read that.
            raise self._damaged("its text is no UTF-8") from error

    def meta(self) -> dict[str, str]:
        """All settings of the journal itself, by key."""
        return _meta(self._db)

    def set_meta(self, term: int | None = None, /, **values: str) -> None:
        """Change settings of the journal, in one transaction. Raises StaleTerm where `term` is
        given and another controller owns the journal now, JournalFull."""
        self._transact(term=term, rows=(), meta=values)

    def append(self, term: int, rows: Sequence[Row]) -> None:
        """Append rows in one transaction, on disk when this returns; a snapshot lets rows before
        the previous one go. Raises StaleTerm where another controller owns the journal now,
        JournalFull."""
        self._transact(term=term, rows=rows, meta={})

    def open_term(self, term: int, snapshot: Row, meta: dict[str, str]) -> None:
        """Own the journal from now on. Raises StaleTerm where a higher term owns it, or where its
        owner wrote rows since it was opened here: who goes on must have read them. Raises
        JournalFull."""
        self._transact(term=term, rows=(snapshot,), meta={**meta, "term": str(term)}, opening=True)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _transact(
        self, *, term: int | None, rows: Sequence[Row], meta: dict[str, str], opening: bool = False
    ) -> None:
        with _transaction(self._db, self._path.parent):
            if term is not None:
                self._fence(term, opening=opening)
            for key, value in meta.items():
                self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
            self._db.executemany(
                "INSERT INTO log (kind, at_s, checksum, body) VALUES (?, ?, ?, ?)",
                [(r.kind.value, r.at_s, r.checksum, r.body) for r in rows],
            )
            if any(r.kind is RowKind.SNAPSHOT for r in rows):
                self._forget()

    def _fence(self, term: int, *, opening: bool) -> None:
        held = self._db.execute("SELECT value FROM meta WHERE key = 'term'").fetchone()
        owner = int(held[0]) if held else 0
        if owner > term or (owner != term and not opening):
            raise StaleTerm(f"the journal belongs to term {owner}, not to {term}", term=owner)
        if opening and self._newest() != self._newest_read:
            raise StaleTerm(
                f"term {owner} wrote to the journal after it was read for term {term}; begin again",
                term=owner,
            )

    def _newest(self) -> tuple[object, ...]:
        """Number and checksum of the newest row, nothing where there is none."""
        found = self._db.execute("SELECT seq, checksum FROM log ORDER BY seq DESC LIMIT 1")
        return tuple(found.fetchone() or ())

    def _forget(self) -> None:
        # The snapshot before the newest stays, should the newest turn out to be the torn record.
        kept = self._db.execute(
            "SELECT seq FROM log WHERE kind = 'snapshot' ORDER BY seq DESC LIMIT 1 OFFSET 1"
        ).fetchone()
        if kept is not None:
            self._db.execute("DELETE FROM log WHERE seq < ?", (kept[0],))

    def _check_meta(self, service_id: str) -> None:
        meta = self.meta()
        if meta:
            _check_meta(self._path, meta, service_id)
        else:
            self.set_meta(format=FORMAT, service_id=service_id)

    def _read(self) -> list[Row]:
        rows: list[Row] = []
        bad: list[int] = []
        last = -1
        for seq, kind, at_s, crc, body in self._db.execute(
            "SELECT seq, kind, at_s, checksum, body FROM log ORDER BY seq"
        ):
            if last >= 0 and seq != last + 1:
                raise self._damaged(f"record {last + 1} is missing")
            last = seq
            # Columns of SQLite hold values of any type, whatever they were declared as.
            typed = isinstance(at_s, float) and isinstance(body, bytes)
            if kind in set(RowKind) and typed and checksum(kind, at_s, body) == crc:
                rows.append(Row(RowKind(kind), at_s, body))
            else:
                bad.append(seq)
        if bad and bad != [last]:
            raise self._damaged(f"record {bad[0]} fails its checksum")
        if bad:
            with _transaction(self._db, self._path.parent):
                self._db.execute("DELETE FROM log WHERE seq = ?", (last,))
            self.dropped_tail = True
        return rows

    def _damaged(self, what: str) -> JournalDamaged:
        return damaged(self._path, what)


def damaged(path: Path, what: str) -> JournalDamaged:
    """The one line about a journal that is not whole."""
    line = " ".join(what.split())  # SQLite tells of some damage in several lines
    return JournalDamaged(
        f"journal {path} is damaged ({line:.300}); move {path.name}* away to start from what the "
        "shards hold"
    )


def _meta(db: sqlite3.Connection) -> dict[str, str]:
    return {str(k): str(v) for k, v in db.execute("SELECT key, value FROM meta")}


def _check_meta(path: Path, meta: dict[str, str], service_id: str) -> None:
    if meta.get("format") != FORMAT:
        raise StartRefused(
            f"journal {path} has format {meta.get('format')!r:.40}, this version reads {FORMAT}; "
            "run the version that wrote it, or move the file away"
        )
    if meta.get("service_id") != service_id:
        raise StartRefused(
            f"journal {path} belongs to service {meta.get('service_id')!r:.80}, not to "
            f"{service_id!r}; give each service a state_dir of its own"
        )


def peek(folder: Path, service_id: str) -> None:
    """Look at a journal without a claim to it: for who is about to start a controller on it.

    Raises StartRefused, JournalDamaged where that controller could not but refuse; returns where
    there is none, or where it cannot be said without opening it for good.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            meta = _meta(db)
    except sqlite3.OperationalError:
        return  # a folder without rights, another program at it, a file nobody wrote to yet
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from error
    if meta:
        _check_meta(path, meta, service_id)


class InputsStore:
    """`inputs.db`. One that is damaged is moved aside: it costs replay only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.moved_aside = False
        try:
            self._db = self._open(folder)
        except (sqlite3.DatabaseError, *_NO_NUMBERS) as error:
            if isinstance(error, sqlite3.Error):
                raise_full(error, folder)
            set_aside(folder, INPUTS_FILE)
            self.moved_aside = True
            self._db = self._open(folder)

    @staticmethod
    def _open(folder: Path) -> sqlite3.Connection:
        db = _connect(folder / INPUTS_FILE, "NORMAL", _INPUTS_SCHEMA)
        try:
            if [str(r[0]) for r in db.execute("PRAGMA quick_check(1)")] != ["ok"]:
                raise sqlite3.DatabaseError("inputs are not whole")
            _segments(db)  # columns of other types are damage as well
        except (sqlite3.DatabaseError, *_NO_NUMBERS):
            db.close()
            raise
        return db

    def segments(self) -> list[tuple[int, int, float]]:
        """(segment, bytes, last driver time) of each segment, oldest first."""
        return _segments(self._db)

    def append(self, rows: Sequence[tuple[int, str, float, bytes]]) -> None:
        """Append (segment, kind, at_s, body) in order. Raises JournalFull."""
        with _transaction(self._db, self._folder):
            self._db.executemany(
                "INSERT INTO inputs (segment, kind, at_s, body) VALUES (?, ?, ?, ?)", rows
            )

    def drop(self, segments: Sequence[int]) -> None:
        """Forget whole segments. Raises JournalFull."""
        with _transaction(self._db, self._folder):
            self._db.executemany("DELETE FROM inputs WHERE segment = ?", [(s,) for s in segments])

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _segments(db: sqlite3.Connection) -> list[tuple[int, int, float]]:
    found = [
        (int(s), int(b), float(t))
        for s, b, t in db.execute(
            "SELECT segment, sum(length(body)), max(at_s) FROM inputs "
            "GROUP BY segment ORDER BY segment"
        )
    ]
    if not all(is_time(t) for _, _, t in found):
        raise ValueError("a time of an input is none")
    return found


def set_aside(folder: Path, name: str) -> None:
    """Rename a file of the journal, with what SQLite keeps beside it, to `aside-NAME`; an earlier
    one goes."""
    for suffix in ("", "-wal", "-shm"):
        file = folder / f"{name}{suffix}"
        target = folder / f"aside-{name}{suffix}"
        target.unlink(missing_ok=True)
        if file.exists():
            file.rename(target)


@contextmanager
def _transaction(db: sqlite3.Connection, folder: Path) -> Iterator[None]:
    """All or nothing. Raises JournalFull where the disk takes no more."""
    try:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("COMMIT")
    except BaseException as error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        if isinstance(error, sqlite3.DatabaseError):
            raise_full(error, folder)
        raise


def _connect(path: Path, synchronous: str, schema: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {synchronous}")
        db.executescript(schema)
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        db.close()
        raise
    return db
