"""The incremental policy on any fleet: still when still, within its limits, never worse than
staying; and the matrix of the published greedy. What every policy owes is in test_every_policy."""

import msgspec
import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from placement.policy import propose
from placement.policy.eplb import eplb_matrix
from placement.policy.incremental import objective_s
from placement.scoring import churn, rank_load
from tests.property.policy_requests import EXAMPLES, feasible, requests


@EXAMPLES
@given(request_=requests(), byte_price=st.sampled_from([0.0, 1e-9, 1e-6]))
def test_planning_again_from_the_result_moves_nothing(request_, byte_price):
    request_ = msgspec.structs.replace(request_, byte_price=byte_price)
    assume(feasible(request_))
    layout = propose("incremental", request_)
    again = propose("incremental", msgspec.structs.replace(request_, layout=layout))
    assert layout.same_as(again)


@EXAMPLES
@given(request_=requests(), byte_price=st.sampled_from([0.0, 1e-9, 1e-6]))
def test_from_a_valid_layout_the_objective_never_rises_and_limits_hold(request_, byte_price):
    assume(feasible(request_))
    start = propose("static", request_)
    limited = msgspec.structs.replace(
        request_, layout=start, max_moves=3, max_bytes=2 * request_.spec.expert_bytes + 1
    )
    limited = msgspec.structs.replace(limited, byte_price=byte_price)
    result = propose("incremental", limited)
    kept, reached = objective_s(limited, start), objective_s(limited, result)
    assert reached <= kept * (1 + 1e-12)
    change = churn(start, result)
    assert change.slot_writes <= 2
    if byte_price == 0:
        # what goes makes room for a write, or leaves with it
        assert change.keys_removed <= 2 * change.slot_writes
    if not result.same_as(start):
        assert reached < kept
    if not request_.scenarios.any():
        assert result.same_as(start)


@EXAMPLES
@given(request_=requests())
def test_a_key_that_stays_on_its_rank_keeps_its_slot(request_):
    assume(feasible(request_))
    result = propose("incremental", request_)
    live, width = request_.layout.slots, result.slots.shape[1]
    for rank in range(result.num_ranks):
        slots = request_.topology.ranks[rank].num_slots
        for index in range(min(slots, width)):
            key = live[rank, index]
            if key >= 0 and result.hosts[key, rank]:
                assert result.slots[rank, index] == key


@EXAMPLES
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(0, 1000),
)
def test_the_greedy_matrix_holds_every_expert(layers, nodes, gpus, group_size, more, seed):
    num_experts, num_gpus = nodes * gpus * group_size, nodes * gpus
    weight = np.random.default_rng(seed).integers(0, 50, (layers, num_experts))
    phy2log, log2phy, logcnt = eplb_matrix(
        weight, num_experts + more * num_gpus, nodes, nodes, num_gpus
    )
    for layer in range(layers):
        assert np.array_equal(np.bincount(phy2log[layer], minlength=num_experts), logcnt[layer])
        assert logcnt[layer].min() >= 1
        for expert in range(num_experts):
            places = log2phy[layer, expert]
            assert sorted(places[places >= 0]) == np.nonzero(phy2log[layer] == expert)[0].tolist()


def exact_seconds(request_, layout):
    """Seconds a second of the slowest rank under the router's own split, all layers, equal
    speeds."""
    total = 0.0
    for weight, scenario in zip(request_.weights, request_.scenarios, strict=True):
        loads = rank_load(layout, scenario.sum(axis=0))
        total += weight * loads.max(axis=0).sum()
    return total


@EXAMPLES
@given(request_=requests(), moves=st.sampled_from([1, 3, None]))
def test_under_the_exact_split_it_is_never_worse_than_staying(request_, moves):
    ranks = tuple(msgspec.structs.replace(r, profile="speed0") for r in request_.topology.ranks)
    topology = msgspec.structs.replace(request_.topology, ranks=ranks)
    request_ = msgspec.structs.replace(request_, topology=topology, max_moves=moves)
    assume(feasible(request_))
    start = propose("static", request_)
    request_ = msgspec.structs.replace(request_, layout=start)
    result = propose("incremental", request_)
    stayed, reached = exact_seconds(request_, start), exact_seconds(request_, result)
    assert reached <= stayed * (1 + 1e-9)


@EXAMPLES
@given(request_=requests(), writes=st.integers(0, 3))
def test_bytes_between_nodes_stay_within_their_limit(request_, writes):
    assume(feasible(request_))
    start = propose("static", request_)
    limit = writes * request_.spec.expert_bytes
    request_ = msgspec.structs.replace(request_, layout=start, max_cross_node_bytes=limit, floor=1)
    result = propose("incremental", request_)
    node = [r.node for r in request_.topology.ranks]
    far = 0
    for change in start.diff(result):
        if change.after >= 0 and not start.hosts[change.after, change.slot.rank]:
            hosts = np.nonzero(start.hosts[change.after])[0]
            far += node[change.slot.rank] not in {node[r] for r in hosts}
    assert far <= writes
