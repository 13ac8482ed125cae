"""Follow the controller while the demo runs: windows of load, placement, decisions. Threads over
the admin port.

Responsible for collecting. Judges nothing. A stream that breaks is opened again (the controller may
be restarted).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from moe_serve.demo.measure import WindowCounts
from moe_serve.documents.window import PhaseChoice, counts_of, of_phase
from moe_serve.errors import InvalidArgument
from moe_serve.rpc import placement_pb2, placement_pb2_grpc
from moe_serve.rpc.options import channel_options

REOPEN_S = 0.2
"""Pause before a broken stream is opened again."""
RECORDS_MAX = 10_000
"""Decision records kept."""


@dataclass(slots=True)
class Seen:
    """Everything seen so far. `moving`: (began, ended) monotonic seconds of this machine in which
    moves ran."""

    windows: dict[int, WindowCounts] = field(default_factory=dict)
    moving: list[tuple[float, float]] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    placement: Any = None
    imbalance: float = 0.0


class Watcher:
    """Three daemon threads, one a stream. `on_record` is called for every new decision."""

    def __init__(self, admin_address: str, on_record: Callable[[Any], None]) -> None:
        self.seen = Seen()
        self._on_record = on_record
        self._channel = grpc.insecure_channel(admin_address, options=channel_options())
        self.stub = placement_pb2_grpc.PlacementServiceStub(self._channel)
        self._stop = threading.Event()
        self._moving_since: float | None = None
        self._last_seq = 0
        self._threads = [
            threading.Thread(target=self._follow, args=(work,), name=name, daemon=True)
            for name, work in (
                ("demo-load", self._load),
                ("demo-placement", self._placement),
                ("demo-events", self._events),
            )
        ]

    def start(self) -> None:
        """Begin to follow."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> Seen:
        """End the streams and return what was seen."""
        self._stop.set()
        if self._moving_since is not None:
            self.seen.moving.append((self._moving_since, time.monotonic()))
        self._channel.close()
        for thread in self._threads:
            thread.join(timeout=5.0)
        return self.seen

    def _follow(self, work: Callable[[], Iterator[None]]) -> None:
        while not self._stop.is_set():
            try:
                for _ in work():
                    if self._stop.is_set():
                        return
            except (grpc.RpcError, ValueError, InvalidArgument):
                # The channel was closed by stop(), the controller is being restarted, or a window
                # does not fit its declared shape.
                self._stop.wait(REOPEN_S)

    def _load(self) -> Iterator[None]:
        for answer in self.stub.WatchLoad(placement_pb2.WatchLoadRequest()):
            self._take_window(answer.load)
            yield

    def _take_window(self, load: Any) -> None:
        if not load.executed:
            return
        executed = of_phase(counts_of(load, "executed"), PhaseChoice.ALL)
        self.seen.windows[load.window] = WindowCounts(executed, counts_of(load, "rank_pairs"))
        self.seen.imbalance = load.imbalance

    def _placement(self) -> Iterator[None]:
        for answer in self.stub.WatchPlacement(placement_pb2.WatchPlacementRequest()):
            now_s = time.monotonic()
            placement = answer.placement
            self.seen.placement = placement
            moving = placement.state == "moving"
            if moving and self._moving_since is None:
                self._moving_since = now_s
            elif not moving and self._moving_since is not None:
                self.seen.moving.append((self._moving_since, now_s))
                self._moving_since = None
            yield

    def _events(self) -> Iterator[None]:
        request = placement_pb2.WatchEventsRequest(after_seq=self._last_seq)
        for answer in self.stub.WatchEvents(request):
            record = answer.record
            self._last_seq = record.seq
            if len(self.seen.records) < RECORDS_MAX:
                self.seen.records.append(record)
            self._on_record(record)
            yield
