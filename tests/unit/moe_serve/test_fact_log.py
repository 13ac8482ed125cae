"""Facts of a process are in its file, in order, before what follows from them can leave."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from moe_serve.telemetry.fact_log import FLUSH_S, FactLog, open_log
from placement.messages.history import Died, MemoryUsed, StallReported, TableInstalled, from_lines


def lines_of(folder: Path) -> list[bytes]:
    return (folder / f"rank2-{os.getpid()}.jsonl").read_bytes().split(b"\n")[:-1]


@pytest.fixture
def log(tmp_path: Path):
    made = FactLog(str(tmp_path / "facts"), "rank2")
    yield made
    made.close()


def test_no_folder_is_no_log() -> None:
    assert open_log("", "rank2") is None


def test_a_fact_is_in_the_file_as_soon_as_it_is_noted(log: FactLog, tmp_path: Path) -> None:
    before_s = time.monotonic()
    life = log.life("rank2/7")
    life.note(TableInstalled, term=3, epoch=5)
    (fact,) = from_lines(lines_of(tmp_path / "facts"))
    assert isinstance(fact, TableInstalled)
    assert (fact.who, fact.seq, fact.term, fact.epoch) == ("rank2/7", 0, 3, 5)
    assert before_s <= fact.at_s <= time.monotonic()


def test_what_leads_to_no_effect_goes_with_the_next_or_after_a_while(
    log: FactLog, tmp_path: Path
) -> None:
    life = log.life("rank2/7")
    used = dict.fromkeys(
        ("rank", "resident_bytes", "reserved_bytes", "held_bytes", "budget_bytes"), 0
    )
    life.note(MemoryUsed, **used)
    life.note(TableInstalled, term=1, epoch=1)
    assert [fact.seq for fact in from_lines(lines_of(tmp_path / "facts"))] == [0, 1]
    life.note(StallReported, why="paused")
    deadline_s = time.monotonic() + 100 * FLUSH_S
    while len(lines_of(tmp_path / "facts")) < 3:
        assert time.monotonic() < deadline_s
        time.sleep(FLUSH_S / 5)


def test_lives_of_a_process_count_apart_and_threads_share_one_count(
    log: FactLog, tmp_path: Path
) -> None:
    one, other = log.life("rank2/7"), log.life("rank2/8")

    def note() -> None:
        for _ in range(50):
            one.note(TableInstalled, term=1, epoch=1)
            other.note(TableInstalled, term=1, epoch=1)

    threads = [threading.Thread(target=note) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    facts = from_lines(lines_of(tmp_path / "facts"))
    for who in ("rank2/7", "rank2/8"):
        mine = [fact for fact in facts if fact.who == who]
        assert [fact.seq for fact in mine] == list(range(150))
        assert [fact.at_s for fact in mine] == sorted(fact.at_s for fact in mine)


def test_closing_writes_the_rest_and_what_comes_later_is_not_noted(
    log: FactLog, tmp_path: Path
) -> None:
    life = log.life("rank2/7")
    life.note(StallReported, why="paused")
    log.close()
    log.close()
    for _ in range(100):
        life.note(Died, cause="left")
    assert len(lines_of(tmp_path / "facts")) == 1
    assert log._lines == [], "a long life without a file must not grow"


def test_a_disk_without_room_ends_notes_and_nothing_else(
    log: FactLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int, _data: object) -> int:
        raise OSError(28, "No space left on device")

    life = log.life("rank2/7")
    life.note(TableInstalled, term=1, epoch=1)
    with monkeypatch.context() as patched:
        patched.setattr("moe_serve.telemetry.fact_log.os.write", full)
        life.note(TableInstalled, term=1, epoch=2)
    life.note(TableInstalled, term=1, epoch=3)
    assert [fact.epoch for fact in from_lines(lines_of(tmp_path / "facts"))] == [1]
