"""What the page's API answers: moves, plans, causes, experts, errors; over sockets."""

import asyncio
import base64
import csv
import io
import json
import threading
from typing import Any

import grpc
import numpy as np
import pytest
from yarl import URL

from moe_serve.dashboard import reading
from moe_serve.dashboard.app import Page, load_assets
from moe_serve.dashboard.feed import Feed
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.dashboard.upstream import READERS_MAX, Calls, TooManyReaders
from moe_serve.documents.replicas import holders_of
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.page import WAIT_S, Rig, lone_page, rig
from tests.fakes.placement_service import FakePlacementService, Script, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAUGHTY = "<script>alert(1)</script>"


async def live(r: Rig, windows: int = 1) -> None:
    """Some windows that the page has taken, and a placement."""
    for _ in range(windows):
        r.service.close_window()
        await r.until("api/v1/frame", lambda f: f["window"] == r.service.window)
    await r.until("api/v1/placement", lambda p: p["experts"] == r.service.script.experts)


async def error_of(r: Rig, path: str, **more: Any) -> tuple[int, Any]:
    status, headers, body = await r.get(path, **more)
    assert headers["Content-Type"] == "application/json", body
    error = json.loads(body)["error"]
    assert set(error) >= {"code", "message", "next_step"}
    assert all(isinstance(text, str) and text for text in error.values())
    return status, error


def unpacked(text: str, dtype: str, *shape: int) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape)


def named(slots: dict[str, Any], ranks: int) -> list[list[tuple[int, str]]]:
    """(pair, state) of every slot."""
    pair = unpacked(slots["pair"], "<i4", ranks, slots["width"])
    state = unpacked(slots["state"], "u1", ranks, slots["width"])
    return [
        [(int(p), slots["states"][s]) for p, s in zip(*row, strict=True)]
        for row in zip(pair, state, strict=True)
    ]


async def test_moves_come_in_pages_with_what_their_plan_brought() -> None:
    async with rig() as r:
        await live(r)
        moves = r.service.begin_plan()
        r.service.tell()
        first = await r.until("api/v1/moves", lambda m: len(m["moves"]) == len(moves))
        assert {m["realised_gain_s_per_s"] for m in first["moves"]} == {None}
        page = await r.json("api/v1/moves?limit=1")
        assert len(page["moves"]) == 1
        rest = await r.json(f"api/v1/moves?after={page['version']}")
        assert [m["move_id"] for m in page["moves"] + rest["moves"]] == [
            m["move_id"] for m in first["moves"]
        ]
        _, headers, _ = await r.get("api/v1/moves")
        tag = {"If-None-Match": headers["ETag"]}
        assert (await r.get("api/v1/moves", headers=tag))[0] == 304
        r.service.finish_plan()
        r.service.realise(moves[0].plan_id, 0.125)
        r.service.tell()
        await r.until(
            f"api/v1/moves?after={first['version']}",
            lambda m: (
                [(x["state"], x["realised_gain_s_per_s"]) for x in m["moves"]]
                == [("done", 0.125)] * len(moves)
            ),
        )
        assert (await r.get("api/v1/moves", headers=tag))[0] == 200


async def test_moves_and_decisions_of_the_last_seconds_are_asked_for() -> None:
    async with rig() as r:
        r.service.began_s -= 3600.0  # the controller has run for an hour
        await live(r)
        old = r.service.begin_plan()
        r.service.finish_plan()
        for move in old:
            move.started_at_s -= 300.0
            move.ended_at_s -= 280.0
        for one in r.service.records:
            one.wall_time_s -= 300.0
            one.at_s -= 300.0
        new = r.service.begin_plan()
        for move in new:
            move.started_at_s -= 90.0  # of all times, as it is under way
        r.service.tell()
        both = len(old) + len(new)
        await r.until("api/v1/moves", lambda m: len(m["moves"]) == both)
        events = await r.until("api/v1/events", lambda e: len(e["records"]) == 3)

        async def moves(**query: int) -> list[str]:
            path = "api/v1/moves?" + "&".join(f"{name}={n}" for name, n in query.items())
            return [move["plan_id"] for move in (await r.json(path))["moves"]]

        assert await moves(since_s=60) == [new[0].plan_id] * len(new)
        assert await moves(since_s=0) == await moves(since_s=7 * 24 * 3600) == await moves()
        assert len(await moves(since_s=60, limit=1)) == 1
        assert await moves(since_s=260) == await moves(since_s=60)
        assert len(await moves(since_s=340)) == both
        newest = (await r.json("api/v1/moves"))["version"]
        assert await moves(since_s=60, after=newest) == []

        recent = await r.json("api/v1/events?since_s=60")
        assert recent["records"] == events["records"][2:]
        assert recent["last"] == events["last"]
        assert len((await r.json("api/v1/events?since_s=340"))["records"]) == 3
        assert len((await r.json("api/v1/events?since_s=340&limit=1&after=1"))["records"]) == 1
        for path in ("moves", "events"):
            for value in ("-1", "1.5", "", "60s", "1e3", str(7 * 24 * 3600 + 1)):
                status, error = await error_of(r, f"api/v1/{path}?since_s={value}")
                assert (status, error["field"]) == (400, "since_s"), value
                assert "from 0 to 604800" in error["message"]


@pytest.mark.parametrize("ahead_s", [90.0, -90.0])
async def test_dates_are_the_controllers_where_its_clock_differs(ahead_s: float) -> None:
    async with rig() as r:
        r.service.ahead_s = ahead_s
        r.service.record("in_balance", "kept")
        r.service.tell()
        await r.until("api/v1/events", lambda e: e["records"])
        await live(r)
        moves = r.service.begin_plan()
        r.service.finish_plan()
        r.service.tell()
        await r.until("api/v1/moves", lambda m: len(m["moves"]) == len(moves))
        await r.until("api/v1/events", lambda e: len(e["records"]) == 3)
        for path, name, count in (("moves", "moves", len(moves)), ("events", "records", 3)):
            for since_s, found in ((60, count), (0, count)):
                document = await r.json(f"api/v1/{path}?since_s={since_s}")
                assert len(document[name]) == found, (path, since_s)
        before = await r.json("api/v1/frame?before_plan=1")
        there_s = r.service.records[-1].wall_time_s
        status = await r.json("api/v1/status")
        history = await r.json("api/v1/history")
        dates = [before["wall_s"], status["wall_s"], status["since_wall_s"]]
        dates += [point["wall_s"] for point in history["points"]]
        dates += [mark["wall_s"] for mark in history["marks"]]
        assert dates == pytest.approx([there_s] * len(dates), abs=WAIT_S)


async def test_decisions_too_old_by_the_controllers_clock_are_left_out() -> None:
    async with rig() as r:
        r.service.ahead_s = -90.0
        r.service.record("in_balance", "kept")
        r.service.began_s -= 70.0
        r.service.record("regret_below_cost", "kept")
        r.service.records[0].wall_time_s -= 70.0
        await live(r)
        await r.until("api/v1/events", lambda e: len(e["records"]) == 2)
        recent = await r.json("api/v1/events?since_s=60")
        assert [record["rule"] for record in recent["records"]] == ["regret_below_cost"]


async def test_a_move_of_the_controllers_last_life_has_no_date_that_would_be_wrong() -> None:
    async with rig() as r:
        # Its seconds go on at 500, and do not tell how long it was down.
        r.service.began_s -= 500.0
        r.service.earlier_s = 500.0
        r.service.close_window()
        old, *_, new = r.service.begin_plan()
        old.started_at_s = 400.0
        await live(r)
        moves = await r.until("api/v1/moves", lambda m: m["moves"][-1]["started_wall_s"])
        dated = {one["move_id"]: one["started_wall_s"] for one in moves["moves"]}
        assert dated[old.move_id] is None
        now_s = (await r.json("api/v1/status"))["wall_s"]
        assert dated[new.move_id] == pytest.approx(now_s, abs=WAIT_S)


async def test_a_plan_is_drawn_before_and_after_without_arithmetic() -> None:
    async with rig() as r:
        assert (await r.json("api/v1/plan"))["plan"] is None
        await live(r)
        held = {
            rank: {(s["layer"], s["expert"]) for s in slots if s["state"] == "LISTED"}
            for rank, slots in enumerate(r.service.slots)
        }
        moves = r.service.begin_plan()
        r.service.tell()
        await r.until("api/v1/moves", lambda m: len(m["moves"]) == len(moves))
        plan = await r.until("api/v1/plan", lambda p: p["before"] is not None)
        assert plan["plan"]["plan_id"] == moves[0].plan_id
        assert plan["plan"]["state"] == "running"
        assert plan["cross_node_bytes"] == sum(m.copy_bytes for m in moves if m.cross_node)
        experts, ranks = r.service.script.experts, r.service.script.ranks
        before = named(plan["before"]["slots"], ranks)
        for rank, row in enumerate(before):
            assert {divmod(p, experts) for p, _ in row if p >= 0} == held[rank]
        # What the fake does when the plan ends is the other account of the same thing.
        r.service.finish_plan()
        after = named(plan["after"]["slots"], ranks)
        for rank, slots in enumerate(r.service.slots):
            now = {(s["layer"], s["expert"]) for s in slots if s["state"] == "LISTED"}
            assert {divmod(p, experts) for p, _ in after[rank] if p >= 0} == now
            assert {divmod(p, experts) for p, s in after[rank] if s == "COMES"} == now - held[rank]
            left = {divmod(p, experts) for p, s in before[rank] if s == "LEAVES"}
            assert left == held[rank] - now
        counts = unpacked(plan["replicas_after"], "u1", r.service.script.layers, experts)
        for layer in range(r.service.script.layers):
            for expert in range(experts):
                assert counts[layer, expert] == len(r.service.holders(layer, expert))
        r.service.tell()
        done = await r.until(
            f"api/v1/plan?id={moves[0].plan_id}", lambda p: p["plan"]["state"] == "done"
        )
        assert done["before"] == plan["before"], "the beginning is remembered"
        assert (done["measured_before"], done["balancedness_after"]) == (0.71, 0.92)
        assert done["plan"]["records"][0]["outcome"] == "started"
        status, error = await error_of(r, "api/v1/plan?id=nobody")
        assert (status, error["code"]) == (404, "not_found")


async def test_a_plan_that_the_controller_cannot_tell_is_what_the_page_saw() -> None:
    async with rig() as r:
        r.service.refusals["ExplainPlan"] = (grpc.StatusCode.UNIMPLEMENTED, "no such method")
        await live(r)
        status, error = await error_of(r, "api/v1/plan")
        assert (status, error["code"]) == (503, "not_served")
        moves = r.service.begin_plan()
        r.service.tell()
        await r.until("api/v1/moves", lambda m: len(m["moves"]) == len(moves))
        plan = await r.until("api/v1/plan", lambda p: p["before"] is not None)
        assert [m["move_id"] for m in plan["plan"]["moves"]] == [m.move_id for m in moves]
        assert plan["balancedness_before"] is None, "not known is not 0"


async def test_a_plan_of_which_only_records_are_left_has_no_made_up_balance() -> None:
    async with rig(answers_kept_s=0.0) as r:
        await live(r)
        moves = r.service.begin_plan()
        plan_id = moves[0].plan_id
        r.service.tell()
        await r.until("api/v1/moves", lambda m: len(m["moves"]) == len(moves))
        r.service.forgotten.add(plan_id)
        seen = await r.json(f"api/v1/plan?id={plan_id}")
        assert len(seen["plan"]["moves"]) == len(moves), "the page saw them itself"
        assert seen["balancedness_before"] is None
        assert [one["outcome"] for one in seen["plan"]["records"]] == ["started"]
        r.service.record("regret_reached", "started", plan_id="long-ago")
        r.service.forgotten.add("long-ago")
        old = await r.json("api/v1/plan?id=long-ago")
        assert (old["plan"]["moves"], old["balancedness_after"], old["before"]) == ([], None, None)


async def test_fifty_askers_cost_the_controller_one_question() -> None:
    async with rig(answers_kept_s=1e6) as r:
        r.service.delay_s["Explain"] = 0.05
        answers = await asyncio.gather(*(r.json("api/v1/explain") for _ in range(50)))
        assert {answer["verdict"] for answer in answers} == {"nothing_slow"}
        assert r.service.calls.count("Explain") == 1
        await r.json("api/v1/explain?seconds=30")
        assert r.service.calls.count("Explain") == 2, "another question is another"


async def test_readers_questions_to_the_controller_are_bounded() -> None:
    async with rig(answers_kept_s=0.0) as r:
        r.service.delay_s["Explain"] = 1.0
        calls = Calls(r.chosen)
        held = [asyncio.create_task(calls.explain(float(n))) for n in range(READERS_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyReaders):
            await calls.explain(9.0)
        await asyncio.gather(*held)
        await calls.explain(9.0)
        await calls.close()
        answers = await asyncio.gather(*(r.get(f"api/v1/explain?seconds={n}") for n in range(40)))
        refused = [json.loads(body)["error"] for status, _, body in answers if status == 503]
        assert {error["code"] for error in refused} == {"too_many_questions"}


async def test_a_reconnect_that_sends_the_newest_window_again_adds_none() -> None:
    async with rig() as r:
        await live(r, 2)
        before = await r.json("api/v1/history")
        await r.server.stop(0)
        await r.until("api/v1/status", lambda s: s["connection"] == "away")
        r.server, _ = await serve(r.service, int(r.address.partition(":")[2]))
        watched = r.service.calls.count("WatchLoad")
        await r.until(
            "api/v1/status",
            lambda s: (
                s["connection"] == "live" and r.service.calls.count("WatchLoad") > watched - 1
            ),
        )
        await live(r)
        after = await r.json("api/v1/history")
        assert [p["window"] for p in after["points"]] == [
            *[p["window"] for p in before["points"]],
            r.service.window,
        ]
        expert = await r.json("api/v1/expert?layer=0&expert=0")
        assert len(expert["history"]["wall_s"]) == len(after["points"])


async def test_causes_come_as_the_controller_tells_them() -> None:
    async with rig(answers_kept_s=0.0) as r:
        r.service.explanation = pb.ExplainResponse(
            verdict="slow",
            causes=[
                pb.Cause(
                    kind="hot_expert",
                    share=0.4,
                    text=NAUGHTY,
                    next_step="moe-serve plan",
                    rank=-1,
                    layer=2,
                    expert=17,
                    evidence={"b": 2.0, "a": 1.0},
                )
            ],
            newest=pb.DecisionRecord(seq=7, rule="paused", outcome="kept", refused=["x: no"]),
        )
        status, headers, body = await r.get("api/v1/explain")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert headers["X-Content-Type-Options"] == "nosniff", "JSON is never read as a page"
        answer = json.loads(body)
        assert answer["causes"][0]["expert"] == 17
        assert list(answer["causes"][0]["evidence"]) == ["a", "b"]
        assert answer["causes"][0]["text"] == NAUGHTY
        assert answer["newest"]["refused"] == ["x: no"]
        r.service.refusals["Explain"] = (grpc.StatusCode.INVALID_ARGUMENT, "seconds: too long")
        assert (await error_of(r, "api/v1/explain"))[0] == 400
        r.service.refusals["Explain"] = (grpc.StatusCode.UNAUTHENTICATED, "no")
        status, error = await error_of(r, "api/v1/explain")
        assert (status, error["code"]) == (503, "page_token_refused")


async def test_a_controller_that_is_away_is_a_cause_of_its_own() -> None:
    async with rig(answers_kept_s=0.0) as r:
        assert (await r.json("api/v1/explain"))["verdict"] == "nothing_slow"
        await r.server.stop(0)
        answer = await r.until("api/v1/explain", lambda e: e["verdict"] == "slow")
        (cause,) = answer["causes"]
        assert cause["kind"] == "controller_away"
        assert cause["text"]
        assert cause["next_step"]
        assert answer["stages"] == [], "old figures are not shown as new"
        assert answer["last_answer_age_s"] >= 0.0


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_a_controller_that_ends_during_the_question_is_away(code: grpc.StatusCode) -> None:
    async with rig() as r:
        r.service.refusals["Explain"] = (code, "")
        answer = await r.json("api/v1/explain")
        assert [cause["kind"] for cause in answer["causes"]] == ["controller_away"]


async def test_a_controller_that_goes_during_the_question_is_away() -> None:
    async with rig() as r:
        r.service.delay_s["Explain"] = 2 * WAIT_S
        asked = asyncio.create_task(r.json("api/v1/explain"))
        async with asyncio.timeout(WAIT_S):
            while True:
                if "Explain" in r.service.calls:
                    break
                await asyncio.sleep(0)
        await r.server.stop(0)
        assert (await asked)["causes"][0]["kind"] == "controller_away"


async def test_a_controller_that_never_answered_has_no_last_answer() -> None:
    async with lone_page(connect_timeout_s=0.2) as (_, port):
        import aiohttp

        async with (
            aiohttp.ClientSession() as client,
            asyncio.timeout(WAIT_S),
            client.get(f"http://127.0.0.1:{port}/api/v1/explain") as answer,
        ):
            document = await answer.json()
        assert document["causes"][0]["kind"] == "controller_away"
        assert document["last_answer_age_s"] is None


async def test_the_frame_before_the_newest_plan_is_kept() -> None:
    async with rig() as r:
        await live(r, 2)
        status, error = await error_of(r, "api/v1/frame?before_plan=1")
        assert (status, error["code"]) == (404, "no_plan")
        (move, *_) = r.service.begin_plan()
        r.service.tell()
        before = await r.until("api/v1/frame?before_plan=1", lambda f: f["before_plan"])
        assert (before["window"], before["before_plan"]) == (2, move.plan_id)
        await live(r, 2)
        _, headers, body = await r.get("api/v1/frame?before_plan=1")
        assert json.loads(body)["window"] == 2, "later windows are not before it"
        tag = {"If-None-Match": headers["ETag"]}
        assert (await r.get("api/v1/frame?before_plan=1", headers=tag))[0] == 304
        assert (await r.get("api/v1/frame", headers=tag))[0] == 200


async def test_two_plans_after_one_window_have_two_tags() -> None:
    async with rig() as r:
        await live(r, 2)
        tags = []
        for plan_id in ("7-a", "7-b"):
            r.service.record("regret_reached", "started", plan_id=plan_id)
            r.service.tell()
            await r.until(
                "api/v1/frame?before_plan=1", lambda f, wanted=plan_id: f["before_plan"] == wanted
            )
            tags.append((await r.get("api/v1/frame?before_plan=1"))[1]["ETag"])
        status, _, body = await r.get(
            "api/v1/frame?before_plan=1", headers={"If-None-Match": tags[0]}
        )
        assert (status, json.loads(body)["before_plan"]) == (200, "7-b")
        assert tags[0] != tags[1]


async def test_windows_know_how_fast_requests_were() -> None:
    async with rig() as r:
        await live(r, 3)
        past = await r.until("api/v1/history", lambda h: len(h["points"]) == 3)
        assert past["points"][-1]["rows_per_s"] is not None
        assert past["points"][0]["rows_per_s"] is None, "one look is no difference"
        frame = await r.json("api/v1/frame")
        assert frame["rows_per_s"] == past["points"][-1]["rows_per_s"]


async def test_ranks_tell_their_memory_and_what_is_copied() -> None:
    async with rig() as r:
        await live(r)
        assert r.service.begin_plan()
        r.service.tell()
        document = await r.until(
            "api/v1/placement", lambda p: any(rank["copies"] for rank in p["ranks"])
        )
        assert document["ranks"][0]["memory"]["slab_bytes"] > 0
        copy = next(c for rank in document["ranks"] for c in rank["copies"])
        assert copy["done_bytes"] < copy["total_bytes"]


@pytest.mark.parametrize("phase", ["all", "prefill", "decode"])
async def test_every_expert_is_a_row(phase: str) -> None:
    async with rig() as r:
        status, error = await error_of(r, "api/v1/experts.csv")
        assert (status, error["code"]) == (503, "nothing_yet")
        await live(r)
        status, headers, body = await r.get(f"api/v1/experts.csv?phase={phase}")
        assert (status, headers["Content-Type"]) == (200, "text/csv; charset=utf-8")
        rows = list(csv.DictReader(io.StringIO(body.decode())))
        demand = r.service.demand.sum(axis=0)
        if phase != "all":
            demand = r.service.demand[["prefill", "decode"].index(phase)]
        assert len(rows) == demand.size
        for row in rows:
            layer, expert = int(row["layer"]), int(row["expert"])
            assert int(row["pairs"]) == demand[layer, expert]
            assert float(row["share"]) == pytest.approx(
                demand[layer, expert] / demand[layer].sum(), abs=1e-8
            )
            holders = r.service.holders(layer, expert)
            assert row["ranks"].split() == [str(rank) for rank in holders]
            assert int(row["replicas"]) == len(holders)
        for layer in range(r.service.script.layers):
            ranked = sorted(
                (int(row["rank_in_layer"]), -int(row["pairs"]), int(row["expert"]))
                for row in rows
                if int(row["layer"]) == layer
            )
            assert [n for n, _, _ in ranked] == list(range(1, r.service.script.experts + 1))
            assert ranked == sorted(ranked, key=lambda one: one[1:])
        tag = {"If-None-Match": headers["ETag"]}
        assert (await r.get(f"api/v1/experts.csv?phase={phase}", headers=tag))[0] == 304


async def test_one_expert_tells_where_it_is_and_how_hot_it_was() -> None:
    async with rig() as r:
        await live(r, 3)
        layer = 1
        demand = r.service.demand.sum(axis=0)[layer]
        hot = int(np.argmax(demand))
        panel = await r.json(f"api/v1/expert?layer={layer}&expert={hot}")
        assert (panel["rank_in_layer"], panel["pairs"]) == (1, int(demand[hot]))
        assert panel["share"] == pytest.approx(demand[hot] / demand.sum())
        assert sum(panel["by_phase"].values()) == panel["pairs"]
        assert [one["rank"] for one in panel["replicas"]] == r.service.holders(layer, hot)
        assert panel["replicas"][0]["node"] == f"node-{panel['replicas'][0]['rank'] // 2}"
        assert len(panel["history"]["wall_s"]) == len(panel["history"]["pairs_per_s"]) == 3
        rate = demand[hot] / r.service.script.window_s
        assert panel["history"]["pairs_per_s"][-1] == pytest.approx(rate, rel=0.01)
        assert panel["moves"] == []
        (move, *_) = r.service.begin_plan()
        r.service.tell()
        where = f"api/v1/expert?layer={move.layer}&expert={move.expert}"
        moved = await r.until(where, lambda p: p["moves"])
        assert moved["moves"][0]["reason"] == move.reason
        for path, field in [("layer=4&expert=0", "layer"), ("layer=0&expert=32", "expert")]:
            status, error = await error_of(r, f"api/v1/expert?{path}")
            assert (status, error["field"]) == (404, field)


async def test_an_expert_is_told_of_one_window_however_long_its_holders_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, go = threading.Event(), threading.Event()

    def slow(placement: pb.GetPlacementResponse) -> Any:
        asked.set()
        assert go.wait(WAIT_S)
        return holders_of(placement)

    monkeypatch.setattr(reading, "holders_of", slow)
    async with rig() as r:

        async def meanwhile(service: FakePlacementService) -> tuple[int, Any, Any]:
            """A question, a window of `service` before its answer, and the frame after."""
            asked.clear()
            go.clear()
            panel = asyncio.create_task(r.get("api/v1/expert?layer=3&expert=31"))
            assert await asyncio.to_thread(asked.wait, WAIT_S)
            service.window = r.service.window
            service.close_window()
            r.service.window, r.service.load = service.window, service.load
            r.service.load_closed_s = service.load_closed_s
            r.service.tell()
            frame = await r.until("api/v1/frame", lambda f: f["window"] == service.window)
            go.set()
            status, _, body = await panel
            return status, json.loads(body), frame

        await live(r)
        status, panel, frame = await meanwhile(r.service)
        assert (status, panel["window"], panel["wall_s"]) == (200, 2, frame["wall_s"])
        assert panel["history"]["wall_s"][-1] == panel["wall_s"]
        assert len(panel["history"]["wall_s"]) == 2
        r.service.begin_plan()
        r.service.tell()
        await r.until("api/v1/moves", lambda m: m["moves"])
        status, answer, _ = await meanwhile(FakePlacementService(Script(layers=2, experts=4)))
        assert (status, answer["error"]["field"]) == (404, "layer"), "the model is another"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("moves?after=-1", "after"),
        ("moves?after=x", "after"),
        ("moves?after=" + "9" * 40, "after"),
        ("moves?after=%D9%A1", "after"),
        ("moves?limit=0", "limit"),
        ("moves?limit=401", "limit"),
        ("moves?limit=1&limit=2", "limit"),
        ("moves?after=1e3", "after"),
        ("events?limit=2001", "limit"),
        ("explain?seconds=601", "seconds"),
        ("explain?seconds=nan", "seconds"),
        ("experts.csv?phase=dream", "phase"),
        ("expert?layer=0", "expert"),
        ("expert?expert=0", "layer"),
        ("expert?layer=0&expert=-1", "expert"),
        ("frame?before_plan=2", "before_plan"),
        ("plan?id=" + "x" * 201, "id"),
        ("status?x=1", "query"),
    ],
)
async def test_what_is_out_of_bounds_is_refused_by_name(path: str, field: str) -> None:
    async with rig() as r:
        async with r.client.get(URL(f"{r.url}api/v1/{path}", encoded=True)) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (400, "invalid_argument")
        assert error["field"] == field
        assert error["message"].startswith(field) or field == "query"


async def test_errors_have_one_form_under_the_api_and_are_text_elsewhere() -> None:
    async with rig() as r:
        assert (await error_of(r, "api/v1/nothing"))[0] == 404
        assert (await error_of(r, "api/"))[0] == 404
        status, error = await error_of(r, "api/v1/frame", headers={"Accept": "text/html"})
        assert (status, error["code"]) == (406, "not_acceptable")
        for accept in ("*/*", "application/*", "text/html, application/json;q=0.1"):
            assert (await r.get("api/v1/status", headers={"Accept": accept}))[0] == 200
        refused = {"Accept": "application/json;q=0"}
        assert (await r.get("api/v1/status", headers=refused))[0] == 406
        async with r.client.post(r.url + "api/v1/frame") as answer:
            assert answer.status == 405
            assert set(answer.headers["Allow"].split(",")) == {"GET", "HEAD"}
            assert (await answer.json())["error"]["code"] == "method_not_allowed"
        status, headers, body = await r.get("static/nothing.js")
        assert (status, headers["Content-Type"]) == (404, "text/plain; charset=utf-8")
        assert b"{" not in body
        status, error = await error_of(r, "api/v1/frame", headers={"Host": "evil.example"})
        assert (status, error["code"]) == (403, "foreign_host")


async def test_a_fault_of_ours_is_a_line_in_the_log_and_no_detail_outside() -> None:
    async with rig() as r:
        await live(r)
        feed = r.page.feed
        assert feed is not None
        feed.history.moves_page = None  # type: ignore[assignment,method-assign]
        status, error = await error_of(r, "api/v1/moves")
        assert (status, error["code"]) == (500, "internal")
        assert "NoneType" not in str(error)
        (line,) = [json.loads(row) for row in r.lines.getvalue().splitlines() if "TypeError" in row]
        name, _, number = line["at"].partition(":")
        assert name == "reading.py"
        assert int(number) > 0


async def test_names_from_outside_stay_text() -> None:
    async with rig() as r:
        r.service.script.model = NAUGHTY
        await live(r)
        (move, *_) = r.service.begin_plan()
        move.reason = NAUGHTY
        r.service.tell()
        document = await r.until("api/v1/placement", lambda p: p["moves"])
        assert document["model"] == NAUGHTY
        for path in ("placement", "moves", "plan", "frame"):
            _, headers, body = await r.get(f"api/v1/{path}")
            assert headers["Content-Type"] == "application/json"
            assert headers["X-Content-Type-Options"] == "nosniff"
            json.loads(body)
        status, headers, body = await r.get("api/v1/" + NAUGHTY)
        assert status == 404
        assert b"script" not in body, "what was sent is not sent back"


async def test_fifty_streams_are_served_and_told() -> None:
    async with rig() as r:
        await live(r)
        async with asyncio.timeout(WAIT_S):
            answers = await asyncio.gather(*(r.stream() for _ in range(50)))
            assert {answer.status for answer in answers} == {200}
            r.service.close_window()
            wanted = f'"window":{r.service.window},'.encode()
            for answer in answers:
                seen = b""
                while wanted not in seen:
                    seen += await answer.content.readany()
        for answer in answers:
            answer.close()


async def test_every_route_is_described_and_every_description_is_a_route() -> None:
    settings = DashboardSettings(admin_address="127.0.0.1:9")
    page = Page(Feed(settings), settings, load_assets())
    routes = {
        (route.method, route.resource.canonical)
        for route in page.application(frozenset()).router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    async with rig() as r:
        document = await r.json("api/v1/openapi.json")
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    assert routes - described == {("GET", "/"), ("GET", "/static/{name}")}
    assert described - routes == set()
    ids = [one["operationId"] for item in document["paths"].values() for one in item.values()]
    assert len(set(ids)) == len(ids)


async def test_what_has_a_tag_is_sent_once_and_what_has_none_says_why() -> None:
    async with rig(answers_kept_s=1e6) as r:
        await live(r, windows=2)
        moves = r.service.begin_plan()
        r.service.finish_plan()
        r.service.tell()
        await r.until("api/v1/moves", lambda m: len(m["moves"]) == len(moves))
        await r.until("api/v1/events", lambda e: e["last"] == len(r.service.records))
        await r.until("api/v1/placement", lambda p: p["epoch"] == r.service.epoch)
        paths = (await r.json("api/v1/openapi.json"))["paths"]
        asked = {path: item["get"] for path, item in paths.items() if "get" in item}
        del asked["/api/v1/stream"]  # has no end
        untagged = {path for path, one in asked.items() if "304" not in one["responses"]}
        assert untagged == {"/api/v1/status", "/api/v1/explain", "/api/v1/session"}
        for path, one in asked.items():
            query = "?layer=0&expert=0" if path == "/api/v1/expert" else ""
            first, headers, body = await r.get(path.removeprefix("/") + query)
            assert first == 200, path
            assert ("ETag" in headers) == (path not in untagged), path
            assert ("no ETag" in one["summary"]) == (path in untagged), path
            if path in untagged:
                continue
            kept = {"If-None-Match": headers["ETag"]}
            again, same, nothing = await r.get(path.removeprefix("/") + query, headers=kept)
            assert (again, same["ETag"], nothing) == (304, headers["ETag"], b""), path
            assert body


async def test_the_tag_of_a_history_changes_with_what_it_tells() -> None:
    async with rig() as r:
        await live(r)
        tags = {}
        for path in ("api/v1/history", "api/v1/events"):
            tags[path] = (await r.get(path))[1]["ETag"]
        r.service.record("in_balance", "kept", "gain below band")
        await live(r)
        await r.until("api/v1/events", lambda e: e["last"] == len(r.service.records))
        for path, tag in tags.items():
            status, headers, _ = await r.get(path, headers={"If-None-Match": tag})
            assert (status, headers["ETag"] != tag) == (200, True), path
