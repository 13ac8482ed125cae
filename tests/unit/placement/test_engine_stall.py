"""Nothing keeps the engine waiting for ever: shards that never answer, copies that never end,
routers that never acknowledge."""

import pytest

from placement.engine import RebalanceEngine
from placement.engine.stall import SHOWN_S, stalled
from placement.engine.state import SlotUse
from placement.layout import ABSENT
from placement.messages import events as ev
from placement.messages.effects import (
    AbortAdd,
    ComputeTarget,
    CopyExpert,
    ReleaseSlot,
    ReserveSlot,
    VerifyExpert,
)
from placement.migration import AddState, RemoveState
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver, restart, two_ranks
from tests.unit.placement.test_engine_edges import answer_target, holding, plan_to

HOT = {0: 5000.0}


def sent(driver, kind):
    return [c for c in driver.commands if isinstance(c, kind)]


def records(driver, rule, outcome=None):
    return [r for r in driver.records if r.rule == rule and outcome in (None, r.outcome)]


def swap_heat(driver):
    """Load that makes an expert change its rank: two hot ones lie on rank 0."""
    return {driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0}


class Deaf:
    """A driver whose rank `deaf` answers nothing of these kinds; everybody else does."""

    def __init__(self, driver, deaf, kinds):
        self.driver, self.deaf, self.kinds = driver, deaf, kinds
        self.unanswered = []
        run_shard = driver.run_shard

        def some(command):
            if command.rank == self.deaf and isinstance(command, self.kinds):
                self.unanswered.append(command)
                return []
            return run_shard(command)

        driver.run_shard = some

    def hears(self):
        """Answer everything now."""
        self.deaf = -1
        waiting, self.unanswered = self.unanswered, []
        for command in waiting:
            for event in self.driver.run_shard(command):
                self.driver.feed(event)


def run_to(driver, rows):
    """Run the planner's way from what is listed to these rows."""
    width = driver.engine.layout().slots.shape[1]
    driver.hold.add(ComputeTarget)
    driver.close_window({0: 5000.0, 1: 0.0})
    driver.hold.discard(ComputeTarget)
    driver.held.clear()
    return answer_target(driver, plan_to(driver, [r + [-1] * (width - len(r)) for r in rows]))


def hung_copy(**fields):
    """A copy into a rank that will never end and whose abort is never answered. (driver, deaf)."""
    driver = two_ranks(slots=6, num_ranks=3, **fields)
    first = next(i for i in range(3) if 0 not in driver.keys()[i])
    deaf = Deaf(driver, first, (CopyExpert, AbortAdd))
    driver.close_window(HOT)
    assert any(c.rank == first for c in sent(driver, CopyExpert))
    return driver, deaf


# -- a lost rank comes first ---------------------------------------------------------------------


def test_a_lost_expert_is_repaired_at_once_though_an_abort_is_never_answered():
    driver, deaf = hung_copy()
    lost = next(r for r in (2, 1, 0) if r != deaf.deaf)
    gone = set(driver.keys()[lost])
    driver.lose(lost)
    assert gone
    parked = driver.engine.state.parked
    assert [s.state for s in parked.values()] == [AddState.ABORTING]
    (said,) = records(driver, "parked")
    assert f"wait for ranks {deaf.deaf}" in said.detail
    assert said.numbers == {"steps": 1.0, "ranks": 1.0}
    # At worst the repair runs into the same silence; then it goes elsewhere at once.
    driver.wait(4.1)
    assert driver.table.missing() == ()
    assert deaf.unanswered
    deaf.hears()
    assert driver.engine.state.parked == {}
    driver.check_agreement()


def test_repair_begins_before_anything_else_moves():
    """A removal of the ended plan waits for a router that says nothing; the repair does not."""
    driver = two_ranks(slots=6, num_ranks=3, router_silence_s=600.0, drain_wait_s=60.0)
    rows = driver.keys()
    driver.silent_routers.add("r0")
    run_to(driver, [rows[0][1:], [*rows[1], rows[0][0]], rows[2]])
    assert RemoveState.UNLISTED in driver.step_states()
    at_s = driver.now_s
    driver.lose(2)
    assert [s.state for s in driver.engine.state.parked.values()] == [RemoveState.UNLISTED]
    assert driver.table.missing() == ()
    assert driver.now_s == at_s


def test_a_target_that_is_not_answered_yet_does_not_keep_a_repair_waiting():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(ComputeTarget)
    driver.close_window(HOT)
    assert driver.engine.state.outstanding.cause == "auto"
    driver.lose(1)
    assert driver.engine.state.outstanding.cause == "repair"
    assert "the auto target is dropped: rank 1 was lost" in [
        r.detail for r in records(driver, "target_stale")
    ]
    driver.let_go()
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_a_plan_that_an_operator_asked_for_is_computed_anew_after_the_repair():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.close_window()
    driver.hold.add(ComputeTarget)
    driver.feed(ev.PlanAsked(at_s=0.0, request_id=7))
    assert driver.engine.state.outstanding.asked_by == 7
    driver.lose(1)
    assert [a.request_id for a in driver.engine.state.asks] == [7]
    driver.let_go()
    assert driver.answers[7].code == "ok"


def test_a_replica_that_vanished_ends_the_plan_that_runs():
    """The same life of a rank tells that it holds an expert no more that nobody else has."""
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    rank = next(r for r in (2, 1, 0) if 0 not in driver.keys()[r] and driver.keys()[r])
    shard = driver.shards[rank]
    slot = driver.engine.layout().slots[rank].tolist().index(driver.keys()[rank][0])
    tag = shard.ledger.slots[slot].tag
    release = ReleaseSlot(
        step_id=-5, rank=rank, incarnation=1, slot=slot, slot_tag=tag, layer=0, expert=0
    )
    shard.release(release)
    driver.join(rank, shard=shard)
    assert driver.engine.state.run.cause == "repair"
    driver.let_go()
    driver.wait(12.0)
    assert driver.table.missing() == ()
    driver.check_agreement()


# -- steps without an answer ---------------------------------------------------------------------


def test_a_release_that_is_never_answered_does_not_keep_the_next_plan_waiting():
    driver = two_ranks(slots=3, drain_wait_s=2.0)
    deaf = Deaf(driver, 0, (ReleaseSlot,))
    driver.close_window(swap_heat(driver))
    assert RemoveState.DRAINED in driver.step_states()
    driver.wait(2.5)
    assert driver.engine.state.run is None
    (step,) = driver.engine.state.parked.values()
    assert (step.state, step.stuck, step.cause) == (RemoveState.DRAINED, True, "auto")
    slot = driver.engine.state.ranks[0].slots[step.step.slot.index]
    assert slot.use is SlotUse.PARKED
    assert driver.engine.layout().slots[step.step.slot] == ABSENT
    assert "did not say that 1 slots were given back" in stalled(driver.engine.state)
    before = len(deaf.unanswered)
    driver.wait(4.0)
    assert len(deaf.unanswered) > before, "it is asked on all the same"
    deaf.hears()
    assert slot.use is SlotUse.EMPTY
    assert stalled(driver.engine.state) == ""
    driver.check_agreement()


def test_a_wave_goes_on_without_a_step_that_is_stuck_and_without_what_waited_for_it():
    """Rank 0 does not free the slot that another expert was to have: that add is called off, the
    rest of the plan is done."""
    driver = two_ranks(slots=3, drain_wait_s=2.0)
    rows = driver.keys()
    deaf = Deaf(driver, 0, (ReleaseSlot,))
    run_to(driver, [rows[1], rows[0]])
    driver.wait(30.0)
    assert driver.engine.state.run is None
    called_off = [
        t for t in driver.transitions if (t.before, t.after) == (AddState.PLANNED, AddState.ABORTED)
    ]
    assert [t.rank for t in called_off] == [0]
    assert driver.table.missing() == ()
    deaf.hears()
    driver.wait(12.0)
    driver.check_agreement()


def test_nothing_new_is_put_on_a_rank_that_leaves_a_question_open():
    driver, deaf = hung_copy(drain_wait_s=2.0)
    silent = deaf.deaf
    driver.wait(12.0)
    assert any(s.stuck for s in driver.engine.state.parked.values())
    assert driver.engine.topology().ranks[silent].fill_max == len(driver.keys()[silent])
    reserved = len([c for c in sent(driver, ReserveSlot) if c.rank == silent])
    for _ in range(4):
        driver.close_window({0: 5000.0, 1: 3000.0})
    assert len([c for c in sent(driver, ReserveSlot) if c.rank == silent]) == reserved
    assert len(driver.table.replicas(0, 0)) >= 2, "the other ranks are used"
    deaf.hears()
    assert driver.engine.topology().ranks[silent].fill_max == -1
    driver.check_agreement()


def test_an_expert_is_not_added_on_a_rank_that_has_not_let_go_of_it():
    """The removal could be taken back, and the rank would hold the expert twice."""
    driver = two_ranks(slots=5)
    deaf = Deaf(driver, 0, (ReleaseSlot,))
    rows = driver.keys()
    out = rows[0][0]
    run_to(driver, [rows[0][1:], [*rows[1], out]])
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    driver.wait(8.0)
    assert driver.engine.state.run is None
    assert driver.engine.state.parked
    driver.feed(ev.ResumeAsked(at_s=0.0, request_id=2))
    # As if the policy knew nothing of the open question.
    for step in driver.engine.state.parked.values():
        step.asked = 1
    run_to(driver, [rows[0], rows[1]])
    assert driver.engine.state.run is None
    assert sorted(driver.keys()[0]) == rows[0][1:]
    deaf.hears()
    run_to(driver, [rows[0], rows[1]])
    driver.wait(12.0)
    assert driver.keys() == rows
    driver.check_agreement()


def test_a_repair_that_fails_on_a_silent_rank_is_tried_elsewhere_at_once():
    """The copy fails and its abort is not answered: once the first wait has passed the rank is
    avoided, and there is nothing more to wait for."""
    driver = two_ranks(slots=6, num_ranks=3, drain_wait_s=1.0)
    driver.hold.add(CopyExpert)
    driver.lose(2)
    (command,) = driver.held
    deaf = Deaf(driver, command.rank, (AbortAdd,))
    driver.hold.clear()
    driver.held.clear()
    driver.feed(ev.StepFailed(at_s=0.0, step_id=command.step_id, code="io", detail="disk"))
    assert driver.table.missing() != ()
    driver.wait(1.1)
    assert driver.table.missing() == ()
    assert len(driver.keys()[command.rank]) < 3, "elsewhere"
    deaf.hears()
    driver.check_agreement()


def test_a_parked_removal_is_taken_back_when_its_expert_falls_below_the_floor():
    driver = two_ranks(slots=6, num_ranks=3, router_silence_s=600.0, drain_wait_s=60.0)
    rows = driver.keys()
    out = rows[0][0]
    driver.silent_routers.add("r0")
    keep = [[k for k in row if k != out] for row in rows]
    run_to(driver, [keep[0], [*keep[1], out], keep[2]])
    assert RemoveState.UNLISTED in driver.step_states()
    driver.lose(2)  # its experts are missing: the plan is ended and leaves the removal behind
    (step,) = driver.engine.state.parked.values()
    assert step.state == RemoveState.UNLISTED
    driver.lose(1)
    assert step.state == RemoveState.LISTED
    assert driver.engine.state.parked == {}
    assert [r for r, _, _ in driver.table.replicas(0, out)] == [0]


def test_a_parked_clean_up_is_never_taken_back():
    """What is in no table was never proved: it may not come back as a replica."""
    driver = two_ranks(slots=6, num_ranks=3, router_silence_s=600.0)
    driver.silent_routers.add("r0")
    run_to(driver, [*driver.keys()[:2], [*driver.keys()[2], driver.keys()[0][0]]])
    shard = driver.shards[0]
    wild = next(i for i in range(6) if shard.ledger.phase(i) == "empty")
    expert = driver.keys()[1][0]
    shard.reserve(
        ReserveSlot(
            step_id=-1,
            rank=0,
            incarnation=1,
            slot=wild,
            layer=0,
            expert=expert,
            weights_version="v1",
        )
    )
    driver.join(0, shard=shard)
    assert driver.engine.state.run.cause == "cleanup"
    driver.lose(2)
    driver.lose(1)
    (step,) = driver.engine.state.parked.values()
    assert (step.cause, step.state) == ("cleanup", RemoveState.UNLISTED)
    assert driver.engine.state.ranks[0].slots[wild].use is SlotUse.PARKED
    driver.wait(30.0)
    assert driver.engine.state.parked == {}
    driver.check_agreement()


def test_what_was_left_behind_is_still_known_after_a_restart():
    driver, deaf = hung_copy(drain_wait_s=2.0)
    driver.wait(12.0)
    assert len(driver.engine.state.parked) >= 1
    slots = {s.step.slot for s in driver.engine.state.parked.values()}
    assert any(s.stuck for s in driver.engine.state.parked.values())
    snapshot = driver.engine.snapshot()
    again = RebalanceEngine.restore(snapshot, (), term=2, first_epoch=9, start_s=driver.now_s)
    assert not any(s.asked for s in again.state.parked.values()), "not asked in this life yet"
    restart(driver, snapshot, ())
    assert {s.step.slot for s in driver.engine.state.parked.values()} == slots
    for slot in slots:
        assert driver.engine.state.ranks[slot.rank].slots[slot.index].use is SlotUse.PARKED
    deaf.hears()
    driver.wait(12.0)
    assert driver.engine.state.parked == {}
    driver.check_agreement()


def test_a_journal_that_tells_of_a_newer_plan_leaves_the_older_ones_steps_parked():
    driver, deaf = hung_copy(drain_wait_s=2.0)
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    lost = next(r for r in (2, 1, 0) if r != deaf.deaf)
    driver.lose(lost)
    driver.wait(12.0)
    parked = driver.engine.state.parked
    assert parked
    again = RebalanceEngine.restore(
        snapshot, driver.transitions[start:], term=2, first_epoch=9, start_s=driver.now_s
    ).state
    assert again.parked.keys() == parked.keys()
    assert {(s.state, s.asked) for s in again.parked.values()} == {(AddState.ABORTING, 0)}
    assert "auto" in {s.cause for s in again.parked.values()}
    for step in again.parked.values():
        assert again.ranks[step.step.slot.rank].slots[step.step.slot.index].use is SlotUse.PARKED
    deaf.kinds = ()
    restart(driver, snapshot, driver.transitions[start:])
    driver.wait(60.0)
    assert driver.engine.state.parked == {}
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_before_the_first_table_a_removal_does_not_wait_for_an_expert_that_did_not_come():
    """Rank 0 is to give a replica up once it lies on rank 1. The table that would say so cannot be
    published while another expert is missing: the removal is given up, and the fill tried again."""
    driver = EngineDriver(
        make_spec(), make_topology([3, 3], ranks_per_node=1), routers=["r0"], join=False
    )
    driver.hold.add(CopyExpert)
    driver.join(0, shard=holding(0, [0, 1, 2], 3))
    driver.join(1)
    assert driver.tables == []
    for command in list(driver.held):
        if command.expert == 3:
            driver.held.remove(command)
            driver.feed(ev.StepFailed(at_s=0.0, step_id=command.step_id, code="io", detail="disk"))
    driver.let_go()
    given_up = [t for t in driver.transitions if t.kind == "remove" and t.after == "listed"]
    assert given_up
    driver.wait(30.0)
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_what_was_proved_before_a_restart_waits_for_the_ranks_and_then_for_nothing():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    proved, other = driver.held
    for event in driver.run_shard(proved):
        driver.feed(event)
    assert driver.step_states().count(AddState.VERIFIED) == 1
    before = restart(driver, driver.engine.snapshot(), (), silent=(0, 1, 2))
    driver.lose(other.rank)
    assert driver.engine.state.run is None
    assert len(driver.tables) == before, "other ranks may still hold what would be left out"
    for rank in sorted(driver.shards):
        driver.join(rank, shard=driver.shards[rank])
    assert proved.rank in {r for r, _, _ in driver.table.replicas(0, 0)}
    driver.wait(31.0)
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_a_failure_that_a_step_cannot_take_any_more_means_nothing():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    listed = next(iter(driver.engine.state.run.steps.values()))
    listed.state = AddState.LISTED
    effects = driver.feed(
        ev.StepFailed(at_s=0.0, step_id=listed.step.step_id, code="io", detail="late")
    )
    assert (effects.transitions, effects.records) == ((), ())


# -- plans that stand still ----------------------------------------------------------------------


def test_a_copy_that_hangs_is_seen_within_two_windows_reported_aborted_and_tried_again():
    driver = two_ranks()
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    driver.wait(3.9)
    assert stalled(driver.engine.state) == ""
    assert not sent(driver, AbortAdd)
    driver.held.clear()
    driver.hold.clear()
    driver.wait(0.2)
    (told,) = records(driver, "plan_stalled")
    assert told.outcome == "aborted"
    assert "1 copies from rank 0 into rank 1 do not go on" in told.detail
    assert told.numbers["still_s"] == pytest.approx(4.0)
    state = driver.engine.state
    assert (state.plans_stalled, state.stalls_in_a_row) == (1, 1)
    assert sent(driver, AbortAdd)
    assert state.run is None
    assert "was aborted and is tried again" in stalled(state)
    driver.check_agreement()
    driver.wait(6.0)
    driver.close_window(HOT)
    assert len(driver.table.replicas(0, 0)) == 2
    assert (state.plans_stalled, state.stalls_in_a_row) == (1, 0)
    assert stalled(state) == ""


def test_a_copy_that_tells_of_bytes_goes_on_however_slow():
    driver = two_ranks(copy_timeout_s=600.0)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    step_id = driver.held[0].step_id
    for copied_bytes in range(10, 200, 10):
        driver.wait(3.0)
        driver.feed(ev.CopyProgress(at_s=0.0, step_id=step_id, copied_bytes=copied_bytes))
    assert not records(driver, "plan_stalled")
    # The same number again is no sign of life, nor is one of a step that nobody knows.
    driver.wait(3.0)
    driver.feed(ev.CopyProgress(at_s=0.0, step_id=step_id, copied_bytes=190))
    driver.feed(ev.CopyProgress(at_s=0.0, step_id=99, copied_bytes=10_000))
    driver.wait(1.1)
    assert records(driver, "plan_stalled", "aborted")


def test_each_plan_that_was_aborted_doubles_the_patience_so_that_slow_copies_end():
    """A device that takes ten seconds a copy and says nothing meanwhile is not aborted for ever."""
    driver = two_ranks(copy_timeout_s=600.0)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    for _ in range(40):
        driver.wait(2.0)
        due = [c for c in driver.held if isinstance(c, CopyExpert)]
        began_s = {t.step_id: t.at_s for t in driver.transitions if t.after == AddState.COPYING}
        for command in due:
            if driver.now_s >= began_s[command.step_id] + 10.0:
                driver.held.remove(command)
                for event in driver.run_shard(command):
                    driver.feed(event)
        driver.close_window(HOT)
    assert len(driver.table.replicas(0, 0)) == 2
    assert [r.numbers["patience_s"] for r in records(driver, "plan_stalled", "aborted")] == [4, 8]
    assert driver.engine.state.stalls_in_a_row == 2, "so much was needed"


def test_a_plan_that_ends_well_leaves_as_much_patience_as_it_needed():
    driver = two_ranks(copy_timeout_s=600.0)
    driver.engine.state.stalls_in_a_row = 3
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    driver.wait(5.0)
    driver.let_go()
    assert len(driver.table.replicas(0, 0)) == 2
    assert driver.engine.state.stalls_in_a_row == 1, "eight seconds, for it took five"


def test_patience_ends_with_the_copys_own_deadline():
    driver = two_ranks(copy_timeout_s=10.0)
    driver.engine.state.stalls_in_a_row = 4
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    driver.wait(5.0)
    assert [r.outcome for r in records(driver, "plan_stalled")] == ["noted"]
    assert "do not go on" in stalled(driver.engine.state)
    driver.close_window(HOT)
    assert "is running; it stands still: " in records(driver, "plan_running")[-1].detail
    driver.hold.clear()
    driver.held.clear()
    driver.wait(5.1)
    assert len(records(driver, "plan_stalled")) == 1
    assert records(driver, "step_aborted", "aborted")
    assert driver.engine.state.run is None


def test_a_plan_that_waits_for_routers_is_said_to_stand_still_but_not_aborted():
    driver = two_ranks(slots=3, drain_wait_s=6.0, router_silence_s=60.0)
    driver.silent_routers.add("r0")
    driver.close_window(swap_heat(driver))
    driver.wait(4.1)
    (told,) = records(driver, "plan_stalled")
    assert told.outcome == "noted"
    assert f"waits for r0 to use epoch {driver.table.epoch}" in told.detail
    assert "waits for r0" in stalled(driver.engine.state)
    driver.feed(ev.TableApplied(at_s=0.0, router="r0", epoch=driver.table.epoch))
    assert stalled(driver.engine.state) == "", "it goes on"
    driver.wait(4.1)
    assert "to end work from before epoch" in records(driver, "plan_stalled")[-1].detail
    driver.silent_routers.clear()
    driver.wait(12.0)
    assert driver.engine.state.run is None
    assert records(driver, "plan_done", "done")


def test_a_plan_whose_copies_wait_for_a_silent_rank_is_aborted():
    driver = two_ranks(slots=4, rank_silence_s=60.0)
    holder = next(rank for rank, keys in enumerate(driver.keys()) if 0 in keys)
    driver.feed(ev.RankSuspected(at_s=0.0, rank=1 - holder, reason="disconnected"))
    driver.close_window(HOT)
    driver.wait(4.1)
    (told,) = records(driver, "plan_stalled", "aborted")
    assert f"copies wait for rank {1 - holder} to answer again" in told.detail
    assert driver.engine.state.run is None


def test_a_plan_that_ends_and_waits_for_a_shard_says_for_which():
    driver = two_ranks(window_s=1.0, drain_wait_s=5.0)
    driver.hold |= {CopyExpert, AbortAdd}
    driver.close_window(HOT)
    into = driver.held[0].rank
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=1, rank=into, budget_bytes=5000))
    driver.wait(2.1)
    (told,) = records(driver, "plan_stalled")
    assert told.outcome == "noted"
    assert f"rank {into} did not say that 1 slots were given back" in told.detail
    driver.wait(3.0)
    assert driver.engine.state.run is None, "the first wait has passed"
    driver.let_go()
    driver.check_agreement()


def test_ranks_that_may_still_come_are_no_reason_to_abort():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    restart(driver, driver.engine.snapshot(), (), silent=(2,))
    del driver.shards[2]
    driver.wait(20.0)
    assert not records(driver, "plan_stalled")
    driver.wait(25.0)
    driver.check_agreement()


def test_a_stall_is_not_spoken_of_for_ever():
    driver = two_ranks()
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    driver.held.clear()
    driver.hold.clear()
    driver.wait(4.5)
    assert stalled(driver.engine.state)
    driver.wait(SHOWN_S)
    driver.feed(ev.TimerFired(at_s=0.0))
    assert stalled(driver.engine.state) == ""


def test_a_shard_whose_copy_hung_and_who_answers_the_abort_is_used_again():
    """The next migration of the same expert succeeds without a restart of anything."""
    driver = two_ranks()
    deaf = Deaf(driver, 1, (CopyExpert,))
    driver.close_window(HOT)
    driver.wait(4.1)
    assert driver.engine.state.parked == {}
    deaf.deaf = -1
    driver.wait(6.0)
    driver.close_window(HOT)
    assert len(driver.table.replicas(0, 0)) == 2
    driver.check_agreement()


# -- shorter waits -------------------------------------------------------------------------------


def test_a_budget_that_ends_a_plan_shortens_the_waits_of_its_removals():
    driver = two_ranks(slots=4, num_ranks=2, router_silence_s=600.0, drain_wait_s=5.0)
    rows = driver.keys()
    driver.silent_routers.add("r0")
    run_to(driver, [rows[1], rows[0]])
    waiting = [s for s in driver.engine.state.run.steps.values() if s.state == RemoveState.UNLISTED]
    assert waiting
    assert {s.deadline_s for s in waiting} == {driver.now_s + 5.0}
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=1, rank=0, budget_bytes=3000))
    assert {s.deadline_s for s in waiting} == {driver.now_s + 1.0}
    assert driver.engine.state.run.drain_wait_s == 1.0
    # Another request while the plan ends shortens nothing further, and lengthens nothing.
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=2, rank=1, budget_bytes=3000))
    assert {s.deadline_s for s in waiting} == {driver.now_s + 1.0}
    asked_s = driver.now_s
    for _ in range(40):
        driver.wait(0.25)
        if [r.num_slots for r in driver.engine.state.ranks] == [3, 3]:
            break
    assert [r.num_slots for r in driver.engine.state.ranks] == [3, 3]
    assert driver.now_s - asked_s <= 5.0
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_every_copy_has_a_deadline_of_several_times_its_price():
    driver = two_ranks(copy_timeout_s=0.0)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    (command,) = driver.held
    step = driver.engine.state.run.steps[command.step_id]
    assert step.copy_s > 0
    assert command.timeout_s == pytest.approx(5.0 * step.copy_s)
    assert step.deadline_s == pytest.approx(driver.now_s + 5.0 * step.copy_s)
    # Asked for again, because the rank told anew what it holds: the same time.
    driver.now_s += 0.001
    driver.join(step.step.slot.rank, shard=driver.shards[step.step.slot.rank])
    again = driver.held[-1]
    assert (again.step_id, len(driver.held)) == (command.step_id, 2)
    assert again.timeout_s == pytest.approx(5.0 * step.copy_s)
    assert step.deadline_s == pytest.approx(driver.now_s + 5.0 * step.copy_s)


def test_a_proof_that_hangs_is_aborted_like_a_copy():
    driver = two_ranks()
    driver.hold.add(VerifyExpert)
    driver.close_window(HOT)
    driver.held.clear()
    driver.hold.clear()
    driver.wait(4.1)
    assert records(driver, "plan_stalled", "aborted")
    assert driver.engine.state.run is None
    driver.check_agreement()
