"""Speed from counters, and the frame before a plan: order, restarts, what is not known."""

import pytest

from moe_serve.dashboard.before_plan import SKEW_S, BeforePlan, KeptFrame
from moe_serve.dashboard.frames import UNKNOWN
from moe_serve.dashboard.traffic import Traffic
from moe_serve.rpc import placement_pb2 as pb


def router(name: str, tokens: float, requests: float, **more: float) -> pb.Router:
    quantiles = {f"dispatch_{key}": value for key, value in more.items()}
    counters = {"tokens": tokens, "requests": requests}
    return pb.Router(router=name, incarnation=1, state="up", counters=counters, quantiles=quantiles)


def look(uptime_s: float, *routers: pb.Router, term: int = 1) -> pb.GetPlacementResponse:
    return pb.GetPlacementResponse(uptime_s=uptime_s, term=term, routers=routers)


def taken(*looks: pb.GetPlacementResponse) -> list[dict[str, float | None]]:
    traffic = Traffic()
    found = []
    for one in looks:
        traffic.see(one)
        found.append(traffic.take())
    return found


def test_rows_a_second_are_what_routers_count_between_two_looks() -> None:
    first = look(10.0, router("a", 100, 10), router("b", 0, 0))
    second = look(12.0, router("a", 500, 20), router("b", 200, 5))
    assert [one["rows_per_s"] for one in taken(first, second)] == [None, 300.0]


def test_quantiles_are_weighted_by_requests_and_the_worst_is_not_hidden() -> None:
    first = look(10.0, router("a", 0, 0), router("b", 0, 0))
    second = look(
        11.0,
        router("a", 1, 30, p50_s=0.010, p99_s=0.020),
        router("b", 1, 10, p50_s=0.030, p99_s=0.900),
    )
    speed = taken(first, second)[1]
    assert speed["p50_s"] == pytest.approx(0.015)
    assert speed["p99_s"] == 0.9


def test_without_requests_there_is_no_quantile_and_no_rows() -> None:
    idle = router("a", 5, 5, p50_s=0.01, p99_s=0.02)
    assert taken(look(1.0, idle), look(2.0, idle))[1] == {
        "p50_s": None,
        "p99_s": None,
        "rows_per_s": 0.0,
    }


def test_what_cannot_be_compared_is_not_known() -> None:
    assert Traffic().take() == UNKNOWN
    assert taken(look(1.0), look(2.0)) == [UNKNOWN, UNKNOWN], "no router has reported"
    again = taken(look(9.0, router("a", 9, 9)), look(1.0, router("a", 9, 9), term=2))
    assert again[1]["rows_per_s"] is None, "another controller counts its own seconds"
    still = look(9.0, router("a", 9, 9))
    assert taken(still, still)[1]["rows_per_s"] is None, "nothing was told meanwhile"


def test_a_router_that_was_not_seen_before_does_not_bring_its_past() -> None:
    late = router("b", 1e9, 1e6)
    first = look(1.0, router("a", 0, 0))
    assert taken(first, look(2.0, router("a", 10, 1), late))[1]["rows_per_s"] == 10.0
    reborn = router("a", 7, 1)
    reborn.incarnation = 2
    assert taken(look(1.0, router("a", 500, 5)), look(2.0, reborn))[1]["rows_per_s"] == 0.0


def frame(end_s: float, wall_s: float | None = None) -> KeptFrame:
    return KeptFrame(end_s, 1000.0 + end_s if wall_s is None else wall_s, int(end_s), b"{}")


def started(plan_id: str, at_s: float, wall_s: float | None = None) -> pb.DecisionRecord:
    return pb.DecisionRecord(
        at_s=at_s,
        wall_time_s=1000.0 + at_s if wall_s is None else wall_s,
        outcome="started",
        plan_id=plan_id,
        move_id=-1,
    )


def version(before: BeforePlan) -> int | None:
    return None if before.frame is None else before.frame.version


def test_the_newest_frame_that_closed_before_is_taken() -> None:
    before = BeforePlan()
    for end_s in (1.0, 2.0, 3.0):
        before.closed(frame(end_s))
    before.note(started("p", 2.5))
    assert (before.plan_id, version(before)) == ("p", 2)
    before.closed(frame(4.0))
    assert version(before) == 2
    before.note(started("p", 4.5))
    assert version(before) == 2, "a plan begins once"
    before.note(started("q", 4.5))
    assert version(before) == 4


def test_a_frame_that_arrives_after_the_decision_may_still_be_the_one() -> None:
    before = BeforePlan()
    before.closed(frame(1.0))
    before.note(started("p", 2.0))
    assert version(before) == 1
    before.closed(frame(2.0))
    assert version(before) == 2
    before.closed(frame(3.0))
    assert version(before) == 2


def test_an_old_plan_has_no_frame_of_today() -> None:
    before = BeforePlan()
    before.closed(frame(50.0))
    before.note(started("p", 10.0))
    assert (before.plan_id, version(before)) == ("p", None)
    # Of a life of the controller that counted further: its second means nothing now.
    other = BeforePlan()
    other.closed(frame(50.0))
    other.note(started("p", 5000.0, wall_s=1050.0 - SKEW_S - 1.0))
    assert version(other) is None


def test_a_controller_that_counts_anew_keeps_what_was_found() -> None:
    before = BeforePlan()
    before.closed(frame(90.0))
    before.note(started("p", 95.0))
    before.closed(frame(3.0, wall_s=1100.0))
    assert version(before) == 90
    before.note(started("q", 4.0, wall_s=1101.0))
    assert version(before) == 3


def test_only_the_start_of_a_plan_counts() -> None:
    before = BeforePlan()
    before.closed(frame(1.0))
    for change in ({"outcome": "kept"}, {"plan_id": ""}, {"move_id": 0}):
        record = started("p", 2.0)
        for name, value in change.items():
            setattr(record, name, value)
        before.note(record)
    assert before.plan_id == ""
