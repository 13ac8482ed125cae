"""The probe of a container asks a real gRPC server, in the open and over TLS."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import SERVICE_NAME, RouterServer
from moe_serve.rpc.health_probe import main
from tests.fake_shards import FakeWorld, marker_spec, router_settings
from tests.fakes.kubernetes_files import of_kind


async def probe(*arguments: str) -> int:
    return await asyncio.to_thread(main, arguments)


def certificate(folder: Path, address: str) -> Path:
    """Make an authority, and with the pods' script a certificate for an address; its folder."""
    (config,) = of_kind("ConfigMap")
    (folder / "certificate.sh").write_text(config["data"]["certificate.sh"], encoding="utf-8")
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        "-subj /CN=moe-serve -keyout ca.key -out ca.pem"
    )
    tls = folder / "tls"
    tls.mkdir()
    environment = {
        "PATH": "/usr/bin:/bin",
        "POD_IP": address,
        "AUTHORITY_DIR": str(folder),
        "TLS_DIR": str(tls),
    }
    for command in (make.split(), ["/bin/sh", "certificate.sh"]):
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return tls


@pytest.mark.asyncio
async def test_a_router_serves_once_every_expert_has_a_replica(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = FakeWorld(marker_spec())
    world.place()
    core = RouterCore(router_settings(world.spec), world.open_channel)
    server = RouterServer(core)
    address = await server.start()
    try:
        assert await probe(address) == 0, "the server itself is up"
        assert await probe(address, "--service", SERVICE_NAME) == 1
        core.install_table(world.table())
        async with asyncio.timeout(30):
            while await probe(address, "--service", SERVICE_NAME):
                pass
        assert await probe(address, "--service", "no.such.Service") == 2
    finally:
        await server.stop(0.0)
    assert await probe(address, "--timeout", "2") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "NOT_FOUND" in said.err
    assert f"{address}: UNAVAILABLE" in said.err


@pytest.mark.asyncio
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_over_tls_with_the_certificate_that_a_pod_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tls = certificate(tmp_path, "127.0.0.1")
    world = FakeWorld(marker_spec())
    settings = router_settings(
        world.spec, tls_certificate=tls / "server.pem", tls_key=tls / "server.key"
    )
    server = RouterServer(RouterCore(settings, world.open_channel))
    address = await server.start()
    try:
        assert await probe(address, "--tls-ca", str(tls / "ca.pem")) == 0
        assert await probe(address, "--timeout", "2") == 2, "in the open nobody answers"
        assert await probe(address, "--tls-ca", str(tmp_path / "absent.pem")) == 2
    finally:
        await server.stop(0.0)
    assert "absent.pem" in capsys.readouterr().err
