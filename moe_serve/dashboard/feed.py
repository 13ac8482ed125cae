"""One connection to the controller, shared by every browser: what is newest, and how fresh it is.

Three streams run over one channel: WatchPlacement, WatchLoad, WatchEvents. When one ends, all are
opened again after a back-off, and until then the page is `away`: the last figures stay, called what
they are. A browser is not told of changes one by one; it compares versions and takes what is newest
when it is ready, so a slow one costs nothing and slows nobody.

States of the connection: `connecting` (never heard from the controller), `live`, `stale`
(connected, but the newest load is older than 3 windows), `away` (not connected).

Responsible for freshness and limits. Must never command the controller or draw a conclusion from
figures. Called by `app` and `server`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import grpc
import grpc.aio
import msgspec

from moe_serve.dashboard.frames import Json, load_frame, placement_document
from moe_serve.dashboard.history import History
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.errors import MoeServeError
from moe_serve.rpc import placement_pb2, placement_pb2_grpc
from moe_serve.rpc.auth import bearer_metadata
from moe_serve.rpc.options import channel_credentials, channel_options

_HINTS = {
    grpc.StatusCode.UNAVAILABLE: "it does not answer; it may be restarting",
    grpc.StatusCode.UNAUTHENTICATED: "it refused the page's token; check the token file",
    grpc.StatusCode.PERMISSION_DENIED: "the page's token lacks the role read",
    grpc.StatusCode.UNIMPLEMENTED: "it is of another version; update it and the page together",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "a message is larger than the page takes",
}


def wall_clock_s() -> float:
    """Seconds since the Unix epoch, for people."""
    return datetime.now(UTC).timestamp()


class Versioned:
    """A document as bytes and the number of its form; 0 = there is none yet."""

    __slots__ = ("body", "version")

    def __init__(self) -> None:
        self.version = 0
        self.body = b"null"

    def put(self, document: Json) -> None:
        """Replace the document."""
        self.version += 1
        self.body = msgspec.json.encode(document)


class Feed:
    """What browsers are told. `start` it inside a running loop, `stop` it there."""

    def __init__(
        self,
        settings: DashboardSettings,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = wall_clock_s,
    ) -> None:
        self.life = secrets.token_hex(4)
        """Names this life of the page: numbers of records begin anew with each."""
        self.history = History()
        self.frame = Versioned()
        self.placement = Versioned()
        self.status = Versioned()
        self._settings = settings
        self._clock_s = clock_s
        self._wall_s = wall_s
        self._jitter = random.Random(0)  # noqa: S311  # spreads reconnects, guards nothing
        self._connected = False
        self._ever_connected = False
        self._fault = ""
        self._fault_since_wall_s = wall_s()
        self._window_s = 0.0
        self._load_at_s: float | None = None
        self._newest: placement_pb2.GetPlacementResponse | None = None
        self._placement_dirty = asyncio.Event()
        self._wake: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to connect. Returns at once; `status` says how it goes."""
        self._wake = asyncio.get_running_loop().create_future()
        self._put_status()
        self._tasks = [
            asyncio.create_task(run(), name=f"page-{run.__name__}")
            for run in (self._stay_connected, self._publish_placements, self._tell_status)
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End every task and the connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # A fault of ours: said on the page, and to whoever watches the process.
            self._set_connected(False, f"the page failed ({error!r}); restart it")
            task.get_loop().call_exception_handler(
                {"message": f"{task.get_name()} failed", "exception": error, "task": task}
            )

    async def changed(self) -> None:
        """Wait until something is newer than at the time of the call."""
        assert self._wake is not None, "start comes first"
        # Shielded: a browser that goes away must not take the others' signal along.
        await asyncio.shield(self._wake)

    def status_document(self) -> Json:
        """How fresh the figures are, now."""
        age_s = None if self._load_at_s is None else self._clock_s() - self._load_at_s
        newest = self._newest
        return {
            "connection": self._connection(age_s),
            "message": self._fault,
            "since_wall_s": self._fault_since_wall_s,
            "wall_s": self._wall_s(),
            "data_age_s": age_s,
            "window_s": self._window_s,
            "stale_after_s": self._stale_after_s(),
            "state": newest.state if newest is not None else "",
            "problems": list(newest.problems) if newest is not None else [],
        }

    def _stale_after_s(self) -> float:
        return self._settings.stale_windows * max(self._window_s, 1.0)

    def _connection(self, age_s: float | None) -> str:
        if not self._connected:
            return "away" if self._ever_connected else "connecting"
        return "stale" if age_s is not None and age_s > self._stale_after_s() else "live"

    # ---- upstream

    async def _stay_connected(self) -> None:
        wait_s = self._settings.backoff_min_s
        while True:
            began_s = self._clock_s()
            try:
                await self._watch_all()
                fault = "the controller closed its streams"
            except* (grpc.aio.AioRpcError, MoeServeError, TimeoutError) as group:
                fault = _fault_text(_first(group))
            self._set_connected(False, fault)
            if self._clock_s() - began_s > self._settings.backoff_max_s:
                wait_s = self._settings.backoff_min_s
            await asyncio.sleep(wait_s * self._jitter.uniform(0.75, 1.25))
            wait_s = min(2 * wait_s, self._settings.backoff_max_s)

    async def _watch_all(self) -> None:
        async with self._channel() as channel:
            try:
                # Not wait_for: where the channel is ready as the page stops, it loses the stop.
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    await channel.channel_ready()
            except TimeoutError:
                raise TimeoutError(
                    f"no answer from {self._settings.admin_address} "
                    f"within {self._settings.connect_timeout_s:g} s"
                ) from None
            stub = placement_pb2_grpc.PlacementServiceStub(channel)
            async with asyncio.TaskGroup() as group:
                for watch in (self._watch_placement, self._watch_load, self._watch_events):
                    group.create_task(_or_ended(watch(stub)))

    def _channel(self) -> grpc.aio.Channel:
        # With the shared pool a new channel would inherit the back-off of the one that failed.
        options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        address = self._settings.admin_address
        if self._settings.tls_authority is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = channel_credentials(self._settings.tls_authority)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def _metadata(self) -> tuple[tuple[str, str], ...] | None:
        return bearer_metadata(self._settings.token) if self._settings.token else None

    async def _watch_placement(self, stub: placement_pb2_grpc.PlacementServiceAsyncStub) -> None:
        request = placement_pb2.WatchPlacementRequest()
        async for answer in stub.WatchPlacement(request, metadata=self._metadata()):
            self._newest = answer.placement
            self._placement_dirty.set()
            self._set_connected(True, "")

    async def _watch_load(self, stub: placement_pb2_grpc.PlacementServiceAsyncStub) -> None:
        request = placement_pb2.WatchLoadRequest()
        async for answer in stub.WatchLoad(request, metadata=self._metadata()):
            self._take_load(answer.load)

    async def _watch_events(self, stub: placement_pb2_grpc.PlacementServiceAsyncStub) -> None:
        # All that are kept, every time: the controller may have begun to count anew, and the
        # history knows again what it has.
        request = placement_pb2.WatchEventsRequest(after_seq=0)
        async for answer in stub.WatchEvents(request, metadata=self._metadata()):
            if self.history.add_record(answer.record):
                self.notify()

    def _take_load(self, load: placement_pb2.GetLoadResponse) -> None:
        self._window_s = max(0.0, load.end_s - load.start_s)
        self._load_at_s = self._clock_s() - load.age_s
        wall_s = self._wall_s() - load.age_s
        self.frame.put(load_frame(load, self._newest, seq=self.frame.version + 1, wall_s=wall_s))
        self.history.add_point(load, wall_s)
        self._put_status()

    def _set_connected(self, connected: bool, fault: str) -> None:
        if (connected, fault) != (self._connected, self._fault):
            self._fault_since_wall_s = self._wall_s()
        self._connected = connected
        self._ever_connected = self._ever_connected or connected
        self._fault = fault
        self._put_status()

    # ---- downstream

    async def _publish_placements(self) -> None:
        while True:
            await self._placement_dirty.wait()
            self._placement_dirty.clear()
            newest = self._newest
            assert newest is not None, "set before the event"
            try:
                # Tens of thousands of slots: off the loop.
                document = await asyncio.to_thread(
                    placement_document,
                    newest,
                    seq=self.placement.version + 1,
                    wall_s=self._wall_s(),
                )
            except MoeServeError as error:
                self._set_connected(self._connected, error.message)
            else:
                self.history.update_moves(newest)
                self.placement.put(document)
                self._put_status()
            await asyncio.sleep(self._settings.publish_interval_s)

    async def _tell_status(self) -> None:
        while True:
            await asyncio.sleep(self._settings.status_interval_s)
            self._put_status()

    def _put_status(self) -> None:
        self.status.put(self.status_document())
        self.notify()

    def notify(self) -> None:
        """Wake everybody who waits in `changed`."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
            self._wake = asyncio.get_running_loop().create_future()


class _StreamEnded(MoeServeError):
    """A stream ended without an error: the controller goes down in good order."""


async def _or_ended(watch: Awaitable[None]) -> None:
    await watch
    # Raised so that the other two streams end too.
    raise _StreamEnded("the controller closed its streams")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _fault_text(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        code = error.code()
        hint = _HINTS.get(code, error.details() or code.name)
        return f"controller: {hint}"
    if isinstance(error, MoeServeError):
        return error.message
    return str(error) or "no answer in time"
