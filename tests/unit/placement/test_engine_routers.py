"""Whom a removal waits for: routers that come late, are silent, go, or begin another life."""

import pytest

from placement.messages import events as ev
from placement.messages.effects import ReplaceRouter
from tests.engine_driver import restart, two_ranks

SILENCE_S = 5.0


def patient(**fields):
    """Two full ranks; only routers end a wait, and a router has SILENCE_S for a table."""
    return two_ranks(slots=3, router_silence_s=SILENCE_S, drain_wait_s=600.0, **fields)


def migrate(driver):
    """Two experts of rank 0 get hot: something leaves a slot. The epoch that unlists it."""
    driver.close_window({driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0})
    assert "unlisted" in driver.step_states()
    return driver.table.epoch


def says(driver, router, epoch):
    driver.feed(ev.TableApplied(at_s=0.0, router=router, epoch=epoch))
    driver.feed(ev.TableQuiesced(at_s=0.0, router=router, epoch=epoch))


def joins(driver, router, incarnation=1):
    driver.feed(ev.RouterJoined(at_s=0.0, router=router, incarnation=incarnation))


@pytest.mark.parametrize("served_s", [0.0, 1.0, 1000.0])
def test_a_router_has_as_long_for_a_table_however_long_it_has_served(served_s):
    driver = patient()
    driver.wait(served_s)
    driver.silent_routers.add("r0")
    migrate(driver)
    driver.wait(SILENCE_S - 0.1)
    assert driver.engine.state.routers["r0"].in_set
    assert "unlisted" in driver.step_states()
    driver.wait(0.2)
    assert not driver.engine.state.routers["r0"].in_set
    assert driver.engine.state.run is None
    driver.check_agreement()


@pytest.mark.parametrize("old_s", [0.0, 1.0, 1000.0])
def test_a_router_that_joins_has_as_long_for_a_table_however_old_that_is(old_s):
    driver = patient()
    driver.wait(old_s)
    driver.silent_routers.add("r1")
    driver.routers.append("r1")
    joins(driver, "r1")
    driver.wait(2.0)
    migrate(driver)  # a newer one takes the place of the one it had time for
    driver.wait(SILENCE_S - 0.1)
    assert "unlisted" in driver.step_states()
    assert driver.engine.state.routers["r1"].in_set
    driver.wait(0.2)
    assert driver.engine.state.run is None


def test_what_a_router_said_in_an_earlier_life_counts_no_more():
    driver = patient()
    driver.routers.append("r1")
    joins(driver, "r1")
    says(driver, "r1", driver.table.epoch)
    driver.silent_routers |= {"r0", "r1"}
    epoch = migrate(driver)
    says(driver, "r0", epoch)
    joins(driver, "r0", incarnation=2)
    says(driver, "r1", epoch)
    assert "unlisted" in driver.step_states()
    says(driver, "r0", epoch)
    driver.silent_routers.clear()
    driver.wait(SILENCE_S)
    assert driver.engine.state.run is None
    driver.check_agreement()


@pytest.mark.parametrize("gone", [False, True])
def test_a_router_that_leaves_is_waited_for_no_longer(gone):
    driver = patient()
    driver.silent_routers.add("r0")
    migrate(driver)
    driver.routers.clear()
    driver.feed(ev.RouterLeft(at_s=0.0, router="r0", reason="no answer", gone=gone))
    assert driver.engine.state.run is None
    driver.check_agreement()


@pytest.mark.parametrize("before", ["nothing", "was silent", "was dropped"])
def test_a_router_that_is_gone_is_replaced_whatever_was_known_of_it(before):
    driver = patient()
    if before == "was silent":
        driver.feed(ev.RouterLeft(at_s=0.0, router="r0", reason="no answer", gone=False))
    elif before == "was dropped":
        driver.silent_routers.add("r0")
        migrate(driver)
        driver.wait(SILENCE_S + 0.1)
    effects = driver.feed(ev.RouterLeft(at_s=0.0, router="r0", reason="killed", gone=True))
    assert [c.router for c in effects.commands if isinstance(c, ReplaceRouter)] == ["r0"]


def test_a_restart_waits_for_routers_that_its_snapshot_does_not_name():
    """A router registers without a snapshot: one that joined since the newest is not known."""
    driver = patient()
    driver.feed(ev.RouterLeft(at_s=0.0, router="r0", reason="killed", gone=True))
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    assert not snapshot.state.routers
    joins(driver, "r0", incarnation=2)
    driver.silent_routers.add("r0")
    epoch = migrate(driver)
    driver.routers.clear()  # it has not registered with the new controller yet
    restart(driver, snapshot, driver.transitions[start:])
    driver.wait(SILENCE_S - 0.1)
    assert "unlisted" in driver.step_states()
    joins(driver, "r0", incarnation=2)
    driver.wait(0.2)
    assert "unlisted" in driver.step_states()
    assert driver.table.epoch > epoch
    says(driver, "r0", driver.table.epoch)
    assert driver.engine.state.run is None
    driver.check_agreement()
