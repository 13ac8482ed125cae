"""Plans to a placement that an operator gives: what is refused and why, what is said, and that the
placement is what comes out."""

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from placement.config import RebalanceConfig
from placement.engine import compute_target
from placement.engine.admin import MAY_BE_UNDONE
from placement.engine.wanted import NAMED_MAX, REASONS_MAX, wanted_layout
from placement.messages import events as ev
from placement.messages.codec import decode_command, decode_event, encode
from placement.messages.effects import ComputeTarget
from placement.policy.base import PolicyError
from tests.builders import make_layout, make_request, make_spec, make_topology
from tests.engine_driver import EngineDriver, two_ranks

HOT = {0: 5000.0}


def ask(driver, kind, **fields):
    request_id = 1000 + len(driver.answers)
    driver.feed(kind(at_s=0.0, request_id=request_id, **fields))
    return driver.answers.get(request_id)


def held(driver):
    return tuple(map(tuple, driver.keys()))


def plan_to(driver, target):
    return ask(driver, ev.PlanAsked, target=target)


def paused(slots=4, **fields):
    driver = two_ranks(slots=slots, **fields)
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    return driver


# -- there and back ------------------------------------------------------------------------------


def test_a_plan_to_a_placement_makes_exactly_that_placement():
    driver = paused()
    target = ((0, 1, 2), (1, 3))
    shown = plan_to(driver, target)
    assert shown.code == "ok"
    assert all(m.reason.startswith("as asked for: ") for m in shown.plan.moves)
    assert held(driver) != target
    assert ask(driver, ev.ApplyAsked, plan_id=shown.plan_id).code == "ok"
    assert held(driver) == target
    driver.check_agreement()


def test_the_placement_before_a_plan_comes_back():
    driver = two_ranks(slots=4)
    before = held(driver)
    driver.close_window(HOT)
    assert held(driver) != before
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    shown = plan_to(driver, before)
    assert ask(driver, ev.ApplyAsked, plan_id=shown.plan_id).code == "ok"
    assert held(driver) == before


def test_neither_a_policy_nor_the_limits_of_moves_have_a_say():
    config = RebalanceConfig(
        cooldown_s=0.0, first_policy="incremental", floor=1, max_moves=0, max_bytes=0
    )
    driver = EngineDriver(make_spec(), make_topology([4, 4], ranks_per_node=1), config)
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    first, second = held(driver)
    shown = ask(driver, ev.PlanAsked, policy="no such policy", target=(second, first))
    assert shown.code == "ok"
    assert len(shown.plan.moves) == 4


def test_where_nothing_differs_nothing_moves():
    driver = paused()
    shown = plan_to(driver, held(driver))
    assert (shown.code, shown.message, shown.plan.moves) == ("ok", "nothing to move", ())


def test_a_plan_to_a_placement_is_refused_once_what_it_touches_has_changed():
    driver = paused(slots=5)
    shown = plan_to(driver, ((0, 1, 2, 3), (0, 1, 2, 3)))
    other = plan_to(driver, ((0, 1, 2, 3), held(driver)[1]))
    assert ask(driver, ev.ApplyAsked, plan_id=other.plan_id).code == "ok"
    late = ask(driver, ev.ApplyAsked, plan_id=shown.plan_id)
    assert late.code == "refused"
    assert "changed since the plan was computed" in late.message


def test_who_leaves_automatic_plans_on_is_told_that_they_may_undo_it():
    driver = two_ranks(slots=4)
    shown = plan_to(driver, ((0, 1, 2), (1, 3)))
    assert shown.notes == ()
    applied = ask(driver, ev.ApplyAsked, plan_id=shown.plan_id)
    assert applied.message.endswith(f"; {MAY_BE_UNDONE}")


def test_who_has_paused_them_is_not():
    driver = paused()
    shown = plan_to(driver, ((0, 1, 2), (1, 3)))
    assert shown.notes == ()
    assert ask(driver, ev.ApplyAsked, plan_id=shown.plan_id).message == "1 moves are started"


def test_a_plan_of_a_policy_says_nothing_of_that():
    driver = two_ranks(slots=4)
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    driver.close_window(HOT)
    shown = ask(driver, ev.PlanAsked)
    driver.feed(ev.ResumeAsked(at_s=0.0, request_id=2))
    assert shown.notes == ()
    assert ask(driver, ev.ApplyAsked, plan_id=shown.plan_id).message == "1 moves are started"


def test_a_target_whose_answer_came_too_late_is_asked_for_again_as_it_was():
    driver = paused()
    driver.hold.add(ComputeTarget)
    target = ((0, 1, 2), (1, 3))
    driver.feed(ev.PlanAsked(at_s=0.0, request_id=7, target=target))
    driver.engine.state.revision += 1
    driver.let_go()
    again = [c for c in driver.commands if isinstance(c, ComputeTarget)][-1]
    assert again.target == target
    driver.let_go()
    assert driver.answers[7].code == "ok"


def test_it_stands_in_the_inputs_log_and_older_ones_are_read():
    event = ev.PlanAsked(at_s=1.0, request_id=3, target=((0, 1), ()))
    assert decode_event(encode(event)).target == event.target
    older = msgspec.msgpack.encode(
        {"type": "PlanAsked", "at_s": 1.0, "request_id": 3, "policy": "", "max_moves": -1}
    )
    assert decode_event(older).target == ()
    command = make_command(((0, 1), (2, 3)))
    assert decode_command(encode(command)).target == command.target


# -- refusals ------------------------------------------------------------------------------------


def request_of(layout, topology=None, **fields):
    spec = make_spec(num_layers=layout.num_layers, num_experts=layout.num_experts)
    slots = [layout.slots.shape[1]] * layout.num_ranks
    return make_request(spec, topology or make_topology(slots, ranks_per_node=1), layout, **fields)


def one_layer(rows, num_experts=4):
    return make_layout(rows, num_experts=num_experts)


def make_command(target, **fields):
    request = request_of(one_layer([[0, 1, -1], [2, 3, -1]]), **fields)
    return ComputeTarget(
        request_id=1,
        layout_revision=1,
        cause="asked",
        policy="incremental",
        input=request,
        deadline_s=1.0,
        target=target,
    )


def refused(target, **fields):
    with pytest.raises(PolicyError) as error:
        wanted_layout(target, request_of(one_layer([[0, 1, -1], [2, 3, -1]]), **fields))
    return str(error.value)


def test_every_rank_must_be_named():
    said = refused(((0, 1, 2, 3),))
    assert "the placement is of 1 ranks, the service has 2" in said


@pytest.mark.parametrize("key", [-1, 4])
def test_a_key_must_be_one(key):
    assert refused(((0, 1), (2, 3, key))) == (
        f"rank 1: key {key} must lie in [0, 4), layers x experts"
    )


def test_a_rank_holds_an_expert_once():
    assert "rank 0: an expert is named twice" in refused(((0, 0), (1, 2, 3)))


def test_every_expert_must_be_somewhere():
    assert refused(((0,), (3,))) == (
        "2 experts would have no replica (layer 0 expert 1, layer 0 expert 2)"
    )


def test_not_every_expert_that_is_nowhere_is_named():
    request = request_of(one_layer([[*range(10), -1]], 10))
    with pytest.raises(PolicyError) as error:
        wanted_layout(((),), request)
    assert str(error.value).startswith("10 experts would have no replica (layer 0 expert 0, ")
    assert str(error.value).endswith(f"layer 0 expert {NAMED_MAX - 1} ...)")


def test_a_rank_cannot_hold_more_than_its_budget_leaves_beside_the_staging_slot():
    said = refused(((0, 1, 2), (3,)))
    assert said == (
        "rank 0 can hold 2 experts (3 slots, 1 of them kept empty for copies), and 3 experts are "
        "wanted on it: 1 slot (1000 bytes) short, raise its budget"
    )


def topology_where(**fields):
    topology = make_topology([3, 3], ranks_per_node=1)
    ranks = (topology.ranks[0], msgspec.structs.replace(topology.ranks[1], **fields))
    return msgspec.structs.replace(topology, ranks=ranks)


def test_a_rank_that_is_being_emptied_is_named():
    said = refused(((0, 1), (2, 3)), topology=topology_where(draining=True))
    assert said == "rank 1 is being emptied, and 2 experts are wanted on it: undrain it first"


def test_a_rank_without_a_shard_is_named():
    said = refused(((0, 1), (2,)), topology=topology_where(alive=False))
    assert (
        "rank 1 has no shard, and 1 expert is wanted on it: wait until it has joined, or give them "
        "to other ranks where it has left the service"
    ) in said


def test_a_rank_that_holds_nothing_may_be_away():
    topology = topology_where(alive=False)
    ranks = (msgspec.structs.replace(topology.ranks[0], num_slots=5), topology.ranks[1])
    topology = msgspec.structs.replace(topology, ranks=ranks)
    layout = one_layer([[0, 1, 2, 3, -1], [-2] * 5])
    wanted = wanted_layout(((0, 1, 2, 3), ()), request_of(layout, topology=topology))
    assert wanted.layout.slots.tolist() == [[0, 1, 2, 3, -1], [-2] * 5]


def test_all_that_stands_against_it_is_said_at_once_and_no_more_than_fits():
    said = refused(((0, 1, 2), ()))
    assert "1 expert would have no replica" in said
    assert "rank 0 can hold 2 experts" in said
    ranks = REASONS_MAX + 3
    layout = one_layer([[n, -1] for n in range(ranks)], ranks)
    topology = make_topology([2] * ranks, ranks_per_node=1)
    drained = tuple(msgspec.structs.replace(r, draining=True) for r in topology.ranks)
    topology = msgspec.structs.replace(topology, ranks=drained)
    with pytest.raises(PolicyError) as error:
        wanted_layout(tuple((n,) for n in range(ranks)), request_of(layout, topology=topology))
    assert str(error.value).count("undrain it first") == REASONS_MAX
    assert str(error.value).endswith("; and 3 more reasons")


def test_an_uneven_placement_is_refused_where_layouts_are_uniform():
    target = ((0, 1), (2, 3, 1))
    layout = one_layer([[0, 1, -1, -1], [2, 3, -1, -1]])
    assert wanted_layout(target, request_of(layout)).layout is not None
    with pytest.raises(PolicyError) as error:
        wanted_layout(target, request_of(layout, uniform=True))
    assert str(error.value) == (
        "rebalance.uniform asks for the same number of slots of a layer on each rank, and 1 layer "
        "would not have it (layer 0: 2 on rank 0, 3 on rank 1)"
    )
    even = wanted_layout(((0, 1), (2, 3)), request_of(layout, uniform=True))
    assert even.layout.same_as(layout)


def test_a_refusal_reaches_the_operator_and_is_recorded():
    driver = paused(slots=3)
    answer = plan_to(driver, ((0, 1, 2), (3,)))
    assert answer.code == "failed"
    assert "rank 0 can hold 2 experts" in answer.message
    assert "target_failed" in driver.rules("refused")
    assert compute_target(make_command(((0,),)), driver.config).reason.startswith(
        "the placement is of 1 ranks"
    )


# -- the floor -----------------------------------------------------------------------------------


def test_fewer_failure_domains_than_the_floor_are_said_and_not_forced():
    config = RebalanceConfig(cooldown_s=0.0, first_policy="incremental", floor=2)
    driver = EngineDriver(make_spec(), make_topology([6, 6], ranks_per_node=1), config)
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    assert held(driver) == ((0, 1, 2, 3), (0, 1, 2, 3))
    shown = plan_to(driver, ((0, 1, 2, 3), (0, 1)))
    assert shown.code == "ok"
    assert shown.plan.refused == ()
    assert len(shown.plan.moves) == 2
    assert shown.notes == (
        "2 experts would lie in fewer than 2 failure domains (layer 0 expert 2, layer 0 expert 3): "
        "repairs, which go on while automatic plans are paused, add replicas to them again",
    )
    ask(driver, ev.ApplyAsked, plan_id=shown.plan_id)
    assert held(driver) == ((0, 1, 2, 3), (0, 1, 2, 3)), "the repair, as it was said"


# -- any placement -------------------------------------------------------------------------------


@st.composite
def placements(draw):
    """Two placements of two layers of three experts on three ranks of five slots."""

    def one():
        rows = [set(draw(st.lists(st.integers(0, 5), max_size=4, unique=True))) for _ in range(3)]
        for key in range(6):
            if not any(key in row for row in rows):
                min(rows, key=len).add(key)
        return tuple(tuple(sorted(row)) for row in rows)

    return one(), one()


@given(placements())
def test_from_any_placement_to_any_other(pair):
    now, target = pair
    if max(map(len, (*now, *target))) > 4:
        return
    rows = [[*row, *[-1] * (5 - len(row))] for row in now]
    request = request_of(make_layout(rows, num_layers=2, num_experts=3))
    command = msgspec.structs.replace(make_command(target), input=request)
    answer = compute_target(command, RebalanceConfig())
    assert isinstance(answer, ev.TargetComputed)
    assert answer.plan.refused == ()
    found = [set(row) - {-1} for row in rows]
    for step in answer.plan.steps:
        key = step.layer * 3 + step.expert
        (found[step.slot.rank].add if step.kind == "add" else found[step.slot.rank].remove)(key)
    assert tuple(tuple(sorted(row)) for row in found) == target
    assert np.array_equal(np.sort(answer.slots, axis=1)[:, 0] < 0, [True] * 3)
