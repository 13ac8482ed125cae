"""Seeded services whose ranks are also removed, added again and replaced, under every other fault.

Kept apart from the seeds of `test_seeds`, whose worlds stay what they were.
"""

import pytest

from placement.messages import events as ev
from placement.sim.runner import HEAL_S, LOOK_S, REST_S, SAFETY_MAX_S, check, run
from placement.sim.world import World

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
