from itertools import combinations

import msgspec
import numpy as np
import pytest

from placement.layout import ExpertLayout
from placement.policy import PolicyError, propose
from placement.policy.incremental import objective_s
from placement.policy.kernels import warm as warm_search
from placement.policy.leveled.drops.kernels import warm as warm_drops
from placement.policy.leveled.kernels import warm as warm_leveling
from placement.scoring import balancedness, churn, layer_balancedness, rank_load
from placement.topology import NUM_PHASES, DeviceProfile
from tests.builders import (
    PROFILE,
    make_demand,
    make_layout,
    make_request,
    make_spec,
    make_topology,
)

TINY = make_spec(num_layers=4, num_experts=32)
TINY_FLEET = make_topology([41] * 4)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    warm_leveling()
    warm_drops()
    warm_search()


def plan(spec, topology, layout, demand=None, **fields):
    return propose("incremental", make_request(spec, topology, layout, demand, **fields))


def static(spec, topology, **fields):
    empty = ExpertLayout.empty(topology, num_layers=spec.num_layers, num_experts=spec.num_experts)
    return propose("static", make_request(spec, topology, empty, **fields))


def skewed(spec, seed=0):
    rng = np.random.default_rng(seed)
    return np.sort(rng.zipf(1.4, (spec.num_layers, spec.num_experts)).clip(max=60))[:, ::-1] * 5.0


def balance(layout, demand):
    return balancedness(rank_load(layout, demand))


def _on(layout, key, rank):
    """Slots of the rank that hold the key."""
    layer, expert = divmod(key, layout.num_experts)
    return [slot for slot in layout.slots_of(layer, expert) if slot.rank == rank]


def test_a_hot_expert_is_replicated_where_it_relieves_most():
    spec = make_spec(num_experts=4)
    live = make_layout([[0, 1, -1, -1], [2, 3, -1, -1]])
    demand = make_demand(spec, {0: 100.0})
    result = plan(spec, make_topology([4, 4]), live, demand)
    assert result.ranks_of(0, 0) == (0, 1)
    assert churn(live, result) == (1, 0, 1, 0), "one write, into an empty slot"
    assert balance(result, demand) > 0.97


def test_a_full_rank_gives_up_its_least_useful_surplus_replica():
    spec = make_spec(num_experts=5)
    live = make_layout([[0, 1, 4, -1], [2, 3, 4, -1]], num_experts=5)
    result = plan(spec, make_topology([4, 4]), live, make_demand(spec, {0: 100.0, 4: 0.0}))
    assert result.slots.tolist() == [[0, 1, 4, -1], [2, 3, 0, -1]], "in the slot of what goes"


def test_the_victim_may_belong_to_another_layer():
    spec = make_spec(num_layers=2, num_experts=2)
    # keys 0 1 | 2 3; layer 1 is idle and has a surplus replica on rank 1
    live = make_layout([[0, 2, 3, -1], [1, 2, -1]], num_layers=2, num_experts=2)
    topology = make_topology([4, 3])
    result = plan(spec, topology, live, np.array([[90.0, 10.0], [0.0, 0.0]]))
    assert result.slots.tolist() == [[0, 2, 3, -1], [1, 0, -1, -2]]


def test_experts_are_exchanged_where_there_is_no_surplus():
    spec = make_spec(num_experts=4)
    live = make_layout([[0, 1, -1], [2, 3, -1]])
    demand = np.array([[50.0, 40.0, 10.0, 5.0]])
    result = plan(spec, make_topology([3, 3]), live, demand)
    assert balance(result, demand) > 0.9
    assert result.replica_counts.tolist() == [[1, 1, 1, 1]]
    assert churn(live, result).slot_writes == 2


def test_an_expert_that_a_full_rank_no_longer_needs_migrates():
    spec = make_spec(num_experts=4)
    demand = np.array([[21.0, 20.0, 19.0, 10.0]])
    full = make_layout([[0, 1, 2, -1], [3, -1, -1]])
    result = plan(spec, make_topology([4, 3]), full, demand)
    # without expert 0 rank 0 has 39, rank 1 with all of it 31: nothing of it is left for rank 0
    assert result.slots.tolist() == [[-1, 1, 2, -1], [3, 0, -1, -2]]
    spare = make_layout([[0, 1, 2, -1, -1], [3, -1, -1]])
    kept = plan(spec, make_topology([5, 3]), spare, demand)
    assert kept.ranks_of(0, 0) == (0, 1), "memory is free: the replica stays"


def test_same_load_same_layout_moves_nothing():
    live = static(TINY, TINY_FLEET)
    demand = skewed(TINY)
    first = plan(TINY, TINY_FLEET, live, demand)
    assert balance(first, demand) > balance(live, demand)
    assert plan(TINY, TINY_FLEET, first, demand).same_as(first)


def test_a_layer_that_is_balanced_enough_is_left_alone():
    spec = make_spec(num_experts=4)
    live = make_layout([[0, 1, -1, -1], [2, 3, -1, -1]])
    demand = np.array([[100.0, 99.0, 98.0, 97.0]])  # 199 to 195: balancedness 0.99
    topology = make_topology([4, 4])
    assert plan(spec, topology, live, demand, balance_enough=0.97).same_as(live)
    assert not plan(spec, topology, live, demand, balance_enough=1.0).same_as(live)


def test_empty_slots_stay_empty_where_they_bring_nothing():
    spec = make_spec(num_experts=4)
    live = make_layout([[0, 1, -1, -1], [2, 3, -1, -1]])
    assert plan(spec, make_topology([4, 4]), live, make_demand(spec)).same_as(live)


def test_no_load_moves_nothing_but_still_repairs():
    live = static(TINY, TINY_FLEET)
    nothing = np.zeros((4, 32))
    assert plan(TINY, TINY_FLEET, live, nothing).same_as(live)
    without = live.with_slots((slot, -1) for slot in live.slots_of(0, 0))
    repaired = plan(TINY, TINY_FLEET, without, nothing)
    assert churn(without, repaired) == (1, 0, 1, 0)


def test_a_limit_on_moves_takes_the_best_first():
    live, demand = static(TINY, TINY_FLEET), skewed(TINY)
    seen = [balance(live, demand)]
    for moves in (0, 1, 4, 16):
        result = plan(TINY, TINY_FLEET, live, demand, max_moves=moves)
        assert churn(live, result).slot_writes <= moves
        seen.append(balance(result, demand))
    assert seen == sorted(seen)
    assert seen[0] == seen[1]


def test_a_limit_on_bytes_counts_copies():
    live, demand = static(TINY, TINY_FLEET), skewed(TINY)
    result = plan(TINY, TINY_FLEET, live, demand, max_bytes=3 * TINY.expert_bytes - 1)
    assert churn(live, result).slot_writes <= 2


def test_one_move_left_is_not_enough_for_an_exchange():
    spec = make_spec(num_experts=4)
    live = make_layout([[0, 1, -1], [2, 3, -1]])
    demand = np.array([[50.0, 40.0, 10.0, 5.0]])
    assert plan(spec, make_topology([3, 3]), live, demand, max_moves=1).same_as(live)


def test_a_draining_rank_is_emptied_and_a_lost_one_forgotten():
    topology = make_topology(
        [41] * 5, alive=[True] * 4 + [False], draining=[True] + [False] * 4, ranks_per_node=1
    )
    spec = make_spec(num_layers=3, num_experts=32)
    live = static(spec, make_topology([41] * 5, ranks_per_node=1))
    result = plan(spec, topology, live, skewed(spec), max_moves=0)
    assert (result.slots[0] == -1).all()
    assert (result.slots[4] == -2).all()
    assert not result.missing()


def test_a_lower_budget_evicts_the_least_useful_and_moves_what_is_above_the_cut():
    rng = np.random.default_rng(1)
    demand = np.stack([rng.permutation(row) for row in skewed(TINY)])
    live = plan(TINY, TINY_FLEET, static(TINY, TINY_FLEET), demand)
    lower = make_topology([41, 41, 41, 39])
    result = plan(TINY, lower, live, demand, max_moves=0)
    change = churn(live, result)
    assert (change.keys_added, change.keys_removed) == (0, 2)
    assert int((result.slots[3] >= 0).sum()) == 38
    surplus = np.nonzero((live.hosts[:, 3] > 0) & (live.hosts.sum(axis=1) > 1))[0]
    others = [
        balance(live.with_slots((slot, -1) for key in pair for slot in _on(live, key, 3)), demand)
        for pair in combinations(surplus.tolist(), 2)
    ]
    assert balance(result, demand) >= max(others) - 0.01
    assert len(set(np.round(others, 3))) > 2, "the choice matters here"


def test_a_budget_below_what_the_rank_alone_holds_sends_experts_elsewhere():
    spec = make_spec(num_experts=6)
    live = make_layout([[0, 1, 2, -1], [3, 4, 5, -1, -1, -1]], num_experts=6)
    topology = make_topology([2, 6])
    result = plan(spec, topology, live, make_demand(spec))
    assert not result.missing()
    assert int((result.slots[0] >= 0).sum()) == 1


def test_the_floor_is_repaired_before_balance():
    spec = make_spec(num_experts=4)
    live = make_layout([[0, 1, 2, 3, -1], [-1] * 5, [0, 1, -1, -1, -1], [-1] * 5])
    topology = make_topology([5] * 4)
    result = plan(spec, topology, live, make_demand(spec), floor=2, max_moves=0)
    result.validate(topology, floor=2, staging_slots=1)
    assert churn(live, result).slot_writes == 2


def test_slow_ranks_get_less():
    spec = make_spec(num_experts=8)
    topology = make_topology([9, 9], ranks_per_node=1)
    slow = DeviceProfile(
        name="slow",
        flops_per_s=PROFILE.flops_per_s / 3,
        memory_bytes_per_s=1e9,
        copy_bytes_per_s=1e8,
    )
    ranks = (topology.ranks[0], msgspec.structs.replace(topology.ranks[1], profile="slow"))
    uneven = msgspec.structs.replace(topology, ranks=ranks, profiles=(PROFILE, slow))
    live = make_layout([[0, 1, 2, 3] + [-1] * 5, [4, 5, 6, 7] + [-1] * 5], num_experts=8)
    request = make_request(spec, uneven, live, make_demand(spec, base=30.0), balance_enough=1.0)
    result = propose("incremental", request)
    assert objective_s(request, result) < 0.6 * objective_s(request, live)
    assert result.replica_counts[0, 4:].max() == 2, "experts of the slow rank also on the fast one"


def test_replicas_that_save_less_than_their_bytes_are_evicted():
    live, demand = static(TINY, TINY_FLEET), skewed(TINY)
    kept = plan(TINY, TINY_FLEET, live, demand)
    dear = plan(TINY, TINY_FLEET, live, demand, byte_price=1.0)
    assert (kept.slots >= 0).sum() > 150
    assert (dear.slots >= 0).sum() == TINY.num_keys, "nothing is worth a second a byte"
    assert not dear.missing()
    fair_s = demand.sum() / 4 * TINY.flops_per_pair / PROFILE.flops_per_s
    cheap = plan(TINY, TINY_FLEET, live, demand, byte_price=fair_s / 4e6)
    assert TINY.num_keys < (cheap.slots >= 0).sum() < 160
    again = plan(TINY, TINY_FLEET, cheap, demand, byte_price=fair_s / 4e6)
    assert again.same_as(cheap)


def test_evictions_for_price_are_limited_too():
    live, demand = static(TINY, TINY_FLEET), skewed(TINY)
    result = plan(TINY, TINY_FLEET, live, demand, byte_price=1.0, max_moves=3)
    change = churn(live, result)
    assert change.slot_writes + change.slot_evictions <= 3
    assert change.slot_evictions > 0


def test_scenarios_are_weighed():
    spec = make_spec(num_experts=4)
    live = make_layout([[0, 1, -1, -1], [2, 3, -1, -1]])
    scenarios = np.ones((2, NUM_PHASES, 1, 4))
    scenarios[0, 0, 0, 0] = 200.0
    scenarios[1, 1, 0, 3] = 200.0
    request = make_request(spec, make_topology([3, 3]), make_layout([[0, 1, -1], [2, 3, -1]]))
    first = msgspec.structs.replace(request, scenarios=scenarios, weights=np.array([1.0, 0.0]))
    assert propose("incremental", first).same_as(request.layout), "no room, nothing to exchange"
    roomy = msgspec.structs.replace(first, topology=make_topology([4, 4]), layout=live)
    assert propose("incremental", roomy).replica_counts.tolist() == [[2, 1, 1, 1]]
    other = msgspec.structs.replace(roomy, weights=np.array([0.0, 1.0]))
    assert propose("incremental", other).replica_counts.tolist() == [[1, 1, 1, 2]]
    both = msgspec.structs.replace(roomy, weights=np.array([0.5, 0.5]))
    assert propose("incremental", both).replica_counts.tolist() == [[2, 1, 1, 2]]


def test_writes_connect_ranks_that_share_nothing():
    spec = make_spec(num_experts=5)
    # rank 1 is a little colder than rank 2, but shares expert 0 with the hot rank already
    live = make_layout([[0, 4, -1, -1], [0, 1, -1, -1], [2, 3, -1, -1]], num_experts=5)
    demand = np.array([[0.2, 0.8, 0.8, 0.7, 60.0]])
    result = plan(spec, make_topology([4] * 3), live, demand, max_moves=1)
    assert result.ranks_of(0, 4) == (0, 2)


def test_from_nothing_known_load_is_packed_heaviest_first():
    empty = ExpertLayout.empty(TINY_FLEET, num_layers=4, num_experts=32)
    demand = skewed(TINY)
    result = plan(TINY, TINY_FLEET, empty, demand, max_moves=0)
    assert result.replica_counts.tolist() == [[1] * 32] * 4
    assert balance(result, demand) > balance(static(TINY, TINY_FLEET), demand)


def test_short_of_slots_it_says_how_many():
    with pytest.raises(PolicyError, match="88 slots"):
        plan(TINY, make_topology([41]), make_layout([[]], num_layers=4, num_experts=32))


def test_on_larger_layers_every_one_ends_balanced_or_unimprovable():
    spec = make_spec(num_layers=6, num_experts=64)
    topology = make_topology([60] * 8)
    live = static(spec, topology)
    rng = np.random.default_rng(7)
    demand = np.stack([rng.permutation(row) for row in skewed(spec)])
    result = plan(spec, topology, live, demand)
    assert layer_balancedness(rank_load(result, demand)).min() > 0.93
    assert churn(live, result).slot_writes < 0.25 * 8 * 59
    assert plan(spec, topology, result, demand).same_as(result)


def uniform(spec, topology, layout, demand, **fields):
    return plan(spec, topology, layout, demand, uniform=True, **fields)


def test_a_uniform_layout_fills_the_same_slots_in_every_layer():
    topology = make_topology([4 * 9 + 1] * 4)
    empty = ExpertLayout.empty(topology, num_layers=4, num_experts=32)
    demand = skewed(TINY)
    demand[0] *= 10  # the layer that a pool would favour
    result = uniform(TINY, topology, empty, demand)
    assert result.physical_to_logical().shape == (4, 36)
    assert balance(result, demand) > 0.95
    again = uniform(TINY, topology, result, demand)
    assert again.same_as(result)


def test_a_uniform_layout_stays_uniform_when_a_rank_is_lost_and_moves_are_few():
    topology = make_topology([4 * 12 + 1] * 4, ranks_per_node=1)
    empty = ExpertLayout.empty(topology, num_layers=4, num_experts=32)
    live = uniform(TINY, topology, empty, skewed(TINY))
    lost = make_topology([4 * 12 + 1] * 4, ranks_per_node=1, alive=[True, True, True, False])
    result = uniform(TINY, lost, live, skewed(TINY, seed=2), max_moves=4)
    assert not result.missing()
    held = result.hosts.reshape(4, 32, 4).sum(axis=1)
    assert (held[:, :3] == 12).all()
    assert not held[:, 3].any()


def test_a_uniform_layout_short_of_slots_says_so_by_layer():
    topology = make_topology([4 * 7 + 1, 4 * 12 + 1, 4 * 7 + 1, 4 * 12 + 1])
    empty = ExpertLayout.empty(topology, num_layers=4, num_experts=32)
    with pytest.raises(PolicyError, match=r"4 usable ranks of 7 slots a layer.*4 slots a layer"):
        uniform(TINY, topology, empty, skewed(TINY))


def test_bytes_between_nodes_are_limited_apart():
    topology = make_topology([41] * 4, ranks_per_node=2)
    rng = np.random.default_rng(4)
    demand = np.stack([rng.permutation(row) for row in skewed(TINY)])
    live = static(TINY, topology)
    free = plan(TINY, topology, live, demand)
    near = plan(TINY, topology, live, demand, max_cross_node_bytes=0)
    assert _far_writes(topology, live, free) > 0
    assert _far_writes(topology, live, near) == 0
    assert balance(live, demand) < balance(near, demand) <= balance(free, demand)


def _far_writes(topology, live, result):
    node = [rank.node for rank in topology.ranks]
    return sum(
        change.after >= 0
        and node[change.slot.rank]
        not in {node[r] for r in np.nonzero(live.hosts[change.after])[0].tolist()}
        for change in live.diff(result)
    )


def test_a_memory_bound_phase_is_levelled_by_experts_read():
    spec = make_spec(num_experts=8, top_k=1, expert_bytes=10_000_000)
    topology = make_topology([7, 7])
    # rank 0 has the one expert with pairs; rank 1 has four that every batch reads as well
    live = make_layout([[0, 1, 2, -1, -1, -1], [3, 4, 5, 6, 7, -1]], num_experts=8)
    demand = np.array([[800.0, 1.0, 1.0, 100.0, 100.0, 100.0, 100.0, 100.0]])
    by_pairs = plan(spec, topology, live, demand)
    by_reads = plan(spec, topology, live, demand, batch_tokens=(200.0, 0.0))
    assert by_pairs.replica_counts[0, 0] == 2, "pairs: the hot expert is split"
    assert by_reads.replica_counts[0, 0] == 1, "readings: a second replica of it saves nothing"
    assert by_reads.replica_counts[0, 3:].max() == 2, "one of five moves on"


def test_batches_that_cannot_be_are_refused():
    spec = make_spec()
    live = make_layout([[0, 1, -1, -1], [2, 3, -1, -1]])
    with pytest.raises(PolicyError, match="batch_tokens must be"):
        plan(spec, make_topology([4, 4]), live, batch_tokens=(-1.0, 0.0))
    with pytest.raises(PolicyError, match="max_cross_node_bytes must be"):
        plan(spec, make_topology([4, 4]), live, max_cross_node_bytes=-1)


def test_of_two_layers_that_want_the_last_empty_slot_the_one_that_gains_more_gets_it():
    spec = make_spec(num_layers=2, num_experts=4)
    live = make_layout([[0, 1, 4, 5, -1], [2, 3, 6, 7, -1, -1]], num_layers=2)
    demand = make_demand(spec, {0: 300.0, 4: 900.0}, base=1.0).reshape(2, 4)
    result = plan(spec, make_topology([5, 6]), live, demand)
    assert result.replica_counts.tolist() == [[1, 1, 1, 1], [2, 1, 1, 1]]
    assert churn(live, result).slot_writes == 1
    roomy = plan(spec, make_topology([5, 7]), live, demand)
    assert roomy.replica_counts[:, 0].tolist() == [2, 2]


def test_of_two_layers_that_want_the_last_copy_between_nodes_one_gets_it():
    spec = make_spec(num_layers=2, num_experts=4)
    live = make_layout([[0, 1, 4, 5, -1], [2, 3, 6, 7, -1, -1, -1]], num_layers=2)
    topology = make_topology([5, 7], ranks_per_node=1)
    demand = make_demand(spec, {0: 300.0, 4: 900.0}, base=1.0).reshape(2, 4)
    result = plan(spec, topology, live, demand, max_cross_node_bytes=2 * spec.expert_bytes - 1)
    assert result.replica_counts[:, 0].tolist() == [1, 2]
    assert _far_writes(topology, live, result) == 1
    more = plan(spec, topology, live, demand, max_cross_node_bytes=2 * spec.expert_bytes)
    assert more.replica_counts[:, 0].tolist() == [2, 2]


def trading():
    """(spec, topology, layout, demand): two hot layers in full ranks, whose only room is what a
    third layer, without load, could do without."""
    spec = make_spec(num_layers=3, num_experts=2)
    live = make_layout([[0, 2, 4, 5, -1], [1, 3, 4, 5, -1]], num_layers=3, num_experts=2)
    demand = np.array([[90.0, 10.0], [80.0, 10.0], [0.0, 0.0]])
    return spec, make_topology([5, 5]), live, demand


def test_slots_of_other_layers_are_traded_worst_layer_first_until_the_writes_are_used_up():
    spec, topology, live, demand = trading()
    one = plan(spec, topology, live, demand, max_moves=1)
    assert churn(live, one).slot_writes == 1
    assert one.replica_counts.tolist() == [[2, 1], [1, 1], [1, 2]]
    both = plan(spec, topology, live, demand)
    assert both.replica_counts.tolist() == [[2, 1], [2, 1], [1, 1]]


def test_rounds_of_trades_are_bounded(monkeypatch):
    """A round writes one slot of a layer that trades; both experts need another replica here."""
    spec = make_spec(num_layers=2, num_experts=2)
    live = make_layout([[0, 2, 3, -1], [1, 2, 3, -1], [2, 3, -1]], num_layers=2, num_experts=2)
    demand = np.array([[64.0, 51.0], [0.0, 0.0]])
    topology = make_topology([4, 4, 3])
    assert churn(live, plan(spec, topology, live, demand)).slot_writes == 2
    monkeypatch.setattr("placement.policy.incremental_search.ROUNDS_MAX", 1)
    assert churn(live, plan(spec, topology, live, demand)).slot_writes == 1
