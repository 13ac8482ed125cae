"""What the page answers where the controller answers with an error: nothing that it did not
describe, and a controller that does not start is one that is away."""

import json
from typing import Any

import grpc
import pytest

from moe_serve.dashboard.endpoints import Endpoint
from moe_serve.dashboard.openapi import EVERYWHERE
from moe_serve.dashboard.operating import APPLY, COMPUTE, DRAIN, LOGIN, PAUSE, RESUME, UNDRAIN
from moe_serve.dashboard.reading import EXPLAIN, PLAN
from moe_serve.explain.words import NO_START
from tests.fakes.page import Rig, rig
from tests.fakes.placement_service import serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

DAMAGED = f"{NO_START}: the journal is damaged"
METHODS = ("Explain", "ExplainPlan")
COMMANDS: list[tuple[Endpoint, str, dict[str, Any]]] = [
    (PAUSE, "Pause", {}),
    (RESUME, "Resume", {}),
    (COMPUTE, "ComputePlan", {}),
    (APPLY, "ApplyPlan", {"plan_id": "asked-1"}),
    (DRAIN, "DrainRank", {"rank": 1}),
    (UNDRAIN, "UndrainRank", {"rank": 1}),
]


async def sent(r: Rig, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    async with r.client.post(r.url + path.removeprefix("/"), json=body, headers=headers) as answer:
        return answer.status, answer.headers, await answer.json()


async def logged_in(r: Rig) -> dict[str, str]:
    """Headers of an operator's commands."""
    status, headers, answer = await sent(r, LOGIN.path, {})
    assert status == 200
    return {
        "X-CSRF-Token": answer["csrf"],
        "Cookie": headers["Set-Cookie"].partition(";")[0],
    }


async def error_of(r: Rig, path: str) -> tuple[int, str, str]:
    status, headers, body = await r.get(path)
    return status, headers.get("Retry-After", ""), json.loads(body)["error"]["message"]


def refuse(r: Rig, *refusal: Any) -> None:
    for method in METHODS:
        r.service.refusals[method] = refusal


async def test_a_controller_that_does_not_start_is_away() -> None:
    async with rig(answers_kept_s=0.0) as r:
        refuse(r, grpc.StatusCode.FAILED_PRECONDITION, DAMAGED)
        answer = await r.json("api/v1/explain")
        assert [cause["kind"] for cause in answer["causes"]] == ["controller_away"]
        assert (answer["verdict"], answer["reason"]) == ("slow", DAMAGED)
        for path in ("api/v1/plan", "api/v1/plan?id=nobody"):
            status, wait, message = await error_of(r, path)
            assert (status, message) == (503, DAMAGED), path
            assert int(wait) > 0


async def test_what_the_page_saw_of_a_plan_stays_while_the_controller_does_not_start() -> None:
    async with rig(answers_kept_s=0.0) as r:
        r.service.close_window()
        await r.until("api/v1/placement", lambda p: p["experts"] == r.service.script.experts)
        moves = r.service.begin_plan()
        r.service.tell()
        await r.until("api/v1/moves", lambda m: len(m["moves"]) == len(moves))
        refuse(r, grpc.StatusCode.FAILED_PRECONDITION, DAMAGED)
        for path in ("api/v1/plan", f"api/v1/plan?id={moves[0].plan_id}"):
            plan = await r.json(path)
            assert [m["move_id"] for m in plan["plan"]["moves"]] == [m.move_id for m in moves]


async def test_another_refusal_of_a_state_is_no_controller_that_is_away() -> None:
    async with rig(answers_kept_s=0.0) as r:
        refuse(r, grpc.StatusCode.FAILED_PRECONDITION, "the disk is full")
        for path in ("api/v1/explain", "api/v1/plan"):
            status, wait, message = await error_of(r, path)
            assert (status, message) == (503, "the disk is full"), path
            assert int(wait) > 0


async def test_commands_to_a_controller_that_does_not_start_are_to_be_sent_again() -> None:
    async with rig() as r:
        own = await logged_in(r)
        for endpoint, method, body in COMMANDS:
            r.service.refusals[method] = (grpc.StatusCode.FAILED_PRECONDITION, DAMAGED)
            status, headers, answer = await sent(r, endpoint.path, body, **own)
            assert (status, answer["error"]["message"]) == (503, DAMAGED), endpoint.path
            assert int(headers["Retry-After"]) > 0


async def test_the_page_says_why_its_streams_end() -> None:
    async with rig() as r:
        await r.until("api/v1/status", lambda s: s["connection"] != "connecting")
        for method in ("WatchPlacement", "WatchLoad", "WatchEvents"):
            r.service.refusals[method] = (grpc.StatusCode.FAILED_PRECONDITION, DAMAGED)
        await r.server.stop(0)
        r.server, _ = await serve(r.service, int(r.address.rpartition(":")[2]))
        status = await r.until("api/v1/status", lambda s: s["message"] == DAMAGED)
        assert status["connection"] == "away"


@pytest.mark.parametrize(
    "code", [one for one in grpc.StatusCode if one is not grpc.StatusCode.OK], ids=lambda c: c.name
)
async def test_no_error_of_the_controller_is_a_status_that_is_not_described(
    code: grpc.StatusCode,
) -> None:
    async with rig(answers_kept_s=0.0) as r:
        found = []
        for endpoint, method, body in COMMANDS:
            r.service.refusals.clear()
            own = await logged_in(r)  # a refusal of the token ends a session
            r.service.refusals[method] = (code, "made up")
            found.append((endpoint, (await sent(r, endpoint.path, body, **own))[0]))
        r.service.refusals["ApplyPlan"] = (code, "made up")
        refuse(r, code, "made up")
        found.append((PLAN, (await r.get("api/v1/plan?id=x"))[0]))
        if code is not grpc.StatusCode.NOT_FOUND:  # the others name nothing that could be missing
            found.append((LOGIN, (await sent(r, LOGIN.path, {}))[0]))
            found.append((EXPLAIN, (await r.get("api/v1/explain"))[0]))
        assert [
            (endpoint.path, status)
            for endpoint, status in found
            if status not in {200, *EVERYWHERE, *endpoint.errors}
        ] == []
