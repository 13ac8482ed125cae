"""The proxy that chaos tests put between routers and shards: it parts them and loses nothing."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from tests.chaos.proxy import Proxy
from tests.service_cluster import wait_until

PIECE = 1000


class Echo:
    """A server on loopback that sends back what it gets, one connection at a time."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self.got = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    while data := connection.recv(1 << 16):
                        self.got += len(data)
                        connection.sendall(data)
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


def connect(proxy: Proxy, target: str) -> socket.socket:
    """A connection through the proxy, as far as the proxy's word goes."""
    host, _, port = proxy.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5.0)
    connection.sendall(b"\x05\x01\x00")
    assert connection.recv(2) == b"\x05\x00"
    far, _, far_port = target.rpartition(":")
    asked = b"\x05\x01\x00\x01" + socket.inet_aton(far) + struct.pack("!H", int(far_port))
    connection.sendall(asked)
    assert receive(connection, 10)[1] == 0
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        assert piece, "closed"
        data += piece
    return data


def test_what_is_not_cut_gets_through(echo: Echo) -> None:
    with Proxy() as proxy:
        with connect(proxy, echo.address) as connection:
            connection.sendall(b"x" * PIECE)
            assert receive(connection, PIECE) == b"x" * PIECE
        assert proxy.opened[echo.address] == 1


@pytest.mark.parametrize("there", [True, False])
def test_a_cut_holds_one_way_and_healing_loses_nothing(echo: Echo, there: bool) -> None:
    with Proxy() as proxy, connect(proxy, echo.address) as connection:
        proxy.cut(echo.address, there=there, back=not there)
        connection.sendall(b"a" * PIECE)
        if not there:
            wait_until("the other way is open", lambda: echo.got == PIECE, 5.0)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert echo.got == (0 if there else PIECE)
        proxy.heal(echo.address)
        connection.settimeout(5.0)
        assert receive(connection, PIECE) == b"a" * PIECE


def test_a_refused_target_closes_what_is_open_and_opens_nothing(echo: Echo) -> None:
    with Proxy() as proxy:
        with connect(proxy, echo.address) as connection:
            proxy.refuse(echo.address)
            with pytest.raises(AssertionError, match="closed"):
                receive(connection, 1)
        other = connect(proxy, echo.address)
        with other, pytest.raises(AssertionError, match="closed"):
            receive(other, 1)
        proxy.heal()
        healed = connect(proxy, echo.address)
        with healed:
            healed.sendall(b"c")
            assert receive(healed, 1) == b"c"


def test_others_are_not_cut(echo: Echo) -> None:
    with Proxy() as proxy:
        proxy.cut("127.0.0.1:1")
        with connect(proxy, echo.address) as connection:
            connection.sendall(b"b")
            assert receive(connection, 1) == b"b"
