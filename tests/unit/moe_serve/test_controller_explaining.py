"""Evidence from what the controller has at hand: slices, copies, cold ranks, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moe_serve.controller.book import Book
from moe_serve.controller.explaining import evidence_of, explain_plan_view
from moe_serve.controller.parts import PartTable
from moe_serve.controller.recent import Recent
from moe_serve.controller.settings import ControllerSettings, ExpectedRank
from moe_serve.controller.stages import GRAIN_S, StageFolder
from moe_serve.controller.views import Sight
from moe_serve.documents.plans import plan_document
from moe_serve.rpc import placement_pb2 as pb
from placement.config import RebalanceConfig
from placement.engine.state import PlanRun
from placement.load import LoadWindow
from placement.messages import events as ev
from placement.messages.effects import CopyExpert, Effects
from placement.messages.records import DecisionRecord
from tests.builders import PROFILE, make_demand, make_spec, make_window
from tests.engine_driver import EngineDriver, two_ranks
from tests.explain_world import World
from tests.unit.moe_serve.test_controller_recent import change, shard, tell

SPEC = make_spec()
WINDOW_S = 2.0


def window(index: int) -> LoadWindow:
    made = make_window(SPEC, make_demand(SPEC, base=40.0), index=index, window_s=WINDOW_S)
    pairs = np.array([[100], [60]], np.int64)
    return msgspec.structs.replace(made, rank_pairs=pairs)


@pytest.fixture
def driver() -> EngineDriver:
    return two_ranks(slots=4)


@pytest.fixture
def sight(driver: EngineDriver, tmp_path: Path) -> Sight:
    """Four windows have closed, half a second ago."""
    settings = ControllerSettings(
        service_id="s",
        spec=SPEC,
        config=RebalanceConfig(window_s=WINDOW_S, floor=1),
        ranks=tuple(
            ExpectedRank(rank=r, profile=PROFILE.name, num_slots=4, budget_bytes=4000)
            for r in range(2)
        ),
        profiles=(PROFILE,),
        state_dir=tmp_path,
    )
    parts = PartTable()
    recent = Recent(parts, SPEC)
    for rank in range(2):
        shard(parts, rank, batches=3.0)
    for index in range(4):
        recent.window_closed(window(index), driver.engine.state)
    return Sight(
        settings=settings,
        state=driver.engine.state,
        parts=parts,
        stages=StageFolder(),
        recent=recent,
        book=Book(records_kept=99, moves_kept=99),
        table=None,
        now_s=8.5,
        started_s=0.0,
    )


def test_a_span_is_cut_at_its_windows_and_at_now(sight: Sight) -> None:
    evidence = evidence_of(sight, 0.0)
    assert [(s.start_s, s.end_s) for s in evidence.slices] == [
        (0.0, 2.0),
        (2.0, 4.0),
        (4.0, 6.0),
        (6.0, 8.0),
        (8.0, 8.5),
    ]
    assert evidence.slices[0].rank_pairs.tolist() == [[100], [60]]
    assert not evidence.slices[-1].rank_pairs.any()
    assert [s.start_s for s in evidence_of(sight, 4.5).slices] == [4.0, 6.0, 8.0]
    assert [s.start_s for s in evidence_of(sight, 0.1).slices] == [6.0, 8.0]


def test_what_lies_before_the_kept_windows_is_a_slice_of_its_own(sight: Sight) -> None:
    later = replace(sight, started_s=-60.0)
    assert [s.start_s for s in evidence_of(later, 30.0).slices][:2] == [-21.5, 0.0]
    assert [s.start_s for s in evidence_of(later, 300.0).slices][:2] == [-60.0, 0.0]


def test_before_the_first_window_there_is_one_slice(sight: Sight) -> None:
    fresh = replace(sight, recent=Recent(sight.parts, SPEC), now_s=1.0)
    assert [(s.start_s, s.end_s) for s in evidence_of(fresh, 0.0).slices] == [(0.0, 1.0)]


def test_requests_fall_into_the_slice_in_which_they_were_told_of(sight: Sight) -> None:
    told = World(calls=4, slices=1).evidence().slices[0].stages
    zeros = replace(told, **{f: np.zeros_like(getattr(told, f)) for f in told.__slots__})
    sight.stages.add("r0", 1, zeros, 0.5)
    sight.stages.add("r0", 1, told, 4.5)
    found = [int(s.stages.requests[:, 0].sum()) for s in evidence_of(sight, 0.0).slices]
    assert found == [0, 0, 4, 0, 0]


def test_a_copy_marks_the_slices_it_may_have_slowed(sight: Sight) -> None:
    sight.recent.note([change(1, "reserved", "copying", 4.0 + GRAIN_S / 2)], None)
    marked = [s.copies for s in evidence_of(sight, 0.0).slices]
    assert marked == [(), ((-1, 1),), ((-1, 1),), ((-1, 1),), ((-1, 1),)]
    sight.recent.note([change(1, "copying", "verified", 5.0)], None)
    assert [bool(s.copies) for s in evidence_of(sight, 0.0).slices] == [
        *(False, True, True, False, False)
    ]


def test_a_rank_that_is_lost_is_cold_and_does_not_serve(sight: Sight, driver: EngineDriver) -> None:
    driver.hold.add(ev.ExpertCopied)
    driver.lose(1)
    del sight.parts.shards[1]
    evidence = evidence_of(sight, 0.0)
    assert [r.serving for r in evidence.ranks] == [True, False]
    assert not evidence.hosts[:, 1].any()
    # What routers told in the last window may be of the time after.
    assert [s.cold for s in evidence.slices] == [set(), set(), set(), {1}, {1}]


def test_a_drained_rank_serves_and_is_not_used_for_more(sight: Sight, driver: EngineDriver) -> None:
    roomy = two_ranks(slots=9)
    roomy.feed(ev.DrainAsked(at_s=0.0, request_id=1, rank=1))
    evidence = evidence_of(replace(sight, state=roomy.engine.state), 0.0)
    assert [(r.serving, r.usable) for r in evidence.ranks] == [(True, True), (True, False)]


def test_spare_slots_are_those_beyond_what_each_expert_needs(sight: Sight) -> None:
    # Two ranks of 4 slots, one of each staging; 4 experts.
    assert evidence_of(sight, 0.0).spare_slots == 2
    floor = replace(
        sight, settings=replace(sight.settings, config=RebalanceConfig(window_s=2.0, floor=2))
    )
    assert len({rank.failure_domain for rank in sight.state.ranks}) == 2
    assert evidence_of(floor, 0.0).spare_slots == -2


def record(seq: int, rule: str, at_s: float, **fields: object) -> DecisionRecord:
    return DecisionRecord(at_s=at_s, seq=seq, rule=rule, outcome="refused", **fields)  # type: ignore[arg-type]


def test_refusals_for_want_of_memory_count_while_they_are_new(sight: Sight) -> None:
    assert evidence_of(sight, 0.0).wanted_memory == ()
    staging = "move_refused: replicate left out: rank 1 would end with 0 empty slots"
    sight.book.add(
        (
            record(0, "budget_refused", 3.0, detail="9 slots leave the ranks short"),
            record(1, "regret_reached", 5.0, refused=(staging, "gain_below_band: too little")),
        )
    )
    assert evidence_of(sight, 0.0).wanted_memory == (staging,), "a refused budget is no want"
    assert evidence_of(sight, 1.0).wanted_memory == ()
    sight.book.add((record(2, "in_balance", 8.0, refused=("plan: no slot is wanted",)),))
    assert evidence_of(sight, 0.0).wanted_memory == ()


def test_batches_without_memory_count_in_the_span_alone(sight: Sight, driver: EngineDriver) -> None:
    (part, _) = sight.parts.shards.values()
    tell(part, memory_errors=5.0)
    sight.recent.window_closed(window(4), driver.engine.state)
    sight.recent.window_closed(window(5), driver.engine.state)
    tell(part, memory_errors=7.0)
    later = replace(sight, now_s=12.5)

    def errors(seconds: float) -> list[int]:
        return [rank.memory_errors for rank in evidence_of(later, seconds).ranks]

    assert errors(0.0) == [7, 0]
    assert errors(2.0) == [2, 0]


@pytest.mark.asyncio
async def test_of_a_plan_known_by_its_records_no_figure_is_made_up(sight: Sight) -> None:
    sight.book.add((record(0, "plan_done", 3.0, plan_id="1-7"),))
    plan = (await explain_plan_view(sight, pb.ExplainPlanRequest(plan_id="1-7"))).plan
    assert (plan.plan_id, list(plan.moves)) == ("1-7", [])
    assert (plan.balancedness_before, plan.balancedness_after) == (0.0, 0.0)


def test_a_profile_that_is_not_declared_any_more_is_any(sight: Sight) -> None:
    sight.state.ranks[1].profile = "gone"
    assert evidence_of(sight, 0.0).ranks[1].profile == PROFILE


# -- moves that are not kept one by one ------------------------------------------------------------


class Long:
    """A plan of several moves under way, in a book that keeps no move."""

    def __init__(self, sight: Sight, records_kept: int = 99) -> None:
        self.driver = two_ranks(slots=3)
        self._seen = len(self.driver.records)
        self.driver.hold.add(CopyExpert)
        self.driver.close_window(dict.fromkeys(self.driver.keys()[0], 5000.0))
        run = self.driver.engine.state.run
        assert run is not None
        self.run: PlanRun = run
        self.book = Book(records_kept=records_kept, moves_kept=0)
        self.sight = replace(sight, state=self.driver.engine.state, book=self.book)
        self._note()

    def end(self, *, well: bool) -> None:
        """The plan comes to its end; its last record is the last one that the book hears of."""
        held = list(self.driver.held)
        if well:
            self.driver.let_go()
        for command in () if well else held:
            failed = {"step_id": command.step_id, "code": "io", "detail": "disk"}
            self.driver.feed(ev.StepFailed(at_s=0.0, **failed))
        assert self.driver.engine.state.run is None
        rules = [record.rule for record in self.driver.records]
        del self.driver.records[len(rules) - rules[::-1].index("plan_done") :]
        self._note()

    def _note(self) -> None:
        run = self.driver.engine.state.run
        self.book.plans.note(Effects(), run, self.driver.now_s)
        self.book.add(tuple(self.driver.records[self._seen :]), run)
        self._seen = len(self.driver.records)

    async def states(self) -> tuple[set[str], str]:
        """(states of its moves, of the plan), as a document has them."""
        asked = pb.ExplainPlanRequest(plan_id=self.run.plan_id)
        plan = plan_document(await explain_plan_view(self.sight, asked), priced=True)["plan"]
        assert len(plan["moves"]) == len(self.run.plan.moves) > 1
        return {move["state"] for move in plan["moves"]}, plan["state"]


@pytest.mark.asyncio
async def test_moves_of_a_plan_under_way_stand_as_their_steps_do(sight: Sight) -> None:
    long = Long(sight)
    first = long.run.plan.moves[0].move_id
    add, remove = [s for s in long.run.steps.values() if s.step.move_id == first]
    assert await long.states() == ({"running"}, "running")
    for one in long.run.steps.values():
        one.state = "planned"
    assert await long.states() == ({"planned"}, "running")
    add.state = "copying"
    assert await long.states() == ({"planned", "running"}, "running")
    add.state, remove.state = "aborted", "listed"
    assert await long.states() == ({"planned", "aborted"}, "running")
    add.state, remove.state = "listed", "released"
    assert await long.states() == ({"planned", "done"}, "running")


@pytest.mark.asyncio
@pytest.mark.parametrize("records_kept", [99, 1])
async def test_a_plan_that_has_ended_well_did_all_its_moves(
    sight: Sight, records_kept: int
) -> None:
    long = Long(sight, records_kept)
    long.end(well=True)
    assert await long.states() == ({"done"}, "done")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("records_kept", "states"),
    [
        (99, ({"aborted"}, "aborted")),
        (1, ({"unknown"}, "aborted")),
        (0, ({"unknown"}, "unknown")),
    ],
    ids=["all_records", "the_last_record", "no_record"],
)
async def test_what_nothing_tells_of_is_unknown(
    sight: Sight, records_kept: int, states: tuple[set[str], str]
) -> None:
    long = Long(sight, records_kept)
    long.end(well=False)
    assert await long.states() == states
