"""The page and the command line beside each other before one controller: what a program reads from
either is the same document, as the page's own OpenAPI file describes it."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import jsonschema
import msgspec
import pytest
import yaml
from typer.testing import CliRunner, Result

from moe_serve.cli.app import app
from moe_serve.dashboard.server import DashboardServer
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.explain.words import NO_START
from moe_serve.telemetry.logs import make_logger
from tests.fakes.page import WAIT_S, Rig, rig
from tests.loopback.test_controller_admin import make_settings, serving, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

AGES = ("wall_s", "age_s", "last_answer_age_s")
"""When it was asked, which differs between two that ask."""
PAGE_KNOWS = (
    "plan_expected_gain_s_per_s",
    "realised_gain_s_per_s",
    "started_wall_s",
    "ended_wall_s",
)
"""What the page adds to a move from its own history: dates, and what its plan brought."""
PAGE_DRAWS = ("layers", "experts", "before", "after", "replicas_before", "replicas_after")
"""The picture of a plan, which takes somebody who saw it begin."""

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_service_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("MOE_SERVE_ADDRESS", "MOE_SERVE_TOKEN_FILE", "MOE_SERVE_TLS_CA"):
        monkeypatch.delenv(name, raising=False)


async def cli(address: str, *args: str) -> Result:
    """A command, in a thread of its own: it blocks, and controller and page live in this one."""
    given = [*args, "--address", address]
    return await asyncio.to_thread(CliRunner().invoke, app, given, catch_exceptions=False)


async def told(address: str, *args: str, exit_code: int = 0) -> Json:
    result = await cli(address, *args, "-o", "json")
    assert result.exit_code == exit_code, result.stderr
    found: Json = json.loads(result.stdout)
    return found


async def lines(address: str, *args: str) -> list[Json]:
    result = await cli(address, *args, "-o", "json")
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def schema_of(openapi: Json, path: str) -> Json:
    responses = openapi["paths"][path]["get"]["responses"]
    found: Json = responses["200"]["content"]["application/json"]["schema"]
    return found


def without(document: Json, *names: str) -> Json:
    return {name: value for name, value in document.items() if name not in names}


def bare_plan(document: Json) -> Json:
    """A plan's document without what only the page knows or draws."""
    plan = document["plan"]
    moves = [without(move, *PAGE_KNOWS) for move in plan["moves"]]
    return without(document, *PAGE_DRAWS) | {"plan": plan | {"moves": moves}}


async def begun(r: Rig) -> None:
    """Windows of load, and a plan that has ended, as the page has taken them."""
    for _ in range(2):
        r.service.close_window()
    r.service.begin_plan()
    r.service.tell()
    await r.until("api/v1/moves", lambda m: bool(m["moves"]))
    r.service.finish_plan()
    r.service.record("in_balance", "kept", "gain below band", numbers={"b": 2.0, "a": 1.0})
    r.service.close_window()
    number = len(r.service.records)
    await r.until("api/v1/events", lambda e: e["last"] == number)
    await r.until("api/v1/moves", lambda m: {move["state"] for move in m["moves"]} == {"done"})
    await r.until("api/v1/placement", lambda p: p["epoch"] == r.service.epoch)
    await r.until("api/v1/frame", lambda f: f["window"] == r.service.window)


async def test_why_it_is_slow_is_one_document() -> None:
    async with rig(answers_kept_s=0.0) as r:
        await begun(r)
        r.service.explanation.verdict = "slow"
        cause = r.service.explanation.causes.add(
            kind="hot_expert", share=0.4, text="it is hot", next_step="wait", rank=1, layer=2
        )
        cause.evidence.update({"replicas": 1.0, "cost": 0.5})
        r.service.explanation.newest.CopyFrom(r.service.records[-1])
        page = await r.json("api/v1/explain")
        shown = await told(r.address, "explain")
        assert shown["causes"][0]["kind"] == "hot_expert"
        assert shown["newest"]["rule"] == "in_balance"
        assert list(shown) == list(page)
        assert without(shown, *AGES) == without(page, *AGES)
        assert shown["age_s"] == page["age_s"], "of the newest figure, as the controller said"
        assert 0.0 <= shown["wall_s"] - page["wall_s"] < WAIT_S
        schema = schema_of(await r.json("api/v1/openapi.json"), "/api/v1/explain")
        jsonschema.validate(shown, schema)
        as_yaml = await cli(r.address, "explain", "-o", "yaml")
        assert without(yaml.safe_load(as_yaml.stdout), *AGES) == without(page, *AGES)


@pytest.mark.parametrize(
    "refusal",
    [
        (grpc.StatusCode.UNAVAILABLE, "between two lives"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "no time left"),
        (grpc.StatusCode.FAILED_PRECONDITION, f"{NO_START}: the journal is damaged"),
    ],
    ids=lambda refusal: str(refusal[0].name),
)
async def test_that_nobody_explains_is_one_document(refusal: tuple[grpc.StatusCode, str]) -> None:
    async with rig(answers_kept_s=0.0) as r:
        r.service.refusals["Explain"] = refusal
        page = await r.json("api/v1/explain")
        shown = await told(r.address, "explain", exit_code=3)
        assert [cause["kind"] for cause in shown["causes"]] == ["controller_away"]
        assert without(shown, *AGES, "reason") == without(page, *AGES, "reason")
        # The command line also names the call and the address that it tried.
        assert page["reason"] in shown["reason"]
        assert shown["last_answer_age_s"] is None
        jsonschema.validate(
            shown, schema_of(await r.json("api/v1/openapi.json"), "/api/v1/explain")
        )


@pytest.mark.parametrize("named", [False, True])
async def test_a_plan_is_one_document(named: bool) -> None:
    async with rig(answers_kept_s=0.0) as r:
        await begun(r)
        plan_id = r.service.moves[0].plan_id
        page = await r.json(f"api/v1/plan?id={plan_id}" if named else "api/v1/plan")
        shown = await told(r.address, "explain", "plan", *([plan_id] if named else []))
        assert shown["plan"]["plan_id"] == plan_id
        assert [move["state"] for move in shown["plan"]["moves"]]
        assert [record["rule"] for record in shown["plan"]["records"]] == [
            "regret_reached",
            "plan_done",
        ]
        assert bare_plan(shown) == bare_plan(page)
        assert page["before"] is not None, "the page saw it begin"
        assert shown["before"] is shown["after"] is None
        jsonschema.validate(shown, schema_of(await r.json("api/v1/openapi.json"), "/api/v1/plan"))


async def test_an_old_plan_has_no_price_in_either() -> None:
    async with rig(answers_kept_s=0.0) as r:
        await begun(r)
        r.service.record("regret_reached", "started", "long ago", plan_id="1-old")
        r.service.forgotten.add("1-old")
        page = await r.json("api/v1/plan?id=1-old")
        shown = await told(r.address, "explain", "plan", "1-old")
        assert shown == page
        assert shown["balancedness_before"] is None
        assert shown["plan"]["cost_s"] is None


async def test_decisions_are_the_same_records() -> None:
    async with rig() as r:
        await begun(r)
        page = await r.json("api/v1/events")
        shown = await lines(r.address, "events")
        assert [record["seq"] for record in shown] == [1, 2, 3]
        assert list(shown[-1]["numbers"]) == ["a", "b"]
        assert shown == [without(record, "n") for record in page["records"]]
        schema = schema_of(await r.json("api/v1/openapi.json"), "/api/v1/events")
        jsonschema.validate(page | {"records": shown}, schema)


@pytest.mark.parametrize("phase", ["all", "prefill", "decode"])
async def test_every_expert_is_the_same_line(phase: str, tmp_path: Path) -> None:
    async with rig() as r:
        await begun(r)
        status, headers, page = await r.get(f"api/v1/experts.csv?phase={phase}")
        assert (status, headers["Content-Type"]) == (200, "text/csv; charset=utf-8")
        given = ("heat", "--phase", phase, "--csv")
        assert (await cli(r.address, *given, "-")).stdout_bytes == page
        file = tmp_path / "heat.csv"
        assert (await cli(r.address, *given, str(file))).exit_code == 0
        assert file.read_bytes() == page
        head, *rows = page.splitlines(keepends=True)
        one = (await cli(r.address, *given, "-", "--layer", "2")).stdout_bytes
        assert one == head + b"".join(row for row in rows if row.startswith(b"2,"))
        assert len(one) < len(page)


async def test_a_phase_that_is_not_counted_is_refused_by_both() -> None:
    async with rig() as r:
        r.service.close_window()
        load = r.service.load
        assert load is not None
        for name in ("demand", "executed", "rank_busy"):
            half = getattr(load, name)
            setattr(load, name, half[: len(half) // 2])
        load.num_phases = 1
        await r.until("api/v1/frame", lambda f: f["phases"] == 1)
        status, _, body = await r.get("api/v1/experts.csv?phase=decode")
        assert (status, json.loads(body)["error"]["field"]) == (404, "phase")
        result = await cli(r.address, "heat", "--phase", "decode", "--csv", "-")
        assert (result.exit_code, result.stdout_bytes) == (2, b"")
        assert "--phase decode" in result.stderr


async def test_what_is_shown_of_ranks_and_moves_is_that_of_the_page() -> None:
    async with rig() as r:
        await begun(r)
        r.service.begin_plan()
        r.service.tell()
        page = await r.until("api/v1/placement", lambda p: any(k["copies"] for k in p["ranks"]))
        shown = await told(r.address, "status")
        for name in ("ranks", "routers"):
            assert page[name]
            for mine, theirs in zip(shown[name], page[name], strict=True):
                assert {key: mine[key] for key in theirs} == theirs
        assert shown["moves"] == [without(move, *PAGE_KNOWS) for move in page["moves"]]
        hottest = (await told(r.address, "top", "-n", "1"))["rows"][0]
        place = f"layer={hottest['layer']}&expert={hottest['expert']}"
        expert = await r.json(f"api/v1/expert?{place}")
        for name in ("pairs", "share", "rank_in_layer"):
            assert hottest[name] == expert[name]
        assert hottest["times_fair_share"] == hottest["share"] / expert["fair_share"]
        assert hottest["replicas"] == sum(
            replica["state"] == "LISTED" for replica in expert["replicas"]
        )


class Beside:
    """A page before the controller itself, and the command line at the same port."""

    def __init__(self, address: str, client: aiohttp.ClientSession, url: str) -> None:
        self.address, self._client, self._url = address, client, url

    async def page(self, path: str) -> Any:
        status, body = await self._get(path)
        assert status == 200, body
        return body

    async def until(self, path: str, wanted: Callable[[Any], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                status, body = await self._get(path)
                if status == 200 and wanted(body):
                    return
                await asyncio.sleep(0.05)

    async def _get(self, path: str) -> tuple[int, Any]:
        async with self._client.get(f"{self._url}api/v1/{path}") as answer:
            body = await answer.read()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(body) if is_json else body

    async def both(
        self, path: str, ask: Callable[[], Awaitable[Any]], pick: Callable[[Any], Any]
    ) -> tuple[Any, Any]:
        """What the page and a command say while nothing happens: the page the same twice."""
        async with asyncio.timeout(WAIT_S):
            while True:
                before = pick(await self.page(path))
                shown = await ask()
                if before == pick(await self.page(path)):
                    return before, shown


@asynccontextmanager
async def beside(address: str) -> AsyncIterator[Beside]:
    settings = DashboardSettings(admin_address=address, publish_interval_s=0.02, answers_kept_s=0.0)
    page = DashboardServer(settings, log=make_logger(io.StringIO()))
    url = await page.start()
    try:
        async with aiohttp.ClientSession(trust_env=False) as client:
            yield Beside(address, client, url)
    finally:
        await page.stop()


async def test_of_the_controller_itself_both_say_the_same(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    # A window long enough for a command to fall into one.
    config = msgspec.structs.replace(settings.config, window_s=1.0)
    async with (
        serving(replace(settings, config=config)) as (service, cluster, _),
        beside(service.admin_address) as there,
    ):
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: any(move.state == "done" for move in service.book.moves), WAIT_S)
        openapi = await there.page("openapi.json")
        await there.until("moves", lambda m: {"done"} == {move["state"] for move in m["moves"]})
        await there.until("frame", lambda frame: sum(frame["demand_pairs"]) > 0)
        page, shown = await there.both(
            "experts.csv", lambda: cli(there.address, "heat", "--csv", "-"), lambda body: body
        )
        assert shown.stdout_bytes == page
        page, shown = await there.both(
            "plan", lambda: told(there.address, "explain", "plan"), bare_plan
        )
        assert bare_plan(shown) == page
        assert page["plan"]["moves"]
        jsonschema.validate(shown, schema_of(openapi, "/api/v1/plan"))
        page, shown = await there.both(
            "explain",
            lambda: told(there.address, "explain"),
            # The controller looks back from now, so that each asks of a longer time.
            lambda document: without(document, *AGES, "seconds"),
        )
        assert without(shown, *AGES, "seconds") == page
        assert page["newest"]["rule"]
        jsonschema.validate(shown, schema_of(openapi, "/api/v1/explain"))
        page, shown = await there.both(
            "events", lambda: lines(there.address, "events"), lambda document: document["records"]
        )
        assert shown == [without(record, "n") for record in page]
        assert {"started", "kept"} & {record["outcome"] for record in shown}
