"""A window's bytes as arrays, and one phase of them."""

import numpy as np
import pytest

from moe_serve.documents.window import CELLS_MAX, PhaseChoice, busy_of, counts_of, of_phase
from moe_serve.errors import InvalidArgument, NotFound
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import make_window

DEMAND = np.array([[[6, 2], [0, 0]], [[1, 1], [0, 4]]])
"""[phases, layers, experts]."""


def test_arrays_have_the_shape_that_the_window_says() -> None:
    load = make_window(DEMAND, np.array([[10, 4], [0, 2]]), np.array([[0.5, 1.0], [0.0, 0.25]]))
    assert counts_of(load, "demand").tolist() == DEMAND.tolist()
    assert counts_of(load, "rank_pairs").tolist() == [[10, 4], [0, 2]]
    assert busy_of(load).tolist() == [[0.5, 1.0], [0.0, 0.25]]


def test_negative_counts_and_absurd_shapes_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"^demand of window 12: counts"):
        counts_of(make_window(-DEMAND), "demand")
    for layers, experts in ((2**31 - 1, 2**31 - 1), (-2, -3), (-2, 2), (1, CELLS_MAX + 1)):
        load = pb.GetLoadResponse(num_phases=1, num_layers=layers, num_experts=experts)
        with pytest.raises(InvalidArgument, match=r"^demand of window 0: .* cells"):
            counts_of(load, "demand")


def test_a_phase_that_is_not_told_is_refused_by_name() -> None:
    one = np.ones((1, 2, 3), dtype=np.int64)
    everything = of_phase(one, PhaseChoice.ALL).tolist()
    assert everything == of_phase(one, PhaseChoice.PREFILL).tolist()
    with pytest.raises(NotFound, match="decode") as refused:
        of_phase(one, PhaseChoice.DECODE)
    assert refused.value.violations[0].field == "phase"


def test_phases_may_lie_on_another_axis() -> None:
    busy = np.array([[0.5, 1.0], [0.0, 0.25]])
    assert of_phase(busy, PhaseChoice.DECODE, axis=1).tolist() == [1.0, 0.25]
    assert of_phase(busy, PhaseChoice.ALL, axis=1).tolist() == [1.5, 0.25]
