"""What the engine decides window by window: layers named, regret measured, failures remembered."""

import msgspec
import numpy as np
import pytest

from placement.config import RebalanceConfig
from placement.engine import EngineSnapshot
from placement.engine.decision import layers_in_words
from placement.engine.outlook import (
    FAILURES_KEPT,
    expected_balance,
    remember_failure,
    saving_by_layer,
    scenarios_of,
    take_window,
    wary_scenarios,
)
from placement.engine.shift import shift_seen
from placement.messages import events as ev
from placement.messages.codec import decode_as, encode
from placement.messages.effects import ComputeTarget
from placement.scoring import max_over_mean, rank_load
from tests.builders import make_demand, make_layout, make_spec, make_topology, make_window
from tests.engine_driver import EngineDriver, two_ranks

HOT = {0: 5000.0}
SLOW = {"expert_bytes": 40_000, "slot_bytes": 40_000}
"""Experts whose copies cost more than a window of theirs can lose."""


def driver_of(spec, slots=4, num_ranks=2, **fields):
    config = RebalanceConfig(
        **{"cooldown_s": 0.0, "first_policy": "incremental", "floor": 1, **fields}
    )
    topology = make_topology([slots] * num_ranks, ranks_per_node=1)
    return EngineDriver(spec, topology, config, routers=["r0"])


def targets(driver):
    return [c for c in driver.commands if isinstance(c, ComputeTarget) and c.cause == "auto"]


def record(driver, rule):
    return [r for r in driver.records if r.rule == rule]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([3], "layer 3"),
        ([1, 2, 5], "layers 1, 2 and 5"),
        (range(9), "layers 0, 1, 2, 3, 4, 5, 6, 7 ... (9)"),
    ],
)
def test_layers_are_named_and_many_are_counted(layers, words):
    assert layers_in_words(list(layers)) == words


def test_a_target_names_only_layers_out_of_balance_and_only_they_move():
    driver = driver_of(make_spec(num_layers=3), slots=9)
    driver.close_window({4: 5000.0, 8: 104.0})
    (target,) = targets(driver)
    assert target.input.layers == (1,)
    assert target.input.balance_enough == pytest.approx(0.98)
    (noted,) = record(driver, "out_of_balance")
    assert noted.detail == "a target is being computed for layer 1"
    assert noted.numbers["layers_considered"] == 1.0
    assert noted.numbers["layers_skipped"] == 2.0
    started = next(r for r in driver.records if r.rule == "regret_reached")
    assert started.numbers["layers_started"] == 1.0
    run = [r for r in driver.records if r.move_id >= 0 and r.outcome == "started"]
    moved = {int(r.numbers["layer"]) for r in run if r.plan_id == started.plan_id}
    assert moved == {1}


def test_a_waiting_target_is_charged_with_what_it_would_have_saved():
    driver = driver_of(make_spec(**SLOW), balance_enough=0.9)
    driver.close_window({0: 1200.0}, base=400.0)
    (waits,) = record(driver, "regret_below_cost")
    assert "layer 0 not moved: regret has not reached the cost" in waits.detail
    state = driver.engine.state
    assert state.candidate is not None
    assert state.candidate.layers == (0,)
    before = float(state.gate.regret_s[0])
    driver.hold.add(ComputeTarget)
    driver.close_window({0: 1200.0}, base=400.0)
    better = waits.numbers["gain_s_per_s"] * driver.config.window_s
    assert float(state.gate.regret_s[0]) == pytest.approx(0.9 * before + better)
    driver.feed(ev.TargetFailed(at_s=0.0, request_id=state.outstanding.request_id, reason="x"))
    driver.close_window(base=400.0)
    assert state.candidate is None, "in balance again: nothing waits"
    assert float(state.gate.regret_s[0]) == 0.0


def test_a_kept_target_that_uses_a_drained_rank_is_kept_no_longer():
    driver = driver_of(make_spec(**SLOW), slots=5, balance_enough=0.9)
    driver.close_window({0: 1200.0}, base=400.0)
    assert driver.engine.state.candidate is not None
    driver.hold.add(ComputeTarget)
    driver.feed(ev.DrainAsked(at_s=0.0, request_id=1, rank=1))
    driver.close_window({0: 1200.0}, base=400.0)
    assert driver.engine.state.candidate is None


def test_load_that_flips_after_each_move_gets_a_layout_for_both_sides():
    """The adversary asks for whichever of two hot experts the layout serves worse."""
    driver = two_ranks(num_ranks=4, slots=3)
    sides, losses = ({0: 700.0}, {1: 700.0}), []
    for _ in range(40):
        costs = [worst_over_mean(driver, side) for side in sides]
        losses.append(max(costs))
        driver.close_window(sides[int(costs[1] > costs[0])])
    assert losses[0] > 1.5
    assert np.mean(losses[20:]) < 1.2
    assert any("got less than promised" in r.detail for r in record(driver, "realised_gain"))
    failed = driver.engine.state.failed_demand
    assert failed is not None
    assert failed.shape == (FAILURES_KEPT, 2, 1, 4)
    snapshot = driver.engine.snapshot()
    again = decode_as(encode(snapshot), EngineSnapshot)
    assert encode(again) == encode(snapshot)


def test_a_layer_that_fails_early_is_planned_for_every_window_and_the_others_for_their_mean():
    """More windows to plan for than sub-windows that were seen: the others see their mean there."""
    spec = make_spec(num_layers=2)
    driver = driver_of(spec, slots=9)
    demand = make_demand(spec, {0: 700.0, 5: 300.0}, 100.0)
    window = make_window(spec, demand, window_s=driver.config.window_s, sub_windows=1)
    driver.now_s = window.end_s
    driver.feed(ev.WindowClosed(at_s=0.0, window=window))
    turn = driver.engine._turn(driver.now_s)
    seen, seen_weights = scenarios_of(turn)
    remember_failure(turn, [0])
    gate = turn.state.gate
    turn.state.gate = msgspec.structs.replace(gate, failed=np.array([1.0, 0.0]))
    planned, weights = wary_scenarios(turn)
    mean = np.tensordot(seen_weights, seen, axes=1)
    rate = turn.state.history.rates()[0]
    assert len(seen) == 1
    # The mean, the window that failed, the window that is kept, and failures that there were not.
    assert planned[:, :, 0] == pytest.approx(np.stack([mean, rate, rate, mean, mean])[:, :, 0])
    assert planned[:, :, 1] == pytest.approx(np.stack([mean] * 5)[:, :, 1])
    assert weights.sum() == pytest.approx(1.0)
    assert (np.diff(weights) < 0.0).all(), "what is older weighs less"


def worst_over_mean(driver, hot):
    demand = make_demand(driver.spec, hot, 100.0)
    return float(max_over_mean(rank_load(driver.engine.layout(), demand))[0])


def test_a_budget_of_moves_that_is_used_up_says_nothing_of_other_layers():
    driver = driver_of(make_spec(num_layers=2), slots=9, num_ranks=2, max_moves=1)
    driver.close_window({0: 5000.0, 4: 5000.0})
    assert driver.engine.state.gate.fruitless.tolist() == [0, 0]
    driver.close_window({0: 5000.0, 4: 5000.0})
    assert len(targets(driver)) == 2


def test_what_a_pause_caught_is_not_started():
    driver = two_ranks()
    driver.hold.add(ComputeTarget)
    driver.close_window(HOT)
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1))
    driver.let_go(ComputeTarget)
    paused = record(driver, "paused")[-1]
    assert paused.detail == "paused while the target was computed"
    assert paused.numbers["gain_s_per_s"] > 0.0
    assert driver.engine.state.run is None


def test_a_layer_without_anything_better_rests_and_says_until_when():
    driver = driver_of(make_spec(), slots=3)
    for _ in range(2):
        driver.close_window(HOT)
    assert driver.rules().count("nothing_better") == 2
    assert "nothing worth having was found" in driver.records[-1].detail
    assert len(targets(driver)) == 1


def test_state_from_before_the_gate_by_layer_is_taken_up():
    driver = two_ranks()
    old = msgspec.msgpack.decode(encode(driver.engine.snapshot()))
    del old["state"]["gate"]
    snapshot = decode_as(msgspec.msgpack.encode(old), EngineSnapshot)
    driver.engine = type(driver.engine).replayed(snapshot)
    driver.close_window(HOT)
    assert "regret_reached" in driver.rules("started")


def test_a_window_of_no_length_saves_nothing():
    driver = two_ranks()
    driver.close_window(HOT)
    last = driver.engine.state.history.windows[-1]
    turn = driver.engine._turn(0.0)
    take_window(turn, msgspec.structs.replace(last, index=last.index + 1, end_s=last.start_s))
    layout = driver.engine.layout()
    assert saving_by_layer(turn, layout, layout, [0]) == {}


def test_a_layer_that_nobody_asked_for_saves_nothing():
    driver = two_ranks()
    layout, turn = driver.engine.layout(), driver.engine._turn(0.0)
    assert saving_by_layer(turn, layout, layout, [0]) == {}
    other = make_layout([[0, 1, 2, 3]])
    assert saving_by_layer(turn, layout, other, [0]) == {}, "another fleet's layout"


def test_demand_that_only_a_draining_rank_serves_is_no_imbalance():
    driver = driver_of(make_spec(), slots=6)
    driver.hold |= {ComputeTarget}
    key = driver.keys()[0][0]
    driver.feed(ev.DrainAsked(at_s=0.0, request_id=7, rank=0))
    driver.close_window({key: 5000.0}, base=0.0)
    assert expected_balance(driver.engine._turn(driver.now_s)).tolist() == [1.0]


def test_a_shift_counts_for_the_layers_that_show_it():
    driver = driver_of(make_spec(num_layers=3, num_experts=4), slots=9, balance_enough=0.5)
    for _ in range(4):
        driver.close_window()
    turn = driver.engine._turn(driver.now_s)
    assert not shift_seen(turn).layers.any()
    driver.close_window({4: 5000.0, 8: 5000.0})
    seen = shift_seen(driver.engine._turn(driver.now_s))
    assert seen.layers.tolist() == [False, True, True]
    assert "prefill shifted in 2 of 3 layers in window 4" in seen.words
    state = driver.engine.state
    latest = msgspec.structs.replace(state.forecast.shift.latest, near=())
    shift = msgspec.structs.replace(state.forecast.shift, latest=latest)
    state.forecast = msgspec.structs.replace(state.forecast, shift=shift)
    assert shift_seen(turn).layers.all(), "where only the sum of layers shows it"


def test_a_uniform_layout_stays_one():
    driver = driver_of(make_spec(num_layers=2, num_experts=4), 7, uniform=True, staging_slots=1)
    first = driver.engine.layout()
    assert first.physical_to_logical().shape == (2, 6)
    driver.close_window({7: 5000.0})
    (target,) = targets(driver)
    assert target.input.uniform
    assert not first.same_as(driver.engine.layout())
    assert driver.engine.layout().physical_to_logical().shape == (2, 6)


def test_bytes_between_nodes_are_limited():
    driver = driver_of(make_spec(), max_cross_node_bytes=0)
    driver.close_window(HOT)
    (target,) = targets(driver)
    assert target.input.max_cross_node_bytes == 0
    repairs = [c for c in driver.commands if isinstance(c, ComputeTarget) and c.cause == "initial"]
    assert repairs[0].input.max_cross_node_bytes is None, "what must be done has no such limit"
    assert record(driver, "nothing_better")


def test_calls_of_few_tokens_are_priced_by_experts_read():
    """Expert 0 has five times the pairs of each other. Four tokens a call: it is read in every
    call, each other in two of three."""
    driver = driver_of(make_spec(**SLOW), balance_enough=0.9)
    spec, demand = driver.spec, make_demand(driver.spec, HOT, base=1000.0)

    def close(calls):
        window = make_window(spec, demand, index=driver.window)
        driver.window += 1
        driver.now_s = window.end_s
        driver.feed(ev.WindowClosed(at_s=0.0, window=msgspec.structs.replace(window, calls=calls)))
        return driver.engine.state.call_tokens

    pairs = int(make_window(spec, demand, index=0).demand.sum())
    calls = pairs // (4 * spec.top_k)
    few = close((calls, 0))
    assert few == pytest.approx((pairs / calls / spec.top_k, 0.0))
    assert targets(driver) == []
    assert driver.records[-1].rule == "in_balance"
    more = close((calls // 2, 0))
    assert more[0] == pytest.approx(1.2 * few[0], rel=1e-3), "smoothed"
    assert close((0, 0)) == more, "a router of an older version does not count"
