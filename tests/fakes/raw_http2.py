"""A rude HTTP/2 peer: writes the frames it is told to, whatever the other end allows.

A proper gRPC client keeps the server's limits by itself, so it cannot show that the server does.
Headers are written as HPACK literals; answers are read as frames and their headers never decoded.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, END_HEADERS = 0x1, 0x4
CANCEL, REFUSED_STREAM = 0x8, 0x7


class Kind(IntEnum):
    """Frame types that are looked at."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    body: bytes


def frame(kind: Kind, flags: int, stream: int, body: bytes = b"") -> bytes:
    """One frame with the length of its body."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def literal(name: bytes, value: bytes) -> bytes:
    """A header field, literal and never indexed."""
    return b"\x10" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    size, prefix = len(text), 127
    if size < prefix:
        return bytes([size]) + text
    out, rest = [prefix], size - prefix
    while rest >= 128:
        out.append(rest % 128 | 128)
        rest //= 128
    return bytes([*out, rest]) + text


def call_headers(path: str, extra: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Header block of a gRPC call."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *extra,
    ]
    return b"".join(literal(*one) for one in fields)


class RawHttp2:
    """One connection. `seen` counts frames by kind, `resets` RST_STREAM codes by stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next = 1
        self.seen: Counter[int] = Counter()
        self.resets: dict[int, int] = {}
        self.ended: set[int] = set()
        self.answered_pings = 0
        self.closed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, address: str) -> RawHttp2:
        """Connect and exchange settings."""
        host, _, port = address.rpartition(":")
        peer = cls(*await asyncio.open_connection(host, int(port)))
        peer._writer.write(PREFACE + frame(Kind.SETTINGS, 0, 0))
        await peer.until(lambda: peer.seen[Kind.SETTINGS] >= 1)
        return peer

    def open_stream(
        self, path: str, extra: Iterable[tuple[bytes, bytes]] = (), *, end: bool = False
    ) -> int:
        """Begin a call; returns its stream."""
        stream, self._next = self._next, self._next + 2
        flags = END_HEADERS | (END_STREAM if end else 0)
        self._write(frame(Kind.HEADERS, flags, stream, call_headers(path, extra)))
        return stream

    def data(self, stream: int, body: bytes, *, end: bool = False) -> None:
        """Bytes of a call, 16 KiB a frame."""
        pieces = [body[at : at + 16_384] for at in range(0, len(body), 16_384)] or [b""]
        for number, piece in enumerate(pieces, 1):
            last = end and number == len(pieces)
            self._write(frame(Kind.DATA, END_STREAM if last else 0, stream, piece))

    def reset(self, stream: int) -> None:
        """Cancel a call."""
        self._write(frame(Kind.RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))

    def raw(self, data: bytes) -> None:
        """Any bytes."""
        self._write(data)

    async def drain(self) -> None:
        """Wait until the socket has taken what was written, or is gone."""
        with suppress(ConnectionError):
            await self._writer.drain()

    async def settled(self) -> None:
        """Wait until the other end has read all that was written, or is gone."""
        await self.drain()
        before = self.answered_pings
        self._write(frame(Kind.PING, 0, 0, b"settled?"))
        await self.until(lambda: self.answered_pings > before or self.closed.is_set())

    async def until(self, condition: Callable[[], bool], within_s: float = 10.0) -> None:
        """Wait for something the reader sees."""
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - the conditions are counters, not events
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        """Close the socket."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                size = int.from_bytes(head[:3], "big")
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                self._took(Frame(kind, flags, stream, await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()

    def _took(self, got: Frame) -> None:
        self.seen[got.kind] += 1
        if got.kind == Kind.RST_STREAM:
            self.resets[got.stream] = int.from_bytes(got.body, "big")
        elif got.kind == Kind.SETTINGS and not got.flags & 1:
            self._write(frame(Kind.SETTINGS, 1, 0))
        elif got.kind == Kind.PING and got.flags & 1:
            self.answered_pings += 1
        elif got.kind == Kind.PING:
            self._write(frame(Kind.PING, 1, 0, got.body))
        if got.flags & END_STREAM and got.kind in (Kind.HEADERS, Kind.DATA):
            self.ended.add(got.stream)
