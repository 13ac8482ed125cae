"""The service record and the claim of `up`: one program brings a service up, and says what it
cannot write."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from moe_serve.bootstrap import refusals, service, starting
from moe_serve.bootstrap.record import (
    ServiceRecord,
    claimed,
    read_record,
    refresh_record,
    service_dir,
    state_home,
    write_record,
)
from moe_serve.cli.admin import find_target
from moe_serve.cli.exits import CannotReach
from moe_serve.config import parse_config
from moe_serve.controller.journal_store import STATE_FILE, StateStore
from moe_serve.errors import NotFound, StartRefused

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-moe.yaml"
HOLD = """
from moe_serve.bootstrap.record import claimed
with claimed("tiny-moe"):
    print("held", flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def a_record() -> ServiceRecord:
    return ServiceRecord(
        service="tiny-moe",
        ray_address="127.0.0.1:1",
        namespace="moe_serve",
        admin_address="127.0.0.1:2",
        router_addresses=("127.0.0.1:3",),
        dashboard_url="",
        config_file="",
        network="loopback",
        state_dir="/elsewhere",
    )


def test_a_service_is_brought_up_by_one_program_at_a_time() -> None:
    with claimed("tiny-moe"):
        with pytest.raises(StartRefused, match="another `moe-serve up` is starting service"):
            claimed("tiny-moe").__enter__()
        with claimed("other"):
            pass
    with claimed("tiny-moe"):
        pass


def test_up_starts_nothing_while_another_up_does() -> None:
    config = parse_config(EXAMPLE.read_bytes(), str(EXAMPLE))
    said: list[str] = []
    with claimed("tiny-moe"), pytest.raises(StartRefused, match="another `moe-serve up`"):
        service.up(config, config_file=str(EXAMPLE), progress=said.append)
    assert said == []


def test_a_claim_ends_with_a_program_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StartRefused):
            claimed("tiny-moe").__enter__()
        holder.kill()
    with claimed("tiny-moe"):
        pass


def test_a_record_is_read_as_it_was_written() -> None:
    write_record(a_record())
    assert read_record() == a_record()


def test_a_record_that_cannot_be_written_is_refused_and_leaves_no_half() -> None:
    (state_home() / "tiny-moe.service.json" / "in-the-way").mkdir(parents=True)
    with pytest.raises(StartRefused, match="cannot be written"):
        write_record(a_record())
    assert [file.name for file in state_home().iterdir()] == ["tiny-moe.service.json"]


def test_a_file_in_the_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    for act in (
        lambda: service_dir("tiny-moe"),
        lambda: write_record(a_record()),
        lambda: claimed("tiny-moe").__enter__(),
    ):
        with pytest.raises(StartRefused, match="cannot be made: Not a directory"):
            act()
    with pytest.raises(NotFound):
        read_record()


def test_the_record_follows_routers_that_moved() -> None:
    write_record(a_record())
    refresh_record("tiny-moe", ("127.0.0.1:3", "127.0.0.1:4"))
    assert read_record("tiny-moe").router_addresses == ("127.0.0.1:3", "127.0.0.1:4")
    assert read_record("tiny-moe").admin_address == a_record().admin_address
    refresh_record("tiny-moe", ())
    assert len(read_record("tiny-moe").router_addresses) == 2, "none is known: none is forgotten"
    refresh_record("nobody", ("127.0.0.1:3",))
    assert [file.name for file in state_home().glob("*.json")] == ["tiny-moe.service.json"]


@pytest.mark.parametrize("before", [None, a_record()])
def test_a_start_on_a_cluster_of_others_can_be_found_until_it_fails(
    before: ServiceRecord | None,
) -> None:
    """`down` finds the parts of an `up` that was killed meanwhile."""
    if before is not None:
        write_record(before)
    start = msgspec.structs.replace(a_record(), admin_address="", ray_address="127.0.0.1:9")

    def fail() -> None:
        with starting.findable(start, before):
            assert read_record("tiny-moe").ray_address == "127.0.0.1:9"
            with pytest.raises(CannotReach, match="moe-serve down tiny-moe"):
                find_target("", "tiny-moe", None, None)
            raise StartRefused("no node")

    with pytest.raises(StartRefused, match="no node"):
        fail()
    if before is None:
        with pytest.raises(NotFound):
            read_record("tiny-moe")
    else:
        assert read_record("tiny-moe") == before
    with starting.findable(start, before):
        pass
    assert read_record("tiny-moe") == start


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE meta SET value = '2' WHERE key = 'format'", "has format '2', this version reads"),
        ("UPDATE meta SET value = 'x' WHERE key = 'service_id'", "belongs to service 'x'"),
        ("", "is damaged"),
    ],
)
def test_a_journal_nobody_could_go_on_with_is_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, statement: str, words: str
) -> None:
    def never(*_given: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(starting, "start_local_ray", never)
    config = parse_config(EXAMPLE.read_bytes(), str(EXAMPLE))
    monkeypatch.setattr(service, "checked_model", lambda _config: None)
    refusals.check_journal(config)  # there is none yet
    StateStore(service_dir(config.service), config.service).close()
    refusals.check_journal(config)
    file = service_dir(config.service) / STATE_FILE
    if statement:
        db = sqlite3.connect(file)
        db.execute(statement)
        db.commit()
        db.close()
    else:
        file.write_bytes(b"none " * 1000)
    with pytest.raises(StartRefused, match=words) as caught:
        service.up(config, config_file="")
    assert "\n" not in caught.value.message
