"""A window's bytes and a placement as rates, shares and replicas."""

import numpy as np
import pytest

from moe_serve.cli.hotness import hotness_of
from moe_serve.documents.window import PhaseChoice
from moe_serve.errors import FailedPrecondition, InvalidArgument
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import make_placement, make_window

DEMAND = np.array([[[6, 2], [0, 0]], [[1, 1], [0, 4]]])
"""[phases, layers, experts]."""


@pytest.mark.parametrize(
    ("phase", "pairs"),
    [
        (PhaseChoice.ALL, [[7, 3], [0, 4]]),
        (PhaseChoice.PREFILL, [[6, 2], [0, 0]]),
        (PhaseChoice.DECODE, [[1, 1], [0, 4]]),
    ],
)
def test_pairs_are_those_of_the_phase(phase: PhaseChoice, pairs: list[list[int]]) -> None:
    hot = hotness_of(make_window(DEMAND), make_placement(), phase)
    assert hot.pairs.tolist() == pairs
    assert hot.rates.tolist() == (np.array(pairs) / 2.0).tolist()


def test_shares_are_of_the_layer_and_fair_ones_are_one() -> None:
    hot = hotness_of(make_window(DEMAND), make_placement(), PhaseChoice.ALL)
    np.testing.assert_allclose(hot.shares, [[0.7, 0.3], [0.0, 1.0]])
    np.testing.assert_allclose(hot.times_fair_share, [[1.4, 0.6], [0.0, 2.0]])
    idle = hotness_of(make_window(0 * DEMAND), make_placement(), PhaseChoice.ALL)
    assert not idle.shares.any()


def test_replicas_are_the_listed_ones_and_their_ranks() -> None:
    placement = make_placement()
    placement.ranks[0].slots[2].CopyFrom(pb.Slot(index=2, layer=0, expert=1, state="LISTED"))
    placement.ranks[1].slots[1].state = "COPYING"
    hot = hotness_of(make_window(DEMAND), placement, PhaseChoice.ALL)
    assert hot.replicas.tolist() == [[1, 2], [1, 0]]
    assert hot.ranks_of == {(0, 0): (0,), (1, 0): (0,), (0, 1): (0, 1)}


def test_ranks_have_rates_of_both_phases_and_busy_seconds_of_one() -> None:
    load = make_window(DEMAND, np.array([[10, 4], [0, 2]]), np.array([[0.5, 1.0], [0.0, 0.25]]))
    hot = hotness_of(load, make_placement(), PhaseChoice.DECODE)
    assert hot.rank_rates.tolist() == [7.0, 1.0]
    assert [hot.busy(rank) for rank in (0, 1, 2)] == [0.5, 0.125, None]
    assert hotness_of(load, make_placement(), PhaseChoice.ALL).busy(0) == 0.75


@pytest.mark.parametrize(
    "load",
    [
        None,
        pb.GetLoadResponse(),
        make_window(np.ones((2, 3, 2))),
    ],
    ids=["none", "empty", "of another model"],
)
def test_a_window_that_does_not_fit_counts_nothing(load: pb.GetLoadResponse | None) -> None:
    hot = hotness_of(load, make_placement(), PhaseChoice.ALL)
    assert hot.pairs.tolist() == [[0, 0], [0, 0]]
    assert not hot.rates.any()
    assert (hot.num_layers, hot.num_experts) == (2, 2)


@pytest.mark.parametrize("name", ["demand", "rank_busy", "rank_pairs"])
@pytest.mark.parametrize("size", [7, 8, 800])
def test_an_array_of_another_size_is_refused_by_name(name: str, size: int) -> None:
    load = make_window(DEMAND, np.array([[10, 4], [0, 2]]), np.array([[0.5, 1.0], [0.0, 0.25]]))
    setattr(load, name, b"\1" * size)
    with pytest.raises(FailedPrecondition, match=f"^{name} of window .* has {size} bytes"):
        hotness_of(load, make_placement(), PhaseChoice.ALL)


def test_a_phase_that_is_not_told_apart_is_refused_by_name() -> None:
    load = make_window(DEMAND[:1])
    assert hotness_of(load, make_placement(), PhaseChoice.ALL).pairs.tolist() == [[6, 2], [0, 0]]
    assert hotness_of(load, make_placement(), PhaseChoice.PREFILL).pairs[0, 0] == 6
    with pytest.raises(InvalidArgument, match="--phase decode"):
        hotness_of(load, make_placement(), PhaseChoice.DECODE)
    nothing = hotness_of(None, make_placement(), PhaseChoice.DECODE)
    assert not nothing.pairs.any(), "before the first window nothing is known of phases"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_seconds_that_are_no_number_make_no_rate(wrong: float) -> None:
    load = make_window(DEMAND, busy=np.array([[0.5, wrong], [0.5, 0.25]]))
    hot = hotness_of(load, make_placement(), PhaseChoice.ALL)
    assert [hot.busy(rank) for rank in (0, 1)] == [None, 0.375]
    load.end_s = wrong
    hot = hotness_of(load, make_placement(), PhaseChoice.PREFILL)
    assert not hot.rates.any()
    assert hot.busy(0) == (0.0 if wrong == float("inf") else None)
