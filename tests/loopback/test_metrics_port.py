"""The metrics port: one path, one method, and only for who may read."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_serve.controller import metrics_port
from moe_serve.controller.metrics_port import MetricsPort
from moe_serve.errors import StartRefused
from moe_serve.rpc.auth import Role
from moe_serve.telemetry import Metrics
from moe_serve.telemetry.prometheus import PrometheusSink
from tests.fakes.controller import controller, make_cluster, make_settings, until
from tests.fakes.secured import TOKENS, controller_settings, tls_files, token_file

FIRST_PLAN = 'moe_serve_plans_total{outcome="done",policy="incremental"} 1.0'
METHODS = ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"]


@asynccontextmanager
async def served(folder: Path, **changes: Any) -> AsyncIterator[MetricsPort]:
    sink = PrometheusSink()
    Metrics(sink).set("epoch", 7)
    settings = controller_settings(folder, **{"metrics_port": 0, **changes})
    port = MetricsPort(settings, sink)
    await port.start()
    try:
        yield port
    finally:
        await port.stop()


async def ask(
    port: MetricsPort, path: str = "/metrics", *, method: str = "GET", **more: Any
) -> tuple[int, str, str]:
    """(status, body, content type)"""
    scheme = "https" if "ssl" in more else "http"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{scheme}://{port.address}{path}", **more) as answer,
    ):
        return answer.status, await answer.text(), answer.headers.get("Content-Type", "")


@pytest.mark.asyncio
async def test_one_path_answers_one_method(tmp_path: Path) -> None:
    async with served(tmp_path) as port:
        status, page, kind = await ask(port)
        assert (status, kind.split(";")[0]) == (200, "text/plain")
        assert "moe_serve_epoch 7.0\n" in page
        for method in METHODS:
            assert (await ask(port, method=method))[0] in (400, 404, 405), method
        for path in ("/", "/metrics/", "/metrics/x", "/api/v1/frame", "/..%2f..%2fetc/passwd"):
            assert (await ask(port, path))[0] == 404, path
        assert (await ask(port, "/metrics?x=1"))[0] == 200
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        status, page, kind = await ask(port, headers=accept)
        assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
        assert page.endswith("# EOF\n")
        # Where Host says somebody else there is still nothing to be had but figures.
        assert (await ask(port, headers={"Host": "elsewhere"}))[0] == 200
        assert (await ask(port, headers={"X": "x" * 10_000}))[0] == 400


@pytest.mark.asyncio
async def test_a_service_with_tokens_asks_for_one_that_reads(tmp_path: Path) -> None:
    async with served(tmp_path, token_file=token_file(tmp_path)) as port:
        for given in ({}, {"Authorization": "Bearer wrong"}, bearer(Role.DISPATCH)):
            status, page, _ = await ask(port, headers=given)
            assert status == 401, given
            assert "moe_serve_" not in page
        for role in (Role.READ, Role.ADMIN):
            assert (await ask(port, headers=bearer(role)))[0] == 200


def bearer(role: Role) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[role]}"}


@pytest.mark.asyncio
async def test_a_service_with_tls_speaks_nothing_else(tmp_path: Path) -> None:
    certificate, key = tls_files(tmp_path)
    async with served(tmp_path, tls_certificate=certificate, tls_key=key) as port:
        trusted = ssl.create_default_context(cafile=str(certificate))
        trusted.check_hostname = False
        assert (await ask(port, ssl=trusted))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await ask(port)


@pytest.mark.asyncio
async def test_bad_tls_files_are_told(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    refused = MetricsPort(
        controller_settings(tmp_path, metrics_port=0, tls_certificate=bad, tls_key=bad),
        PrometheusSink(),
    )
    with pytest.raises(StartRefused, match="TLS files"):
        await refused.start()
    assert refused._runner is None, "nothing is left to be stopped"


@pytest.mark.asyncio
async def test_readers_beyond_a_few_are_told_to_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_port, "READERS_MAX", 0)
    async with served(tmp_path) as port:
        assert (await ask(port))[0] == 503
    monkeypatch.setattr(metrics_port, "READERS_MAX", 4)
    async with served(tmp_path) as port:
        for _ in range(6):  # each makes room for the next
            assert (await ask(port))[0] == 200


@pytest.mark.asyncio
async def test_a_taken_port_is_a_problem_told_and_the_controller_serves(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        number = taken.getsockname()[1]
        settings = make_settings(tmp_path, metrics_port=number)
        async with controller(settings, make_cluster()) as made:
            await made.ready()
            said = made.service.describe()
            assert said["metrics_address"] == ""
            (problem,) = said["problems"]
            assert f"metrics cannot be served on 127.0.0.1:{number}" in problem


@pytest.mark.asyncio
async def test_a_controller_tells_its_own_figures_and_its_routers(tmp_path: Path) -> None:
    settings = replace(make_settings(tmp_path), metrics_port=0)
    async with controller(settings, make_cluster()) as made:
        await made.ready()
        address = made.service.describe()["metrics_address"]
        assert address == made.service.metrics_address

        async def page() -> str:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{address}/metrics") as answer,
            ):
                return await answer.text()

        book = made.service.book
        await until(lambda: "plan_done" in {kept.record.rule for kept in book.newest(99)})
        before = made.state.forecast.windows_seen
        await until(lambda: made.state.forecast.windows_seen > before)
        told = await page()
        found = {family.name: family for family in text_string_to_metric_families(told)}
    assert FIRST_PLAN in told
    (term,) = found["moe_serve_term"].samples
    assert term.value >= 1
    solves = [s.value for s in found["moe_serve_plan_solve_seconds"].samples if "count" in s.name]
    assert solves[0] >= 1.0
    routers = {sample.labels["router"] for sample in found["moe_serve_rows"].samples}
    assert routers == {"router-0"}
    live = [s.value for s in found["moe_serve_ranks"].samples if s.labels["status"] == "live"]
    assert live == [3.0]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address.rsplit(":", 1))


@pytest.mark.asyncio
async def test_without_a_number_nothing_listens(tmp_path: Path) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as made:
        await made.ready()
        assert made.service.describe()["metrics_address"] == ""
