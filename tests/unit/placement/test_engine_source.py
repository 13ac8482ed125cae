"""Where a copy comes from: nearest first, what failed last."""

import msgspec
import pytest

from placement.config import RebalanceConfig
from placement.engine.source import CHECKPOINT, FAILED_FOR_S, FAILURES_MAX, find_source
from placement.engine.state import SourceFailure, StepRun
from placement.layout import SlotId
from placement.messages import events as ev
from placement.messages.effects import CopyExpert, VerifyExpert
from placement.planner.plan import PlannedStep, StepKind
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver, two_ranks
from tests.unit.placement.test_engine_edges import holding

HOT = {0: 5000.0}


def sent(driver, kind):
    return [c for c in driver.commands if isinstance(c, kind)]


def world(rows, *, ranks_per_node=2, slots=5):
    """Ranks that hold these rows, two to a node."""
    topology = make_topology([slots] * len(rows), ranks_per_node=ranks_per_node)
    config = RebalanceConfig(cooldown_s=0.0, floor=1)
    driver = EngineDriver(make_spec(), topology, config, routers=["r0"], join=False)
    for rank, row in enumerate(rows):
        driver.join(rank, shard=holding(rank, row, slots))
    return driver


def source_for(driver, rank, expert=0):
    """Rank that a copy of the expert to this rank would come from now."""
    step = PlannedStep(
        step_id=1 << 40,
        kind=StepKind.ADD,
        move_id=0,
        slot=SlotId(rank, 4),
        layer=0,
        expert=expert,
        wave=0,
    )
    return find_source(driver.engine._turn(driver.now_s), StepRun(step=step)).rank


def fails(driver, rank, at_s, key=0):
    driver.engine.state.source_failures.append(SourceFailure(key=key, rank=rank, at_s=at_s))


def test_the_nearest_replica_is_the_source_and_the_checkpoint_where_there_is_none():
    driver = world([[0, 1], [2], [0, 3], [2, 3]])
    assert source_for(driver, 1) == 0, "own node"
    assert source_for(driver, 3) == 2, "own node"
    assert source_for(driver, 0) == 0, "own rank, for a slot that is to be given up"
    assert source_for(driver, 0, expert=3) == 2, "another node; lowest rank"
    for rank in (0, 2):
        driver.feed(ev.RankSuspected(at_s=0.0, rank=rank, reason="disconnected"))
    assert source_for(driver, 1) == CHECKPOINT, "no replica that answers"


def test_a_source_that_failed_comes_after_all_that_did_not_and_the_checkpoint_before_it():
    driver = world([[0, 1], [2], [0, 3], [2, 3]])
    fails(driver, 0, at_s=0.0)
    assert source_for(driver, 1) == 2, "another node"
    fails(driver, 2, at_s=1.0)
    assert source_for(driver, 1) == CHECKPOINT
    fails(driver, CHECKPOINT, at_s=2.0)
    assert source_for(driver, 1) == 0, "all failed: the one whose failure is oldest"
    assert source_for(driver, 1, expert=3) == 2, "of another expert nothing is held against it"


def test_a_failure_is_forgotten_after_a_while():
    driver = world([[0, 1], [2], [0, 3], [2, 3]])
    fails(driver, 0, at_s=0.0)
    driver.now_s = FAILED_FOR_S - 1.0
    assert source_for(driver, 1) == 2
    driver.now_s = FAILED_FOR_S
    assert source_for(driver, 1) == 0


@pytest.mark.parametrize(
    ("code", "blamed"),
    [("source_lost", True), ("io", True), ("timeout", True), ("no_slot", False)],
)
def test_a_copy_that_fails_is_retried_from_elsewhere(code, blamed):
    driver = two_ranks()
    driver.hold.add(CopyExpert)
    driver.close_window(HOT)
    first = driver.held.pop()
    assert first.source.rank >= 0
    driver.feed(ev.StepFailed(at_s=0.0, step_id=first.step_id, code=code, detail="on purpose"))
    assert driver.engine.state.run is None
    driver.wait(6.0)
    driver.close_window(HOT)
    again = driver.held.pop()
    assert (again.layer, again.expert) == (first.layer, first.expert)
    assert again.source.rank == (CHECKPOINT if blamed else first.source.rank)


def test_bytes_that_turn_out_wrong_are_fetched_from_elsewhere():
    driver = two_ranks()
    driver.hold.add(VerifyExpert)
    driver.close_window(HOT)
    (proof,) = driver.held
    first = sent(driver, CopyExpert)[-1]
    driver.feed(ev.StepFailed(at_s=0.0, step_id=proof.step_id, code="digest", detail="one bit"))
    driver.held.clear()
    driver.hold.clear()
    driver.wait(6.0)
    driver.close_window(HOT)
    assert sent(driver, CopyExpert)[-1].source.rank == CHECKPOINT != first.source.rank
    assert len(driver.table.replicas(0, 0)) == 2


def test_a_copy_that_passes_its_deadline_or_stands_still_is_held_against_its_source():
    for fields in ({"copy_timeout_s": 2.0}, {}):
        driver = two_ranks(**fields)
        driver.hold.add(CopyExpert)
        driver.close_window(HOT)
        source = driver.held[0].source.rank
        driver.wait(4.5)
        (failure,) = driver.engine.state.source_failures
        assert (failure.key, failure.rank) == (0, source)


def test_a_slot_that_is_never_reserved_is_nobodys_failure():
    from placement.messages.effects import ReserveSlot

    driver = two_ranks(copy_timeout_s=2.0)
    driver.hold.add(ReserveSlot)
    driver.close_window(HOT)
    driver.wait(2.5)
    assert driver.engine.state.source_failures == []


def test_failures_are_bounded_and_one_source_is_named_once_an_expert():
    driver = two_ranks()
    state = driver.engine.state
    state.source_failures = [
        SourceFailure(key=key, rank=9, at_s=0.0) for key in range(10, 10 + FAILURES_MAX)
    ]
    for _ in range(2):
        driver.hold.add(CopyExpert)
        driver.close_window(HOT)
        command = driver.held.pop()
        state.run.steps[command.step_id].source_rank = 0
        driver.feed(
            ev.StepFailed(at_s=0.0, step_id=command.step_id, code="io", detail="on purpose")
        )
        driver.wait(6.0)
    assert len(state.source_failures) == FAILURES_MAX
    assert [f.rank for f in state.source_failures if f.key == 0] == [0]
    assert state.source_failures[0].key == 11, "the oldest is forgotten"


def test_failures_are_part_of_the_snapshot_and_of_no_later_life():
    driver = two_ranks()
    fails(driver, 0, at_s=0.0)
    snapshot = driver.engine.snapshot()
    assert snapshot.state.source_failures == driver.engine.state.source_failures
    from tests.engine_driver import restart

    restart(driver, msgspec.structs.replace(snapshot), ())
    assert driver.engine.state.source_failures == []
