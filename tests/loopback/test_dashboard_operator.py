"""Who may command through the page, and who may not: tokens, sessions, CSRF, foreign pages."""

import asyncio
import contextlib
import io
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from yarl import URL

from moe_serve.controller.admin_server import AdminServer
from moe_serve.dashboard.app import Page, load_assets
from moe_serve.dashboard.feed import Feed
from moe_serve.dashboard.server import DashboardServer, bind
from moe_serve.dashboard.sessions import FAILURES_MAX, FAILURES_S, IDLE_S, LIFE_S, SESSIONS_MAX
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.rpc.auth import Role
from moe_serve.telemetry.logs import make_logger
from tests.fakes.page import WAIT_S, Rig, rig
from tests.fakes.placement_commands import ADMIN_ONLY
from tests.fakes.secured import TOKENS, NobodyAtHome, controller_settings, tls_files, token_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

READ, ADMIN, OTHER = "read-" + "r" * 20, "admin-" + "a" * 20, "guess-" + "g" * 20
COMMANDS = {
    "pause": {"reason": "a look"},
    "resume": {},
    "plan": {"max_moves": 2},
    "apply": {"plan_id": "asked-1"},
    "drain": {"rank": 1},
    "undrain": {"rank": 1},
}
METHODS = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "PURGE",
)
PATHS = [
    "",
    "static/app.js",
    "nothing/here",
    "api/v1/nothing",
    "api/v1/frame",
    "api/v1/stream",
    "api/v1/session",
    *(f"api/v1/{command}" for command in COMMANDS),
]


@contextlib.asynccontextmanager
async def guarded(**settings: Any) -> AsyncIterator[Rig]:
    """A service with tokens, the page before it with its own of role read. The client keeps no
    cookie by itself."""
    async with rig(token=READ, **settings) as r:
        r.service.tokens = {READ: "read", ADMIN: "admin"}
        await r.client.close()
        r.client = aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar())
        await r.until("api/v1/status", lambda s: s["connection"] in {"live", "stale"})
        yield r


class Browser:
    """One browser's cookie and CSRF token."""

    def __init__(self, r: Rig) -> None:
        self.r = r
        self.cookie = ""
        self.csrf = ""
        self.set_cookie = ""

    async def send(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, Any]:
        sent = {
            "Cookie": self.cookie,
            "X-CSRF-Token": self.csrf,
            "Content-Type": "application/json",
        }
        sent = {name: value for name, value in (sent | headers).items() if value}
        data = json.dumps(body).encode() if body is not None else None
        url = self.r.url + "api/v1/" + path
        async with self.r.client.request(method, url, data=data, headers=sent) as answer:
            return answer.status, answer.headers, await answer.json()

    async def login(self, token: str = ADMIN) -> tuple[int, Any]:
        status, headers, answer = await self.send("POST", "session", {"token": token})
        if status == 200:
            self.set_cookie = headers["Set-Cookie"]
            self.cookie = self.set_cookie.partition(";")[0]
            self.csrf = answer["csrf"]
        return status, answer

    async def command(self, name: str, **headers: str) -> tuple[int, Any]:
        status, _, answer = await self.send("POST", name, COMMANDS[name], **headers)
        return status, answer


def commanded(r: Rig) -> list[str]:
    """Admin calls that were let in, without the checks of tokens at login."""
    return [type(one).__name__ for one in r.service.asked if getattr(one, "plan_id", "-") != ""]


async def test_without_a_login_the_page_commands_nothing() -> None:
    async with guarded() as r:
        stranger = Browser(r)
        assert (await stranger.send("GET", "session"))[2] == {
            "operator": False,
            "needs_token": True,
        }
        for name in COMMANDS:
            status, answer = await stranger.command(name)
            assert (status, answer["error"]["code"]) == (403, "not_operator"), name
        stranger.cookie = f"moe_serve_session_{URL(r.url).port}=" + "x" * 43
        for name in COMMANDS:
            assert (await stranger.command(name))[0] == 403
        assert not ADMIN_ONLY & set(r.service.calls)


async def test_an_operator_commands_with_his_own_token_only() -> None:
    async with guarded() as r:
        operator = Browser(r)
        assert (await operator.login())[0] == 200
        said = (await operator.send("GET", "session"))[2]
        assert (said["operator"], said["csrf"]) == (True, operator.csrf)
        for name in COMMANDS:
            status, answer = await operator.command(name)
            assert status == 200, answer
        assert {type(one).__name__ for one in r.service.asked} >= {
            "PauseRequest",
            "ResumeRequest",
            "ComputePlanRequest",
            "ApplyPlanRequest",
            "DrainRankRequest",
            "UndrainRankRequest",
        }
        used = {token for method, token in r.service.callers if method in ADMIN_ONLY}
        assert used == {ADMIN}, "the page's own token commands nothing"
        read = {token for method, token in r.service.callers if method not in ADMIN_ONLY}
        assert read == {READ}, "nor is the operator's used to look"
        assert r.service.asked[1].reason == "a look"


async def test_a_computed_plan_is_drawn_and_can_be_applied() -> None:
    async with guarded() as r:
        r.service.close_window()
        await r.until("api/v1/placement", lambda p: p["experts"] == 32)
        operator = Browser(r)
        await operator.login()
        status, plan = await operator.command("plan")
        assert (status, plan["plan"]["state"]) == (200, "computed")
        assert len(plan["plan"]["moves"]) == 2
        assert plan["after"]["slots"]["states"] == ["", "LISTED", "LEAVES", "COMES"]
        assert plan["replicas_before"] != plan["replicas_after"]
        newest = await r.json("api/v1/plan")
        assert newest["plan"]["plan_id"] == plan["plan"]["plan_id"]
        assert newest["after"] == plan["after"]
        status, answer = await operator.command("apply")
        assert (status, answer["plan_id"]) == (200, "asked-1")


@pytest.mark.parametrize(
    ("token", "status", "code"),
    [
        (OTHER, 403, "wrong_token"),
        (READ, 403, "wrong_token"),
        ("", 400, "invalid_argument"),
        ("with space " + "x" * 20, 403, "wrong_token"),
        ("line\n" + "x" * 20, 403, "wrong_token"),
        ("ümlaut" + "x" * 20, 403, "wrong_token"),
        ("x" * 513, 400, "invalid_argument"),
    ],
)
async def test_a_token_that_is_no_operators_begins_nothing(
    token: str, status: int, code: str
) -> None:
    async with guarded() as r:
        stranger = Browser(r)
        got, answer = await stranger.login(token)
        assert (got, answer["error"]["code"]) == (status, code)
        assert not stranger.set_cookie
        assert (await stranger.command("pause"))[0] == 403


async def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites() -> None:
    async with guarded() as r:
        operator = Browser(r)
        _, answer = await operator.login()
        name, *flags = [part.strip() for part in operator.set_cookie.split(";")]
        assert name.startswith(f"moe_serve_session_{URL(r.url).port}=")
        assert {"HttpOnly", "SameSite=Strict", "Path=/api", f"Max-Age={LIFE_S:.0f}"} <= set(flags)
        assert "Secure" not in flags, "the page is plain HTTP on loopback"
        assert not any(flag.startswith("Domain") for flag in flags)
        value = name.partition("=")[2]
        assert len(value) >= 43, "256 bits"
        assert value not in json.dumps(answer)
        again = Browser(r)
        again.cookie = operator.cookie
        await again.login()
        assert again.cookie != operator.cookie, "each login has a cookie of its own"
        assert (await operator.command("pause"))[0] == 403, "and ends the one it replaces"


async def test_over_tls_the_cookie_is_secure_and_the_origin_is_https(tmp_path: Path) -> None:
    certificate, key = tls_files(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with guarded() as r:
        # As behind a page that speaks TLS: its application on a second port, asked by its own name.
        with bind("127.0.0.1", 0) as bound:
            port = int(bound.getsockname()[1])
            page = Page(Feed(r.chosen), r.chosen, load_assets())
            host = f"127.0.0.1:{port}"
            runner = web.AppRunner(page.application(frozenset({host})))
            await runner.setup()
            await web.SockSite(runner, bound, ssl_context=context).start()
            try:
                for origin, status in ((f"https://{host}", 200), (f"http://{host}", 403)):
                    async with r.client.post(
                        f"https://{host}/api/v1/session",
                        json={"token": ADMIN},
                        headers={"Origin": origin},
                        ssl=False,
                    ) as answer:
                        assert answer.status == status
                        if status == 200:
                            assert "Secure" in answer.headers["Set-Cookie"].split("; ")
            finally:
                await runner.cleanup()


async def test_the_controller_itself_tells_operators_from_readers(tmp_path: Path) -> None:
    source = NobodyAtHome(controller_settings(tmp_path, token_file=token_file(tmp_path)))
    admin = AdminServer(source)
    await admin.start()
    page = DashboardServer(
        DashboardSettings(admin_address=admin.address, token=TOKENS[Role.READ]),
        log=make_logger(io.StringIO()),
    )
    try:
        url = await page.start()
        async with aiohttp.ClientSession() as client:
            answers = []
            for token in (TOKENS[Role.ADMIN], TOKENS[Role.READ], TOKENS[Role.DISPATCH], OTHER):
                async with client.post(url + "api/v1/session", json={"token": token}) as answer:
                    answers.append(answer.status)
        assert answers == [200, 403, 403, 403]
    finally:
        await page.stop()
        await admin.stop(0.0)
    audit = audit_of(tmp_path)
    assert "ApplyPlan" in audit, "a login leaves its line"
    assert not any(token in audit for token in TOKENS.values())


def audit_of(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("audit.log*"))


async def test_csrf_missing_wrong_or_of_another_session_commands_nothing() -> None:
    async with guarded() as r:
        mine, other = Browser(r), Browser(r)
        await mine.login()
        await other.login()
        for csrf in ("", "x", mine.csrf[:-1], mine.csrf + "x", other.csrf, "ü"):
            right, mine.csrf = mine.csrf, csrf
            for name in COMMANDS:
                status, answer = await mine.command(name)
                assert (status, answer["error"]["code"]) == (403, "csrf"), (csrf, name)
            status, _, answer = await mine.send("DELETE", "session")
            assert (status, answer["error"]["code"]) == (403, "csrf")
            mine.csrf = right
        assert commanded(r) == []
        assert (await mine.command("pause"))[0] == 200


async def test_a_logout_ends_the_session_and_the_cookie() -> None:
    async with guarded() as r:
        operator = Browser(r)
        await operator.login()
        status, headers, answer = await operator.send("DELETE", "session")
        assert (status, answer["operator"]) == (200, False)
        assert "Max-Age=0" in headers["Set-Cookie"]
        assert "HttpOnly" in headers["Set-Cookie"]
        assert (await operator.command("pause"))[0] == 403
        assert (await operator.send("DELETE", "session"))[0] == 403, "there is nothing left to end"
        assert commanded(r) == []


async def test_a_session_ends_without_use_and_in_any_case() -> None:
    async with guarded() as r:
        operator = Browser(r)
        await operator.login()
        r.later_s += IDLE_S - 60.0
        assert (await operator.command("pause"))[0] == 200
        r.later_s += IDLE_S - 60.0
        assert (await operator.command("pause"))[0] == 200, "it was used meanwhile"
        r.later_s += IDLE_S
        assert (await operator.command("pause"))[0] == 403
        await operator.login()
        for _ in range(int(LIFE_S / (IDLE_S - 60.0))):
            r.later_s += IDLE_S - 60.0
            assert (await operator.command("resume"))[0] == 200
        r.later_s += IDLE_S - 60.0
        assert (await operator.command("resume"))[0] == 403, "used or not"


async def test_sessions_are_bounded_and_the_one_in_use_stays() -> None:
    async with guarded() as r:
        first, second = Browser(r), Browser(r)
        await first.login()
        await second.login()
        for _ in range(SESSIONS_MAX - 1):
            r.later_s += 1.0
            assert (await first.command("resume"))[0] == 200
            assert (await Browser(r).login())[0] == 200
        assert (await first.command("resume"))[0] == 200
        assert (await second.command("resume"))[0] == 403


async def test_guesses_are_few_a_minute_and_cost_the_controller_nothing_more() -> None:
    async with guarded() as r:
        stranger = Browser(r)
        answers = await asyncio.gather(*(stranger.login(OTHER) for _ in range(40)))
        assert [status for status, _ in answers].count(403) == FAILURES_MAX
        assert [status for status, _ in answers].count(429) == 40 - FAILURES_MAX
        assert r.service.callers.count(("ApplyPlan", OTHER)) == FAILURES_MAX
        status, headers, answer = await stranger.send("POST", "session", {"token": ADMIN})
        assert (status, answer["error"]["code"]) == (429, "too_many")
        assert 0 < int(headers["Retry-After"]) <= FAILURES_S
        r.later_s += FAILURES_S + 1.0
        assert (await stranger.login(ADMIN))[0] == 200
        for _ in range(2 * FAILURES_MAX):
            assert (await Browser(r).login(ADMIN))[0] == 200, "right ones are not counted"


async def test_a_token_that_is_taken_back_ends_its_session() -> None:
    async with guarded() as r:
        operator = Browser(r)
        await operator.login()
        del r.service.tokens[ADMIN]
        status, answer = await operator.command("pause")
        assert (status, answer["error"]["code"]) == (403, "not_operator")
        r.service.tokens[ADMIN] = "admin"
        assert (await operator.command("pause"))[0] == 403, "it must be shown again"


async def test_a_service_without_tokens_asks_for_a_session_all_the_same() -> None:
    async with rig() as r:
        await r.client.close()
        r.client = aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar())
        local = Browser(r)
        assert (await local.send("GET", "session"))[2] == {
            "operator": False,
            "needs_token": False,
        }
        assert (await local.command("pause"))[0] == 403
        status, _, answer = await local.send("POST", "session", {})
        assert (status, answer["operator"]) == (200, True)
        # Its own answer holds what a page elsewhere cannot read.
        assert (await local.command("pause"))[0] == 403
        await local.login("")
        assert (await local.command("pause"))[0] == 200
        local.csrf = ""
        assert (await local.command("pause"))[0] == 403
        assert {token for _, token in r.service.callers} == {""}


async def test_a_page_started_without_tokens_commands_no_service_that_has_them() -> None:
    async with rig() as r:
        r.service.tokens = {ADMIN: "admin"}
        status, _, answer = await Browser(r).send("POST", "session", {"token": ADMIN})
        assert (status, answer["error"]["code"]) == (403, "not_operator")


@pytest.mark.parametrize(
    ("code", "status", "word"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, 409, "conflict"),
        (grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_argument"),
        (grpc.StatusCode.NOT_FOUND, 404, "not_found"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "too_many"),
        (grpc.StatusCode.UNAVAILABLE, 503, "unavailable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 503, "unavailable"),
        (grpc.StatusCode.PERMISSION_DENIED, 403, "not_operator"),
        (grpc.StatusCode.INTERNAL, 503, "unavailable"),
        (grpc.StatusCode.UNIMPLEMENTED, 503, "unavailable"),
    ],
)
async def test_what_the_controller_refuses_keeps_its_words(
    code: grpc.StatusCode, status: int, word: str
) -> None:
    async with guarded() as r:
        operator = Browser(r)
        await operator.login()
        r.service.refusals["DrainRank"] = (code, "rank 1 holds the last replica of an expert")
        got, headers, answer = await operator.send("POST", "drain", COMMANDS["drain"])
        assert (got, answer["error"]["code"]) == (status, word)
        assert "last replica" in answer["error"]["message"] or code.name == "UNIMPLEMENTED"
        assert ("Retry-After" in headers) == (status in {429, 503})


async def test_commands_say_that_the_controller_is_away_and_reach_the_next_one() -> None:
    from tests.fakes.placement_service import FakePlacementService, Script, serve

    async with guarded() as r:
        operator = Browser(r)
        await operator.login()
        await r.server.stop(0)
        status, headers, answer = await operator.send("POST", "pause", COMMANDS["pause"])
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (
            503,
            "unavailable",
            "5",
        )
        guess = Browser(r)
        for _ in range(2 * FAILURES_MAX):
            assert (await guess.login(OTHER))[0] == 503, "nobody said that the token is wrong"
        r.service = FakePlacementService(Script(window_s=0.2))
        r.service.tokens = {READ: "read", ADMIN: "admin"}
        r.server, _ = await serve(r.service, int(r.address.partition(":")[2]))
        async with asyncio.timeout(WAIT_S):
            while True:
                if (await operator.command("pause"))[0] == 200:
                    break
                await asyncio.sleep(0.05)
        assert r.service.state == "paused"


@pytest.mark.parametrize(
    ("command", "body", "field"),
    [
        ("pause", {"reason": "x" * 201}, "reason"),
        ("pause", {"reason": 5}, "reason"),
        ("pause", {"token": ADMIN}, "body"),
        ("pause", [], "body"),
        ("resume", {"x": 1}, "body"),
        ("plan", {"max_moves": -1}, "max_moves"),
        ("plan", {"max_moves": 1 << 31}, "max_moves"),
        ("plan", {"max_moves": "3"}, "max_moves"),
        ("apply", {}, "plan_id"),
        ("apply", {"plan_id": ""}, "plan_id"),
        ("apply", {"plan_id": "p", "validate_only": 1}, "validate_only"),
        ("drain", {}, "rank"),
        ("drain", {"rank": -1}, "rank"),
        ("drain", {"rank": 1.5}, "rank"),
        ("drain", {"rank": None}, "rank"),
        ("undrain", {"rank": True}, "rank"),
    ],
)
async def test_bodies_are_checked_by_name(command: str, body: Any, field: str) -> None:
    async with guarded() as r:
        operator = Browser(r)
        await operator.login()
        status, _, answer = await operator.send("POST", command, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_argument")
        assert answer["error"]["field"] == field
        assert ADMIN not in json.dumps(answer)
        assert commanded(r) == []


async def test_bodies_are_json_small_and_quick() -> None:
    async with guarded(body_timeout_s=0.3) as r:
        operator = Browser(r)
        await operator.login()
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; x"):
            status, _, answer = await operator.send("POST", "pause", {}, **{"Content-Type": kind})
            assert (status, answer["error"]["code"]) == (415, "unsupported_media_type"), kind
        status, _, answer = await operator.send("POST", "pause", {"reason": "x" * 9000})
        assert (status, answer["error"]["code"]) == (413, "too_large")
        for path in ("pause", "session"):
            url = r.url + "api/v1/" + path
            for body in (b"{", b"\xff", b"[" * 5000, b"", b'{"rank":1e999}'):
                async with r.client.post(url, data=body, headers=headers_of(operator)) as answer:
                    assert answer.status == 400, body
                    assert (await answer.json())["error"]["field"] == "body"
        assert commanded(r) == []


def headers_of(browser: Browser) -> dict[str, str]:
    return {
        "Cookie": browser.cookie,
        "X-CSRF-Token": browser.csrf,
        "Content-Type": "application/json",
    }


async def raw(r: Rig, request: str, *, end: bool = False) -> bytes:
    """What a socket gets for these bytes, up to the connection's end or the end of the headers."""
    url = URL(r.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(request.replace("\n", "\r\n").encode())
        await writer.drain()
        async with asyncio.timeout(WAIT_S):
            return await (reader.read() if end else reader.readuntil(b"\r\n\r\n"))
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_body_that_drips_is_given_up_and_its_connection_closed() -> None:
    async with guarded(body_timeout_s=0.3) as r:
        operator = Browser(r)
        await operator.login()
        host = URL(r.url).authority
        lines = "".join(f"{name}: {value}\n" for name, value in headers_of(operator).items())
        answer = await raw(
            r,
            f"POST /api/v1/pause HTTP/1.1\nHost: {host}\n{lines}Content-Length: 500\n\n{{",
            end=True,
        )
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert b"slow_body" in answer
        assert commanded(r) == []


@pytest.mark.parametrize("method", METHODS)
async def test_a_foreign_host_or_origin_is_refused_on_every_method_and_path(method: str) -> None:
    async with guarded() as r:
        operator = Browser(r)
        await operator.login()
        host = URL(r.url).authority
        foreign = [
            f"Host: evil.example:{URL(r.url).port}\n",
            "Host: 127.0.0.1\n",
            f"Host: {host}\nHost: evil.example\n",
            f"Host: {host}\nOrigin: http://evil.example\n",
            f"Host: {host}\nOrigin: null\n",
            f"Host: {host}\nOrigin: https://{host}\n",
            f"Host: {host}\nOrigin: http://{host}.evil.example\n",
            f"Host: {host}\nOrigin: http://{host}\nOrigin: http://evil.example\n",
            f"Host: {host}\nSec-Fetch-Site: cross-site\n",
        ]
        own = "".join(f"{name}: {value}\n" for name, value in headers_of(operator).items())
        for path in PATHS:
            for who in foreign:
                body = "Content-Length: 2\n\n{}" if method == "POST" else "\n"
                answer = await raw(r, f"{method} /{path} HTTP/1.1\n{who}{own}{body}")
                # Two Host headers are refused by the parser of requests already.
                refused = (b"HTTP/1.1 403", b"HTTP/1.0 400" if who.count("Host") > 1 else b"?")
                assert answer.startswith(refused), (method, path, who, answer[:80])
                assert b"access-control" not in answer.lower()
        assert commanded(r) == []


async def test_a_web_socket_from_elsewhere_is_refused_and_ours_is_none() -> None:
    async with guarded() as r:
        host = URL(r.url).authority
        upgrade = (
            "Connection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\n"
        )
        for path in ("", "api/v1/status", "api/v1/session", "api/v1/nothing"):
            for who in (f"Host: evil\n{upgrade}", f"Host: {host}\nOrigin: http://evil\n{upgrade}"):
                answer = await raw(r, f"GET /{path} HTTP/1.1\n{who}\n")
                assert answer.startswith(b"HTTP/1.1 403"), (path, who)
        answer = await raw(r, f"GET /api/v1/status HTTP/1.1\nHost: {host}\n{upgrade}\n")
        assert answer.startswith(b"HTTP/1.1 200"), "it is answered as what it is"


async def test_other_sites_may_link_to_the_page_and_nothing_else() -> None:
    async with guarded() as r:
        operator = Browser(r)
        await operator.login()
        # Another port of this machine is the same site, and another origin all the same.
        for site in ("same-site", "cross-site"):
            link = {
                "Sec-Fetch-Site": site,
                "Sec-Fetch-Mode": "navigate",
                "Sec-Fetch-Dest": "document",
            }
            assert (await r.get("", headers=link))[0] == 200
            for path in ("api/v1/frame", "api/v1/explain", "static/app.js"):
                assert (await r.get(path, headers=link))[0] == 403
            for change in ({"Sec-Fetch-Dest": "iframe"}, {"Sec-Fetch-Mode": "no-cors"}):
                assert (await r.get("", headers=link | change))[0] == 403
            assert (await operator.command("pause", **{"Sec-Fetch-Site": site}))[0] == 403
        assert commanded(r) == []
        ours = {"Sec-Fetch-Site": "same-origin", "Origin": r.url.rstrip("/")}
        assert (await operator.command("pause", **ours))[0] == 200


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE"])
async def test_no_other_method_does_anything(method: str) -> None:
    async with guarded() as r:
        operator = Browser(r)
        await operator.login()
        for path in PATHS:
            if (method, path) == ("DELETE", "api/v1/session"):
                continue
            async with r.client.request(
                method, r.url + path, headers=headers_of(operator), data=b"{}"
            ) as answer:
                wanted = 404 if path == "api/v1/nothing" else 405
                assert answer.status == wanted, (method, path)
                assert "Access-Control-Allow-Origin" not in answer.headers
                assert wanted == 404 or "Allow" in answer.headers
        assert (await operator.send("GET", "session"))[2]["operator"]
        assert commanded(r) == []


async def test_tokens_and_secrets_are_in_no_log_and_no_answer(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    seen = ""
    async with guarded() as r:
        operator = Browser(r)
        seen += json.dumps((await Browser(r).login(OTHER))[1])
        await operator.login()
        for name in COMMANDS:
            seen += json.dumps((await operator.command(name))[1])
        r.service.refusals["Pause"] = (grpc.StatusCode.FAILED_PRECONDITION, "no")
        seen += json.dumps((await operator.command("pause"))[1])
        wrong = (
            {"token": [ADMIN]},
            {ADMIN: 1},
            {"token": ADMIN, "more": 1},
            ADMIN,
            {"token": ADMIN * 40},
        )
        for body in wrong:
            for path in ("session", "pause"):
                seen += json.dumps((await operator.send("POST", path, body))[2])
        for path in (f"status?token={ADMIN}", f"{ADMIN}", f"plan?id={ADMIN}"):
            seen += (await r.get("api/v1/" + path))[2].decode()
        r.service.refuse = grpc.StatusCode.UNAUTHENTICATED
        seen += json.dumps((await operator.command("resume"))[1])
        r.service.refuse = None
        await operator.send("DELETE", "session")
        for path in ("status", "placement", "events", "openapi.json"):
            seen += (await r.get("api/v1/" + path))[2].decode()
        lines = r.lines.getvalue()
    told = [json.loads(line) for line in lines.splitlines()]
    events = {(line["event"], line.get("command", ""), line.get("result", "")) for line in told}
    assert ("operator's command", "pause", "OK") in events
    assert ("operator's command", "pause", "FAILED_PRECONDITION") in events
    assert ("operator's login refused", "", "") in events
    logged = lines + caplog.text + "".join(capfd.readouterr())
    for secret in (ADMIN, READ, OTHER, operator.csrf, operator.cookie.partition("=")[2]):
        assert secret not in logged
        # A plan id that one asks for is named in "no such plan": that is no token of the page's.
        assert secret not in seen.replace(f"no plan {ADMIN!r}", "")
