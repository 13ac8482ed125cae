"""The router's rules, event by event: tables, calls, covers, budget, hedges, avoidance, backlog."""

from typing import Any

import numpy as np
import pytest

from placement.roles.assignment import COMPILED_MAX, Part, TableIndex, assign
from placement.roles.calls import Cause
from placement.roles.rank_state import RankBook
from placement.roles.router import RouterRole
from placement.roles.router_records import (
    Acceptance,
    Dispatch,
    Failure,
    FailureKind,
    PlanJob,
    RouterRules,
)
from placement.roles.shard import ShardSlots
from placement.routing import RankAddress, RoutingTable

E = 4


def a_table(
    hosts: list[list[int]],
    *,
    epoch: int = 1,
    term: int = 1,
    incarnation: dict[int, int] | None = None,
    version: str = "v1",
    layers: int = 1,
    num_ranks: int = 4,
) -> RoutingTable:
    """One entry of `hosts` a (layer, expert): the ranks that hold it. Two ranks a node."""
    ranks = [rank for one in hosts for rank in one]
    slots = np.arange(len(ranks), dtype=np.int32)
    return RoutingTable(
        term=term,
        epoch=epoch,
        model="m",
        weights_version=version,
        num_layers=layers,
        num_experts=len(hosts) // layers,
        replica_ptr=np.cumsum([0, *map(len, hosts)]).astype(np.int32),
        replica_rank=np.array(ranks, np.int32),
        replica_slot=slots,
        replica_tag=slots.astype(np.int64) + 100 * epoch,
        ranks=tuple(
            RankAddress(
                rank=r,
                node=f"n{r // 2}",
                address=f"inproc://{r}",
                incarnation=(incarnation or {}).get(r, 1),
            )
            for r in range(num_ranks)
        ),
    )


def a_role(table: RoutingTable | None = None, **rules: object) -> RouterRole:
    role = RouterRole(0, 1, E, RouterRules(**rules))  # type: ignore[arg-type]
    if table is not None:
        assert role.accept(table) is Acceptance.APPLIED
    return role


def begin(
    role: RouterRole, ids: list[list[int]], *, key: int = 1, at_s: float = 0.0
) -> list[Dispatch]:
    array = np.array(ids, np.int32)
    valid = np.ones(array.shape, np.uint8)
    job = role.open_request(key, 0, array, valid, at_s=at_s, deadline_at_s=at_s + 30.0)
    assert isinstance(job, PlanJob), job
    return list(role.commit(job, job.run(), at_s))


def again(
    role: RouterRole, call_id: int, cause: Cause = Cause.RETRY, at_s: float = 0.0
) -> list[Dispatch]:
    job = role.plan_cover(call_id, cause, at_s)
    assert isinstance(job, PlanJob), job
    return list(role.commit(job, job.run(), at_s))


def serve(
    role: RouterRole, sent: Dispatch, status: list[int] | None = None, **more: object
) -> object:
    rows = np.array(status if status is not None else [0] * len(sent.part.row_id), np.uint8)
    figures: dict[str, object] = {
        "backlog_s": 0.0,
        "backlog_seq": sent.sub_id,
        "compute_s": 0.0,
        "at_s": 0.0,
    }
    partial = np.full((int((rows == 0).sum()), 2), float(sent.sub_id))
    return role.answered(sent.sub_id, rows, partial, **(figures | more))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- tables


def test_only_newer_tables_are_used_and_an_epoch_goes_down_only_with_a_new_term() -> None:
    role = a_role()
    hosts = [[0]] * E
    assert (role.table, role.applied_epoch, role.quiesced_epoch) == (None, 0, 0)
    assert role.accept(a_table(hosts, epoch=5, term=2)) is Acceptance.APPLIED
    assert role.accept(a_table(hosts, epoch=5, term=2)) is Acceptance.KNOWN
    assert role.accept(a_table(hosts, epoch=4, term=2)) is Acceptance.KNOWN
    assert role.accept(a_table(hosts, epoch=9, term=1)) is Acceptance.STALE_TERM
    assert role.accept(a_table(hosts, epoch=4, term=3)) is Acceptance.APPLIED
    assert role.accept(a_table(hosts, epoch=6, term=2)) is Acceptance.STALE_TERM
    assert role.accept(a_table(hosts * 2, epoch=7, term=3, layers=2)) is Acceptance.MISFIT
    assert role.applied_epoch == 4
    assert role.highest_term == 3
    assert role.behind(3, 6)
    assert role.behind(4, 1)
    assert not role.behind(3, 4)
    assert not role.behind(4, -1), "a shard without a table has nothing to give"
    assert not role.behind(2, 9)


def test_shard_and_router_agree_on_which_table_is_newer() -> None:
    hosts = [[0]] * E
    shard = ShardSlots(rank=0, incarnation=1, num_slots=1, slot_bytes=1, weights_version="v1")
    role = a_role()
    for term, epoch in ((2, 5), (2, 4), (3, 4), (3, 3), (3, 9), (4, 1)):
        table = a_table(hosts, epoch=epoch, term=term)
        shard.install_table(table)
        role.accept(table)
        assert shard.table is not None
        assert role.table is not None
        assert role.table.order == shard.table.order
        assert not role.behind(*shard.table.order)


def test_nothing_of_a_new_term_is_quiesced_while_work_of_an_earlier_one_is_in_flight() -> None:
    role = a_role(a_table([[0]] * E, epoch=9))
    (sent,) = begin(role, [[0]])
    role.accept(a_table([[0]] * E, epoch=4, term=2))
    assert (role.applied_epoch, role.quiesced_epoch) == (4, 0)
    role.lost(sent.sub_id, fault=False, at_s=0.1)
    assert role.quiesced_epoch == 4


def test_quiesced_is_the_oldest_epoch_in_flight_late_sub_calls_included() -> None:
    role = a_role(a_table([[0]] * E, epoch=1))
    (first,) = begin(role, [[0]], key=1)
    role.accept(a_table([[0]] * E, epoch=2))
    (second,) = begin(role, [[0]], key=2)
    role.accept(a_table([[0]] * E, epoch=3))
    assert (role.applied_epoch, role.quiesced_epoch) == (3, 1)
    role.close_request(1)
    assert role.quiesced_epoch == 1
    role.lost(first.sub_id, fault=False, at_s=0.0)
    assert role.quiesced_epoch == 2
    serve(role, second)
    assert role.quiesced_epoch == 3


def test_a_split_that_still_runs_counts_as_in_flight() -> None:
    role = a_role(a_table([[0]] * E, epoch=1))
    ids = np.zeros((1, 1), np.int32)
    job = role.open_request(1, 0, ids, np.ones((1, 1), np.uint8), at_s=0.0, deadline_at_s=9.0)
    role.accept(a_table([[0]] * E, epoch=2))
    assert role.quiesced_epoch == 1
    assert isinstance(job, PlanJob)
    role.abandon(job)
    assert role.quiesced_epoch == 2


# ------------------------------------------------------------------------------- assignment


def test_the_example_of_assignment() -> None:
    index = TableIndex(a_table([[0, 1], [0], [1], [0]], num_ranks=2))
    ids = np.array([[0, 1], [0, 2]], np.int32)
    parts = assign(
        index.layer(0),
        ids,
        np.ones((2, 2), np.uint8),
        np.array([7, 9], np.int32),
        np.zeros(2, np.int64),
        0,
    )
    assert [(p.rank, p.row_id.tolist(), p.pair_row.tolist()) for p in parts] == [
        (0, [7], [0, 0]),
        (1, [9], [0, 0]),
    ]
    for part in parts:
        for expert, slot, tag in zip(part.pair_expert, part.pair_slot, part.pair_tag, strict=True):
            assert (part.rank, slot, tag) in index.table.replicas(0, int(expert))


def test_memory_bound_batches_level_experts_and_others_tokens() -> None:
    index = TableIndex(a_table([[0, 1], [0, 1], [2], [3]]))
    ids = np.array([[0], [0], [1], [1]], np.int32)

    def ranks_of(bound: int, expert: int) -> set[int]:
        parts: tuple[Part, ...] = assign(
            index.layer(0),
            ids,
            np.ones((4, 1), np.uint8),
            np.arange(4, dtype=np.int32),
            np.zeros(4, np.int64),
            0,
            bound,
        )
        return {p.rank for p in parts if expert in p.pair_expert}

    assert len(ranks_of(2, 0)) == len(ranks_of(2, 1)) == 1
    assert ranks_of(2, 0) != ranks_of(2, 1)


def test_avoided_ranks_are_left_alone_unless_they_hold_the_only_replica() -> None:
    index = TableIndex(a_table([[0, 1], [1], [1, 2], [3]]))
    replicas = index.layer(0, frozenset({1}))
    assert replicas.compiled.replica_rank.tolist() == [0, 1, 2, 3]
    assert index.layer(0, frozenset({1})) is replicas
    for rank in range(COMPILED_MAX):
        index.layer(0, frozenset({rank + 10}))
    assert index.layer(0, frozenset({1})) is not replicas


def test_ties_rotate_with_router_and_batch() -> None:
    role = a_role(a_table([[0, 1, 2, 3]] * E))
    ranks = [begin(role, [[0]], key=key)[0].part.rank for key in range(1, 9)]
    assert sorted(set(ranks)) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------- calls


def test_a_call_a_rank_and_the_request_ends_with_the_last() -> None:
    role = a_role(a_table([[0], [1], [2], [3]]))
    sent = begin(role, [[0, 1], [1, 2]])
    assert [d.part.rank for d in sent] == [0, 1, 2]
    assert [s.finished for s in (serve(role, d) for d in sent)] == [False, False, True]
    added = role.close_request(1)
    assert [(c.rank, c.row_id.tolist()) for c in added] == [(0, [0]), (1, [0, 1]), (2, [1])]
    assert role.counters["sent_pairs"] == role.counters["served_pairs"] == 4


def test_refused_rows_become_one_new_call_and_served_ones_are_added() -> None:
    role = a_role(a_table([[0]] * E, epoch=1))
    (first,) = begin(role, [[0], [1], [2]])
    assert not serve(role, first, [0, 1, 0]).finished
    role.accept(a_table([[1]] * E, epoch=2))
    (retry,) = role.take_retries()
    assert retry.wait_s == 0.0
    (second,) = again(role, retry.call_id)
    assert (second.cause, second.attempt, second.epoch) == (Cause.RETRY, 1, 2)
    assert (second.part.rank, second.part.row_id.tolist()) == (1, [1])
    assert serve(role, second).finished
    added = role.close_request(1)
    assert [(c.sub_id, c.row_id.tolist(), c.take.tolist()) for c in added] == [
        (first.sub_id, [0, 2], [0, 1]),
        (second.sub_id, [1], [0]),
    ]
    assert role.counters["stale_pairs"] == role.counters["retried_pairs"] == 1


def test_a_row_that_one_sub_call_of_a_cover_fails_is_added_by_none() -> None:
    role = a_role(a_table([[0]] * E, epoch=1))
    (first,) = begin(role, [[0, 1], [0, 1]])
    role.accept(a_table([[1], [2], [1], [1]], epoch=2))
    serve(role, first, [1, 1])
    left, right = again(role, role.take_retries()[0].call_id)
    assert (left.part.rank, right.part.rank) == (1, 2)
    serve(role, left)
    assert not serve(role, right, [0, 2]).finished
    (retry,) = role.take_retries()
    assert retry.wait_s > 0.0
    third = again(role, retry.call_id)
    # Row 1 goes again whole, also its pair that rank 1 has served: that one is dropped there.
    assert {(d.part.rank, tuple(d.part.row_id.tolist())) for d in third} == {(1, (1,)), (2, (1,))}
    assert serve(role, third[0]).finished is False
    assert serve(role, third[1]).finished
    rows = [(c.sub_id, c.row_id.tolist()) for c in role.close_request(1)]
    assert rows == [
        (left.sub_id, [0]),
        (third[0].sub_id, [1]),
        (right.sub_id, [0]),
        (third[1].sub_id, [1]),
    ]


def hedged_pair(role: RouterRole) -> tuple[Dispatch, Dispatch]:
    (first,) = begin(role, [[0], [0], [0]])
    ((call_id, key),) = role.hedges_due(1.0)
    assert (call_id, key) == (first.call_id, 1)
    (hedge,) = again(role, call_id, Cause.HEDGE, at_s=1.0)
    assert hedge.cause is Cause.HEDGE
    return first, hedge


HEDGING = {"hedge_after_s": 0.5, "hedge_share": 1.0, "memory_bound_pairs": 100}


def test_the_first_complete_cover_is_added_and_the_late_one_dropped() -> None:
    role = a_role(a_table([[0, 2]] * E), **HEDGING)
    first, hedge = hedged_pair(role)
    assert {first.part.rank, hedge.part.rank} == {0, 2}
    assert serve(role, hedge).finished
    assert not serve(role, first).finished
    assert role.dropped_replies == 1
    assert [c.sub_id for c in role.close_request(1)] == [hedge.sub_id]
    assert role.counters["hedged_pairs"] == 3


def test_a_partial_reply_waits_for_the_other_cover_and_is_dropped_if_that_completes() -> None:
    role = a_role(a_table([[0, 2]] * E), **HEDGING)
    first, hedge = hedged_pair(role)
    assert not serve(role, first, [0, 1, 0]).finished
    assert role.take_retries() == ()
    assert serve(role, hedge).finished
    assert [(c.sub_id, len(c.row_id)) for c in role.close_request(1)] == [(hedge.sub_id, 3)]
    assert role.dropped_replies == 1


def test_two_partial_covers_give_each_row_once_and_the_rest_goes_again() -> None:
    role = a_role(a_table([[0, 2]] * E), **HEDGING)
    first, hedge = hedged_pair(role)
    serve(role, first, [0, 1, 1])
    serve(role, hedge, [0, 0, 1])
    (retry,) = role.take_retries()
    (third,) = again(role, retry.call_id)
    assert third.part.row_id.tolist() == [2]
    assert serve(role, third).finished
    rows = [(c.sub_id, c.row_id.tolist(), c.take.tolist()) for c in role.close_request(1)]
    assert sorted(rows) == [
        (first.sub_id, [0], [0]),
        (hedge.sub_id, [1], [1]),
        (third.sub_id, [2], [0]),
    ]


def test_a_reply_whose_rows_another_cover_brought_first_counts_as_dropped() -> None:
    role = a_role(a_table([[0, 2]] * E), **HEDGING)
    first, hedge = hedged_pair(role)
    assert role.open_sub_calls == 2
    serve(role, first, [0, 0, 1])
    serve(role, hedge, [0, 0, 1])
    assert role.open_sub_calls == 0
    assert role.dropped_replies == 1
    (retry,) = role.take_retries()
    (third,) = again(role, retry.call_id)
    assert serve(role, third).finished
    rows = [(c.sub_id, c.row_id.tolist()) for c in role.close_request(1)]
    assert sorted(rows) == [(first.sub_id, [0, 1]), (third.sub_id, [2])]


def test_a_lost_cover_leaves_the_hedge_to_finish() -> None:
    role = a_role(a_table([[0, 2]] * E), **HEDGING)
    first, hedge = hedged_pair(role)
    role.lost(first.sub_id, fault=True, at_s=1.0)
    assert role.take_retries() == ()
    assert serve(role, hedge).finished


@pytest.mark.parametrize(
    "changed",
    [
        {"hosts": [[2, 0]] * E, "version": "v2"},
        {"hosts": [[]] + [[2, 0]] * (E - 1), "version": "v1"},
    ],
    ids=["weights", "replica"],
)
def test_a_hedge_that_nobody_can_serve_ends_nothing(changed: dict[str, Any]) -> None:
    role = a_role(a_table([[0, 2]] * E, epoch=1), **HEDGING)
    (first,) = begin(role, [[0]])
    assert role.accept(a_table(**changed, epoch=2)) is Acceptance.APPLIED
    ((call_id, _),) = role.hedges_due(1.0)
    assert role.plan_cover(call_id, Cause.HEDGE, 1.0) is None
    assert role.hedges_due(1.1) == (), "it is not looked at again"
    assert serve(role, first).finished


def test_what_others_answer_of_a_request_that_was_given_up_finishes_nothing() -> None:
    role = a_role(a_table([[0], [1]] + [[0]] * (E - 2)), max_attempts=1)
    lost, served = sorted(begin(role, [[0], [1]]), key=lambda sent: sent.part.rank)
    assert role.lost(lost.sub_id, fault=True, at_s=0.0).failure is not None
    step = serve(role, served)
    assert not step.finished
    assert len(role.close_request(1)) == 1


def test_nothing_is_hedged_before_a_p95_is_known_much_or_on_the_same_node() -> None:
    role = a_role(a_table([[0, 2]] * E))
    begin(role, [[0]])
    assert role.hedges_due(1e6) == ()
    role = a_role(a_table([[0, 1]] * E), hedge_after_s=0.5)
    for key in range(1, 41):
        begin(role, [[0]], key=key)
    assert role.hedges_due(0.4) == ()
    due = role.hedges_due(1.0)
    assert len(due) == 2
    assert role.plan_cover(due[0][0], Cause.HEDGE, 1.0) is None


def test_a_hedge_that_is_being_split_is_not_due_again() -> None:
    role = a_role(a_table([[0, 2]] * E), **HEDGING)
    begin(role, [[0]])
    ((call_id, _),) = role.hedges_due(1.0)
    assert role.plan_cover(call_id, Cause.HEDGE, 1.0) is not None
    assert role.hedges_due(1.1) == ()


# ------------------------------------------------------------------------------- retries


def test_at_most_three_attempts_and_the_failure_says_who_failed() -> None:
    role = a_role(a_table([[0]] * E))
    (sent,) = begin(role, [[0]])
    for _ in range(2):
        assert role.lost(sent.sub_id, fault=True, at_s=0.0).failure is None
        (sent,) = again(role, role.take_retries()[0].call_id)
    failure = role.lost(sent.sub_id, fault=True, at_s=0.0).failure
    assert failure == Failure(
        FailureKind.ATTEMPTS, "layer 0, expert 0: 1 rows failed 3 times (rank 0 lost)"
    )
    assert role.close_request(1) == ()
    assert role.open_calls == 0


def test_retries_stay_in_their_budget_and_wait_in_order() -> None:
    role = a_role(a_table([[0]] * E), retry_share=0.2, retries_least=3)
    sent = [begin(role, [[0]], key=key)[0] for key in range(1, 11)]
    for one in sent:
        role.lost(one.sub_id, fault=False, at_s=0.0)
    granted = role.take_retries()
    assert [r.request_key for r in granted] == [1, 2, 3]
    assert role.take_retries() == ()
    (first,) = again(role, granted[0].call_id)
    serve(role, first)
    assert [r.request_key for r in role.take_retries()] == [4]
    # A cancelled request gives its place back, and one that waits is forgotten.
    role.close_request(2)
    role.close_request(5)
    assert [r.request_key for r in role.take_retries()] == [6]


def test_the_budget_grows_with_what_is_open() -> None:
    role = a_role(a_table([[0]] * E))
    sent = [begin(role, [[0]], key=key)[0] for key in range(1, 51)]
    for one in sent[:20]:
        role.lost(one.sub_id, fault=False, at_s=0.0)
    assert len(role.take_retries()) == 10


def test_a_retry_avoids_who_failed_until_that_has_changed() -> None:
    role = a_role(a_table([[0, 1]] * E, epoch=1), memory_bound_pairs=100, budget_least=99)
    for key in range(1, 9):
        (first,) = begin(role, [[0]], key=key)
        there, other = first.part.rank, 1 - first.part.rank
        serve(role, first, [1])
        (second,) = again(role, role.take_retries()[0].call_id)
        assert second.part.rank == other
        serve(role, second, [2])
        # Who was busy still is, for this call; who was stale is asked again under a newer table.
        role.accept(a_table([[0, 1]] * E, epoch=key + 1))
        (third,) = again(role, role.take_retries()[0].call_id)
        assert third.part.rank == there
        serve(role, third)


def test_work_of_two_weight_versions_is_never_added_together() -> None:
    role = a_role(a_table([[0]] * E, epoch=1))
    (first,) = begin(role, [[0]])
    role.accept(a_table([[0]] * E, epoch=2, version="v2"))
    serve(role, first, [1])
    failure = role.plan_cover(role.take_retries()[0].call_id, Cause.RETRY, 0.0)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.WEIGHTS_CHANGED


def test_experts_without_a_replica_are_named() -> None:
    role = a_role()
    ids, valid = np.array([[0, 3]], np.int32), np.ones((1, 2), np.uint8)
    none = role.open_request(1, 0, ids, valid, at_s=0.0, deadline_at_s=1.0)
    assert isinstance(none, Failure)
    assert none.kind is FailureKind.NO_TABLE
    role.accept(a_table([[0], [], [], []], epoch=1))
    missing = role.open_request(1, 0, ids, valid, at_s=0.0, deadline_at_s=1.0)
    assert missing == Failure(FailureKind.NO_REPLICA, "layer 0 has no ready replica of expert 3")
    (sent,) = begin(role, [[0]], key=2)
    role.accept(a_table([[]] * E, epoch=2))
    serve(role, sent, [1])
    late = role.plan_cover(role.take_retries()[0].call_id, Cause.RETRY, 0.0)
    assert isinstance(late, Failure)
    assert late.kind is FailureKind.NO_REPLICA


def test_what_closed_meanwhile_is_not_sent() -> None:
    role = a_role(a_table([[0]] * E))
    ids = np.zeros((1, 1), np.int32)
    valid = np.ones((1, 1), np.uint8)
    job = role.open_request(1, 0, ids, valid, at_s=0.0, deadline_at_s=1.0)
    assert isinstance(job, PlanJob)
    role.close_request(1)
    assert role.commit(job, job.run(), 0.0) == ()
    (sent,) = begin(role, [[0], [1]], key=2)
    role.lost(sent.sub_id, fault=False, at_s=0.0)
    (retry,) = role.take_retries()
    planned = role.plan_cover(retry.call_id, Cause.RETRY, 0.0)
    assert isinstance(planned, PlanJob)
    again_planned = role.plan_cover(retry.call_id, Cause.RETRY, 0.0)
    assert isinstance(again_planned, PlanJob)
    (second,) = role.commit(planned, planned.run(), 0.0)
    serve(role, second)
    assert role.commit(again_planned, again_planned.run(), 0.0) == ()
    assert role.plan_cover(retry.call_id, Cause.RETRY, 0.0) is None
    assert role.close_request(99) == ()
    role.close_request(2)
    assert role.quiesced_epoch == 1


def test_a_sub_calls_time_is_the_deadline_or_the_backlog_and_a_margin() -> None:
    role = a_role(a_table([[0]] * E), attempt_timeout_s=5.0)
    (first,) = begin(role, [[0]])
    assert first.timeout_s == 5.0
    serve(role, first, backlog_s=7.0, at_s=1.0)
    (second,) = begin(role, [[0]], key=2, at_s=2.0)
    assert second.timeout_s == pytest.approx(11.0)
    serve(role, second, backlog_s=1000.0, at_s=2.0)
    (third,) = begin(role, [[0]], key=3, at_s=2.0)
    assert third.timeout_s == 30.0


# ------------------------------------------------------------------------------- ranks


def a_book(**changes: float) -> RankBook:
    settings: dict[str, float] = {"faults_to_eject": 3, "eject_s": 30.0, "eject_max_s": 300.0}
    book = RankBook(**(settings | {"eject_share": 0.1} | changes))  # type: ignore[arg-type]
    book.follow({0: 1, 1: 1, 2: 1, 3: 1})
    return book


def test_backlog_is_what_was_reported_plus_what_was_sent_aged() -> None:
    book = a_book()
    book.computed(0, 1, 100, 1.0)
    book.answered(0, 1, 5, 2.0, 10.0)
    assert book.backlog_s(0, 10.0) == 2.0
    assert book.backlog_s(0, 11.5) == 0.5
    book.sent(0, 100, 11.5)
    assert book.backlog_s(0, 11.5) == pytest.approx(1.5)
    # Idle time of the past does not pay for work sent after it.
    book.sent(0, 100, 100.0)
    assert book.backlog_s(0, 100.0) == pytest.approx(1.0)
    # An older report changes nothing, a newer one replaces all.
    book.answered(0, 1, 4, 50.0, 100.0)
    assert book.backlog_s(0, 100.0) == pytest.approx(1.0)
    book.answered(0, 1, 6, 0.25, 100.0)
    assert book.backlog_s(0, 100.0) == 0.25
    assert book.backlog_pairs(4, 100.0).tolist() == [25, 0, 0, 0]
    assert book.backlog_s(9, 100.0) == 0.0


def test_backlog_from_a_broken_shard_stays_in_range() -> None:
    book = a_book()
    book.computed(0, 1, 10, float("nan"))
    book.computed(0, 1, 0, 1.0)
    assert book.backlog_pairs(4, 0.0).tolist() == [0, 0, 0, 0]
    book.computed(1, 1, 1, 1e-9)
    for seq, figure in enumerate((float("nan"), float("inf"), -1.0, 1e300)):
        book.answered(0, 1, seq, figure, 0.0)
        assert 0 <= book.backlog_pairs(4, 0.0)[0] <= 1 << 40


def test_a_rank_with_work_waiting_gets_less() -> None:
    role = a_role(a_table([[0, 1]] * E))
    ids = [[0]] * 20
    for sent in begin(role, ids):
        waits = 1.0 if sent.part.rank == 0 else 0.0
        serve(role, sent, backlog_s=waits, compute_s=0.1 * sent.part.num_pairs)
    shares = {d.part.rank: d.part.num_pairs for d in begin(role, ids, key=2)}
    assert shares == {0: 5, 1: 15}


@pytest.mark.parametrize(("status", "waits_s"), [([0, 0], 2.0), ([0, 2], 4.0)])
def test_seconds_are_learnt_and_owed_for_reads_where_reads_take_longer(
    status: list[int], waits_s: float
) -> None:
    """Two pairs of one expert are 20 pairs of work; where one row was refused, half of that."""
    role = a_role(a_table([[0]] * E), memory_bound_pairs=20.0)
    (first,) = begin(role, [[0], [0]])
    serve(role, first, status, compute_s=2.0)
    (second,) = begin(role, [[0]], key=2)
    assert second.timeout_s == pytest.approx(5.0), "nothing waits yet"
    (third,) = begin(role, [[0]], key=3)
    assert third.timeout_s == pytest.approx(5.0 + waits_s)


def test_faults_in_a_row_eject_longer_each_time_and_a_served_call_forgives() -> None:
    book = a_book(eject_share=1.0)
    for _ in range(2):
        book.fault(0, 1, 0.0)
    book.served(0, 1, 0.01, 1.0, 0.0)
    for _ in range(2):
        book.fault(0, 1, 0.0)
    assert book.avoided(0.0) == frozenset()
    book.fault(0, 1, 0.0)
    assert book.avoided(29.9) == {0}
    assert book.avoided(30.1) == frozenset()
    for _ in range(3):
        book.fault(0, 1, 40.0)
    assert book.avoided(99.0) == {0}
    assert book.avoided(101.0) == frozenset()


def test_not_many_are_ejected_at_once_and_a_new_life_has_no_past() -> None:
    book = a_book()
    for rank in (0, 1):
        for _ in range(3):
            book.fault(rank, 1, 0.0)
    assert book.avoided(1.0) == {0}
    book.connection(2, 1, "reset")
    book.connection(3, 9, "of another life")
    assert book.suspects(1.0) == (
        (0, 1, "ejected after failures in a row"),
        (2, 1, "reset"),
    )
    book.follow({0: 2, 2: 1})
    assert book.avoided(1.0) == {2}
    book.connection(2, 1, "")
    assert book.avoided(1.0) == frozenset()
    book.fault(1, 1, 1.0)
    book.sent(1, 5, 1.0)
    book.answered(1, 1, 1, 5.0, 1.0)
    assert book.backlog_s(1, 1.0) == 0.0


def test_suspects_are_avoided_by_new_requests() -> None:
    role = a_role(a_table([[0, 1], [0], [0], [0]]))
    role.connection(0, 1, "connection reset")
    assert role.suspects(0.0) == ((0, 1, "connection reset"),)
    sent = begin(role, [[0], [0], [0], [0], [1]])
    assert {d.part.rank: d.part.num_pairs for d in sent} == {0: 1, 1: 4}
