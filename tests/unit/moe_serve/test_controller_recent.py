"""What is kept beside the newest windows: copies, cold ranks, what is new of each part; and the
newest plans."""

from __future__ import annotations

import msgspec
import numpy as np

from moe_serve.controller.names import PartKind, PartName
from moe_serve.controller.parts import PartTable, RouterPart, ShardPart
from moe_serve.controller.plans import PLANS_KEPT, UNKNOWN, PlanShelf
from moe_serve.controller.recent import COPIES_KEPT, NEVER_S, WINDOWS_KEPT, YOUNG_WINDOWS, Recent
from moe_serve.ports import RouterReport, ShardReport
from placement.load import LoadWindow
from placement.messages.effects import Answer, CopyExpert, Effects, Transition
from placement.planner.plan import StepKind
from tests.builders import make_demand, make_spec, make_window
from tests.engine_driver import two_ranks

SPEC = make_spec()


def shard(parts: PartTable, rank: int, life: int = 1, **counters: float) -> ShardPart:
    """A life of a shard that reported these totals."""
    part = ShardPart(
        name=PartName("s", PartKind.SHARD, str(rank), life),
        port=None,  # type: ignore[arg-type]
        info=None,  # type: ignore[arg-type]
        heard_s=0.0,
        progress_s=0.0,
    )
    parts.shards[rank] = part
    tell(part, **counters)
    return part


def tell(part: ShardPart, **counters: float) -> None:
    part.report = ShardReport(
        rank=part.name.rank,
        incarnation=part.name.incarnation,
        reports=(),
        backlog_s=0.0,
        resident_bytes=0,
        reserved_bytes=0,
        budget_bytes=0,
        highest_term=0,
        highest_epoch=0,
        busy=False,
        counters=counters,
    )


def router(parts: PartTable, **counters: float) -> None:
    part = RouterPart(
        name=PartName("s", PartKind.ROUTER, "router-0", 1),
        port=None,  # type: ignore[arg-type]
        info=None,  # type: ignore[arg-type]
        heard_s=0.0,
    )
    part.report = RouterReport("router-0", 1, 0, 0, (), (), counters=counters)
    parts.routers["router-0"] = part


def window(index: int = 0) -> LoadWindow:
    return make_window(SPEC, make_demand(SPEC), index=index)


def test_a_sample_holds_what_is_new_of_each_part_and_keeps_ten_windows() -> None:
    parts, state = PartTable(), two_ranks().engine.state
    recent = Recent(parts, SPEC)
    part = shard(parts, 0, batches=5.0, memory_errors=1.0)
    router(parts, failed=2.0, rejected=3.0)
    first = recent.sample(state)
    assert (first.batches, first.memory_errors) == ({0: 0}, {0: 0}), "it may have run for hours"
    assert (first.failed, first.refused) == (0, 0)
    recent.window_closed(window(), state)
    assert recent.sample(state).batches == {0: 0}
    tell(part, batches=12.0, memory_errors=1.0)
    router(parts, failed=2.0, rejected=7.0)
    found = recent.sample(state)
    assert (found.batches, found.memory_errors) == ({0: 7}, {0: 0})
    assert (found.failed, found.refused) == (0, 4)
    assert recent.sample(state) == found, "looking counts nothing"
    shard(parts, 0, life=2, batches=3.0)
    assert recent.sample(state).batches == {0: 3}, "another life counts from zero"
    for index in range(WINDOWS_KEPT + 3):
        recent.window_closed(window(index), state)
    assert [w.index for w, _ in recent.windows] == list(range(3, WINDOWS_KEPT + 3))


def test_an_adopted_part_that_speaks_late_says_nothing_new_with_its_first_word() -> None:
    parts, state = PartTable(), two_ranks().engine.state
    recent = Recent(parts, SPEC)
    part = shard(parts, 0)
    router(parts)
    part.report = parts.routers["router-0"].report = None
    recent.window_closed(window(), state)
    tell(part, batches=500.0, memory_errors=9.0)
    router(parts, failed=70.0, rejected=80.0)
    found = recent.sample(state)
    assert (found.batches, found.memory_errors) == ({0: 0}, {0: 0})
    assert (found.failed, found.refused) == (0, 0)
    recent.window_closed(window(1), state)
    tell(part, batches=501.0, memory_errors=9.0)
    router(parts, failed=72.0, rejected=80.0)
    found = recent.sample(state)
    assert (found.batches, found.failed, found.refused) == ({0: 1}, 2, 0)


def test_a_shard_is_cold_until_some_windows_after_it_joined() -> None:
    parts, state = PartTable(), two_ranks().engine.state
    recent = Recent(parts, SPEC)
    shard(parts, 0)
    recent.window_closed(window(), state)
    assert recent.windows[-1][1].cold == frozenset(), "who was there first is old"
    shard(parts, 1)
    cold = [recent.sample(state).cold]
    for index in range(YOUNG_WINDOWS + 1):
        recent.window_closed(window(index + 1), state)
        cold.append(recent.sample(state).cold)
    assert cold == [{1}] * YOUNG_WINDOWS + [set(), set()]


def test_a_rank_without_a_shard_is_cold_and_its_experts_are_missing() -> None:
    driver = two_ranks()
    parts = PartTable()
    recent = Recent(parts, SPEC)
    for rank in range(2):
        shard(parts, rank)
    recent.window_closed(window(), driver.engine.state)
    assert recent.windows[-1][1].missing == 0
    driver.hold.add(CopyExpert)  # no repair comes to its end
    driver.lose(1)
    del parts.shards[1]
    found = recent.sample(driver.engine.state)
    assert found.cold == {1}
    assert found.missing > 0


def change(step: int, before: str, after: str, at_s: float, rank: int = 1) -> Transition:
    return Transition(
        at_s=at_s,
        plan_id="p",
        step_id=step,
        kind=StepKind.ADD,
        rank=rank,
        slot=0,
        layer=0,
        expert=0,
        event="e",
        before=before,
        after=after,
    )


def test_a_copy_runs_from_its_first_byte_to_its_proof() -> None:
    recent = Recent(PartTable(), SPEC)
    recent.note(
        [change(1, "planned", "reserved", 1.0), change(1, "reserved", "copying", 2.0)], None
    )
    (copy,) = recent.copies(2.0, 3.0)
    assert (copy.source_rank, copy.target_rank, copy.ended_s) == (-1, 1, NEVER_S)
    assert recent.copies(0.0, 2.0) == []
    recent.note([change(1, "copying", "copying", 3.0)], None)
    recent.note([change(1, "copying", "verified", 4.0)], None)
    assert recent.copies(3.0, 9.0) == [copy]
    assert recent.copies(4.0, 9.0) == []
    recent.note([change(n, "reserved", "copying", 5.0) for n in range(2, COPIES_KEPT + 9)], None)
    assert len(recent.copies(0.0, 9.0)) == COPIES_KEPT


def test_a_copy_knows_the_rank_it_comes_from() -> None:
    driver = two_ranks(slots=6)
    driver.hold.add(CopyExpert)
    recent = Recent(PartTable(), SPEC)
    driver.close_window({0: 5000.0})
    recent.note(driver.transitions, driver.engine.state.run)  # type: ignore[arg-type]
    found = recent.copies(0.0, 1e9)
    run = driver.engine.state.run
    assert run is not None
    sources = {
        (s.source_rank, s.step.slot.rank) for s in run.steps.values() if s.state == "copying"
    }
    assert sources
    assert {(one.source_rank, one.target_rank) for one in found} == sources


# ------------------------------------------------------------------------------------- plans


def balanced(index: int, rank_pairs: list[list[int]]) -> LoadWindow:
    made = window(index)
    return msgspec.structs.replace(made, rank_pairs=np.array(rank_pairs, np.int64))


def test_a_plan_keeps_what_was_measured_before_and_after_it() -> None:
    driver = two_ranks(slots=6)
    shelf = PlanShelf()
    shelf.window_closed(balanced(0, [[30], [10]]), driver.engine.state)
    driver.hold.add(CopyExpert)
    driver.close_window({0: 5000.0})
    run = driver.engine.state.run
    assert run is not None
    shelf.note(Effects(), run, 10.0)
    shelf.note(Effects(), run, 11.0)
    kept = shelf.find("")
    assert kept is not None
    assert (kept.plan_id, kept.cause) == (run.plan_id, run.cause)
    assert kept.before == 20 / 30
    state = driver.engine.state
    shelf.window_closed(balanced(1, [[20], [20]]), state)
    assert kept.after == UNKNOWN, "it runs still"
    shelf.note(Effects(), None, 12.5)
    shelf.window_closed(balanced(6, [[25], [15]]), state)  # opened at 12.0, before it ended
    assert kept.after == UNKNOWN
    shelf.window_closed(balanced(7, [[0], [0]]), state)
    assert kept.after == UNKNOWN, "a window without load says nothing"
    shelf.window_closed(balanced(8, [[21], [19]]), state)
    assert kept.after == 20 / 21
    shelf.window_closed(balanced(9, [[40], [0]]), state)
    assert kept.after == 20 / 21, "the first one counts"


def test_plans_that_were_asked_for_are_kept_and_the_oldest_forgotten() -> None:
    driver = two_ranks(slots=6)
    driver.hold.add(CopyExpert)
    driver.close_window({0: 5000.0})
    shelf = PlanShelf()
    assert shelf.find("") is None
    assert driver.engine.state.run is not None
    plan = driver.engine.state.run.plan
    for number in range(PLANS_KEPT + 2):
        answer = Answer(request_id=1, code="ok", message="", plan_id=f"p{number}", plan=plan)
        shelf.note(Effects(commands=(answer,)), None, 1.0)
    assert shelf.find("p1") is None
    found = shelf.find("p2")
    assert found is not None
    assert found.plan is plan
    newest = shelf.find("")
    assert newest is not None
    assert newest.plan_id == f"p{PLANS_KEPT + 1}"
