"""S18: every admin action and every refused login leaves one line (who, what, epoch, result), and
strangers cannot fill the log."""

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from moe_serve.controller.admin_server import AdminServer
from moe_serve.rpc.audit import AuditLine, caller
from moe_serve.rpc.auth import Role, bearer_metadata, method_roles
from moe_serve.telemetry import AuditLog
from moe_serve.telemetry.audit import FILE_NAME, REFUSALS_PER_S
from tests.fakes.secured import TOKENS, NobodyAtHome, controller_settings, token_file

PLACEMENT = "/moe_serve.rpc.v1.PlacementService/"
ADMIN = sorted(name for name, role in method_roles().items() if role is Role.ADMIN)
FLOOD = 200
"""Calls at once, fewer than one connection may have open: beyond that the server refuses calls."""
STRANGER = bearer_metadata("w" * 20)


@asynccontextmanager
async def admin_port(folder: Path, **changes: Any) -> AsyncIterator[grpc.aio.Channel]:
    server = AdminServer(NobodyAtHome(controller_settings(folder, **changes)))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield channel
    finally:
        await server.stop(0.0)


async def ask(channel: grpc.aio.Channel, method: str, metadata: Any) -> str:
    try:
        await channel.unary_unary(method)(b"", metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


@pytest.mark.asyncio
async def test_s18_every_admin_action_leaves_a_line(tmp_path: Path) -> None:
    async with admin_port(tmp_path, token_file=token_file(tmp_path)) as channel:
        metadata = bearer_metadata(TOKENS[Role.ADMIN])
        results = [(method, await ask(channel, method, metadata)) for method in ADMIN]
        await ask(channel, PLACEMENT + "GetPlacement", metadata)
    assert len(ADMIN) >= 7
    found = lines(tmp_path)
    assert [(line["method"], line["result"]) for line in found] == results
    for line in found:
        assert line["event"] == "admin call"
        assert line["who"] == caller(f"Bearer {TOKENS[Role.ADMIN]}")
        assert line["peer"].startswith(("ipv4:127.0.0.1", "ipv6:"))
        assert line["epoch"] == -1, "nobody is at home who knows an epoch"


@pytest.mark.asyncio
async def test_s18_a_service_without_tokens_is_audited_too(tmp_path: Path) -> None:
    async with admin_port(tmp_path) as channel:
        result = await ask(channel, PLACEMENT + "Pause", ())
    (line,) = lines(tmp_path)
    assert (line["who"], line["method"], line["result"]) == (
        "no token",
        PLACEMENT + "Pause",
        result,
    )


@pytest.mark.asyncio
async def test_s18_refused_logins_leave_lines_and_no_token(tmp_path: Path) -> None:
    async with admin_port(tmp_path, token_file=token_file(tmp_path)) as channel:
        assert await ask(channel, PLACEMENT + "Pause", STRANGER) == "UNAUTHENTICATED"
        assert await ask(channel, PLACEMENT + "Pause", ()) == "UNAUTHENTICATED"
        read = bearer_metadata(TOKENS[Role.READ])
        assert await ask(channel, PLACEMENT + "Pause", read) == "PERMISSION_DENIED"
    found = [(line["event"], line["who"], line["result"]) for line in lines(tmp_path)]
    assert found == [
        ("call refused", caller("Bearer " + "w" * 20), "UNAUTHENTICATED"),
        ("call refused", "no token", "UNAUTHENTICATED"),
        ("call refused", caller(f"Bearer {TOKENS[Role.READ]}"), "PERMISSION_DENIED"),
    ]
    text = (tmp_path / FILE_NAME).read_text()
    assert not any(token in text for token in (*TOKENS.values(), "w" * 20))
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


@pytest.mark.asyncio
async def test_s18_a_flood_of_strangers_does_not_hide_an_action(tmp_path: Path) -> None:
    async with admin_port(tmp_path, token_file=token_file(tmp_path)) as channel:
        flood = [ask(channel, PLACEMENT + "Pause", STRANGER) for _ in range(FLOOD)]
        action = ask(channel, PLACEMENT + "Pause", bearer_metadata(TOKENS[Role.ADMIN]))
        assert (await asyncio.gather(*flood, action))[-1] == "INVALID_ARGUMENT", "it came through"
    found = lines(tmp_path)
    assert sum(line["event"] == "admin call" for line in found) == 1
    by_second: dict[str, int] = {}
    for line in found:
        if line["event"] == "call refused":
            second = line["ts"][:19]
            by_second[second] = by_second.get(second, 0) + 1
    # A second of the monotonic clock may lie across two of the wall's.
    assert max(by_second.values()) <= 2 * REFUSALS_PER_S
    assert sum(by_second.values()) < FLOOD


def test_s18_the_next_line_says_how_many_were_left_out(tmp_path: Path) -> None:
    now = [5.0]
    written: list[str] = []

    class Sink:
        def write(self, text: str, /) -> None:
            written.append(text)

        def flush(self) -> None:
            pass

    log = AuditLog(Sink, part="controller", now_s=lambda: now[0])
    line = AuditLine("no token", "ipv4:127.0.0.1:1", "/a/" + "b" * 9000, "UNAUTHENTICATED")
    for _ in range(REFUSALS_PER_S + 7):
        log.refuse(line)
    assert len(written) == REFUSALS_PER_S
    now[0] = 6.0
    log.refuse(line)
    assert json.loads(written[-1])["left_out"] == 7
    assert max(map(len, written)) < 500


@pytest.mark.asyncio
async def test_s18_a_folder_that_takes_no_file_ends_no_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE_NAME).mkdir()
    async with admin_port(tmp_path) as channel:
        assert await ask(channel, PLACEMENT + "Pause", ()) == "INVALID_ARGUMENT"
    (line,) = [json.loads(x) for x in capfd.readouterr().err.splitlines() if "admin call" in x]
    assert line["result"] == "INVALID_ARGUMENT"


def test_s18_a_full_disk_loses_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Full:
        def write(self, text: str, /) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            raise AssertionError("nothing was written")

    AuditLog(Full, part="controller").note(AuditLine("no token", "p", "/a/b", "OK", 3))
    (line,) = [json.loads(text) for text in capfd.readouterr().err.splitlines()]
    assert (line["method"], line["epoch"], line["audit_file"]) == (
        "/a/b",
        3,
        "No space left on device",
    )
