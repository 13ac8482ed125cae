"""After a total loss the last committed layout comes back; where the ranks that are left cannot
hold every expert, what has no replica takes what slots there are."""

import numpy as np
import pytest

from placement.config import RebalanceConfig
from placement.engine.restore import rescue_plan
from placement.engine.state import NEVER_S, RankStatus
from placement.messages import events as ev
from placement.messages.effects import (
    AbortAdd,
    ComputeTarget,
    CopyExpert,
    ReserveSlot,
    SetRankSlots,
    VerifyExpert,
)
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver, restart, two_ranks
from tests.unit.placement.test_engine_edges import filled, holding

HOT = {0: 5000.0}


def records(driver, rule, outcome=None):
    return [r for r in driver.records if r.rule == rule and outcome in (None, r.outcome)]


def causes(driver):
    return [c.cause for c in driver.commands if isinstance(c, ComputeTarget)]


def listed(driver):
    """(layer, expert, rank, slot) of the newest table."""
    table = driver.table
    return {
        (layer, expert, rank, slot)
        for layer in range(table.num_layers)
        for expert in range(table.num_experts)
        for rank, slot, _ in table.replicas(layer, expert)
    }


def kill_all(driver, *, apart_s=0.0):
    for rank in sorted(driver.shards):
        driver.lose(rank)
        driver.wait(apart_s)


# -- restore -------------------------------------------------------------------------------------


def test_after_a_total_loss_the_last_committed_table_is_served_again():
    driver = two_ranks(slots=4, num_ranks=3)
    for _ in range(2):
        driver.close_window(HOT)
    before = listed(driver)
    assert len(driver.table.replicas(0, 0)) > 1, "load has shaped it"
    driver.wait(100.0)
    kill_all_at_once(driver)
    asked = len(causes(driver))
    assert driver.table.missing() == ((0, 0), (0, 1), (0, 2), (0, 3))
    for rank in range(3):
        driver.join(rank, incarnation=2)
    assert listed(driver) == before
    assert causes(driver)[asked:] == [], "nothing was planned anew"
    assert records(driver, "restore", "started")
    assert driver.engine.state.restoring_until_s == -NEVER_S
    assert not any(k >= 0 for r in driver.engine.state.ranks for k in r.lost_keys)
    driver.check_agreement()


def kill_all_at_once(driver):
    """All shards die in one moment: no repair gets anywhere between."""
    driver.hold |= {ComputeTarget, ReserveSlot}
    kill_all(driver)
    driver.hold.clear()
    driver.held.clear()


def test_moves_of_a_restore_are_counted_as_none():
    driver = two_ranks(slots=4, num_ranks=3)
    kill_all_at_once(driver)
    before = dict(driver.engine.state.moves_done)
    for rank in range(3):
        driver.join(rank, incarnation=2)
    assert driver.engine.state.moves_done == before
    assert not records(driver, "replicate")


def test_ranks_that_return_one_by_one_are_filled_as_they_were_and_nothing_is_planned_before():
    driver = two_ranks(slots=6, num_ranks=3)
    before = driver.keys()
    driver.wait(100.0)
    kill_all_at_once(driver)
    asked = len(causes(driver))
    driver.wait(50.0)  # however long the first takes
    driver.join(1, incarnation=2)
    assert driver.keys() == [[], before[1], []]
    driver.wait(10.0)
    assert driver.keys() == [[], before[1], []]
    driver.join(0, incarnation=2)
    driver.join(2, incarnation=2)
    assert driver.keys() == before
    assert causes(driver)[asked:] == []


def test_ranks_that_do_not_return_are_waited_for_only_so_long():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.wait(100.0)
    kill_all_at_once(driver)
    driver.join(1, incarnation=2)
    driver.wait(29.0)
    assert driver.table.missing() != ()
    driver.wait(1.5)
    assert driver.table.missing() == ()
    assert "repair" in causes(driver)
    assert driver.engine.state.restoring_until_s == -NEVER_S
    driver.check_agreement()


def test_a_rank_that_was_lost_long_before_is_not_filled_as_it_was():
    """The newest table did without it."""
    driver = two_ranks(slots=6, num_ranks=3)
    driver.lose(2)
    driver.wait(100.0)
    before = driver.keys()
    assert before[2] == []
    kill_all_at_once(driver)
    driver.join(2, incarnation=2)
    assert driver.keys() == [[], [], []]
    driver.join(0, incarnation=2)
    driver.join(1, incarnation=2)
    assert driver.keys() == before


def test_a_rank_that_was_to_be_emptied_stays_empty():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(CopyExpert)
    driver.feed(ev.DrainAsked(at_s=0.0, request_id=1, rank=0))
    kill_all_at_once(driver)
    for rank in range(3):
        driver.join(rank, incarnation=2)
    driver.wait(40.0)
    assert driver.keys()[0] == []
    assert driver.table.missing() == ()


def test_with_fewer_slots_what_nobody_else_held_goes_back_first():
    """A new life begins with the slots of the service file; it gets the others a little later."""
    driver = filled([[2, 0, 1], [2, 3]], slots=4)
    kill_all_at_once(driver)
    driver.topology = make_topology([3, 4], ranks_per_node=1)
    driver.hold |= {ComputeTarget, SetRankSlots}
    driver.join(1, incarnation=2)
    driver.join(0, incarnation=2)
    assert driver.keys() == [[0, 1], [2, 3]]
    assert driver.table.missing() == ()


def test_a_rank_that_dies_again_while_it_is_filled_is_owed_what_had_not_come():
    driver = filled([[0, 1], [2, 3]], slots=4, wave_adds_per_rank=1)
    kill_all_at_once(driver)
    driver.hold.add(VerifyExpert)
    driver.join(0, incarnation=2)
    driver.lose(0)
    driver.hold.clear()
    driver.held.clear()
    driver.join(1, incarnation=2)
    assert driver.keys() == [[], [2, 3]]
    driver.join(0, incarnation=3)
    assert driver.keys() == [[0, 1], [2, 3]]


def test_a_restore_whose_copies_fail_waits_before_it_is_tried_again():
    driver = filled([[0, 1], [2, 3]], slots=4)
    kill_all_at_once(driver)
    driver.hold.add(CopyExpert)
    driver.join(0, incarnation=2)
    for command in list(driver.held):
        driver.feed(ev.StepFailed(at_s=0.0, step_id=command.step_id, code="io", detail="disk"))
    assert driver.engine.state.run is None
    assert len(records(driver, "restore", "started")) == 1
    driver.hold.clear()
    driver.held.clear()
    driver.wait(5.1)
    assert driver.keys()[0] == [0, 1]


def test_what_was_moved_away_since_is_not_put_back():
    """A replica that came back and was evicted is owed no more, though another rank is still
    waited for."""
    driver = filled([[0, 1], [0, 2, 3], [1]], slots=5)
    kill_all_at_once(driver)
    driver.join(0, incarnation=2)
    driver.join(1, incarnation=2)
    assert driver.engine.state.restoring_until_s < NEVER_S
    assert driver.table.missing() == ()
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=1, rank=0, budget_bytes=2000))
    driver.wait(3.0)
    assert driver.engine.state.ranks[0].num_slots == 2
    kept = driver.keys()[0]
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=2, rank=0, budget_bytes=5000))
    driver.wait(3.0)
    assert driver.keys()[0] == kept


def test_a_service_that_was_killed_whole_serves_the_last_table_after_its_restart():
    driver = two_ranks(slots=4, num_ranks=3)
    for _ in range(2):
        driver.close_window(HOT)
    before = listed(driver)
    snapshot = driver.engine.snapshot()
    lives = {rank: shard.incarnation for rank, shard in driver.shards.items()}
    driver.shards.clear()
    driver.now_s += 60.0
    restart(driver, snapshot, ())
    asked = len(causes(driver))
    for rank, incarnation in lives.items():
        driver.feed(ev.RankLost(at_s=0.0, rank=rank, incarnation=incarnation, reason="found dead"))
    for rank in lives:
        driver.join(rank, incarnation=2)
        driver.wait(2.0)
    assert listed(driver) == before
    assert causes(driver)[asked:] == []
    driver.check_agreement()


def test_a_restart_during_a_restore_goes_on_with_it():
    driver = filled([[0, 1], [2, 3]], slots=4)
    kill_all_at_once(driver)
    driver.join(0, incarnation=2)
    assert driver.keys() == [[0, 1], []]
    restart(driver, driver.engine.snapshot(), ())
    driver.wait(5.0)
    driver.join(1, incarnation=2)
    driver.wait(31.0)
    assert driver.keys() == [[0, 1], [2, 3]]
    driver.check_agreement()


def test_what_was_lost_long_before_a_restart_is_forgotten_with_it():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.lose(2)
    assert any(k >= 0 for k in driver.engine.state.ranks[2].lost_keys)
    driver.wait(100.0)
    restart(driver, driver.engine.snapshot(), ())
    assert driver.engine.state.ranks[2].lost_keys == []


def test_a_total_loss_before_anything_was_served_is_a_first_fill():
    driver = EngineDriver(make_spec(), make_topology([4, 4]), routers=["r0"], join=False)
    driver.hold.add(VerifyExpert)
    driver.join(0)
    driver.join(1)
    kill_all_at_once(driver)
    assert not records(driver, "all_lost")
    driver.join(0, incarnation=2)
    driver.join(1, incarnation=2)
    driver.wait(40.0)
    assert driver.table.missing() == ()
    assert not records(driver, "restore")


def test_what_only_a_rank_held_that_was_lost_long_before_goes_back_to_it():
    """No later table listed these experts: they are still the newest that is known of them."""
    driver = filled([[0, 1], [2, 3]], slots=3)
    driver.hold |= {ComputeTarget, ReserveSlot}
    driver.lose(0)
    driver.wait(100.0)
    driver.lose(1)
    driver.held.clear()
    driver.hold.clear()
    asked = len(causes(driver))
    driver.join(1, incarnation=2)
    driver.join(0, incarnation=2)
    assert driver.keys() == [[0, 1], [2, 3]]
    assert causes(driver)[asked:] == []


def test_where_nothing_is_remembered_nothing_is_waited_for():
    driver = filled([[0, 1, 2, 3], []], slots=6)
    driver.hold.add(ComputeTarget)
    driver.lose(0)
    driver.wait(31.0)
    assert driver.engine.state.restoring_until_s == -NEVER_S
    driver.lose(1)
    assert len(records(driver, "all_lost")) == 1
    driver.let_go()
    driver.join(1, incarnation=2)
    assert driver.keys() == [[], [0, 1, 2, 3]]


def answer_held(driver, rank):
    """The rank does what it was asked and kept waiting with."""
    mine = [c for c in driver.held if c.rank == rank]
    driver.held = [c for c in driver.held if c.rank != rank]
    for command in mine:
        for event in driver.run_shard(command):
            driver.feed(event)


def test_what_came_back_and_was_lost_again_before_the_plan_ended_is_owed_again():
    driver = filled([[0, 1, 2, 3], [0], [0]], slots=6, wave_adds_per_rank=8)
    kill_all_at_once(driver)
    driver.hold |= {CopyExpert, AbortAdd}
    for rank in (2, 0, 1):
        driver.join(rank, incarnation=2)
    answer_held(driver, 2)  # the first to return is filled alone, the others together
    answer_held(driver, 0)
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=1, rank=1, budget_bytes=5000))
    assert driver.keys() == [[0, 1, 2, 3], [], [0]]
    assert driver.engine.state.run.cause == "restore", "rank 1 does not answer the abort"
    driver.lose(0)
    assert driver.engine.state.ranks[0].lost_keys[:4] == [0, 1, 2, 3]
    driver.hold.clear()
    driver.join(0, incarnation=3)
    driver.wait(12.0)
    assert driver.keys()[0] == [0, 1, 2, 3]
    assert driver.table.missing() == ()


def test_ranks_that_were_empty_leave_nothing_to_restore():
    """All replicas lay on one rank; the other is lost after it, with nothing."""
    driver = filled([[0, 1, 2, 3], []], slots=6)
    driver.hold.add(ComputeTarget)
    driver.lose(0)
    assert records(driver, "all_lost"), "a rank that holds nothing is no comfort"
    driver.held.clear()
    driver.hold.clear()
    driver.wait(40.0)
    assert driver.keys() == [[], [0, 1, 2, 3]]


# -- rescue --------------------------------------------------------------------------------------


def test_experts_without_a_replica_take_staging_slots_when_nothing_else_is_free():
    driver = two_ranks(slots=3)
    rows = driver.keys()
    hot = rows[0][1]
    driver.close_window({hot: 5000.0})
    driver.wait(10.0)
    rows = driver.keys()
    at_s = driver.now_s
    driver.lose(0)
    assert driver.now_s == at_s
    assert hot in driver.keys()[1], "the hottest of those that are missing"
    assert len(driver.keys()[1]) == 3
    assert "staging and surplus slots are used" in records(driver, "repair", "started")[0].detail
    assert "are short" in records(driver, "target_failed")[0].detail
    driver.join(0, incarnation=2)
    driver.wait(12.0)
    assert driver.table.missing() == ()
    assert list(map(len, driver.keys())) == [2, 2], "staging slots are empty again"
    driver.check_agreement()


def test_surplus_replicas_give_way_to_experts_without_any():
    driver = filled([[0, 1, 2], [0, 1, 2], [3]], slots=3, staging_slots=0)
    driver.wait(31.0)
    driver.lose(2)
    driver.wait(12.0)
    assert driver.table.missing() == ()
    assert sorted(len(row) for row in driver.keys()[:2]) == [3, 3]
    driver.lose(1)
    driver.wait(12.0)
    kept = driver.keys()[0]
    assert len(kept) == 3
    assert not records(driver, "evict"), "nothing that is the last of its kind goes"
    driver.check_agreement()


def test_a_rescue_evicts_only_what_has_another_replica():
    driver = filled([[0, 1, 2], [0, 1, 2], [3]], slots=3, staging_slots=0)
    turn_of = driver.engine._turn
    driver.hold.add(ComputeTarget)
    driver.lose(2)
    driver.held.clear()
    driver.hold.clear()
    state = driver.engine.state
    state.outstanding = None
    load = np.array([5.0, 1.0, 3.0, 9.0])
    plan = rescue_plan(turn_of(driver.now_s), load)
    assert [(s.kind, s.slot, s.expert, s.wave, s.after) for s in plan.steps] == [
        ("remove", (0, 1), 1, 0, ()),
        ("add", (0, 1), 3, 1, (0,)),
    ]
    assert [(m.kind, m.expert, m.target_rank) for m in plan.moves] == [("replicate", 3, 0)]


def test_a_rescue_evicts_no_replica_twice():
    """Nobody asks for expert 0, so each of its three replicas would do least harm by going."""
    driver = filled([[0, 1], [0, 1], [0, 1], [2, 3]], slots=2, staging_slots=0)
    driver.hold.add(ComputeTarget)
    driver.lose(3)
    load = np.array([0.0, 5.0, 1.0, 1.0])
    plan = rescue_plan(driver.engine._turn(driver.now_s), load)
    removed = [(s.slot, s.expert) for s in plan.steps if s.kind == "remove"]
    assert removed == [((0, 0), 0), ((1, 0), 0)]


def test_a_rescue_stops_where_no_expert_can_spare_a_replica():
    driver = filled([[0], [1], [2, 3]], slots=2, staging_slots=0)
    driver.lose(2)
    assert driver.table.missing() == ()
    driver.lose(1)
    plan = rescue_plan(driver.engine._turn(driver.now_s), np.ones(4))
    assert plan is None
    assert len(driver.table.missing()) == 2


def test_a_rescue_asks_nothing_of_ranks_that_do_not_answer():
    driver = filled([[0, 1], [2], [3]], slots=3, staging_slots=2, rank_silence_s=60.0)
    driver.feed(ev.RankSuspected(at_s=0.0, rank=1, reason="disconnected"))
    driver.lose(2)
    assert driver.keys()[1] == [2]
    assert driver.keys()[0] == [0, 1, 3]


def test_uniform_layouts_are_left_to_their_policy():
    """A layer must have as many slots on each rank: nothing is put in between."""
    driver = EngineDriver(
        make_spec(),
        make_topology([3, 3], ranks_per_node=1),
        RebalanceConfig(cooldown_s=0.0, uniform=True),
        routers=["r0"],
    )
    rows = driver.keys()
    driver.lose(0)
    assert driver.keys()[1] == rows[1]
    assert records(driver, "target_failed")


@pytest.mark.parametrize("status", [RankStatus.LOST, RankStatus.RESTORED])
def test_nothing_is_rescued_onto_ranks_that_have_not_answered(status):
    driver = filled([[0, 1], [2, 3]], slots=3)
    driver.hold.add(ComputeTarget)
    driver.lose(0)
    driver.engine.state.ranks[1].status = status
    assert rescue_plan(driver.engine._turn(driver.now_s), np.ones(4)) is None


# -- staging -------------------------------------------------------------------------------------


def test_a_rank_that_gave_its_staging_slot_away_gets_it_back():
    topology = make_topology([3, 3, 3], ranks_per_node=1)
    driver = EngineDriver(make_spec(), topology, routers=["r0"], join=False)
    for rank, row in enumerate([[0, 1, 2], [3], []]):
        driver.join(rank, shard=holding(rank, row, 3))
    driver.wait(12.0)
    assert "staging" in causes(driver)
    assert max(map(len, driver.keys())) == 2
    assert driver.table.missing() == ()
    driver.check_agreement()
