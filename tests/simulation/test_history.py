"""A history that processes wrote to files is read in order and checked, and what is wrong in it is
found. The processes here are simulated; real ones are in the integration tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from moe_serve.controller.polls import HUNG_ROUTER_S
from placement.messages import events as ev
from placement.messages import history as h
from placement.messages.history import Fact, to_line
from placement.sim.runner import SAFETY_MAX_S
from placement.sim.world import World
from tests.chaos.history import CUT_OFF, Deeds, check_history, read_history
from tests.chaos.planted_history import PLANTED, Planter, counted

SEED = 4
LIVES_S = 14.0
REST_S = 4.0
SILENCE_S = 1.0


@pytest.fixture(scope="module")
def facts() -> list[Fact]:
    """A quiet life in which one rank is emptied and filled again."""
    world = World(SEED, faults=0)
    world.stage.clock.run_until(LIVES_S / 3)
    boss = world.fleet.controller
    assert boss is not None
    boss.feed(ev.DrainAsked(at_s=0.0, request_id=1, rank=0, cause=ev.DrainCause.OPERATOR))
    world.stage.clock.run_until(2 * LIVES_S / 3)
    boss.feed(ev.UndrainAsked(at_s=0.0, request_id=2, rank=0, cause=ev.DrainCause.OPERATOR))
    world.stage.clock.run_until(LIVES_S)
    world.stop_traffic()
    world.stage.clock.run_until(LIVES_S + REST_S)
    return list(world.stage.recorder.facts)


def broken(facts: Sequence[Fact], deeds: Deeds | None = None) -> list[str]:
    return check_history(facts, deeds, router_silence_s=SILENCE_S, commit_s=0.0)


def written(folder: Path, facts: Sequence[Fact]) -> None:
    for fact in facts:
        with (folder / f"{fact.who.replace('/', '-')}.jsonl").open("ab") as file:
            file.write(to_line(fact) + b"\n")


def test_a_sound_history_is_content_and_says_what_it_saw(
    facts: list[Fact], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, facts)
    (tmp_path / "rank9-1.jsonl").write_bytes(to_line(facts[0])[:20])  # killed as it wrote
    read = read_history(tmp_path)
    assert len(read) == len(facts)
    assert broken(read) == []
    said = capsys.readouterr().out
    assert f"{len(facts)} facts" in said
    assert "'first':" in said
    assert "RowsServed" in said


def test_what_is_noted_after_the_reading_began_is_left_out(
    facts: list[Fact], tmp_path: Path
) -> None:
    later = msgspec.structs.replace(facts[0], at_s=time.monotonic() + 3600.0)
    written(tmp_path, [facts[1], later])
    assert read_history(tmp_path) == [facts[1]]


@pytest.mark.parametrize(("plant", "promise"), PLANTED, ids=[p.__name__ for p, _ in PLANTED])
def test_a_planted_fault_is_found(facts: list[Fact], plant: Planter, promise: str) -> None:
    found = broken(plant(facts))
    assert any(what.startswith(f"{promise}:") for what in found), found


def test_nothing_seen_is_not_content(facts: list[Fact]) -> None:
    assert len(broken([])) > 10
    without = [fact for fact in facts if not isinstance(fact, h.RouterHeard)]
    assert "nothing shown: no RouterHeard" in broken(without)
    ended = [fact for fact in facts if not isinstance(fact, h.RequestEnded)]
    assert "nothing shown: no contribution" in broken(ended)


# -- faults --------------------------------------------------------------------------------------


def as_real(facts: Sequence[Fact]) -> tuple[list[Fact], Deeds]:
    """The facts as real processes would have left them: the dead note nothing of their death, nor
    of demand that went with them, and of a killed controller the last write may be missing."""
    pids = {fact.who: 100 + n for n, fact in enumerate(f for f in facts if isinstance(f, h.Began))}
    deeds = Deeds()
    since_s: dict[str, float] = {}
    left: list[Fact] = []
    for fact in facts:
        if isinstance(fact, h.Died) and fact.cause != "fenced":
            deeds.killed[pids[fact.who]] = fact.at_s
            while left and isinstance(left[-1], h.StateWritten) and left[-1].who == fact.who:
                left.pop()
        elif isinstance(fact, h.Paused):
            since_s[fact.who] = fact.at_s
        elif isinstance(fact, h.Resumed):
            deeds.paused.append((pids[fact.who], since_s.pop(fact.who), fact.at_s))
        elif isinstance(fact, h.Began):
            left.append(msgspec.structs.replace(fact, pid=pids[fact.who]))
        elif not isinstance(fact, h.DemandUnsure):
            left.append(fact)
    return counted(left), deeds


@pytest.mark.parametrize("seed", [2, 5])
def test_what_the_dead_did_not_note_breaks_no_promise(seed: int) -> None:
    world = World(seed)
    clock = world.stage.clock
    while clock.now_s < SAFETY_MAX_S and not world.nemesis.done:
        clock.run_until(clock.now_s + 1.0)
    world.heal()
    clock.run_until(clock.now_s + LIVES_S)
    world.stop_traffic()
    clock.run_until(clock.now_s + REST_S)
    facts, deeds = as_real(world.stage.recorder.facts)
    assert len(deeds.killed) > 2
    assert broken(facts, deeds) == []
    assert any("nobody had ended it" in what for what in broken(facts))


@pytest.mark.parametrize(("cut_s", "explained"), [(HUNG_ROUTER_S + 10.0, True), (5.0, False)])
def test_a_router_that_the_controller_could_not_reach_for_long_may_be_replaced(
    cut_s: float, explained: bool
) -> None:
    lives = [("router-0/1", 1.0, 21), ("router-0/2", 90.0, 22)]
    facts: list[Fact] = []
    for who, at_s, pid in lives:
        facts.append(h.Began(who=who, seq=0, at_s=at_s, term=1, place="router-0", pid=pid))
        facts.append(h.TableInstalled(who=who, seq=1, at_s=at_s, term=1, epoch=1))
    deeds = Deeds(faults=[(CUT_OFF, "router-0", 2.0, 2.0 + cut_s)])
    said = check_history(facts, deeds, need=())
    assert explained != any("nobody had ended it" in what for what in said)


# -- kills -----------------------------------------------------------------------------------------


class Killed:
    """Facts of a controller that commits, is killed, and is succeeded."""

    def __init__(self, *, noted: str, found: str | None, pid: int = 11) -> None:
        self.facts: list[Fact] = []
        self._seq: dict[str, int] = {}
        self.tell(h.Began, "controller/1", term=1, place="controller", pid=pid)
        self.tell(h.Recovered, "controller/1", term=1, journal=False)
        self.step("planned", noted)
        self.tell(h.Began, "controller/2", term=2, place="controller", pid=12)
        steps = () if found is None else ((9, found),)
        self.tell(h.Recovered, "controller/2", term=2, journal=True, open_steps=steps)

    def step(self, before: str, after: str, who: str = "controller/1") -> None:
        where = {"rank": 0, "slot": 0, "slot_tag": 1, "key": 0, "plan_id": "p", "step_id": 9}
        self.tell(h.StateWritten, who, kind="add", before=before, after=after, **where)

    def tell(self, kind: type[Fact], who: str, /, **fields: object) -> None:
        seq = self._seq.get(who, 0)
        self._seq[who] = seq + 1
        self.facts.append(kind(who=who, seq=seq, at_s=float(len(self.facts)), **fields))

    def broken(self, deeds: Deeds | None = None) -> list[str]:
        return check_history(self.facts, deeds, need=())


KILLED = Deeds(killed={11: 2.5})


@pytest.mark.parametrize("found", ["copying", None])
def test_a_killed_controller_may_have_written_once_more(found: str | None) -> None:
    story = Killed(noted="reserved", found=found)
    assert story.broken(KILLED) == []
    if found is not None:
        story.step("copying", "verified", "controller/2")
        assert story.broken(KILLED) == []
        story.step("copying", "aborting", "controller/2")
        assert any("goes on from" in what for what in story.broken(KILLED))


def test_a_controller_that_said_that_it_ends_has_noted_everything() -> None:
    story = Killed(noted="reserved", found="copying")
    story.facts.insert(3, h.Died(who="controller/1", seq=3, at_s=2.5, term=1, cause="fenced"))
    assert any(what.startswith("I8") for what in story.broken())


def test_a_life_that_nobody_ended_is_told() -> None:
    story = Killed(noted="reserved", found="reserved")
    assert story.broken(KILLED) == []
    assert [what.split(" ")[1] for what in story.broken()] == ["controller/1"]
