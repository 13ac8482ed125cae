"""Moments of a simulated service that seeds reach seldom or never: a part that comes late, an order
that comes twice, an answer that nobody waits for any more."""

import numpy as np

from placement.messages import events as ev
from placement.messages.effects import CopyExpert, CopySource, ReleaseSlot, ReplaceRank, ReserveSlot
from placement.messages.history import Died, FaultBegan, FaultEnded, RouterHeard, RouterHolds
from placement.routing import RankAddress
from placement.sim.flight import Limits
from placement.sim.world import World
from tests.simulation.test_parts import command, quiet

STEP_S = 0.0005
"""Shorter than any message takes."""


def go_on(world, seconds):
    clock = world.stage.clock
    clock.run_until(clock.now_s + seconds)


def settle(world, limit_s=20.0):
    """Until all is well; a service that does not get there is a failure."""
    end_s = world.stage.clock.now_s + limit_s
    while world.why_not_settled() and world.stage.clock.now_s < end_s:
        go_on(world, 0.1)
    assert world.why_not_settled() == ""


def facts(world, kind, who=None):
    return [f for f in world.stage.recorder.facts if isinstance(f, kind) and who in (None, f.who)]


def ends(world, part):
    return [f.cause for f in facts(world, Died, part.who)]


def settled_quiet(seed=1):
    world = quiet(seed)
    settle(world)
    return world


# -- controllers ---------------------------------------------------------------------------------


def test_a_service_that_was_paused_before_its_disk_was_full_stays_paused():
    world = quiet(until_s=0.5)
    world.harm.ask(lambda n: ev.PauseAsked(at_s=0.0, request_id=n, reason="an operator"))
    go_on(world, 0.1)
    (boss,) = world.fleet.controllers
    assert boss.engine.state.paused
    world.fleet.journal.full = True
    go_on(world, 3.0)
    assert world.stage.coverage.refusals["journal.full"] > 0
    world.fleet.journal.full = False
    go_on(world, 3.0)
    assert boss.engine.state.paused, "what a person stopped starts only at a person's word"
    assert not boss._durable.withheld
    world.heal()
    go_on(world, 0.5)
    settle(world)
    assert not boss.engine.state.paused


def test_a_controller_that_begins_on_a_full_disk_refuses_and_begins_once_there_is_room():
    world = settled_quiet()
    (first,) = world.fleet.controllers
    world.fleet.journal.full = True
    first.end("fault")
    go_on(world, 5.0)
    tried = world.fleet.controllers[1:]
    assert tried
    assert world.fleet.controller is None
    assert all(ends(world, one) == ["fault"] for one in tried)
    assert world.stage.coverage.refusals["journal.full"] == len(tried)
    world.fleet.journal.full = False
    go_on(world, 5.0)
    settle(world)
    assert world.fleet.controller.term > tried[-1].term


def test_what_waited_for_room_is_not_written_once_the_journal_is_anothers():
    world = settled_quiet()
    (old,) = world.fleet.controllers
    world.fleet.journal.full = True
    world.harm.ask(lambda n: ev.DrainAsked(at_s=0.0, request_id=n, rank=0))
    go_on(world, 0.3)
    assert world.stage.coverage.refusals["journal.full"] > 0
    old.deaf = True  # no part tells it that there is another controller
    world.fleet.journal.full = False
    world.fleet.begin_controller(journal=True)
    records = len(world.fleet.journal.records)
    assert old.alive
    go_on(world, 0.6)
    assert ends(world, old) == ["fenced"]
    assert world.stage.coverage.refusals["journal.owner"] == 1
    assert world.fleet.journal.owner == world.fleet.controller.term
    assert len(world.fleet.journal.records) >= records
    world.heal()
    settle(world)


def test_a_controller_waits_for_a_shard_that_stands_still_as_it_begins():
    world = settled_quiet()
    shard = world.stage.shards[0]
    shard.pause()
    world.fleet.controller.end("fault")
    while world.fleet.controller is None:
        go_on(world, STEP_S)
    boss = world.fleet.controller
    go_on(world, 0.3)
    assert 0 not in boss.liaison.shards
    shard.resume()
    settle(world)
    assert world.stage.shards[0] is shard
    assert shard.slots.highest_term == boss.term


def test_a_controller_ends_when_a_shard_it_waited_for_obeys_another():
    world = settled_quiet()
    shard = world.stage.shards[0]
    shard.pause()
    world.fleet.controller.end("fault")
    while world.fleet.controller is None:
        go_on(world, STEP_S)
    old = world.fleet.controller
    shard.slots.accept_term(old.term + 1)
    shard.resume()
    go_on(world, 0.2)
    assert ends(world, old) == ["fenced"]
    settle(world)
    assert world.fleet.controller.term > old.term + 1
    assert world.stage.shards[0] is shard


def test_a_restart_is_called_off_where_another_controller_has_begun():
    world = settled_quiet()
    world.fleet.controller.end("fault")
    world.fleet.begin_controller(journal=True)
    settle(world)
    go_on(world, 2.0)
    assert len(world.fleet.controllers) == 2
    assert world.fleet.controllers[-1].alive


# -- lives ---------------------------------------------------------------------------------------


def test_an_order_to_replace_a_life_that_was_replaced_already_ends_nobody():
    world = settled_quiet()
    boss, first = world.fleet.controller, world.stage.shards[0]
    world.fleet.kill(first, "fault")
    go_on(world, 3.0)
    settle(world)
    second = world.stage.shards[0]
    assert second.life > first.life
    world.fleet.replace_rank(boss, ReplaceRank(rank=0, lost_incarnation=first.life))
    go_on(world, 3.0)
    assert world.stage.shards[0] is second
    assert second.alive
    assert world.why_not_settled() == ""


def test_a_rank_that_is_to_be_replaced_twice_is_replaced_once():
    world = settled_quiet()
    boss, first, lives = world.fleet.controller, world.stage.shards[0], world.fleet._lives
    for _ in range(2):
        world.fleet.replace_rank(boss, ReplaceRank(rank=0, lost_incarnation=first.life))
    go_on(world, 3.0)
    assert world.fleet._lives == lives + 1
    assert ends(world, first) == ["replaced"]
    settle(world)


def test_a_rank_that_is_wanted_again_before_its_end_came_is_not_ended():
    world = settled_quiet()
    boss, shard = world.fleet.controller, world.stage.shards[0]
    world.fleet.end_rank(boss, 0)
    boss.liaison.welcome_shard(shard)
    go_on(world, 1.0)
    assert shard.alive
    settle(world)


def test_a_router_that_is_to_be_replaced_twice_is_replaced_once():
    world = settled_quiet()
    boss, (name, *_) = world.fleet.controller, world.fleet.router_names
    first, lives = world.stage.routers[name], world.fleet._lives
    world.fleet.replace_router(boss, name)
    world.fleet.replace_router(boss, name)
    go_on(world, 3.0)
    assert world.fleet._lives == lives + 1
    assert ends(world, first) == ["replaced"]
    assert world.stage.routers[name].alive
    settle(world)


def test_a_router_that_stands_still_for_too_long_is_replaced_and_ended():
    world = settled_quiet()
    name = world.fleet.router_names[0]
    hung = world.stage.routers[name]
    hung.pause()
    go_on(world, 10.0)
    assert ends(world, hung) == ["replaced"]
    assert world.stage.routers[name] is not hung
    settle(world)


def test_what_a_router_reported_before_it_was_replaced_counts_for_nothing():
    world = settled_quiet()
    boss, name = world.fleet.controller, world.fleet.router_names[0]
    old = world.stage.routers[name]
    world.stage.network.weather.late[name, "controller"] = 0.4
    go_on(world, 1.0)

    def heard():
        counted = boss.folder.acked_seq(name, old.life)
        return counted, [f for f in facts(world, RouterHeard) if f.life == old.who]

    before = heard()
    assert before[1]
    world.fleet.replace_router(boss, name)
    go_on(world, 2.0)
    assert heard() == before
    assert world.stage.routers[name] is not old
    world.stage.network.weather.late.clear()
    settle(world)


def test_a_shards_first_report_that_another_overtook_is_not_counted_and_suspects_nobody():
    world = settled_quiet()
    shard, weather = world.stage.shards[0], world.stage.network.weather
    world.fleet.controller.end("fault")
    world.fleet.begin_controller(journal=True)
    boss = world.fleet.controller
    known, counts, came = boss.liaison.shards[0], boss.folder.add_hotness, []

    def add(report, at_s):
        counted = counts(report, at_s)
        if report.rank == 0:
            came.append((report.seq, counted))
        return counted

    boss.folder.add_hotness = add
    first = shard.compute._report_seq + 1
    weather.late["rank0", "controller"] = 0.45
    while shard.compute._report_seq < first:
        go_on(world, STEP_S)
    weather.late.clear()
    go_on(world, 0.6)
    assert came[0] == (first + 1, True)
    assert (first, False) in came
    assert sum(counted for _, counted in came) == len(came) - 1
    assert not known.suspected
    assert boss.liaison.shards[0] is known
    settle(world)


# -- shards --------------------------------------------------------------------------------------


def copy_into(world, shard, answers, source):
    """Have the shard reserve a free slot and begin a copy into it."""
    free = next(i for i, s in enumerate(shard.slots.ledger.slots) if s.tag < 0)
    into = {"slot": free, "layer": 0, "expert": 0}
    term = world.fleet.controller.term
    shard.execute(term, command(ReserveSlot, shard, **into, weights_version="v1"), answers.append)
    into["slot_tag"] = answers.pop().slot_tag
    order = command(CopyExpert, shard, **into, source=source, timeout_s=0.2)
    shard.execute(term, order, answers.append)


def test_an_answer_that_came_while_a_shard_stood_still_is_given_once():
    world, answers = quiet(), []
    shard = world.stage.shards[0]
    copy_into(world, shard, answers, CopySource(rank=-1))
    shard.pause()
    go_on(world, 1.0)  # the copy comes, and then the end of its time
    assert answers == []
    shard.resume()
    assert [type(answer) for answer in answers] == [ev.ExpertCopied]


def test_a_copy_from_a_slot_that_was_filled_anew_fails_and_says_so():
    world, answers = quiet(), []
    shard, peer = world.stage.shards[0], world.stage.shards[1]
    slot, cell = next(iter(peer.cells.items()))
    address = RankAddress(rank=1, node=peer.node, address="sim://", incarnation=peer.life)
    old = CopySource(rank=1, address=address, slot=slot, slot_tag=cell.tag - 1)
    copy_into(world, shard, answers, old)
    go_on(world, 0.2)
    (failed,) = answers
    assert (type(failed), failed.code) == (ev.StepFailed, "source_lost")
    assert peer.readers[slot] == 0, "nothing of the new fill is read"


# -- routers -------------------------------------------------------------------------------------


def test_a_request_that_waited_past_its_deadline_ends_once_when_its_router_goes_on():
    world = settled_quiet()
    world.stop_traffic()
    go_on(world, 2.0)
    router = next(iter(world.stage.routers.values()))
    told = []

    def ask(timeout_s):
        request = world.traffic.draw()
        while not request.sound or not request.valid.all():
            request = world.traffic.draw()
        request.timeout_s, request.patience_s = timeout_s, np.inf
        number = len(told)
        told.append([])
        router.forward(request, told[number].append)

    limits = Limits()
    for _ in range(limits.permits_max):
        ask(5.0)
    while router.admission.waiting == 0:
        ask(0.3)
    waits = len(told) - 1
    assert told[waits] == []
    router.pause()
    go_on(world, 0.5)
    assert told[waits] == []
    router.resume()
    assert told[waits] == ["deadline_exceeded"]
    go_on(world, 5.0)
    assert [len(t) for t in told] == [1] * len(told)
    assert router.admission.at_work == router.admission.waiting == len(router.flights) == 0


# -- faults and people ---------------------------------------------------------------------------


def test_faults_that_still_last_are_mended_once_when_all_is_healed():
    world = World(3)
    while not world.nemesis.active:
        go_on(world, 0.05)
    lasting = [(a.kind.value, a.target) for a in world.nemesis.active]
    world.heal()
    assert world.nemesis.active == []
    assert world.stage.network.weather.fair
    settle(world, 60.0)
    go_on(world, 5.0)
    began = sorted((f.kind, f.target) for f in facts(world, FaultBegan))
    assert sorted((f.kind, f.target) for f in facts(world, FaultEnded)) == began
    assert set(lasting) <= set(began)


def test_a_pause_that_people_asked_for_is_taken_back_at_the_end():
    world = settled_quiet()
    world.harm.ask(lambda n: ev.PauseAsked(at_s=0.0, request_id=n, reason="an operator"))
    go_on(world, 0.1)
    boss = world.fleet.controller
    assert boss.engine.state.paused
    assert not world.operators.content(boss)
    world.heal()
    go_on(world, 0.1)
    assert not boss.engine.state.paused
    assert world.operators.content(boss)


# -- is all well? --------------------------------------------------------------------------------


def test_a_slot_that_was_emptied_behind_the_controllers_back_is_a_difference():
    world = settled_quiet()
    shard = world.stage.shards[0]
    slot, cell = next(iter(shard.cells.items()))
    layer, expert, _ = shard.slots.ledger.holder(slot)
    answers = []
    shard.execute(
        world.fleet.controller.term,
        command(ReleaseSlot, shard, slot=slot, slot_tag=cell.tag, layer=layer, expert=expert),
        answers.append,
    )
    go_on(world, 1e-6)
    assert world.why_not_settled().startswith("rank 0 holds")


def test_a_service_is_at_rest_only_when_every_part_has_the_newest_table():
    world = World(1, faults=0)
    said = set()
    awaited = ("rank 0 keeps epoch", "router0 does not use the newest table")
    # The shards first, then the router: its link is slow.
    world.stage.network.weather.slow["router0"] = 20
    while not all(any(why.startswith(start) for why in said) for start in awaited):
        assert world.stage.clock.now_s < 20.0, sorted(said)
        go_on(world, STEP_S)
        said.add(world.why_not_settled())
    world.stage.network.weather.slow.clear()
    settle(world)


def test_only_routers_that_live_tell_what_they_hold():
    world = settled_quiet()
    gone, *left = world.stage.routers.values()
    world.fleet.kill(gone, "fault")
    world.note_holdings()
    assert {f.who for f in facts(world, RouterHolds)} == {router.who for router in left}
