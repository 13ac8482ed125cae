"""The engine from the first fill to a migrated expert: tables, waves, acknowledgements, deadlines,
losses."""

import pytest

from placement.messages import events as ev
from placement.messages.effects import (
    AbortAdd,
    ComputeTarget,
    CopyExpert,
    PublishTable,
    ReleaseSlot,
    ReplaceRank,
    ReplaceRouter,
    ReserveSlot,
    VerifyExpert,
)
from tests.builders import make_address, make_spec, make_topology
from tests.engine_driver import EngineDriver, two_ranks

HOT = {0: 5000.0}


def sent(driver, kind):
    return [c for c in driver.commands if isinstance(c, kind)]


def test_the_first_table_waits_until_every_expert_is_proved():
    driver = EngineDriver(make_spec(), make_topology([4, 4]), join=False)
    driver.hold.add(VerifyExpert)
    driver.join(0)
    assert not sent(driver, ComputeTarget)
    driver.join(1)
    assert [c.cause for c in sent(driver, ComputeTarget)] == ["initial"]
    assert not driver.tables
    driver.let_go()
    assert [t.epoch for t in driver.tables] == [1]
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_a_first_fill_reads_the_checkpoint_and_is_one_wave():
    driver = two_ranks()
    assert {c.source.rank for c in sent(driver, CopyExpert)} == {-1}
    assert len(driver.tables) == 1
    assert driver.rules("started") == ["initial"]
    assert driver.rules("done") == ["plan_done"]


def test_ranks_that_never_come_are_waited_for_only_so_long():
    driver = EngineDriver(make_spec(), make_topology([6, 6]), join=False)
    driver.join(0)
    driver.wait(29.0)
    assert not driver.tables
    driver.wait(1.5)
    assert driver.table.missing() == ()
    assert driver.keys() == [[0, 1, 2, 3], []]


def test_a_hot_expert_gets_a_replica_and_the_gain_is_told_afterwards():
    driver = two_ranks()
    driver.close_window(HOT)
    assert "regret_reached" in driver.rules("started")
    assert driver.table.epoch == 2
    assert len(driver.table.replicas(0, 0)) == 2
    driver.check_agreement()
    driver.close_window(HOT)
    (told,) = [r for r in driver.records if r.rule == "realised_gain"]
    assert told.realised_gain_s_per_s == pytest.approx(told.expected_gain_s_per_s, rel=0.05)
    assert told.realised_gain_s_per_s > 0


def test_the_gain_is_measured_once_there_is_load_again():
    driver = two_ranks()
    driver.close_window(HOT)
    driver.close_window({}, base=0.0)
    driver.close_window({}, base=0.0)
    assert not [r for r in driver.records if r.rule == "realised_gain"]
    driver.close_window(HOT)
    (told,) = [r for r in driver.records if r.rule == "realised_gain"]
    assert told.realised_gain_s_per_s > 0


def test_nothing_moves_on_stationary_traffic():
    driver = two_ranks()
    for _ in range(12):
        driver.close_window(HOT)
    first = len(driver.tables)
    for _ in range(50):
        driver.close_window(HOT)
    assert len(driver.tables) == first


def test_a_migration_is_published_once_and_released_last():
    driver = two_ranks(slots=3, num_ranks=2)
    driver.hold.add(ReleaseSlot)
    driver.silent_routers.add("r0")
    driver.close_window({driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0})
    assert driver.engine.state.run is not None
    assert "unlisted" in driver.step_states()
    assert not driver.held
    epoch = driver.table.epoch
    driver.feed(ev.TableApplied(at_s=0.0, router="r0", epoch=epoch))
    assert "acked" in driver.step_states()
    assert not driver.held
    driver.feed(ev.TableQuiesced(at_s=0.0, router="r0", epoch=epoch))
    assert driver.held
    driver.silent_routers.clear()
    driver.let_go()
    driver.check_agreement()


def test_waits_for_routers_end_and_are_recorded():
    driver = two_ranks(slots=3, drain_wait_s=2.0, router_silence_s=60.0)
    driver.silent_routers.add("r0")
    driver.close_window({driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0})
    driver.wait(1.9)
    assert "drain_wait_over" not in driver.rules()
    driver.wait(2.2)
    assert driver.rules().count("drain_wait_over") >= 2
    driver.wait(10.0)
    driver.check_agreement()


def test_a_silent_router_leaves_the_set_and_returns_when_it_is_current():
    driver = two_ranks(router_silence_s=3.0)
    driver.silent_routers.add("r0")
    driver.close_window(HOT)
    driver.wait(3.1)
    assert "router_left" in driver.rules()
    assert not driver.engine.state.routers["r0"].in_set
    driver.feed(ev.TableApplied(at_s=0.0, router="r0", epoch=driver.table.epoch))
    assert driver.engine.state.routers["r0"].in_set
    driver.feed(ev.TableApplied(at_s=0.0, router="unknown", epoch=1))


def test_a_router_that_is_gone_is_replaced_and_one_that_is_silent_is_not():
    driver = two_ranks()
    effects = driver.feed(ev.RouterLeft(at_s=0.0, router="r0", reason="silent", gone=False))
    assert not [c for c in effects.commands if isinstance(c, ReplaceRouter)]
    effects = driver.feed(ev.RouterLeft(at_s=0.0, router="r0", reason="killed", gone=True))
    assert [c.router for c in effects.commands if isinstance(c, ReplaceRouter)] == ["r0"]
    assert driver.engine.state.routers == {}


def test_a_copy_that_passes_its_deadline_is_aborted_and_tried_again_later():
    driver = two_ranks(copy_timeout_s=3.0)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    assert "copying" in driver.step_states()
    driver.wait(2.9)
    assert not sent(driver, AbortAdd)
    driver.held.clear()
    driver.hold.clear()
    driver.wait(0.2)
    assert len(sent(driver, AbortAdd)) >= 1
    assert "step_aborted" in driver.rules("aborted")
    assert driver.engine.state.run is None
    driver.check_agreement()
    driver.close_window(HOT)
    assert len(driver.table.replicas(0, 0)) == 2


def test_a_failed_step_is_aborted_and_its_slot_given_back():
    driver = two_ranks()
    driver.hold.add(VerifyExpert)
    driver.close_window(HOT)
    for command in list(driver.held):
        driver.feed(
            ev.StepFailed(at_s=0.0, step_id=command.step_id, code="digest", detail="one bit")
        )
    assert driver.engine.state.run is None
    aborted = [r for r in driver.records if r.rule == "step_aborted"]
    assert "digest: one bit" in aborted[0].detail
    assert driver.engine.state.moves_aborted == len(aborted)
    assert len(driver.table.replicas(0, 0)) == 1
    driver.held.clear()
    driver.check_agreement()


def test_an_abort_is_asked_for_again_until_it_is_answered():
    driver = two_ranks(drain_wait_s=2.0)
    driver.hold |= {CopyExpert, AbortAdd}
    driver.close_window(HOT)
    step_id = driver.held[0].step_id
    driver.feed(ev.StepFailed(at_s=0.0, step_id=step_id, code="io", detail="disk"))
    driver.wait(5.0)
    assert len([c for c in sent(driver, AbortAdd) if c.step_id == step_id]) >= 3


def test_late_and_repeated_answers_change_nothing():
    driver = two_ranks()
    driver.close_window(HOT)
    step_id = sent(driver, ReserveSlot)[-1].step_id
    for event in (
        ev.SlotReserved(at_s=0.0, step_id=step_id, slot_tag=77),
        ev.ExpertCopied(at_s=0.0, step_id=step_id, copy_bytes=1, seconds=0.0),
        ev.ExpertVerified(at_s=0.0, step_id=step_id),
        ev.AddAborted(at_s=0.0, step_id=step_id),
        ev.SlotReleased(at_s=0.0, step_id=step_id),
        ev.StepFailed(at_s=0.0, step_id=step_id, code="io", detail=""),
    ):
        effects = driver.feed(event)
        assert (effects.transitions, effects.commands) == ((), ())
    driver.check_agreement()


def test_a_lost_rank_leaves_the_table_at_once_and_is_replaced():
    driver = two_ranks(slots=6, num_ranks=3)
    before = len(driver.tables)
    effects = driver.lose(1)
    assert [c.rank for c in effects.commands if isinstance(c, ReplaceRank)] == [1]
    tables = [c.table for c in effects.commands if isinstance(c, PublishTable)]
    assert len(tables) == 1
    assert 1 not in tables[0].replica_rank
    assert [r.rank for r in tables[0].ranks] == [0, 2]
    # The repair follows in the same breath of the driver: every expert is served again.
    assert driver.table.missing() == ()
    assert len(driver.tables) > before + 1
    assert "repair" in driver.rules("started")
    driver.check_agreement()


def test_a_rank_lost_while_it_is_filled_ends_its_adds():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    target = driver.held[0].rank
    driver.lose(target)
    assert driver.engine.state.run is None or driver.engine.state.run.cause == "repair"
    driver.let_go()
    driver.join(target, incarnation=2)
    driver.check_agreement()


def test_a_removal_is_taken_back_when_the_replica_it_relied_on_is_lost():
    driver = two_ranks(slots=3, num_ranks=2)
    driver.silent_routers.add("r0")
    hot = {driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0}
    driver.close_window(hot)
    run = driver.engine.state.run
    removal = next(s for s in run.steps.values() if s.state == "unlisted" and s.step.after)
    add = run.steps[removal.step.after[0]]
    expert, kept = removal.step.expert, removal.step.slot.rank
    assert [r for r, _, _ in driver.table.replicas(0, expert)] == [add.step.slot.rank]
    driver.lose(add.step.slot.rank)
    assert [r for r, _, _ in driver.table.replicas(0, expert)] == [kept]
    assert removal.state == "listed"


def test_a_removal_recalled_after_release_was_asked_is_listed_only_with_a_proof():
    driver = two_ranks(slots=3, num_ranks=2)
    driver.hold |= {ReleaseSlot, VerifyExpert}
    hot = {driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0}
    driver.close_window(hot)
    driver.let_go(VerifyExpert)
    driver.hold.add(VerifyExpert)
    run = driver.engine.state.run
    removal = next(s for s in run.steps.values() if s.state == "drained" and s.step.after)
    add = run.steps[removal.step.after[0]]
    expert = removal.step.expert
    driver.lose(add.step.slot.rank)
    assert removal.state == "recalled"
    assert driver.table.replicas(0, expert) == ()
    driver.feed(
        ev.StepFailed(at_s=0.0, step_id=removal.step.step_id, code="recalled", detail="the release")
    )
    assert removal.state == "recalled"
    driver.hold.discard(VerifyExpert)
    proof = [c for c in driver.held if isinstance(c, VerifyExpert)]
    assert [c.step_id for c in proof] == [removal.step.step_id]
    driver.feed(driver.run_shard(proof[0])[0])
    assert removal.state == "listed"
    assert len(driver.table.replicas(0, expert)) == 1


def test_a_recalled_slot_that_is_gone_is_released():
    driver = two_ranks(slots=3, num_ranks=2)
    driver.hold |= {ReleaseSlot}
    driver.close_window({driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0})
    run = driver.engine.state.run
    removal = next(s for s in run.steps.values() if s.state == "drained" and s.step.after)
    release = next(c for c in driver.held if c.step_id == removal.step.step_id)
    driver.run_shard(release)
    driver.lose(run.steps[removal.step.after[0]].step.slot.rank)
    assert removal.state == "released"


def test_a_suspected_rank_is_lost_only_after_its_silence():
    driver = two_ranks(slots=6, num_ranks=3, rank_silence_s=5.0)
    driver.feed(ev.RankSuspected(at_s=0.0, rank=1, reason="disconnected"))
    driver.wait(4.0)
    driver.feed(ev.RankCleared(at_s=0.0, rank=1))
    driver.wait(4.0)
    assert "rank_lost" not in driver.rules()
    driver.feed(ev.RankSuspected(at_s=0.0, rank=1, reason="disconnected"))
    driver.wait(5.0)
    assert "rank_lost" in driver.rules()
    assert [c.rank for c in sent(driver, ReplaceRank)] == [1]


def test_unknown_ranks_and_old_incarnations_are_refused_in_words():
    driver = two_ranks()
    known = driver.topology.ranks[0]
    base = {
        "at_s": 0.0,
        "node": known.node,
        "failure_domain": known.failure_domain,
        "profile": known.profile,
        "num_slots": 4,
    }
    for changes in (
        {"rank": 9, "address": make_address(9)},
        {"rank": 0, "address": make_address(0, 2), "profile": "nobody declared"},
        {"rank": 0, "address": make_address(0, 2), "num_slots": -1},
        {"rank": 0, "address": make_address(0, 0)},
    ):
        driver.feed(ev.RankJoined(**{**base, **changes}))
    assert driver.rules("refused") == ["rank_refused"] * 4
    driver.feed(ev.RankLost(at_s=0.0, rank=9, incarnation=1, reason="who?"))
    driver.feed(ev.RankLost(at_s=0.0, rank=0, incarnation=5, reason="another life"))
    assert driver.table.missing() == ()


def test_a_new_rank_may_join_and_is_used():
    driver = two_ranks(slots=4)
    driver.topology = make_topology([4, 4, 4], ranks_per_node=1)
    driver.join(2)
    driver.close_window({k: 5000.0 for k in driver.keys()[0]})
    assert driver.keys()[2]
    driver.check_agreement()


def test_a_replacement_of_a_live_rank_counts_the_old_one_as_lost():
    driver = two_ranks(slots=6, num_ranks=3)
    held = driver.keys()[1]
    driver.join(1, incarnation=2)
    assert "rank_lost" in driver.rules()
    assert not sent(driver, ReplaceRank)
    assert driver.table.missing() == ()
    assert held


def test_what_a_shard_holds_unasked_is_taken_up_or_cleaned_away():
    donor = two_ranks()
    shard = donor.shards[0]
    wild = next(i for i in range(4) if shard.ledger.phase(i) == "empty")
    shard.reserve(
        ReserveSlot(
            step_id=1,
            rank=0,
            incarnation=1,
            slot=wild,
            layer=0,
            expert=donor.keys()[1][0],
            weights_version="v1",
        )
    )
    driver = EngineDriver(make_spec(), make_topology([4, 4]), join=False, routers=["r0"])
    driver.join(0, shard=shard)
    driver.join(1, shard=donor.shards[1])
    assert "cleanup" in driver.rules("started")
    assert not sent(driver, CopyExpert)
    driver.wait(12.0)
    assert driver.table.missing() == ()
    assert driver.keys() == donor.keys()
    driver.check_agreement()


def test_no_copy_goes_to_a_suspected_rank_until_it_answers_again():
    driver = two_ranks(slots=4)
    holder = next(rank for rank, keys in enumerate(driver.keys()) if 0 in keys)
    other = 1 - holder
    driver.feed(ev.RankSuspected(at_s=0.0, rank=other, reason="disconnected"))
    copies = len(sent(driver, ReserveSlot))
    driver.close_window(HOT)
    assert driver.engine.state.run is not None
    assert len(sent(driver, ReserveSlot)) == copies
    driver.feed(ev.RankCleared(at_s=0.0, rank=other))
    assert len(sent(driver, ReserveSlot)) > copies
    assert len(driver.table.replicas(0, 0)) == 2
