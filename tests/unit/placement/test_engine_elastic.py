"""Ranks that are added, removed and replaced: what is refused, what happens once one is empty."""

import msgspec
import pytest

from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine
from placement.engine.state import RankStatus
from placement.messages import events as ev
from placement.messages.effects import EndRank, PublishTable, ReleaseSlot, ReplaceRank
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
