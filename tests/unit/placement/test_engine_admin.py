"""Operators and the trigger: what is refused and why, what is started, what is recorded."""

import msgspec
import pytest

from placement.config import RebalanceConfig
from placement.engine import compute_target
from placement.messages import events as ev
from placement.messages.effects import AbortAdd, ComputeTarget, CopyExpert, SetRankSlots
from tests.builders import make_layout, make_request, make_spec, make_topology
from tests.engine_driver import EngineDriver, two_ranks

HOT = {0: 5000.0}


def ask(driver, kind, **fields):
    request_id = 1000 + len(driver.answers)
    driver.feed(kind(at_s=0.0, request_id=request_id, **fields))
    return driver.answers.get(request_id)


def budget(driver, rank, slots):
    return ask(driver, ev.BudgetAsked, rank=rank, budget_bytes=slots * 1000)


def targets(driver):
    return [c for c in driver.commands if isinstance(c, ComputeTarget)]


# -- budgets -------------------------------------------------------------------------------------


def test_a_lower_budget_evicts_the_least_useful_replicas_first():
    driver = two_ranks(slots=5)
    driver.close_window({0: 900.0, 1: 900.0, 2: 900.0, 3: 50.0})
    before = driver.keys()
    assert max(len(keys) for keys in before) > 2
    rank = 0 if len(before[0]) > 2 else 1
    assert budget(driver, rank, 3).code == "ok"
    assert len(driver.shards[rank].ledger.slots) == 3
    assert driver.engine.state.ranks[rank].num_slots == 3
    assert driver.engine.state.ranks[rank].budget_bytes == 3000
    assert len(driver.keys()[rank]) <= 2
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_a_budget_that_could_not_hold_every_expert_names_the_missing_bytes():
    driver = two_ranks(slots=3)
    answer = budget(driver, 0, 2)
    assert (answer.code, answer.missing_bytes) == ("refused", 1000)
    assert "1000 bytes" in answer.message
    assert "budget_refused" in driver.rules("refused")
    assert not [c for c in driver.commands if isinstance(c, SetRankSlots)]


def test_in_a_uniform_layout_every_layer_needs_its_slots_on_every_rank():
    """Two layers of four experts on two ranks: two slots a layer and rank, and one for staging."""
    config = RebalanceConfig(cooldown_s=0.0, uniform=True)
    spec, topology = make_spec(num_layers=2), make_topology([7, 7], ranks_per_node=1)
    driver = EngineDriver(spec, topology, config, routers=["r0"])
    answer = budget(driver, 0, 4)
    assert (answer.code, answer.missing_bytes) == ("refused", 1000)
    answer = ask(driver, ev.DrainAsked, rank=0)
    assert (answer.code, answer.missing_bytes) == ("refused", 2 * 1000)
    assert budget(driver, 0, 5).code == "ok"
    driver.wait(5.0)
    driver.close_window()
    assert driver.engine.layout().physical_to_logical().shape == (2, 4)
    driver.check_agreement()


def test_the_floor_that_holds_now_must_hold_under_the_new_budget():
    driver = two_ranks(slots=5, floor=2)
    driver.close_window()
    assert all(len(driver.table.replicas(0, e)) == 2 for e in range(4))
    answer = budget(driver, 0, 4)
    assert (answer.code, answer.missing_bytes) == ("refused", 1000)


def test_a_higher_budget_is_given_at_once():
    driver = two_ranks()
    assert budget(driver, 1, 6).code == "ok"
    assert driver.engine.layout().slots.shape == (2, 6)
    driver.close_window(HOT)
    driver.check_agreement()


@pytest.mark.parametrize("slots", [17, 1 << 50])
def test_a_budget_of_more_slots_than_a_rank_has_use_for_reaches_no_shard(slots):
    driver = two_ranks()
    answer = budget(driver, 1, slots)
    assert answer.code == "refused"
    assert answer.message == (
        f"budget_bytes {slots * 1000} is {slots} slots; rank 1 may have 16 (16000 bytes)"
    )
    assert not [c for c in driver.commands if isinstance(c, SetRankSlots)]
    assert driver.engine.state.ranks[1].wanted_slots == -1
    assert budget(driver, 1, 16).code == "ok"
    assert driver.engine.state.ranks[1].num_slots == 16


def test_last_replicas_move_away_before_their_rank_shrinks():
    driver = two_ranks(slots=6)
    assert budget(driver, 0, 1).code == "ok"
    assert driver.keys()[0] == []
    assert driver.keys()[1] == [0, 1, 2, 3]
    driver.check_agreement()


def test_a_shard_that_does_not_answer_is_told_its_budget_again():
    driver = two_ranks(slots=6)
    driver.hold.add(SetRankSlots)
    budget(driver, 0, 5)
    assert len(driver.held) == 1
    driver.wait(5.5)
    assert len(driver.held) == 2
    driver.let_go()
    assert driver.engine.state.ranks[0].wanted_slots == -1


def test_an_answer_to_an_older_budget_does_not_end_the_newer_wish():
    driver = two_ranks(slots=6)
    driver.hold.add(SetRankSlots)
    budget(driver, 0, 5)
    budget(driver, 0, 7)
    driver.let_go()
    assert driver.engine.state.ranks[0].num_slots == 7
    driver.feed(ev.BudgetApplied(at_s=0.0, rank=99, num_slots=1))


def test_a_budget_outlives_the_shard_it_was_set_on():
    driver = two_ranks(slots=6)
    for slots in (5, 8):
        assert budget(driver, 0, slots).code == "ok"
        driver.lose(0)
        driver.join(0, incarnation=driver.engine.state.ranks[0].incarnation + 1)
        assert len(driver.shards[0].ledger.slots) == slots
        assert driver.engine.state.ranks[0].budget_bytes == slots * 1000
        driver.check_agreement()


def test_a_budget_not_yet_applied_is_wanted_of_the_next_shard_too():
    driver = two_ranks(slots=6)
    driver.hold.add(SetRankSlots)
    budget(driver, 0, 5)
    driver.lose(0)
    driver.hold.clear()
    driver.join(0, incarnation=2)
    assert len(driver.shards[0].ledger.slots) == 5
    assert driver.engine.state.ranks[0].wanted_slots == -1


def test_requests_for_ranks_that_are_not_there():
    driver = two_ranks(num_ranks=3)
    assert budget(driver, 9, 3).code == "not_found"
    assert ask(driver, ev.DrainAsked, rank=-1).code == "not_found"
    assert ask(driver, ev.UndrainAsked, rank=9).code == "not_found"
    assert ask(driver, ev.BudgetAsked, rank=0, budget_bytes=-1).code == "refused"
    driver.lose(1)
    assert "lost" in ask(driver, ev.DrainAsked, rank=1).message


# -- drain ---------------------------------------------------------------------------------------


def test_a_drained_rank_is_emptied_and_comes_back():
    driver = two_ranks(slots=6, num_ranks=3)
    assert ask(driver, ev.DrainAsked, rank=1).code == "ok"
    assert driver.keys()[1] == []
    assert driver.table.missing() == ()
    driver.close_window(HOT)
    assert driver.keys()[1] == []
    assert ask(driver, ev.UndrainAsked, rank=1).code == "ok"
    driver.close_window({k: 3000.0 for k in range(4)})
    driver.check_agreement()


def test_a_drain_that_would_lose_experts_is_refused_with_bytes():
    driver = two_ranks(slots=3)
    answer = ask(driver, ev.DrainAsked, rank=0)
    assert (answer.code, answer.missing_bytes) == ("refused", 2000)
    assert not driver.engine.state.ranks[0].draining


def test_a_drain_cancels_what_the_running_plan_has_not_begun():
    driver = two_ranks(slots=6, num_ranks=3, wave_adds_per_rank=1)
    driver.hold.add(CopyExpert)
    driver.close_window({0: 5000.0, 1: 4000.0, 2: 4500.0})
    assert driver.engine.state.run is not None
    ask(driver, ev.DrainAsked, rank=2)
    driver.let_go()
    assert driver.keys()[2] == []
    assert "aborted" in {r.outcome for r in driver.records if r.rule == "plan_done"}
    driver.check_agreement()


def test_a_drained_rank_that_dies_is_not_replaced():
    driver = two_ranks(slots=6, num_ranks=3)
    ask(driver, ev.DrainAsked, rank=2)
    effects = driver.lose(2)
    assert "ReplaceRank" not in {type(c).__name__ for c in effects.commands}


def test_each_cause_of_a_drain_ends_by_itself():
    driver = two_ranks(slots=6, num_ranks=3)
    rank = driver.engine.state.ranks[1]
    assert ask(driver, ev.DrainAsked, rank=1).code == "ok"
    assert ask(driver, ev.DrainAsked, rank=1, cause=ev.DrainCause.NODE).code == "ok"
    ended = ask(driver, ev.UndrainAsked, rank=1, cause=ev.DrainCause.NODE)
    assert (ended.code, rank.drained_by) == ("ok", (ev.DrainCause.OPERATOR,))
    assert "an operator" in ended.message
    driver.close_window(HOT)
    assert driver.keys()[1] == []
    assert ask(driver, ev.UndrainAsked, rank=1, cause=ev.DrainCause.NODE).code == "refused"
    assert ask(driver, ev.UndrainAsked, rank=1).code == "ok"
    assert not rank.draining


def test_an_operator_cannot_end_the_drain_of_a_node():
    driver = two_ranks(slots=6, num_ranks=3)
    ask(driver, ev.DrainAsked, rank=1, cause=ev.DrainCause.NODE)
    answer = ask(driver, ev.UndrainAsked, rank=1)
    assert answer.code == "refused"
    assert "node" in answer.message
    assert driver.engine.state.ranks[1].draining


def test_a_second_cause_does_not_cancel_the_plan_that_empties_the_rank():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(CopyExpert)
    ask(driver, ev.DrainAsked, rank=1)
    run = driver.engine.state.run
    assert run is not None
    ask(driver, ev.DrainAsked, rank=1, cause=ev.DrainCause.NODE)
    ask(driver, ev.DrainAsked, rank=1)
    assert driver.engine.state.run.state == "running"
    driver.let_go()
    assert driver.keys()[1] == []


def test_a_rank_that_is_lost_with_its_draining_node_is_replaced():
    driver = two_ranks(slots=6, num_ranks=3)
    ask(driver, ev.DrainAsked, rank=2, cause=ev.DrainCause.NODE)
    effects = driver.lose(2)
    assert "ReplaceRank" in {type(c).__name__ for c in effects.commands}
    assert not driver.engine.state.ranks[2].draining


# -- plans to look at and to apply ---------------------------------------------------------------


def test_a_plan_is_shown_and_moves_nothing_until_it_is_applied():
    driver = two_ranks()
    driver.engine.state.paused = True
    driver.close_window(HOT)
    tables = len(driver.tables)
    shown = ask(driver, ev.PlanAsked)
    assert shown.code == "ok"
    assert shown.plan.moves
    assert len(driver.tables) == tables
    assert shown.plan_id.startswith(f"{driver.table.epoch}-")
    applied = ask(driver, ev.ApplyAsked, plan_id=shown.plan_id)
    assert (applied.code, applied.plan_id) == ("ok", shown.plan_id)
    assert len(driver.table.replicas(0, 0)) == 2
    assert [r.plan_id for r in driver.records if r.rule == "plan_done"][-1] == shown.plan_id
    again = ask(driver, ev.ApplyAsked, plan_id=shown.plan_id)
    assert again.code == "refused"
    assert again.message == "it was applied already; compute the plan again"


def test_a_plan_that_a_snapshot_was_taken_of_is_known_to_have_been_applied():
    """In a snapshot the plan that is to start is a copy of the one that is kept."""
    driver = two_ranks()
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    driver.close_window(HOT)
    shown = ask(driver, ev.PlanAsked)
    state = driver.engine.state
    state.apply_next = msgspec.structs.replace(state.stored[0])
    driver.close_window(HOT)
    assert len(driver.table.replicas(0, 0)) == 2
    again = ask(driver, ev.ApplyAsked, plan_id=shown.plan_id)
    assert again.message == "it was applied already; compute the plan again"


def test_only_what_the_plan_touches_must_be_unchanged():
    spec = make_spec(num_layers=2)
    driver = EngineDriver(
        spec,
        make_topology([8, 8], ranks_per_node=1),
        RebalanceConfig(cooldown_s=0.0, first_policy="incremental", floor=1),
        routers=["r0"],
    )
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    driver.close_window(HOT)
    first = ask(driver, ev.PlanAsked, max_moves=1)
    driver.close_window({0: 100.0, 4: 5000.0, 5: 4000.0})
    driver.close_window({0: 100.0, 4: 5000.0, 5: 4000.0})
    second = ask(driver, ev.PlanAsked, max_moves=1)
    touched = [{(s.slot, s.layer, s.expert) for s in a.plan.steps} for a in (first, second)]
    assert ask(driver, ev.ApplyAsked, plan_id=second.plan_id).code == "ok"
    clash = bool({s for s, _, _ in touched[0]} & {s for s, _, _ in touched[1]})
    answer = ask(driver, ev.ApplyAsked, plan_id=first.plan_id)
    assert answer.code == ("refused" if clash else "ok")


def test_plans_that_do_not_exist_and_policies_that_do_not_exist():
    driver = two_ranks()
    driver.close_window()
    assert ask(driver, ev.ApplyAsked, plan_id="7-deadbeef").code == "not_found"
    answer = ask(driver, ev.PlanAsked, policy="oracle")
    assert answer.code == "failed"
    assert "oracle" in answer.message
    assert "target_failed" in driver.rules("refused")


def test_too_many_plans_at_once_are_busy_and_each_is_answered():
    driver = two_ranks()
    driver.close_window()
    driver.hold.add(ComputeTarget)
    for number in range(10):
        driver.feed(ev.PlanAsked(at_s=0.0, request_id=number))
    assert {n: a.code for n, a in driver.answers.items()} == {9: "busy"}
    for _ in range(12):
        driver.let_go()
        driver.hold.add(ComputeTarget)
    assert sorted(driver.answers) == list(range(10))


def test_a_plan_is_refused_before_anything_is_served():
    driver = EngineDriver(make_spec(), make_topology([4, 4]), join=False)
    assert ask(driver, ev.PlanAsked).code == "refused"


def test_an_applied_plan_waits_for_the_running_one_and_only_one_may_wait():
    driver = two_ranks()
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    driver.close_window(HOT)
    shown = ask(driver, ev.PlanAsked)
    driver.feed(ev.ResumeAsked(at_s=0.0, request_id=2))
    driver.hold |= {CopyExpert, AbortAdd}
    driver.close_window(HOT)
    assert driver.engine.state.run.cause == "auto"
    assert ask(driver, ev.ApplyAsked, plan_id=shown.plan_id).code == "ok"
    again = ask(driver, ev.ApplyAsked, plan_id=shown.plan_id)
    assert (again.code, "starts next" in again.message) == ("busy", True)
    driver.let_go(AbortAdd)
    assert driver.engine.state.run.plan_id == shown.plan_id
    again = ask(driver, ev.ApplyAsked, plan_id=shown.plan_id)
    assert (again.code, "is running" in again.message) == ("busy", True)
    driver.held.pop(0)
    driver.let_go()
    assert driver.engine.state.run is None
    driver.check_agreement()


# -- the trigger ---------------------------------------------------------------------------------


def test_paused_means_no_automatic_plan_but_repairs_go_on():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1, reason="maintenance"))
    driver.close_window(HOT)
    assert "paused" in driver.rules("kept")
    driver.lose(0)
    assert driver.table.missing() == ()
    driver.feed(ev.ResumeAsked(at_s=0.0, request_id=2))
    driver.close_window(HOT)
    assert "regret_reached" in driver.rules("started")


def test_every_window_leaves_a_record_of_why_nothing_moved():
    driver = two_ranks(cooldown_s=5.0)
    driver.close_window(base=0.0)
    assert driver.rules()[-1] == "no_load"
    driver.close_window()
    assert driver.rules()[-1] == "in_balance"
    driver.hold.add(ComputeTarget)
    driver.close_window({2: 90_000.0})
    driver.close_window({2: 90_000.0})
    assert driver.rules()[-1] == "target_outstanding"


FEW = {0: 20.0}
"""Too little load for a layer out of balance to lose what its moves cost."""


def test_a_layer_cools_down_after_a_plan():
    driver = two_ranks(num_ranks=4, cooldown_s=5.0, max_moves=1)
    driver.close_window(HOT)
    assert "regret_reached" in driver.rules("started")
    for _ in range(2):
        driver.close_window(FEW, base=0.0)
        assert driver.rules()[-1] == "cooldown"
        assert driver.records[-1].numbers["layers_resting"] == 1.0
    driver.close_window(FEW, base=0.0)
    assert driver.rules().count("out_of_balance") == 2


def test_a_cool_down_ends_once_it_has_cost_as_much_as_the_moves():
    driver = two_ranks(num_ranks=4, cooldown_s=100.0, max_moves=1)
    driver.close_window(HOT)
    driver.close_window(FEW, base=0.0)
    assert driver.rules().count("out_of_balance") == 1
    driver.close_window(HOT)
    assert driver.rules().count("out_of_balance") == 2


def test_a_shift_is_named_and_ends_the_rest_of_a_layer():
    driver = two_ranks(num_ranks=4, cooldown_s=100.0, max_moves=1)
    driver.close_window(HOT)
    driver.close_window(FEW, base=0.0)
    assert driver.rules()[-1] == "cooldown"
    driver.close_window({3: 20.0}, base=0.0)
    driver.close_window({3: 20.0}, base=0.0)
    started = [r for r in driver.records if r.outcome == "started" and "shift_phase" in r.numbers]
    assert started
    assert "prefill shifted in 1 of 1 layers in window 2" in started[0].detail
    assert started[0].numbers["shift_distance"] > started[0].numbers["shift_usual_distance"]


def test_a_window_during_a_plan_or_before_the_first_table_decides_nothing():
    driver = two_ranks()
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    driver.close_window(HOT)
    assert driver.rules()[-1] == "plan_running"
    fresh = EngineDriver(make_spec(), make_topology([4, 4]), join=False)
    fresh.close_window(HOT)
    assert fresh.rules()[-1] == "not_ready"


def test_regret_must_reach_the_cost_of_the_copies():
    spec = make_spec(expert_bytes=40_000, slot_bytes=40_000)
    driver = EngineDriver(
        spec,
        make_topology([4, 4], ranks_per_node=1),
        RebalanceConfig(cooldown_s=0.0, first_policy="incremental", balance_enough=0.9, floor=1),
        routers=["r0"],
    )
    seen = []
    for _ in range(12):
        driver.close_window({0: 1200.0}, base=400.0)
        seen.append(driver.rules()[-1])
        if "regret_reached" in driver.rules("started"):
            break
    waited = [r for r in driver.records if r.rule == "regret_below_cost"]
    assert waited
    assert waited[0].numbers["regret_s"] < waited[0].numbers["cost_s"]
    assert "regret_reached" in driver.rules("started")


def test_a_plan_that_never_pays_is_not_started():
    driver = two_ranks(plan_life_s=1e-6)
    driver.close_window(HOT)
    assert "gain_below_cost" in driver.rules("kept")
    assert len(driver.tables) == 1


def test_a_target_from_an_older_layout_is_dropped():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(ComputeTarget)
    driver.close_window(HOT)
    (command,) = driver.held
    answer = compute_target(command, driver.config)
    driver.lose(2)
    driver.feed(answer)
    assert "target_stale" in driver.rules("kept")
    driver.feed(answer)
    assert driver.rules()[-1] == "target_stale"
    driver.feed(ev.TargetFailed(at_s=0.0, request_id=999, reason="late"))
    assert driver.rules()[-1] == "target_stale"


def test_an_operators_plan_from_an_older_layout_is_computed_again():
    driver = two_ranks(slots=6, num_ranks=3)
    driver.close_window()
    driver.hold.add(ComputeTarget)
    driver.feed(ev.PlanAsked(at_s=0.0, request_id=5, policy="eplb"))
    (command,) = driver.held
    driver.held.clear()
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=6, rank=0, budget_bytes=7000))
    driver.feed(compute_target(command, driver.config))
    assert 5 not in driver.answers
    driver.let_go()
    assert driver.answers[5].code == "ok"
    assert {c.policy for c in targets(driver)[-1:]} == {"eplb"}


def test_a_target_that_does_not_come_is_given_up_and_asked_for_again():
    driver = two_ranks(slots=6, num_ranks=3, target_timeout_s=3.0)
    driver.hold.add(ComputeTarget)
    driver.lose(1)
    assert len(driver.held) == 1
    driver.wait(3.1)
    assert "target_failed" in driver.rules("refused")
    driver.wait(5.1)
    assert len(driver.held) == 2
    driver.held.pop(0)
    driver.let_go()
    assert driver.table.missing() == ()


def test_a_rank_that_is_lost_while_it_shrinks_needs_no_plan_to_shrink():
    driver = two_ranks(slots=6)
    driver.hold.add(ComputeTarget)
    ask(driver, ev.BudgetAsked, rank=1, budget_bytes=2000)
    driver.hold.discard(ComputeTarget)
    driver.held.clear()
    before = len(driver.commands)
    driver.lose(1)
    assert driver.engine.state.ranks[1].wanted_slots == 2
    driver.wait(20.0)
    asked = [c.cause for c in driver.commands[before:] if isinstance(c, ComputeTarget)]
    assert asked == ["repair"]
    driver.join(1, incarnation=2)
    driver.wait(10.0)
    assert driver.engine.state.ranks[1].num_slots == 2
    assert driver.table.missing() == ()


def test_a_repair_that_finds_no_room_waits_for_the_replacement():
    driver = two_ranks(slots=3)
    driver.lose(0)
    assert "target_failed" in driver.rules("refused")
    assert len(driver.table.missing()) == 1, "the staging slot has taken one of two"
    driver.join(0, incarnation=2)
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_a_window_of_another_shape_is_refused():
    driver = two_ranks()
    driver.close_window()
    window = driver.engine.state.history.windows[-1]
    wrong = msgspec.structs.replace(window, demand=window.demand[:, :, :, :2])
    driver.feed(ev.WindowClosed(at_s=0.0, window=wrong))
    assert "window_refused" in driver.rules("refused")


def test_a_failed_target_says_what_is_short():
    spec, topology = make_spec(), make_topology([2, 2])
    request = make_request(spec, topology, make_layout([[-1, -1], [-1, -1]]))
    command = ComputeTarget(
        request_id=3,
        layout_revision=1,
        cause="initial",
        policy="incremental",
        input=request,
        deadline_s=1.0,
    )
    answer = compute_target(command, RebalanceConfig())
    assert isinstance(answer, ev.TargetFailed)
    assert answer.request_id == 3
    assert "slots" in answer.reason


def test_step_ignores_a_clock_that_goes_back():
    driver = two_ranks()
    driver.now_s = 50.0
    driver.feed(ev.TimerFired(at_s=0.0))
    driver.now_s = 10.0
    driver.feed(ev.TimerFired(at_s=0.0))
    assert driver.engine.state.now_s == pytest.approx(50.0)


def test_a_plan_that_waits_for_another_to_end_is_looked_at_again():
    driver = two_ranks(slots=4)
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1, reason="by hand"))
    driver.close_window(HOT)
    assert ask(driver, ev.PlanAsked, policy="", max_moves=4).code == "ok"
    state = driver.engine.state
    (stored,) = state.stored
    rank, index, key = stored.slots[0]
    state.apply_next = msgspec.structs.replace(stored, slots=[(rank, index, key + 1)])
    driver.wait(1.0)
    driver.close_window()
    refused = [r for r in driver.records if (r.rule, r.outcome) == ("asked", "refused")]
    assert "changed since the plan was computed" in refused[-1].detail
    assert state.run is None
    assert state.apply_next is None
