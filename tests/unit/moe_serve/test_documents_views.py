"""Moves, decisions, ranks and routers as objects; what an operator alone may see is left out."""

from moe_serve.documents.views import (
    COPIES_MAX,
    MOVE_KINDS,
    MOVE_STATES,
    move_view,
    rank_view,
    record_view,
    router_view,
)
from moe_serve.rpc import placement_pb2 as pb


def test_moves_are_words() -> None:
    move = pb.Move(
        move_id=2, plan_id="9-a", kind=pb.MOVE_KIND_EVICT, state=pb.MOVE_STATE_RUNNING, reason="why"
    )
    view = move_view(move)
    assert (view["kind"], view["state"], view["reason"]) == ("evict", "running", "why")
    assert (move_view(pb.Move())["kind"], move_view(pb.Move())["state"]) == ("unknown", "unknown")


def test_every_kind_and_state_of_the_proto_has_a_word() -> None:
    for words, kind in ((MOVE_KINDS, pb.MoveKind), (MOVE_STATES, pb.MoveState)):
        known = {number: name.rpartition("_")[2].lower() for name, number in kind.items() if number}
        assert words == known


def test_a_record_has_a_number_where_somebody_counts() -> None:
    record = pb.DecisionRecord(seq=5, rule="in_balance", outcome="kept", numbers={"b": 2, "a": 1})
    assert record_view(record, 12)["n"] == 12
    assert record_view(record, 0)["n"] == 0
    assert "n" not in record_view(record)
    assert list(record_view(record, 12)["numbers"]) == ["a", "b"]


def test_no_view_has_an_address() -> None:
    rank = pb.Rank(rank=1, address="10.0.0.1:7000", copies=[pb.RunningCopy()] * (COPIES_MAX + 1))
    assert "10.0.0.1" not in str(rank_view(rank))
    assert len(rank_view(rank)["copies"]) == COPIES_MAX
    assert rank_view(rank)["memory"] is None
    router = pb.Router(router="router-0", address="10.0.0.2:7000", applied_epoch=7)
    assert "10.0.0.2" not in str(router_view(router))
