"""Who ends, and who is believed, once a controller with a higher term has been heard of."""

import pytest

from placement.messages import events as ev
from placement.messages import history as h
from placement.messages.effects import ReplaceRank
from placement.roles.shard import TermRefused
from placement.sim.checks import InvariantBroken, check_facts
from tests.simulation.test_checkers import FULL, release_last, story
from tests.simulation.test_rare_moments import STEP_S, ends, go_on, settle, settled_quiet

# -- controllers ---------------------------------------------------------------------------------


def test_a_report_of_a_higher_term_ends_the_controller_that_polled():
    world = settled_quiet()
    old, shard = world.fleet.controller, world.stage.shards[0]
    shard.slots.accept_term(old.term + 1)
    go_on(world, 2.0)
    assert ends(world, old) == ["fenced"]
    settle(world)
    assert world.fleet.controller.term > old.term + 1
    assert world.stage.shards[0] is shard, "a shard that obeys another is not replaced for it"


def test_a_command_that_is_refused_for_its_term_ends_the_controller_that_gave_it():
    world = settled_quiet()
    old, refused = world.fleet.controller, []

    def refuse(term, order, reply):
        # No report and no table tells of the higher term: this answer is all there is.
        refused.append(order)
        reply(TermRefused(term, term + 1))

    for shard in world.stage.shards.values():
        shard.execute = refuse
    world.harm.ask(lambda n: ev.DrainAsked(at_s=0.0, request_id=n, rank=1))
    end_s = world.stage.clock.now_s + 10.0
    while old.alive and world.stage.clock.now_s < end_s:
        go_on(world, STEP_S)
    assert refused
    assert ends(world, old) == ["fenced"]
    for shard in world.stage.shards.values():
        del shard.execute
    world.heal()
    settle(world)


def test_a_controller_waits_for_a_router_that_stands_still_as_it_begins():
    world = settled_quiet()
    name = world.fleet.router_names[0]
    router = world.stage.routers[name]
    router.pause()
    world.fleet.controller.end("fault")
    while world.fleet.controller is None:
        go_on(world, STEP_S)
    boss = world.fleet.controller
    go_on(world, 0.3)
    assert name not in boss.liaison.routers
    router.resume()
    go_on(world, 2.0)  # long enough for another life, had it been given up
    settle(world)
    assert world.stage.routers[name] is boss.liaison.routers[name].part is router
    assert router.role.table.order == (boss.term, boss.engine.state.epoch)


def test_a_controller_that_was_followed_makes_no_shard():
    """No part tells the old one of the new one: it learns it where it makes something."""
    world = settled_quiet()
    fleet, old = world.fleet, world.fleet.controller
    old.deaf = True
    fleet.begin_controller(journal=False)
    new = fleet.controller
    assert new.term > old.term
    shard = world.stage.shards[0]
    fleet.replace_rank(old, ReplaceRank(rank=0, lost_incarnation=shard.life))
    go_on(world, 2.0)
    assert ends(world, old) == ["fenced"]
    assert world.stage.shards[0] is shard
    assert shard.alive
    settle(world)
    assert fleet.controller is new


# -- the checker of I7 ---------------------------------------------------------------------------


def released_after_silence(*, heard_in_term):
    """Slot 0 of rank 0 leaves the table at 8 s and is asked back half a second later, though a
    router did not say that it knows. The newest controller, of term 1, has not heard of that router
    for eight seconds, unless the last word of it was said in this term."""
    tale = story().began().plan(wait_s=1.0).table(1).told(1, 1)
    tale.table(2, FULL[1:], at_s=8.0).written("planned", "unlisted", kind="remove", at_s=8.0)
    tale.tell(h.RouterHeard, "controller", 8.2, term=heard_in_term, life="router0/1")
    return tale.release(8.5).facts


def test_what_an_older_controller_heard_does_not_keep_a_router_waited_for():
    check_facts(released_after_silence(heard_in_term=0), [release_last(silence_s=5.0)])
    with pytest.raises(InvariantBroken, match=r"I7.*router0/1.*may use it"):
        check_facts(released_after_silence(heard_in_term=1), [release_last(silence_s=5.0)])
