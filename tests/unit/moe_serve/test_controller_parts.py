"""Small parts of the controller: names, terms, settings, the book, fail points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve.controller.book import Book
from moe_serve.controller.fail_points import FailPoints
from moe_serve.controller.journal import open_journal
from moe_serve.controller.names import Incarnations, PartKind, PartName, parse
from moe_serve.controller.settings import ControllerSettings, ExpectedRank, JournalLimits
from moe_serve.controller.terms import claim_term
from moe_serve.errors import StartRefused
from placement.config import RebalanceConfig
from placement.messages.effects import Transition
from placement.messages.records import DecisionRecord
from placement.planner.plan import StepKind
from tests.builders import PROFILE, make_spec
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
