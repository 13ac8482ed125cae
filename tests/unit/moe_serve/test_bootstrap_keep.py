"""The keeper: started again whenever the service is gone, never while it answers, not once it was
taken down; and what a dead service left is cleared away first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from ray.exceptions import RaySystemError
from typer.testing import CliRunner

from moe_serve.bootstrap import keep, kept_service, refusals, service
from moe_serve.bootstrap.keep import CALM_S, LOOK_S, PAUSE_FIRST_S, PAUSE_MAX_S, SILENT_S, Keeper
from moe_serve.bootstrap.kept_service import KeptService
from moe_serve.bootstrap.record import (
    ServiceRecord,
    kept,
    read_record,
    remove_record,
    write_record,
)
from moe_serve.cli.app import app
from moe_serve.cli.exits import ExitCode
from moe_serve.errors import NotFound, StartRefused


def a_record(**changes: object) -> ServiceRecord:
    record = ServiceRecord(
        service="s",
        ray_address="127.0.0.1:1",
        namespace="moe_serve",
        admin_address="127.0.0.1:1",
        router_addresses=("127.0.0.1:3",),
        dashboard_url="",
        config_file="/s.yaml",
        network="loopback",
    )
    return msgspec.structs.replace(record, **changes)


class EnoughError(Exception):
    """The test has seen enough."""


@dataclass
class FakeHands:
    """A service that lives or does not; time passes by waiting only. `script`: what happens at a
    time, before that look."""

    script: dict[float, Callable[[FakeHands], None]] = field(default_factory=dict)
    refusals: int = 0
    at_s: float = 0.0
    up: bool = False
    silent: bool = False
    controller: bool = True
    own_cluster: bool = True
    down: bool = False
    did: list[tuple[float, str]] = field(default_factory=list)
    ends_s: float = 10_000.0

    def start(self) -> ServiceRecord:
        self.did.append((self.at_s, "start"))
        if self.refusals:
            self.refusals -= 1
            raise StartRefused("no room")
        self.up, self.silent, self.controller = True, False, True
        return a_record()

    def record(self) -> ServiceRecord | None:
        return None if self.down else a_record()

    def answers(self, record: ServiceRecord) -> bool:
        assert not self.down, "nobody looks after what was taken down"
        return self.up and not self.silent

    def cluster_gone(self, record: ServiceRecord) -> bool:
        return self.own_cluster and not self.up

    def controller_gone(self, record: ServiceRecord) -> bool:
        self.did.append((self.at_s, "ask"))
        return not self.controller

    def clear(self, record: ServiceRecord) -> None:
        self.did.append((self.at_s, "clear"))

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.at_s += seconds
        for due_s in [due_s for due_s in self.script if due_s <= self.at_s]:
            self.script.pop(due_s)(self)
        if self.at_s > self.ends_s:
            raise EnoughError

    def now_s(self) -> float:
        return self.at_s

    def die(self) -> None:
        self.up = False

    def starts_s(self) -> list[float]:
        return [at_s for at_s, what in self.did if what == "start"]


def kept_until(hands: FakeHands, ends_s: float) -> list[str]:
    hands.ends_s = ends_s
    said: list[str] = []
    with pytest.raises(EnoughError):
        Keeper("s", hands, said.append).run()
    return said


def test_a_service_that_answers_is_left_alone_for_ever() -> None:
    hands = FakeHands()
    kept_until(hands, 5_000.0)
    assert hands.did == [(0.0, "start")]


def test_a_service_that_died_is_cleared_away_and_started_again_at_once() -> None:
    hands = FakeHands({500.0: FakeHands.die})
    said = kept_until(hands, 600.0)
    assert [what for _, what in hands.did] == ["start", "clear", "start"]
    assert hands.starts_s()[1] <= 500.0 + LOOK_S + PAUSE_FIRST_S
    assert any("gone" in line for line in said)


def test_starts_that_fail_come_ever_more_slowly_and_never_end() -> None:
    hands = FakeHands({500.0: lambda h: (h.die(), setattr(h, "refusals", 10))[0]})
    said = kept_until(hands, 3_000.0)
    waits = [b - a for a, b in zip(hands.starts_s()[1:], hands.starts_s()[2:], strict=False)]
    assert waits[:3] == [2 * PAUSE_FIRST_S, 4 * PAUSE_FIRST_S, 8 * PAUSE_FIRST_S]
    assert max(waits) == PAUSE_MAX_S
    assert len(hands.starts_s()) == 1 + 10 + 1
    assert sum("no room" in line for line in said) == 10


def test_a_service_that_dies_again_and_again_is_started_ever_more_slowly() -> None:
    hands = FakeHands({float(at_s): FakeHands.die for at_s in range(5, 400, 5)})
    kept_until(hands, 400.0)
    assert len(hands.starts_s()) < 12
    # Once it lived for a while, its next death is a first one.
    hands.script = {hands.at_s + CALM_S + 1 + 2 * PAUSE_MAX_S: FakeHands.die}
    hands.did.clear()
    hands.up = True
    kept_until(hands, hands.at_s + 600.0)
    gone_s = next(at_s for at_s, what in hands.did if what == "clear")
    assert hands.starts_s()[1] <= gone_s + PAUSE_FIRST_S


def test_the_first_start_that_is_refused_is_the_callers() -> None:
    with pytest.raises(StartRefused, match="no room"):
        Keeper("s", FakeHands(refusals=1)).run()


def test_a_controller_that_ray_restarts_is_waited_for() -> None:
    hands = FakeHands({100.0: lambda h: setattr(h, "silent", True)})
    kept_until(hands, 1_000.0)
    asked_s = [at_s for at_s, what in hands.did if what == "ask"]
    assert hands.starts_s() == [0.0]
    waits = [b - a for a, b in zip([100.0, *asked_s], asked_s, strict=False)]
    assert min(waits) >= SILENT_S - LOOK_S
    assert len(asked_s) > 10


def test_a_controller_that_ray_gave_up_is_started_again() -> None:
    def lost(hands: FakeHands) -> None:
        hands.silent, hands.controller = True, False

    hands = FakeHands({100.0: lost}, own_cluster=False)
    kept_until(hands, 400.0)
    assert [what for _, what in hands.did] == ["start", "ask", "clear", "start"]


def test_what_a_person_took_down_stays_down() -> None:
    hands = FakeHands({50.0: lambda h: (h.die(), setattr(h, "down", True))[0]})
    Keeper("s", hands).run()
    assert hands.did == [(0.0, "start")]


# -- on this machine -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for module in (refusals, kept_service):
        monkeypatch.setattr(module, "answers", lambda address: address == "lives")


def kept_service_of(config_file: str = "/s.yaml") -> KeptService:
    return KeptService("s", config_file, lambda: a_record(admin_address="new"), lambda line: None)


def test_a_service_that_runs_is_taken_over_and_one_of_another_file_is_not() -> None:
    hands = kept_service_of()
    assert hands.start().admin_address == "new"
    write_record(a_record())
    assert hands.start().admin_address == "new", "it is dead"
    write_record(a_record(admin_address="lives"))
    assert hands.start().admin_address == "lives"
    with pytest.raises(StartRefused, match="running already, from /s"):
        kept_service_of("/other.yaml").start()


def test_who_begins_to_take_a_service_down_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServiceRecord | None] = []

    def refuse(address: str) -> None:
        seen.append(kept_service_of().record())
        raise StartRefused("nobody there")

    write_record(a_record())
    assert kept_service_of().record() == a_record()
    monkeypatch.setattr(service, "command_connected", refuse)
    monkeypatch.setattr(service, "join_auth", lambda *_given: None)
    service.down("s")
    assert seen == [None]
    assert kept_service_of().record() is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RaySystemError("gone")])
def test_a_start_that_is_cut_short_by_the_world_is_refused_and_tried_again(
    error: Exception,
) -> None:
    def cut_short() -> ServiceRecord:
        raise error

    with pytest.raises(StartRefused, match=r"the start was cut short: .*(No space|gone)"):
        KeptService("s", "/s.yaml", cut_short, lambda line: None).start()


def test_a_record_that_goes_while_it_is_read_is_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_record(a_record())
    read = Path.read_bytes

    def gone(file: Path) -> bytes:
        file.unlink()
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", gone)
    assert kept_service_of().record() is None


def test_a_service_that_is_being_started_again_is_ended_with_its_keeper() -> None:
    down = ["down", "s", "--yes"]
    absent = CliRunner().invoke(app, down)
    assert "no record of service 's'" in absent.stderr
    with kept("s"):
        told = CliRunner().invoke(app, down)
    assert told.exit_code == ExitCode.FAILED
    assert "end that program" in told.stderr


def test_one_keeper_a_service() -> None:
    with kept("s"):
        with pytest.raises(StartRefused, match="another `moe-serve up --keep`"):
            kept("s").__enter__()
        with kept("t"):
            pass
    with kept("s"):
        pass


def test_an_end_while_it_is_up_takes_the_service_down(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def interrupted(_keeper: Keeper, on_up: object) -> None:
        _keeper.starts = 1
        raise KeyboardInterrupt

    monkeypatch.setattr(keep.Keeper, "run", interrupted)
    monkeypatch.setattr(kept_service, "down", lambda name, progress: ended.append(name))
    kept_service.keep("s", "/s.yaml", a_record, on_up=lambda r: None, progress=lambda line: None)
    assert ended == ["s"]


def test_what_a_dead_service_left_is_cleared_before_the_next_is_started(tmp_path: Path) -> None:
    folder = tmp_path / "moe-dead"
    folder.mkdir()
    (folder / "node-0.log").write_text("Ray was here")
    environment = {**os.environ, "RAY_TMPDIR": str(folder)}
    with subprocess.Popen(["sleep", "600"], env=environment) as orphan:
        # Its head is dead; what that had started is not.
        dead = a_record(ray_pids=(2**22 + 1,), ray_temp_dir=str(folder))
        write_record(dead)
        assert refusals.check_not_running("s") == dead
        kept_service_of().clear(dead)
        orphan.wait(10.0)
    assert not folder.exists()
    with pytest.raises(NotFound):
        read_record("s")
    assert refusals.check_not_running("s") is None
    remove_record("s")


KEEPS = """
import pathlib, sys
from moe_serve.bootstrap.kept_service import KeptService
from moe_serve.bootstrap.local_ray import ensure_auth
from moe_serve.errors import StartRefused

def up():
    ensure_auth(pathlib.Path(sys.argv[1]))
    raise OSError("no room")

try:
    KeptService("s", "/s.yaml", up, print).start()
except StartRefused as error:
    print(error.message)
"""


def test_a_keeper_sets_up_rays_authentication_before_it_imports_ray(tmp_path: Path) -> None:
    """In a process of its own: Ray reads the mode once, and this one has imported it."""
    environ = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", KEEPS, str(tmp_path)],
        env=environ | {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120.0,
    )
    assert done.stdout == "the start was cut short: no room\n", done.stderr
