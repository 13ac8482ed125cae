"""What every policy owes, in pooled slots and in uniform layouts: a valid layout or an error that
names the numbers, whatever the fleet and the load; the same answer to the same question."""

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from placement.config import RebalanceConfig
from placement.layout import ExpertLayout
from placement.messages.effects import ReserveSlot
from placement.policy import PolicyError, propose
from placement.policy.feasibility import domains, reachable_floor, reachable_uniform, uniform_slots
from placement.policy.incremental import objective_s
from placement.roles.shard import ShardSlots, SlotPhase
from placement.topology import NUM_PHASES
from tests.builders import make_request, make_spec, make_topology
from tests.engine_driver import EngineDriver
from tests.property.policy_requests import (
    EXAMPLES,
    MODE_NAMES,
    MODES,
    feasible,
    requests,
)

SHORT = r"^\d+ usable ranks .*: \d+ slots (a layer |\(\d+ bytes\) )are short"
every_policy = pytest.mark.parametrize(("name", "uniform"), MODES, ids=MODE_NAMES)


def asked(name, request_):
    """What the policy proposes; None where the published greedy, which knows only equal ranks,
    says with numbers why it cannot. Every other policy places whatever can be placed."""
    if name != "eplb":
        return propose(name, request_)
    try:
        return propose(name, request_)
    except PolicyError as refusal:
        said = str(refusal)
    assert any(char.isdigit() for char in said), said
    return None


def assert_valid(layout, request_):
    """Every expert somewhere, none twice on a rank, staging slots empty, nothing on ranks that are
    lost or draining, the floor that memory allows; in uniform mode the form as well."""
    floor = (
        reachable_uniform(request_)
        if request_.uniform
        else reachable_floor(
            request_.topology,
            num_keys=request_.spec.num_keys,
            floor=request_.floor,
            staging_slots=request_.staging_slots,
        )
    )
    layout.validate(request_.topology, floor=floor, staging_slots=request_.staging_slots)
    used = domains(request_.topology, request_.staging_slots) >= 0
    held = layout.hosts.reshape(layout.num_layers, layout.num_experts, -1).sum(axis=1)
    assert not held[:, ~used].any()
    if request_.uniform:
        assert (held[:, used] == uniform_slots(request_)).all()
    if request_.uniform and used.all():
        assert layout.physical_to_logical().shape[1] == uniform_slots(request_) * len(used)


@every_policy
@EXAMPLES
@given(request_=requests())
def test_a_layout_is_valid_or_the_error_says_what_is_short(name, uniform, request_):
    request_ = msgspec.structs.replace(request_, uniform=uniform)
    if not feasible(request_):
        with pytest.raises(PolicyError, match=SHORT):
            propose(name, request_)
        return
    layout = asked(name, request_)
    if layout is not None:
        assert_valid(layout, request_)


@every_policy
@EXAMPLES
@given(request_=requests())
def test_the_same_input_gives_the_same_layout_and_is_left_alone(name, uniform, request_):
    request_ = msgspec.structs.replace(request_, uniform=uniform)
    assume(feasible(request_))
    copies = [np.copy(a) for a in (request_.scenarios, request_.weights, request_.layout.slots)]
    first = asked(name, request_)
    assume(first is not None)
    again = msgspec.structs.replace(
        request_,
        scenarios=copies[0].copy(),
        weights=copies[1].copy(),
        layout=ExpertLayout(copies[2].copy(), request_.spec.num_layers, request_.spec.num_experts),
    )
    assert first.same_as(propose(name, again))
    for array, copy in zip(
        (request_.scenarios, request_.weights, request_.layout.slots), copies, strict=True
    ):
        assert np.array_equal(array, copy)


@every_policy
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("spare", [0, 1, 7])
@pytest.mark.parametrize(
    ("experts", "ranks"), [(1, 1), (3, 2), (7, 5), (16, 16), (33, 4), (61, 7), (64, 9)]
)
def test_over_the_grid_of_sizes_layouts_are_valid(name, uniform, experts, ranks, spare, nodes):
    """Odd counts, ranks of uneven size, and the ranks that are left after a loss, from the layout
    that was live before it."""
    spec = make_spec(num_layers=2, num_experts=experts)
    slots = [2 * -(-experts // ranks) + spare + 1 + rank % 3 for rank in range(ranks)]
    per_node = -(-ranks // nodes)
    topology = make_topology(slots, ranks_per_node=per_node)
    layout = ExpertLayout.empty(topology, num_layers=2, num_experts=experts)
    demand = np.random.default_rng(experts).zipf(1.5, (2, experts)).clip(max=500) * 1.0
    whole = make_request(spec, topology, layout, demand, uniform=uniform)
    before = asked(name, whole)
    if before is None:
        return
    assert_valid(before, whole)
    alive = [rank != ranks // 2 for rank in range(ranks)]
    left = msgspec.structs.replace(
        whole, topology=make_topology(slots, ranks_per_node=per_node, alive=alive), layout=before
    )
    if not feasible(left):
        with pytest.raises(PolicyError, match=SHORT):
            propose(name, left)
        return
    after = asked(name, left)
    if after is not None:
        assert_valid(after, left)


@every_policy
@pytest.mark.parametrize(
    ("layers", "experts", "ranks", "slots"), [(3, 256, 32, 30), (2, 160, 24, 17), (1, 512, 64, 9)]
)
def test_layouts_of_large_models_are_valid(name, uniform, layers, experts, ranks, slots):
    spec = make_spec(num_layers=layers, num_experts=experts)
    topology = make_topology([slots + rank % 2 for rank in range(ranks)], ranks_per_node=8)
    layout = ExpertLayout.empty(topology, num_layers=layers, num_experts=experts)
    demand = np.random.default_rng(1).gamma(0.5, 100.0, (layers, experts))
    request_ = make_request(spec, topology, layout, demand, uniform=uniform, floor=2)
    if not feasible(request_):
        with pytest.raises(PolicyError, match=SHORT):
            propose(name, request_)
        return
    found = asked(name, request_)
    if found is not None:
        assert_valid(found, request_)


def uneven(name, uniform, demand):
    """The policy on three ranks of 10, 11 and 13 slots that hold nothing yet."""
    spec, topology = make_spec(num_experts=8), make_topology([10, 11, 13], ranks_per_node=1)
    layout = ExpertLayout.empty(topology, num_layers=1, num_experts=8)
    request_ = make_request(spec, topology, layout, demand, uniform=uniform)
    return propose(name, request_), request_


@every_policy
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, -5e-324, 1e31])
def test_loads_that_cannot_be_are_refused(name, uniform, value):
    demand = np.ones((1, 8))
    demand[0, 3] = value
    with pytest.raises(PolicyError, match=r"scenarios must be .*(0|1e\+30) pairs a second"):
        uneven(name, uniform, demand)


@every_policy
@pytest.mark.parametrize("scale", [0.0, 5e-324, 1e-300, 1.0, 2.0**63, 1e29])
@pytest.mark.parametrize("hot", [1, 8])
def test_loads_of_any_size_are_planned_for(name, uniform, scale, hot):
    """Nothing, one expert alone, all alike; from the least number there is to beyond 2^63."""
    demand = np.zeros((1, 8))
    demand[0, :hot] = scale
    found, request_ = uneven(name, uniform, demand)
    assert_valid(found, request_)
    if name != "static" and hot == 1 and scale >= 1.0:
        assert found.replica_counts[0, 0] == 3, "all load on one expert: it is on every rank"


def relabelled(layout, renamed):
    """The layout in which expert e of every layer is called renamed[e]."""
    keys = np.arange(layout.num_keys)
    new_key = keys // layout.num_experts * layout.num_experts + renamed[keys % layout.num_experts]
    slots = np.where(layout.slots >= 0, new_key[np.maximum(layout.slots, 0)], layout.slots)
    return ExpertLayout(slots, layout.num_layers, layout.num_experts)


@pytest.mark.parametrize(("name", "uniform"), [m for m in MODES if m[0] != "eplb"])
@EXAMPLES
@given(request_=requests(), seed=st.integers(0, 1000))
def test_relabelling_experts_of_different_load_only_relabels(name, uniform, request_, seed):
    """On any fleet, from any layout: renamed experts are served as well as the others were. (The
    published greedy hands places to ranks by number where each rank has one: on uneven ranks it has
    favourites; the next test holds it to what it can.)"""
    rng, spec = np.random.default_rng(seed), request_.spec
    # no two experts alike, so no tie is ever broken by id
    loads = rng.permutation(spec.num_keys).reshape(spec.num_layers, spec.num_experts) + rng.random()
    scenarios = np.zeros((1, NUM_PHASES, spec.num_layers, spec.num_experts))
    scenarios[0, 0] = np.exp(loads * 0.37)
    request_ = msgspec.structs.replace(
        request_, scenarios=scenarios, weights=np.ones(1), uniform=uniform
    )
    assume(feasible(request_))
    start = propose("static", request_)
    renamed = rng.permutation(spec.num_experts)
    other = np.zeros_like(scenarios)
    other[..., renamed] = scenarios
    before = msgspec.structs.replace(request_, layout=start)
    after = msgspec.structs.replace(request_, layout=relabelled(start, renamed), scenarios=other)
    plain, again = propose(name, before), propose(name, after)
    if name == "static":
        assert np.array_equal(again.hosts, plain.hosts), "it looks at ids alone, never at load"
        return
    assert objective_s(after, again) == pytest.approx(
        objective_s(after, relabelled(plain, renamed)), rel=1e-9
    )


@every_policy
@pytest.mark.parametrize(
    ("experts", "ranks", "slots"), [(12, 4, 6), (7, 3, 4), (9, 9, 2), (5, 2, 5)]
)
@pytest.mark.parametrize("seed", range(4))
def test_relabelled_experts_get_the_same_places(name, uniform, experts, ranks, slots, seed):
    """From nothing, on equal ranks: the same sets of experts by their new names, on whatever
    rank."""
    rng = np.random.default_rng(seed)
    spec, topology = make_spec(num_experts=experts), make_topology([slots] * ranks)
    empty = ExpertLayout.empty(topology, num_layers=1, num_experts=experts)
    demand = rng.gamma(0.6, 100.0, (1, experts)) + rng.random((1, experts))
    renamed = rng.permutation(experts)
    other = np.empty_like(demand)
    other[:, renamed] = demand
    plain = propose(name, make_request(spec, topology, empty, demand, uniform=uniform))
    again = propose(name, make_request(spec, topology, empty, other, uniform=uniform))
    if name == "static":
        assert again.same_as(plain)
        return
    rows = [
        sorted(tuple(sorted(row[row >= 0].tolist())) for row in layout.slots)
        for layout in (relabelled(plain, renamed), again)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("uniform", [False, True], ids=["pooled", "uniform"])
@EXAMPLES
@given(
    request_=requests(),
    start=st.sampled_from(["static", "eplb"]),
    moves=st.none() | st.integers(0, 4),
)
def test_from_a_valid_layout_it_is_never_worse_than_staying(uniform, request_, start, moves):
    """On the scenarios it was given, by its own measure. The policies that plan anew are held to it
    by the engine, below."""
    request_ = msgspec.structs.replace(request_, uniform=uniform, max_moves=moves)
    assume(feasible(request_))
    live = asked(start, request_)
    assume(live is not None)
    request_ = msgspec.structs.replace(request_, layout=live)
    found = propose("incremental", request_)
    stayed, reached = objective_s(request_, live), objective_s(request_, found)
    assert reached <= stayed * (1 + 1e-12)
    writes = [c for c in live.diff(found) if c.after >= 0]
    if moves is not None:
        assert len(writes) <= moves
    if writes:
        assert reached < stayed
    if not request_.scenarios.any():
        assert found.same_as(live)


@every_policy
@pytest.mark.parametrize("seed", range(4))
def test_what_the_engine_starts_by_itself_is_never_worse_than_staying(name, uniform, seed):
    """Whatever policy is configured, also one that plans anew: from a layout made for the load that
    keeps coming, a target that serves it worse is computed and not started."""
    rng = np.random.default_rng(seed)
    spec, topology = make_spec(num_layers=2, num_experts=6), make_topology([9] * 3)
    demand = np.floor(rng.gamma(0.5, 2000.0, (2, 6))) * 4.0
    empty = ExpertLayout.empty(topology, num_layers=2, num_experts=6)
    fields = {"uniform": uniform, "balance_enough": 1.0}
    start = propose("static", make_request(spec, topology, empty, demand, **fields))
    tuned = propose("incremental", make_request(spec, topology, start, demand, **fields))
    config = RebalanceConfig(
        cooldown_s=0.0, policy=name, uniform=uniform, max_moves=100, balance_enough=1.0
    )
    driver = EngineDriver(spec, topology, config, routers=["r0"], join=False)
    for rank, row in enumerate(tuned.slots):
        driver.join(rank, shard=holding_keys(spec, rank, row))
    asked_for = make_request(spec, topology, tuned, demand)
    cost = objective_s(asked_for, driver.engine.layout())
    for _ in range(8):
        told = len(driver.records)
        driver.close_window(dict(enumerate(demand.reshape(-1).tolist())), base=0.0)
        for started in driver.records[told:]:
            if started.outcome == "started" and started.move_id < 0:
                assert started.numbers["gain_s_per_s"] > 0.0
        reached = objective_s(asked_for, driver.engine.layout())
        assert reached <= cost * (1 + 1e-9)
        cost = reached
    assert "out_of_balance" in driver.rules(), "no target was ever asked for"
    driver.check_agreement()


def holding_keys(spec, rank, row):
    """A shard whose slots hold the keys of a row already."""
    shard = ShardSlots(
        rank=rank, incarnation=1, num_slots=len(row), slot_bytes=1000, weights_version="v1"
    )
    for slot, key in enumerate(row.tolist()):
        if key >= 0:
            layer, expert = divmod(key, spec.num_experts)
            fields = {"step_id": -1 - slot, "rank": rank, "incarnation": 1, "slot": slot}
            tag = shard.reserve(
                ReserveSlot(**fields, layer=layer, expert=expert, weights_version="v1")
            ).slot_tag
            shard.ledger.slots[slot].phase = SlotPhase.VERIFIED
            shard.ledger.tags[slot] = tag
    return shard
