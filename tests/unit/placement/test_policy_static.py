import numpy as np
import pytest

from placement.layout import ExpertLayout
from placement.policy import PolicyError, propose
from placement.policy.static import shares
from tests.builders import make_layout, make_request, make_spec, make_topology


def request_of(spec, topology, layout=None, **fields):
    empty = ExpertLayout.empty(topology, num_layers=spec.num_layers, num_experts=spec.num_experts)
    return make_request(spec, topology, empty if layout is None else layout, **fields)


def test_the_worked_example():
    spec = make_spec(num_layers=1, num_experts=8)
    layout = propose("static", request_of(spec, make_topology([4] * 4)))
    assert layout.slots.tolist() == [[0, 1, 2, -1], [2, 3, 0, -1], [4, 5, 1, -1], [6, 7, 3, -1]]


def test_masters_are_contiguous_and_every_layer_gets_the_same_share():
    spec = make_spec(num_layers=4, num_experts=32)
    layout = propose("static", request_of(spec, make_topology([41] * 4)))
    view = layout.physical_to_logical()
    assert view.shape == (4, 40)
    for layer in range(4):
        for rank in range(4):
            masters = range(8 * rank, 8 * rank + 8)
            assert set(masters) <= set(view[layer, 10 * rank : 10 * rank + 10].tolist())
    assert layout.replica_counts.sum() == 160


def test_uneven_ranks_get_their_share():
    spec = make_spec(num_layers=3, num_experts=5)
    layout = propose("static", request_of(spec, make_topology([13, 4, 2]), staging_slots=1))
    assert [int((row >= 0).sum()) for row in layout.slots] == [12, 3, 1]


def test_a_rank_holds_an_expert_once_even_when_there_is_room_for_more():
    spec = make_spec(num_layers=1, num_experts=3)
    layout = propose("static", request_of(spec, make_topology([9, 9])))
    assert layout.replica_counts.tolist() == [[2, 2, 2]]


def test_draining_and_lost_ranks_hold_nothing():
    spec = make_spec(num_layers=1, num_experts=4)
    topology = make_topology(
        [4] * 4, alive=[True, True, False, True], draining=[False, True, False, False]
    )
    layout = propose("static", request_of(spec, topology))
    assert (layout.slots[1] == -1).all()
    assert (layout.slots[2] == -2).all()
    assert (layout.replica_counts >= 1).all()


def test_the_floor_comes_before_extras():
    spec = make_spec(num_layers=2, num_experts=4)
    topology = make_topology([5, 5, 5, 5])
    layout = propose("static", request_of(spec, topology, floor=2))
    layout.validate(topology, floor=2, staging_slots=1)


def test_a_floor_that_memory_cannot_reach_is_lowered():
    spec = make_spec(num_layers=1, num_experts=8)
    topology = make_topology([4, 4, 4, 4])
    layout = propose("static", request_of(spec, topology, floor=2))
    layout.validate(topology, floor=1, staging_slots=1)


def test_a_key_that_stays_keeps_its_live_slot():
    spec = make_spec(num_layers=1, num_experts=4)
    live = make_layout([[-1, 1, 0], [3, -1, 2]])
    layout = propose("static", request_of(spec, make_topology([3, 3]), live))
    assert layout.same_as(live)


def test_too_few_slots_are_named_in_slots_and_bytes():
    spec = make_spec(num_layers=2, num_experts=4, slot_bytes=1000)
    topology = make_topology([3, 3, 9], draining=[False, False, True])
    with pytest.raises(
        PolicyError, match=r"can fill 4 slots, 8 .* 4 slots \(4000 bytes\) are short"
    ):
        propose("static", request_of(spec, topology))


def test_shares_follow_the_running_sum_and_never_exceed_capacity():
    capacity = np.array([7, 5, 1, 0])
    rows = shares(np.array([4, 4, 5]), capacity)
    assert rows.sum(axis=1).tolist() == [4, 4, 5]
    assert rows.sum(axis=0).tolist() == capacity.tolist()
    assert rows.min() >= 0
