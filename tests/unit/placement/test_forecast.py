from itertools import pairwise

import msgspec
import numpy as np
import pytest

from placement.forecast import (
    FORECASTERS,
    SCENARIOS,
    ForecastState,
    balance_given,
    choose,
    forecast,
    initial_state,
    mean_forecast,
    observe,
    predict,
)
from placement.forecast.kernels import warm
from placement.load import LoadError, LoadHistory
from placement.messages.codec import decode_as, encode
from placement.topology import NUM_PHASES, Phase
from tests.builders import make_spec, make_window

SPEC = make_spec(num_layers=1, num_experts=8)
RANKS = 4
FLAT = np.full((1, 8), 80.0)
LOW = np.array([[80, 80, 80, 80, 8, 8, 8, 8]])


@pytest.fixture(scope="module", autouse=True)
def compiled():
    warm()


def start():
    return initial_state(
        num_phases=NUM_PHASES, num_layers=SPEC.num_layers, num_experts=SPEC.num_experts
    )


def run_windows(windows, kept=8):
    state, history = start(), LoadHistory(kept=kept)
    for window in windows:
        state = observe(state, history, window, RANKS)
        history = history.with_window(window)
    return state, history


def run(demands, kept=8):
    """(state, history) after windows of these demands [layers, experts]."""
    return run_windows(
        [make_window(SPEC, np.asarray(d, float), index=i) for i, d in enumerate(demands)], kept
    )


def window_of(parts, *, index=0, phase=Phase.PREFILL, queued=None, prefill=None):
    """A window with these pairs [experts] in its sub-windows."""
    window = make_window(SPEC, np.zeros((1, 8)), index=index, sub_windows=len(parts))
    demand = window.demand.copy()
    demand[:, phase, 0] = parts
    if prefill is not None:
        demand[:, Phase.PREFILL, 0] = prefill
    window = msgspec.structs.replace(window, demand=demand)
    if queued is not None:
        waiting = np.zeros((NUM_PHASES, 1, 8), dtype=np.int64)
        waiting[Phase.PREFILL, 0] = queued
        window = msgspec.structs.replace(window, queued=waiting)
    return window


def named(state):
    return FORECASTERS[choose(state)[Phase.PREFILL, 0]]


def test_balance_given_follows_the_worked_example():
    assert balance_given([[2, 1, 1]], [[2, 2, 0]], 2).tolist() == pytest.approx([1.0])
    assert balance_given([[2, 1, 1]], [[0, 2, 2]], 2).tolist() == pytest.approx([0.5])


def test_balance_given_cuts_an_expert_over_several_ranks():
    assert balance_given([[4, 0]], [[4, 0]], 4).tolist() == pytest.approx([1.0])
    assert balance_given([[3, 1]], [[1, 3]], 4).tolist() == pytest.approx([1 / 3])


def test_balance_given_of_the_load_itself_is_even_and_of_none_is_one():
    load = np.random.default_rng(1).random((3, 16))
    assert balance_given(load, load, 5) == pytest.approx(np.ones(3), abs=1e-6)
    assert balance_given(load, np.zeros((3, 16)), 5).tolist() == [1.0, 1.0, 1.0]


def test_balance_given_of_what_was_not_foreseen_is_the_worst():
    assert balance_given([[1, 0, 0, 0]], [[0, 0, 0, 7]], 4)[0] == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("last", 12.0), ("window", 8.0), ("ewma_short", 9.0), ("ewma_long", 5.4375)],
)
def test_each_forecaster_in_pairs_a_second(name, expected):
    ones = np.ones((1, 8))
    state, history = run([ones * 8, ones * 16, ones * 24])
    values = predict(name, state, history)
    assert values.shape == (NUM_PHASES, 1, 8)
    assert values[0, 0, 0] == pytest.approx(expected)
    assert values[1].sum() == 0


def test_quarters_weigh_sub_windows_by_age():
    eights, sixteens = [8] * 8, [16] * 8
    state, history = run_windows([window_of([eights, eights, eights, sixteens])])
    weights = 0.9 ** np.arange(4)[::-1]
    expected = (weights / weights.sum()) @ np.array([8, 8, 8, 16]) * 2  # four parts in two seconds
    assert predict("quarters", state, history)[0, 0] == pytest.approx([expected] * 8)
    more = window_of([sixteens] * 4, index=1)
    after = observe(state, history, more, RANKS)
    kept = 0.9**4
    assert after.quarters[0, 0, 0] == pytest.approx(kept * expected + (1 - kept) * 32)


def test_all_forecasters_agree_on_still_traffic():
    state, history = run([LOW] * 5)
    for name in FORECASTERS:
        found = predict(name, state, history)
        assert found[0, 0] == pytest.approx(LOW[0] / 2.0), name


def test_scores_are_by_phase():
    windows = []
    for index in range(6):
        window = window_of([[40] * 8] * 4, index=index)
        window.demand[:, Phase.DECODE, 0, index % 8] = 400
        windows.append(window)
    state, _ = run_windows(windows)
    last = FORECASTERS.index("last")
    assert state.scores[last, Phase.PREFILL, 0] == pytest.approx(1.0, abs=1e-6)
    assert state.scores[last, Phase.DECODE, 0] < 0.5


def test_under_noise_a_mean_scores_better_than_the_last_window():
    rng = np.random.default_rng(5)
    state, _ = run([rng.poisson(40, (1, 8)) * 4 for _ in range(30)])
    assert named(state) in {"quarters", "window", "ewma_long"}
    scores = dict(zip(FORECASTERS, state.scores[:, 0, 0], strict=True))
    assert scores["window"] > scores["last"]


def test_a_silent_window_leaves_scores_alone():
    before, _ = run([LOW] * 3)
    after, _ = run([LOW] * 3 + [LOW * 0])
    assert np.array_equal(before.scores, after.scores)
    assert after.windows_seen == 4


def test_after_a_flip_the_phase_follows_what_came_since():
    state, history = run([LOW] * 6 + [LOW[:, ::-1]])
    assert named(state) == "change_point"
    found = forecast(state, history)
    assert found.shift is not None
    assert found.shift.since_window == 6
    new = np.tile(LOW[0, ::-1] / 2.0, (SCENARIOS, 1))
    assert found.demand[:, 0, 0] == pytest.approx(new), "how old traffic differs is nothing here"
    later, history = run([LOW] * 6 + [LOW[:, ::-1]] * 2)
    assert forecast(later, history).shift is None, "told once"


def test_a_shift_that_began_in_the_window_before_counts_its_last_part():
    """One odd part at the end of a window waits for company; once the next window is like it, what
    is forecast is of both, the older part by its age."""
    still, mixed = np.array([300] * 4 + [100] * 4), np.full(8, 200)
    windows = [window_of([still] * 4, index=i) for i in range(6)]
    windows.append(window_of([still] * 3 + [mixed], index=6))
    state, _ = run_windows(windows)
    assert state.shift.latest is None
    windows.append(window_of([mixed * 2] * 4, index=7))
    state, history = run_windows(windows)
    assert state.shift.latest.since_window == 6
    ages = 0.9 ** np.arange(5)
    parts_a_second = 4 / 2.0
    expected = parts_a_second * mixed * (2 * ages[:4].sum() + ages[4]) / ages.sum()
    found = predict("change_point", state, history)[Phase.PREFILL, 0]
    assert found.tolist() == pytest.approx(expected.tolist())
    assert named(state) == "change_point"


def test_scenarios_deviate_as_sub_windows_did_and_more():
    calm, burst = [16] * 8, [32] + [16] * 7
    state, history = run_windows([window_of([calm, calm, calm, burst])])
    found = forecast(state, history)
    assert found.demand.shape == (4, NUM_PHASES, 1, 8)
    assert found.weights.sum() == pytest.approx(1.0)
    assert (np.diff(found.weights) < 0).all(), "newest first, newest heaviest"
    shares = found.demand[:, 0, 0] / found.demand[:, 0, 0].sum(axis=1, keepdims=True)
    assert shares[0, 0] > 32 / 144 > 16 / 128 > shares[1, 0]
    totals = found.demand[:, 0, 0].sum(axis=1)
    assert totals == pytest.approx([mean_forecast(state, history)[0, 0].sum()] * 4)
    assert found.demand[:, 1].sum() == 0


def test_after_a_flip_sub_windows_before_it_deviate_from_their_neighbours():
    low, high = [80] * 4 + [8] * 4, [8] * 4 + [80] * 4
    burst = [120, *low[1:]]
    windows = [window_of([low] * 4, index=i) for i in range(5)]
    windows += [window_of([low, burst, low, low], index=5), window_of([high] * 4, index=6)]
    state, history = run_windows(windows)
    found = forecast(state, history)
    assert found.shift is not None
    demand, mean = found.demand[:, 0, 0], mean_forecast(state, history)[0, 0]
    assert demand[:4] == pytest.approx(np.tile(mean, (4, 1)))
    assert demand[6, 0] > 2 * mean[0], "newest first: the burst"
    assert (demand[[4, 5, 7], 0] < mean[0]).all()
    assert demand[8:] == pytest.approx(np.tile(mean, (4, 1)))


def test_scenarios_are_at_most_so_many():
    state, history = run([FLAT] * 8)
    assert len(forecast(state, history).demand) == SCENARIOS


def test_scenarios_are_never_negative():
    quiet = np.full((1, 8), 4.0)
    state, history = run([quiet] * 5)
    burst = make_window(SPEC, quiet * 0, index=5)
    burst.demand[3, 0, 0, 0] = 1000
    state = observe(state, history, burst, RANKS)
    assert forecast(state, history.with_window(burst)).demand.min() >= 0


def test_waiting_requests_lead_the_next_prefill():
    window = window_of([[10] * 8] * 4, queued=[0, 0, 0, 0, 30, 30, 30, 30])
    state, history = run_windows([window])
    led = predict("prefill_leads", state, history)[Phase.PREFILL, 0]
    assert led == pytest.approx([0] * 4 + [40.0] * 4)
    assert led.sum() == pytest.approx(predict("last", state, history)[Phase.PREFILL].sum())


def test_prefill_leads_decode_and_wins_where_decode_follows_it():
    rng = np.random.default_rng(3)
    shapes = [rng.permutation([200, 200, 20, 20, 20, 20, 20, 20]) for _ in range(12)]
    windows = [
        window_of([now] * 4, index=i, phase=Phase.DECODE, prefill=nxt)
        for i, (now, nxt) in enumerate(pairwise(shapes))
    ]
    state, history = run_windows(windows)
    scores = dict(zip(FORECASTERS, state.scores[:, Phase.DECODE, 0], strict=True))
    assert max(scores, key=scores.get) == "prefill_leads"
    led = predict("prefill_leads", state, history)[Phase.DECODE, 0]
    assert set(np.argsort(-led)[:2]) == set(np.argsort(-shapes[11])[:2])


def test_without_prefill_the_leader_says_what_the_last_window_said():
    state, history = run_windows([window_of([[10] * 8] * 4, phase=Phase.DECODE)] * 2)
    last = predict("last", state, history)
    assert np.array_equal(predict("prefill_leads", state, history), last)


def test_a_window_of_no_length_forecasts_nothing():
    window = make_window(SPEC, np.full((1, 8), 16.0), window_s=0.0)
    state = observe(start(), LoadHistory(kept=2), window, RANKS)
    assert forecast(state, LoadHistory(kept=2).with_window(window)).demand.sum() == 0


def test_nothing_can_be_forecast_before_the_first_window():
    with pytest.raises(LoadError, match="close one first"):
        forecast(start(), LoadHistory(kept=2))


def test_an_unknown_forecaster_is_named():
    state, history = run([np.ones((1, 8)) * 8])
    with pytest.raises(LoadError, match="'oracle' is not one of"):
        predict("oracle", state, history)


def test_state_survives_the_journal():
    state, _ = run([LOW] * 3 + [LOW[:, ::-1]])
    assert state.shift.latest is not None
    assert encode(decode_as(encode(state), ForecastState)) == encode(state)
