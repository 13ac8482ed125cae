"""What people wished for is written down and goes on until it is met; what is lost comes first."""

import pytest

from placement.engine import Durability
from placement.messages import events as ev
from placement.messages.effects import ComputeTarget, ReleaseSlot, SetRankSlots
from placement.messages.events import DrainCause, ResidentSlot
from tests.builders import make_address
from tests.engine_driver import two_ranks

BYTES = 1000
"""Of a slot."""


def wish(driver, kind, **fields):
    return driver.feed(kind(at_s=0.0, request_id=len(driver.answers) + 100, **fields))


BUDGET = {"kind": ev.BudgetAsked, "rank": 0}
DRAIN = {"kind": ev.DrainAsked, "rank": 0, "cause": DrainCause.OPERATOR}
BY_NODE = {"kind": ev.DrainAsked, "rank": 0, "cause": DrainCause.NODE}
UNDRAIN = {"kind": ev.UndrainAsked, "rank": 0, "cause": DrainCause.OPERATOR}
PAUSE = {"kind": ev.PauseAsked, "reason": "look"}


@pytest.mark.parametrize(
    ("before", "last"),
    [
        ((), BUDGET | {"budget_bytes": 5 * BYTES}),
        ((), BUDGET | {"budget_bytes": 8 * BYTES}),
        ((BUDGET | {"budget_bytes": 5 * BYTES},), BUDGET | {"budget_bytes": 4 * BYTES}),
        ((BUDGET | {"budget_bytes": 5 * BYTES},), BUDGET | {"budget_bytes": 6 * BYTES}),
        ((), DRAIN),
        ((DRAIN,), BY_NODE),
        ((DRAIN,), UNDRAIN),
        ((DRAIN, BY_NODE), UNDRAIN),
        ((), PAUSE),
        ((PAUSE,), {"kind": ev.ResumeAsked}),
    ],
)
def test_every_wish_makes_a_snapshot_due_at_once(before, last):
    """No transition tells of it, so a controller that restarts would forget it."""
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold |= {SetRankSlots, ComputeTarget, ReleaseSlot}
    for one in before:
        wish(driver, **one)
    durable = Durability(driver.engine, snapshot_every=1000)
    assert not durable.take_snapshot(driver.engine)
    effects = wish(driver, **last)
    assert not effects.transitions
    assert driver.engine.state.run is None
    assert durable.take_snapshot(driver.engine)


@pytest.mark.parametrize(("first", "last"), [(8, 7), (7, 9), (5, 7), (8, 5)])
def test_the_last_budget_that_was_wished_for_is_the_one_that_comes(first, last):
    """The answer to an older wish is late, and the newer command was lost."""
    driver = two_ranks(slots=6, num_ranks=3)
    driver.hold.add(SetRankSlots)
    wish(driver, ev.BudgetAsked, rank=0, budget_bytes=first * BYTES)
    driver.wait(30.0)
    asked = next(c for c in driver.held if isinstance(c, SetRankSlots))
    wish(driver, ev.BudgetAsked, rank=0, budget_bytes=last * BYTES)
    (answer,) = driver.run_shard(asked)
    driver.held.clear()
    driver.hold.clear()
    driver.feed(answer)
    driver.wait(60.0)
    rank, ledger = driver.engine.state.ranks[0], driver.shards[0].ledger
    assert (rank.num_slots, rank.budget_bytes) == (last, last * BYTES)
    assert (ledger.num_slots, ledger.budget_bytes) == (last, last * BYTES)
    assert rank.wanted_slots == -1
    driver.check_agreement()


def test_what_is_lost_comes_before_what_is_to_be_tidied_up():
    """Cleaning a slot waits for routers; an expert below the floor waits for nothing."""
    driver = two_ranks(slots=6, num_ranks=3, floor=2, router_silence_s=600.0, drain_wait_s=60.0)
    driver.silent_routers.add("r0")
    driver.hold.add(ComputeTarget)
    driver.lose(1)
    assert driver.engine.state.outstanding.cause == "repair"
    spec, shard = driver.topology.ranks[2], driver.shards[2]
    free = next(i for i in range(6) if shard.ledger.phase(i) == "empty")
    odd = ResidentSlot(slot=free, tag=77, layer=0, expert=0, verified=False)
    before = len(driver.records)
    driver.feed(
        ev.RankJoined(
            at_s=0.0,
            rank=2,
            node=spec.node,
            failure_domain=spec.failure_domain,
            profile=spec.profile,
            num_slots=6,
            address=make_address(2, 1),
            resident=(*shard.ledger.resident(), odd),
        )
    )
    driver.let_go()
    begun = [r.rule for r in driver.records[before:] if r.outcome == "started"]
    assert begun[0] == "repair"
    assert "cleanup" in begun
