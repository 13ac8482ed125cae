"""The role under faults: waits, holds, the budget, hedges after p95, whom it shuns."""

import numpy as np
import pytest

from placement.roles.assignment import TableIndex
from placement.roles.calls import Cause, Ended
from placement.roles.latency import SAMPLES_LEAST
from placement.roles.router import RouterRole
from placement.roles.router_records import Dispatch, Failure, FailureKind, PlanJob, RouterRules
from placement.roles.router_waits import waits
from placement.routing import RoutingTable
from tests.unit.placement.test_roles_router import E, a_role, a_table, again, begin, serve

TWO_NODES = [[0, 2]] * E
"""Rank 0 is on node n0, rank 2 on n1."""


def retry(role: RouterRole, at_s: float) -> list[Dispatch]:
    (granted,) = role.take_retries(at_s)
    return again(role, granted.call_id, at_s=at_s)


def practise(
    role: RouterRole, *, calls: int = SAMPLES_LEAST, took_s: float = 0.01, from_s: float = 0.0
) -> None:
    """Calls of one pair, one after the other, that each take so long."""
    for n in range(calls):
        at_s = from_s + n * took_s
        (sent,) = begin(role, [[0]], key=10_000 + n, at_s=at_s)
        serve(role, sent, at_s=at_s + took_s)
        role.close_request(10_000 + n)


# ------------------------------------------------------------------------------- waits


@pytest.mark.parametrize(
    ("given", "timeout_s"),
    [
        pytest.param({"left_s": 1.0}, 0.5, id="half is left for another rank"),
        pytest.param({"left_s": 30.0}, 5.0, id="the usual time is not known yet"),
        pytest.param({"left_s": 30.0, "usual_s": 0.01}, 1.0, id="silence that lasted"),
        pytest.param({"left_s": 30.0, "usual_s": 0.3}, 3.0, id="ten times as long as usual"),
        pytest.param({"left_s": 30.0, "usual_s": 3.0}, 5.0, id="never longer than the rules say"),
        pytest.param({"left_s": 30.0, "usual_s": 0.01, "backlog_s": 2.0}, 3.0, id="work waits"),
        pytest.param({"left_s": 3.0, "backlog_s": 1.4}, 2.8, id="the queue is longer than half"),
        pytest.param({"left_s": 30.0, "usual_s": 0.01, "alone": True}, 5.0, id="no other rank"),
        pytest.param({"left_s": 1.0, "alone": True}, 1.0, id="no other rank, short"),
        pytest.param({"left_s": 30.0, "usual_s": 0.01, "last": True}, 30.0, id="the last attempt"),
        pytest.param({"left_s": 0.0}, 0.0, id="no time"),
    ],
)
def test_each_wait_leaves_time_where_another_rank_could_serve(
    given: dict[str, float], timeout_s: float
) -> None:
    usual = {"backlog_s": 0.0, "usual_s": None, "last": False, "alone": False}
    found_s, _ = waits(RouterRules(), **(usual | given))  # type: ignore[arg-type]
    assert found_s == pytest.approx(timeout_s)


def test_three_attempts_share_one_deadline() -> None:
    role = a_role(a_table([[0, 1, 2]] * E))
    at_s, ends_s = 0.0, []
    (sent,) = begin(role, [[0]], at_s=at_s)
    for _ in range(3):
        at_s += sent.timeout_s
        ends_s.append(at_s)
        step = role.lost(sent.sub_id, fault=True, at_s=at_s, why=Ended.SILENT)
        if step.failure is None:
            (sent,) = retry(role, at_s)
    # 30 s in all: 5 s, 5 s, and what is left.
    assert ends_s == pytest.approx([5.0, 10.0, 30.0])
    assert step.failure is not None
    assert step.failure.kind is FailureKind.ATTEMPTS
    assert "silent" in step.failure.detail


def test_silence_is_a_fault_only_where_it_lasted() -> None:
    role = a_role(a_table([[0]] * E), faults_to_eject=1)
    (sent,) = begin(role, [[0]], key=1)
    role.lost(sent.sub_id, fault=True, at_s=0.9, why=Ended.SILENT)
    assert role.suspects(1.0) == ()
    (sent,) = begin(role, [[0]], key=2)
    role.lost(sent.sub_id, fault=True, at_s=1.0, why=Ended.SILENT)
    assert [rank for rank, _, _ in role.suspects(1.0)] == [0]


def test_a_router_that_was_paused_blames_nobody() -> None:
    role = a_role(a_table([[0, 1]] * E), faults_to_eject=1)
    practise(role)
    for key, late_s, blamed in ((1, 0.2, 0), (2, 0.05, 1)):
        (sent,) = begin(role, [[0]], key=key, at_s=10.0 * key)
        at_s = 10.0 * key + sent.timeout_s + late_s
        role.lost(sent.sub_id, fault=True, at_s=at_s, why=Ended.SILENT)
        assert len(role.suspects(at_s)) == blamed


def test_what_is_usual_decides_how_long_is_long() -> None:
    role = a_role(a_table(TWO_NODES), faults_to_eject=1)
    practise(role)
    (sent,) = begin(role, [[0]], at_s=10.0)
    assert sent.timeout_s == 1.0
    role.lost(sent.sub_id, fault=True, at_s=10.19, why=Ended.SILENT)
    assert role.suspects(11.0) == ()
    (sent,) = begin(role, [[0]], key=2, at_s=20.0)
    role.lost(sent.sub_id, fault=True, at_s=20.21, why=Ended.SILENT)
    assert [rank for rank, _, _ in role.suspects(21.0)] == [sent.part.rank]


def test_busy_is_no_fault_whoever_says_it() -> None:
    role = a_role(a_table([[0, 1]] * E), faults_to_eject=1, max_attempts=2)
    (sent,) = begin(role, [[0]])
    role.lost(sent.sub_id, fault=False, at_s=0.0, why=Ended.REFUSED)
    (sent,) = retry(role, 0.0)
    step = serve(role, sent, [2])
    assert role.suspects(0.0) == ()
    assert role.counters["refused_pairs"] == 2
    assert role.counters["lost_pairs"] == 0
    assert step.failure is not None
    assert step.failure.kind is FailureKind.BUSY


def test_a_busy_rank_is_asked_last_for_a_moment() -> None:
    role = a_role(a_table([[0, 1]] * E))
    for key in (1, 2):
        for sent in begin(role, [[0], [0]], key=key):
            serve(role, sent, compute_s=0.001)
    (one, other) = sorted(begin(role, [[0], [0]], key=3), key=lambda d: d.part.rank)
    serve(role, one, [2], backlog_seq=99)
    serve(role, other, backlog_seq=99)
    soon = begin(role, [[0], [0]], key=4, at_s=0.01)
    assert {d.part.rank for d in soon} == {1}
    later = begin(role, [[0], [0]], key=5, at_s=1.0)
    assert {d.part.rank for d in later} == {0, 1}


# ------------------------------------------------------------------------------- holds


def held_call(role: RouterRole, *, key: int = 1, at_s: float = 0.0) -> int:
    """A call whose only rank went away under it."""
    (sent,) = begin(role, [[3]], key=key, at_s=at_s)
    role.connection(0, 1, "connection reset")
    step = role.lost(sent.sub_id, fault=True, at_s=at_s)
    assert step.failure is None
    assert step.held_call is not None
    return step.held_call


def test_a_call_that_no_reachable_rank_can_serve_is_held_until_one_can() -> None:
    role = a_role(a_table([[0, 1], [0], [0], [0]]))
    call_id = held_call(role)
    assert role.waiting
    for at_s in (0.1, 1.0, 20.0):
        assert role.take_retries(at_s) == ()
        assert role.overdue(at_s) == ()
    role.connection(1, 1, "reset")
    assert role.take_retries(21.0) == ()
    role.connection(0, 1, "")
    assert [r.call_id for r in role.take_retries(22.0)] == [call_id]
    (sent,) = again(role, call_id, at_s=22.0)
    assert serve(role, sent).finished
    assert not role.waiting


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        pytest.param(a_table([[1]] * E, epoch=2), None, id="another rank has it now"),
        pytest.param(a_table([[0]] * E, epoch=2, incarnation={0: 2}), None, id="a new life"),
        pytest.param(a_table([[]] * E, epoch=2), FailureKind.NO_REPLICA, id="nobody has it"),
    ],
)
def test_a_new_table_ends_a_hold(table: RoutingTable, kind: FailureKind | None) -> None:
    role = a_role(a_table([[0]] * E))
    call_id = held_call(role)
    role.accept(table)
    assert [r.call_id for r in role.take_retries(1.0)] == [call_id]
    planned = role.plan_cover(call_id, Cause.RETRY, 1.0)
    assert (planned.kind if isinstance(planned, Failure) else None) is kind


def test_a_hold_ends_before_the_deadline_and_names_layer_and_expert() -> None:
    role = a_role(a_table([[0]] * E))
    held_call(role)
    assert role.wake_at_s(1.0) == pytest.approx(1.05)
    assert role.wake_at_s(29.94) == pytest.approx(29.95)
    assert role.overdue(29.94) == ()
    (step,) = role.overdue(29.96)
    assert step.failure == Failure(
        FailureKind.UNREACHABLE,
        "layer 0: no rank with expert 3 could be reached (rank 0 lost)",
    )
    assert not role.waiting
    assert role.close_request(1) == ()
    assert role.open_calls == 0


def test_a_held_call_uses_no_attempt_up_while_it_waits() -> None:
    role = a_role(a_table([[0]] * E), max_attempts=1)
    call_id = held_call(role)
    role.connection(0, 1, "")
    assert [r.call_id for r in role.take_retries(1.0)] == [call_id]
    (sent,) = again(role, call_id, at_s=1.0)
    step = role.lost(sent.sub_id, fault=True, at_s=2.0)
    assert step.failure is not None
    assert step.failure.kind is FailureKind.ATTEMPTS


def test_what_was_held_returns_outside_the_share_but_not_all_at_once() -> None:
    role = a_role(a_table([[0]] * E), budget_least=0)
    for key in range(1, 31):
        held_call(role, key=key)
        role.connection(0, 1, "")
    role.connection(0, 1, "gone")
    role.connection(0, 1, "")
    granted = role.take_retries(1.0)
    assert [r.request_key for r in granted] == [1, 2, 3, 4, 5, 6], "a fifth of what is open"


def test_a_request_that_ends_while_it_is_held_leaves_nothing() -> None:
    role = a_role(a_table([[0]] * E))
    held_call(role)
    role.close_request(1)
    assert not role.waiting
    assert role.overdue(1e6) == ()
    assert role.wake_at_s(0.0) is None


# ------------------------------------------------------------------------------- the budget


def test_what_finds_no_room_in_the_budget_fails_after_its_patience() -> None:
    role = a_role(a_table([[0, 1]] * E), budget_least=1)
    for key in (1, 2):
        (sent,) = begin(role, [[0]], key=key)
        role.lost(sent.sub_id, fault=False, at_s=0.0)
    assert [r.request_key for r in role.take_retries(0.0)] == [1]
    assert role.take_retries(0.9) == ()
    assert role.overdue(0.9) == ()
    (step,) = role.overdue(1.0)
    assert step.request_key == 2
    assert step.failure is not None
    assert step.failure.kind is FailureKind.BUDGET
    assert "layer 0, expert 0" in step.failure.detail


def test_old_slots_cost_nothing_of_the_budget() -> None:
    role = a_role(a_table([[0, 1]] * E), budget_least=0)
    for key in range(1, 4):
        (sent,) = begin(role, [[0]], key=key)
        serve(role, sent, [Ended.STALE])
    assert [r.request_key for r in role.take_retries(0.0)] == [1, 2, 3]
    assert role.overdue(29.0) == ()
    (sent,) = begin(role, [[0]], key=4)
    role.lost(sent.sub_id, fault=False, at_s=0.0)
    assert role.take_retries(0.0) == (), "what is lost does"


def test_old_slots_are_no_excuse_for_what_was_lost_before() -> None:
    role = a_role(a_table([[0, 1]] * E), budget_least=1)
    (sent,) = begin(role, [[0]])
    role.lost(sent.sub_id, fault=False, at_s=0.0)
    (sent,) = retry(role, 0.0)
    serve(role, sent, [Ended.STALE])
    assert role.take_retries(0.0) == ()
    assert len(role.overdue(29.0)) == 1


def test_a_short_deadline_shortens_the_patience() -> None:
    role = a_role(a_table([[0, 1]] * E), budget_least=0)
    (sent,) = begin(role, [[0]], at_s=-29.5)  # half a second is left at 0
    role.lost(sent.sub_id, fault=False, at_s=0.0)
    assert role.take_retries(0.0) == ()
    assert role.overdue(0.44) == ()
    assert len(role.overdue(0.46)) == 1


def test_a_retry_waits_for_others_to_end_as_long_as_it_takes() -> None:
    role = a_role(a_table([[0, 1]] * E), retries_least=1)
    for key in (1, 2):
        (sent,) = begin(role, [[0]], key=key)
        role.lost(sent.sub_id, fault=False, at_s=0.0)
    (sent,) = retry(role, 0.0)
    for at_s in (1.0, 5.0, 20.0):
        assert role.take_retries(at_s) == ()
        assert role.overdue(at_s) == ()
    serve(role, sent, at_s=20.0)
    assert [r.request_key for r in role.take_retries(20.0)] == [2]


def test_room_that_comes_back_in_time_is_taken() -> None:
    role = a_role(a_table([[0, 1]] * E), budget_least=1)
    for key in (1, 2):
        (sent,) = begin(role, [[0]], key=key)
        role.lost(sent.sub_id, fault=False, at_s=0.0)
    retry(role, 0.0)
    assert role.take_retries(0.8) == ()
    for key in range(3, 20):
        begin(role, [[0]], key=key, at_s=0.9)
    assert [r.request_key for r in role.take_retries(0.9)] == [2]
    assert role.overdue(5.0) == ()


def test_a_storm_sends_a_fifth_more_and_ends_with_its_cause() -> None:
    role = a_role(a_table([[0, 1]] * E))
    sent_in_all = served = 0
    for key in range(1, 2001):
        at_s = key / 200
        storm = at_s < 8.0
        live = begin(role, [[0]], key=key, at_s=at_s)
        while live:
            sent_in_all += storm
            (one,) = live
            if storm and one.part.rank == 0:
                step = role.lost(one.sub_id, fault=False, at_s=at_s, why=Ended.FAILED)
            else:
                step = serve(role, one, at_s=at_s)
            served += step.finished
            live = [d for r in role.take_retries(at_s) for d in again(role, r.call_id, at_s=at_s)]
        for step in role.overdue(at_s):
            role.close_request(step.request_key)
    assert sent_in_all <= 1.2 * 1600
    assert served >= 0.6 * 1600 + 350, "after the storm everything is served"


# ------------------------------------------------------------------------------- hedges


def test_a_call_is_hedged_after_the_p95_of_calls_of_its_size() -> None:
    role = a_role(a_table(TWO_NODES))
    assert role.wake_at_s(0.0) is None
    practise(role, calls=200, took_s=0.01)
    (sent,) = begin(role, [[0]], at_s=5.0)
    assert role.wake_at_s(5.0) == pytest.approx(5.005, abs=1e-3)
    assert role.hedges_due(5.0099) == ()
    ((call_id, _),) = role.hedges_due(5.0115)
    (hedge,) = again(role, call_id, Cause.HEDGE, at_s=5.0115)
    assert {sent.part.rank, hedge.part.rank} == {0, 2}
    # Calls of another size have no p95 yet.
    begin(role, [[0]] * 40, key=2, at_s=6.0)
    assert role.hedges_due(9.0) == ()


def test_at_most_one_call_in_twenty_is_hedged() -> None:
    role = a_role(a_table(TWO_NODES), hedge_after_s=0.005)
    hedged = 0
    for key in range(1, 401):
        at_s = key / 100
        (sent,) = begin(role, [[0]], key=key, at_s=at_s)
        for call_id, _ in role.hedges_due(at_s + 0.006):
            (hedge,) = again(role, call_id, Cause.HEDGE, at_s=at_s + 0.006)
            serve(role, hedge, at_s=at_s + 0.007)
            hedged += 1
        serve(role, sent, at_s=at_s + 0.008)
        role.close_request(key)
    assert 15 <= hedged <= 20
    assert role.counters["hedged_pairs"] == hedged


def test_where_all_ranks_are_on_one_node_nothing_is_looked_at() -> None:
    role = a_role(a_table([[0, 1]] * E, num_ranks=2), hedge_after_s=0.1, hedge_share=1.0)
    begin(role, [[0]])
    assert role.hedges_due(1.0) == ()
    assert role.wake_at_s(0.0) is None


def test_a_call_that_is_hedged_or_waits_is_not_due() -> None:
    role = a_role(a_table(TWO_NODES), hedge_after_s=0.1, hedge_share=1.0)
    (slow,) = begin(role, [[0]], key=1)
    again(role, slow.call_id, Cause.HEDGE, at_s=0.5)  # hedged without being asked to
    role.close_request(1)
    (lost,) = begin(role, [[0]], key=2)
    role.lost(lost.sub_id, fault=False, at_s=0.1)  # waits for its retry
    (split, _) = begin(role, [[0], [0]], key=3)
    assert [key for _, key in role.hedges_due(1.0)] == [3, 3]
    assert split.request_key == 3


def test_hedging_can_be_switched_off() -> None:
    role = a_role(a_table(TWO_NODES), hedge_share=0.0)
    practise(role, calls=200)
    begin(role, [[0]], at_s=10.0)
    assert role.hedges_due(20.0) == ()
    assert role.wake_at_s(10.0) is None


def test_no_hedge_goes_to_a_rank_that_is_avoided() -> None:
    for shun in ("suspect", "told", "ejected"):
        role = a_role(a_table(TWO_NODES), hedge_after_s=0.1, hedge_share=1.0, faults_to_eject=1)
        (sent,) = begin(role, [[0]])
        other = 2 - sent.part.rank
        if shun == "suspect":
            role.connection(other, 1, "reset")
        elif shun == "told":
            role.told_suspects([other])
        else:
            sent_too = (begin(role, [[0]], key=key)[0] for key in range(2, 9))
            elsewhere = next(one for one in sent_too if one.part.rank == other)
            role.lost(elsewhere.sub_id, fault=True, at_s=0.0)
            role.close_request(elsewhere.request_key)
        assert role.plan_cover(sent.call_id, Cause.HEDGE, 1.0) is None, shun
        assert sent.call_id not in [call_id for call_id, _ in role.hedges_due(1.0)]


def test_slow_calls_that_a_hedge_answered_do_not_make_the_next_hedge_earlier() -> None:
    role = a_role(a_table(TWO_NODES), hedge_share=1.0)
    practise(role, calls=100, took_s=0.01)
    for n in range(400):
        at_s = 10.0 + n / 5
        (sent,) = begin(role, [[0]], key=n + 1, at_s=at_s)
        if n % 10:
            serve(role, sent, at_s=at_s + 0.01)
        else:
            # It would take a second, but a hedge answers soon after it is due.
            due_s = next(ms / 1000 for ms in range(1, 999) if role.hedges_due(at_s + ms / 1000))
            role.lost(sent.sub_id, fault=False, at_s=at_s + due_s + 0.01)
        role.close_request(n + 1)
    begin(role, [[0]], key=9999, at_s=90.0)
    # One in ten takes far longer than 10 ms, whoever answered for it.
    assert role.hedges_due(90.03) == ()
    assert len(role.hedges_due(91.0)) == 1


# ------------------------------------------------------------------------------- whom it shuns


def test_each_avoided_set_is_worse_than_the_one_before() -> None:
    index = TableIndex(a_table([[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]))
    ejected, failed, gone = frozenset({1}), frozenset({2}), frozenset({3})
    compiled = index.layer(0, ejected, failed, gone).compiled
    by_expert = [
        compiled.replica_rank[compiled.replica_ptr[e] : compiled.replica_ptr[e + 1]].tolist()
        for e in range(E)
    ]
    assert by_expert == [[0], [1], [2], [3]]
    assert index.layer(0, ejected, failed, gone).alone.all()
    assert index.layer(0).alone.tolist() == [False, False, False, True]
    assert index.layer(0, frozenset(), frozenset()) is index.layer(0)


def test_a_retry_prefers_an_ejected_rank_to_one_that_failed_and_both_to_one_that_is_gone() -> None:
    role = a_role(a_table([[0, 1, 2]] * E), faults_to_eject=1)
    role.connection(1, 1, "reset")
    (sent,) = begin(role, [[0]], key=1)
    ejected = sent.part.rank
    role.lost(sent.sub_id, fault=True, at_s=0.0)
    (second,) = retry(role, 0.0)
    assert {ejected, second.part.rank} == {0, 2}
    role.lost(second.sub_id, fault=False, at_s=0.0, why=Ended.REFUSED)
    (third,) = retry(role, 0.0)
    assert third.part.rank != 1


def test_the_controllers_suspects_are_used_last_and_are_no_news_to_it() -> None:
    role = a_role(a_table([[0, 1], [0], [0], [0]]))
    role.told_suspects((0, 77))
    sent = begin(role, [[0], [0], [0], [1]])
    assert {d.part.rank: d.part.num_pairs for d in sent} == {0: 1, 1: 3}
    assert role.suspects(0.0) == ()
    role.told_suspects(())
    assert {d.part.rank for d in begin(role, [[0], [0]], key=2)} == {0, 1}


def test_an_answer_proves_the_connection_and_one_of_another_life_nothing() -> None:
    role = a_role(a_table([[0]] * E, incarnation={0: 1}), faults_to_eject=1)
    (old,) = begin(role, [[0]], key=1)
    (older,) = begin(role, [[0]], key=2)
    (oldest,) = begin(role, [[0]], key=3)
    role.connection(0, 1, "reset")
    (sent,) = begin(role, [[0]], key=4)
    serve(role, sent)
    assert role.suspects(0.0) == ()
    practise(role)
    role.accept(a_table([[0]] * E, epoch=2, incarnation={0: 2}))
    serve(role, old)
    serve(role, older, [2])
    role.lost(oldest.sub_id, fault=True, at_s=5.0)
    assert role.suspects(5.0) == ()


def test_the_times_a_shard_was_ejected_are_counted() -> None:
    role = a_role(a_table([[0, 1]] * E), faults_to_eject=1)
    (sent,) = begin(role, [[0]])
    role.lost(sent.sub_id, fault=True, at_s=0.0)
    assert role.ejections == 1


def test_a_suspicion_that_is_lifted_releases_what_was_held() -> None:
    role = a_role(a_table([[0]] * E))
    role.told_suspects((0,))
    (sent,) = begin(role, [[0]])
    step = role.lost(sent.sub_id, fault=True, at_s=5.0, why=Ended.SILENT)
    assert step.held_call is not None
    assert role.take_retries(5.1) == ()
    role.told_suspects(())
    assert len(role.take_retries(5.2)) == 1


def test_an_ejected_shard_still_serves_what_nobody_else_has() -> None:
    role = a_role(a_table([[0, 1], [0], [0], [0]]), faults_to_eject=1)
    (sent,) = begin(role, [[1]])
    role.lost(sent.sub_id, fault=True, at_s=0.0)
    assert [rank for rank, _, _ in role.suspects(1.0)] == [0]
    parts = begin(role, [[0], [1]], key=2, at_s=1.0)
    assert {d.part.rank: d.part.pair_expert.tolist() for d in parts} == {0: [1], 1: [0]}


def test_a_trial_lets_an_ejected_shard_back_through_the_compute_path() -> None:
    role = a_role(a_table([[0, 1]] * E), faults_to_eject=1)
    (sent,) = begin(role, [[0]])
    there = sent.part.rank
    role.lost(sent.sub_id, fault=True, at_s=0.0)
    at_s, trials = 0.1, 0
    for key in range(2, 400):
        at_s += 0.1
        for one in begin(role, [[0], [0]], key=key, at_s=at_s):
            trials += one.part.rank == there and bool(role.suspects(at_s))
            serve(role, one, at_s=at_s + 0.01)
        if not role.suspects(at_s + 0.02):
            break
    assert trials == 3
    assert at_s < 15.0


def test_the_split_must_hold_every_pair_once() -> None:
    role = a_role(a_table([[0, 1]] * E))
    job = role.open_request(
        1, 0, np.array([[0, 1]], np.int32), np.ones((1, 2), np.uint8), at_s=0.0, deadline_at_s=1.0
    )
    assert isinstance(job, PlanJob)
    parts = job.run()
    with pytest.raises(AssertionError, match="every pair"):
        role.commit(job, parts + parts[:1], 0.0)
