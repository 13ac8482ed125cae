"""A `ShardChannel` inside the process: the shard's core without sockets."""

import asyncio
from collections.abc import Callable

from moe_serve.errors import MoeServeError, WireLost
from moe_serve.ports import SubCall, SubReply
from moe_serve.shard.core import ShardCore
from placement.routing import RankAddress, RoutingTable


class FakeShardChannel:
    """Hands sub-calls to a core in this process. `cut()` and `mend()` play the network."""

    def __init__(
        self,
        core: ShardCore,
        address: RankAddress,
        on_disconnect: Callable[[RankAddress, str], None] | None = None,
    ) -> None:
        self._core = core
        self._address = address
        self._on_disconnect = on_disconnect
        self._waiting: set[asyncio.Future[SubReply]] = set()
        self._connected = True
        self._closed = False
        self.calls: list[SubCall] = []

    @property
    def address(self) -> RankAddress:
        return self._address

    @property
    def connected(self) -> bool:
        return self._connected

    def cut(self, reason: str = "disconnected") -> None:
        """Break the connection: what is in flight is lost."""
        if not self._connected:
            return
        self._connected = False
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(WireLost(f"rank {self._address.rank}: {reason}"))
        if self._on_disconnect is not None:
            self._on_disconnect(self._address, reason)

    def mend(self) -> None:
        """Connect again."""
        self._connected = not self._closed

    async def forward(self, call: SubCall) -> SubReply:
        if not self._connected:
            raise WireLost(f"rank {self._address.rank}: disconnected")
        self.calls.append(call)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SubReply] = loop.create_future()
        self._waiting.add(answer)

        def settle(result: SubReply | MoeServeError) -> None:
            if answer.done():
                return
            if isinstance(result, MoeServeError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def reply(result: SubReply | MoeServeError) -> None:
            # A core may answer after the test's loop is gone; then nobody waits.
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result)

        self._core.submit(call, call.rows.nbytes, reply)
        try:
            async with asyncio.timeout(call.timeout_s):
                return await answer
        except TimeoutError as error:
            raise WireLost(
                f"rank {self._address.rank} did not answer within {call.timeout_s:g} s"
            ) from error
        finally:
            self._waiting.discard(answer)

    async def fetch_table(self) -> RoutingTable | None:
        if not self._connected:
            raise WireLost(f"rank {self._address.rank}: disconnected")
        return self._core.slots.table

    async def close(self) -> None:
        self._closed = True
        was, self._on_disconnect = self._on_disconnect, None
        self.cut("the channel was closed")
        self._on_disconnect = was
