"""When a snapshot is due, and what waits while the journal takes nothing."""

import msgspec

from placement.engine import Durability
from placement.messages import events as ev
from placement.messages.effects import (
    Effects,
    EndRank,
    PublishTable,
    ReleaseSlot,
    ReplaceRank,
)
from tests.engine_driver import two_ranks


def moving(driver):
    """Effects with transitions and a command to a shard, and a release and a table among them."""
    seen = []
    step = driver.engine.step

    def kept(event):
        seen.append(step(event))
        return seen[-1]

    driver.engine.step = kept
    driver.close_window({driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0})
    driver.wait(30.0)
    driver.engine.step = step
    return seen


def test_a_snapshot_is_due_once_for_what_no_transition_tells():
    driver = two_ranks(slots=3)
    durable = Durability(driver.engine, snapshot_every=1000)
    assert not durable.take_snapshot(driver.engine)
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=7, reason="look"))
    assert durable.take_snapshot(driver.engine)
    assert not durable.take_snapshot(driver.engine)
    durable.forget_told()
    assert durable.take_snapshot(driver.engine)


def test_a_snapshot_is_due_after_so_many_transitions():
    driver = two_ranks(slots=3)
    moved = next(e for e in moving(driver) if e.transitions)
    durable = Durability(driver.engine, snapshot_every=2 * len(moved.transitions))
    durable.written(moved)
    assert not durable.take_snapshot(driver.engine)
    durable.written(moved)
    assert durable.take_snapshot(driver.engine)
    assert not durable.take_snapshot(driver.engine)


def test_nothing_for_a_shard_passes_what_waits_and_a_table_does():
    driver = two_ranks(slots=3)
    seen = moving(driver)
    durable = Durability(driver.engine, snapshot_every=1000)
    first = next(e for e in seen if e.transitions)
    release = next(c for e in seen for c in e.commands if isinstance(c, ReleaseSlot))
    table = next(c for e in seen for c in e.commands if isinstance(c, PublishTable))
    assert not durable.must_wait(first), "nothing waits yet"
    durable.withhold(first)
    assert durable.must_wait(first)
    assert durable.must_wait(Effects(commands=(release,)))
    assert not durable.must_wait(Effects(commands=(table,)))
    later = Effects(commands=(release,))
    durable.withhold(later)
    assert durable.withheld == (first, later)
    assert durable.all_written(driver.engine, 50.0) == (first, later)
    assert durable.withheld == ()
    assert not durable.must_wait(first)
    assert not durable.take_snapshot(driver.engine), "all_written stands for one"


def test_releases_come_late_once_there_is_room_again():
    driver = two_ranks(slots=3)
    seen = moving(driver)
    release = next(c for e in seen for c in e.commands if isinstance(c, ReleaseSlot))
    table = next(c for e in seen for c in e.commands if isinstance(c, PublishTable))
    durable = Durability(driver.engine, snapshot_every=1000)
    assert durable.may_leave(release, 0.0)
    durable.all_written(driver.engine, 50.0)
    over_s = 50.0 + 2 * driver.config.drain_wait_s
    assert not durable.may_leave(release, 50.0)
    assert not durable.may_leave(release, over_s - 0.01)
    assert durable.may_leave(release, over_s)
    assert durable.may_leave(table, 50.0)


def test_an_emptied_shard_is_ended_only_when_routers_could_hear_of_the_table():
    driver = two_ranks(slots=3)
    durable = Durability(driver.engine, snapshot_every=1000)
    end, lost = EndRank(rank=1, incarnation=1), ReplaceRank(rank=0, lost_incarnation=1)
    emptied = ReplaceRank(rank=0, lost_incarnation=1, emptied=True)
    assert all(durable.may_leave(c, 5.0) for c in (end, lost, emptied))
    durable.withhold(Effects(commands=(end,)))
    durable.all_written(driver.engine, 10.0)
    wait_s = 2 * driver.config.drain_wait_s
    assert durable.due_at_s == float("inf")
    assert durable.may_leave(lost, 10.0), "nothing lives there that a call could name"
    assert not durable.may_leave(end, 10.0)
    assert not durable.may_leave(emptied, 11.0)
    assert durable.due_at_s == 10.0 + wait_s
    assert durable.due(9.9 + wait_s) == ()
    assert durable.due(10.0 + wait_s) == (end, emptied)
    assert durable.due(11.0 + wait_s) == ()
    assert durable.may_leave(end, 10.0 + wait_s)


def test_a_table_that_lists_what_is_not_written_waits_and_nothing_else_of_its_effects():
    driver = two_ranks(slots=3)
    seen = moving(driver)
    listing = next(e for e in seen if any(t.after == "listed" for t in e.transitions))
    (table,) = (c for c in listing.commands if isinstance(c, PublishTable))
    newest = table.table
    others = msgspec.structs.replace(newest, replica_tag=newest.replica_tag + 1000)
    lost = ReplaceRank(rank=0, lost_incarnation=1)
    durable = Durability(driver.engine, snapshot_every=1000)
    both = Effects(commands=(table, lost))
    assert durable.leaving(both) is both, "nothing waits yet"
    durable.withhold(listing)
    assert not durable.must_wait(both)
    assert durable.leaving(both).commands == (lost,)
    assert [e.commands for e in durable.withheld[1:]] == [(table,)]
    fine = Effects(commands=(PublishTable(table=others),))
    assert durable.leaving(fine) is fine, "it lists only what is written"
    durable.all_written(driver.engine, 50.0)
    assert durable.leaving(both) is both
