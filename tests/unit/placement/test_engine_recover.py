"""A restarted controller: snapshot, journalled transitions, inventories, and every point at which
it may have died."""

import pytest

from placement.engine import EngineSnapshot, RebalanceEngine
from placement.messages import events as ev
from placement.messages.codec import decode_as, encode
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    PublishTable,
    ReleaseSlot,
    ReserveSlot,
    VerifyExpert,
)
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver, restart, two_ranks
from tests.unit.placement.test_engine_edges import filled, holding, run_plan


def migrate_two(driver):
    driver.close_window({driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0})


def test_a_restart_at_rest_publishes_the_same_placement_in_a_new_term():
    driver = two_ranks()
    keys, table = driver.keys(), driver.table
    restart(driver, driver.engine.snapshot(), [])
    assert driver.keys() == keys
    assert driver.table.term == table.term + 1
    assert driver.table.epoch > table.epoch
    assert driver.table.replica_tag.tolist() == table.replica_tag.tolist()


def test_the_snapshot_may_be_older_than_every_rank():
    driver = two_ranks()
    empty = two_ranks()
    fresh = RebalanceEngine(
        empty.spec, empty.topology, empty.config, term=1, first_epoch=1, start_s=0.0
    )
    keys = driver.keys()
    restart(driver, fresh.snapshot(), driver.transitions)
    assert driver.keys() == keys
    driver.check_agreement()


@pytest.mark.parametrize(
    "died_at", [ReserveSlot, CopyExpert, VerifyExpert, PublishTable, ReleaseSlot, AbortAdd]
)
@pytest.mark.parametrize("arrived", [False, True], ids=["before_effect", "after_effect"])
def test_dying_at_each_edge_forgets_nothing(died_at, arrived):
    """The command was journalled; it was (not) carried out; its answer never came."""
    driver = two_ranks(slots=3)
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    if died_at is AbortAdd:
        driver.hold |= {CopyExpert, AbortAdd}
        migrate_two(driver)
        step_id = driver.held[0].step_id
        driver.feed(ev.StepFailed(at_s=0.0, step_id=step_id, code="io", detail="disk"))
    else:
        driver.hold.add(died_at)
        if died_at is PublishTable:
            driver.silent_routers.add("r0")
        migrate_two(driver)
    assert driver.held
    if arrived:
        for command in driver.held:
            if isinstance(command, PublishTable):
                driver.tables.append(command.table)
            elif not isinstance(command, CopyExpert) or died_at is CopyExpert:
                driver.run_shard(command)
    driver.silent_routers.clear()
    before = restart(driver, snapshot, driver.transitions[start:])
    assert driver.tables[before].missing() == ()
    driver.wait(40.0)
    assert driver.engine.state.run is None
    driver.check_agreement()
    hot = driver.keys()[0][0]
    for _ in range(4):
        driver.close_window({hot: 5000.0})
        driver.wait(6.0)
    # Moved before the restart was done with, or by a new plan after it: no more is to be had.
    assert driver.records[-1].rule in {"in_balance", "nothing_better"}
    driver.check_agreement()


def test_a_copy_that_is_asked_for_again_after_a_restart_has_a_time_to_end():
    driver = two_ranks(slots=3)
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    driver.hold.add(CopyExpert)
    migrate_two(driver)
    asked = {c.step_id for c in driver.held}
    assert asked
    again = []
    run = driver.run_shard

    def seen(command):
        again.append(command)
        return run(command)

    driver.run_shard = seen
    restart(driver, snapshot, driver.transitions[start:])
    times = [c.timeout_s for c in again if isinstance(c, CopyExpert) and c.step_id in asked]
    assert len(times) == len(asked)
    assert set(times) == {driver.engine.config.copy_timeout_s}


def test_a_step_that_was_called_off_before_it_began_leaves_its_slot_alone():
    """The journal tells of an add that never began because the slot it waited for was kept. Taken
    for one that had filled the slot, it would empty it."""
    driver = two_ranks(slots=3)
    driver.hold.add(CopyExpert)
    keys = driver.keys()
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    migrate_two(driver)
    for command in list(driver.held):
        driver.feed(ev.StepFailed(at_s=0.0, step_id=command.step_id, code="io", detail="disk"))
    assert driver.engine.state.run is None
    since = driver.transitions[start:]
    assert any((t.before, t.after) == ("planned", "listed") for t in since)
    restart(driver, snapshot, since)
    assert driver.keys() == keys
    driver.check_agreement()


def test_a_journal_of_two_plans_since_the_snapshot_ends_with_the_second():
    driver = two_ranks(slots=4)
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    driver.close_window({0: 5000.0})
    driver.close_window({1: 5000.0})
    since = driver.transitions[start:]
    assert len({t.plan_id for t in since}) == 2
    keys = driver.keys()
    before = restart(driver, snapshot, since)
    assert driver.engine.state.run is None
    assert len(driver.tables) > before
    assert driver.keys() == keys
    driver.check_agreement()


def test_a_rank_that_died_meanwhile_is_lost_and_the_rest_goes_on():
    driver = two_ranks(slots=6, num_ranks=3)
    snapshot = driver.engine.snapshot()
    shard = driver.shards[1]
    before = restart(driver, snapshot, [], silent=(1,))
    assert len(driver.tables) == before
    driver.shards.pop(1)
    driver.feed(
        ev.RankLost(at_s=0.0, rank=1, incarnation=shard.incarnation, reason="not there any more")
    )
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_a_rank_that_never_answers_is_lost_after_the_grace():
    driver = two_ranks(slots=6, num_ranks=3)
    before = restart(driver, driver.engine.snapshot(), [], silent=(1,))
    driver.wait(29.0)
    assert len(driver.tables) == before
    driver.shards.pop(1)
    driver.wait(2.0)
    assert "rank_lost" in driver.rules()
    assert driver.table.missing() == ()


def test_a_replica_that_is_gone_from_the_inventory_leaves_the_table():
    driver = two_ranks(slots=6)
    driver.close_window({0: 9000.0})
    twice = next(e for e in range(4) if len(driver.table.replicas(0, e)) == 2)
    rank, slot, tag = driver.table.replicas(0, twice)[0]
    driver.shards[rank].release(
        ReleaseSlot(
            step_id=5, rank=rank, incarnation=1, slot=slot, slot_tag=tag, layer=0, expert=twice
        )
    )
    restart(driver, driver.engine.snapshot(), [])
    assert "replica_gone" in driver.rules()
    assert len(driver.table.replicas(0, twice)) == 1
    driver.check_agreement()


def test_what_was_proved_before_the_first_table_is_listed_after_two_restarts():
    """The first restart leaves the adds of the fill behind, for a rank is still to be heard of; the
    second must remember what they wait for."""
    driver = two_ranks()
    first = RebalanceEngine(
        driver.spec, driver.topology, driver.config, term=1, first_epoch=1, start_s=0.0
    )
    proved = [t for t in driver.transitions if t.after != "listed"]
    restart(driver, first.snapshot(), proved, silent=(1,))
    assert driver.engine.state.run is None
    before = restart(driver, driver.engine.snapshot(), [])
    assert len(driver.tables) == before + 1
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_a_removal_called_off_before_the_first_table_is_not_taken_for_a_table():
    """The journal says "listed" of it, as of an add that a table lists."""
    driver = EngineDriver(
        make_spec(), make_topology([3, 3], ranks_per_node=1), routers=["r0"], join=False
    )
    driver.hold.add(CopyExpert)
    driver.join(0, shard=holding(0, [0, 1, 2], 3))
    driver.join(1)
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    while driver.held:
        step_id = driver.held.pop(0).step_id
        driver.feed(ev.StepFailed(at_s=0.0, step_id=step_id, code="io", detail="disk"))
    since = driver.transitions[start:]
    assert ("remove", "listed") in {(t.kind, t.after) for t in since}
    assert driver.tables == []
    restart(driver, snapshot, since)
    driver.wait(30.0)
    assert [table.missing() for table in driver.tables] == [()]
    driver.check_agreement()


def test_a_clean_up_before_the_first_table_is_not_taken_for_a_table():
    driver = EngineDriver(
        make_spec(), make_topology([3, 3], ranks_per_node=1), routers=["r0"], join=False
    )
    fresh = driver.engine.snapshot()
    driver.hold.add(ReleaseSlot)
    driver.join(0, shard=holding(0, [0, 1, 2], 3, layer=7))
    driver.join(1)
    assert {t.after for t in driver.transitions} >= {"unlisted"}
    assert driver.tables == []
    restart(driver, fresh, driver.transitions)
    driver.wait(30.0)
    assert driver.tables[0].missing() == ()
    driver.check_agreement()


def test_routers_count_again_only_after_they_had_time_to_register():
    driver = two_ranks(slots=3, router_silence_s=5.0, drain_wait_s=60.0)
    driver.silent_routers.add("r0")
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    migrate_two(driver)
    assert "unlisted" in driver.step_states()
    driver.routers.clear()
    restart(driver, snapshot, driver.transitions[start:])
    assert "unlisted" in driver.step_states()
    driver.wait(4.9)
    assert "unlisted" in driver.step_states()
    driver.wait(0.2)
    assert driver.engine.state.run is None
    driver.check_agreement()


def test_a_release_is_asked_for_again_where_an_add_waits_for_the_slot():
    """Removal and add name the same slot. Only the removal has begun: it goes on, or nobody would
    ever ask its rank again."""
    driver = filled([[0, 1, 3], [1, 2, 3]], staging_slots=0)
    driver.hold.add(ReleaseSlot)
    run_plan(driver, [[0, 1, 2], [1, 2, 3]], staging_slots=0)
    assert driver.step_states() == ["drained", "planned"]
    driver.routers.clear()  # rank 0 is the first to be heard of
    restart(driver, driver.engine.snapshot(), [])
    driver.wait(1.0)
    assert driver.engine.state.run is None
    driver.check_agreement()


def test_a_restart_may_begin_paused_and_terms_must_grow():
    driver = two_ranks()
    snapshot = driver.engine.snapshot()
    engine = RebalanceEngine.restore(snapshot, [], term=5, first_epoch=9, start_s=0.0, paused=True)
    assert (engine.state.paused, engine.state.term, engine.state.epoch) == (True, 5, 8)
    assert engine.state.next_step_id == 5 << 32
    with pytest.raises(AssertionError, match="term 1"):
        RebalanceEngine.restore(snapshot, [], term=1, first_epoch=9, start_s=0.0)


def test_a_snapshot_is_a_copy_that_survives_its_bytes():
    driver = two_ranks()
    driver.hold.add(CopyExpert)
    driver.close_window({0: 5000.0})
    snapshot = driver.engine.snapshot()
    data = encode(snapshot)
    driver.let_go()
    assert encode(snapshot) == data
    assert encode(decode_as(data, EngineSnapshot)) == data
    assert RebalanceEngine.replayed(snapshot).table() is None
    assert driver.engine.table() is driver.table
    assert driver.engine.topology().num_ranks == 2
    fresh = RebalanceEngine(
        driver.spec, driver.topology, driver.config, term=1, first_epoch=1, start_s=0.0
    )
    assert fresh.table() is None
