"""Moves, order, proof, price, fit and gate of the planner."""

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.policies_rule import accumulate, plan_pays, regret_reached
from placement.layout import EMPTY, SlotId
from placement.planner import (
    MoveKind,
    PlannerError,
    StepKind,
    WaveConfig,
    fit,
    make_plan,
    missing_slots,
    missing_uniform,
    prove,
    reachable_floor,
)
from placement.planner.plan import PlannedStep
from placement.planner.price import (
    compiled_of,
    layer_gains,
    slowest_of_layers,
    slowest_seconds,
    stack,
)
from tests.builders import make_demand, make_layout, make_request, make_spec, make_topology

E = EMPTY


def plan_between(before, after, *, num_experts=4, demand=None, waves=None, slots=None, **fields):
    spec = make_spec(num_experts=num_experts)
    current = make_layout(before, num_experts=num_experts)
    target = make_layout(after, num_experts=num_experts)
    topology = make_topology(slots or [len(row) for row in after])
    request = make_request(spec, topology, current, demand, **fields)
    return make_plan(current, target, request, waves or WaveConfig())


def keys_by_rank(layout):
    return [sorted(int(k) for k in row if k >= 0) for row in layout.slots]


def kinds(plan):
    return [m.kind for m in plan.moves]


def test_equal_layouts_need_no_move_even_where_slots_differ():
    plan = plan_between([[0, 1, E], [2, 3, E]], [[E, 0, 1], [3, E, 2]])
    assert plan.moves == ()
    assert plan.steps == ()


def test_replicate_is_one_add():
    plan = plan_between([[0, 1, E, E], [2, 3, E]], [[0, 1, 2, E], [2, 3, E]], slots=[4, 3])
    assert kinds(plan) == [MoveKind.REPLICATE]
    (step,) = plan.steps
    assert (step.kind, step.slot, step.expert, step.after) == (StepKind.ADD, SlotId(0, 2), 2, ())
    assert plan.moves[0].source_rank == 1
    assert plan.copy_bytes == 1000


def test_migrate_is_an_add_then_the_removal_that_waits_for_it():
    plan = plan_between([[0, 1, E], [2, 3, E, E]], [[0, E, E], [2, 3, 1, E]], slots=[3, 4])
    assert kinds(plan) == [MoveKind.MIGRATE]
    add, remove = plan.steps
    assert (add.kind, remove.kind) == (StepKind.ADD, StepKind.REMOVE)
    assert remove.after == (add.step_id,)
    assert (plan.moves[0].source_rank, plan.moves[0].target_rank) == (0, 1)


def test_a_removal_that_only_makes_room_belongs_to_the_replicate():
    plan = plan_between([[0, 1, E], [2, 3, 1, E]], [[0, 2, E], [2, 3, 1, E]])
    assert kinds(plan) == [MoveKind.REPLICATE]
    assert {s.move_id for s in plan.steps} == {0}
    assert {s.kind for s in plan.steps} == {StepKind.ADD, StepKind.REMOVE}


def test_a_removal_for_its_own_sake_is_an_eviction():
    plan = plan_between([[0, 1, E], [2, 3, 1, E]], [[0, 1, E], [2, 3, E, E]])
    assert kinds(plan) == [MoveKind.EVICT]
    assert plan.moves[0].target_rank == -1
    assert plan.copy_bytes == 0


def test_last_replicas_change_places_through_the_staging_slots():
    plan = plan_between([[0, 1, E], [2, 3, E]], [[2, 3, E], [0, 1, E]])
    assert kinds(plan) == [MoveKind.MIGRATE] * 4
    assert plan.refused == ()
    assert max(s.wave for s in plan.steps) >= 1


def test_without_staging_slots_a_cycle_of_last_replicas_is_left_out_and_the_ranks_are_named():
    plan = plan_between([[0, 1], [2, 3]], [[2, 1], [0, 3]], staging_slots=0)
    assert plan.moves == ()
    assert len(plan.refused) == 2
    assert "ranks" in plan.refused[0]


def test_the_feasible_part_of_a_plan_stays_when_a_cycle_is_left_out():
    plan = plan_between(
        [[0, 1], [2, 3], [E, E]], [[2, 1], [0, 3], [1, E]], staging_slots=0, slots=[2, 2, 2]
    )
    assert kinds(plan) == [MoveKind.REPLICATE]
    assert plan.moves[0].target_rank == 2
    assert plan.refused


def test_an_expert_without_a_replica_comes_from_the_checkpoint_and_first():
    plan = plan_between([[0, E, E], [2, 3, E]], [[0, 1, E], [2, 3, E]])
    (move,) = plan.moves
    assert (move.source_rank, move.cross_node) == (-1, True)
    assert "no replica" in move.reason


def test_an_add_that_would_fill_the_staging_slot_is_left_out_and_the_rank_is_named():
    plan = plan_between([[0, 1, E], [2, 3, E]], [[0, 1, 2], [2, 3, E]])
    assert plan.moves == ()
    assert "rank 0 would end with 0 empty slots, staging needs 1" in plan.refused[0]


def test_a_plan_of_nothing_gains_a_float_of_nothing():
    plan = plan_between([[0, 1, E], [2, 3, E]], [[0, 1, E], [2, 3, E]])
    assert type(plan.gain_s_per_s) is float


def test_a_wave_is_no_wider_than_its_limits():
    before = [[0, 1, 2, 3, E, E, E, E, E], [E] * 9]
    after = [[0, 1, 2, 3, E, E, E, E, E], [0, 1, 2, 3, E, E, E, E, E]]
    plan = plan_between(before, after, waves=WaveConfig(adds_per_rank=4, copies_from_rank=1))
    assert [s.wave for s in plan.steps] == [0, 1, 2, 3]
    wide = plan_between(before, after, waves=WaveConfig(adds_per_rank=3, copies_from_rank=9))
    assert [s.wave for s in wide.steps] == [0, 0, 0, 1]


def test_a_shrinking_rank_gives_up_its_high_slots():
    spec = make_spec()
    current = make_layout([[0, 1, E, 2], [2, 3, E, E]])
    topology = make_topology([3, 4])
    request = make_request(spec, topology, current)
    target = fit(current, topology, make_demand(spec), staging_slots=1)
    plan = make_plan(current, target, request, WaveConfig(evict_first=True))
    assert kinds(plan) == [MoveKind.EVICT]
    end = prove(current, plan.steps, slot_limit=[3, 4], staging_slots=1)
    assert end.slots[0, 3] == EMPTY


def test_a_kept_expert_above_the_limit_is_moved_within_its_rank():
    spec = make_spec()
    current = make_layout([[0, E, E, 1], [2, 3, E, E]])
    topology = make_topology([3, 4])
    request = make_request(spec, topology, current)
    target = fit(current, topology, make_demand(spec), staging_slots=1)
    plan = make_plan(current, target, request, WaveConfig())
    assert kinds(plan) == [MoveKind.MIGRATE]
    assert (plan.moves[0].source_rank, plan.moves[0].target_rank) == (0, 0)
    assert plan.moves[0].reason.endswith("of the layer's load; to another slot of rank 0")
    end = prove(current, plan.steps, slot_limit=[3, 4], staging_slots=1)
    assert keys_by_rank(end) == [[0, 1], [2, 3]]


def test_gain_and_balance_are_those_of_the_layer_that_changed():
    demand = make_demand(make_spec(), {0: 100.0})
    plan = plan_between([[0, 1, E, E], [2, 3, E, E]], [[0, 1, E, E], [2, 3, 0, E]], demand=demand)
    per_pair = make_spec().flops_per_pair / 1e9
    assert plan.gain_s_per_s == pytest.approx((101.0 - 51.5) * per_pair, rel=1e-3)
    assert plan.moves[0].gain_s_per_s == pytest.approx(plan.gain_s_per_s)
    assert plan.balancedness_before == pytest.approx(103 / 2 / 101, rel=1e-3)
    assert plan.balancedness_after == pytest.approx(1.0, rel=1e-3)
    assert plan.cost_s == pytest.approx(1000 / 1e8)


def test_a_migrate_says_what_both_ranks_carry_before_and_after():
    demand = np.array([[60.0, 20.0, 15.0, 5.0]])
    before, after = [[0, 1, E], [2, 3, E]], [[0, 3, E], [2, 1, E]]
    reasons = {m.expert: m.reason for m in plan_between(before, after, demand=demand).moves}
    assert reasons == {
        1: "20.0% of the layer's load; rank 0 from 80.0% to 65.0%, rank 1 from 20.0% to 35.0%",
        3: "5.0% of the layer's load; rank 1 from 20.0% to 35.0%, rank 0 from 80.0% to 65.0%",
    }
    idle = plan_between(before, after, demand=np.zeros((1, 4)))
    assert {m.reason for m in idle.moves} == {"no load known"}


def test_a_replicate_and_an_evict_say_how_many_replicas_there_are():
    demand = np.array([[60.0, 20.0, 15.0, 5.0]])
    one, two = [[0, 1, E], [2, 3, E, E]], [[0, 1, E], [2, 3, 0, E]]
    (move,) = plan_between(one, two, demand=demand).moves
    assert move.reason == "60.0% of the layer's load on 1 replica"
    (move,) = plan_between(two, one, demand=demand).moves
    assert move.reason == "60.0% of the layer's load; 1 replica left"


def test_layouts_that_do_not_belong_together_are_refused():
    with pytest.raises(PlannerError, match="without a replica"):
        plan_between([[0, 1, E], [2, 3, E]], [[0, 1, E], [2, E, E]])
    spec, topology = make_spec(), make_topology([3, 3])
    current = make_layout([[0, 1, E], [2, 3, E]])
    with pytest.raises(PlannerError, match="num_ranks"):
        make_plan(
            current,
            make_layout([[0, 1, 2, 3, E]]),
            make_request(spec, topology, current),
            WaveConfig(),
        )
    three = make_request(spec, make_topology([3, 3, 3]), current)
    with pytest.raises(PlannerError, match="target has 2 ranks, the topology 3"):
        make_plan(current, current, three, WaveConfig())


def random_layout(rng, spec, slots, staging):
    rows = [set() for _ in slots]
    room = [n - staging for n in slots]
    for key in rng.permutation(spec.num_keys):
        free = [r for r in range(len(slots)) if len(rows[r]) < room[r]]
        rows[free[int(rng.integers(len(free)))]].add(int(key))
    for _ in range(int(rng.integers(0, 12))):
        rank, key = int(rng.integers(len(slots))), int(rng.integers(spec.num_keys))
        if len(rows[rank]) < room[rank]:
            rows[rank].add(key)
    filled = []
    for row, n in zip(rows, slots, strict=True):
        keys = [*row, *([EMPTY] * (n - len(row)))]
        filled.append([int(k) for k in rng.permutation(keys)])
    return make_layout(filled, num_layers=spec.num_layers, num_experts=spec.num_experts)


@pytest.mark.parametrize("seed", range(40))
def test_with_a_staging_slot_every_target_is_reached(seed):
    rng = np.random.default_rng(seed)
    spec = make_spec(num_layers=2, num_experts=6)
    slots = [int(n) for n in rng.integers(4, 8, size=4)]
    staging = int(rng.integers(1, 3))
    if sum(slots) - staging * 4 < spec.num_keys:
        slots = [n + 2 for n in slots]
    current = random_layout(rng, spec, slots, staging)
    target = random_layout(rng, spec, slots, staging)
    request = make_request(
        spec, make_topology(slots), current, staging_slots=staging, floor=int(rng.integers(1, 3))
    )
    plan = make_plan(current, target, request, WaveConfig(adds_per_rank=int(rng.integers(1, 4))))
    assert plan.refused == ()
    end = prove(current, plan.steps, slot_limit=slots, staging_slots=staging)
    assert keys_by_rank(end) == keys_by_rank(target)
    again = make_plan(current, target, request, WaveConfig(adds_per_rank=2))
    assert again == make_plan(current, target, request, WaveConfig(adds_per_rank=2))


@pytest.mark.parametrize("seed", range(20))
def test_without_staging_slots_what_is_planned_is_still_feasible(seed):
    rng = np.random.default_rng(seed)
    spec = make_spec(num_layers=1, num_experts=8)
    slots = [3, 3, 3]
    current, target = (random_layout(rng, spec, slots, 0) for _ in range(2))
    request = make_request(spec, make_topology(slots), current, staging_slots=0)
    plan = make_plan(current, target, request, WaveConfig())
    prove(current, plan.steps, slot_limit=slots, staging_slots=0)
    end = prove(current, plan.steps, slot_limit=slots, staging_slots=0)
    assert plan.refused or keys_by_rank(end) == keys_by_rank(target)


def step(step_id, kind, slot, expert, wave=0, after=()):
    return PlannedStep(
        step_id=step_id,
        kind=kind,
        move_id=0,
        slot=SlotId(*slot),
        layer=0,
        expert=expert,
        wave=wave,
        after=after,
    )


@pytest.mark.parametrize(
    ("steps", "broken"),
    [
        ([step(0, StepKind.ADD, (0, 0), 3)], "slot holds 0"),
        ([step(0, StepKind.REMOVE, (0, 0), 0)], "last replica"),
        ([step(0, StepKind.REMOVE, (0, 0), 1)], "slot holds 0"),
        ([step(0, StepKind.ADD, (0, 2), 3, after=(7,))], "comes later"),
        ([step(0, StepKind.ADD, (0, 2), 3)], "ends with 0 empty"),
        (
            [step(0, StepKind.REMOVE, (1, 2), 1), step(1, StepKind.ADD, (1, 2), 0)],
            "same wave",
        ),
        (
            [step(0, StepKind.ADD, (1, 3), 0, wave=1), step(1, StepKind.ADD, (0, 2), 3)],
            "backwards",
        ),
    ],
)
def test_the_proof_names_what_is_broken(steps, broken):
    current = make_layout([[0, 1, E], [2, 3, 1, E]])
    with pytest.raises(AssertionError, match=broken):
        prove(current, steps, slot_limit=[3, 4], staging_slots=1)


def test_the_proof_refuses_slots_above_the_limit():
    current = make_layout([[0, 1, E], [2, 3, E]])
    with pytest.raises(AssertionError, match="rank has 2 slots"):
        prove(current, [step(0, StepKind.ADD, (0, 2), 3)], slot_limit=[2, 3], staging_slots=0)


def test_fit_gives_up_the_replica_that_saves_least_and_never_a_last_one_first():
    spec = make_spec()
    current = make_layout([[0, 1, 2, E], [0, 2, 3, E]])
    demand = make_demand(spec, {0: 9.0})
    kept = fit(current, make_topology([3, 4]), demand, staging_slots=1)
    assert keys_by_rank(kept) == [[0, 1], [0, 2, 3]]
    kept = fit(current, make_topology([2, 4]), demand, staging_slots=1)
    assert keys_by_rank(kept) == [[1], [0, 2, 3]]


def test_fit_empties_draining_and_lost_ranks():
    spec = make_spec()
    current = make_layout([[0, 1, E], [2, 3, E], [0, 2, E]])
    topology = make_topology([3, 3, 3], draining=[True, False, False], alive=[True, True, False])
    kept = fit(current, topology, make_demand(spec), staging_slots=1)
    assert keys_by_rank(kept) == [[], [2, 3], []]
    kept.validate(topology, staging_slots=1, partial=True)


def test_missing_slots_counts_what_the_floor_needs():
    assert missing_slots(make_topology([3, 3]), num_keys=4, floor=1, staging_slots=1) == 0
    assert missing_slots(make_topology([3, 2]), num_keys=4, floor=1, staging_slots=1) == 1
    one_domain_is_large = make_topology([9, 9, 3])
    assert missing_slots(one_domain_is_large, num_keys=4, floor=2, staging_slots=1) == 2
    assert reachable_floor(one_domain_is_large, num_keys=4, floor=2, staging_slots=1) == 1
    assert reachable_floor(make_topology([2, 2]), num_keys=4, floor=2, staging_slots=1) == 0


def test_slots_of_a_uniform_layout_are_missing_rank_by_rank():
    spec = make_spec(num_layers=3, num_experts=4)

    def missing(slots, floor=1, **fields):
        topology = make_topology(slots, ranks_per_node=1, **fields)
        return missing_uniform(topology, spec, floor=floor, staging_slots=1)

    assert missing([7, 7]) == 0
    assert missing([20, 5]) == 2, "what one rank has too many helps no other"
    assert missing([20, 5], floor=2) == 12 - 4
    assert missing([20, 5], draining=[False, True]) == 0
    assert missing([7, 7], alive=[False, False]) == 12


def test_gate_compares_seconds_with_seconds():
    plan = plan_between(
        [[0, 1, E, E], [2, 3, E, E]],
        [[0, 1, E, E], [2, 3, 0, E]],
        demand=make_demand(make_spec(), {0: 100.0}),
    )
    life = plan.cost_s / plan.gain_s_per_s
    assert not plan_pays(plan, life * 0.9)
    assert plan_pays(plan, life * 1.1)
    assert accumulate(1.0, 0.5, 2.0, 0.9) == pytest.approx(1.9)
    assert accumulate(1.0, -0.5, 2.0, 0.9) == pytest.approx(0.9)
    assert not regret_reached(plan.cost_s * 0.99, plan)
    assert regret_reached(plan.cost_s, plan)


# -- many layers at once, and what chance makes of a gain -----------------------------------------


def test_layers_priced_together_cost_what_each_costs_alone():
    rng = np.random.default_rng(4)
    layout = make_layout(
        [[0, 1, 4, 8], [0, 2, 5, 9], [3, 1, 6, 10], [7, 11, 2, 8]], num_layers=3, num_experts=4
    )
    demand, per_pair = rng.uniform(0.0, 9.0, (3, 4)), np.array([1.0, 0.5, 1.0, 0.0])
    demand[1] = 0.0
    layers = [compiled_of(layout, layer) for layer in range(3)]
    together = slowest_of_layers(stack(layers), demand, per_pair)
    alone = [
        float(slowest_seconds(compiled, demand[i : i + 1], per_pair)[0])
        for i, compiled in enumerate(layers)
    ]
    assert together.tolist() == alone
    assert together[1] == 0.0
    assert together[0] > 0.0


@pytest.mark.parametrize(
    ("hot", "differs"),
    [
        ((8.0, 8.0, 8.0, 8.0, 8.0), False),
        ((8.0, 8.0, 8.0, 0.0, 0.0), False),
        ((8.0, 0.0, 8.0, 0.0, 8.0), True),
    ],
)
def test_a_change_for_good_among_scenarios_is_no_noise_of_the_gain(hot, differs):
    before, after = make_layout([[0, 2, E], [1, 3, E]]), make_layout([[0, 2, E], [1, 3, 0]])
    spec = make_spec()
    scenarios = np.ones((len(hot), 2, 1, 4))
    scenarios[:, 0, 0, 0] += hot
    request = make_request(spec, make_topology([3, 3]), before)
    request = replace(request, scenarios=scenarios, weights=np.full(len(hot), 1.0 / len(hot)))
    gain = layer_gains(before, after, [0], request)[0]
    assert gain.saved_s > 0.0
    assert (gain.spread_s > 0.0) is differs
    one = replace(request, scenarios=scenarios[:1], weights=np.ones(1))
    found = layer_gains(before, after, [0], one)[0]
    assert found.spread_s == pytest.approx(found.saved_s), "one scenario tells nothing of chance"
