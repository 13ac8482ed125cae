"""Replicas that are on their way out: taken back where they are needed again, and only there; moves
within a rank."""

import msgspec
import pytest

from placement.config import RebalanceConfig
from placement.messages import events as ev
from placement.messages.effects import ComputeTarget, CopyExpert, ReserveSlot
from placement.migration import AddState, RemoveState
from placement.planner import WaveConfig, make_plan
from placement.roles.shard import ShardSlots, SlotPhase
from tests.builders import make_layout, make_request, make_spec, make_topology
from tests.engine_driver import EngineDriver
from tests.unit.placement.test_engine_edges import answer_target, ask, filled, plan_to

PATIENT = {"router_silence_s": 600.0, "drain_wait_s": 600.0}


def unlisted(driver):
    """The one removal that waits for routers."""
    run = driver.engine.state.run
    (found,) = [s for s in run.steps.values() if s.state == RemoveState.UNLISTED]
    return found


def ranks_of(driver, layer, expert):
    return sorted(rank for rank, _, _ in driver.table.replicas(layer, expert))


def run_to(driver, rows):
    """Run the planner's way to these rows of keys, padded; routers say nothing of the table."""
    width = driver.engine.layout().slots.shape[1]
    driver.silent_routers.add("r0")
    driver.hold.add(ComputeTarget)
    driver.close_window({0: 5000.0, 1: 0.0})
    driver.hold.discard(ComputeTarget)
    driver.held.clear()
    answer_target(driver, plan_to(driver, [row + [-1] * (width - len(row)) for row in rows]))


def test_a_removal_is_taken_back_with_the_copy_that_was_to_take_its_place():
    """Another replica serves, so nothing is missing; but none is nearer than the one that has not
    gone yet."""
    driver = filled([[0, 1], [0, 2], [3]], slots=4, **PATIENT)
    run_to(driver, [[1], [0, 2], [3, 0]])
    removal = unlisted(driver)
    assert (ranks_of(driver, 0, 0), removal.step.slot.rank) == ([1, 2], 0)
    copies = sum(isinstance(c, CopyExpert) and c.expert == 0 for c in driver.commands)
    driver.lose(2)
    assert removal.state == RemoveState.LISTED
    assert ranks_of(driver, 0, 0) == [0, 1]
    assert copies == sum(isinstance(c, CopyExpert) and c.expert == 0 for c in driver.commands)


def two_layers(rows):
    """Ranks that hold these keys of two layers of two experts."""
    spec, slots = make_spec(num_layers=2, num_experts=2), 6
    config = RebalanceConfig(cooldown_s=0.0, floor=1, **PATIENT)
    topology = make_topology([slots] * len(rows), ranks_per_node=1)
    driver = EngineDriver(spec, topology, config, routers=["r0"], join=False)
    for rank, keys in enumerate(rows):
        shard = ShardSlots(
            rank=rank, incarnation=1, num_slots=slots, slot_bytes=1000, weights_version="v1"
        )
        for slot, key in enumerate(keys):
            layer, expert = divmod(key, 2)
            who = {"step_id": -1 - slot, "rank": rank, "incarnation": 1, "slot": slot}
            what = {"layer": layer, "expert": expert, "weights_version": "v1"}
            shard.ledger.tags[slot] = shard.reserve(ReserveSlot(**who, **what)).slot_tag
            shard.ledger.slots[slot].phase = SlotPhase.VERIFIED
        driver.join(rank, shard=shard)
    assert driver.keys() == [sorted(keys) for keys in rows]
    return driver


@pytest.mark.parametrize(("mine", "other"), [(1, 3), (3, 1)])
def test_replicas_of_an_expert_of_the_same_number_in_another_layer_are_no_help(mine, other):
    """Expert 1 leaves rank 0 in one layer and lies everywhere in the other: what is lost with rank
    1 must come back from rank 0."""
    rows = [[0, 2, mine, other], [0, mine, other], [2, other]]
    driver = two_layers(rows)
    live, topology = driver.engine.layout(), driver.engine.topology()
    goal = [[0, 2, other, -1, -1, -1], *(row + [-1] * (6 - len(row)) for row in rows[1:])]
    plan = make_plan(
        live,
        make_layout(goal, num_layers=2, num_experts=2),
        make_request(driver.spec, topology, live, staging_slots=1),
        WaveConfig(),
    )
    layers = tuple(msgspec.structs.replace(f, gain_s_per_s=1e3) for f in plan.layers)
    driver.silent_routers.add("r0")
    driver.hold.add(ComputeTarget)
    driver.close_window({0: 5000.0, 1: 0.0})
    driver.held.clear()
    answer_target(driver, msgspec.structs.replace(plan, gain_s_per_s=1e3, layers=layers))
    removal = unlisted(driver)
    assert (removal.step.slot.rank, removal.step.after) == (0, ())
    driver.lose(1)
    assert removal.state == RemoveState.LISTED
    assert 0 in ranks_of(driver, *divmod(mine, 2))


def test_a_move_within_a_rank_that_shrinks_is_listed_and_nothing_of_it_is_called_off():
    driver = filled([[0, 1, 2, 3], [0, 1]], slots=6)
    before = len(driver.transitions)
    ask(driver, ev.BudgetAsked, rank=0, budget_bytes=3000)
    driver.wait(20.0)
    assert [r.num_slots for r in driver.engine.state.ranks] == [3, 6]
    within = {t.step_id for t in driver.transitions[before:] if t.kind == "add" and t.rank == 0}
    assert within
    ends = {t.step_id: t.after for t in driver.transitions[before:]}
    assert {ends[i] for i in within} == {AddState.LISTED}
    assert driver.engine.state.moves_aborted == 0
    assert driver.table.missing() == ()
    driver.check_agreement()
