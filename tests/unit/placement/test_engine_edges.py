"""Moments that ordinary runs seldom reach: crafted plans, answers out of order, ranks that come and
go between."""

import msgspec
import pytest

from placement.config import RebalanceConfig
from placement.messages import events as ev
from placement.messages.codec import encode
from placement.messages.effects import (
    AbortAdd,
    ComputeTarget,
    CopyExpert,
    PublishTable,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    VerifyExpert,
    WakeAt,
)
from placement.migration import AddState, RemoveState
from placement.planner import StepKind, WaveConfig, make_plan
from placement.planner.plan import PlannedStep
from placement.roles.shard import ShardSlots, SlotPhase
from tests.builders import make_layout, make_request, make_spec, make_topology
from tests.engine_driver import EngineDriver, restart, two_ranks

HOT = {0: 5000.0}


def sent(driver, kind):
    return [c for c in driver.commands if isinstance(c, kind)]


def ask(driver, kind, **fields):
    request_id = len(driver.answers)
    driver.feed(kind(at_s=0.0, request_id=request_id, **fields))
    return driver.answers.get(request_id)


def hosts_by_expert(driver):
    return [{rank for rank, _, _ in driver.table.replicas(0, expert)} for expert in range(4)]


def record(driver, rule):
    return [r for r in driver.records if r.rule == rule]


def filled(rows, *, slots=3, **fields):
    """A driver whose ranks hold these rows already, of four experts of one layer."""
    topology = make_topology([slots] * len(rows), ranks_per_node=1)
    config = RebalanceConfig(**{"cooldown_s": 0.0, "floor": 1, **fields})
    driver = EngineDriver(make_spec(), topology, config, routers=["r0"], join=False)
    for rank, row in enumerate(rows):
        driver.join(rank, shard=holding(rank, row, slots))
    assert driver.table.missing() == ()
    assert driver.keys() == [sorted(row) for row in rows]
    return driver


def holding(rank, experts, num_slots, *, layer=0):
    shard = ShardSlots(
        rank=rank, incarnation=1, num_slots=num_slots, slot_bytes=1000, weights_version="v1"
    )
    for slot, expert in enumerate(experts):
        who = {"step_id": -1 - slot, "rank": rank, "incarnation": 1, "slot": slot}
        reserved = shard.reserve(
            ReserveSlot(**who, layer=layer, expert=expert, weights_version="v1")
        )
        tag = reserved.slot_tag
        shard.ledger.slots[slot].phase = SlotPhase.VERIFIED
        shard.ledger.tags[slot] = tag
    return shard


def answer_target(driver, plan, **changes):
    """Answer the outstanding target with this plan instead of what was computed."""
    state = driver.engine.state
    event = ev.TargetComputed(
        at_s=0.0,
        request_id=state.outstanding.request_id,
        layout_revision=state.revision,
        slots=driver.engine.layout().slots,
        plan=plan,
    )
    return driver.feed(msgspec.structs.replace(event, **changes))


def plan_to(driver, rows, *, staging_slots=1, **changes):
    """The planner's way from what is listed to these rows, as if it gained much."""
    live = driver.engine.layout()
    request = make_request(driver.spec, driver.engine.topology(), live, staging_slots=staging_slots)
    plan = make_plan(live, make_layout(rows), request, WaveConfig())
    layers = tuple(msgspec.structs.replace(f, gain_s_per_s=1e3) for f in plan.layers)
    return msgspec.structs.replace(plan, **{"gain_s_per_s": 1e3, "layers": layers, **changes})


def run_plan(driver, rows, **fields):
    driver.hold.add(ComputeTarget)
    driver.close_window({0: 5000.0, 1: 0.0})
    driver.hold.discard(ComputeTarget)
    driver.held.clear()
    return answer_target(driver, plan_to(driver, rows, **fields))


# -- plans ---------------------------------------------------------------------------------------


def test_a_migration_whose_copy_fails_keeps_the_replica_and_what_waited_for_its_slot_never_begins():
    driver = filled([[0, 1], [2, 3]])
    driver.hold.add(CopyExpert)
    run_plan(driver, [[2, 3, -1], [0, 1, -1]])
    waves = {s.step.wave for s in driver.engine.state.run.steps.values()}
    assert len(waves) > 1
    for command in list(driver.held):
        driver.feed(ev.StepFailed(at_s=0.0, step_id=command.step_id, code="digest", detail="wrong"))
    assert driver.engine.state.run is None
    assert driver.keys() == [[0, 1], [2, 3]]
    assert len(driver.tables) == 1
    driver.check_agreement()
    reasons = " ".join(r.detail for r in driver.records if r.outcome == "aborted")
    assert "digest: wrong" in reasons


def test_an_add_never_begins_once_the_slot_it_waited_for_is_kept():
    """One of two migrations fails: its removal is cancelled, so the add that waited for that slot
    is too; the other half of the plan goes on."""
    driver = filled([[0, 1], [2, 3]])
    driver.hold.add(CopyExpert)
    run_plan(driver, [[2, 3, -1], [0, 1, -1]])
    first = driver.held[0]
    driver.feed(ev.StepFailed(at_s=0.0, step_id=first.step_id, code="io", detail="disk"))
    driver.held.remove(first)
    driver.let_go(CopyExpert)
    assert driver.engine.state.run is None
    driver.wait(12.0)
    driver.check_agreement()
    assert driver.table.missing() == ()
    cancelled = [t for t in driver.transitions if t.before == "planned" and t.after == "aborted"]
    assert cancelled


def test_a_removal_that_waits_goes_on_waiting_when_its_rank_tells_what_it_holds():
    driver = filled([[0, 1], [2, 3]])
    driver.hold.add(CopyExpert)
    run_plan(driver, [[2, 3, -1], [0, 1, -1]])
    steps = driver.engine.state.run.steps
    waits = [i for i, s in steps.items() if s.step.kind is StepKind.REMOVE and s.state == "planned"]
    ranks = {steps[i].step.slot.rank for i in waits}
    assert ranks == {0, 1}
    for rank in ranks:
        driver.join(rank, shard=driver.shards[rank])
    assert [steps[i].state for i in waits] == ["planned"] * len(waits)
    assert driver.keys() == [[0, 1], [2, 3]], "it serves until its successor does"
    driver.let_go(CopyExpert)
    driver.wait(12.0)
    assert driver.engine.state.run is None
    assert driver.keys() == [[2, 3], [0, 1]]
    driver.check_agreement()


def test_a_rank_that_has_not_spoken_since_a_restart_is_not_removed_yet():
    driver = filled([[0, 1], [2, 3], [0, 1]])
    restart(driver, driver.engine.snapshot(), [], silent=(2,))
    answer = ask(driver, ev.RankRemoveAsked, rank=2, accept_lower_floor=True)
    assert answer.code != "ok"
    assert driver.engine.state.ranks[2].drained_by == ()


def test_a_shard_that_is_being_replaced_is_not_to_be_replaced_a_second_time():
    driver = filled([[0, 1], [2, 3], [0, 1]])
    driver.hold.add(ReleaseSlot)
    for _ in range(2):
        answer = ask(driver, ev.RankReplaceAsked, rank=2, accept_lower_floor=True)
        assert answer.code == "ok"
        assert driver.engine.state.ranks[2].drained_by == (ev.DrainCause.REPLACE,)
    noted = [r for r in driver.records if r.rule == "rank_replaced"]
    assert len(noted) == 1


def test_what_no_order_allows_is_recorded():
    driver = filled([[0, 1], [2, 3]], slots=2, staging_slots=0)
    run_plan(driver, [[2, 1], [0, 3]], staging_slots=0)
    assert "have no empty slot" in record(driver, "move_refused")[0].detail


def test_a_forced_cause_whose_target_moves_nothing_waits_before_it_asks_again():
    driver = two_ranks(slots=4)
    driver.hold.add(ComputeTarget)
    ask(driver, ev.BudgetAsked, rank=0, budget_bytes=2000)
    assert driver.engine.state.outstanding.cause == "budget"
    before = len(sent(driver, ComputeTarget))
    answer_target(driver, plan_to(driver, [row for row in driver.engine.layout().slots.tolist()]))
    (kept,) = [r for r in record(driver, "budget") if r.outcome == "kept"]
    assert kept.detail == "no move was found: none fits"
    assert len(sent(driver, ComputeTarget)) == before
    driver.wait(5.1)
    assert len(sent(driver, ComputeTarget)) == before + 1


def test_a_plan_made_for_other_slots_is_a_bug_and_raises():
    driver = two_ranks(slots=4)
    driver.hold.add(ComputeTarget)
    driver.close_window(HOT)
    step = PlannedStep(
        step_id=0, kind=StepKind.REMOVE, move_id=0, slot=(1, 99), layer=0, expert=0, wave=0
    )
    plan = plan_to(driver, driver.engine.layout().slots.tolist(), steps=(step,))
    with pytest.raises(AssertionError, match="does not belong to this layout"):
        answer_target(driver, plan)


def test_an_applied_plan_is_refused_when_a_host_of_its_expert_is_gone():
    driver = filled([[0, 1], [2, 3], [0, 2]], slots=4)
    driver.close_window()
    driver.hold.add(ComputeTarget)
    ask(driver, ev.PlanAsked)
    answer_target(driver, plan_to(driver, [[0, 1, -1, -1], [2, 3, 0, -1], [0, 2, -1, -1]]))
    plan_id = driver.engine.state.stored[-1].plan_id
    driver.lose(2)  # touches no slot of the plan, but expert 0 has another set of hosts now
    refused = ask(driver, ev.ApplyAsked, plan_id=plan_id)
    assert refused.code == "refused"
    assert "layer 0 expert 0 changed" in refused.message


def test_an_applied_plan_that_waits_is_refused_when_its_rank_comes_back_empty_meanwhile():
    """It was as computed when it was applied; until the plan before it had given its slot back, the
    rank it would take an expert from had died and come again with nothing in its slots."""
    driver = filled([[0, 1], [2, 3], [0, 2]], slots=4)
    driver.close_window()
    driver.hold.add(ComputeTarget)
    ask(driver, ev.PlanAsked)
    answer_target(driver, plan_to(driver, [[0, 1, -1, -1], [2, 3, -1, -1], [2, -1, -1, -1]]))
    plan_id = driver.engine.state.stored[-1].plan_id
    driver.hold |= {CopyExpert, AbortAdd}
    run_plan(driver, [[0, 1, 3, -1], [2, 3, -1, -1], [0, 2, -1, -1]])
    driver.hold.add(ComputeTarget)
    assert ask(driver, ev.ApplyAsked, plan_id=plan_id).code == "ok"
    assert driver.engine.state.run is not None, "the copy that was called off still runs"
    driver.lose(2)
    driver.join(2, incarnation=2)
    driver.let_go(CopyExpert, AbortAdd)
    (refused,) = [r for r in record(driver, "asked") if r.outcome == "refused"]
    assert refused.detail == f"plan {plan_id}: rank 2 slot 0 changed since the plan was computed"
    assert driver.keys() == [[0, 1], [2, 3], []]
    driver.check_agreement()


def test_a_move_within_a_shrinking_rank_that_is_called_off_gives_its_slot_back():
    """Expert 2 is copied to a low slot of its rank and proved; before the table that would take the
    high one away, another request ends the plan. The rank may not list it twice, so the copy goes,
    and no table after the other is published for it."""
    driver = filled([[0, 1, 2, 3], [0, 1]], slots=6)
    driver.hold.add(CopyExpert)
    ask(driver, ev.BudgetAsked, rank=0, budget_bytes=2000)
    within = next(c for c in driver.held if c.rank == 0)
    assert any(c.rank == 1 for c in driver.held)
    for event in driver.run_shard(within):
        driver.feed(event)
    assert driver.engine.state.run.steps[within.step_id].state == AddState.VERIFIED
    before = len(driver.tables)
    driver.held = [c for c in driver.held if c is not within]
    ask(driver, ev.BudgetAsked, rank=1, budget_bytes=5000)
    assert len(driver.tables) <= before + 1
    aborted = [t for t in driver.transitions if t.step_id == within.step_id][-1]
    assert aborted.after == AddState.ABORTED
    driver.let_go()
    driver.wait(20.0)
    assert [r.num_slots for r in driver.engine.state.ranks] == [2, 5]
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_a_budget_that_waits_for_a_plan_to_end_asks_for_no_time_that_is_over():
    """The wish is told to the shard again after a while, but not while a plan runs: then the end of
    the plan is waited for, not the clock."""
    driver = two_ranks(slots=4)
    driver.hold |= {CopyExpert, SetRankSlots, AbortAdd}
    driver.close_window(HOT)
    other = 1 - driver.held[0].rank
    ask(driver, ev.BudgetAsked, rank=other, budget_bytes=5000)
    assert driver.engine.state.run is not None
    driver.now_s += 6.0
    (wake,) = [c for c in driver.feed(ev.TimerFired(at_s=0.0)).commands if isinstance(c, WakeAt)]
    assert wake.at_s > driver.now_s
    driver.let_go()
    driver.wait(6.0)
    assert driver.engine.state.run is None
    assert driver.engine.state.ranks[other].num_slots == 5
    driver.check_agreement()


# -- answers out of order ------------------------------------------------------------------------


def test_answers_that_overtake_each_other_mean_nothing_until_their_turn():
    driver = two_ranks(slots=4)
    driver.hold.add(ReserveSlot)
    driver.close_window(HOT)
    step_id = driver.held[0].step_id
    copied = ev.ExpertCopied(at_s=0.0, step_id=step_id, copy_bytes=1000, seconds=0.1)
    assert driver.feed(copied).transitions == ()
    assert driver.engine.state.run.copied_bytes == 0
    driver.hold.add(VerifyExpert)
    driver.let_go(ReserveSlot)
    tag = driver.engine.state.run.steps[step_id].tag
    driver.feed(ev.SlotReserved(at_s=0.0, step_id=step_id, slot_tag=tag + 5))
    assert driver.engine.state.run.steps[step_id].tag == tag
    driver.let_go()
    driver.check_agreement()


def test_an_answer_to_an_add_that_waits_for_the_first_table_comes_twice():
    """Rank 1 dies in the middle of the first fill: what rank 0 has proved waits for the table."""
    driver = EngineDriver(
        make_spec(), make_topology([5, 5], ranks_per_node=1), routers=["r0"], join=False
    )
    driver.hold.add(CopyExpert)
    driver.join(0)
    driver.join(1)
    mine = [c for c in driver.held if c.rank == 0]
    assert mine
    driver.held = [c for c in driver.held if c.rank != 0]
    for command in mine:
        for event in driver.run_shard(command):
            driver.feed(event)
    driver.hold.add(ComputeTarget)
    driver.lose(1)
    assert driver.engine.state.run is None
    assert driver.tables == []
    parked = driver.engine.state.parked
    assert set(parked) == {c.step_id for c in mine}
    again = ev.ExpertVerified(at_s=0.0, step_id=mine[0].step_id)
    assert driver.feed(again).transitions == ()
    driver.hold.clear()
    driver.join(1, incarnation=2)
    driver.let_go(ComputeTarget)
    driver.wait(40.0)
    assert driver.engine.state.parked == {}
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_an_add_whose_slot_was_taken_while_it_waited_never_begins():
    """Two adds on rank 0, one at a time. Before the second begins the rank tells of an expert in
    its slot that nobody here had put there: what is resident wins, and only that add is called
    off."""
    driver = filled([[0, 1], [2, 3]], slots=6, wave_adds_per_rank=1)
    driver.hold.add(CopyExpert)
    run_plan(driver, [[0, 1, 2, 3, -1, -1], [2, 3, -1, -1, -1, -1]])
    (waiting,) = driver.engine.state.run.waiting[0]
    step = driver.engine.state.run.steps[waiting].step
    shard = driver.shards[0]
    who = {"step_id": -9, "rank": 0, "incarnation": 1, "slot": step.slot.index}
    taken = shard.reserve(
        ReserveSlot(**who, layer=0, expert=step.expert, weights_version="v1")
    ).slot_tag
    shard.ledger.slots[step.slot.index].phase = SlotPhase.VERIFIED
    shard.ledger.tags[step.slot.index] = taken
    driver.join(0, shard=shard)
    assert driver.engine.state.run.steps[waiting].state == AddState.PLANNED
    driver.let_go()
    driver.wait(12.0)
    assert driver.engine.state.run is None
    ended = [t for t in driver.transitions if t.step_id == waiting]
    assert [(t.before, t.after) for t in ended] == [(AddState.PLANNED, AddState.ABORTED)]
    assert (0, step.slot.index, taken) in driver.table.replicas(0, step.expert)
    assert driver.keys() == [[0, 1, 2, 3], [2, 3]]
    driver.check_agreement()


def test_a_removal_that_has_not_begun_is_left_alone_when_its_rank_speaks_again():
    driver = filled([[0, 1, 2], [2, 3]], slots=4)
    driver.hold.add(CopyExpert)
    run_plan(driver, [[0, 1, 3, -1], [2, 3, -1, -1]])
    removal = next(
        s for s in driver.engine.state.run.steps.values() if s.step.kind is StepKind.REMOVE
    )
    assert (removal.step.slot.rank, removal.state) == (0, RemoveState.PLANNED)
    before = len(driver.transitions)
    driver.join(0, shard=driver.shards[0])
    assert not [t for t in driver.transitions[before:] if t.step_id == removal.step.step_id]
    driver.let_go()
    driver.wait(12.0)
    assert driver.keys() == [[0, 1, 3], [2, 3]]
    driver.check_agreement()


def test_a_step_that_waited_for_the_first_table_when_the_snapshot_was_taken_is_found_again():
    """The snapshot holds it verified and parked; the journal says that it was listed since. Were it
    taken for a new plan's step, it would be done twice."""
    driver = EngineDriver(
        make_spec(), make_topology([5, 5], ranks_per_node=1), routers=["r0"], join=False
    )
    driver.hold.add(CopyExpert)
    driver.join(0)
    driver.join(1)
    mine = [c for c in driver.held if c.rank == 0]
    driver.held = [c for c in driver.held if c.rank != 0]
    for command in mine:
        for event in driver.run_shard(command):
            driver.feed(event)
    driver.hold.add(ComputeTarget)
    driver.lose(1)
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    parked = set(snapshot.state.parked)
    assert parked == {c.step_id for c in mine}
    driver.hold.clear()
    driver.join(1, incarnation=2)
    driver.let_go(ComputeTarget)
    since = driver.transitions[start:]
    listed = {t.step_id for t in since if t.after == AddState.LISTED}
    assert parked <= listed
    keys = driver.keys()
    before = restart(driver, snapshot, since)
    assert driver.engine.state.parked == {}
    driver.wait(40.0)
    assert len(driver.tables) > before
    assert driver.keys() == keys
    driver.check_agreement()


def test_a_source_lends_no_more_copies_at_once_than_it_may():
    driver = filled([[0, 1], [2, 3]], slots=6, wave_copies_from_rank=1)
    driver.hold.add(CopyExpert)
    run_plan(driver, [[0, 1, -1, -1, -1, -1], [2, 3, 0, 1, -1, -1]])
    (first,) = driver.held
    assert first.source.rank == 0
    assert sum(map(len, driver.engine.state.run.waiting.values())) == 1
    driver.held.clear()
    for event in driver.run_shard(first):
        driver.feed(event)
    (second,) = driver.held
    assert second.source.rank == 0
    driver.let_go()
    driver.wait(12.0)
    assert driver.keys() == [[0, 1], [0, 1, 2, 3]]
    driver.check_agreement()


def test_a_release_whose_answer_is_due_is_asked_for_again_when_the_rank_speaks():
    driver = filled([[0, 1, 2], [2, 3]], slots=4)
    driver.hold.add(ReleaseSlot)
    run_plan(driver, [[0, 1, -1, -1], [2, 3, -1, -1]])
    assert driver.step_states() == [RemoveState.DRAINED]
    (first,) = driver.held
    driver.join(0, shard=driver.shards[0])
    again = driver.held[1:]
    assert list(map(encode, again)) == [encode(first)], "the same command: it may come twice"
    driver.let_go()
    assert driver.engine.state.run is None
    assert driver.keys() == [[0, 1], [2, 3]]
    driver.check_agreement()


def test_the_loss_of_another_rank_does_not_call_a_removal_back():
    driver = filled([[0, 1, 2], [2, 3], [0, 1]], slots=4, router_silence_s=60.0)
    driver.silent_routers.add("r0")
    run_plan(driver, [[0, 1, -1, -1], [2, 3, -1, -1], [0, 1, -1, -1]])
    assert driver.step_states() == [RemoveState.UNLISTED]
    driver.lose(2)
    assert driver.step_states() == [RemoveState.UNLISTED]
    driver.silent_routers.clear()
    epoch = driver.table.epoch
    driver.feed(ev.TableApplied(at_s=0.0, router="r0", epoch=epoch))
    driver.feed(ev.TableQuiesced(at_s=0.0, router="r0", epoch=epoch))
    assert driver.engine.state.run is None
    assert driver.keys() == [[0, 1], [2, 3], []]
    driver.check_agreement()


def test_a_plan_of_a_layer_forgets_the_target_that_was_kept_for_it():
    """Moves that are too dear wait for regret; meanwhile an operator has the layer moved. What was
    kept was made for the layout before that."""
    spec = make_spec(num_layers=2, expert_bytes=40_000, slot_bytes=40_000)
    driver = EngineDriver(
        spec,
        make_topology([7, 7], ranks_per_node=1),
        RebalanceConfig(cooldown_s=0.0, first_policy="incremental", balance_enough=0.9, floor=1),
        routers=["r0"],
    )
    hot = {0: 1200.0, 4: 1200.0}
    driver.close_window(hot, base=400.0)
    kept = driver.engine.state.candidate
    assert kept is not None
    assert kept.layers == (0, 1)
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    driver.feed(ev.PlanAsked(at_s=0.0, request_id=2, max_moves=1))
    (move,) = driver.answers[2].plan.moves
    driver.feed(ev.ApplyAsked(at_s=0.0, request_id=3, plan_id=driver.answers[2].plan_id))
    assert driver.engine.state.run is None
    assert driver.engine.state.candidate.layers == (1 - move.layer,)


def test_of_a_plan_only_the_layers_that_pay_are_moved():
    """Both layers are out of balance; a copy pays in one of them only."""
    spec = make_spec(num_layers=2, expert_bytes=40_000, slot_bytes=40_000)
    driver = EngineDriver(
        spec,
        make_topology([7, 7], ranks_per_node=1),
        RebalanceConfig(cooldown_s=0.0, first_policy="incremental", balance_enough=0.9, floor=1),
        routers=["r0"],
    )
    driver.close_window({0: 400_000.0, 4: 1200.0}, base=400.0)
    started = record(driver, "regret_reached")[-1]
    assert (started.outcome, started.numbers["layers_started"]) == ("started", 1.0)
    assert started.numbers["layers_refused"] == 1.0
    assert "layer 1 not moved" in started.detail
    assert len(driver.table.replicas(0, 0)) == 2
    assert len(driver.table.replicas(1, 0)) == 1
    driver.check_agreement()


# -- ranks and routers ---------------------------------------------------------------------------


def test_a_router_nobody_knows_may_leave_and_a_rank_nobody_knows_may_be_suspected():
    driver = two_ranks()
    before = driver.engine.snapshot().state
    driver.feed(ev.RouterLeft(at_s=0.0, router="stranger", reason="silent", gone=False))
    for event in (
        ev.RankSuspected(at_s=0.0, rank=9, reason="disconnected"),
        ev.RankCleared(at_s=0.0, rank=9),
        ev.RankCleared(at_s=0.0, rank=0),
    ):
        effects = driver.feed(event)
        assert effects.records == ()
    state = driver.engine.state
    assert (state.routers, state.ranks) == (before.routers, before.ranks)
    assert driver.engine.config is driver.config


def test_a_rank_is_suspected_once_however_often_that_is_said():
    driver = two_ranks(slots=6, rank_silence_s=10.0)
    suspected = ev.RankSuspected(at_s=0.0, rank=1, reason="disconnected")
    driver.feed(suspected)
    driver.wait(6.0)
    assert driver.feed(suspected).records == ()
    driver.wait(4.5)
    assert len(record(driver, "rank_suspected")) == 1
    assert len(record(driver, "rank_lost")) == 1, "the time runs from the first word"
    assert driver.feed(suspected).records == (), "nobody is left to be suspected"


def test_a_size_that_a_lost_rank_still_answers_with_means_nothing():
    driver = two_ranks(slots=6)
    driver.lose(1)
    late = ev.BudgetApplied(at_s=0.0, rank=1, num_slots=3)
    before = driver.engine.snapshot().state.ranks
    effects = driver.feed(late)
    assert (effects.records, effects.commands) == ((), ())
    assert driver.engine.state.ranks == before


def test_a_rank_that_is_lost_before_it_ever_came_costs_no_table():
    driver = EngineDriver(
        make_spec(), make_topology([4, 4, 4], ranks_per_node=1), routers=["r0"], join=False
    )
    driver.join(0)
    driver.join(1)
    driver.feed(ev.RankLost(at_s=0.0, rank=2, incarnation=1, reason="never started"))
    assert len(driver.tables) == 1
    assert driver.table.missing() == ()


def test_when_only_a_rank_that_is_being_emptied_is_left_it_goes_on_serving():
    driver = filled([[0, 1, 2, 3], [0]], slots=6)
    driver.hold.add(CopyExpert)
    assert ask(driver, ev.DrainAsked, rank=0).code == "ok"
    driver.lose(1)
    driver.close_window(HOT)
    (kept,) = record(driver, "not_ready")
    assert kept.detail == "every rank that lives is being emptied"
    assert driver.table.missing() == ()


def test_the_floor_counts_only_domains_that_live():
    driver = two_ranks(slots=6, num_ranks=3, floor=2)
    assert all(len(hosts) >= 2 for hosts in hosts_by_expert(driver))
    driver.lose(1)
    assert all(hosts == {0, 2} for hosts in hosts_by_expert(driver))


def test_a_plan_during_which_a_rank_joins_has_no_gain_to_compare():
    driver = two_ranks(slots=4)
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    new = driver.topology.ranks[1]
    driver.topology = make_topology([4, 4, 4], ranks_per_node=1)
    driver.join(2)
    assert new.node != driver.topology.ranks[2].node
    driver.let_go()
    driver.close_window(HOT)
    (told,) = record(driver, "realised_gain")
    assert told.realised_gain_s_per_s == 0.0


def test_what_is_resident_but_no_expert_of_the_model_is_cleaned_away():
    driver = EngineDriver(
        make_spec(), make_topology([4, 4], ranks_per_node=1), routers=["r0"], join=False
    )
    driver.join(0, shard=holding(0, [2], 4, layer=7))
    driver.join(1)
    driver.wait(12.0)
    assert "cleanup" in driver.rules("started")
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_the_first_table_does_not_wait_for_ever_for_a_slot_that_nobody_asked_for():
    """There are more free slots than experts, yet none for the last one: the staging slot must stay
    empty, and the policy reckons with the slot of what is resident and no expert."""
    driver = EngineDriver(
        make_spec(), make_topology([3, 3], ranks_per_node=1), routers=["r0"], join=False
    )
    driver.join(0, shard=holding(0, [2], 3, layer=7))
    driver.join(1)
    driver.wait(60.0)
    assert "cleanup" in driver.rules("started")
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_a_proved_replica_that_is_gone_before_its_table_is_not_listed():
    """Two adds of a wave: one is proved and lost with its slot while the other still copies."""
    driver = filled([[0, 1], [2, 3]], slots=5)
    driver.hold.add(CopyExpert)
    run_plan(driver, [[0, 1, 2, -1, -1], [2, 3, 0, -1, -1]])
    ready = driver.held[0]
    driver.held = [c for c in driver.held if c is not ready]
    for event in driver.run_shard(ready):
        driver.feed(event)
    assert driver.engine.state.run.steps[ready.step_id].state == AddState.VERIFIED
    shard = driver.shards[ready.rank]
    driver.shards[ready.rank] = holding(ready.rank, [[0, 1], [2, 3]][ready.rank], 5)
    driver.join(ready.rank, shard=driver.shards[ready.rank])
    assert shard.ledger.holder(ready.slot)
    driver.let_go(CopyExpert)
    driver.wait(12.0)
    assert driver.engine.state.run is None
    listed = {r for r, _, _ in driver.table.replicas(0, ready.expert)}
    assert ready.rank not in listed
    driver.check_agreement()


def test_a_removal_waits_for_its_rank_to_come_back_after_a_restart():
    driver = filled([[0, 1, 2], [2, 3]], slots=4)
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    driver.silent_routers.add("r0")
    run_plan(driver, [[0, 1, -1, -1], [2, 3, -1, -1]])
    assert driver.step_states() == [RemoveState.UNLISTED]
    driver.silent_routers.clear()
    before = restart(driver, snapshot, driver.transitions[start:], silent=[0])
    driver.wait(10.0)
    assert len(driver.tables) == before
    assert driver.step_states() == [RemoveState.UNLISTED]
    driver.join(0, shard=driver.shards[0])
    driver.wait(12.0)
    assert driver.engine.state.run is None
    assert driver.keys() == [[0, 1], [2, 3]]
    driver.check_agreement()


def test_a_step_on_a_rank_that_joined_after_the_snapshot_is_found_again():
    driver = two_ranks(slots=4)
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    driver.topology = make_topology([4, 4, 4], ranks_per_node=1)
    driver.join(2)
    driver.close_window({0: 5000.0, 1: 5000.0})
    assert driver.keys()[2]
    assert any(t.rank == 2 for t in driver.transitions[start:])
    restart(driver, snapshot, driver.transitions[start:], first=[2])
    driver.wait(12.0)
    assert driver.engine.state.run is None
    assert driver.table.missing() == ()
    driver.check_agreement()


def test_the_first_layout_is_the_first_policys_only_while_nothing_is_known():
    spec, topology = make_spec(), make_topology([4, 4], ranks_per_node=1)
    blank = EngineDriver(spec, topology, RebalanceConfig(), routers=["r0"])
    assert [c.policy for c in sent(blank, ComputeTarget)] == ["static"]
    assert all(len(keys) == 3 for keys in EngineDriver.keys(blank))
    some = EngineDriver(spec, topology, RebalanceConfig(), routers=["r0"], join=False)
    some.join(0, shard=holding(0, [1], 4))
    some.join(1)
    assert [c.policy for c in sent(some, ComputeTarget)] == ["incremental"]
    unknown = EngineDriver(spec, topology, RebalanceConfig(policy="nonsense"), routers=["r0"])
    assert [c.policy for c in sent(unknown, ComputeTarget)] == ["nonsense"]
    assert "target_failed" in unknown.rules("refused")
    assert not sent(unknown, PublishTable)
