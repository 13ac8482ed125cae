import numpy as np
import pytest

from placement.layout import SlotId
from placement.scoring import (
    balancedness,
    churn,
    coverage_after_loss,
    imbalance,
    layer_balancedness,
    max_over_mean,
    rank_load,
    worst_layer,
)
from tests.builders import make_layout, make_topology

SKEWED = np.array([[100, 0, 0, 0]] * 2).T  # two layers, all load on the first of four ranks


def test_a_fully_skewed_load_is_the_mean_over_ranks_and_not_over_layers():
    assert balancedness(SKEWED) == 0.25
    assert imbalance(SKEWED) == 3.0
    assert max_over_mean(SKEWED).tolist() == [4.0, 4.0]
    assert balancedness(SKEWED.T) != 0.25, "the axis matters"


def test_an_even_load_is_one():
    assert balancedness(np.full((3, 2), 7)) == 1.0
    assert imbalance(np.full((3, 2), 7)) == 0.0


def test_heavy_layers_weigh_more_than_light_ones():
    loads = [[90, 1], [10, 1]]
    assert balancedness(loads) == pytest.approx(51 / 91)
    assert layer_balancedness(loads).tolist() == pytest.approx([50 / 90, 1.0])
    assert worst_layer(loads) == (0, pytest.approx(50 / 90))


def test_layers_without_load_weigh_nothing():
    assert balancedness([[4, 0], [0, 0]]) == 0.5
    assert layer_balancedness([[4, 0], [0, 0]]).tolist() == [0.5, 1.0]
    assert balancedness(np.zeros((2, 2))) == 1.0
    assert max_over_mean(np.zeros((2, 2))).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("loads", [[1, 2], np.zeros((0, 3))])
def test_loads_have_two_axes_and_at_least_one_rank(loads):
    with pytest.raises(ValueError, match="ranks >= 1"):
        balancedness(loads)


def test_rank_load_levels_or_splits_equally():
    layout = make_layout([[0, 1, -1], [1, 2, 3]])
    demand = [[6, 4, 0, 0]]
    assert rank_load(layout, demand).tolist() == [[6.0], [4.0]]
    assert rank_load(layout, demand, "equal").tolist() == [[8.0], [2.0]]


def test_rank_load_keeps_layers_apart():
    layout = make_layout([[0, 3], [1, 2]], num_layers=2, num_experts=2)
    assert rank_load(layout, [[5, 1], [2, 3]]).tolist() == [[5.0, 3.0], [1.0, 2.0]]


def test_rank_load_levels_fractions_too():
    layout = make_layout([[0, 1, -1], [1, 2, 3]])
    loads = rank_load(layout, [[0.25, 0.5, 0.0, 0.0]])
    assert loads[:, 0] == pytest.approx([0.375, 0.375], rel=1e-9)
    assert rank_load(layout, np.zeros((1, 4))).sum() == 0


@pytest.mark.parametrize(
    ("demand", "says"),
    [
        ([[1, 2]], "the layout wants"),
        ([[1, -1, 0, 0]], "finite and >= 0"),
        ([[1, np.nan, 0, 0]], "finite and >= 0"),
        ([[0, 0, 0, 1]], "layer 0 expert 3 has demand but no replica"),
    ],
)
def test_rank_load_refuses_what_cannot_be_served(demand, says):
    with pytest.raises(ValueError, match=says):
        rank_load(make_layout([[0, 1], [1, 2]]), demand)


def test_churn_tells_writes_from_evictions_and_shuffles():
    before = make_layout([[0, 1, -1], [2, 3, 0]])
    assert churn(before, before) == (0, 0, 0, 0)
    written = before.with_slots([(SlotId(0, 1), 3), (SlotId(1, 2), -1)])
    assert churn(before, written) == (1, 1, 1, 2)
    shuffled = make_layout([[1, 0, -1], [2, 3, 0]])
    assert churn(before, shuffled) == (2, 0, 0, 0), "the same experts in other slots"


def test_churn_compares_layouts_of_different_width():
    before = make_layout([[0, 1, 2], [2, 3, 0]])
    assert churn(before, make_layout([[0, 1], [2, 3]])) == (0, 2, 0, 2)
    assert churn(make_layout([[0, 1], [2, 3]]), before) == (2, 0, 2, 0)


def test_churn_refuses_another_fleet():
    with pytest.raises(ValueError, match="same ranks"):
        churn(make_layout([[0, 1], [2, 3]]), make_layout([[0, 1, 2, 3]]))


def test_coverage_finds_the_worst_loss():
    topology = make_topology([4, 4, 4, 4])  # nodes of two ranks
    layout = make_layout([[0, 1], [2, -1], [0, 3], [1, -1]])
    assert coverage_after_loss(layout, topology) == (0.75, 1, ("node0",))
    assert coverage_after_loss(layout, topology, 2) == (0.0, 4, ("node0", "node1"))
    assert coverage_after_loss(layout, topology, 0) == (1.0, 0, ())


def test_coverage_does_not_count_lost_ranks():
    topology = make_topology([4, 4, 4, 4], alive=[True, True, False, True])
    layout = make_layout([[0, 1], [2, 3], [0, 3], [0, -1]])
    assert coverage_after_loss(layout, topology).keys_lost == 3


def test_coverage_refuses_more_losses_than_nodes():
    with pytest.raises(ValueError, match="live nodes, got 3"):
        coverage_after_loss(make_layout([[0], [1], [2], [3]]), make_topology([1, 1, 1, 1]), 3)
