import numpy as np
import pytest

from placement.forecast.kernels import distances, warm
from placement.forecast.shift import OFF_LEAST, initial_shift, watch
from placement.topology import NUM_PHASES, Phase
from tests.builders import make_spec, make_window

EXPERTS = 16
LAYERS = 3
SPEC = make_spec(num_layers=LAYERS, num_experts=EXPERTS)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    warm()


class Traffic:
    """Sub-windows of 2,000 pairs a layer drawn from shares, closed four at a time."""

    def __init__(self, seed=0, phase=Phase.PREFILL):
        self.rng = np.random.default_rng(seed)
        self.phase = phase
        self.state = initial_shift(NUM_PHASES, LAYERS, EXPERTS)
        self.index = 0

    def window(self, *shares, pairs=2000):
        """Close a window of these four shares [layers, experts]; where the shift began."""
        window = make_window(SPEC, np.zeros((LAYERS, EXPERTS)), index=self.index)
        for part, share in enumerate(shares):
            for layer in range(LAYERS):
                counts = self.rng.multinomial(pairs, share[layer]) if share is not None else 0
                window.demand[part, self.phase, layer] = counts
        self.state, began = watch(self.state, window)
        self.index += 1
        return int(began[self.phase])


def shares(seed):
    found = np.random.default_rng(seed).gamma(0.5, 1.0, (LAYERS, EXPERTS))
    return found / found.sum(axis=1, keepdims=True)


A, B = shares(1), shares(2)
NONE = 4


@pytest.mark.parametrize("first", range(3))
def test_a_flip_is_found_in_its_own_window(first):
    traffic = Traffic()
    for _ in range(4):
        assert traffic.window(A, A, A, A) == NONE
    assert traffic.window(*[A] * first, *[B] * (4 - first)) == first
    found = traffic.state.latest
    assert (found.since_window, found.since_part, found.found_window) == (4, first, 4)
    assert found.phase == Phase.PREFILL
    assert found.layers == LAYERS
    assert found.distance > 0.2 > found.usual
    assert traffic.state.parts_since[Phase.PREFILL] == 4 - first


def test_layers_that_did_not_shift_are_not_named():
    only = A.copy()
    only[1:] = B[1:]
    traffic = Traffic()
    for _ in range(4):
        assert traffic.window(A, A, A, A) == NONE
    assert traffic.window(A, only, only, only) == 1
    assert traffic.state.latest.near == (1, 2)
    assert traffic.state.latest.layers == 2


def test_a_small_flip_in_the_last_sub_window_is_found_in_the_next():
    mixed = 0.8 * A + 0.2 * B
    traffic = Traffic()
    for _ in range(6):
        assert traffic.window(A, A, A, A) == NONE
    assert traffic.window(A, A, A, mixed) == NONE
    assert traffic.state.off_before[Phase.PREFILL]
    assert traffic.window(mixed, mixed, mixed, mixed) == -1
    found = traffic.state.latest
    assert (found.since_window, found.since_part, found.found_window) == (6, 3, 7)
    assert traffic.state.parts_since[Phase.PREFILL] == 5


def test_one_odd_sub_window_is_no_shift():
    mixed = 0.8 * A + 0.2 * B
    traffic = Traffic()
    for _ in range(4):
        traffic.window(A, A, A, A)
    assert traffic.window(A, mixed, A, A) == NONE
    assert traffic.window(A, A, A, mixed) == NONE
    assert traffic.window(A, A, A, A) == NONE
    assert traffic.state.latest is None


def test_after_a_shift_the_reference_is_of_the_new_traffic_alone():
    traffic = Traffic()
    for _ in range(4):
        traffic.window(A, A, A, A)
    traffic.window(A, A, B, B)
    assert np.abs(traffic.state.reference[0] - B).sum(axis=1).max() < 0.1
    for _ in range(6):
        assert traffic.window(B, B, B, B) == NONE
    assert traffic.window(A, A, A, A) == 0, "and back"


@pytest.mark.parametrize("seed", range(5))
def test_still_traffic_of_few_pairs_never_shifts(seed):
    traffic = Traffic(seed)
    assert all(traffic.window(A, A, A, A, pairs=60) == NONE for _ in range(40))


def test_slow_drift_is_followed():
    traffic = Traffic()
    for step in range(60):
        share = A + (B - A) * step / 200
        assert traffic.window(share, share, share, share) == NONE


def test_phases_shift_alone():
    traffic = Traffic(phase=Phase.DECODE)
    for _ in range(3):
        traffic.window(A, A, A, A)
    traffic.window(B, B, B, B)
    assert traffic.state.latest.phase == Phase.DECODE
    assert traffic.state.weight[Phase.PREFILL] == 0


def test_silence_is_no_shift():
    traffic = Traffic()
    for _ in range(3):
        traffic.window(A, A, A, A)
    assert traffic.window(None, None, None, None) == NONE
    assert traffic.window(A, None, None, A) == NONE
    assert traffic.window(A, None, B, B) == 2


def test_distance_is_none_for_the_same_and_two_for_the_disjoint():
    counts = np.zeros((3, 1, 1, 4), dtype=np.int64)
    counts[0, 0, 0, :2] = 10_000
    counts[1, 0, 0, 2:] = 10_000
    reference = np.array([[[0.5, 0.5, 0.0, 0.0]]])
    apart = np.empty((3, 1, 1))
    distances(counts, reference, apart)
    assert apart[:, 0, 0].tolist() == pytest.approx([0.0, 2.0, -1.0], abs=OFF_LEAST / 100)
