"""The page before the controller itself, over a fleet in memory: what the fake stands for is so."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from moe_serve.controller.service import ControllerService
from moe_serve.dashboard.server import DashboardServer
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.rpc.auth import Role
from moe_serve.telemetry.logs import make_logger
from tests.builders import make_spec
from tests.fakes.controller import make_cluster
from tests.fakes.fleet import FakeCluster, FakeFleet
from tests.fakes.page import WAIT_S
from tests.fakes.secured import TOKENS, token_file
from tests.loopback.test_controller_admin import make_settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

READS = (
    "frame",
    "placement",
    "status",
    "history",
    "events",
    "moves",
    "plan",
    "explain",
    "expert?layer=0&expert=0",
    "session",
)


class Page:
    """A client of the page with an operator's session."""

    def __init__(self, client: aiohttp.ClientSession, url: str, cluster: FakeCluster) -> None:
        self.client, self.url, self.cluster = client, url, cluster
        self.csrf = ""

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(f"{self.url}api/v1/{path}") as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(text) if is_json else text

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        headers = {"X-CSRF-Token": self.csrf}
        async with self.client.post(
            f"{self.url}api/v1/{path}", json=body, headers=headers
        ) as answer:
            return answer.status, await answer.json()

    async def until(self, path: str, wanted: Callable[[Any], bool]) -> Any:
        last: Any = None
        async with asyncio.timeout(WAIT_S):
            while True:
                status, last = await self.get(path)
                if status == 200 and wanted(last):
                    return last
                await asyncio.sleep(0.05)


@asynccontextmanager
async def operated(folder: Path) -> AsyncIterator[Page]:
    settings = make_settings(folder, token_file=token_file(folder))
    cluster = make_cluster()
    service = ControllerService(settings, FakeFleet(cluster))
    await service.start()
    page = DashboardServer(
        DashboardSettings(
            admin_address=service.admin_address,
            token=TOKENS[Role.READ],
            publish_interval_s=0.02,
            answers_kept_s=0.0,
        ),
        log=make_logger(io.StringIO()),
    )
    try:
        url = await page.start()
        jar = aiohttp.CookieJar(unsafe=True)  # an address is no name to keep cookies for
        async with aiohttp.ClientSession(cookie_jar=jar) as client:
            made = Page(client, url, cluster)
            status, said = await made.post("session", {"token": TOKENS[Role.ADMIN]})
            assert (status, said["operator"]) == (200, True)
            made.csrf = said["csrf"]
            await made.until("placement", lambda p: p["state"] not in {"", "starting"})
            yield made
    finally:
        await page.stop()
        await service.stop()


async def test_an_operator_pauses_plans_applies_and_drains_through_the_page(
    tmp_path: Path,
) -> None:
    async with operated(tmp_path) as page:
        assert (await page.post("pause", {"reason": "by hand"}))[0] == 200
        await page.until("placement", lambda p: p["state"] == "paused")
        page.cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await page.until("frame", lambda f: sum(f["demand_pairs"]) > 0)

        async def plan() -> Any:
            # The forecast follows the windows: at first there may be nothing to move.
            async with asyncio.timeout(WAIT_S):
                while True:
                    status, found = await page.post("plan", {"max_moves": 2})
                    assert status == 200, found
                    if found["plan"]["moves"]:
                        return found
                    await asyncio.sleep(0.05)

        computed = await plan()
        assert computed["plan"]["state"] == "computed"
        assert computed["before"] is not None
        assert 0 < computed["balancedness_before"] <= computed["balancedness_after"] < 1 + 1e-9
        plan_id = computed["plan"]["plan_id"]
        newest = (await page.get("plan"))[1]
        assert newest["plan"]["plan_id"] == plan_id
        assert newest["after"] == computed["after"]
        status, checked = await page.post("apply", {"plan_id": plan_id, "validate_only": True})
        assert (status, checked["plan_id"]) == (200, plan_id)
        assert (await page.post("apply", {"plan_id": plan_id}))[0] == 200
        done = await page.until(f"plan?id={plan_id}", lambda p: p["plan"]["state"] == "done")
        assert done["before"] == computed["before"]
        # The replicas that the picture promised are those that are served.
        await page.until("placement", lambda p: p["replicas"] == computed["replicas_after"])
        before = await page.until("frame?before_plan=1", lambda f: f["before_plan"] == plan_id)
        assert before["window"] >= 0
        status, again = await page.post("apply", {"plan_id": plan_id})
        assert (status, again["error"]["code"]) in {(409, "conflict"), (404, "not_found")}
        status, wrong = await page.post("drain", {"rank": 99})
        assert (status, wrong["error"]["field"]) == (400, "rank")
        assert (await page.post("undrain", {"rank": 0}))[0] in {200, 409}
        assert (await page.post("resume", {}))[0] == 200


async def test_what_the_controller_tells_has_the_described_shape(tmp_path: Path) -> None:
    async with operated(tmp_path) as page:
        page.cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await page.until("frame", lambda f: sum(f["demand_pairs"]) > 0)
        await page.until("moves", lambda m: m["moves"])
        described = (await page.get("openapi.json"))[1]
        for path in READS:
            status, answer = await page.get(path)
            assert status == 200, (path, answer)
            operation = described["paths"][f"/api/v1/{path.partition('?')[0]}"]["get"]
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(answer, schema)
        status, text = await page.get("experts.csv")
        assert (status, text.count("\r\n")) == (200, 1 + make_spec().num_keys)
