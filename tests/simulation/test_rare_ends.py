"""Moments that seeds reach seldom: requests that end at once or twice over, faults that find no
victim, a service that is short of an expert."""

import numpy as np

from placement.messages import events as ev
from placement.messages.effects import Effects, Transition
from placement.migration import RemoveState
from placement.planner.plan import StepKind
from placement.sim.faults import FaultKind
from tests.simulation.test_rare_moments import STEP_S, go_on, settle, settled_quiet

# -- requests ------------------------------------------------------------------------------------


def still(world):
    """A router of a service without callers."""
    world.stop_traffic()
    go_on(world, 2.0)
    return next(iter(world.stage.routers.values()))


def drawn(world, **fields):
    request = world.traffic.draw()
    while not request.sound or not request.valid.all():
        request = world.traffic.draw()
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def test_a_request_of_padding_alone_is_answered_at_once_and_takes_nothing():
    world = settled_quiet()
    router = still(world)
    sent, told = world.stage.network.sent, []
    request = drawn(world)
    request.valid[:] = 0
    router.forward(request, told.append)
    assert told == ["ok"]
    assert world.stage.network.sent == sent
    assert router.admission.at_work == router.admission.waiting == len(router.flights) == 0


def test_a_caller_that_gave_up_after_its_answer_had_come_is_told_the_answer():
    world = settled_quiet()
    router = still(world)
    told, cancelled = [], world.stage.coverage.refusals["request.cancelled"]
    router.forward(drawn(world, timeout_s=2.0, patience_s=0.4), told.append)
    router.pause()
    go_on(world, 0.5)  # the rows come, and then the end of the caller's patience
    assert told == []
    router.resume()
    go_on(world, 5.0)
    assert told == ["ok"]
    assert world.stage.coverage.refusals["request.cancelled"] == cancelled
    assert router.admission.at_work == len(router.flights) == 0


# -- faults --------------------------------------------------------------------------------------


def drained(step, rank, **fields):
    """The step's removal is drained, as the engine tells it."""
    given = {
        "at_s": 0.0,
        "plan_id": "p",
        "step_id": step,
        "kind": StepKind.REMOVE,
        "rank": rank,
        "slot": 0,
        "layer": 0,
        "expert": 0,
        "event": "drained",
        "before": RemoveState.ACKED.value,
        "after": RemoveState.DRAINED.value,
    }
    return Transition(**(given | fields))


def test_a_fault_that_waits_for_a_recall_makes_one_happen():
    world = settled_quiet()
    nemesis, met = world.nemesis, world.stage.coverage
    nemesis._armed = ("remove.recalled", FaultKind.LOSS)
    world.harm.ask(lambda n: ev.DrainAsked(at_s=0.0, request_id=n, rank=0))
    end_s = world.stage.clock.now_s + 20.0
    while nemesis._armed is not None and world.stage.clock.now_s < end_s:
        go_on(world, STEP_S)
    assert met.pairs["remove.recalled x loss"] > 0
    world.heal()
    settle(world, 60.0)


def test_nobody_is_harmed_for_a_removal_that_nothing_stands_for():
    world = settled_quiet()
    boss, nemesis = world.fleet.controller, world.nemesis
    world.harm.ask(lambda n: ev.DrainAsked(at_s=0.0, request_id=n, rank=0))
    while boss.engine.state.run is None:
        go_on(world, STEP_S)
    step_id = next(s.step.step_id for s in boss.engine.state.run.steps.values() if not s.step.after)
    layer, expert, rank = sole_replica(boss.engine.layout())
    nemesis._armed = ("remove.recalled", FaultKind.LOSS)
    of_another_plan = drained(1 << 40, rank)
    alone = drained(step_id, rank, layer=layer, expert=expert)
    nemesis.stepped(boss, Effects(transitions=(of_another_plan, alone)))
    assert all(shard.alive for shard in world.stage.shards.values())
    assert world.stage.network.weather.fair
    assert nemesis._armed is not None, "it waits on"


def sole_replica(layout):
    for layer, expert in np.ndindex(layout.num_layers, layout.num_experts):
        ranks = layout.ranks_of(layer, expert)
        if len(ranks) == 1:
            return layer, expert, ranks[0]
    raise AssertionError("every expert has two replicas")


# -- is all well? --------------------------------------------------------------------------------


def test_a_service_short_of_an_expert_is_not_at_rest():
    world = settled_quiet()
    layer, expert, rank = sole_replica(world.fleet.controller.engine.layout())
    world.fleet.kill(world.stage.shards[rank], "fault")
    world.fleet.journal.full = True  # no plan is at work, so none is what the answer names
    said = []
    while "not every expert is listed" not in said:
        assert len(said) < 100, set(said)
        go_on(world, 0.1)
        said.append(world.why_not_settled())
    world.fleet.journal.full = False
    settle(world, 60.0)
    assert len(world.fleet.controller.engine.layout().ranks_of(layer, expert)) > 0


def test_a_service_without_one_of_its_routers_is_not_at_rest():
    world = settled_quiet()
    name = world.fleet.router_names[1]
    first = world.stage.routers[name]
    world.fleet.kill(first, "fault")
    assert world.why_not_settled() == f"{name} is not there"
    settle(world)
    assert world.stage.routers[name].alive
    assert world.stage.routers[name] is not first
