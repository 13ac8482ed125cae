"""The command line against a real admin port on loopback."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from moe_serve.cli.admin import CALL_TIMEOUT_S, AdminTarget, GrpcAdmin
from moe_serve.cli.app import app
from moe_serve.cli.exits import CannotReach
from moe_serve.errors import MoeServeError, PermissionDenied, Unavailable
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc.status import abort
from tests.fakes.placement_service import FakePlacementService, serve


class Recorder(FakePlacementService):
    """Says that it is too early where no window has closed, as a controller does."""

    hangs = False

    async def GetPlacement(self, request: Any, context: Any) -> pb.GetPlacementResponse:
        if self.hangs:
            await asyncio.sleep(CALL_TIMEOUT_S)
        return await super().GetPlacement(request, context)

    async def GetLoad(self, request: Any, context: Any) -> pb.GetLoadResponse:
        if self.load is None:
            await abort(context, Unavailable("no load window has closed yet"))
        return await super().GetLoad(request, context)


@dataclass
class Running:
    address: str
    service: Recorder


@pytest.fixture
def running() -> Iterator[Running]:
    """A fake controller in a loop and thread of its own: the command line blocks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Recorder, grpc.aio.Server, str]:
        service = Recorder()
        service.close_window()
        server, address = await serve(service)
        return service, server, address

    service, server, address = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    yield Running(address, service)
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


@pytest.fixture(autouse=True)
def _no_service_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MOE_SERVE_ADDRESS", raising=False)


def _run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


def test_status_of_a_running_service(running: Running) -> None:
    result = _run("status", "--check", "--address", running.address)
    assert result.exit_code == 0, result.stderr
    assert "model tiny-moe" in result.stdout
    assert "State steady" in result.stdout
    shown = json.loads(_run("status", "--address", running.address, "-o", "json").stdout)
    assert len(shown["ranks"]) == running.service.script.ranks
    assert 0 < shown["load"]["balancedness"] <= 1


def test_the_address_comes_from_the_environment(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_SERVE_ADDRESS", running.address)
    assert _run("status").exit_code == 0


def test_events_end_where_nothing_is_followed(running: Running) -> None:
    running.service.record("in_balance", "kept", "nothing to do")
    result = _run("events", "--address", running.address)
    assert result.exit_code == 0, result.stderr
    assert "in_balance" in result.stdout


def test_placement_is_watched(running: Running) -> None:
    admin = GrpcAdmin(AdminTarget(running.address))
    seen = admin.watch_placement()
    assert next(seen).model == "tiny-moe"
    seen.close()  # type: ignore[attr-defined]  # a generator, which ends the stream
    admin.close()


def test_a_controller_that_is_away_is_exit_3(running: Running) -> None:
    running.service.refuse = grpc.StatusCode.UNAVAILABLE
    result = _run("status", "--address", running.address)
    assert result.exit_code == 3
    assert f"the controller at {running.address} does not answer" in result.stderr


def test_a_token_without_the_right_is_exit_1(running: Running) -> None:
    running.service.refuse = grpc.StatusCode.PERMISSION_DENIED
    assert _run("status", "--address", running.address).exit_code == 1
    admin = GrpcAdmin(AdminTarget(running.address))
    with pytest.raises(PermissionDenied):
        admin.placement()
    admin.close()


def test_a_method_the_server_has_not_is_a_typed_error(running: Running) -> None:
    admin = GrpcAdmin(AdminTarget(running.address))
    with pytest.raises(MoeServeError, match="commands to the controller's admin port"):
        admin.set_budget(0, 1)
    admin.close()


def test_a_service_that_has_no_window_yet_is_reached(running: Running) -> None:
    running.service.load = None
    result = _run("status", "--address", running.address)
    assert result.exit_code == 0, result.stderr
    assert "no closed window yet" in result.stdout


def test_a_call_of_a_wait_ends_with_it(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that hangs: a wait does not go on for a call's own deadline."""
    admin = GrpcAdmin(AdminTarget(running.address))
    with admin.within(-1.0):
        assert admin.placement().ranks, "the last look is one"
    running.service.hangs = True
    with monkeypatch.context() as patched:
        patched.setattr("moe_serve.cli.admin.LAST_CALL_S", 0.2)
        for outer_s, inner_s in ((0.5, 60.0), (60.0, 0.5), (0.5, 0.0)):
            began_s = time.monotonic()
            with (
                admin.within(outer_s),
                admin.within(inner_s),
                pytest.raises(CannotReach, match="Deadline Exceeded"),
            ):
                admin.placement()
            assert time.monotonic() - began_s < CALL_TIMEOUT_S / 2
    admin.close()


def test_nobody_listens() -> None:
    admin = GrpcAdmin(AdminTarget("127.0.0.1:9"))
    with pytest.raises(CannotReach, match="GetPlacement"):
        admin.placement()
    with pytest.raises(CannotReach, match="WatchPlacement"):
        next(admin.watch_placement())
    admin.close()
