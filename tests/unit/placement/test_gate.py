"""The gate: which layers are planned, which moves start, what rests, and parts of a plan."""

import numpy as np
import pytest
from msgspec.structs import replace

from placement.layout import EMPTY
from placement.planner import LayerFigure, WaveConfig, choose_parts, make_plan, part_of, prove
from placement.planner.gate import (
    FAILED_MAX,
    LAST_WORD_WEIGHT,
    PREDICTED_SHARE,
    WAIT_WINDOWS_MAX,
    GateState,
    Terms,
    Verdict,
    charge,
    due,
    foresee,
    fruitless,
    initial_gate,
    moved,
    paid_back,
    waits,
    watch,
    weigh,
)
from tests.builders import make_layout, make_request, make_spec, make_topology

E = EMPTY
TERMS = Terms(start=0.97, band=0.01, window_s=2.0, decay=0.9, plan_life_s=60.0, cooldown_s=4.0)
NONE = np.zeros(2, np.bool_)
NOTHING = np.zeros(2)


def figure(layer=0, *, writes=1, cost=0.1, seconds=1.0, gain=0.02, spread=0.0, freed=0.0):
    return LayerFigure(
        layer=layer,
        writes=writes,
        cost_s=cost,
        seconds_per_s=seconds,
        gain_s_per_s=gain,
        spread_s_per_s=spread,
        freed_s_per_s=freed,
    )


def gate(**fields) -> GateState:
    return replace(initial_gate(2), **{k: np.array(v) for k, v in fields.items()})


# -- windows -------------------------------------------------------------------------------------


def test_a_layer_is_watched_below_the_start_until_it_is_back_above_the_band():
    state, seen = initial_gate(2), []
    for balance in (0.975, 0.969, 0.975, 0.98, 0.975):
        state = watch(state, np.array([balance, 1.0]), NONE, TERMS)
        seen.append(bool(state.watched[0]))
    assert seen == [False, True, True, False, False]
    assert not state.watched[1]


def test_regret_of_a_layer_left_alone_is_forgotten_unless_a_kept_target_changes_it():
    state = gate(regret_s=[0.5, -0.5], waited=[3, 3])
    balance = np.array([1.0, 1.0])
    assert watch(state, balance, NONE, TERMS).regret_s.tolist() == [0.0, 0.0]
    kept = watch(state, balance, np.array([False, True]), TERMS)
    assert kept.regret_s.tolist() == [0.0, -0.5]
    assert kept.waited.tolist() == [0, 0]


def test_regret_is_what_the_kept_target_would_have_saved_and_fades():
    state = charge(gate(regret_s=[1.0, 0.0]), np.array([0.5, -0.25]), NOTHING, TERMS)
    assert state.regret_s.tolist() == pytest.approx([1.9, -0.5])
    assert charge(gate(failed=[1.0, 0.0]), NOTHING, NOTHING, TERMS).failed[0] == pytest.approx(0.95)


def test_a_prediction_counts_only_where_no_target_was_kept_and_then_in_part():
    figures = [figure(0, gain=0.1), figure(1, gain=0.1)]
    state = foresee(initial_gate(2), figures, np.array([True, False]), TERMS)
    assert state.regret_s.tolist() == pytest.approx([PREDICTED_SHARE * 0.2, 0.0])
    loses = foresee(initial_gate(2), [figure(1, gain=-0.1)], np.array([True, True]), TERMS)
    assert loses.regret_s.tolist() == pytest.approx([0.0, -0.2])


def test_layers_are_due_while_watched_and_not_resting():
    state = gate(watched=[True, False], rest_until_s=[5.0, 0.0])
    balance = np.array([0.9, 0.9])
    assert due(state, balance, NONE, 4.0, TERMS).tolist() == [False, False]
    assert due(state, balance, NONE, 5.0, TERMS).tolist() == [True, False]


def test_a_shift_or_a_worse_balance_ends_a_rest():
    state = gate(
        watched=[True, True], rest_until_s=[99.0, 99.0], fruitless=[1, 1], balance_then=[0.9, 0.9]
    )
    shifted = np.array([True, False])
    assert due(state, np.array([0.9, 0.9]), shifted, 0.0, TERMS).tolist() == [True, False]
    assert due(state, np.array([0.9, 0.88]), NONE, 0.0, TERMS).tolist() == [False, True]


def test_a_cool_down_ends_once_it_has_lost_what_the_moves_before_it_cost():
    balance, state = np.array([0.9, 0.9]), gate(watched=[True, True])
    state = moved(state, {0: 0.3, 1: 0.3}, 100.0, TERMS)
    state = charge(state, NOTHING, np.array([0.1, 0.0]), TERMS)
    assert not due(state, balance, NONE, 102.0, TERMS).any()
    state = charge(state, NOTHING, np.array([0.1, 0.0]), TERMS)
    assert due(state, balance, NONE, 102.0, TERMS).tolist() == [True, False]
    vain = replace(state, fruitless=np.array([1, 0]), balance_then=np.array([0.9, 0.9]))
    assert not due(vain, balance, NONE, 102.0, TERMS).any(), "nothing worth having was found"
    again = moved(state, {0: 0.3}, 102.0, TERMS)
    assert not due(again, balance, NONE, 103.0, TERMS)[0], "what was lost before is paid for"


# -- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regret", "shifted", "given", "says"),
    [
        (0.0, False, {"gain": 0.001}, Verdict.GAIN_BELOW_COST),
        (0.0, False, {"gain": -0.001}, Verdict.GAIN_BELOW_COST),
        (9.0, True, {"gain": 0.009, "cost": 0.0}, Verdict.GAIN_BELOW_BAND),
        (0.119, False, {}, Verdict.REGRET_BELOW_COST),
        (0.121, False, {}, Verdict.REGRET_REACHED),
        (0.0, True, {}, Verdict.SHIFT),
        (0.0, True, {"gain": 0.001}, Verdict.GAIN_BELOW_COST),
        (0.0, False, {"gain": 0.0, "freed": 0.01, "writes": 0, "cost": 0.0}, "regret_reached"),
    ],
)
def test_moves_start_if_they_pay_exceed_noise_and_regret_or_a_shift_asks_for_them(
    regret, shifted, given, says
):
    shifts = np.array([shifted, False])
    found = weigh(gate(regret_s=[regret, 0.0]), [figure(**given)], shifts, TERMS)
    assert found.verdict == says
    assert found.verdict.starts == (
        says in {Verdict.REGRET_REACHED, Verdict.SHIFT, Verdict.PAYS_IN_TIME}
    )


def test_a_shift_starts_nothing_in_a_layer_whose_moves_failed_again_and_again():
    state = gate(failed=[FAILED_MAX + 0.1, 0.0])
    found = weigh(state, [figure()], np.array([True, True]), TERMS)
    assert found.verdict is Verdict.REGRET_BELOW_COST


def test_regret_that_chance_may_have_made_starts_nothing():
    """Two layers, one false start in 10,000 windows: 4.29 standard deviations."""
    within = gate(regret_s=[0.42, 0.0], swing=[0.01, 0.0])
    beyond = gate(regret_s=[0.44, 0.0], swing=[0.01, 0.0])
    given = [figure(cost=0.2)]
    assert weigh(within, given, NONE, TERMS).verdict is Verdict.REGRET_BELOW_COST
    assert weigh(beyond, given, NONE, TERMS).verdict is Verdict.REGRET_REACHED
    # four times what moving costs: one deviation will do
    assert weigh(within, [figure(cost=0.08)], NONE, TERMS).verdict is Verdict.REGRET_REACHED
    wide = gate(regret_s=[0.42, 0.0], swing=[0.2, 0.0])
    assert weigh(wide, [figure(cost=0.08)], NONE, TERMS).verdict is Verdict.REGRET_BELOW_COST


def test_more_layers_need_more_proof():
    def verdict(layers):
        state = initial_gate(layers)
        state.regret_s[0], state.swing[0] = 0.44, 0.01
        return weigh(state, [figure(cost=0.2)], np.zeros(layers, np.bool_), TERMS).verdict

    assert verdict(2) is Verdict.REGRET_REACHED
    assert verdict(58) is Verdict.REGRET_BELOW_COST


def test_noise_of_regret_is_what_scenarios_differ_by_or_what_a_window_fell_short_of():
    terms = TERMS._replace(parts=4)
    figures = [figure(0, gain=0.1, spread=0.04), figure(1, gain=0.1, spread=0.04)]
    state = foresee(initial_gate(2), figures, np.array([True, False]), terms)
    assert state.swing.tolist() == pytest.approx([(0.02 * 2.0) ** 2, 0.0])
    state = charge(state, np.array([0.15, 0.03]), NOTHING, terms)
    assert state.swing.tolist() == pytest.approx(
        [0.81 * 0.0016 + (0.02 * 2.0) ** 2, (0.07 * 2.0) ** 2]
    )
    idle = charge(state, NOTHING, NOTHING, terms)
    assert idle.swing.tolist() == pytest.approx((0.81 * state.swing).tolist()), "none is kept"


def test_layers_that_belong_together_are_weighed_as_one():
    figures = [figure(0, gain=0.05, cost=0.1), figure(1, gain=-0.01, writes=0, cost=0.0)]
    found = weigh(gate(regret_s=[0.3, -0.1]), figures, NONE, TERMS)
    assert found.layers == (0, 1)
    assert (found.gain_s_per_s, found.regret_s) == pytest.approx((0.04, 0.2))
    assert found.threshold_s == pytest.approx(0.1 + 0.01 * 2.0)


def test_the_mean_of_what_was_measured_has_the_last_word():
    """A gain of 0.006 a second never brings regret to a cost of 0.2, yet pays over 60 s."""
    state, given = initial_gate(2), [figure(gain=0.0101, cost=0.2, seconds=1.0)]
    verdicts = []
    for _ in range(WAIT_WINDOWS_MAX + 1):
        state = charge(state, np.array([0.006, 0.0]), NOTHING, TERMS)
        verdicts.append(weigh(state, given, NONE, TERMS).verdict)
        state, too_long = waits(state, [0])
    assert set(verdicts[:-1]) == {Verdict.REGRET_BELOW_COST}
    assert verdicts[-1] is Verdict.PAYS_IN_TIME
    assert too_long == (0,)
    promised = [figure(gain=0.02, cost=0.2)]
    assert weigh(state, promised, NONE, TERMS).verdict is Verdict.REGRET_BELOW_COST
    noisy = replace(state, swing=np.array([0.03**2, 0.0]))
    assert weigh(noisy, given, NONE, TERMS).verdict is Verdict.REGRET_BELOW_COST
    noise = charge(state, np.array([-0.05, 0.0]), NOTHING, TERMS)
    assert weigh(noise, given, NONE, TERMS).verdict is Verdict.REGRET_BELOW_COST


def test_fruitless_plans_let_a_layer_rest_longer_and_longer():
    state, at_s, rests = gate(regret_s=[1.0, 1.0], waited=[2, 2]), 100.0, []
    for balance in (0.9, 0.95, 0.95):
        state = fruitless(state, [0], np.array([balance, 1.0]), at_s, TERMS)
        rests.append(float(state.rest_until_s[0]) - at_s)
    assert rests == [3.0, 7.0, 15.0]
    assert float(state.balance_then[0]) == 0.9
    assert state.regret_s.tolist() == [0.0, 1.0]
    assert state.waited.tolist() == [0, 2]
    last = fruitless(initial_gate(2), [0], np.ones(2), at_s, TERMS, times=LAST_WORD_WEIGHT)
    assert float(last.rest_until_s[0]) - at_s == (2.0**LAST_WORD_WEIGHT - 0.5) * 2.0
    calm = watch(state, np.array([0.99, 1.0]), NONE, TERMS)
    assert calm.fruitless.tolist() == [2, 0]


def test_layers_that_moved_cool_down_and_start_from_nothing():
    state = gate(regret_s=[1.0, 1.0], fruitless=[3, 3], waited=[4, 4], balance_then=[0.5, 0.5])
    state = moved(state, {1: 0.5}, 10.0, TERMS)
    assert state.rest_until_s.tolist() == [-np.inf, 14.0]
    assert (state.regret_s.tolist(), state.fruitless.tolist()) == ([1.0, 0.0], [3, 0])
    assert (state.waited.tolist(), state.balance_then.tolist()) == ([4, 0], [0.5, 1.0])


def test_moves_that_do_not_bring_what_they_promised_make_a_layer_wary():
    state, failed = paid_back(initial_gate(2), {0: 1.0, 1: 1.0}, {0: 0.2, 1: 0.3}, 10.0, TERMS)
    assert failed == (0,)
    assert state.wary.tolist() == [True, False]
    assert state.rest_until_s[0] == -np.inf
    for _ in range(14):
        state = charge(state, NOTHING, NOTHING, TERMS)
    assert not state.wary.any()
    _, failed = paid_back(initial_gate(2), {0: 1.0, 1: -1.0}, {1: -5.0}, 10.0, TERMS)
    assert failed == ()
    again, _ = paid_back(gate(failed=[2.0, 0.0]), {0: 1.0}, {0: -1.0}, 10.0, TERMS)
    assert again.rest_until_s[0] == 10.0 + 7.5 * 2.0


# -- parts ---------------------------------------------------------------------------------------


def two_layers(before, after, *, slots, staging_slots=1):
    """A plan over two layers of two experts: keys 0, 1 and 2, 3."""
    spec = make_spec(num_layers=2, num_experts=2)
    current = make_layout(before, num_layers=2, num_experts=2)
    target = make_layout(after, num_layers=2, num_experts=2)
    request = make_request(spec, make_topology(slots), current, staging_slots=staging_slots)
    return current, make_plan(current, target, request, WaveConfig())


def parts(current, plan, slots, starts):
    return choose_parts(plan, current, slot_limit=slots, staging_slots=1, starts=starts)


def test_layers_that_share_no_slot_start_apart():
    slots = [6, 6]
    current, plan = two_layers(
        [[0, 2, E, E, E, E], [1, 3, E, E, E, E]],
        [[0, 2, 1, E, E, E], [1, 3, 2, E, E, E]],
        slots=slots,
    )
    assert [f.layer for f in plan.layers] == [0, 1]
    go, stay = parts(current, plan, slots, lambda part: part[0].layer == 1)
    assert [[f.layer for f in p] for p in go] == [[1]]
    assert [[f.layer for f in p] for p in stay] == [[0]]
    part = part_of(plan, go)
    assert {s.layer for s in part.steps} == {m.layer for m in part.moves} == {1}
    assert part.copy_bytes == 1000
    assert part.cost_s == pytest.approx(plan.cost_s / 2)
    prove(current, part.steps, slot_limit=slots, staging_slots=1)
    assert part_of(plan, [*go, *stay]) is plan


def test_a_layer_that_makes_room_for_another_starts_with_it():
    slots = [3, 4]
    current, plan = two_layers([[0, 2, E], [1, 3, 2, E]], [[0, 1, E], [1, 3, 2, E]], slots=slots)
    go, stay = parts(current, plan, slots, lambda part: len(part) == 1)
    assert go == []
    assert [[f.layer for f in p] for p in stay] == [[0, 1]]


def test_parts_leave_every_rank_its_staging_slots():
    """Layer 0 takes the only empty slot of rank 0, which a migration of layer 1 gives back."""
    slots = [4, 4]
    current, plan = two_layers(
        [[0, 2, 3, E], [1, 2, E, E]], [[0, 2, 1, E], [1, 2, 3, E]], slots=slots
    )
    assert [len(m) for m in (plan.moves, plan.steps)] == [2, 3]
    assert all(not s.after or s.layer == 1 for s in plan.steps)
    asked: list[tuple[int, ...]] = []

    def starts(part, wanted):
        asked.append(tuple(f.layer for f in part))
        return wanted in asked[-1]

    go, _ = parts(current, plan, slots, lambda part: starts(part, 0))
    assert [[f.layer for f in p] for p in go] == [[0, 1]]
    assert asked == [(0,), (1,), (0, 1)]
    go, stay = parts(current, plan, slots, lambda part: starts(part, 1))
    assert [[f.layer for f in p] for p in go] == [[1]]
    assert [[f.layer for f in p] for p in stay] == [[0]]


def test_a_slot_above_the_limit_is_no_room_that_a_part_may_count_on():
    """Rank 0 falls from 6 slots to 4. Layer 0 moves off a slot above the limit and takes one of the
    two empty slots below it, layer 1 gives that one back: by itself layer 0 would leave one."""
    slots, staging_slots = [4, 6], 2
    current, plan = two_layers(
        [[2, 3, E, E, 0, E], [1, E, E, E, E, E]],
        [[2, 1, E, E], [1, 0, 3, E, E, E]],
        slots=slots,
        staging_slots=staging_slots,
    )
    kinds = [(str(s.kind), *s.slot, s.layer) for s in plan.steps if s.slot.rank == 0]
    assert sorted(kinds) == [("add", 0, 2, 0), ("remove", 0, 1, 1), ("remove", 0, 4, 0)]
    asked: list[tuple[int, ...]] = []

    def starts(part):
        asked.append(tuple(f.layer for f in part))
        return 0 in asked[-1]

    go, stay = choose_parts(
        plan, current, slot_limit=slots, staging_slots=staging_slots, starts=starts
    )
    assert asked == [(0,), (1,), (0, 1)]
    assert ([[f.layer for f in p] for p in go], stay) == ([[0, 1]], [])
    prove(current, part_of(plan, go).steps, slot_limit=slots, staging_slots=staging_slots)
