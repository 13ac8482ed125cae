"""A SOCKS5 proxy on loopback that can part who connects through it from where they connect to.

It stands between routers and shards (`Drill.socks_proxy`): ZeroMQ connects through it by itself,
and everybody keeps telling everybody the shards' real addresses. What is cut is held and passed on
once it is healed, as TCP does with a network that was away: nothing is lost, all of it is late.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

READ_BYTES = 1 << 16
START_WAIT_S = 10.0
OK = b"\x05\x00\x00\x01\x7f\x00\x00\x01\x00\x00"


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to connections to one target. `there`: bytes to the target pass. `back`: bytes
    from it pass. delay_s: each piece waits so long. refuse: none is open or opened."""

    there: bool = True
    back: bool = True
    delay_s: float = 0.0
    refuse: bool = False


OPEN = Rule()


class Proxy:
    """A context: serves inside it, on a thread of its own. Targets are host:port."""

    def __init__(self) -> None:
        self.address = ""
        """host:port of the proxy itself."""
        self.opened: Counter[str] = Counter()
        """Connections that were made, by target."""
        self._rules: dict[str, Rule] = {}
        self._open: dict[str, set[asyncio.StreamWriter]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_WAIT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(START_WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_WAIT_S)
        self._loop.close()

    # ------------------------------------------------------------------------------- orders

    def cut(self, target: str, *, there: bool = True, back: bool = True) -> None:
        """Hold what goes to a target, what comes back from it, or both (as if the network between
        them was away)."""
        self._order(target, lambda rule: replace(rule, there=not there, back=not back))

    def delay(self, target: str, delay_s: float) -> None:
        """Let every piece in both directions wait."""
        self._order(target, lambda rule: replace(rule, delay_s=delay_s))

    def refuse(self, target: str) -> None:
        """Close every connection to a target, and open none."""
        self._order(target, lambda rule: replace(rule, refuse=True))

    def heal(self, target: str = "") -> None:
        """Take back every order for a target, or for all; what was held goes on."""
        if target:
            self._order(target, lambda rule: OPEN)
        else:
            for known in list(self._rules):
                self._order(known, lambda rule: OPEN)

    def _order(self, target: str, change: Callable[[Rule], Rule]) -> None:
        async def apply() -> None:
            self._rules[target] = rule = change(self._rule(target))
            if rule.refuse:
                for writer in self._open.get(target, ()):
                    writer.transport.abort()
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

        asyncio.run_coroutine_threadsafe(apply(), self._loop).result(START_WAIT_S)

    def _rule(self, target: str) -> Rule:
        return self._rules.get(target, OPEN)

    # ------------------------------------------------------------------------------- service

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def _stop(self) -> None:
        self._server.close()
        for writers in self._open.values():
            for writer in writers:
                writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # A client that goes away at any point, or a target that is not there, ends this alone.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._relay(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = await _asked_for(reader, writer)
        await self._until(lambda: self._rule(target).there and self._rule(target).back)
        host, _, port = target.rpartition(":")
        # Also where the target is not there: then the connection ends at once, before a handshake.
        # Told "refused", libzmq's client ends its whole process now and then (a descriptor that it
        # closed before it took it from its poller).
        writer.write(OK)
        if self._rule(target).refuse:
            return
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        mine = {writer, far_writer}
        self._open.setdefault(target, set()).update(mine)
        self.opened[target] += 1
        try:
            if self._rule(target).refuse:
                return  # since it was being opened
            there = asyncio.ensure_future(
                self._pump(reader, far_writer, target, lambda rule: rule.there)
            )
            back = asyncio.ensure_future(
                self._pump(far_reader, writer, target, lambda rule: rule.back)
            )
            # Where one side has closed and everything it said was passed on, both are done.
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            for pump in (there, back):
                pump.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
        finally:
            self._open[target] -= mine
            far_writer.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target: str,
        passes: Callable[[Rule], bool],
    ) -> None:
        while data := await reader.read(READ_BYTES):
            if self._rule(target).delay_s:
                await asyncio.sleep(self._rule(target).delay_s)
            await self._until(lambda: passes(self._rule(target)))
            writer.write(data)
            await writer.drain()
        await self._until(lambda: passes(self._rule(target)))

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()


async def _asked_for(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Greet a client as RFC 1928 says, without authentication. Returns host:port of its target."""
    _, methods = await reader.readexactly(2)
    await reader.readexactly(methods)
    writer.write(b"\x05\x00")
    _, command, _, kind = await reader.readexactly(4)
    assert command == 1, "only CONNECT is spoken here"
    if kind == 3:
        (length,) = await reader.readexactly(1)
        host = (await reader.readexactly(length)).decode()
    else:
        host = str(ipaddress.ip_address(await reader.readexactly(4 if kind == 1 else 16)))
    return f"{host}:{int.from_bytes(await reader.readexactly(2), 'big')}"
