"""Parts of a simulated world at moments that its seeds reach seldom."""

import numpy as np

from placement.messages import events as ev
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    CopySource,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
)
from placement.roles.shard import ShardSlots
from placement.sim.clock import VirtualClock
from placement.sim.log import Freed, Published
from placement.sim.parts import Delays, SimRouter, SimShard
from placement.sim.runner import small_world
from tests.builders import make_layout, make_table

WHO = {"rank": 0, "incarnation": 1}


class Bench:
    """Two shards of three slots on one clock; what they send and log."""

    def __init__(self):
        self.clock = VirtualClock(np.random.default_rng(0))
        self.sent, self.log, self.shards = [], [], {}
        for rank in range(2):
            slots = ShardSlots(
                rank=rank, incarnation=1, num_slots=3, slot_bytes=10, weights_version="v1"
            )
            self.shards[rank] = SimShard(
                slots,
                self.clock,
                np.random.default_rng(rank),
                Delays(),
                self.sent.append,
                self.log.append,
                self.shards,
                expert_bytes=10,
            )

    def order(self, *commands, term=1):
        for command in commands:
            self.shards[0].take(term, command)

    def run(self, seconds=5.0):
        self.clock.run_until(self.clock.now_s + seconds)
        return [type(event).__name__ for event in self.sent]


def reserve(step_id=1, slot=0):
    return ReserveSlot(step_id=step_id, slot=slot, layer=0, expert=0, weights_version="v1", **WHO)


def copy(source, slot_tag, step_id=1):
    return CopyExpert(
        step_id=step_id,
        slot=0,
        slot_tag=slot_tag,
        layer=0,
        expert=0,
        source=CopySource(rank=source, slot=0, slot_tag=1),
        timeout_s=1.0,
        **WHO,
    )


def test_an_older_controller_is_not_heard_and_not_answered():
    bench = Bench()
    bench.order(reserve(), term=2)
    assert bench.run() == ["SlotReserved"]
    bench.order(reserve(step_id=2, slot=1), term=1)
    assert bench.run() == ["SlotReserved"]
    table = make_table(make_layout([[0, 1, 2], [3]]), term=1)
    bench.shards[0].install(table)
    assert bench.shards[0].slots.highest_epoch == -1
    bench.shards[0].install(make_table(make_layout([[0, 1, 2], [3]]), term=2, epoch=7))
    assert bench.shards[0].slots.highest_epoch == 7


def test_a_copy_from_a_source_that_is_gone_fails():
    for why in ("dead", "other fill", "unknown"):
        bench = Bench()
        bench.shards[1].alive = why != "dead"
        if why == "unknown":
            del bench.shards[1]
        bench.order(reserve())
        bench.run()
        bench.order(copy(source=1, slot_tag=bench.sent[0].slot_tag))
        assert bench.run() == ["SlotReserved", "StepFailed"]
        assert bench.sent[-1].code == "source_lost"


def test_a_shard_that_dies_while_it_works_says_nothing_more():
    bench = Bench()
    bench.order(reserve())
    bench.run()
    copying = copy(source=-1, slot_tag=bench.sent[0].slot_tag)
    bench.order(copying)
    bench.run(0.01)
    assert bench.shards[0].slots.ledger.slots[0].copying
    bench.order(copying)
    bench.shards[0].alive = False
    assert bench.run() == ["SlotReserved"]


def test_an_abort_of_a_running_copy_is_answered_when_the_copy_has_stopped():
    bench = Bench()
    bench.order(reserve())
    bench.run()
    tag = bench.sent[0].slot_tag
    bench.order(copy(source=-1, slot_tag=tag))
    bench.run(0.005)
    assert bench.shards[0].slots.ledger.slots[0].copying
    bench.order(AbortAdd(step_id=1, slot=0, slot_tag=tag, **WHO))
    assert bench.run(0.005) == ["SlotReserved"]
    assert bench.run() == ["SlotReserved", "AddAborted"]
    assert bench.shards[0].slots.ledger.resident_bytes == 0


def test_a_release_of_a_slot_that_is_not_there_fails_and_frees_nothing():
    bench = Bench()
    bench.order(ReleaseSlot(step_id=1, slot=9, slot_tag=1, layer=0, expert=0, **WHO))
    assert bench.run() == ["StepFailed"]
    assert not [entry for entry in bench.log if isinstance(entry, Freed)]


def test_a_budget_is_taken_and_answered():
    bench = Bench()
    bench.order(SetRankSlots(num_slots=2, budget_bytes=20, **WHO))
    assert bench.run() == ["BudgetApplied"]
    assert bench.shards[0].slots.ledger.num_slots == 2


def test_a_router_keeps_the_newer_of_two_tables():
    router = SimRouter("r")
    newer, older = (make_table(make_layout([[0, 1], [2, 3]]), epoch=e) for e in (2, 1))
    router.install(newer)
    router.install(older)
    assert router.table is newer


def test_a_router_that_registers_late_fetches_the_table_and_idle_layers_are_not_called():
    world = small_world(1, windows=2)
    world.clock.run_until(3.0)
    assert any(isinstance(entry, Published) for entry in world.log)
    router = world.routers[0]
    router.table = None
    world._router_joins(router)
    assert router.table is world.table
    joined = [e for e in world.log if isinstance(getattr(e, "event", None), ev.RouterJoined)]
    assert len(joined) == len(world.routers) + 1
    counts = np.zeros((world.spec.num_layers, world.spec.num_experts), dtype=np.int64)
    before = sum(router.in_flight.values())
    world._dispatch(router, counts)
    assert sum(router.in_flight.values()) == before
