"""Ranks that are added, removed and replaced: what is refused, what happens once one is empty."""

import msgspec
import pytest

from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine
from placement.engine.state import RankStatus
from placement.messages import events as ev
from placement.messages.effects import (
    ComputeTarget,
    EndRank,
    PublishTable,
    ReleaseSlot,
    ReplaceRank,
    SetRankSlots,
)
from placement.planner.plan import StepKind
from placement.topology import Topology
from tests.builders import PROFILE, make_spec, make_topology
from tests.engine_driver import restart, two_ranks


def ask(driver, kind, **fields):
    request_id = 1000 + len(driver.answers)
    driver.feed(kind(at_s=0.0, request_id=request_id, **fields))
    return driver.answers[request_id]


def ends(driver):
    return [(c.rank, c.incarnation) for c in driver.commands if isinstance(c, EndRank)]


def starts(driver):
    return [(c.rank, c.lost_incarnation) for c in driver.commands if isinstance(c, ReplaceRank)]


def grow(driver, count=1):
    """The driver's own picture of the fleet, with more ranks like the last one."""
    last = driver.topology.ranks[-1]
    more = [
        msgspec.structs.replace(
            last, rank=last.rank + n, node=f"n{last.rank + n}", failure_domain=f"n{last.rank + n}"
        )
        for n in range(1, count + 1)
    ]
    driver.topology = Topology(
        ranks=(*driver.topology.ranks, *more),
        profiles=driver.topology.profiles,
        cross_node_bytes_per_s=driver.topology.cross_node_bytes_per_s,
    )


def add(driver, **fields):
    return ask(driver, ev.RankAddAsked, profile=PROFILE.name, num_slots=4, **fields)


def three(**fields):
    return two_ranks(num_ranks=3, **fields)


# -- a rank leaves -------------------------------------------------------------------------------


def test_a_rank_that_leaves_is_emptied_taken_from_the_table_and_ended():
    driver = three()
    answer = ask(driver, ev.RankRemoveAsked, rank=1)
    assert (answer.code, answer.rank) == ("ok", 1)
    state = driver.engine.state.ranks[1]
    assert (state.status, state.drained_by) == (RankStatus.REMOVED, (ev.DrainCause.REMOVE,))
    assert ends(driver) == [(1, 1)]
    assert not starts(driver)
    assert driver.table.missing() == ()
    assert [entry.rank for entry in driver.table.ranks] == [0, 2]
    end = next(i for i, c in enumerate(driver.commands) if isinstance(c, EndRank))
    told = [i for i, c in enumerate(driver.commands) if isinstance(c, PublishTable)]
    assert max(told) < end, "routers must hear of it first"
    assert "rank_removed" in driver.rules("done")


def test_a_rank_is_not_ended_before_its_last_slot_is_released():
    driver = three()
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankRemoveAsked, rank=1)
    assert driver.held
    assert not ends(driver)
    driver.let_go()
    assert ends(driver) == [(1, 1)]


def test_a_silent_shard_cannot_keep_a_rank_from_leaving():
    driver = three()
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankRemoveAsked, rank=1)
    driver.wait(60.0)
    assert ends(driver) == [(1, 1)]
    assert driver.table.missing() == ()


def test_a_rank_may_not_leave_where_the_others_cannot_hold_every_expert():
    driver = two_ranks(slots=3)
    answer = ask(driver, ev.RankRemoveAsked, rank=0)
    assert (answer.code, answer.missing_bytes) == ("refused", 2000)
    assert "add a rank first" in answer.message
    assert driver.engine.state.ranks[0].drained_by == ()
    assert driver.rules("refused") == ["rank_removed"]


@pytest.mark.parametrize("kind", [ev.RankRemoveAsked, ev.RankReplaceAsked])
def test_a_lower_floor_must_be_accepted(kind):
    driver = two_ranks(slots=5, floor=2)
    answer = ask(driver, kind, rank=0)
    assert answer.code == "refused"
    assert "1 failure domain(s) instead of 2" in answer.message
    assert driver.keys()[0] == [0, 1, 2, 3]
    assert ask(driver, kind, rank=0, accept_lower_floor=True).code == "ok"
    assert driver.keys()[0] == []


def test_a_lost_rank_may_be_given_up_and_gets_no_new_shard():
    driver = three()
    driver.lose(1)
    assert starts(driver) == [(1, 1)]
    assert ask(driver, ev.RankRemoveAsked, rank=1).code == "ok"
    assert driver.engine.state.ranks[1].status is RankStatus.REMOVED
    assert ends(driver) == [(1, 1)], "the shard that is being made must not live"
    joined = driver.join(1, 2)
    assert driver.engine.state.ranks[1].status is RankStatus.REMOVED
    assert [r.rule for r in joined.records] == ["rank_refused"]


def test_a_rank_lost_on_its_way_out_has_left():
    driver = three()
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankRemoveAsked, rank=1)
    driver.lose(1)
    assert driver.engine.state.ranks[1].status is RankStatus.REMOVED
    assert not starts(driver)
    driver.wait(10.0)
    assert driver.table.missing() == ()


def test_a_removal_is_taken_back_by_undrain_until_the_rank_has_left():
    driver = three()
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankRemoveAsked, rank=1)
    assert ask(driver, ev.UndrainAsked, rank=1).code == "ok"
    driver.let_go()
    driver.wait(10.0)
    assert driver.engine.state.ranks[1].status is RankStatus.LIVE
    assert not ends(driver)
    ask(driver, ev.RankRemoveAsked, rank=1)
    answer = ask(driver, ev.UndrainAsked, rank=1)
    assert (answer.code, answer.message) == (
        "refused",
        "rank 1 stays empty: it was removed; add it again",
    )


def test_removing_twice_is_said_to_be_done_and_done_once():
    driver = three()
    ask(driver, ev.RankRemoveAsked, rank=1)
    assert ask(driver, ev.RankRemoveAsked, rank=1).code == "ok"
    assert ends(driver) == [(1, 1)]
    assert ask(driver, ev.RankRemoveAsked, rank=7).code == "not_found"
    assert ask(driver, ev.RankReplaceAsked, rank=-1).code == "not_found"


# -- a rank joins --------------------------------------------------------------------------------


def test_an_added_rank_is_started_under_the_next_number_and_used():
    driver = two_ranks()
    answer = add(driver, group=1, only_node="n2")
    assert (answer.code, answer.rank) == ("ok", 2)
    assert starts(driver) == [(2, -1)]
    state = driver.engine.state.ranks[2]
    assert (state.status, state.group, state.only_node) == (RankStatus.EXPECTED, 1, "n2")
    grow(driver)
    driver.join(2, 5)
    for _ in range(6):
        driver.close_window({0: 5000.0})
    assert driver.keys()[2]
    driver.check_agreement()


def test_an_expected_rank_that_never_comes_keeps_nobody_waiting():
    driver = two_ranks()
    driver.wait(31.0)
    add(driver)
    tables = len(driver.tables)
    driver.close_window({0: 5000.0})
    assert len(driver.tables) > tables
    assert ask(driver, ev.RankRemoveAsked, rank=2).code == "ok"
    assert ends(driver) == [(2, -1)]


def test_a_removed_rank_comes_back_under_its_number_and_no_other_does():
    driver = three()
    ask(driver, ev.RankRemoveAsked, rank=1)
    assert add(driver).rank == 3
    answer = add(driver, rank=1)
    assert (answer.code, answer.rank) == ("ok", 1)
    assert starts(driver)[-1] == (1, 1)
    driver.join(1, 2)
    assert driver.engine.state.ranks[1].status is RankStatus.LIVE
    assert not driver.engine.state.ranks[1].draining
    driver.close_window({0: 5000.0})
    driver.check_agreement()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 1}, "is live and was not removed"),
        ({"rank": 9}, "was never there; the next new rank is 3"),
        ({"group": -1}, "must be >= 0"),
        ({"num_slots": -1}, "must be >= 0"),
        ({"profile": "unheard of"}, "is not declared"),
    ],
)
def test_what_cannot_be_added_is_refused_in_words(fields, words):
    driver = three()
    given = {"profile": PROFILE.name, "num_slots": 4} | fields
    answer = ask(driver, ev.RankAddAsked, **given)
    assert answer.code == "refused"
    assert words in answer.message
    assert len(driver.engine.state.ranks) == 3
    assert not starts(driver)


def test_a_rank_on_its_way_out_is_kept_by_undrain_not_added():
    driver = three()
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankRemoveAsked, rank=1)
    assert "undrain it to keep it" in add(driver, rank=1).message


# -- a shard is replaced -------------------------------------------------------------------------


def test_a_replaced_shard_is_emptied_first_and_its_next_life_is_filled_as_it_was():
    driver = three(floor=2, slots=6)
    before = driver.keys()
    assert before[1]
    assert ask(driver, ev.RankReplaceAsked, rank=1, incarnation=1).code == "ok"
    assert driver.keys()[1] == []
    assert starts(driver) == [(1, 1)]
    spread = [len(driver.table.replicas(0, e)) for e in range(4)]
    assert min(spread) == 2, "the floor is kept"
    assert driver.engine.state.ranks[1].drained_by == ()
    driver.join(1, 2)
    assert "refill" in driver.rules("started")
    assert driver.keys()[1] == before[1]
    driver.check_agreement()
    driver.wait(60.0)
    assert driver.rules("started").count("refill") == 1


def test_a_replacement_asked_again_is_not_done_again():
    driver = three()
    ask(driver, ev.RankReplaceAsked, rank=1, incarnation=1)
    driver.join(1, 2)
    assert "a newer shard" in ask(driver, ev.RankReplaceAsked, rank=1, incarnation=1).message
    assert starts(driver) == [(1, 1)]
    assert driver.engine.state.ranks[1].status is RankStatus.LIVE


def test_a_replacement_is_taken_back_by_undrain():
    driver = three()
    before = driver.keys()[1]
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankReplaceAsked, rank=1)
    assert ask(driver, ev.UndrainAsked, rank=1).code == "ok"
    driver.let_go()
    driver.wait(10.0)
    assert not starts(driver)
    assert driver.engine.state.ranks[1].owed_keys == []
    assert before


def test_a_rank_that_dies_while_it_is_to_be_replaced_is_simply_replaced_and_filled():
    driver = three()
    before = driver.keys()[1]
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankReplaceAsked, rank=1)
    driver.lose(1)
    assert starts(driver) == [(1, 1)]
    driver.let_go()
    driver.join(1, 2)
    driver.wait(10.0)
    assert set(before) <= set(driver.keys()[1])
    assert not driver.engine.state.ranks[1].draining


def test_a_drained_ranks_shard_is_replaced_and_stays_drained():
    driver = three()
    ask(driver, ev.DrainAsked, rank=1)
    assert ask(driver, ev.RankReplaceAsked, rank=1).code == "ok"
    assert starts(driver) == [(1, 1)]
    driver.join(1, 2)
    assert driver.engine.state.ranks[1].drained_by == (ev.DrainCause.OPERATOR,)
    assert driver.keys()[1] == []


def test_a_rank_that_leaves_is_not_replaced():
    driver = three()
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankRemoveAsked, rank=1)
    assert ask(driver, ev.RankReplaceAsked, rank=1).code == "refused"
    driver.lose(2)
    assert "lost" in ask(driver, ev.RankReplaceAsked, rank=2).message


# -- restarts ------------------------------------------------------------------------------------


def test_a_restarted_controller_knows_who_left_and_who_was_added():
    driver = three()
    ask(driver, ev.RankRemoveAsked, rank=1)
    add(driver, group=2)
    driver.shards.pop(1)
    restart(driver, driver.engine.snapshot(), ())
    ranks = driver.engine.state.ranks
    assert (ranks[1].status, ranks[3].status) == (RankStatus.REMOVED, RankStatus.EXPECTED)
    assert ranks[3].group == 2
    assert "rank_refused" in {r.rule for r in driver.feed(_joined(driver, 1)).records}
    driver.close_window({0: 5000.0})
    assert driver.table.missing() == ()


def _joined(driver, rank):
    spec = driver.topology.ranks[rank]
    return ev.RankJoined(
        at_s=0.0,
        rank=rank,
        node=spec.node,
        failure_domain=spec.failure_domain,
        profile=spec.profile,
        num_slots=4,
        address=driver.tables[0].ranks[rank],
    )


def test_a_service_begun_anew_keeps_the_ranks_that_were_added_and_removed():
    driver = three(slots=6)
    ask(driver, ev.RankRemoveAsked, rank=1)
    add(driver, group=2, only_node="n9")
    driver.hold = {ReleaseSlot}
    assert ask(driver, ev.RankRemoveAsked, rank=2).code == "ok"
    assert driver.engine.state.ranks[2].status is RankStatus.LIVE, "it is on its way out"
    add(driver, group=0)
    anew = RebalanceEngine(
        make_spec(),
        make_topology([6, 6, 6]),
        RebalanceConfig(),
        term=9,
        first_epoch=1,
        start_s=0.0,
        earlier=driver.engine.state.ranks,
    )
    ranks = anew.state.ranks
    assert [(r.rank, r.status.value, r.group, r.only_node) for r in ranks] == [
        (0, "expected", -1, ""),
        (1, "removed", -1, ""),
        (2, "removed", -1, ""),
        (3, "expected", 2, "n9"),
        (4, "expected", 0, ""),
    ]
    assert [r.incarnation for r in ranks] == [-1] * 5


def test_a_rebuilt_engine_learns_an_added_ranks_group_from_its_shard():
    driver = two_ranks()
    driver.feed(msgspec.structs.replace(_third(), group=1, only_node="n7"))
    state = driver.engine.state.ranks[2]
    assert (state.group, state.only_node) == (1, "n7")


def _third():
    from tests.builders import make_address

    return ev.RankJoined(
        at_s=0.0,
        rank=2,
        node="n",
        failure_domain="n",
        profile=PROFILE.name,
        num_slots=2,
        address=make_address(2, 1),
    )


# -- asked twice, asked of what is not there ------------------------------------------------------


def test_an_addition_asked_again_by_its_key_adds_nothing_also_after_a_restart():
    driver = two_ranks()
    first = add(driver, key="a1")
    assert (first.code, first.rank) == ("ok", 2)
    again = add(driver, key="a1")
    assert (again.code, again.rank) == ("ok", 2)
    assert "rank 2 was added by this request" in again.message
    assert starts(driver) == [(2, -1)]
    restart(driver, driver.engine.snapshot(), ())
    assert add(driver, key="a1").rank == 2
    assert add(driver, key="a2").rank == 3, "another request"
    assert [add(driver).rank, add(driver).rank] == [4, 5], "without a key each adds one"
    anew = RebalanceEngine(
        make_spec(),
        make_topology([4, 4]),
        RebalanceConfig(),
        term=9,
        first_epoch=1,
        start_s=0.0,
        earlier=driver.engine.state.ranks,
    )
    assert [rank.asked_key for rank in anew.state.ranks] == ["", "", "a1", "a2", "", ""]


def test_a_removed_rank_asked_back_twice_by_its_key_comes_back_once():
    driver = three()
    ask(driver, ev.RankRemoveAsked, rank=1)
    assert add(driver, rank=1, key="b").code == "ok"
    again = add(driver, rank=1, key="b")
    assert (again.code, again.rank) == ("ok", 1)
    assert len(starts(driver)) == 1
    other = add(driver, rank=0, key="b")
    assert other.code == "refused"
    assert "the key of another request" in other.message


def test_a_replacement_asked_again_while_the_new_shard_is_made_is_under_way():
    driver = three()
    ask(driver, ev.RankReplaceAsked, rank=1, incarnation=1)
    assert driver.engine.state.ranks[1].status is RankStatus.LOST
    again = ask(driver, ev.RankReplaceAsked, rank=1, incarnation=1)
    assert again.code == "ok"
    assert "has ended already" in again.message
    assert starts(driver) == [(1, 1)]


def test_a_replacement_asked_again_right_after_a_restart_is_under_way():
    driver = three()
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankReplaceAsked, rank=1, incarnation=1)
    restart(driver, driver.engine.snapshot(), (), silent=[1])
    assert driver.engine.state.ranks[1].status is RankStatus.RESTORED
    assert ask(driver, ev.RankReplaceAsked, rank=1, incarnation=1).code == "ok"


def test_a_life_that_never_was_cannot_be_replaced():
    driver = three()
    answer = ask(driver, ev.RankReplaceAsked, rank=1, incarnation=99)
    assert answer.code == "refused"
    assert "has no shard 99; its newest is 1" in answer.message
    assert not driver.engine.state.ranks[1].draining


def test_what_is_asked_of_a_removed_rank_names_the_way_back():
    driver = three(slots=6)
    ask(driver, ev.RankRemoveAsked, rank=1)
    for kind in (ev.RankReplaceAsked, ev.DrainAsked):
        assert "add it again first" in ask(driver, kind, rank=1).message
    ask(driver, ev.DrainAsked, rank=2)
    driver.lose(2)
    assert "undrain it" in ask(driver, ev.RankReplaceAsked, rank=2).message


def test_a_lost_rank_without_which_experts_are_missing_is_not_given_up():
    driver = two_ranks(slots=4)
    driver.wait(40.0)
    driver.lose(0)
    driver.lose(1)
    answer = ask(driver, ev.RankRemoveAsked, rank=0)
    assert answer.code == "refused"
    assert "add a rank first" in answer.message
    assert answer.missing_bytes > 0
    driver.join(0, 2)
    driver.join(1, 2)
    driver.wait(60.0)
    assert driver.table.missing() == ()


# -- replacement: drained ranks, budgets, operators who change their minds -------------------------


def test_a_drained_rank_that_dies_while_its_shard_is_replaced_gets_the_new_shard():
    driver = three()
    driver.hold = {ReleaseSlot}
    ask(driver, ev.DrainAsked, rank=1)
    ask(driver, ev.RankReplaceAsked, rank=1)
    driver.lose(1)
    assert starts(driver) == [(1, 1)]
    restart(driver, driver.engine.snapshot(), ())
    assert driver.engine.state.ranks[1].wants_shard
    driver.join(1, 2)
    assert driver.engine.state.ranks[1].drained_by == (ev.DrainCause.OPERATOR,)
    driver.lose(1)
    assert not driver.engine.state.ranks[1].wants_shard, "it was replaced once"
    assert starts(driver) == [(1, 1)]


def test_an_undrain_of_a_rank_that_nobody_drains_takes_nothing_from_it():
    driver = three(floor=2, slots=6)
    before = driver.keys()[1]
    ask(driver, ev.RankReplaceAsked, rank=1)
    assert driver.engine.state.ranks[1].status is RankStatus.LOST
    ask(driver, ev.UndrainAsked, rank=1)
    driver.join(1, 2)
    assert driver.keys()[1] == before


def test_a_replaced_rank_with_a_raised_budget_is_filled_once_it_has_its_slots_again():
    driver = three()
    ask(driver, ev.BudgetAsked, rank=1, budget_bytes=6 * 1000)
    assert driver.engine.state.ranks[1].num_slots == 6
    driver.hold = {SetRankSlots}
    state = driver.engine.state.ranks[1]
    owed = [s.key for s in state.slots]
    ask(driver, ev.RankReplaceAsked, rank=1)
    assert state.owed_keys == owed
    driver.join(1, 2)
    assert state.wanted_slots == 6
    assert "refill" not in driver.rules("started")
    driver.let_go()
    assert "refill" in driver.rules("started")
    assert state.owed_keys == []
    assert set(driver.keys()[1]) >= {key for key in owed if key >= 0}


def test_a_budget_may_change_while_a_shard_is_replaced():
    driver = three(slots=6)
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankReplaceAsked, rank=1)
    assert ask(driver, ev.BudgetAsked, rank=1, budget_bytes=4 * 1000).code == "ok"
    driver.let_go()
    driver.wait(20.0)
    assert driver.engine.state.ranks[1].status is RankStatus.LOST
    driver.join(1, 2)
    driver.wait(20.0)
    assert driver.engine.state.ranks[1].num_slots == 4
    driver.check_agreement()


def test_a_plan_that_fills_a_rank_on_its_way_out_is_not_applied():
    driver = three(slots=6)
    driver.close_window({0: 5000.0})
    driver.feed(ev.PlanAsked(at_s=0.0, request_id=900, policy="eplb"))
    plan_id = driver.answers[900].plan_id
    stored = next(s for s in driver.engine.state.stored if s.plan_id == plan_id)
    rank = min(s.slot.rank for s in stored.plan.steps if s.kind is StepKind.ADD)
    driver.hold = {ComputeTarget}
    ask(driver, ev.DrainAsked, rank=rank)
    answer = ask(driver, ev.ApplyAsked, plan_id=plan_id)
    assert answer.code == "refused"
    assert f"rank {rank} is being emptied since" in answer.message
    assert "compute the plan again" in answer.message


# -- what a restart must not break ----------------------------------------------------------------


def test_an_empty_rank_leaves_though_no_table_may_be_published_yet():
    driver = three()
    driver.hold = {ReleaseSlot}
    ask(driver, ev.RankRemoveAsked, rank=1)
    tables = restart(driver, driver.engine.snapshot(), driver.transitions, silent=[2])
    driver.wait(1.0)
    while driver.engine.state.ranks[1].status is not RankStatus.REMOVED:
        driver.wait(1.0)
        assert driver.now_s < 25.0, "rank 2 is waited for; rank 1 is not"
    assert ends(driver) == [(1, 1)]
    assert len(driver.tables) == tables, "rank 2 may still say what it holds"
    driver.join(2, shard=driver.shards[2])
    assert [entry.rank for entry in driver.table.ranks] == [0, 2]
    assert driver.table.missing() == ()


def test_a_rank_that_was_added_and_never_came_keeps_no_repair_waiting_after_a_restart():
    driver = three(floor=2, slots=6)
    add(driver)
    restart(driver, driver.engine.snapshot(), ())
    driver.lose(1)
    assert "repair" in driver.rules("started")
    assert driver.now_s < 1.0
