"""Seeded worlds: the production engine and roles on a virtual clock, every invariant checked over
the log.

A failure prints its seed and the command that replays it.
"""

from functools import partial

import msgspec
import numpy as np
import pytest

from placement.messages import events as ev
from placement.messages.codec import encode
from placement.sim.checkers import (
    Coverage,
    InvariantBroken,
    Memory,
    ReleaseLast,
    TableOrder,
    check_replay,
)
from placement.sim.log import Freed, MemoryUsed, Published, RouterTold, Stepped
from placement.sim.restart import restart_controller
from placement.sim.runner import check, outcome_of, run, small_world

# Of each kind of world, the share of `--seeds` that lives through it.
SHARE = {
    "test_a_world_without_faults": 1.0,
    "test_a_world_that_is_disturbed_without_a_loss_serves_everything": 0.3,
    "test_a_world_that_loses_ranks_repairs_itself": 0.3,
    "test_a_world_in_which_everything_happens": 0.5,
}


def pytest_generate_tests(metafunc):
    share = SHARE.get(metafunc.function.__name__)
    if share is not None:
        seeds = metafunc.config.getoption("--seeds")
        metafunc.parametrize("offset", range(max(1, round(share * seeds))))


def test_a_world_without_faults(offset, first_seed):
    outcome = run(first_seed + offset)
    assert outcome.pairs_served == outcome.pairs_wanted > 0
    assert outcome.moves_aborted == 0
    assert outcome.balancedness >= outcome.balancedness_static - 0.05


def test_traffic_that_stays_ends_in_balance_where_memory_allows(first_seed):
    outcomes = [run(first_seed + offset) for offset in range(20)]
    assert np.mean([o.balancedness for o in outcomes]) >= 0.95
    moved = [sum(o.moves.values()) > 0 for o in outcomes]
    assert np.mean(moved) >= 0.8  # where traffic is nearly even nothing needs to move


def live(seed, act, *, times=4):
    """A world in which `act(world, rng, number)` happens a few times; it is then left alone to
    settle."""
    world = small_world(seed)
    rng = np.random.default_rng(seed + 1000)
    for number in range(times):
        world.clock.at(float(rng.uniform(1.0, 25.0)), partial(act, world, rng, number))
    world.clock.run_until(50.0)
    return world


def settled(world):
    state = world.engine.state
    assert state.run is None
    assert state.outstanding is None
    assert world.engine.layout().missing() == ()
    for rank, shard in world.shards.items():
        mine = {i: s.key for i, s in enumerate(state.ranks[rank].slots) if s.key >= 0}
        real = {
            r.slot: r.layer * world.spec.num_experts + r.expert
            for r in shard.slots.ledger.resident()
        }
        assert mine == real


def lose(world, rng, number):
    rank = int(rng.integers(world.topology.num_ranks))
    if world.shards[rank].alive:
        world.lose_rank(rank)


def change_budget(world, rng, number):
    rank = int(rng.integers(world.topology.num_ranks))
    slots = max(0, world.shards[rank].slots.ledger.num_slots + int(rng.integers(-3, 3)))
    world.feed(
        ev.BudgetAsked(
            at_s=0.0,
            request_id=number,
            rank=rank,
            budget_bytes=slots * world.spec.slot_bytes,
        )
    )


def drain(world, rng, number):
    rank = int(rng.integers(world.topology.num_ranks))
    world.feed(ev.DrainAsked(at_s=0.0, request_id=number, rank=rank))
    back = ev.UndrainAsked(at_s=0.0, request_id=100 + number, rank=rank)
    world.clock.after(3.0, partial(world.feed, back))


def restart(world, rng, number):
    restart_controller(world)


ACTS = {"lose": lose, "budget": change_budget, "drain": drain, "restart": restart}


@pytest.mark.parametrize("name", ["budget", "drain", "restart"])
def test_a_world_that_is_disturbed_without_a_loss_serves_everything(name, offset, first_seed):
    world = live(first_seed + offset, ACTS[name])
    check(world)
    settled(world)
    outcome = outcome_of(world, first_seed + offset)
    assert outcome.pairs_served == outcome.pairs_wanted > 0


def test_a_world_that_loses_ranks_repairs_itself(offset, first_seed):
    world = live(first_seed + offset, lose)
    check(world, losses_allowed=True)
    settled(world)


def test_a_world_in_which_everything_happens(offset, first_seed):
    def act(world, rng, number):
        ACTS[sorted(ACTS)[int(rng.integers(len(ACTS)))]](world, rng, number)

    world = live(first_seed + offset, act, times=6)
    check(world, losses_allowed=True)
    settled(world)


def test_the_same_seed_gives_the_same_world(first_seed):
    logs = []
    for _ in range(2):
        world = small_world(first_seed)
        world.clock.run_until(10.0)
        logs.append(encode([(e.event, e.effects) for e in world.log if isinstance(e, Stepped)]))
    assert logs[0] == logs[1]


# -- the checkers can fail -----------------------------------------------------------------------


def table(epoch, listed, *, term=1, verified=None, at_s=0.0, num_keys=2):
    listed = frozenset(listed)
    return Published(
        at_s=at_s,
        term=term,
        epoch=epoch,
        num_keys=num_keys,
        listed=listed,
        verified=listed if verified is None else frozenset(verified),
    )


def told(router="r", applied=1, quiesced=1, installs=1, at_s=0.0):
    return RouterTold(
        at_s=at_s, router=router, applied=applied, quiesced=quiesced, installs=installs
    )


FULL = [(0, 0, 0, 1), (1, 1, 0, 1)]


@pytest.mark.parametrize(
    ("checker", "entries", "broken"),
    [
        (TableOrder(), [table(2, FULL), table(2, FULL)], "I1"),
        (TableOrder(), [table(2, FULL, term=2), table(3, FULL)], "I1"),
        (TableOrder(), [told(installs=3), told(installs=2)], "I1.*went back"),
        (Coverage(), [table(1, FULL, verified=FULL[:1])], "I2.*not resident"),
        (Coverage(), [table(1, FULL[:1])], "I2.*covers 1 of 2"),
        (Coverage(), [table(1, FULL), table(2, FULL[:1])], "I2.*loses"),
        (Coverage(), [table(1, [*FULL, (0, 0, 1, 2)])], "I2.*twice"),
        (
            Memory(),
            [MemoryUsed(at_s=0.0, rank=0, resident_bytes=9, reserved_bytes=2, budget_bytes=10)],
            "I6",
        ),
        (
            ReleaseLast(wait_s=1.0),
            [table(1, FULL), Freed(at_s=0.0, rank=0, slot=0, tag=1, pins=0)],
            "I7.*listed",
        ),
        (
            ReleaseLast(wait_s=1.0),
            [table(1, FULL), Freed(at_s=0.0, rank=0, slot=5, tag=9, pins=1)],
            "I7.*pins",
        ),
        (
            ReleaseLast(wait_s=1.0),
            [
                told(),
                table(1, FULL),
                table(2, FULL[1:]),
                told(applied=2, quiesced=1, installs=2),
                Freed(at_s=0.9, rank=0, slot=0, tag=1, pins=0),
            ],
            "I7.*may use it",
        ),
    ],
)
def test_checkers_see_what_they_are_there_for(checker, entries, broken):
    for entry in entries[:-1]:
        checker.take(entry)
    with pytest.raises(InvariantBroken, match=broken):
        checker.take(entries[-1])


def test_the_replay_checker_sees_another_effect(first_seed):
    world = small_world(first_seed, windows=2)
    world.clock.run_until(6.0)
    snapshot = world.segments[0][0]
    check_replay(snapshot, world.log)
    steps = [e for e in world.log if isinstance(e, Stepped)]
    other = msgspec.structs.replace(
        steps[0], effects=msgspec.structs.replace(steps[0].effects, records=())
    )
    with pytest.raises(InvariantBroken, match="I8: event 0"):
        check_replay(snapshot, [other, *steps[1:]])


def test_a_failure_names_its_seed_and_how_to_replay_it(first_seed, monkeypatch):
    monkeypatch.setattr(Memory, "take", _broken)
    with pytest.raises(InvariantBroken, match=f"SEED={first_seed}"):
        run(first_seed, windows=1, quiet_s=1.0)


def _broken(self, entry):
    raise InvariantBroken("I6: on purpose")
