"""Records name what else was looked at and why it was not done, also where nothing moved."""

import msgspec
import pytest

from placement.config import RebalanceConfig
from placement.messages import events as ev
from placement.messages.codec import decode_as, encode
from placement.messages.effects import ComputeTarget, Effects
from placement.messages.records import REFUSED_MAX, DecisionRecord
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver

SLOW = {"expert_bytes": 40_000, "slot_bytes": 40_000}


def driver_of(spec, slots=4, **fields):
    config = RebalanceConfig(
        **{"cooldown_s": 0.0, "first_policy": "incremental", "floor": 1, **fields}
    )
    return EngineDriver(spec, make_topology([slots] * 2, ranks_per_node=1), config, routers=["r0"])


def newest(driver, rule):
    return [r for r in driver.records if r.rule == rule][-1]


def test_a_window_in_balance_says_how_near_the_worst_layer_was():
    driver = driver_of(make_spec())
    driver.close_window(base=400.0)
    (why,) = newest(driver, "in_balance").refused
    assert why == (
        "plan: no layer is out of balance; the lowest, layer 0, is at 1.000 and 0.97 is enough"
    )


def test_a_window_in_which_nothing_may_move_says_so():
    driver = driver_of(make_spec())
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    driver.close_window({0: 5000.0})
    assert newest(driver, "paused").refused == ("plan: automatic plans are paused",)


def test_a_target_that_waits_names_the_verdict():
    driver = driver_of(make_spec(**SLOW), balance_enough=0.9)
    driver.close_window({0: 1200.0}, base=400.0)
    kept = newest(driver, "regret_below_cost")
    (why,) = kept.refused
    assert why.startswith("regret_below_cost: layer 0 not moved: regret has not reached the cost")
    assert kept.detail.startswith(why.removeprefix("regret_below_cost: "))


def test_a_plan_stopped_by_a_pause_names_the_verdict_that_would_have_started_it():
    driver = driver_of(make_spec())
    driver.hold.add(ComputeTarget)
    driver.close_window({0: 5000.0})
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    driver.let_go()
    (why, *_) = newest(driver, "paused").refused
    verdict, _, words = why.partition(": ")
    assert verdict in ("regret_reached", "pays_in_time", "shift")
    assert words == "paused while the target was computed"


def test_what_the_planner_left_out_is_named_by_the_plan_that_starts():
    driver = driver_of(make_spec(), slots=6)
    driver.hold.add(ComputeTarget)
    driver.close_window({0: 5000.0})
    (command,) = [c for c in driver.held if isinstance(c, ComputeTarget)]
    driver.held.clear()
    (answer,) = with_refused(driver, command, [f"move {n} left out" for n in range(12)])
    driver.feed(answer)
    started = next(r for r in driver.records if r.outcome == "started" and r.refused)
    assert len(started.refused) == REFUSED_MAX
    assert started.refused[-1].startswith("move_refused: move ")


def with_refused(driver, command, refused):
    driver.hold.discard(ComputeTarget)
    for answer in driver._answer(command):
        plan = msgspec.structs.replace(answer.plan, refused=tuple(refused))
        yield msgspec.structs.replace(answer, plan=plan)


def test_a_record_from_before_the_field_is_read():
    old = DecisionRecord(at_s=1.0, seq=2, rule="in_balance", outcome="kept")
    fields = msgspec.to_builtins(old)
    del fields["refused"]
    assert decode_as(encode(fields), DecisionRecord) == old
    effects = Effects(records=(msgspec.structs.replace(old, refused=("plan: no",)),))
    assert decode_as(encode(effects), Effects).records[0].refused == ("plan: no",)


@pytest.mark.parametrize("count", [0, 3, REFUSED_MAX + 5])
def test_no_record_names_more_than_it_may(count):
    driver = driver_of(make_spec())
    turn = driver.engine._turn(1.0)
    turn.record("x", "kept", refused=[f"plan: {n}" for n in range(count)])
    assert len(turn.records[0].refused) == min(count, REFUSED_MAX)
