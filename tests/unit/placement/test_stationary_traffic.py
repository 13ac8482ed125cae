"""Traffic that stays, and noise: the engine comes to rest, and a shift wakes it."""

import msgspec
import numpy as np
import pytest

from placement.config import RebalanceConfig
from placement.load import LoadWindow
from placement.messages import events as ev
from placement.replay import PerfectExecutor
from placement.topology import NUM_PHASES
from tests.builders import make_spec, make_topology

LAYERS, EXPERTS, RANKS, PARTS = 3, 32, 8, 4
WARM_UP = 20


def popularity(rng):
    share = np.arange(1, EXPERTS + 1, dtype=np.float64) ** -0.7
    return np.stack([rng.permutation(share / share.sum()) for _ in range(LAYERS)])


NOISY, CALM = (400.0, 0.5), (4000.0, 0.1)
"""Pairs of a quarter, layer and phase, and by how much each quarter disturbs the popularity."""


def window(rng, mean, index, traffic):
    """A window whose quarters each draw their pairs from a disturbed popularity."""
    pairs, noise = traffic
    shape = (PARTS, NUM_PHASES, LAYERS, EXPERTS)
    demand = rng.poisson(mean * pairs * np.exp(noise * rng.standard_normal(shape)))
    return LoadWindow(
        index=index,
        start_s=2.0 * index,
        end_s=2.0 * (index + 1),
        demand=demand,
        executed_pairs=demand.sum(axis=0),
        rank_pairs=np.zeros((RANKS, LAYERS), np.int64),
        rank_busy_s=np.zeros((RANKS, NUM_PHASES)),
    )


def service():
    """Copies cost little here, so that nothing but the gate keeps the engine from moving."""
    spec = make_spec(num_layers=LAYERS, num_experts=EXPERTS)
    topology = make_topology([LAYERS * 5 + 1] * RANKS)
    return PerfectExecutor(spec, topology, RebalanceConfig(sub_windows=PARTS, max_moves=40))


def run(executor, rng, mean, first, count, traffic=NOISY):
    """(slots written, rules) of each window."""
    seen = []
    for index in range(first, first + count):
        writes, told = executor.slot_writes, len(executor.records)
        closed = window(rng, mean, index, traffic)
        executor.take(ev.WindowClosed(at_s=closed.end_s, window=closed))
        seen.append(
            (executor.slot_writes - writes, [record.rule for record in executor.records[told:]])
        )
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_nothing_moves_on_stationary_noisy_traffic_once_it_has_converged(seed):
    rng = np.random.default_rng(seed)
    executor, mean = service(), popularity(rng)
    warm = run(executor, rng, mean, 0, WARM_UP)
    assert sum(writes for writes, _ in warm) > 0
    after = run(executor, rng, mean, WARM_UP, 200)
    assert [index for index, (writes, _) in enumerate(after) if writes] == []
    assert all(rules for _, rules in after)


@pytest.mark.parametrize("seed", range(3))
def test_a_flip_of_the_traffic_is_answered_within_two_windows(seed):
    rng = np.random.default_rng(seed)
    executor = service()
    run(executor, rng, popularity(rng), 0, WARM_UP, CALM)
    after = run(executor, rng, popularity(rng), WARM_UP, 2, CALM)
    assert sum(writes for writes, _ in after) > 0
    assert executor.engine.state.forecast.shift.latest.found_window in {WARM_UP, WARM_UP + 1}


def test_the_same_windows_give_the_same_writes():
    def written():
        rng = np.random.default_rng(7)
        executor = service()
        run(executor, rng, popularity(rng), 0, 8)
        return msgspec.msgpack.encode([executor.records, executor.slot_writes])

    assert written() == written()
