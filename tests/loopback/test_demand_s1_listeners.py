"""S1 and S3: everything listens on loopback unless told otherwise, and refuses to start where it
would be open, or where its secrets are not safe."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from moe_serve.config.load import ConfigInvalid, parse_config
from moe_serve.controller.admin_server import AdminServer
from moe_serve.dashboard.server import DashboardServer
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.errors import StartRefused, Unauthenticated
from moe_serve.router.actor import RouterActor, StartAnswer
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import RouterServer
from moe_serve.rpc import dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.auth import TokenFile, bearer_metadata
from moe_serve.rpc.options import server_credentials
from moe_serve.wire.security import CurveKeys, ServerSecurity
from moe_serve.wire.server import WireServer
from placement.messages.codec import decode_as
from tests.fake_shards import FakeWorld, marker_spec, router_settings
from tests.fakes.marker_experts import marker_shard
from tests.fakes.secured import TOKENS, NobodyAtHome, controller_settings, tls_files, token_file

LISTENS = "0A"
ROOT = Path(__file__).parents[2]


def listening() -> set[tuple[str, int]]:
    """(address, port) of every TCP socket this process listens on."""
    inodes = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    found = set()
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] != LISTENS or f"socket:[{words[9]}]" not in inodes:
                continue
            address, _, port = words[1].partition(":")
            raw = bytes.fromhex(address)
            turned = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
            found.add((socket.inet_ntop(family, turned), int(port, 16)))
    return found


def is_inside(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def a_core(**changes: Any) -> RouterCore:
    world = FakeWorld(marker_spec())
    return RouterCore(router_settings(world.spec, **changes), world.open_channel)


@pytest.mark.asyncio
async def test_s1_every_listener_is_on_loopback_by_default(tmp_path: Path) -> None:
    before = listening()
    router = RouterServer(a_core())
    admin = AdminServer(NobodyAtHome(controller_settings(tmp_path)))
    page = DashboardServer(DashboardSettings("127.0.0.1:1"))
    shard = marker_shard()
    await admin.start()
    addresses = [await router.start(), admin.address, await page.start(), shard.start().address]
    opened = listening() - before
    try:
        ports = {int(address.strip("/").rpartition(":")[2]) for address in addresses}
        assert {port for _, port in opened} == ports, "a socket that nobody has told of"
        assert len(ports) == 4
        assert [where for where in opened if not is_inside(where[0])] == []
    finally:
        shard.stop()
        await page.stop()
        await admin.stop()
        await router.stop(0.0)


def test_s1_the_look_at_sockets_sees_an_open_one() -> None:
    before = listening()
    with socket.socket() as opened:
        opened.bind(("0.0.0.0", 0))  # noqa: S104 - nothing answers there
        opened.listen(1)
        (found,) = listening() - before
    assert not is_inside(found[0])


OPEN_HOSTS = ["0.0.0.0", "::", "192.0.2.7", "node7", ""]  # noqa: S104 - all are refused


@pytest.mark.parametrize("host", OPEN_HOSTS)
@pytest.mark.parametrize("given", ["nothing", "token", "TLS"])
def test_s1_another_host_needs_token_and_tls(tmp_path: Path, host: str, given: str) -> None:
    safe: dict[str, Any] = {}
    if given == "token":
        safe["token_file"] = tmp_path / "tokens"
    if given == "TLS":
        safe |= {"tls_certificate": tmp_path / "c.pem", "tls_key": tmp_path / "k.pem"}
    starts: list[Callable[[], object]] = [
        lambda: router_settings(marker_spec(), host=host, **safe),
        lambda: controller_settings(tmp_path, host=host, **safe),
    ]
    for start in starts:
        with pytest.raises(StartRefused) as refused:
            start()
        text = refused.value.message
        assert "\n" not in text
        assert ("token file" in text) is (given != "token")
        assert ("TLS files" in text) is (given != "TLS")
    both = {
        "token_file": tmp_path / "tokens",
        "tls_certificate": tmp_path / "c.pem",
        "tls_key": tmp_path / "k.pem",
    }
    router_settings(marker_spec(), host=host, **both)
    router_settings(marker_spec(), host=host, accept_insecure=True)


@pytest.mark.parametrize("host", OPEN_HOSTS)
def test_s1_the_wire_needs_keys_and_the_page_stays_inside(host: str) -> None:
    server = WireServer(lambda _message, _reply: None, host=host)
    try:
        with pytest.raises(StartRefused, match="without CURVE keys"):
            server.bind()
    finally:
        server.stop()
    with pytest.raises(StartRefused, match="loopback only"):
        DashboardSettings("127.0.0.1:1", host=host)


def test_s1_with_keys_the_wire_binds_what_it_is_told() -> None:
    own, client = CurveKeys.generate(), CurveKeys.generate()
    security = ServerSecurity(own, frozenset({client.public}))
    server = WireServer(lambda _m, _r: None, host="0.0.0.0", security=security)  # noqa: S104
    assert server.bind().startswith("tcp://0.0.0.0:")
    server.stop()


CLUSTER = (
    (ROOT / "examples" / "tiny-moe.yaml")
    .read_text()
    .replace("network: loopback", "network: cluster")
)


@pytest.mark.parametrize(
    "security",
    [
        "",
        "security: {}\n",
        "security: {token_file: tokens}\n",
        "security: {tls_cert_file: c, tls_key_file: k}\n",
        "security: {token_file: tokens, tls_cert_file: c}\n",
    ],
)
def test_s1_a_cluster_file_without_token_and_tls_is_no_service(security: str) -> None:
    with pytest.raises(ConfigInvalid, match="network: cluster needs"):
        parse_config((CLUSTER + security).encode(), "service.yaml")


def test_s1_the_command_says_so_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(CLUSTER)
    for command in (["validate", "-f"], ["up", "-f"]):
        done = subprocess.run(
            [sys.executable, "-m", "moe_serve", *command, str(file)],
            capture_output=True,
            check=False,
            text=True,
            cwd=ROOT,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
            timeout=50,
        )
        assert done.returncode != 0
        said = " ".join((done.stdout + done.stderr).split())
        assert "network: cluster needs security.token_file" in said
        assert "Traceback" not in said
    assert not list(tmp_path.glob("state/**/*.service.json"))


# ------------------------------------------------------------------------------------------- S3


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, Path]:
    certificate, key = tls_files(tmp_path)
    return {"token_file": token_file(tmp_path), "tls_certificate": certificate, "tls_key": key}


def _remove(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_text("")


def _fill(path: Path) -> None:
    path.write_text("junk\n")


def _open_to_others(path: Path) -> None:
    path.chmod(0o604)


def _writable_by_group(path: Path) -> None:
    path.chmod(0o660)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS = [_remove, _empty, _fill, _open_to_others, _writable_by_group, _folder]


@pytest.mark.asyncio
@pytest.mark.parametrize("part", ["router", "controller"])
@pytest.mark.parametrize("secret", ["token_file", "tls_certificate", "tls_key"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.strip("_"))
async def test_s3_a_secret_that_is_not_safe_is_no_start(
    tmp_path: Path,
    secrets: dict[str, Path],
    part: str,
    secret: str,
    fault: Callable[[Path], None],
) -> None:
    public = secret == "tls_certificate" and fault in (_open_to_others, _writable_by_group)
    fault(secrets[secret])
    before = listening()

    async def start() -> RouterServer | AdminServer:
        if part == "router":
            server: RouterServer | AdminServer = RouterServer(a_core(**secrets))
        else:
            server = AdminServer(NobodyAtHome(controller_settings(tmp_path, **secrets)))
        await server.start()
        return server

    if public:
        # A certificate is shown to everybody who connects.
        await (await start()).stop(0.0)
        return
    with pytest.raises(StartRefused) as refused:
        await start()
    assert "\n" not in refused.value.message
    assert secrets[secret].name in refused.value.message
    assert "port taken" not in refused.value.message
    assert listening() == before


def test_s3_a_key_of_another_certificate_is_no_start(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    certificate, _ = tls_files(tmp_path)
    _, key = tls_files(other)
    with pytest.raises(StartRefused, match="cannot be used together"):
        server_credentials(certificate, key)


def test_s3_an_encrypted_key_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    certificate, key = tls_files(tmp_path)
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:x", "-in", str(key), "-out", str(key)],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    with pytest.raises(StartRefused, match="unencrypted"):
        server_credentials(certificate, key)


@pytest.mark.asyncio
async def test_s3_a_router_actor_says_why_it_will_not_start(tmp_path: Path) -> None:
    settings = router_settings(marker_spec(), token_file=tmp_path / "none")
    answer = decode_as(await RouterActor(settings).start(), StartAnswer)
    assert answer.info is None
    assert "token file none is missing" in answer.fault


@pytest.mark.asyncio
async def test_s3_rotation_under_load_fails_nobody_and_lets_nobody_in(tmp_path: Path) -> None:
    """Old and new token, every step of a rotation, calls without a pause, and a broken file half
    way."""
    old, new, stranger = "o" * 20, "n" * 20, "s" * 20
    file = tmp_path / "tokens"

    def write(*tokens: str) -> None:
        # As an operator should: whole or not at all.
        fresh = tmp_path / "fresh"
        fresh.write_text("".join(f"dispatch {token}\n" for token in tokens))
        fresh.chmod(0o600)
        fresh.replace(file)

    write(old)
    server = RouterServer(a_core(token_file=file))
    live = [old]
    outcomes: dict[bool, list[grpc.StatusCode]] = {True: [], False: []}
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        stub = dispatch_pb2_grpc.DispatchServiceStub(channel)

        async def call(token: str, good: bool) -> None:
            code = grpc.StatusCode.OK
            try:
                await stub.GetModelSpec(
                    dispatch_pb2.GetModelSpecRequest(), metadata=bearer_metadata(token), timeout=5
                )
            except grpc.aio.AioRpcError as error:
                code = error.code()
            outcomes[good].append(code)

        async def load(stop: asyncio.Event) -> None:
            while not stop.is_set():
                await asyncio.gather(call(live[0], True), call(stranger, False))

        stop = asyncio.Event()
        running = asyncio.gather(*(load(stop) for _ in range(4)))

        async def settle() -> None:
            seen = len(outcomes[True])
            while len(outcomes[True]) < seen + 40:  # noqa: ASYNC110 - a counter
                await asyncio.sleep(0.005)

        await settle()
        write(old, new)
        await settle()
        live[0] = new
        await settle()  # clients have the new one before the old one goes
        write(new)
        await settle()
        file.write_text("junk")  # a broken edit keeps what was live
        await settle()
        write(new)
        await settle()
        stop.set()
        await running
        assert set(outcomes[True]) == {grpc.StatusCode.OK}
        assert set(outcomes[False]) == {grpc.StatusCode.UNAUTHENTICATED}
        await call(old, False)
        assert outcomes[False][-1] is grpc.StatusCode.UNAUTHENTICATED
    await server.stop(0.0)


def test_s3_no_token_is_compared_with_an_ordinary_comparison(tmp_path: Path) -> None:
    class Watched(bytes):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("tokens are compared with ==, which stops at the first difference")

        __hash__ = bytes.__hash__

    tokens = TokenFile(token_file(tmp_path))
    tokens._tokens = [(role, Watched(token)) for role, token in tokens._tokens]
    for token in TOKENS.values():
        assert tokens.roles(f"Bearer {token}")
    with pytest.raises(Unauthenticated):
        tokens.roles("Bearer " + "x" * 20)
