import itertools
import json
import os

import numpy as np
import pytest

from benchmarks import policies
from benchmarks.placement_traces import DATA_VARIABLE
from benchmarks.policies_learned import (
    QUARTERS_SEEN,
    Network,
    cross_entropy,
    featured,
    mean_shares,
    policy_of,
    train,
)
from benchmarks.policies_optimum import Game, layout_cost, optimum, work_step
from benchmarks.policies_players import (
    PLAYERS,
    FollowLast,
    WorkFunction,
    game_fleet,
    make_player,
    rows_of,
)
from benchmarks.policies_race import balances, drive
from benchmarks.policies_ratio import demand_of, floor_of, measure, play
from benchmarks.policies_report import cell, lines_of, page
from benchmarks.policies_swap import EXPERTS, HOT, SWAPPED, scored, shift_after, traffic
from benchmarks.policies_traffic import PAIRS, PATTERNS, QUARTERS, PingPong, pattern
from benchmarks.policies_world import (
    Clairvoyant,
    Forecasting,
    Learned,
    Periodic,
    Production,
    Still,
    first_layout,
    make_fleet,
    request_for,
)
from placement.config import RebalanceConfig
from placement.layout import ExpertLayout
from placement.planner import make_plan
from placement.planner.compose import WaveConfig
from placement.policy import propose
from placement.replay.optimum import offline_optimum
from placement.scoring import max_over_mean, rank_load

SMALL = Game(num_experts=3, num_ranks=2, slots_per_rank=2)


def small_fleet(layers=2, price=0.01):
    return make_fleet(
        layers=layers,
        experts=8,
        top_k=2,
        ranks=4,
        slots_per_rank=3,
        pairs_per_layer=4000.0,
        write_price=price,
    )


def small_counts(windows=6, layers=2, seed=1):
    generator = np.random.default_rng(seed)
    share = generator.dirichlet(np.full(8, 0.7), size=layers)
    return np.stack(
        [
            [[generator.multinomial(1000, row) for row in share] for _ in range(QUARTERS)]
            for _ in range(windows)
        ]
    )


# -- states, costs, distances ----------------------------------------------------------------------


def test_states_are_all_full_layouts_up_to_the_names_of_ranks():
    seen = set()
    for rows in itertools.product(itertools.combinations(range(3), 2), repeat=2):
        if set().union(*rows) == {0, 1, 2}:
            seen.add(tuple(sorted(sum(1 << e for e in row) for row in rows)))
    assert {tuple(state) for state in SMALL.states.tolist()} == seen
    assert len(Game().states) == 375


def test_distance_is_the_fewest_writes_over_relabellings():
    # rank 0 {0,1}, rank 1 {0,2}  ->  rank 0 {1,2}, rank 1 {0,1}: relabelled, one write
    a, b = SMALL.number_of([0b011, 0b101]), SMALL.number_of([0b110, 0b011])
    assert SMALL.writes[a, b] == 1
    assert (SMALL.writes == SMALL.writes.T).all()
    assert (np.diag(SMALL.writes) == 0).all()


def test_costs_are_those_of_the_router_s_split():
    game = Game()
    demand = np.random.default_rng(3).multinomial(4000, [0.4, 0.2, 0.2, 0.1, 0.06, 0.04])
    costs = game.costs(demand[None])[0]
    fleet = game_fleet(game, 4000.0, 0.01)
    layout = first_layout(fleet)
    want = max_over_mean(rank_load(layout, demand[None].astype(float)))[0]
    assert costs[game.number_of(rows_of(layout))] == pytest.approx(want, abs=1e-9)
    assert layout_cost(rows_of(layout), demand) == pytest.approx(want, abs=1e-9)


def test_costs_of_nothing_are_one_and_unserved_demand_is_refused():
    assert (SMALL.costs(np.zeros((1, 3))) == 1.0).all()
    assert layout_cost([0b001, 0], [0, 0]) == 1.0
    with pytest.raises(ValueError, match="no replica"):
        layout_cost([0b001, 0b001], [1, 1])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((3, 2, 4), "slots_per_rank"),
        ((9, 2, 2), "do not hold"),
        ((12, 6, 4), "states"),
    ],
)
def test_games_that_are_none_or_too_large_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Game(*fields)
    with pytest.raises(ValueError, match="not a full layout"):
        SMALL.number_of([0b001, 0b110])


# -- the optimum -----------------------------------------------------------------------------------


def brute_force(game, costs, start, price):
    """Least total over every sequence of states."""
    best = np.inf
    for path in itertools.product(range(len(game.states)), repeat=len(costs)):
        at, total = start, 0.0
        for window, state in enumerate(path):
            total += price * int(game.writes[at, state]) + costs[window, state]
            at = state
        best = min(best, total)
    return best


@pytest.mark.parametrize("price", [0.0, 0.02, 0.3, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_optimum_is_that_of_brute_force(price, seed):
    generator = np.random.default_rng(seed)
    demand = generator.multinomial(100, generator.dirichlet(np.full(3, 0.5)), size=5)
    demand[2:] = demand[2:, ::-1]
    costs = SMALL.costs(demand)
    start = seed % len(SMALL.states)
    found = optimum(SMALL, costs, start, price)
    assert found.total == pytest.approx(brute_force(SMALL, costs, start, price))
    # and the path it names is worth what it says
    steps = [start, *found.path.tolist()]
    writes = sum(int(SMALL.writes[a, b]) for a, b in itertools.pairwise(steps))
    paid = sum(costs[w, s] for w, s in enumerate(found.path))
    assert writes == found.writes
    assert paid + price * writes == pytest.approx(found.total)


def test_optimum_is_that_of_the_replay_s_own_programme():
    """Two programmes that share nothing: one over layouts up to names of ranks, one over all."""
    game = Game(num_experts=4, num_ranks=3, slots_per_rank=2)
    layout = ExpertLayout.from_rows([[0, 1], [2, 3], [0, 2]], num_layers=1, num_experts=4)
    counts = np.random.default_rng(8).multinomial(3000, [0.5, 0.25, 0.15, 0.1], size=8) * 1
    counts[4:] = counts[4:, ::-1]
    costs = game.costs(counts)
    prices = (0.005, 0.05, 0.5)
    theirs = offline_optimum(layout, [2, 2, 2], counts, prices)
    ours = [optimum(game, costs, game.number_of(rows_of(layout)), p).total for p in prices]
    assert theirs is not None
    # theirs counts whole pairs: up to one pair of a mean of 1,000 more in every window
    assert ours == pytest.approx(list(theirs), abs=8 / 1000)


def test_no_layout_with_an_empty_slot_would_do_better():
    """The optimum over full states is the optimum over all layouts: an extra expert never costs."""
    demand = [50, 30, 20]
    for state in SMALL.states.tolist():
        for rank, bit in itertools.product(range(2), range(3)):
            fewer = list(state)
            fewer[rank] &= ~(1 << bit)
            if fewer[0] | fewer[1] == 0b111:
                assert layout_cost(fewer, demand) >= layout_cost(state, demand) - 1e-12


def test_the_work_function_s_least_value_is_the_optimum():
    demand = np.random.default_rng(5).multinomial(100, [0.6, 0.3, 0.1], size=6)
    demand[3:] = demand[3:, ::-1]
    costs = SMALL.costs(demand)
    work = 0.05 * SMALL.writes[0].astype(float)
    for window in range(6):
        work = work_step(work + costs[window], SMALL.writes, 0.05)
    assert work.min() == pytest.approx(optimum(SMALL, costs, 0, 0.05).total)


# -- players and traffic ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_whole_seeded_and_different_for_other_seeds(name):
    counts = pattern(name, 7, windows=40)
    assert counts.shape == (40, QUARTERS, 6)
    assert (counts.sum(axis=(1, 2)) == PAIRS).all()
    assert np.array_equal(counts, pattern(name, 7, windows=40))
    assert not np.array_equal(counts, pattern(name, 8, windows=40))
    with pytest.raises(ValueError, match="not one of"):
        pattern("tide", 0)


def test_the_adversary_is_deterministic_and_asks_for_what_costs_more():
    game = Game()
    one, two = PingPong(4), PingPong(4)
    for state in game.states[::25].tolist():
        asked = one.ask(state)
        assert np.array_equal(asked, two.ask(state))
        costs = [layout_cost(state, counts) for counts in one.sets]
        assert layout_cost(state, asked.sum(axis=0)) == pytest.approx(max(costs))
    assert floor_of(game, one) >= 1.0
    assert not np.array_equal(PingPong(5).sets, one.sets)


@pytest.mark.parametrize("name", PLAYERS)
def test_every_player_plays_the_same_twice_and_never_beats_the_optimum(name):
    game, demand = Game(), pattern("step", 2, windows=30)
    costs = game.costs(demand.sum(axis=1))
    start = game.number_of(rows_of(Still(game_fleet(game, float(PAIRS), 0.05)).layout))
    first = play(make_player(name, game, float(PAIRS), 0.05), demand)
    again = play(make_player(name, game, float(PAIRS), 0.05), demand)
    assert first[:2] == again[:2]
    assert first[0] + 0.05 * first[1] >= optimum(game, costs, start, 0.05).total - 1e-9
    with pytest.raises(ValueError, match="not one of"):
        make_player("luck", game, 1.0, 0.05)


def test_the_player_who_follows_is_best_for_the_last_window():
    game = Game()
    player = FollowLast(game, 0, 0.05)
    counts = pattern("stationary", 1, windows=1)[0]
    player.take(counts)
    costs = game.costs(counts.sum(axis=0)[None])[0]
    assert costs[player.at] == pytest.approx(costs.min())


def test_the_work_function_leaves_a_bad_layout_sooner_where_writes_are_cheap():
    moved = []
    for price in (0.005, 5.0):
        game = Game()
        worst = int(np.argmax(game.costs(PingPong(1).sets[:1])[0]))
        player = WorkFunction(game, worst, price)
        counts = np.tile(PingPong(1).sets[0], (QUARTERS, 1))
        writes = [player.take(counts) for _ in range(10)]
        moved.append(next(i for i, w in enumerate(writes) if w))
    assert moved[0] < moved[1]


def test_the_gate_sees_a_write_cost_its_price():
    """One write of a plan costs `price` windows of mean load in the planner's seconds."""
    game, price = Game(), 0.05
    fleet = game_fleet(game, float(PAIRS), price)
    layout = first_layout(fleet)
    hot = np.full((1, 1, 6), PAIRS * 0.1 / 2.0)
    hot[0, 0, 3] = PAIRS * 0.5 / 2.0
    request = request_for(fleet, layout, hot)
    plan = make_plan(layout, propose("incremental", request), request, WaveConfig())
    copies = sum(1 for move in plan.moves if move.target_rank >= 0)
    assert copies > 0
    assert plan.cost_s == pytest.approx(copies * price * RebalanceConfig().window_s)


def test_measure_gives_every_player_at_every_price():
    rows = measure("burst", 0, prices=(0.05,), players=("never", "last"))
    assert [row.player for row in rows] == ["never", "last"]
    assert rows[0].writes == 0
    assert rows[0].ratio >= 1.0
    assert isinstance(demand_of("ping-pong", 0), PingPong)


# -- runners ---------------------------------------------------------------------------------------


def test_runners_keep_their_promises():
    fleet, counts = small_fleet(), small_counts()
    still, each, limited = Still(fleet), Periodic(fleet, "eplb", 3), Forecasting(fleet, 2)
    told = Clairvoyant(fleet, 2, counts)
    writes = {r: [r.take(window) for window in counts] for r in (still, each, limited, told)}
    assert sum(writes[still]) == 0
    assert [bool(w) for w in writes[each]][1] is False  # between periods
    assert max(writes[limited][1:], default=0) <= 2
    assert max(writes[told][1:], default=0) <= 2
    for runner in writes:
        runner.layout.validate(fleet.topology, staging_slots=1)


def test_the_engine_s_writes_are_counted():
    fleet, counts = small_fleet(layers=1), small_counts(windows=8, layers=1, seed=3)
    engine = Production(fleet, RebalanceConfig())
    before = engine.layout
    writes = sum(engine.take(window) for window in counts)
    assert writes >= int(((engine.layout.hosts > 0) & ~(before.hosts > 0)).sum()) > 0
    assert engine.rules


def test_a_drive_scores_each_window_on_the_layout_made_before_it():
    fleet, counts = small_fleet(), small_counts(windows=5)
    whole, parts, writes = drive(Still(fleet), counts, warm_up=1)
    each = np.mean([balances(first_layout(fleet), c) for c in counts[1:]], axis=0)
    assert (whole, parts) == pytest.approx(tuple(each))
    assert writes == 0.0
    assert parts <= whole


def test_the_first_plan_s_writes_do_not_count():
    fleet, counts = small_fleet(), small_counts(windows=5)
    limited = Forecasting(fleet, 1)
    assert drive(limited, counts, warm_up=1)[2] <= 1.0
    runner = Forecasting(fleet, 1)
    assert runner.take(counts[0]) > 1


# -- the learned policy ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network():
    return train([small_counts(windows=8, seed=s) for s in (11, 11)], 0, memory=True, steps=300)


def test_the_learned_policy_returns_valid_layouts_within_its_budget(network):
    fleet, counts = small_fleet(), small_counts(windows=6)
    runner = Learned(fleet, policy_of(network), 2, QUARTERS_SEEN)
    writes = []
    for window in counts:
        writes.append(runner.take(window))
        runner.layout.validate(fleet.topology, staging_slots=1)
    assert writes[0] > 0
    assert max(writes[1:]) <= 2


def test_the_learned_policy_bears_no_demand_and_another_model(network):
    policy = policy_of(network)
    nothing = request_for(small_fleet(), first_layout(small_fleet()), np.zeros((1, 2, 8)))
    policy(nothing).validate(small_fleet().topology, staging_slots=1)
    other = make_fleet(
        layers=1,
        experts=6,
        top_k=2,
        ranks=3,
        slots_per_rank=3,
        pairs_per_layer=100.0,
        write_price=0.01,
    )
    request = request_for(other, first_layout(other), np.ones((3, 1, 6)))
    policy(request).validate(other.topology, staging_slots=1)


def test_training_is_seeded_and_learns(network):
    line = small_counts(windows=8, seed=11)
    same = train([line, line], 0, memory=True, steps=300)
    assert all(np.array_equal(a, b) for a, b in zip(same.weights, network.weights, strict=True))
    plain = cross_entropy(lambda q: mean_shares(q, quarters_kept=QUARTERS), line)
    assert cross_entropy(network.shares, line) < plain
    with pytest.raises(ValueError, match="more than 3 windows"):
        train([line[:3]], 0, memory=False)


def test_an_untrained_network_forecasts_the_last_window(network):
    quarters = small_counts(windows=3)[:, :, :, :].reshape(-1, 2, 8).astype(float)
    inputs = featured(quarters, None, with_memory=False)[0].shape[-1]
    zero = tuple(np.zeros(s) for s in ((inputs, 32), 32, (32, 32), 32, (32, 1), 1))
    shares = Network(zero, None).shares(quarters)
    want = quarters[-QUARTERS:].sum(axis=0)
    np.testing.assert_allclose(shares, want / want.sum(axis=-1, keepdims=True), atol=0.01)
    np.testing.assert_allclose(shares.sum(axis=-1), 1.0)


def test_forecasts_do_not_depend_on_the_order_of_experts_without_memory():
    line = small_counts(windows=8, seed=4)
    plain = train([line], 1, memory=False, steps=20)
    quarters = line.reshape(-1, 2, 8).astype(float)
    turned = plain.shares(quarters[:, :, ::-1])
    np.testing.assert_allclose(turned[:, ::-1], plain.shares(quarters), atol=1e-9)


# -- the shift -------------------------------------------------------------------------------------


def test_the_shift_trades_sixteen_hot_experts_for_cold_ones():
    counts = traffic(0.8, 3)
    assert np.array_equal(counts, traffic(0.8, 3))
    at = shift_after(3)
    before = counts[:at].sum(axis=(0, 1, 2)) / at
    after = counts[at:].sum(axis=(0, 1, 2)) / (len(counts) - at)
    hot_before, hot_after = (set(np.argsort(-x)[:HOT].tolist()) for x in (before, after))
    # neighbours in rank are hard to tell apart at the edge of the hot set: a few may differ
    assert abs(len(hot_before - hot_after) - SWAPPED) <= 4
    assert counts.shape[-1] == EXPERTS


def test_the_shift_s_figures_are_those_of_its_windows():
    ratios = np.full(80, 1.02)
    at = shift_after(1)
    ratios[at : at + 2] = 1.35, 1.2
    ratios[at - 1] = 3.0  # before the shift: does not count
    found = scored("x", 0.4, 0.01, 1, ratios, np.full(80, 2))
    assert found.windows_over == 2
    assert found.area == pytest.approx(0.25)
    assert found.first == pytest.approx(1.35)
    assert found.curve[:4] == pytest.approx((1.02, 3.0, 1.35, 1.2))
    assert found.steady == pytest.approx(1.02)
    assert found.writes_share == pytest.approx(2 / 288)


# -- command and page ------------------------------------------------------------------------------


def test_cells_show_mean_and_range():
    assert cell([0.5]) == "0.500"
    assert cell([0.5, 0.7], 2) == "0.60 [0.50..0.70]"


def test_the_page_is_made_from_results_alone(tmp_path, monkeypatch):
    row = {"traffic": "step", "player": "engine", "price": 0.02, "seed": 0, "windows": 10}
    row |= {"loss": 11.0, "writes": 0, "best": 10.0, "best_writes": 0, "floor": 0.0, "rules": {}}
    assert lines_of("ratio", [row])[-1] == "| step | 0.02 | 1.5 | 1.10 |  |"
    environment = {
        "commit": "abc",
        "measured_at": "2026-01-01T00:00:00",
        "cpu_count": 2,
        "cpu": "chip",
        "python": "3.11",
        "versions": {"numpy": "2"},
    }
    text = page({"ratio": {"environment": environment, "rows": [row]}})
    assert "Seeds 0 to 0, commit abc, 2026-01-01, 2 x chip" in text
    stored, docs = tmp_path / "a.json", tmp_path / "docs" / "a.md"
    stored.write_text(json.dumps({"environment": environment, "parts": {"ratio": [row]}}))
    monkeypatch.setattr(policies, "use_one_thread", lambda: None)  # numpy is loaded already
    assert policies.main(["--read", str(stored), "--docs", str(docs)]) == 0
    assert docs.read_text() == text


@pytest.mark.parametrize("name", policies.NEEDS_TRACES)
def test_parts_that_need_traces_refuse_without(name, monkeypatch):
    from benchmarks.placement_traces import TracesMissing

    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    options = policies._parser().parse_args([])
    with pytest.raises(TracesMissing, match=DATA_VARIABLE):
        policies.measured(name, range(1), options)


@pytest.mark.skipif(
    not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} is not set: no recorded traces"
)
def test_training_and_testing_share_no_request():
    from benchmarks.placement_traces import load_case
    from benchmarks.policies_race import half

    case = load_case("deepseek8")
    assert not set(half(case, test=True)) & set(half(case, test=False))
