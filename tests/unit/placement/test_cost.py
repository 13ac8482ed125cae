import msgspec
import numpy as np
import pytest

from placement.cost import (
    CHECKPOINT,
    Regime,
    compute_seconds,
    copy_seconds,
    crossover_pairs,
    expected_experts,
    least_crossover,
    memory_seconds,
    pair_equivalents,
    rank_seconds,
    regime,
    seconds_per_pair,
)
from placement.topology import DeviceProfile, MoeSpec, RankSpec, Topology

# The worked example of the module: 8 MB an expert, 4 MFLOP a pair, 1 TFLOP/s, 100 GB/s.
SPEC = MoeSpec(
    model="m",
    weights_version="1",
    num_layers=1,
    num_experts=32,
    top_k=4,
    hidden_size=1000,
    intermediate_size=4000 // 6 + 1,
    expert_bytes=8_000_000,
    slot_bytes=8_000_000,
)
FAST = DeviceProfile(
    name="fast",
    flops_per_s=SPEC.flops_per_pair / 4e-6,
    memory_bytes_per_s=1e11,
    copy_bytes_per_s=1e9,
    overhead_s=1e-5,
)
SLOW = DeviceProfile(
    name="slow",
    flops_per_s=FAST.flops_per_s / 4,
    memory_bytes_per_s=1e11,
    copy_bytes_per_s=4e8,
)


def topology():
    profiles = ("fast", "slow", "fast")
    nodes = ("a", "a", "b")
    return Topology(
        ranks=tuple(
            RankSpec(rank=r, node=nodes[r], failure_domain=nodes[r], num_slots=4, profile=name)
            for r, name in enumerate(profiles)
        ),
        profiles=(FAST, SLOW),
        cross_node_bytes_per_s=1e8,
    )


def test_the_worked_example():
    assert float(compute_seconds(1, SPEC, FAST)) == pytest.approx(4e-6)
    assert float(memory_seconds(1, SPEC, FAST)) == pytest.approx(80e-6)
    assert crossover_pairs(SPEC, FAST) == pytest.approx(20.0)


def test_over_different_devices_the_lowest_crossover_counts():
    assert crossover_pairs(SPEC, SLOW) == pytest.approx(5.0)
    assert least_crossover(SPEC, [FAST, SLOW, FAST]) == pytest.approx(5.0)
    assert least_crossover(SPEC, []) == 0.0


def test_the_higher_floor_counts_and_no_work_costs_nothing():
    seconds = rank_seconds([0, 10, 1000], [0, 5, 5], SPEC, FAST)
    assert seconds == pytest.approx([0.0, 400e-6 + 1e-5, 4000e-6 + 1e-5])


def test_experts_a_batch_is_expected_to_use():
    assert expected_experts(1, SPEC) == pytest.approx(4.0)
    assert expected_experts(10_000, SPEC) == pytest.approx(32.0)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, Regime.MEMORY), (1, Regime.MEMORY), (150, Regime.MEMORY), (200, Regime.COMPUTE)],
)
def test_small_batches_are_memory_bound(tokens, expected):
    # 32 experts, top-4: 160 tokens make 20 pairs an expert
    assert regime(tokens, SPEC, FAST) is expected


def test_seconds_of_a_pair_by_rank():
    assert seconds_per_pair(SPEC, topology()) == pytest.approx(np.array([4e-6, 16e-6, 4e-6]))


@pytest.mark.parametrize(
    ("source", "target", "rate"),
    [(0, 0, 1e9), (0, 1, 4e8), (1, 0, 4e8), (0, 2, 1e8), (CHECKPOINT, 0, 1e8)],
)
def test_a_copy_takes_the_slowest_part_of_its_way(source, target, rate):
    assert copy_seconds(8_000_000, source, target, topology()) == pytest.approx(8e6 / rate)


def test_a_memory_bound_batch_costs_readings():
    spec = msgspec.structs.replace(SPEC, num_experts=64, top_k=2)
    crossover = crossover_pairs(spec, FAST)
    demand = np.zeros(64)
    demand[0], demand[1] = 400.0, 8.0  # half of 800 tokens a second, a hundredth of them
    demand[2:] = (1600.0 - 408.0) / 62
    priced = pair_equivalents(demand, 8.0, spec, FAST) / crossover
    assert regime(8.0, spec, FAST) is Regime.MEMORY
    assert priced[0] == pytest.approx(100.0 * (1 - 0.5**8))
    assert priced[1] == pytest.approx(100.0 * (1 - 0.99**8))
    assert (priced <= 100.0).all(), "an expert is read at most once a call"


def test_unknown_and_compute_bound_batches_cost_their_pairs():
    spec = msgspec.structs.replace(SPEC, num_experts=4, top_k=2)
    demand = np.array([[5.0, 0.0, 3.0, 2.0]])
    assert np.array_equal(pair_equivalents(demand, 0.0, spec, FAST), demand)
    assert np.array_equal(pair_equivalents(demand, 1e6, spec, FAST), demand)
    nothing = pair_equivalents(demand * 0, 1.0, spec, FAST)
    assert not nothing.any()
