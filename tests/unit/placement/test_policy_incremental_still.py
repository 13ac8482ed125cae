import numpy as np
import pytest

from placement.policy.candidates.kernels import Room
from placement.policy.incremental_search import StillLayers


def room(free, victim_loss, writes_left=9, far_left=9):
    near = np.ones((2, len(free)), np.bool_)
    loss = np.array(victim_loss, dtype=np.float64)
    return Room(np.array(free), loss, near, 0.0, 0.1, 1.0, writes_left, far_left)


def test_what_failed_at_a_cost_fails_at_a_higher_one_only():
    still = StillLayers()
    assert not still.known(3, room([0, 1], [2.0, 4.0]))
    still.learn(3, room([0, 1], [2.0, 4.0]))
    assert still.known(3, room([0, 1], [2.0, 5.0]))
    assert not still.known(3, room([0, 1], [1.9, 5.0]))
    assert not still.known(4, room([0, 1], [2.0, 4.0]))
    still.learn(3, room([0, 1], [1.0, 5.0]))
    assert still.known(3, room([0, 1], [1.0, 4.0])), "every candidate has failed by itself"


@pytest.mark.parametrize(
    "other",
    [
        room([1, 1], [2.0, 4.0]),
        room([0, 1], [2.0, np.inf]),
        room([0, 1], [2.0, 4.0], writes_left=1),
        room([0, 1], [2.0, 4.0], far_left=0),
        room([0, 1], [2.0, 4.0], far_left=1),
    ],
)
def test_other_candidates_are_looked_at(other):
    still = StillLayers()
    still.learn(0, room([0, 1], [2.0, 4.0]))
    assert still.known(0, room([0, 2], [2.0, 4.0]))
    assert not still.known(0, other)


def test_a_layer_that_changed_is_looked_at_again():
    still = StillLayers()
    still.learn(0, room([0], [2.0]))
    still.learn(1, room([0], [2.0]))
    still.forget(0)
    assert not still.known(0, room([0], [2.0]))
    assert still.known(1, room([0], [2.0]))
