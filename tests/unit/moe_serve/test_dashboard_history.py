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


def test_a_reconnect_brings_back_nothing_that_was_forgotten_for_want_of_room() -> None:
    kept = History()
    told = [record(seq) for seq in range(1, 2 * history.RECORDS_MAX + 1)]
    for one in told:
        assert kept.add_record(one)
    # The controller keeps more than the page, and tells all of it to each connection.
    assert [one.seq for one in told if kept.add_record(one)] == []
    assert kept.last_record == len(told)
    assert kept.add_record(record(len(told) + 1)), "what is new is new"


def test_with_full_memory_a_controller_that_counts_anew_is_heard() -> None:
    kept = History()
    for seq in range(1, history.RECORDS_MAX + 11):
        kept.add_record(record(seq))
    # It lost its journal: its numbers begin at 1, its dates go on.
    assert kept.add_record(record(1, wall_time_s=90_000.0))
    assert kept.add_record(record(2, wall_time_s=90_001.0))
    assert not kept.add_record(record(1, wall_time_s=90_000.0))


def test_with_full_memory_a_clock_that_was_set_back_hides_no_decision() -> None:
    kept = History()
    for seq in range(1, history.RECORDS_MAX + 11):
        kept.add_record(record(seq))
    assert kept.add_record(record(history.RECORDS_MAX + 11, wall_time_s=5.0))


def test_only_the_start_of_a_plan_is_a_mark() -> None:
    kept = History()
    kept.add_record(record(1, outcome="kept", rule="in_balance"))
    kept.add_record(record(2, outcome="started", plan_id="9-a", numbers={"moves": 3.0}))
    kept.add_record(record(3, outcome="started", plan_id="9-a", move_id=0))
    kept.add_record(record(4, outcome="done", plan_id="9-a"))
    assert [(m["plan_id"], m["moves"], m["wall_s"]) for m in kept.marks] == [("9-a", 3, 1002.0)]


def test_records_since_a_date_are_those_made_then_or_later_whatever_their_order() -> None:
    kept = History()
    for seq, wall_s in ((1, 1000.0), (2, 1060.0), (3, 1040.0), (4, 1061.0)):
        kept.add_record(record(seq, wall_time_s=wall_s))
    assert [r["n"] for r in kept.records_after(0, 1060.0)] == [2, 4]
    assert [r["n"] for r in kept.records_after(0, 1060.5)] == [4]
    assert [r["n"] for r in kept.records_after(0, 1040.0)] == [2, 3, 4]
    assert [r["n"] for r in kept.records_after(2, 1040.0)] == [3, 4]
    assert len(kept.records_after(0)) == 4


def test_a_window_is_one_point() -> None:
    kept = History()
    load = pb.GetLoadResponse(window=3, end_s=12.0, imbalance=0.5, layer_imbalance=[0.2, 0.9])
    speed = {"p50_s": 0.01, "p99_s": 0.02, "rows_per_s": 500.0}
    kept.add_point(load, 1012.0, speed)
    kept.add_point(load, 1013.0)
    assert list(kept.points) == [
        {"wall_s": 1012.0, "window": 3, "imbalance": 0.5, "worst_layer": 0.9, **speed}
    ]


def test_a_window_whose_speed_is_not_known_says_so() -> None:
    kept = History()
    kept.add_point(pb.GetLoadResponse(window=3, end_s=12.0), 1012.0)
    assert [kept.points[0][name] for name in ("p50_s", "p99_s", "rows_per_s")] == [None] * 3


def measured(plan_id: str = "p", gain: float = 0.25) -> pb.DecisionRecord:
    return record(
        9,
        rule="realised_gain",
        outcome="done",
        plan_id=plan_id,
        expected_gain_s_per_s=0.5,
        realised_gain_s_per_s=gain,
    )


def test_a_plans_measured_gain_reaches_its_mark_and_its_moves() -> None:
    kept = History()
    kept.add_record(record(2, outcome="started", plan_id="p"))
    kept.update_moves(moved(pb.MOVE_STATE_DONE))
    seen = kept.moves_version
    assert kept.moves_after(0)[0]["realised_gain_s_per_s"] is None
    assert kept.marks[0]["realised_gain_s_per_s"] is None
    kept.add_record(measured(plan_id="other"))
    assert kept.moves_version == seen, "another plan's gain changes nothing here"
    kept.add_record(record(10, rule="realised_gain", plan_id="p", realised_gain_s_per_s=0.125))
    assert [m["realised_gain_s_per_s"] for m in kept.moves_after(seen)] == [0.125]
    assert kept.marks[0]["realised_gain_s_per_s"] == 0.125
    # The controller names the move again: what was measured stays.
    version = kept.moves_version
    kept.update_moves(moved(pb.MOVE_STATE_DONE))
    assert kept.moves_version == version


def test_a_gain_that_was_told_before_its_moves_is_not_lost() -> None:
    kept = History()
    kept.add_record(measured())
    kept.add_record(record(2, outcome="started", plan_id="p"))
    kept.update_moves(moved(pb.MOVE_STATE_DONE))
    assert kept.moves_after(0)[0]["realised_gain_s_per_s"] == 0.25
    assert kept.moves_after(0)[0]["plan_expected_gain_s_per_s"] == 0.5
    assert kept.marks[0]["realised_gain_s_per_s"] == 0.25


def several(*moves: tuple[int, int]) -> pb.GetPlacementResponse:
    made = [
        pb.Move(plan_id="p", move_id=move_id, state=state, layer=move_id % 2, expert=7)  # type: ignore[arg-type]
        for move_id, state in moves
    ]
    return pb.GetPlacementResponse(moves=made)


def test_moves_come_a_page_at_a_time_and_none_is_left_out() -> None:
    kept = History()
    done, aborted = int(pb.MOVE_STATE_DONE), int(pb.MOVE_STATE_ABORTED)
    kept.update_moves(several(*((n, done) for n in range(5))))
    kept.update_moves(several((1, aborted)))
    found: list[tuple[int, str]] = []
    version = 0
    while True:
        page, version = kept.moves_page(version, 2)
        if not page:
            break
        assert len(page) <= 2
        found += [(m["move_id"], m["state"]) for m in page]
    assert found == [(0, "done"), (2, "done"), (3, "done"), (4, "done"), (1, "aborted")]
    assert version == kept.moves_version


def test_moves_since_a_date_are_those_that_began_or_ended_then_or_later() -> None:
    kept = History()
    kept.add_record(record(0, at_s=0.0, wall_time_s=1000.0))
    times = ((10.0, 0.0), (10.0, 60.0), (60.0, 0.0), (60.5, 61.0), (0.0, 0.0))
    moves = [
        pb.Move(plan_id="p", move_id=n, state=3, started_at_s=began, ended_at_s=ended)  # type: ignore[arg-type]
        for n, (began, ended) in enumerate(times)
    ]
    kept.update_moves(pb.GetPlacementResponse(moves=moves))

    def page(since_wall_s: float | None, after: int = 0, limit: int = 9) -> tuple[list[int], int]:
        found, version = kept.moves_page(after, limit, since_wall_s)
        return [m["move_id"] for m in found], version

    assert page(None)[0] == [0, 1, 2, 3, 4], "all, those without a date too"
    assert page(1010.0)[0] == [0, 1, 2, 3]
    assert page(1060.0)[0] == [1, 2, 3]
    assert page(1060.1)[0] == [3]
    assert page(1061.5) == ([], kept.moves_version)
    first, version = page(1060.0, limit=2)
    assert first == [1, 2]
    assert page(1060.0, after=version)[0] == [3]


def test_moves_that_have_not_ended_are_of_every_time_however_long_ago_their_plan_began() -> None:
    kept = History()
    kept.add_record(record(0, at_s=0.0, wall_time_s=1000.0))

    def page(states: tuple[int, ...]) -> list[int]:
        moves = [
            pb.Move(plan_id="p", move_id=n, state=state, started_at_s=10.0)  # type: ignore[arg-type]
            for n, state in enumerate(states)
        ]
        kept.update_moves(pb.GetPlacementResponse(moves=moves))
        found, _ = kept.moves_page(0, 9, since_wall_s=1100.0 - 60.0)  # begun 90 s ago
        return sorted(m["move_id"] for m in found)

    planned, running = int(pb.MOVE_STATE_PLANNED), int(pb.MOVE_STATE_RUNNING)
    done, aborted = int(pb.MOVE_STATE_DONE), int(pb.MOVE_STATE_ABORTED)
    assert page((planned, running, done, aborted)) == [0, 1]
    assert page((running, done, done, aborted)) == [0]
    kept.update_moves(pb.GetPlacementResponse())
    assert kept.moves_page(0, 9, since_wall_s=1040.0)[0] == [], "what was dropped is under way"


def test_moves_of_a_plan_and_of_an_expert_are_found() -> None:
    kept = History()
    kept.update_moves(several(*((n, int(pb.MOVE_STATE_DONE)) for n in range(4))))
    assert [m["move_id"] for m in kept.moves_of("p")] == [0, 1, 2, 3]
    assert kept.moves_of("q") == []
    assert [m["move_id"] for m in kept.moves_of_expert(1, 7, 1)] == [3]
    assert [m["move_id"] for m in kept.moves_of_expert(0, 7, 9)] == [0, 2]
    assert kept.moves_of_expert(0, 8, 9) == []


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


def test_what_was_before_the_controllers_present_life_has_no_date() -> None:
    kept = History()
    kept.add_record(record(1, at_s=60.0, wall_time_s=9000.0))
    running = moved(pb.MOVE_STATE_RUNNING, started_at_s=50.0)
    kept.update_moves(running, 55.0)
    assert kept.moves_after(0)[0]["started_wall_s"] is None
    kept.update_moves(moved(pb.MOVE_STATE_DONE, started_at_s=50.0, ended_at_s=58.0), 55.0)
    assert kept.moves_after(0)[0]["started_wall_s"] is None
    assert kept.moves_after(0)[0]["ended_wall_s"] == 8998.0
    # A page that saw it begin has its date, and keeps it.
    seen = History()
    seen.add_record(record(1, at_s=0.0, wall_time_s=1000.0))
    seen.update_moves(running, 10.0)
    seen.add_record(record(2, at_s=60.0, wall_time_s=9000.0))
    seen.update_moves(running, 55.0)
    assert seen.moves_after(0)[0]["started_wall_s"] == 1050.0


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
