import msgspec
import numpy as np
import pytest

from placement.layout import ExpertLayout
from placement.planner import reachable_floor as planner_floor
from placement.policy import PolicyError, propose
from placement.policy.feasibility import capacities, check_request, domains, reachable_floor
from placement.policy.occupancy import Occupancy
from placement.policy.repair import EvenJudge, from_nothing, repair
from tests.builders import make_demand, make_layout, make_request, make_spec, make_topology


def occupancy_of(rows, slots, *, num_experts, floor=1, staging_slots=0, in_domain=None):
    """Every rank is a domain, or the ranks are in the domains that `in_domain` spells."""
    spec = make_spec(num_experts=num_experts)
    topology = make_topology(slots, ranks_per_node=1)
    ranks = tuple(
        msgspec.structs.replace(rank, failure_domain=name)
        for rank, name in zip(topology.ranks, in_domain or "abcdefgh", strict=False)
    )
    topology = msgspec.structs.replace(topology, ranks=ranks)
    layout = make_layout(rows, num_experts=num_experts)
    request = make_request(spec, topology, layout, staging_slots=staging_slots)
    return Occupancy(request, floor), topology, layout


def repaired(occupancy, load=None):
    keys = occupancy.num_experts * occupancy.num_layers
    weights = np.ones(keys) if load is None else np.asarray(load, float)
    repair(occupancy, EvenJudge(occupancy, weights), list(range(keys)))
    return occupancy.to_layout()


def test_a_missing_expert_goes_to_the_rank_with_least_strain():
    occupancy, _, _ = occupancy_of([[0, 1, -1], [2, -1, -1]], [3, 3], num_experts=4)
    assert repaired(occupancy).slots.tolist() == [[0, 1, -1], [2, 3, -1]]


def test_without_a_free_slot_the_least_useful_surplus_goes():
    occupancy, _, _ = occupancy_of([[0, 1, 2], [1, 2]], [3, 2], num_experts=4)
    layout = repaired(occupancy, load=[1, 5, 2, 1])
    assert layout.ranks_of(0, 2) != (0, 1)
    assert layout.replica_counts.tolist() == [[1, 2, 1, 1]]


def test_an_expert_moves_on_to_free_a_domain_for_another():
    # floor 2. Expert 2 lacks a second domain; the ranks of the others hold what they must. Expert 1
    # can leave rank 2 for rank 1, which has room.
    rows = [[0, 2], [-1, -2], [0, 1], [1, -2]]
    occupancy, topology, _ = occupancy_of(
        rows, [2, 1, 2, 1], num_experts=3, floor=2, in_domain="aabc"
    )
    layout = repaired(occupancy)
    layout.validate(topology, floor=2)
    assert layout.slots.tolist() == [[0, 2], [1, -2], [0, 2], [1, -2]]


def test_an_expert_may_move_on_over_a_surplus_replica():
    rows = [[0, 2], [0, -2], [0, 1], [1, -2]]
    occupancy, topology, _ = occupancy_of(
        rows, [2, 1, 2, 1], num_experts=3, floor=2, in_domain="aabc"
    )
    layout = repaired(occupancy)
    layout.validate(topology, floor=2)
    assert layout.slots.tolist() == [[1, 2], [0, -2], [0, 2], [1, -2]]


def test_a_rank_that_already_holds_what_would_move_is_no_help():
    # as before, but rank 1 holds expert 1: expert 0, in its domain already, may not lose one
    rows = [[0, 2, -2], [1, -1, -2], [0, 1, -2]]
    occupancy, _, _ = occupancy_of(rows, [2, 2, 2], num_experts=3, floor=2, in_domain="aab")
    with pytest.raises(AssertionError, match="short of floor 2"):
        repaired(occupancy)


def test_a_rank_over_capacity_gives_up_surplus_then_moves_experts():
    occupancy, topology, _ = occupancy_of([[0, 1, 2, 3], [3, -1, -1, -1]], [2, 4], num_experts=4)
    layout = repaired(occupancy)
    layout.validate(topology, floor=1)
    assert int((layout.slots[0] >= 0).sum()) == 2
    assert layout.ranks_of(0, 3) == (1,), "surplus first"


def test_a_duplicate_in_the_live_layout_is_dropped():
    occupancy, _, _ = occupancy_of([[0, 0], [1, -1]], [2, 2], num_experts=2)
    assert occupancy.to_layout().slots.tolist() == [[0, -1], [1, -1]]


def test_a_floor_that_cannot_be_reached_is_a_bug_of_the_caller():
    occupancy, _, _ = occupancy_of([[0, 1], [2, -1]], [2, 2], num_experts=3, floor=2)
    with pytest.raises(AssertionError, match="2 places short of floor 2"):
        repaired(occupancy)


@pytest.mark.parametrize(
    ("slots", "floor"), [([3, 3], 1), ([2, 2, 2], 1), ([4, 4, 4], 2), ([5, 3, 1, 3], 2)]
)
def test_from_nothing_fills_any_fleet_to_the_floor(slots, floor):
    empty = [[-1] * n for n in slots]
    occupancy, topology, _ = occupancy_of(empty, slots, num_experts=6, floor=floor)
    from_nothing(occupancy)
    layout = occupancy.to_layout()
    layout.validate(topology, floor=floor)
    assert int((layout.slots >= 0).sum()) == 6 * floor


def test_where_no_single_move_helps_everything_is_placed_anew():
    class Unwilling(EvenJudge):
        told = 0

        def cheapest(self, rank, layer):
            return None  # gives nothing up, so nothing has room

        def changed(self, key):
            self.told += 1

    occupancy, topology, _ = occupancy_of([[0, 1], [0, 1]], [2, 2], num_experts=3)
    judge = Unwilling(occupancy, np.ones(3))
    repair(occupancy, judge, [0, 1, 2])
    occupancy.to_layout().validate(topology)
    assert judge.told == 3, "the judge hears of every expert"


def test_the_occupancy_refuses_what_would_break_its_books():
    occupancy, _, _ = occupancy_of([[0, -1], [1]], [2, 1], num_experts=2)
    with pytest.raises(AssertionError, match="on rank 0 already"):
        occupancy.add(0, 0)
    with pytest.raises(AssertionError, match="not on rank 1"):
        occupancy.drop(0, 1)
    with pytest.raises(AssertionError, match="slot 0 of rank 0 is not empty"):
        occupancy.add(1, 0, 0)


def test_a_rank_without_a_slot_beside_staging_holds_nothing():
    occupancy, _, _ = occupancy_of([[0], [1, -1]], [1, 2], num_experts=2, staging_slots=1)
    assert occupancy.domain.tolist() == [-1, 0]
    with pytest.raises(AssertionError, match="rank 0 may hold nothing"):
        occupancy.add(0, 0)


def test_a_key_that_comes_back_gets_its_live_slot():
    occupancy, _, _ = occupancy_of([[-1, 0, -1], [1, -1, -1]], [3, 3], num_experts=2)
    occupancy.drop(0, 0)
    assert occupancy.add(0, 0) == 1
    occupancy.drop(0, 0)
    occupancy.add(1, 0, 1)
    occupancy.add(0, 0)
    assert occupancy.to_layout().slots[0].tolist() == [1, 0, -1], "the one that stayed has its slot"


def test_capacity_leaves_out_staging_draining_and_lost():
    topology = make_topology(
        [5, 5, 5, 1], alive=[True, True, False, True], draining=[False, True, False, False]
    )
    assert capacities(topology, 2).tolist() == [3, 0, 0, 0]
    assert domains(topology, 2).tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize(
    ("slots", "keys", "floor", "reached"),
    [
        ([41] * 4, 128, 2, 1),  # the worked example
        ([41] * 4, 80, 2, 2),
        ([41] * 4, 80, 3, 2),  # two domains
        ([200, 1, 1, 1], 128, 2, 1),  # one domain cannot hold an expert twice
        ([3, 3], 128, 1, 0),
    ],
)
def test_the_floor_that_memory_reaches(slots, keys, floor, reached):
    topology = make_topology(slots)
    assert reachable_floor(topology, num_keys=keys, floor=floor, staging_slots=1) == reached


def test_without_a_usable_rank_nothing_is_reachable():
    topology = make_topology([4, 4], alive=[False, False])
    assert reachable_floor(topology, num_keys=4, floor=1, staging_slots=1) == 0
    spec = make_spec(num_experts=4, slot_bytes=10)
    empty = ExpertLayout.empty(topology, num_layers=1, num_experts=4)
    with pytest.raises(PolicyError, match=r"0 usable ranks .* 4 slots \(40 bytes\)"):
        check_request(make_request(spec, topology, empty))


SPEC = make_spec(num_experts=4)
GOOD = make_request(SPEC, make_topology([4, 4]), make_layout([[0, 1, -1, -1], [2, 3, -1, -1]]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"layout": make_layout([[0], [1]], num_experts=5)}, "layout is of 1 x 5 experts"),
        ({"layout": make_layout([[0, 1, 2, 3]])}, "layout has 1 ranks, topology 2"),
        ({"scenarios": np.ones((1, 1, 4))}, "scenarios have shape"),
        ({"scenarios": np.ones((0, 2, 1, 4))}, "scenarios have shape"),
        ({"scenarios": -np.ones((1, 2, 1, 4))}, "scenarios must be finite and >= 0"),
        ({"scenarios": np.full((1, 2, 1, 4), np.inf)}, "scenarios must be finite and >= 0"),
        ({"scenarios": np.full((1, 2, 1, 4), 1e30)}, r"scenarios must be below 1e\+30"),
        ({"weights": np.ones(2)}, "weights must be 1 finite"),
        ({"weights": -np.ones(1)}, "weights must be 1 finite"),
        ({"weights": np.full(1, 0.5)}, "weights must sum to 1, got 0.5"),
        ({"floor": 0}, "floor 0 must be >= 1"),
        ({"staging_slots": -1}, "staging_slots -1"),
        ({"byte_price": -1.0}, "byte_price -1.0"),
        ({"max_moves": -1}, "max_moves must be >= 0 or None"),
        ({"max_bytes": -1}, "max_bytes must be >= 0 or None"),
    ],
)
def test_a_malformed_request_is_refused_by_field(fields, says):
    with pytest.raises(PolicyError, match=says):
        propose("incremental", msgspec.structs.replace(GOOD, **fields))


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(PolicyError, match="'magic' is not one of eplb, incremental, static"):
        propose("magic", GOOD)


# -- ranks with slots that are not given back yet --------------------------------------------------


@pytest.mark.parametrize(
    ("num_slots", "staging", "fill_max", "room"),
    [(5, 1, -1, 4), (5, 1, 4, 4), (5, 1, 2, 2), (5, 0, 4, 4), (1, 2, -1, 0), (5, 1, 0, 0)],
)
def test_a_rank_takes_no_more_than_what_unanswered_steps_leave(num_slots, staging, fill_max, room):
    (spec,) = make_topology([num_slots]).ranks
    assert msgspec.structs.replace(spec, fill_max=fill_max).room(staging) == room


def test_slots_that_are_not_given_back_count_for_no_floor_and_get_no_replica():
    spec, topology = make_spec(), make_topology([5, 5, 5], ranks_per_node=1)
    full = msgspec.structs.replace(topology.ranks[0], fill_max=1)
    limited = msgspec.structs.replace(topology, ranks=(full, *topology.ranks[1:]))
    for reach in (reachable_floor, planner_floor):
        assert reach(topology, num_keys=6, floor=2, staging_slots=1) == 2
        assert reach(limited, num_keys=6, floor=2, staging_slots=1) == 1
    layout = make_layout([[0, -1, -1, -1, -1], [1, 2, -1, -1, -1], [3, -1, -1, -1, -1]])
    request = make_request(spec, limited, layout, make_demand(spec, {0: 50.0, 1: 50.0}))
    for policy in ("incremental", "static"):
        proposed = propose(policy, request)
        assert int((proposed.slots[0] >= 0).sum()) <= 1
        assert proposed.missing() == ()
