"""What is said of a rank, by it and by others, is of one life; what a restart takes over of it."""

import msgspec
import pytest

from placement.engine import RebalanceEngine
from placement.engine.state import RankStatus, SlotUse
from placement.messages import events as ev
from placement.messages.effects import (
    AbortAdd,
    ComputeTarget,
    CopyExpert,
    PublishTable,
    ReleaseSlot,
    ReserveSlot,
    VerifyExpert,
)
from placement.migration import AddState, RemoveState
from tests.engine_driver import restart, two_ranks


def sent(driver, kind):
    return [c for c in driver.commands if isinstance(c, kind)]


def speaks(driver, rank, resident):
    """The rank's present life tells that it holds this."""
    return driver.join(rank, shard=driver.shards[rank], resident=resident)


def listed_on(driver, rank):
    """(slot, tag, layer, expert) that the newest table lists there."""
    table, spec = driver.table, driver.spec
    return {
        (slot, tag, layer, expert)
        for layer in range(spec.num_layers)
        for expert in range(spec.num_experts)
        for host, slot, tag in table.replicas(layer, expert)
        if host == rank
    }


def migrate(driver):
    driver.close_window({driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0})


# -- one life, one word --------------------------------------------------------------------------


@pytest.mark.parametrize("incarnation", [1, 2, 4])
def test_the_loss_of_another_life_costs_the_one_that_lives_nothing(incarnation):
    driver = two_ranks(slots=6, num_ranks=3)
    driver.join(1, incarnation=3)
    tables, keys = len(driver.tables), driver.keys()
    driver.feed(ev.RankLost(at_s=0.0, rank=1, incarnation=incarnation, reason="said late"))
    rank = driver.engine.state.ranks[1]
    assert (rank.status, rank.incarnation) == (RankStatus.LIVE, 3)
    assert (len(driver.tables), driver.keys()) == (tables, keys)
    driver.feed(ev.RankLost(at_s=0.0, rank=1, incarnation=3, reason="killed"))
    assert driver.engine.state.ranks[1].status is RankStatus.LOST


@pytest.mark.parametrize(
    "changed",
    [{"tag": 99}, {"expert": 3}, {"verified": False}, None],
    ids=["another fill", "another expert", "not proved", "gone"],
)
def test_what_a_rank_does_not_say_it_holds_is_not_listed_there(changed):
    """The same life is asked again: whatever it says otherwise than known leaves the table."""
    driver = two_ranks(slots=6, num_ranks=3)
    told = list(driver.shards[1].ledger.resident())
    at = next(i for i, held in enumerate(told) if held.verified and held.expert != 3)
    old = told.pop(at)
    if changed is not None:
        told.insert(at, msgspec.structs.replace(old, **changed))
    driver.hold |= {ReserveSlot, ReleaseSlot}  # nothing is put right meanwhile
    speaks(driver, 1, told)
    assert (old.slot, old.tag, old.layer, old.expert) not in listed_on(driver, 1)
    proved = {(held.slot, held.tag, held.layer, held.expert) for held in told if held.verified}
    assert listed_on(driver, 1) <= proved


def test_an_expert_that_a_rank_holds_twice_is_listed_once_and_the_other_slot_is_freed():
    driver = two_ranks(slots=6, num_ranks=3)
    shard = driver.shards[1]
    held = next(one for one in shard.ledger.resident() if one.verified)
    free = next(i for i in range(6) if shard.ledger.phase(i) == "empty")
    who = {"step_id": 77, "rank": 1, "incarnation": 1, "slot": free}
    tag = shard.reserve(
        ReserveSlot(**who, layer=held.layer, expert=held.expert, weights_version="v1")
    ).slot_tag
    slot = shard.ledger.slots[free]
    slot.phase = type(slot.phase)("verified")
    shard.ledger.tags[free] = tag
    speaks(driver, 1, shard.ledger.resident())
    driver.wait(30.0)
    twins = [one for one in listed_on(driver, 1) if one[2:] == (held.layer, held.expert)]
    assert len(twins) == 1
    assert shard.ledger.phase(free) == "empty"
    driver.check_agreement()


# -- what did not happen -------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["io", "timeout", "over_budget", "source_lost", "digest"])
def test_a_slot_whose_release_failed_is_not_free_until_its_shard_says_so(code):
    driver = two_ranks(slots=3)
    driver.hold.add(ReleaseSlot)
    migrate(driver)
    asked = list(driver.held)
    assert asked
    for command in asked:
        driver.feed(ev.StepFailed(at_s=0.0, step_id=command.step_id, code=code, detail="lost"))
    for command in asked:
        slot = driver.engine.state.ranks[command.rank].slots[command.slot]
        assert slot.use in (SlotUse.LEAVING, SlotUse.PARKED)
        assert slot.tag == command.slot_tag
    driver.let_go()
    driver.wait(30.0)
    again = {c.step_id for c in sent(driver, ReleaseSlot)}
    assert again >= {c.step_id for c in asked}
    driver.check_agreement()


@pytest.mark.parametrize("code", ["io", "timeout"])
def test_a_removal_taken_back_is_not_given_up_because_a_proof_failed(code):
    """Whether the slot still holds its expert is the shard's word alone."""
    driver = two_ranks(slots=3)
    driver.hold |= {ReleaseSlot}
    migrate(driver)
    run = driver.engine.state.run
    removal = next(s for s in run.steps.values() if s.state == "drained" and s.step.after)
    add = run.steps[removal.step.after[0]]
    driver.hold.add(VerifyExpert)
    driver.lose(add.step.slot.rank)
    assert removal.state == "recalled"
    step_id = removal.step.step_id
    driver.feed(ev.StepFailed(at_s=0.0, step_id=step_id, code=code, detail="no answer"))
    assert removal.state == "recalled"
    driver.let_go(VerifyExpert)
    driver.wait(10.0)
    assert removal.state == "listed"
    assert driver.table.replicas(0, removal.step.expert)


# -- restarts ------------------------------------------------------------------------------------


def test_a_suspicion_of_before_a_restart_ends_no_rank_after_it():
    driver = two_ranks(slots=6, num_ranks=3, rank_silence_s=5.0)
    driver.feed(ev.RankSuspected(at_s=0.0, rank=1, reason="disconnected"))
    snapshot = driver.engine.snapshot()
    driver.now_s += 20.0  # nobody was there to hear of it
    restart(driver, snapshot, [], silent=(1,))
    driver.wait(10.0)
    assert driver.engine.state.ranks[1].status is RankStatus.RESTORED
    driver.join(1, shard=driver.shards[1])
    driver.wait(10.0)
    assert driver.engine.state.ranks[1].status is RankStatus.LIVE
    assert "rank_lost" not in driver.rules()


@pytest.mark.parametrize("hold", [CopyExpert, ReserveSlot])
def test_a_copy_taken_up_again_after_a_restart_has_a_deadline(hold):
    driver = two_ranks(slots=4, copy_timeout_s=3.0)
    driver.hold.add(hold)
    driver.close_window({0: 5000.0})
    assert driver.engine.state.copying
    restart(driver, driver.engine.snapshot(), [], silent=(0, 1))
    driver.hold.add(hold)  # it hangs as before
    for rank in (0, 1):
        driver.join(rank, shard=driver.shards[rank])
    assert driver.engine.state.copying
    driver.wait(3.1)
    assert sent(driver, AbortAdd)
    assert not driver.engine.state.copying
    assert driver.engine.state.run is None
    driver.check_agreement()


def test_a_plan_found_in_a_snapshot_begins_nothing_more_and_ends():
    driver = two_ranks(slots=3)
    driver.hold.add(CopyExpert)
    migrate(driver)
    steps = driver.engine.state.run.steps
    planned = {i for i, step in steps.items() if step.state == AddState.PLANNED}
    assert planned
    start = len(driver.transitions)
    restart(driver, driver.engine.snapshot(), [])
    ended = {t.step_id: t.after for t in driver.transitions[start:] if t.step_id in planned}
    assert ended.keys() == planned
    assert set(ended.values()) <= {AddState.ABORTED, RemoveState.LISTED}
    assert not planned & {c.step_id for c in sent(driver, ReserveSlot)}
    driver.wait(10.0)
    driver.check_agreement()


def test_a_target_asked_for_before_a_restart_is_not_waited_for_after_it():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(ComputeTarget)
    driver.close_window({0: 5000.0})
    assert driver.engine.state.outstanding is not None
    restart(driver, driver.engine.snapshot(), [])
    assert driver.engine.state.outstanding is None
    driver.close_window({0: 5000.0})
    assert "target_outstanding" not in driver.rules()


def test_without_a_journal_nothing_is_freed_before_there_is_a_table_of_ones_own():
    """A slot that is not taken up may stand in the last table of an earlier controller, which
    routers use until they have another."""
    driver = two_ranks(slots=6)
    old = driver.table
    driver.engine = RebalanceEngine(
        driver.spec, driver.topology, driver.config, term=2, first_epoch=old.epoch + 1, start_s=0.0
    )
    driver.hold.add(ReleaseSlot)
    driver.commands.clear()
    driver.feed(ev.RouterJoined(at_s=0.0, router="r0", incarnation=1))
    for said in driver.acks(old.epoch):
        driver.feed(said)
    resident = driver.shards[0].ledger.resident()
    twin = msgspec.structs.replace(resident[0], slot=5, tag=99)
    driver.join(0, shard=driver.shards[0], resident=[*resident, twin])
    driver.wait(driver.config.router_silence_s)  # other routers had time to register
    driver.join(1, incarnation=2)  # it holds nothing, so experts are missing
    kinds = [type(command) for command in driver.commands]
    assert ReleaseSlot in kinds, "one of the two is given up"
    assert kinds.index(PublishTable) < kinds.index(ReleaseSlot)


def without_journal(driver):
    """A controller that begins with nothing but what parts tell. No router has told it anything
    yet, and none does by itself."""
    driver.engine = RebalanceEngine(
        driver.spec,
        driver.topology,
        driver.config,
        term=2,
        first_epoch=driver.table.epoch + 1,
        start_s=driver.now_s,
    )
    driver.hold |= {PublishTable, ReleaseSlot}
    driver.commands.clear()


def with_twin(driver, slot):
    """What rank 0 holds, and its first expert a second time in that slot."""
    resident = driver.shards[0].ledger.resident()
    return [*resident, msgspec.structs.replace(resident[0], slot=slot, tag=99)]


def test_without_a_journal_routers_have_time_to_register_before_anything_is_freed():
    """Ranks may be heard of before any router is. One of two replicas is given up, and tables of
    the earlier controller may list it."""
    driver = two_ranks(slots=6, router_silence_s=5.0, drain_wait_s=60.0)
    without_journal(driver)
    speaks(driver, 0, with_twin(driver, 5))
    speaks(driver, 1, driver.shards[1].ledger.resident())
    assert sent(driver, PublishTable)
    assert driver.step_states() == ["unlisted"]
    driver.wait(3.0)
    driver.feed(ev.RouterJoined(at_s=0.0, router="r0", incarnation=1))
    driver.wait(4.0)
    assert driver.step_states() == ["unlisted"], "it is waited for from then on"
    for said in driver.acks(driver.engine.state.epoch):
        assert not sent(driver, ReleaseSlot)
        driver.feed(said)
    assert sent(driver, ReleaseSlot)


def test_without_a_journal_nobody_is_waited_for_once_routers_had_time_to_register():
    driver = two_ranks(slots=6, router_silence_s=5.0, drain_wait_s=60.0)
    without_journal(driver)
    speaks(driver, 0, with_twin(driver, 5))
    speaks(driver, 1, driver.shards[1].ledger.resident())
    driver.wait(4.9)
    assert not sent(driver, ReleaseSlot)
    driver.wait(0.2)
    assert sent(driver, ReleaseSlot)


def test_a_copy_that_is_not_verified_takes_no_replicas_place():
    """An earlier controller was moving the expert within its rank, to a slot before its own."""
    driver = two_ranks(slots=6)
    resident = driver.shards[0].ledger.resident()
    last = resident[-1]
    moved = msgspec.structs.replace(last, slot=5)
    half = msgspec.structs.replace(last, tag=99, verified=False)
    without_journal(driver)
    speaks(driver, 0, [*resident[:-1], half, moved])
    speaks(driver, 1, driver.shards[1].ledger.resident())
    driver.wait(driver.config.router_silence_s)
    assert [c.slot for c in sent(driver, ReleaseSlot)] == [half.slot]
    (table,) = (c.table for c in sent(driver, PublishTable))
    assert not table.missing()
    assert table.replicas(last.layer, last.expert) == ((0, moved.slot, moved.tag),)
