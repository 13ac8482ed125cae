"""A controller that cannot start says so at its admin port, where it is looked for, and starts by
itself once a person has mended what was wrong."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from moe_serve.bootstrap.record import ServiceRecord, write_record
from moe_serve.cli.app import app
from moe_serve.controller import actor as controller_actor
from moe_serve.controller.actor import ControllerActor
from moe_serve.controller.admin_server import PORT_FILE, SERVICE_NAME, noted_port
from moe_serve.controller.journal_store import STATE_FILE
from moe_serve.controller.settings import ControllerSettings
from moe_serve.errors import FailedPrecondition
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc import placement_pb2_grpc
from moe_serve.rpc.status import from_rpc_error
from moe_serve.telemetry import NullSink
from tests.fakes.controller import make_cluster, make_settings, until
from tests.fakes.fleet import FakeCluster, FakeFleet

pytestmark = pytest.mark.loopback


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(controller_actor, "START_PAUSE_S", 0.1)
    monkeypatch.setattr(controller_actor, "REFUSED_PAUSE_S", 0.1)
    monkeypatch.setattr(controller_actor, "RaySink", NullSink)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))


@asynccontextmanager
async def acting(
    settings: ControllerSettings, cluster: FakeCluster
) -> AsyncIterator[ControllerActor]:
    """The actor as Ray makes it: it starts by itself, and nobody asks."""
    actor = ControllerActor.__new__(ControllerActor)
    await actor.__init__(settings, FakeFleet(cluster))  # type: ignore[misc]
    try:
        yield actor
    finally:
        actor._starting.cancel()
        await asyncio.gather(actor._starting, return_exceptions=True)
        await actor._service.stop()


async def answer(address: str) -> pb.GetPlacementResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = placement_pb2_grpc.PlacementServiceStub(channel)
        try:
            return await stub.GetPlacement(pb.GetPlacementRequest(), timeout=5.0)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        return int((await stub.Check(asked, timeout=5.0)).status)


async def served_once(settings: ControllerSettings, cluster: FakeCluster) -> str:
    """A service that ran and whose controller died. Returns its admin address."""
    async with acting(settings, cluster) as actor:
        found: dict[str, Any] = {}

        async def look() -> None:
            while not found.get("ready"):
                found.update(await actor.describe())
                await asyncio.sleep(0.02)

        await asyncio.wait_for(look(), 20.0)
        return str(found["admin_address"])


def spoil(folder: Path) -> None:
    for suffix in ("-wal", "-shm"):
        (folder / f"{STATE_FILE}{suffix}").unlink(missing_ok=True)
    (folder / STATE_FILE).write_bytes(b"no database at all, but as long as one's header" * 100)


def age(folder: Path) -> None:
    with sqlite3.connect(folder / STATE_FILE) as db:
        db.execute("UPDATE meta SET value = '1' WHERE key = 'format'")
    db.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("harm", "words"),
    [(spoil, "is damaged"), (age, "has format '1'")],
    ids=["damaged", "old format"],
)
async def test_a_refusal_is_answered_where_the_controller_was(
    tmp_path: Path, harm: Any, words: str
) -> None:
    cluster = make_cluster()
    settings = make_settings(tmp_path / "state")
    address = await served_once(settings, cluster)
    before = cluster.living()
    harm(settings.state_dir)
    async with acting(settings, cluster) as actor:
        await until(lambda: actor._service.admin_address == address)
        with pytest.raises(FailedPrecondition, match=words) as caught:
            await answer(address)
        assert caught.value.message.startswith("the controller does not start: journal ")
        assert "\n" not in caught.value.message
        assert await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
        described = await actor.describe()
        assert (described["state"], described["ready"]) == ("refused", False)
        assert words in described["fault"]
        write_record(
            ServiceRecord(
                service="tiny",
                ray_address="",
                namespace="moe_serve",
                admin_address=address,
                router_addresses=(),
                dashboard_url="",
                config_file="",
                network="loopback",
            )
        )
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["status"])
        assert shown.exit_code != 0
        assert words in shown.stderr.replace("\n", " ")
        assert cluster.living() == before, "the parts serve on without it"
        # What the line says to do is enough: nobody starts the controller again.
        for file in settings.state_dir.glob(f"{STATE_FILE}*"):
            file.rename(file.with_name(f"away-{file.name}"))
        for file in settings.state_dir.glob("inputs.db*"):
            file.unlink()
        await until(lambda: bool(actor._service.describe()["ready"]), wait_s=20.0)
        assert (await answer(address)).term == 2
        assert await health(address) == health_pb2.HealthCheckResponse.SERVING
        assert cluster.living() == before


@pytest.mark.asyncio
async def test_nothing_of_it_stays_after_a_start_that_never_was(tmp_path: Path) -> None:
    cluster = make_cluster()
    settings = make_settings(tmp_path / "state")
    settings.state_dir.mkdir(mode=0o700)
    spoil(settings.state_dir)
    async with acting(settings, cluster) as actor:
        started = await actor.start()
        assert "is damaged" in started["fault"]
        await until(lambda: bool(actor._service.admin_address))
        address = actor._service.admin_address
    with pytest.raises(Exception, match=r"UNAVAILABLE|refused|connect"):
        await answer(address)


def test_a_noted_port_that_is_no_port_is_not_believed(tmp_path: Path) -> None:
    assert noted_port(tmp_path) == 0
    for text, port in (("4711\n", 4711), ("", 0), ("70000", 0), ("-1", 0), ("1" * 99, 0), ("x", 0)):
        (tmp_path / PORT_FILE).write_text(text)
        assert noted_port(tmp_path) == port
