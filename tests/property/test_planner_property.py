"""Plans between any two layouts: a feasible order, memory never over, wherever a wave stands.

The steps are played here by waves, as shards live through them: all adds of a wave lie in their
slots before any of its removals frees one. Written apart from `prove`, which plays them one by one.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.layout import ABSENT, EMPTY, ExpertLayout
from placement.planner import PlannerError, StepKind, WaveConfig, fit, make_plan
from placement.policy import PolicyError, propose
from tests.builders import make_request, make_spec, make_topology
from tests.property.policy_requests import MODE_NAMES, MODES

EXAMPLES = settings(max_examples=120, deadline=None)


@st.composite
def layouts(draw, spec, slots, staging):
    """Every rank leaves its staging slots empty; every expert has a replica."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    rows = [set() for _ in slots]
    room = [n - staging for n in slots]
    for key in rng.permutation(spec.num_keys).tolist():
        free = [r for r, row in enumerate(rows) if len(row) < room[r]]
        rows[free[int(rng.integers(len(free)))]].add(key)
    for _ in range(int(rng.integers(0, 16))):
        rank, key = int(rng.integers(len(slots))), int(rng.integers(spec.num_keys))
        if len(rows[rank]) < room[rank]:
            rows[rank].add(key)
    matrix = np.full((len(slots), max(slots)), ABSENT, dtype=np.int32)
    for rank, row in enumerate(rows):
        filled = np.full(slots[rank], EMPTY, dtype=np.int32)
        filled[rng.permutation(slots[rank])[: len(row)]] = sorted(row)
        matrix[rank, : slots[rank]] = filled
    return ExpertLayout(matrix, spec.num_layers, spec.num_experts)


@st.composite
def pairs(draw):
    """(current, target, request, waves, whether evictions go first)."""
    spec = make_spec(num_layers=draw(st.integers(1, 2)), num_experts=draw(st.integers(2, 5)))
    staging = draw(st.integers(0, 2))
    num_ranks = draw(st.integers(1, 4))
    least = -(-spec.num_keys // num_ranks) + staging
    slots = [least + draw(st.integers(0, 3)) for _ in range(num_ranks)]
    current = draw(layouts(spec, slots, staging))
    target = draw(layouts(spec, slots, staging))
    request = make_request(
        spec,
        make_topology(slots),
        current,
        staging_slots=staging,
        floor=draw(st.integers(1, 2)),
    )
    waves = WaveConfig(
        adds_per_rank=draw(st.integers(1, 3)),
        copies_from_rank=draw(st.integers(1, 3)),
        evict_first=draw(st.booleans()),
    )
    return current, target, request, waves


def play(current, plan, limit, waves):
    """Rows after the plan; asserts what must hold at every moment of it."""
    rows = current.slots.tolist()
    ended, done = {}, set()
    for wave in sorted({s.wave for s in plan.steps}):
        steps = [s for s in plan.steps if s.wave == wave]
        adds = [s for s in steps if s.kind is StepKind.ADD]
        into = [s.slot.rank for s in adds]
        assert all(into.count(rank) <= waves.adds_per_rank for rank in into)
        for step in adds:
            rank, index = step.slot
            assert set(step.after) <= done, "an add waits for a step of its own wave or a later one"
            assert index < limit[rank], "memory: above the rank's budget"
            assert rows[rank][index] == EMPTY, "memory: the slot is not empty yet"
            rows[rank][index] = step.layer * current.num_experts + step.expert
        for step in (s for s in steps if s.kind is StepKind.REMOVE):
            rank, index = step.slot
            relied = set(step.after) - done - {s.step_id for s in adds}
            assert not relied, "a removal relies on an add that is not listed by then"
            key = step.layer * current.num_experts + step.expert
            assert rows[rank][index] == key
            ended[rank, index] = key
            rows[rank][index] = EMPTY
            assert any(key in row for row in rows), f"expert {key} has no replica left"
        done |= {s.step_id for s in steps}
    return rows


@EXAMPLES
@given(drawn=pairs())
def test_every_plan_is_feasible_and_ends_where_it_was_meant_to(drawn):
    current, target, request, waves = drawn
    limit = [rank.num_slots for rank in request.topology.ranks]
    plan = make_plan(current, target, request, waves)
    rows = play(current, plan, limit, waves)
    wanted = [{k for k in row if k >= 0} for row in target.slots.tolist()]
    reached = [{k for k in row if k >= 0} for row in rows]
    if request.staging_slots:
        assert plan.refused == ()
    if not plan.refused:
        assert reached == wanted
    for rank, row in enumerate(rows):
        assert sum(k == EMPTY for k in row[: limit[rank]]) >= request.staging_slots
        filled = [k for k in row if k >= 0]
        assert len(filled) == len(set(filled)), f"rank {rank} holds an expert twice"


@pytest.mark.parametrize(("policy", "uniform"), MODES, ids=MODE_NAMES)
@EXAMPLES
@given(drawn=pairs(), data=st.data())
def test_plans_of_policies_for_smaller_budgets_and_draining_ranks_are_feasible(
    policy, uniform, drawn, data
):
    """Budgets fall, ranks drain and are lost: memory is over in no wave of what a policy wants."""
    current, _, request, waves = drawn
    slots = [
        max(0, rank.num_slots - data.draw(st.integers(0, 3))) for rank in request.topology.ranks
    ]
    draining = [data.draw(st.integers(0, 4)) == 0 for _ in slots]
    alive = [data.draw(st.integers(0, 9)) > 0 for _ in slots]
    topology = make_topology(slots, draining=draining, alive=alive)
    matrix = current.slots.copy()
    matrix[~np.array(alive)] = ABSENT
    current = ExpertLayout(matrix, current.num_layers, current.num_experts)
    demand = np.random.default_rng(data.draw(st.integers(0, 99))).gamma(
        0.5, 50.0, (request.spec.num_layers, request.spec.num_experts)
    )
    fields = {"staging_slots": request.staging_slots, "floor": request.floor, "uniform": uniform}
    request = make_request(request.spec, topology, current, demand, **fields)
    fitted = fit(current, topology, demand, staging_slots=request.staging_slots)
    try:
        target = propose(policy, make_request(request.spec, topology, fitted, demand, **fields))
        plan = make_plan(current, target, request, waves)
    except (PolicyError, PlannerError):
        return  # too little memory, said in words
    slots = [n if lives else 0 for n, lives in zip(slots, alive, strict=True)]
    rows = play(current, plan, slots, waves)
    for rank, row in enumerate(rows):
        if not plan.refused:
            assert all(key == EMPTY for key in row[slots[rank] :] if key != ABSENT)
            assert not (draining[rank] and any(key >= 0 for key in row))
    if request.staging_slots and not plan.refused:
        wanted = [{k for k in row if k >= 0} for row in target.slots.tolist()]
        assert [{k for k in row if k >= 0} for row in rows] == wanted
