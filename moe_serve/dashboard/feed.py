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
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio
import msgspec

from moe_serve.dashboard.before_plan import BeforePlan, KeptFrame
from moe_serve.dashboard.controller_clock import ControllerClock
from moe_serve.dashboard.frames import load_frame, placement_document
from moe_serve.dashboard.history import History
from moe_serve.dashboard.load_history import LoadHistory
from moe_serve.dashboard.plans import Beginnings
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.dashboard.traffic import Traffic
from moe_serve.dashboard.upstream import metadata_of, open_channel
from moe_serve.documents.views import Json
from moe_serve.errors import MoeServeError
from moe_serve.explain.words import NO_START
from moe_serve.rpc import placement_pb2, placement_pb2_grpc

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
        self.load: placement_pb2.GetLoadResponse | None = None
        """The newest window that fits its declared shape."""
        self.load_wall_s = 0.0
        """When it closed, in seconds since the Unix epoch."""
        self.shown: placement_pb2.GetPlacementResponse | None = None
        """The placement that `placement` is of."""
        self.loads = LoadHistory()
        self.beginnings = Beginnings()
        self.before_plan = BeforePlan()
        self._traffic = Traffic()
        self._settings = settings
        self._clock_s = clock_s
        self._wall_s = wall_s
        self._dates = ControllerClock(clock_s, wall_s)
        self._jitter = random.Random(0)  # noqa: S311  # spreads reconnects, guards nothing
        self._connected = False
        self._ever_connected = False
        self._fault = ""
        self._broken = ""
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
            self._broken = f"the page failed ({type(error).__name__}); restart it"
            self._set_connected(False, self._broken)
            task.get_loop().call_exception_handler(
                {"message": f"{task.get_name()} failed", "exception": error, "task": task}
            )

    async def changed(self) -> None:
        """Wait until something is newer than at the time of the call."""
        assert self._wake is not None, "start comes first"
        # Shielded: a browser that goes away must not take the others' signal along.
        await asyncio.shield(self._wake)

    def connection(self) -> str:
        """connecting | live | stale | away."""
        return str(self.status_document()["connection"])

    def wall_s(self) -> float:
        """Seconds since the Unix epoch, now, by the controller's clock as far as it is known: all
        dates on the page are by one clock."""
        return self._dates.now_s()

    def status_document(self) -> Json:
        """How fresh the figures are, now."""
        age_s = None if self._load_at_s is None else self._clock_s() - self._load_at_s
        newest = self._newest
        return {
            "connection": self._connection(age_s),
            "message": self._fault,
            "since_wall_s": self._dates.date_of(self._fault_since_wall_s),
            "wall_s": self.wall_s(),
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
            except (grpc.aio.AioRpcError, MoeServeError, TimeoutError) as error:
                fault = _fault_text(error)
            self._set_connected(False, fault)
            if self._clock_s() - began_s > self._settings.backoff_max_s:
                wait_s = self._settings.backoff_min_s
            await asyncio.sleep(wait_s * self._jitter.uniform(0.75, 1.25))
            wait_s = min(2 * wait_s, self._settings.backoff_max_s)

    async def _watch_all(self) -> None:
        self._dates.connected()
        async with open_channel(self._settings) as channel:
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
            watches = (self._watch_placement, self._watch_load, self._watch_events)
            await _until_one_ends([watch(stub) for watch in watches])

    async def _watch_placement(self, stub: placement_pb2_grpc.PlacementServiceAsyncStub) -> None:
        request = placement_pb2.WatchPlacementRequest()
        async for answer in stub.WatchPlacement(
            request, metadata=metadata_of(self._settings.token)
        ):
            self._newest = answer.placement
            self._dates.placement(answer.placement)
            self._traffic.see(answer.placement)
            self._placement_dirty.set()
            self._set_connected(True, "")

    async def _watch_load(self, stub: placement_pb2_grpc.PlacementServiceAsyncStub) -> None:
        request = placement_pb2.WatchLoadRequest()
        async for answer in stub.WatchLoad(request, metadata=metadata_of(self._settings.token)):
            self._take_load(answer.load)

    async def _watch_events(self, stub: placement_pb2_grpc.PlacementServiceAsyncStub) -> None:
        # All that are kept, every time: the controller may have begun to count anew, and the
        # history knows again what it has.
        request = placement_pb2.WatchEventsRequest(after_seq=0)
        async for answer in stub.WatchEvents(request, metadata=metadata_of(self._settings.token)):
            self._dates.record(answer.record)
            if self.history.add_record(answer.record):
                self.before_plan.note(answer.record)
                self.notify()

    def _take_load(self, load: placement_pb2.GetLoadResponse) -> None:
        self._window_s = max(0.0, load.end_s - load.start_s)
        self._load_at_s = self._clock_s() - load.age_s
        first = self._dates.window(load)
        # A reconnect sends the newest again: it stays the one point and frame that it is.
        if self.load is None or _window(load) != _window(self.load):
            self._keep_load(load)
        if first and self.shown is not None:
            # Moves that were told before it have their dates now.
            self.history.update_moves(self.shown, self._dates.life_began_s())
        self._put_status()

    def _keep_load(self, load: placement_pb2.GetLoadResponse) -> None:
        wall_s = self.wall_s() - load.age_s
        speed = self._traffic.take()
        seq = self.frame.version + 1
        self.frame.put(load_frame(load, self._newest, seq=seq, wall_s=wall_s, speed=speed))
        self.before_plan.closed(KeptFrame(load.end_s, wall_s, self.frame.version, self.frame.body))
        self.loads.add(load, wall_s)
        self.load, self.load_wall_s = load, wall_s
        self.history.add_point(load, wall_s, speed)

    def _set_connected(self, connected: bool, fault: str) -> None:
        if self._broken:
            # A task of the page has died: no answer of the controller mends that.
            connected, fault = False, self._broken
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
                    wall_s=self.wall_s(),
                )
            except MoeServeError as error:
                self._set_connected(self._connected, error.message)
            else:
                await asyncio.to_thread(self.beginnings.see, newest)
                self.history.update_moves(newest, self._dates.life_began_s())
                self.shown = newest
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


def _window(load: placement_pb2.GetLoadResponse) -> tuple[int, float, float]:
    return load.window, load.start_s, load.end_s


async def _until_one_ends(watches: list[Coroutine[Any, Any, None]]) -> None:
    """Run all until the first ends, end the others, raise what it raised.

    Not a TaskGroup: where the page is stopped just as a stream fails, it loses the stop.
    """
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in ended:
            task.result()


def _fault_text(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        code, details = error.code(), error.details() or ""
        if details.startswith(NO_START):
            return details
        return f"controller: {_HINTS.get(code, details or code.name)}"
    if isinstance(error, MoeServeError):
        return error.message
    return str(error) or "no answer in time"
