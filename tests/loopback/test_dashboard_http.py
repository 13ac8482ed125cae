"""The page over sockets: hosts, headers, tags, events, slow browsers, a controller that goes."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import aiohttp
import grpc
import pytest
from yarl import URL

from moe_serve.dashboard.actor import DashboardActor
from moe_serve.dashboard.feed import Feed
from moe_serve.dashboard.server import DashboardServer, bind
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.errors import StartRefused
from tests.fakes.page import WAIT_S, lone_page, rig
from tests.fakes.placement_service import FakePlacementService, Script, serve

# One loop for all tests: gRPC serves every loop of a process with one poller, and a loop that has
# been closed disturbs it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = ["", "static/app.js", "api/v1/frame", "api/v1/stream", "nothing/here"]


async def events(answer: aiohttp.ClientResponse) -> AsyncGenerator[tuple[str, Any, str], None]:
    """(name, data, id) of a stream."""
    name = data = number = ""
    async for raw in answer.content:
        key, _, value = raw.decode().rstrip("\n").partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            data = value
        elif key == "id":
            number = value
        elif not key and name:
            yield name, json.loads(data), number
            name = data = number = ""


async def until_name(
    answer: aiohttp.ClientResponse, name: str
) -> AsyncIterator[tuple[str, Any, str]]:
    """Events up to the first of a name."""
    async with contextlib.aclosing(events(answer)) as found:
        async for event in found:
            yield event
            if event[0] == name:
                return


async def first(answer: aiohttp.ClientResponse, wanted: Callable[[str, Any], bool]) -> Any:
    """Data of the first event that is as wanted."""
    async with asyncio.timeout(WAIT_S), contextlib.aclosing(events(answer)) as found:
        async for name, data, _ in found:
            if wanted(name, data):
                return data
    raise AssertionError("the stream ended")


async def test_the_page_and_its_modules_are_served_under_the_policy() -> None:
    async with rig() as r:
        for path, kind in [("", "text/html"), ("static/app.js", "text/javascript")]:
            status, headers, body = await r.get(path)
            assert (status, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
            assert body
            assert "script-src 'self'" in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
        status, headers, _ = await r.get("static/app.js", headers={"If-None-Match": "x"})
        tag = headers["ETag"]
        assert (await r.get("static/app.js", headers={"If-None-Match": tag}))[0] == 304
        async with r.client.head(r.url) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.:80", ""])
async def test_a_foreign_host_is_refused_on_every_path_and_method(host: str) -> None:
    async with rig() as r:
        for path in PATHS:
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                async with r.client.request(method, r.url + path, headers={"Host": host}) as answer:
                    assert answer.status == 403, (method, path)
                    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]


async def test_the_bound_host_and_localhost_are_let_in() -> None:
    async with rig() as r:
        port = URL(r.url).port
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            assert (await r.get("", headers={"Host": host}))[0] == 200


async def test_a_foreign_origin_is_refused_and_our_own_is_not() -> None:
    async with rig() as r:
        for path in PATHS[:-1]:
            assert (await r.get(path, headers={"Origin": "http://evil.example"}))[0] == 403
        assert (await r.get("", headers={"Origin": "null"}))[0] == 403
        assert (await r.get("", headers={"Origin": r.url.rstrip("/")}))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_the_page_is_read_only(method: str) -> None:
    async with rig() as r:
        for path in PATHS:
            async with r.client.request(method, r.url + path) as answer:
                assert answer.status == 405, path
        assert not {"Pause", "SetBudget", "ApplyPlan"} & set(r.service.calls)


async def test_no_path_of_a_request_reaches_a_disk() -> None:
    async with rig() as r:
        for path in (
            "../app.py",
            "%2e%2e/app.py",
            "..%2fapp.py",
            "/etc/passwd",
            "vendor/",
            "a%00b",
        ):
            url = URL(r.url + "static/" + path, encoded=True)
            async with r.client.get(url) as answer:
                assert answer.status == 404, path


async def test_a_frame_has_a_tag_until_the_next_window() -> None:
    async with rig() as r:
        status, headers, _ = await r.get("api/v1/frame")
        assert (status, headers["Retry-After"]) == (503, "5")
        r.service.close_window()
        frame = await r.until("api/v1/frame", lambda f: f["window"] == 1)
        assert (frame["layers"], frame["experts"]) == (4, 32)
        _, headers, _ = await r.get("api/v1/frame")
        tag = {"If-None-Match": headers["ETag"]}
        status, headers, body = await r.get("api/v1/frame", headers=tag)
        assert (status, body) == (304, b"")
        r.service.close_window()
        await r.until("api/v1/frame", lambda f: f["window"] == 2)
        assert (await r.get("api/v1/frame", headers=tag))[0] == 200


async def test_the_stream_brings_frames_placement_moves_and_reasons() -> None:
    async with rig() as r, r.stream() as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        await first(answer, lambda name, data: name == "placement" and data["experts"] == 32)
        r.service.close_window()
        await first(answer, lambda name, data: name == "frame" and data["window"] == 1)
        assert r.service.begin_plan()
        r.service.tell()
        moves = await first(answer, lambda name, data: name == "move")
        assert moves[0]["state"] == "running"
        assert "fair share" in moves[0]["reason"]
        r.service.finish_plan()
        r.service.tell()
        moves = await first(answer, lambda name, data: name == "move")
        assert {move["state"] for move in moves} == {"done"}
        past = await r.until("api/v1/history", lambda h: len(h["marks"]) == 1)
        assert [point["window"] for point in past["points"]] == [1]
        document = await r.json("api/v1/placement")
        assert [move["plan_id"] for move in document["moves"]] == [moves[0]["plan_id"]] * len(moves)


async def test_a_reconnect_gets_only_the_records_it_lacks() -> None:
    async with rig() as r:
        for n in range(3):
            r.service.record("in_balance", "kept", f"record {n}")
        r.service.tell()
        await r.until("api/v1/events?after=0", lambda e: e["last"] == 3)
        async with r.stream() as answer:
            async with asyncio.timeout(WAIT_S):
                found = [e async for e in until_name(answer, "record")]
        _, data, number = found[-1]
        assert [record["detail"] for record in data] == ["record 0", "record 1", "record 2"]
        life, _, last = number.partition("-")
        r.service.record("in_balance", "kept", "record 3")
        r.service.tell()
        await r.until("api/v1/events?after=3", lambda e: e["last"] == 4 and len(e["records"]) == 1)
        async with r.stream(**{"Last-Event-ID": number}) as answer:
            data = await first(answer, lambda name, data: name == "record")
        assert [record["detail"] for record in data] == ["record 3"]
        # The id of another life of the page means nothing to this one.
        async with r.stream(**{"Last-Event-ID": f"0{life[1:]}x-{last}"}) as answer:
            data = await first(answer, lambda name, data: name == "record")
        assert len(data) == 4
        # Nor does a number that none of ours can have; one too long for int() least of all.
        for number in ("9" * 19, "1" * 5000, "-1", "x"):
            async with r.stream(**{"Last-Event-ID": f"{life}-{number}"}) as answer:
                assert answer.status == 200
                data = await first(answer, lambda name, data: name == "record")
            assert len(data) == 4


@pytest.mark.parametrize("after", ["-1", "x", "", "1e3", "9" * 40, "%D9%A1"])
async def test_events_after_what_is_no_number_are_refused(after: str) -> None:
    async with rig() as r:
        url = URL(f"{r.url}api/v1/events?after={after}", encoded=True)
        async with r.client.get(url) as answer:
            assert answer.status == 400, await answer.text()
        assert (await r.get("api/v1/events?after=0"))[0] == 200


async def test_a_browser_too_many_is_refused_and_a_place_becomes_free() -> None:
    async with rig(clients_max=2) as r:
        async with r.stream() as one, r.stream() as two:
            assert (one.status, two.status) == (200, 200)
            async with r.stream() as three:
                assert three.status == 503
                assert three.headers["Retry-After"] == "5"
            assert (await r.get("api/v1/status"))[0] == 200
        async with asyncio.timeout(WAIT_S):
            while True:
                async with r.stream() as again:
                    if again.status == 200:
                        break
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def slow_stream(port: int) -> AsyncIterator[socket.socket]:
    """A browser that has asked for the stream and reads nothing."""
    with contextlib.closing(socket.socket()) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", port))
        ask = f"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        await loop.sock_sendall(slow, ask.encode())
        async with asyncio.timeout(WAIT_S):
            # Its place is taken once the server has begun to answer.
            await loop.sock_recv(slow, 1)
        yield slow


def put_frame(feed: Feed, number: int) -> None:
    feed.frame.put({"seq": number, "pad": "x" * 1_000_000})
    feed.notify()


async def test_a_slow_browser_loses_frames_and_delays_nobody() -> None:
    last = 60
    async with (
        lone_page() as (feed, port),
        slow_stream(port) as slow,
        aiohttp.ClientSession(read_bufsize=1 << 22) as client,
    ):
        async with (
            asyncio.timeout(WAIT_S),
            client.get(f"http://127.0.0.1:{port}/api/v1/stream") as answer,
            contextlib.aclosing(events(answer)) as stream,
        ):
            for number in range(1, last + 1):
                put_frame(feed, number)
                name, data = "", {}
                while name != "frame":
                    name, data, _ = await anext(stream)
                assert data["seq"] == number, "the fast browser gets each, at once"
        # Now the slow one reads: what had been under way, then the newest, not all it missed.
        seen: list[int] = []
        rest = b""
        async with asyncio.timeout(WAIT_S):
            while not seen or seen[-1] != last:
                rest += await asyncio.get_running_loop().sock_recv(slow, 1 << 20)
                *lines, rest = rest.split(b'"pad"')
                seen += [int(line.rsplit(b'"seq":', 1)[1].rstrip(b",")) for line in lines]
        assert len(seen) < last / 2, seen


async def test_a_browser_that_takes_nothing_is_let_go() -> None:
    async with lone_page(write_timeout_s=0.3, clients_max=1) as (feed, port), slow_stream(port):
        async with aiohttp.ClientSession() as client, asyncio.timeout(WAIT_S):
            number = 0
            while True:
                number += 1
                put_frame(feed, number)
                await asyncio.sleep(0.05)
                async with client.get(f"http://127.0.0.1:{port}/api/v1/stream") as answer:
                    if answer.status == 200:
                        break
        assert number > 2, "it was let in, and let go only later"


async def test_a_controller_that_goes_is_said_and_found_again() -> None:
    async with rig() as r:
        r.service.close_window()
        await r.until("api/v1/status", lambda s: s["connection"] == "live")
        await r.until("api/v1/frame", lambda f: f["window"] == 1)
        async with r.stream() as answer:
            await r.server.stop(0)
            status = await first(
                answer, lambda name, data: name == "status" and data["connection"] == "away"
            )
        assert status["message"]
        assert status["data_age_s"] is not None
        assert (await r.json("api/v1/frame"))["window"] == 1, (
            "the last figures stay, with their age"
        )
        r.service = FakePlacementService(Script(window_s=0.2))
        r.service.term = 2
        r.server, _ = await serve(r.service, int(r.address.partition(":")[2]))
        await r.until("api/v1/status", lambda s: s["connection"] == "live" and not s["message"])
        await r.until("api/v1/placement", lambda p: p["term"] == 2)


async def test_a_task_of_the_page_that_died_is_said_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig() as r:
        r.service.close_window()
        await r.until("api/v1/status", lambda s: s["connection"] == "live")
        feed = r.page.feed
        assert feed is not None
        monkeypatch.setattr(feed.beginnings, "see", None)
        r.service.tell()
        await r.until("api/v1/status", lambda s: "the page failed" in s["message"])
        for _ in range(3):
            r.service.close_window()
            r.service.tell()
            watched = r.service.window
            await r.until("api/v1/frame", lambda f, n=watched: f["window"] == n)
        status = await r.json("api/v1/status")
        assert (status["connection"], "restart it" in status["message"]) == ("away", True)


async def test_load_that_stays_away_is_not_live() -> None:
    async with rig(stale_windows=0.5) as r:
        r.service.close_window()
        await r.until("api/v1/status", lambda s: s["connection"] == "live" and s["data_age_s"])
        status = await r.until("api/v1/status", lambda s: s["connection"] == "stale")
        assert status["data_age_s"] > status["stale_after_s"]
        r.service.close_window()
        await r.until("api/v1/status", lambda s: s["connection"] == "live")


async def test_a_page_without_a_controller_starts_and_says_so() -> None:
    async with lone_page(connect_timeout_s=0.2) as (_, port), aiohttp.ClientSession() as client:
        async with asyncio.timeout(WAIT_S):
            while True:
                async with client.get(f"http://127.0.0.1:{port}/api/v1/status") as answer:
                    status = await answer.json()
                if status["message"]:
                    break
                await asyncio.sleep(0.02)
        assert status["connection"] == "connecting"
        assert "127.0.0.1:9" in status["message"]


async def test_a_refused_token_is_named() -> None:
    async with rig() as r:
        r.service.refuse = grpc.StatusCode.UNAUTHENTICATED
        await r.server.stop(0)
        r.server, _ = await serve(r.service, int(r.address.partition(":")[2]))
        status = await r.until("api/v1/status", lambda s: "token" in s["message"])
        assert status["connection"] != "live"


async def test_load_that_does_not_fit_its_shape_is_said_and_ends_nothing() -> None:
    async with rig() as r:
        r.service.close_window()
        await r.until("api/v1/frame", lambda f: f["window"] == 1)
        assert r.service.load is not None
        r.service.load.demand = b"123"
        r.service.load.window = 2
        r.service.tell()
        await r.until("api/v1/status", lambda s: "demand" in s["message"])
        r.service.close_window()
        await r.until("api/v1/frame", lambda f: f["window"] > 1)
        await r.until("api/v1/status", lambda s: s["connection"] == "live")


async def test_a_taken_port_is_one_line_and_leaves_nothing() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen(1)
        port = int(taken.getsockname()[1])
        page = DashboardServer(DashboardSettings(admin_address="127.0.0.1:9", port=port))
        with pytest.raises(StartRefused, match=str(port)):
            await page.start()
        await page.stop()
        actor = DashboardActor("127.0.0.1:9", port=port)
        with pytest.raises(StartRefused, match=str(port)):
            await asyncio.to_thread(actor.start)
        await asyncio.to_thread(actor.stop)


async def test_the_actor_serves_in_a_thread_of_its_own() -> None:
    actor = DashboardActor("127.0.0.1:9")
    url = await asyncio.to_thread(actor.start)
    assert await asyncio.to_thread(actor.start) == url
    async with aiohttp.ClientSession() as client:
        async with client.get(url) as answer:
            assert answer.status == 200
        await asyncio.to_thread(actor.stop)
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(url)


async def test_a_page_whose_streams_fail_can_be_stopped_at_any_moment() -> None:
    for turn in range(20):
        async with asyncio.timeout(WAIT_S), rig(backoff_max_s=0.06) as r:
            r.service.refuse = grpc.StatusCode.UNAUTHENTICATED
            r.service.tokens = {"x" * 20: "read"}
            asked = len(r.service.calls)
            while True:
                if len(r.service.calls) > asked + turn % 3:
                    break
                await asyncio.sleep(0)
