"""Seeded services whose ranks are also removed, added again and replaced, under every other fault.

Kept apart from the seeds of `test_seeds`, whose worlds stay what they were.
"""

import pytest

from placement.engine.state import RankStatus
from placement.messages import events as ev
from placement.sim.runner import HEAL_S, LOOK_S, REST_S, SAFETY_MAX_S, check, run
from placement.sim.world import World
from tests.simulation.test_rare_moments import go_on, settle, settled_quiet

pytestmark = pytest.mark.timeout(300)

ASKED = (ev.RankRemoveAsked, ev.RankAddAsked, ev.RankReplaceAsked)


@pytest.mark.parametrize("seed", [0, 18])
def test_ranks_come_and_go_under_faults_and_every_promise_holds(seed):
    """18: the wait of a timer was too short to change the clock."""
    outcome = run(seed, elastic=True)
    assert outcome.healed_s <= HEAL_S


def test_every_way_to_come_and_to_go_is_gone():
    done = set()
    for seed in (24, 25, 26, 27):
        world = World(seed, elastic=True)
        clock = world.stage.clock
        while clock.now_s < SAFETY_MAX_S and not world.nemesis.done:
            clock.run_until(clock.now_s + LOOK_S)
        world.heal()
        while world.why_not_settled() and clock.now_s < SAFETY_MAX_S + HEAL_S:
            clock.run_until(clock.now_s + LOOK_S)
        world.stop_traffic()
        clock.run_until(clock.now_s + REST_S)
        world.note_holdings()
        check(world)
        for controller in world.fleet.controllers:
            for event, _ in controller.inputs:
                if isinstance(event, ASKED):
                    answer = controller.answers.get(event.request_id)
                    if answer is not None and answer.code == "ok":
                        done.add(type(event))
        if done == set(ASKED):
            return
    assert done == set(ASKED)


def test_a_rank_emptied_while_the_disk_was_full_is_ended_after_routers_have_heard_of_it():
    world = settled_quiet()
    boss = world.fleet.controller
    world.harm.ask(
        lambda n: ev.RankRemoveAsked(at_s=0.0, request_id=n, rank=0, accept_lower_floor=True)
    )
    shard, state = world.stage.shards[0], boss.engine.state
    while not state.removing:
        go_on(world, 0.001)
    world.fleet.journal.full = True
    ends_s = world.stage.clock.now_s + 120.0
    while state.ranks[0].status is not RankStatus.REMOVED:
        assert world.stage.clock.now_s < ends_s, state.ranks[0].drained_by
        go_on(world, 0.05)
    assert shard.alive
    world.fleet.journal.full = False
    while boss._durable.withheld:
        go_on(world, 0.05)
    assert shard.alive, "calls under the older table may be on their way"
    while shard.alive:
        assert world.stage.clock.now_s < ends_s
        go_on(world, 0.1)
    assert boss.alive
    world.heal()
    settle(world, 60.0)
    world.stop_traffic()
    go_on(world, REST_S)
    world.note_holdings()
    check(world)
