import numpy as np
import pytest

from placement.forecast import (
    FORECASTERS,
    ForecastState,
    balance_given,
    forecast,
    initial_state,
    observe,
    predict,
)
from placement.load import LoadError, LoadHistory
from placement.messages.codec import decode_as, encode
from placement.topology import NUM_PHASES
from tests.builders import make_spec, make_window

SPEC = make_spec(num_layers=1, num_experts=8)
RANKS = 4


def run(demands, kept=8):
    """(state, history) after windows of these demands [layers, experts]."""
    state = initial_state(
        num_phases=NUM_PHASES, num_layers=SPEC.num_layers, num_experts=SPEC.num_experts
    )
    history = LoadHistory(kept=kept)
    for index, demand in enumerate(demands):
        window = make_window(SPEC, np.asarray(demand, float), index=index)
        state = observe(state, history, window, RANKS)
        history = history.with_window(window)
    return state, history


def test_balance_given_follows_the_worked_example():
    assert balance_given([[2, 1, 1]], [[2, 2, 0]], 2).tolist() == pytest.approx([1.0])
    assert balance_given([[2, 1, 1]], [[0, 2, 2]], 2).tolist() == pytest.approx([0.5])


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


def test_after_a_flip_the_layer_follows_what_forgets_soonest():
    hot_low = np.array([[80, 80, 80, 80, 8, 8, 8, 8]])
    state, history = run([hot_low] * 6 + [hot_low[:, ::-1]] * 3)
    assert FORECASTERS[forecast(state, history).chosen[0]] == "last"


def test_under_noise_the_layer_follows_a_mean():
    rng = np.random.default_rng(5)
    state, history = run([rng.poisson(40, (1, 8)) * 4 for _ in range(30)])
    assert FORECASTERS[forecast(state, history).chosen[0]] in {"window", "ewma_long"}


def test_a_silent_window_leaves_scores_alone():
    busy = np.array([[80, 8, 8, 8, 8, 8, 8, 8]])
    before, _ = run([busy] * 3)
    after, _ = run([busy] * 3 + [busy * 0])
    assert np.array_equal(before.scores, after.scores)
    assert after.windows_seen == 4


def test_scenarios_weigh_the_mean_half_and_sub_windows_half():
    window = make_window(SPEC, np.full((1, 8), 16.0))
    window.demand[0, 0, 0, 0] += 8  # a burst in the first quarter
    state = observe(
        initial_state(num_phases=NUM_PHASES, num_layers=1, num_experts=8),
        LoadHistory(kept=2),
        window,
        RANKS,
    )
    found = forecast(state, LoadHistory(kept=2).with_window(window))
    assert found.demand.shape == (5, NUM_PHASES, 1, 8)
    assert found.weights.tolist() == [0.5, 0.125, 0.125, 0.125, 0.125]
    assert found.demand[:, 0, 0, 0].tolist() == pytest.approx([12, 24, 8, 8, 8])
    assert found.demand[:, 0, 0, 1].tolist() == pytest.approx([8.0] * 5)


def test_scenarios_are_never_negative():
    quiet = np.full((1, 8), 4.0)
    state, history = run([quiet] * 5)
    burst = make_window(SPEC, quiet * 0, index=5)
    burst.demand[3, 0, 0, 0] = 1000
    state = observe(state, history, burst, RANKS)
    assert forecast(state, history.with_window(burst)).demand.min() >= 0


def test_a_window_of_no_length_has_no_scenario_beside_the_mean():
    window = make_window(SPEC, np.full((1, 8), 16.0), window_s=0.0)
    state = observe(
        initial_state(num_phases=NUM_PHASES, num_layers=1, num_experts=8),
        LoadHistory(kept=2),
        window,
        RANKS,
    )
    assert forecast(state, LoadHistory(kept=2).with_window(window)).demand.sum() == 0


def test_nothing_can_be_forecast_before_the_first_window():
    state = initial_state(num_phases=NUM_PHASES, num_layers=1, num_experts=8)
    with pytest.raises(LoadError, match="close one first"):
        forecast(state, LoadHistory(kept=2))


def test_an_unknown_forecaster_is_named():
    state, history = run([np.ones((1, 8)) * 8])
    with pytest.raises(LoadError, match="'oracle' is not one of"):
        predict("oracle", state, history)


def test_state_survives_the_journal():
    state, _ = run([np.ones((1, 8)) * 8, np.ones((1, 8)) * 16])
    assert encode(decode_as(encode(state), ForecastState)) == encode(state)
