"""Small parts of the controller: names, terms, settings, the book, fail points."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_serve.controller import supervision
from moe_serve.controller.book import Book
from moe_serve.controller.clock import DriverClock
from moe_serve.controller.fail_points import FailPoints, point_of_term
from moe_serve.controller.journal import open_journal
from moe_serve.controller.journal_store import STATE_FILE
from moe_serve.controller.names import Incarnations, PartKind, PartName, parse
from moe_serve.controller.parts import PartTable, shard_part
from moe_serve.controller.publisher import Publisher
from moe_serve.controller.settings import (
    ControllerSettings,
    ExpectedRank,
    JournalLimits,
    SupervisionLimits,
)
from moe_serve.controller.supervision import Supervision
from moe_serve.controller.tasks import Tasks
from moe_serve.controller.terms import claim_term, first_epoch
from moe_serve.errors import ResourceExhausted, StartRefused
from moe_serve.ports import NodeInfo
from placement.config import RebalanceConfig
from placement.engine.state import RankState, RankStatus
from placement.load import LoadFolder
from placement.messages.effects import Answer, Transition
from placement.messages.events import AnyEvent, DrainAsked, DrainCause, UndrainAsked, WindowClosed
from placement.messages.records import DecisionRecord
from placement.planner.plan import StepKind
from placement.routing import RoutingTable
from tests.builders import PROFILE, make_spec
from tests.fake_shards import FakeWorld, marker_spec
from tests.fakes.fleet import FakeCluster, FakeFleet


def test_a_name_says_what_it_names() -> None:
    name = PartName("tiny", PartKind.SHARD, "3", 1_000_002)
    assert str(name) == "tiny:shard:3:1000002"
    assert parse("tiny", str(name)) == name
    assert name.rank == 3


@pytest.mark.parametrize(
    "text",
    [
        "tiny:controller",
        "tiny:shard:x:1",
        "tiny:shard:1:x",
        "tiny:page:1:1",
        "tin:shard:1:1",
        "tiny:shard:1:1:1",
        "tiny:router::1",
        "",
    ],
)
def test_what_is_no_part_of_the_service_is_not_parsed(text: str) -> None:
    assert parse("tiny", text) is None


def test_incarnations_grow_over_terms() -> None:
    first, second = Incarnations(1), Incarnations(2)
    assert first.next() < first.next() < second.next()


@pytest.mark.asyncio
async def test_a_term_is_above_all_seen_and_claimed_once(tmp_path: Path) -> None:
    cluster = FakeCluster(make_spec(), PROFILE.name, [], [], terms={4})
    journal, _ = await open_journal(tmp_path, "s", JournalLimits())
    assert await claim_term(FakeFleet(cluster), journal, [2]) == 5
    assert await claim_term(FakeFleet(cluster), journal, [9]) == 10
    await journal.close()
    journal, image = await open_journal(tmp_path, "s", JournalLimits())
    await journal.close()
    assert image.intended_term == 10


@pytest.mark.asyncio
async def test_a_term_is_in_the_journal_before_it_is_claimed(tmp_path: Path) -> None:
    """A journal that knew less than the cluster would be taken for an older controller's."""
    intended: list[int] = []

    class Watched(FakeFleet):
        async def claim_term(self, term: int) -> bool:
            with closing(sqlite3.connect(tmp_path / STATE_FILE)) as db:
                meta = dict(db.execute("SELECT key, value FROM meta"))
            intended.append(int(meta.get("intended_term", "0")))
            return await super().claim_term(term)

    cluster = FakeCluster(make_spec(), PROFILE.name, [], [], terms={4})
    journal, _ = await open_journal(tmp_path, "s", JournalLimits())
    assert await claim_term(Watched(cluster), journal, []) == 5
    assert intended == [5]
    await journal.close()


@pytest.mark.asyncio
async def test_the_first_epoch_is_above_all_that_anybody_has_seen() -> None:
    cluster = FakeCluster(make_spec(), PROFILE.name, [4], [NodeInfo("node0", True, {})])
    port = await FakeFleet(cluster).create_shard("tiny:shard:0:1", 0, 1)
    router = await FakeFleet(cluster).create_router("tiny:router:r:1", "r", 1)
    for seen in ((9, 2, 3), (2, 9, 3), (3, 2, 9)):
        shard_info = replace(await port.describe(), highest_epoch=seen[1])
        router_info = replace(await router.describe(), highest_epoch=seen[2])
        assert first_epoch(seen[0], [shard_info], [router_info]) == 10


@pytest.mark.asyncio
async def test_the_end_of_an_earlier_life_does_not_drop_the_one_that_lives() -> None:
    cluster = FakeCluster(make_spec(), PROFILE.name, [4], [NodeInfo("node0", True, {})])
    parts, lives = PartTable(), []
    for life in (1, 2):
        name = PartName("tiny", PartKind.SHARD, "0", life)
        port = await FakeFleet(cluster).create_shard(str(name), 0, life)
        lives.append(shard_part(name, port, await port.describe(), 0.0))
        parts.add(lives[-1])
    parts.drop(lives[0])
    assert parts.holds(lives[1])
    parts.drop(lives[1])
    assert parts.all() == []


@pytest.mark.asyncio
async def test_the_loser_of_a_claim_takes_the_next_term(tmp_path: Path) -> None:
    class Late(FakeFleet):
        async def highest_term(self) -> int:
            return 0  # read before the other controller claimed

    cluster = FakeCluster(make_spec(), PROFILE.name, [], [], terms={1, 2})
    journal, _ = await open_journal(tmp_path, "s", JournalLimits())
    assert await claim_term(Late(cluster), journal, []) == 3
    await journal.close()


def settings(**fields: object) -> ControllerSettings:
    made = ControllerSettings(
        service_id="tiny",
        spec=make_spec(),
        config=RebalanceConfig(),
        ranks=(ExpectedRank(rank=0, profile="small", num_slots=4, budget_bytes=4000),),
        profiles=(PROFILE,),
        state_dir=Path("/nowhere"),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host": "10.0.0.1"}, "token file and TLS"),
        ({"host": ""}, "token file and TLS"),
        ({"tls_key": Path("k")}, "both a certificate and a key"),
        ({"ranks": ()}, "0..n-1"),
        ({"profiles": ()}, "not declared"),
        ({"num_routers": 0}, "num_routers 0"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(StartRefused, match=words):
        settings(**fields)


def test_insecure_access_must_be_accepted_in_so_many_words() -> None:
    assert not settings(host="10.0.0.1", accept_insecure=True).loopback


def record(seq: int, rule: str = "in_balance", outcome: str = "kept", move: int = -1):  # type: ignore[no-untyped-def]
    return DecisionRecord(
        at_s=float(seq),
        seq=seq,
        rule=rule,
        outcome=outcome,
        detail="layer 1 expert 2: it is hot",
        plan_id="p" if move >= 0 else "",
        move_id=move,
        numbers={"layer": 1.0, "expert": 2.0, "source_rank": 0.0, "target_rank": 3.0},
    )


def test_the_book_keeps_the_newest_records() -> None:
    book = Book(records_kept=3, moves_kept=8)
    book.add(tuple(record(n) for n in range(5)))
    assert [k.record.seq for k in book.records_after(-1)] == [2, 3, 4]
    assert [k.record.seq for k in book.records_after(3)] == [4]
    assert book.records_after(4) == []


def test_a_move_is_followed_from_start_to_end_and_old_ones_go() -> None:
    book = Book(records_kept=9, moves_kept=2)
    book.add((record(0, "replicate", "started", move=1),))
    assert [(m.state, m.reason, m.target_rank) for m in book.moves] == [("running", "it is hot", 3)]
    book.add((record(1, "replicate", "done", move=1), record(2, "evict", "aborted", move=2)))
    assert [(m.kind, m.state) for m in book.moves] == [("replicate", "done"), ("evict", "aborted")]
    book.add((record(3, "migrate", "started", move=3),))
    assert [m.move_id for m in book.moves] == [2, 3]


def test_each_term_has_its_own_fail_point_or_none() -> None:
    points = ("", "before:publish")
    assert [point_of_term(points, term) for term in (1, 2, 3)] == ["", "before:publish", ""]


def test_a_fail_point_fires_once_and_only_at_its_point() -> None:
    fired: list[int] = []
    points = FailPoints("after:add:copying", lambda: fired.append(1))
    entered = Transition(
        at_s=0.0,
        plan_id="",
        step_id=0,
        kind=StepKind.ADD,
        rank=0,
        slot=0,
        layer=0,
        expert=0,
        event="slot_reserved",
        before="reserved",
        after="copying",
    )
    points.at_commit("before", [entered])
    points.at_publish("after")
    assert not fired
    points.at_commit("after", [entered])
    points.at_commit("after", [entered])
    assert fired == [1]


@pytest.mark.asyncio
async def test_a_table_that_was_held_back_never_replaces_a_newer_one() -> None:
    async def post(_event: AnyEvent) -> None:
        return None

    world = FakeWorld(marker_spec())
    world.place()
    publisher = Publisher(PartTable(), Tasks(), post, lambda _error: None, 1.0)
    old, new = replace_epoch(world, 5), replace_epoch(world, 6)
    publisher.publish(new)
    publisher.publish(old)
    assert publisher.newest is new


def replace_epoch(world: FakeWorld, epoch: int) -> RoutingTable:
    world.epoch = epoch
    return world.table()


class Watched:
    """A supervision over one shard on node0, and an engine's word on its rank that the test sets.
    `codes`: answers to drains and undrains, the last one for all further ones; "busy" is none."""

    def __init__(self, *codes: str) -> None:
        self.cluster = FakeCluster(
            make_spec(), PROFILE.name, [4], [NodeInfo("node0", True, {}), NodeInfo("n1", True, {})]
        )
        self.parts = PartTable()
        self.asked: list[AnyEvent] = []
        self.ensured: list[int] = []
        self.rank = RankState(
            rank=0,
            node="node0",
            failure_domain="node0",
            profile=PROFILE.name,
            num_slots=4,
            budget_bytes=4000,
            status=RankStatus.LIVE,
        )
        self._codes = list(codes)
        self.supervision = Supervision(
            FakeFleet(self.cluster),
            limits=SupervisionLimits(nodes_s=0.005),
            clock=DriverClock(0.0),
            parts=self.parts,
            folder=LoadFolder(
                num_layers=1, num_experts=4, num_ranks=1, window_s=1.0, sub_windows=1, start_s=0.0
            ),
            tasks=Tasks(),
            ranks=lambda: [self.rank],
            ask=self._ask,
            forget=lambda _part: None,
            ensure=self.ensured.append,
        )

    async def _ask(self, make: Callable[[int], AnyEvent]) -> Answer:
        event = make(1)
        self.asked.append(event)
        code = self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]
        if code == "busy":
            raise ResourceExhausted("too many requests wait for an answer")
        if code == "ok":
            assert isinstance(event, DrainAsked | UndrainAsked)
            self.rank.drained_by = (event.cause,) if isinstance(event, DrainAsked) else ()
        return Answer(request_id=1, code=code, message="")

    async def add_shard(self, incarnation: int = 1) -> None:
        name = PartName("tiny", PartKind.SHARD, "0", incarnation)
        port = await FakeFleet(self.cluster).create_shard(str(name), 0, incarnation)
        self.parts.add(shard_part(name, port, await port.describe(), 0.0))

    async def look(self) -> None:
        """Look at the nodes a few times."""
        watching = asyncio.create_task(self.supervision.watch_nodes())
        await asyncio.sleep(0.05)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_drain_for_which_there_was_no_room_is_asked_for_again() -> None:
    watched = Watched("busy", "ok")
    await watched.add_shard()
    watched.cluster.drain_node("node0")
    await watched.look()
    assert [type(event) for event in watched.asked] == [DrainAsked, DrainAsked]


@pytest.mark.asyncio
async def test_a_refused_drain_is_asked_for_again_only_for_another_shard() -> None:
    watched = Watched("refused", "ok")
    await watched.add_shard()
    watched.cluster.drain_node("node0")
    await watched.look()
    assert [type(event) for event in watched.asked] == [DrainAsked]
    watched.cluster.keep_node("node0")
    await watched.add_shard(2)
    watched.cluster.drain_node("node0")
    await watched.look()
    assert len(watched.asked) == 2
    assert watched.rank.drained_by == (DrainCause.NODE,)


@pytest.mark.asyncio
async def test_a_rank_is_drained_only_once_it_has_joined() -> None:
    watched = Watched("ok")
    await watched.add_shard()
    watched.cluster.drain_node("node0")
    watched.rank.status = RankStatus.RESTORED
    await watched.look()
    assert watched.asked == []
    watched.rank.status = RankStatus.LIVE
    await watched.look()
    assert len(watched.asked) == 1


@pytest.mark.asyncio
async def test_a_drained_rank_whose_shard_is_not_adopted_yet_is_left_alone() -> None:
    watched = Watched("ok")
    watched.rank.drained_by = (DrainCause.NODE,)
    watched.rank.status = RankStatus.RESTORED
    watched.cluster.drain_node("node0")
    await watched.look()
    assert (watched.asked, watched.ensured) == ([], [])
    watched.cluster.keep_node("node0")
    await watched.add_shard()
    await watched.look()
    assert [type(event) for event in watched.asked] == [UndrainAsked]
    assert watched.ensured == [], "it lives"


@pytest.mark.asyncio
async def test_a_drain_goes_on_while_the_head_of_the_cluster_is_away() -> None:
    watched = Watched("ok")
    await watched.add_shard()
    watched.cluster.drain_node("node0")
    await watched.look()
    assert watched.rank.drained_by == (DrainCause.NODE,)
    known, watched.cluster.nodes = watched.cluster.nodes, []  # it names none
    await watched.look()
    watched.cluster.nodes = known
    await watched.look()
    assert [type(event) for event in watched.asked] == [DrainAsked]


@pytest.mark.asyncio
async def test_a_rank_that_was_lost_while_an_operator_drained_it_is_made_again() -> None:
    watched = Watched("ok")
    watched.rank.drained_by = (DrainCause.OPERATOR,)
    watched.rank.status = RankStatus.LOST
    await watched.supervision.undrain(0)
    assert watched.ensured == [0]


@pytest.mark.asyncio
async def test_load_windows_are_closed_on_time_whatever_their_news_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched, closed_s = Watched("ok"), list[float]()
    clock = SimpleNamespace(now_s=lambda: clock.at_s, at_s=0.0)
    waits_s = [0.25, 0.75, 2.5, 0.0, 0.0]
    """How long the driver's queue is full after each window."""

    async def sleep(seconds: float) -> None:
        clock.at_s += seconds

    async def post(event: AnyEvent) -> None:
        assert isinstance(event, WindowClosed)
        closed_s.append(clock.at_s)
        assert event.window.index == 6 + len(closed_s)
        if not waits_s:
            raise asyncio.CancelledError
        clock.at_s += waits_s.pop(0)

    monkeypatch.setattr(supervision, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(watched.supervision, "_clock", clock)
    with pytest.raises(asyncio.CancelledError):
        await watched.supervision.close_windows(1.0, 7, post)
    # One that comes too late for the next is followed by it at once, and by no other in a hurry.
    assert closed_s == [1.0, 2.0, 3.0, 5.5, 6.5, 7.5]


@pytest.mark.asyncio
async def test_a_part_that_is_gone_is_missed_in_no_load_window() -> None:
    watched = Watched("ok")
    await watched.add_shard()
    part, folder = watched.parts.shards[0], watched.supervision._folder
    part.source = "rank-0"
    watched.supervision.publisher = Publisher(
        watched.parts, Tasks(), lambda _event: asyncio.sleep(0), lambda _error: None, 1.0
    )
    folder.expect(part.source)
    assert folder.close(1.0).sources_missing == (part.source,)
    watched.supervision.farewell(part)
    assert folder.close(2.0).sources_missing == ()
