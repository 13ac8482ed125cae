"""Policies beside each other on a trace, and the references they are measured against."""

from itertools import combinations, product

import msgspec
import numpy as np
import pytest

from placement.config import RebalanceConfig
from placement.layout import ExpertLayout
from placement.replay import (
    WRITE_PRICES,
    compare,
    count_windows,
    offline_optimum,
    replay_trace,
    trace_windows,
)
from placement.scoring import max_over_mean, rank_load
from placement.topology import Phase
from tests.builders import make_spec, make_topology

# -- windows -------------------------------------------------------------------------------------


def counted(counts, window_tokens, sub_windows=4, phase=Phase.PREFILL):
    counts = np.asarray(counts, dtype=np.int64)
    spec = make_spec(num_layers=counts.shape[1], num_experts=counts.shape[2], top_k=2)
    return count_windows(
        counts,
        spec,
        window_tokens=window_tokens,
        window_s=2.0,
        sub_windows=sub_windows,
        phase=phase,
    )


def test_steps_are_gathered_until_a_window_is_full_and_never_cut():
    # 8 pairs are 4 tokens; the second step alone has 6, the last window is not full.
    steps = [[[8, 0]], [[6, 6]], [[4, 0]], [[0, 4]], [[2, 0]]]
    windows = counted(steps, window_tokens=4, sub_windows=1)
    assert [w.demand.sum(axis=(0, 1, 2)).tolist() for w in windows] == [[8, 0], [6, 6], [4, 4]]
    assert [(w.index, w.start_s, w.end_s) for w in windows] == [(0, 0, 2), (1, 2, 4), (2, 4, 6)]


def test_tokens_of_a_step_are_those_of_its_busiest_layer():
    steps = [[[4, 0], [0, 0]], [[0, 0], [4, 0]]]
    assert len(counted(steps, window_tokens=2)) == 2


def test_windows_have_no_more_parts_than_steps_and_keep_the_phase():
    steps = [[[2, 0]]] * 6
    windows = counted(steps, window_tokens=3, phase=Phase.DECODE)
    assert [w.demand.shape[0] for w in windows] == [3, 3]
    assert windows[0].demand[:, Phase.DECODE].sum(axis=(1, 2)).tolist() == [2, 2, 2]
    assert windows[0].demand[:, Phase.PREFILL].sum() == 0


def test_counts_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"steps, 1, 4"):
        count_windows(
            np.zeros((3, 2, 4), np.int64), make_spec(), window_tokens=1, window_s=1, sub_windows=1
        )


def test_tokens_are_counted_in_their_phase():
    spec = make_spec(num_layers=2, num_experts=4)
    ids = np.array([[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
    options = {"window_tokens": 2, "window_s": 1.0, "sub_windows": 1}
    (window,) = trace_windows(ids, spec, **options, phase=np.array([0, 1]))
    assert window.demand[0, Phase.PREFILL].tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert window.demand[0, Phase.DECODE].tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    (window,) = trace_windows(ids, spec, **options, phase=Phase.DECODE)
    assert window.demand[0, Phase.PREFILL].sum() == 0
    with pytest.raises(ValueError, match=r"phases must lie in \[0, 2\), got 0\.\.2"):
        trace_windows(ids, spec, **options, phase=np.array([0, 2]))


# -- the offline optimum -------------------------------------------------------------------------


def by_hand(start, capacity, counts, price):
    """The least cost by trying every path of every layout."""
    num_experts, num_ranks = start.num_experts, start.num_ranks
    sets = [
        [c for size in range(most + 1) for c in combinations(range(num_experts), size)]
        for most in capacity
    ]
    states = [s for s in product(*sets) if set().union(*s) == set(range(num_experts))]

    def served(state, window):
        layout = ExpertLayout.from_rows(state, num_layers=1, num_experts=num_experts)
        return float(max_over_mean(rank_load(layout, window[None, :]))[0])

    costs = [[served(state, window) for state in states] for window in counts]
    best = np.inf
    first = [set(row[row >= 0].tolist()) for row in start.slots]
    for path in product(range(len(states)), repeat=len(counts)):
        cost, held = 0.0, first
        for window, at in enumerate(path):
            after = [set(members) for members in states[at]]
            cost += price * sum(len(after[r] - held[r]) for r in range(num_ranks))
            cost += costs[window][at]
            held = after
        best = min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_that_of_every_path(seed):
    rng = np.random.default_rng(seed)
    start = ExpertLayout.from_rows([[0, 1], [2, -1]], num_layers=1, num_experts=3)
    counts = rng.integers(0, 12, size=(2, 3)) * rng.integers(0, 2, size=(2, 3))
    prices = (0.0, 0.05, 0.3)
    got = offline_optimum(start, [2, 2], counts, prices)
    assert got == pytest.approx([by_hand(start, [2, 2], counts, price) for price in prices])


def test_a_window_without_load_costs_one_and_moves_nothing():
    start = ExpertLayout.from_rows([[0], [1]], num_layers=1, num_experts=2)
    assert offline_optimum(start, [1, 1], np.zeros((3, 2), np.int64), (0.1,)) == (3.0,)


def test_writes_are_paid_where_they_save_more():
    # Expert 0 has all the load: two replicas halve it for one write.
    start = ExpertLayout.from_rows([[0, -1], [1, -1]], num_layers=1, num_experts=2)
    counts = np.array([[100, 0]] * 3)
    assert offline_optimum(start, [2, 2], counts, (0.5, 5.0)) == (3.5, 6.0)


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "slots"),
    [(2, 4, 2), (1, 40, 20), (1, 16, 4)],
    ids=["layers", "layouts", "sets"],
)
def test_large_instances_have_no_optimum_here(num_layers, num_experts, slots):
    rows = [list(range(slots)), list(range(slots))]
    start = ExpertLayout.from_rows(rows, num_layers=num_layers, num_experts=num_experts)
    counts = np.ones((1, num_experts), np.int64)
    assert offline_optimum(start, [slots] * 2, counts, (0.1,)) is None


# -- comparison ----------------------------------------------------------------------------------


def flipping(layers=1, experts=6, windows=6, seed=0):
    """Half-way the hot experts change."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, experts + 1) ** 1.2
    counts = rng.multinomial(400, weights / weights.sum(), size=(4 * windows, layers))
    counts[2 * windows :] = counts[2 * windows :, :, ::-1]
    return counted(counts, window_tokens=800)


CONFIG = RebalanceConfig(cooldown_s=1.0)
POLICIES = ("static", "eplb", "incremental")


def compared(layers=1, policies=POLICIES, windows=None):
    spec = make_spec(num_layers=layers, num_experts=6, top_k=2)
    topology = make_topology([1 + 2 * layers] * 4)
    windows = flipping(layers) if windows is None else windows
    return windows, spec, topology, compare(windows, spec, topology, CONFIG, policies)


def test_policies_are_scored_as_if_each_ran_alone():
    windows, spec, topology, found = compared()
    assert [one.policy for one in found.policies] == list(POLICIES)
    for one in found.policies:
        config = msgspec.structs.replace(CONFIG, policy=one.policy)
        alone = replay_trace(windows, spec, topology, config)
        assert msgspec.to_builtins(one.figures) == msgspec.to_builtins(alone)
    static = found.policies[0].figures
    assert (static.slot_writes, static.static_leveled) == (0, static.served)


def test_regret_is_against_the_best_of_each_window():
    _, _, _, found = compared()
    for at in range(len(found.clairvoyant)):
        seconds = [one.figures.windows[at].seconds for one in found.policies]
        regret = [one.regret_s[at] for one in found.policies]
        assert min(regret) >= 0.0
        lost = np.array(seconds) - regret  # the same best for all
        assert lost == pytest.approx(lost[0])
        assert lost[0] <= min(seconds)
    for one in found.policies:
        assert one.regret_total_s == pytest.approx(sum(one.regret_s))
    static, _, incremental = found.policies
    assert incremental.regret_total_s < static.regret_total_s


def test_nothing_is_better_than_the_bound_nor_cheaper_than_the_optimum():
    _, _, _, found = compared()
    assert found.reference == "offline optimum"
    for one in found.policies:
        assert one.figures.equal <= one.figures.served <= one.figures.bound <= 1.0
        assert [ratio.write_price for ratio in one.competitive] == list(WRITE_PRICES)
        for ratio in one.competitive:
            served = sum(window.max_over_mean for window in one.figures.windows)
            assert ratio.cost == served + ratio.write_price * one.figures.slot_writes
            assert ratio.ratio == ratio.cost / ratio.reference_cost >= 1.0


def test_more_layers_are_measured_against_a_lower_bound():
    windows, _, _, found = compared(layers=2, policies=("incremental",))
    assert found.reference == "lower bound"
    (one,) = found.policies
    least = [ratio.reference_cost for ratio in one.competitive]
    # Every window has whole pairs for each rank, or one pair more on the fullest.
    assert least == [least[0]] * len(WRITE_PRICES)
    assert 2 * len(windows) <= least[0] < 2 * len(windows) * 1.01
    assert all(ratio.ratio >= 1.0 for ratio in one.competitive)


def test_windows_without_load_and_no_windows_are_in_balance():
    spec = make_spec(num_layers=2, num_experts=6)
    idle = count_windows(
        np.zeros((1, 2, 6), np.int64), spec, window_tokens=0, window_s=2.0, sub_windows=1
    )
    _, _, _, found = compared(layers=2, policies=("static",), windows=idle)
    assert (found.clairvoyant, found.clairvoyant_total) == ((1.0,), 1.0)
    assert found.policies[0].figures.bound == 1.0
    assert [one.ratio for one in found.policies[0].competitive] == [1.0] * 3
    _, _, _, found = compared(layers=2, policies=("static",), windows=[])
    assert [one.ratio for one in found.policies[0].competitive] == [1.0] * 3
    assert found.clairvoyant_total == 1.0


def test_a_lost_rank_can_hold_nothing():
    windows, spec, _, _ = compared(policies=("static",))
    topology = make_topology([4] * 4, alive=[True, True, True, False])
    found = compare(windows, spec, topology, CONFIG, ("static",))
    assert found.reference == "offline optimum"


def test_a_comparison_needs_a_policy():
    windows, spec, topology, _ = compared(policies=("static",))
    with pytest.raises(ValueError, match="at least one policy"):
        compare(windows, spec, topology, CONFIG, ())
