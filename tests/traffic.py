"""Calls of front ends, sent without pause from a thread of their own, every output compared with an
oracle.

Nothing is retried or forgiven here: an error and a wrong output are both kept, with the moment.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.client.aio import AsyncClient
from moe_serve.errors import MoeServeError
from placement.topology import Phase

FAILURES_KEPT = 20
TOLERANCE = 1e-5
START_WAIT_S = 60.0

Arrays = tuple[int, npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]
Oracle = Callable[
    [int, npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]],
    npt.NDArray[np.float64],
]


@dataclass(frozen=True)
class Workload:
    """What is asked: `make(rng)` draws layer, hidden, ids, gates; `oracle` knows the answer."""

    make: Callable[[np.random.Generator], Arrays]
    oracle: Oracle


@dataclass(frozen=True)
class Source:
    """One front end: which router it prefers, unary or stream, and how many calls it has open."""

    address: str
    stream: bool
    open_calls: int = 1
    pause_s: float = 0.05


def draw(
    rng: np.random.Generator,
    rows: Callable[[np.random.Generator, int], npt.NDArray[np.float32]],
    *,
    layers: int,
    experts: int,
    top_k: int,
    rows_max: int = 6,
) -> Arrays:
    """Layer, rows, ids and gates of one call, uniform over experts."""
    count = int(rng.integers(1, rows_max + 1))
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(count)]).astype(np.int32)
    gates = rng.random((count, top_k)).astype(np.float32)
    return int(rng.integers(layers)), rows(rng, count), ids, gates


def error_of(output: npt.NDArray[Any], want: npt.NDArray[np.float64]) -> float:
    """Greatest deviation, relative to the greatest magnitude of its row (at least 1)."""
    scale = np.maximum(np.abs(want).max(axis=1, keepdims=True), 1.0)
    return float((np.abs(output - want) / scale).max(initial=0.0))


@dataclass
class Traffic:
    """A context: calls flow inside it. `failures`: errors and wrong outputs. `worst`: greatest
    deviation of any output. `sent`: answered calls by (address, stream)."""

    sources: Sequence[Source]
    workload: Workload
    timeout_s: float = 30.0
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    worst: float = 0.0
    sent: Counter[tuple[str, bool]] = field(default_factory=Counter)
    slowest_s: float = 0.0
    took: list[tuple[float, float]] = field(default_factory=list)
    """(monotonic seconds at the end, seconds it took) of each answered call."""
    _began_s: float = 0.0
    _seconds: float = 0.0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def requests(self) -> int:
        """Answered calls."""
        return sum(self.sent.values())

    @property
    def per_s(self) -> float:
        """Answered calls a second, from the first to now or to the end."""
        return self.requests / max(self._seconds or time.monotonic() - self._began_s, 1e-9)

    def __enter__(self) -> Traffic:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._began_s = time.monotonic()
        self._thread.start()
        deadline_s = time.monotonic() + START_WAIT_S
        while any(self.sent[s.address, s.stream] == 0 for s in self.sources):
            assert not self.failed, self.failures
            assert time.monotonic() < deadline_s, f"traffic does not start: {self.sent}"
            time.sleep(0.05)
        # Connecting is over: counted from here on.
        self._began_s = time.monotonic()
        self.sent.clear()
        self.took.clear()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Let open calls end."""
        if self._thread is None:
            return
        self._stopping.set()
        self._seconds = time.monotonic() - self._began_s
        self._thread.join(self.timeout_s + 10.0)
        assert not self._thread.is_alive(), "calls are open past their deadline"
        self._thread = None

    def more(self, calls: int, timeout_s: float = 30.0) -> None:
        """Wait until so many further calls have been answered."""
        want, deadline_s = self.requests + calls, time.monotonic() + timeout_s
        while self.requests < want:
            assert time.monotonic() < deadline_s, f"{self.requests} calls, {self.failures}"
            time.sleep(0.02)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, source in enumerate(self.sources):
                group.create_task(self._front_end(number, source))
        # gRPC hands late events of closed channels to this loop, and complains of a closed one.
        await asyncio.sleep(0.2)

    async def _front_end(self, number: int, source: Source) -> None:
        async with (
            AsyncClient([source.address], stream=source.stream) as client,
            asyncio.TaskGroup() as group,
        ):
            for place in range(source.open_calls):
                rng = np.random.default_rng(1000 * number + place)
                group.create_task(self._calls(client, source, rng))

    async def _calls(self, client: AsyncClient, source: Source, rng: np.random.Generator) -> None:
        while not self._stopping.is_set():
            layer, hidden, ids, gates = self.workload.make(rng)
            phase = Phase(int(rng.integers(2)))
            began_s = time.monotonic()
            try:
                output = await client.forward(
                    layer, hidden, ids, gates, phase=phase, timeout_s=self.timeout_s
                )
            except MoeServeError as error:
                self._fail(f"{type(error).__name__}: {error.message}")
            else:
                now_s = time.monotonic()
                self.slowest_s = max(self.slowest_s, now_s - began_s)
                self.took.append((now_s, now_s - began_s))
                worst = error_of(output, self.workload.oracle(layer, hidden, ids, gates))
                self.worst = max(self.worst, worst)
                if not worst <= TOLERANCE:
                    self._fail(f"wrong by {worst}: layer {layer}, experts {ids.tolist()}")
                self.sent[source.address, source.stream] += 1
            await asyncio.sleep(source.pause_s)

    def _fail(self, what: str) -> None:
        self.failed += 1
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(f"after {time.monotonic() - self._began_s:.2f} s: {what}")
