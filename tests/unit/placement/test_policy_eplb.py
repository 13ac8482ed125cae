import msgspec
import numpy as np
import pytest

from placement.layout import ExpertLayout
from placement.policy import PolicyError, propose
from placement.policy.eplb import (
    balanced_packing,
    eplb_matrix,
    propose_eplb,
    repair_duplicates,
    replicate_experts,
)
from placement.scoring import balancedness, rank_load
from tests.builders import make_demand, make_request, make_spec, make_topology

# The worked example that the algorithm was published with.
PUBLISHED_WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED_PLACES = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def request_of(spec, topology, demand=None, **fields):
    empty = ExpertLayout.empty(topology, num_layers=spec.num_layers, num_experts=spec.num_experts)
    return make_request(spec, topology, empty, demand, **fields)


def test_the_published_example():
    phy2log, log2phy, logcnt = eplb_matrix(PUBLISHED_WEIGHT, 16, 4, 2, 8)
    assert phy2log.tolist() == PUBLISHED_PLACES
    assert logcnt.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    assert log2phy.shape == (2, 12, 2)
    assert sorted(log2phy[0, 5].tolist()) == [0, 2]
    assert log2phy[0, 0].tolist() == [12, -1]


def test_global_where_groups_do_not_divide_over_nodes():
    by_groups = eplb_matrix(PUBLISHED_WEIGHT, 16, 3, 2, 8)
    by_one = eplb_matrix(PUBLISHED_WEIGHT, 16, 1, 1, 8)
    for left, right in zip(by_groups, by_one, strict=True):
        assert np.array_equal(left, right)
    loads = np.zeros((8, 2))
    weight, (phy2log, _, logcnt) = np.array(PUBLISHED_WEIGHT), by_one
    for layer in range(2):
        for place, expert in enumerate(phy2log[layer]):
            loads[place // 2, layer] += weight[layer, expert] / logcnt[layer, expert]
    assert balancedness(loads) > 0.85


@pytest.mark.parametrize(
    ("replicas", "groups", "nodes", "gpus", "says"),
    [
        (16, 5, 5, 8, "12 experts do not divide by 5"),
        (15, 4, 2, 8, "15 replicas do not divide by 8"),
        (14, 2, 2, 7, "7 gpus do not divide by 2"),
        (8, 4, 2, 8, "8 replicas cannot hold 12 experts"),
        (16, 4, 2, 0, "16 replicas do not divide by 0"),
    ],
)
def test_counts_that_do_not_divide_are_refused(replicas, groups, nodes, gpus, says):
    with pytest.raises(PolicyError, match=says):
        eplb_matrix(PUBLISHED_WEIGHT, replicas, groups, nodes, gpus)


def test_weight_has_two_axes():
    with pytest.raises(PolicyError, match="want"):
        eplb_matrix([1, 2, 3], 4, 1, 1, 2)


def test_packing_puts_the_heaviest_into_the_lightest_pack_with_room():
    pack, place = balanced_packing(np.array([[1.0, 9.0, 8.0, 2.0]]), 2)
    assert pack.tolist() == [[0, 0, 1, 1]]
    assert place.tolist() == [[1, 0, 0, 1]]
    pack, place = balanced_packing(np.array([[1.0, 9.0]]), 2)
    assert (pack.tolist(), place.tolist()) == ([[0, 1]], [[0, 0]])


def test_replicas_go_to_the_most_load_a_replica():
    expert, number, count = replicate_experts(np.array([[9.0, 4.0, 1.0]]), 6)
    assert expert.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert number.tolist() == [[0, 0, 0, 1, 2, 1]]
    assert count.tolist() == [[3, 2, 1]]


def test_a_duplicate_on_a_rank_is_exchanged_for_the_nearest_load():
    weight = np.array([100.0, 60.0, 30.0, 10.0])
    fixed = repair_duplicates(np.array([[0, 0], [1, 2], [3, 3]]), weight)
    for row in fixed:
        assert len(set(row.tolist())) == 2
    assert np.bincount(fixed.ravel(), minlength=4).tolist() == [2, 1, 1, 2]
    assert fixed[0].tolist() == [0, 1], "60 is nearest to half of 100"


def test_a_duplicate_without_partner_makes_room_for_the_hottest():
    fixed = repair_duplicates(np.array([[0, 0], [0, 1]]), np.array([9.0, 8.0]))
    assert sorted(fixed[0].tolist()) == [0, 1]


def test_every_rank_gets_the_same_number_of_places():
    spec = make_spec(num_layers=2, num_experts=8)
    topology = make_topology([11, 11, 11, 11])
    layout = propose("eplb", request_of(spec, topology, make_demand(spec, {0: 50, 9: 50})))
    assert layout.physical_to_logical().shape == (2, 20)
    assert layout.replica_counts[0, 0] > 1
    assert layout.replica_counts[1, 1] > 1


def test_staging_stays_empty_and_smaller_ranks_set_the_measure():
    spec = make_spec(num_layers=1, num_experts=4)
    topology = make_topology([3, 3, 9])
    layout = propose("eplb", request_of(spec, topology, staging_slots=1))
    assert [int((row >= 0).sum()) for row in layout.slots] == [2, 2, 2]


def test_hierarchical_keeps_a_group_on_a_node():
    spec = make_spec(num_layers=1, num_experts=8)
    topology = make_topology([4, 4, 4, 4])
    demand = make_demand(spec, {0: 9, 1: 8, 5: 7})
    layout = propose_eplb(request_of(spec, topology, demand), num_groups=2)
    for group in (range(4), range(4, 8)):
        nodes = {rank // 2 for expert in group for rank in layout.ranks_of(0, expert)}
        assert len(nodes) == 1


def test_nodes_of_different_size_are_planned_globally():
    spec = make_spec(num_layers=1, num_experts=6)
    topology = make_topology([4, 4, 4])
    request = request_of(spec, topology)
    assert propose_eplb(request, num_groups=2).same_as(propose_eplb(request))


def test_ranks_that_cannot_be_equal_are_refused_with_what_is_short():
    spec = make_spec(num_layers=1, num_experts=8)
    request = request_of(spec, make_topology([2, 12]))
    with pytest.raises(PolicyError, match=r"eplb needs equal ranks, 2 of 1 slots .* 6 short"):
        propose("eplb", request)


def test_the_floor_is_kept_over_what_the_greedy_wants():
    spec = make_spec(num_layers=1, num_experts=4)
    request = request_of(spec, make_topology([4, 4], ranks_per_node=1), floor=2)
    layout = propose("eplb", msgspec.structs.replace(request, staging_slots=0))
    assert (layout.hosts > 0).all()


def test_a_floor_that_the_greedy_blocks_is_built_from_nothing():
    spec = make_spec(num_layers=2, num_experts=3)
    topology = make_topology([4, 2, 3, 3])
    layout = propose("eplb", request_of(spec, topology, floor=2, staging_slots=0))
    layout.validate(topology, floor=2)


def test_without_load_extras_are_spread():
    spec = make_spec(num_layers=1, num_experts=4)
    request = request_of(spec, make_topology([4, 4]), np.zeros((1, 4)))
    layout = propose("eplb", request)
    assert layout.replica_counts.tolist() == [[2, 2, 1, 1]]


def test_balance_is_what_the_greedy_is_known_for():
    spec = make_spec(num_layers=3, num_experts=16)
    topology = make_topology([16, 16, 16, 16])
    demand = np.random.default_rng(3).zipf(1.5, (3, 16)).clip(max=40) * 10
    layout = propose("eplb", request_of(spec, topology, demand))
    assert balancedness(rank_load(layout, demand, "equal")) > 0.8
