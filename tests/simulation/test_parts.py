"""Parts of a simulated service at moments that seeds reach seldom."""

from collections import Counter

import numpy as np
import pytest

from placement.messages import events as ev
from placement.messages.effects import CopyExpert, CopySource, ReserveSlot, VerifyExpert
from placement.roles.shard import ShardSlots
from placement.roles.shard import TermRefused as OldTerm
from placement.sim.clock import VirtualClock
from placement.sim.controller import DiesAt
from placement.sim.dice import Dice
from placement.sim.faults import FaultKind
from placement.sim.journal import JournalDamaged, JournalFull, JournalOwned, Record, SimJournal
from placement.sim.network import Network, Part
from placement.sim.world import World


def quiet(seed=1, until_s=2.5):
    """A service in which nothing has gone wrong yet."""
    world = World(seed, faults=0)
    world.stage.clock.run_until(until_s)
    return world


# -- time and messages ---------------------------------------------------------------------------


def test_time_runs_in_order_and_cancelled_things_do_not_happen():
    clock, done = VirtualClock(Dice(1)), []
    clock.after(2.0, lambda: done.append("b"))
    clock.after(1.0, lambda: done.append("a"))
    clock.after(1.5, lambda: done.append("never")).cancel()
    clock.at(-5.0, lambda: done.append("now"))
    clock.run_until(3.0)
    assert (done, clock.now_s, clock.actions_run) == (["now", "a", "b"], 3.0, 3)


def test_dice_draw_the_same_for_a_seed_and_another_for_another_stream():
    first, second, other = Dice(5), Dice(5), Dice(5, 1)
    drawn = [first.unit() for _ in range(3000)]
    assert drawn == [second.unit() for _ in range(3000)]
    assert drawn[0] != other.unit()
    assert {first.pick("ab") for _ in range(50)} == {"a", "b"}
    assert all(0.5 <= first.around(1.0) <= 1.5 for _ in range(50))


def two_parts():
    clock = VirtualClock(Dice(1))
    network = Network(clock, Dice(2), 0.01)
    return clock, network, Part("a", 1, clock), Part("b", 1, clock)


def send(network, a, b, count=20):
    came = []
    for number in range(count):
        network.send(a, b, lambda number=number: came.append(number))
    return came


def test_a_link_keeps_order():
    clock, network, a, b = two_parts()
    came = send(network, a, b)
    clock.run_until(1.0)
    assert came == list(range(20))


def test_weather_loses_doubles_shuffles_delays_and_cuts_in_one_direction():
    clock, network, a, b = two_parts()
    weather = network.weather
    weather.cut.add(("a", "b"))
    assert not network.reaches(a, b)
    assert network.reaches(b, a)
    lost, back = send(network, a, b), send(network, b, a)
    clock.run_until(1.0)
    assert (len(lost), len(back)) == (0, 20)
    weather.cut.clear()
    weather.twice["b"] = 1.0
    twice = send(network, a, b)
    clock.run_until(2.0)
    assert Counter(twice) == dict.fromkeys(range(20), 2)
    weather.twice.clear()
    weather.shuffled.add("a")
    shuffled = send(network, a, b)
    clock.run_until(3.0)
    assert sorted(shuffled) == list(range(20)) != shuffled
    weather.shuffled.clear()
    weather.late["a", "b"] = 1.0
    late = send(network, a, b, 1)
    weather.late.clear()
    later = send(network, a, b, 1)
    clock.run_until(3.5)
    assert (late, later) == ([], [0])
    weather.slow["a"] = 100
    slow = send(network, a, b, 1)
    clock.run_until(3.9)
    assert slow == []
    del weather.slow["a"]
    weather.dark.add("b")
    assert send(network, a, b, 1) == []
    clock.run_until(9.0)
    assert (len(late), len(slow)) == (1, 1)
    weather.dark.clear()
    assert weather.fair


def test_a_paused_part_goes_on_later_a_deaf_one_and_a_dead_one_never():
    clock, network, a, b = two_parts()
    b.pause()
    came = send(network, a, b, 2)
    b.after(0.1, lambda: came.append("timer"))
    clock.run_until(1.0)
    assert came == []
    b.resume()
    assert came == [0, 1, "timer"]
    b.deaf = True
    assert send(network, a, b, 1) == []
    clock.run_until(2.0)
    b.deaf = False
    heard = send(network, a, b, 1)
    b.die()
    clock.run_until(3.0)
    assert heard == []


# -- the journal ---------------------------------------------------------------------------------


def test_a_torn_tail_is_dropped_and_other_damage_refused():
    journal = SimJournal()
    journal.open(1)
    for epoch in (1, 2):
        journal.write(1, Record(), epoch)
    journal.write(1, Record(), 3, torn=True)
    image = journal.read()
    assert (image.torn, image.epoch, image.term) == (True, 2, 1)
    assert not journal.read().torn
    journal.records[0].whole = False
    with pytest.raises(JournalDamaged, match="restore the journal"):
        journal.read()


def test_a_journal_has_one_writer_and_an_end():
    journal = SimJournal()
    journal.open(2)
    with pytest.raises(JournalOwned):
        journal.write(1, Record(), 1)
    journal.full = True
    with pytest.raises(JournalFull):
        journal.write(2, Record(), 1)
    with pytest.raises(AssertionError, match="terms only grow"):
        journal.open(2)


# -- shards --------------------------------------------------------------------------------------


def test_what_an_older_controller_has_on_its_way_cannot_change_an_inventory():
    slots = ShardSlots(rank=0, incarnation=1, num_slots=2, slot_bytes=1, weights_version="v1")
    slots.accept_term(1)
    assert slots.inventory(2) == ()
    with pytest.raises(OldTerm):
        slots.accept_term(1)
    with pytest.raises(OldTerm):
        slots.inventory(1)


def test_memory_remembers_what_was_really_written_to_it():
    world = quiet()
    shard = world.stage.shards[0]
    spec = world.stage.spec
    for slot, cell in shard.cells.items():
        layer, expert, tag = shard.slots.ledger.holder(slot)
        assert (cell.key, cell.tag, cell.intact) == (spec.key(layer, expert), tag, True)


def command(kind, shard, **fields):
    given = {"step_id": 1 << 40, "rank": shard.rank, "incarnation": shard.life}
    return kind(**(given | fields))


def test_a_damaged_copy_is_never_proved():
    world = quiet()
    shard, stage = world.stage.shards[0], world.stage
    free = next(i for i, s in enumerate(shard.slots.ledger.slots) if s.tag < 0)
    answers = []

    def order(kind, **fields):
        shard.execute(1, command(kind, shard, slot=free, **fields), answers.append)
        stage.clock.run_until(stage.clock.now_s + 1.0)
        return answers[-1]

    order(ReserveSlot, layer=0, expert=0, weights_version="v1")
    tag = answers[-1].slot_tag
    shard.trouble.copies_corrupt = True
    source = CopySource(rank=-1)
    order(CopyExpert, slot_tag=tag, layer=0, expert=0, source=source, timeout_s=2.0)
    failed = order(VerifyExpert, slot_tag=tag)
    assert (type(failed), failed.code) == (ev.StepFailed, "digest")


# -- the controller ------------------------------------------------------------------------------


@pytest.mark.parametrize("point", [p for p in DiesAt if p])
def test_a_controller_dies_where_it_is_told_to_and_another_goes_on(point):
    world = quiet(until_s=0.0)
    (boss,) = world.fleet.controllers
    boss.dies_at = point
    world.stage.clock.run_until(8.0)
    assert not boss.alive
    assert world.fleet.controller is world.fleet.controllers[-1] is not boss
    assert world.why_not_settled() == ""
    assert world.stage.coverage.refusals["journal.torn"] == (point is DiesAt.IN_WRITE)


def test_a_full_disk_holds_moves_back_and_nothing_is_lost_by_it():
    world = quiet(until_s=0.5)
    world.fleet.journal.full = True
    world.stage.clock.run_until(6.0)
    (boss,) = world.fleet.controllers
    assert boss.engine.state.paused
    world.fleet.journal.full = False
    world.stage.clock.run_until(14.0)
    assert world.why_not_settled() == ""
    assert not boss.engine.state.paused


def test_nobody_is_harmed_where_nobody_is():
    world = quiet()
    harm = world.harm
    world.fleet.controllers[0].end("fault")
    for shard in world.stage.shards.values():
        world.fleet.kill(shard, "fault")
    for router in world.stage.routers.values():
        world.fleet.kill(router, "fault")
    nobody = {
        FaultKind.SHARD_CRASH,
        FaultKind.SHARD_PAUSE,
        FaultKind.SHARD_SLOW,
        FaultKind.OUT_OF_MEMORY,
        FaultKind.ROUTER_CRASH,
        FaultKind.ROUTER_PAUSE,
        FaultKind.ROUTER_LEAVES,
        FaultKind.CONTROLLER_CRASH,
        FaultKind.CONTROLLER_TORN,
        FaultKind.CONTROLLER_PAUSE,
        FaultKind.CONTROLLER_RIVAL,
        FaultKind.BUDGET,
        FaultKind.RANK_LEAVES,
        FaultKind.RANK_JOINS,
    }
    for kind in FaultKind:
        target, mend = harm.do(kind, -1)
        assert (target == "nobody") == (kind in nobody) or kind is FaultKind.CLOCK_JUMP, kind
        if mend is not None:
            mend()
    assert world.why_not_settled() == "no controller"
    world.operators.ask_something()
    harm.heal()
    world.stage.clock.run_until(12.0)
    assert world.why_not_settled() == ""


# -- traffic -------------------------------------------------------------------------------------


def test_popularity_is_what_is_really_drawn():
    world = World(2, faults=0)
    share = world.traffic.popularity()
    assert share.sum(axis=1) == pytest.approx(1.0)
    counts = np.zeros_like(share)
    for _ in range(3000):
        request = world.traffic.draw()
        if request.sound:
            np.add.at(counts[request.layer], request.ids.reshape(-1), 1)
    assert np.abs(counts / counts.sum(axis=1, keepdims=True) - share).max() < 0.02
    before = share.copy()
    world.traffic.shift()
    assert np.abs(world.traffic.popularity() - before).max() > 0.05


def test_the_oracle_sees_a_lost_a_doubled_and_a_swapped_pair():
    world = World(2, faults=0)
    request = world.traffic.draw()
    while not request.sound or not request.valid.all():
        request = world.traffic.draw()
    experts = world.stage.spec.num_experts
    right = request.wanted(world.stage.marks, experts)
    request.valid[0, 0] = 0
    assert request.wanted(world.stage.marks, experts)[0] != right[0]
    request.valid[0, 0] = 1
    request.ids[0, 0] = (request.ids[0, 0] + 1) % experts
    assert request.wanted(world.stage.marks, experts)[0] != right[0]
