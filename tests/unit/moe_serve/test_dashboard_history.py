"""What the page remembers: order, limits, nothing twice."""

from moe_serve.dashboard import history
from moe_serve.dashboard.history import History
from moe_serve.rpc import placement_pb2 as pb


def record(seq: int, **more: object) -> pb.DecisionRecord:
    fields = {"seq": seq, "at_s": float(seq), "wall_time_s": 1000.0 + seq, "move_id": -1, **more}
    return pb.DecisionRecord(**fields)  # type: ignore[arg-type]


def moved(state: int, move_id: int = 0, **more: object) -> pb.GetPlacementResponse:
    move = pb.Move(plan_id="p", move_id=move_id, state=state, **more)  # type: ignore[arg-type]
    return pb.GetPlacementResponse(moves=[move])


def test_a_record_that_is_sent_again_is_known() -> None:
    kept = History()
    assert kept.add_record(record(1))
    assert not kept.add_record(record(1))
    assert [r["n"] for r in kept.records_after(0)] == [1]


def test_a_controller_that_counts_anew_is_not_mistaken_for_the_old_one() -> None:
    kept = History()
    kept.add_record(record(1))
    assert kept.add_record(record(1, wall_time_s=5000.0))
    assert [r["n"] for r in kept.records_after(0)] == [1, 2]


def test_records_are_bounded_and_cut_by_number() -> None:
    kept = History()
    for seq in range(1, history.RECORDS_MAX + 11):
        kept.add_record(record(seq))
    assert len(kept.records_after(0)) == history.RECORDS_MAX
    assert kept.records_after(0)[0]["n"] == 11
    assert [r["n"] for r in kept.records_after(kept.last_record - 2)] == [
        kept.last_record - 1,
        kept.last_record,
    ]
    assert kept.records_after(kept.last_record) == []
    assert kept.records_after(kept.last_record + 5) == []


def test_only_the_start_of_a_plan_is_a_mark() -> None:
    kept = History()
    kept.add_record(record(1, outcome="kept", rule="in_balance"))
    kept.add_record(record(2, outcome="started", plan_id="9-a", numbers={"moves": 3.0}))
    kept.add_record(record(3, outcome="started", plan_id="9-a", move_id=0))
    kept.add_record(record(4, outcome="done", plan_id="9-a"))
    assert [(m["plan_id"], m["moves"], m["wall_s"]) for m in kept.marks] == [("9-a", 3, 1002.0)]


def test_a_window_is_one_point() -> None:
    kept = History()
    load = pb.GetLoadResponse(window=3, end_s=12.0, imbalance=0.5, layer_imbalance=[0.2, 0.9])
    kept.add_point(load, 1012.0)
    kept.add_point(load, 1013.0)
    assert list(kept.points) == [
        {"wall_s": 1012.0, "window": 3, "imbalance": 0.5, "worst_layer": 0.9}
    ]


def test_a_client_gets_the_moves_that_changed_since_its_version() -> None:
    kept = History()
    kept.update_moves(moved(pb.MOVE_STATE_PLANNED))
    seen = kept.moves_version
    assert kept.moves_after(seen) == []
    kept.update_moves(moved(pb.MOVE_STATE_PLANNED))
    assert kept.moves_version == seen, "nothing changed"
    kept.update_moves(moved(pb.MOVE_STATE_DONE))
    assert [m["state"] for m in kept.moves_after(seen)] == ["done"]
    assert len(kept.moves_after(0)) == 1


def test_an_unfinished_move_that_is_no_longer_named_is_dropped() -> None:
    kept = History()
    kept.update_moves(moved(pb.MOVE_STATE_RUNNING))
    kept.update_moves(moved(pb.MOVE_STATE_DONE, move_id=1))
    assert [m["state"] for m in kept.moves_after(0)] == ["dropped", "done"]
    kept.update_moves(pb.GetPlacementResponse())
    assert [m["state"] for m in kept.moves_after(0)] == ["dropped", "done"]


def test_moves_are_bounded() -> None:
    kept = History()
    for n in range(history.MOVES_MAX + 5):
        kept.update_moves(moved(pb.MOVE_STATE_DONE, move_id=n))
    assert len(kept.moves_after(0)) == history.MOVES_MAX
    assert kept.moves_after(0)[0]["move_id"] == 5


def test_dates_of_a_move_stay_when_the_controllers_seconds_begin_anew() -> None:
    kept = History()
    kept.update_moves(moved(pb.MOVE_STATE_RUNNING, started_at_s=50.0))
    assert kept.moves_after(0)[0]["started_wall_s"] is None, "no date is known yet"
    kept.add_point(pb.GetLoadResponse(window=1, end_s=60.0), 1060.0)
    kept.update_moves(moved(pb.MOVE_STATE_RUNNING, started_at_s=50.0))
    assert kept.moves_after(0)[0]["started_wall_s"] == 1050.0
    kept.add_record(record(1, at_s=0.0, wall_time_s=9000.0))
    kept.update_moves(moved(pb.MOVE_STATE_RUNNING, started_at_s=50.0))
    assert kept.moves_after(0)[0]["started_wall_s"] == 1050.0
