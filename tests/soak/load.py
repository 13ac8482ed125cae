"""Calls of front ends during a soak: common ones without pause, and bursts of odd ones.

Every outcome is kept that is not a right answer in time, with its moment, so that it can be held
against the fault that was active then. Nothing is retried or forgiven here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from moe_serve.client.aio import AsyncClient
from moe_serve.errors import MoeServeError
from placement.topology import Phase
from tests.marker_checkpoint import LAYERS, TOP_K, marker_oracle, marker_rows
from tests.soak.rig import EXPERTS, HIDDEN
from tests.traffic import TOLERANCE, Arrays, Source, error_of

ROWS_MAX = 6
SHIFT_S = 40.0
"""Time after which other experts are popular."""
SKEW = 1.1
"""Popularity of the n-th most popular expert: 1 / n ** SKEW."""
TIMEOUT_S = 20.0
LATE_S = 5.0
"""Beyond its deadline, and on a machine that is busy with starting processes, a call may take so
much longer to return."""
WRONG, LATE, UNTYPED = "WRONG", "LATE", "UNTYPED"
"""Outcomes beside the codes of typed errors; no fault excuses them."""
FAILURES_KEPT = 1000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Failure:
    """A call without a right answer in time. code: of its typed error, or one of the words above.
    Times: monotonic seconds."""

    began_s: float
    ended_s: float
    code: str
    address: str
    text: str


def draw_call(rng: np.random.Generator, seed: int, era: int) -> Arrays:
    """Layer, rows, ids and gates of one call. `era`: who is popular changes with it."""
    layer = int(rng.integers(LAYERS))
    order = np.random.default_rng((seed, era, layer)).permutation(EXPERTS)
    weights = np.empty(EXPERTS)
    weights[order] = 1.0 / np.arange(1, EXPERTS + 1) ** SKEW
    weights /= weights.sum()
    count = int(rng.integers(1, ROWS_MAX + 1))
    ids = np.stack([rng.choice(EXPERTS, TOP_K, replace=False, p=weights) for _ in range(count)])
    gates = rng.random((count, TOP_K)).astype(np.float32)
    return layer, marker_rows(rng, count, HIDDEN), ids.astype(np.int32), gates


@dataclass
class Load:
    """Calls from a thread of its own, from `start` to `stop`."""

    sources: Sequence[Source]
    seed: int
    answered: int = 0
    failures: list[Failure] = field(default_factory=list)
    failed: int = 0
    worst: float = 0.0
    """Greatest deviation of any answer from the oracle."""
    slowest_s: float = 0.0
    """Longest call since `take_slowest`."""
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _ready: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin to call. The service must be ready."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30.0), "the loop of the load does not start"

    def stop(self) -> None:
        """Let open calls end."""
        self._stopping.set()
        assert self._thread is not None
        self._thread.join(TIMEOUT_S + LATE_S + 10.0)
        assert not self._thread.is_alive(), "calls are open long past their deadline"

    def take_slowest(self) -> float:
        """Longest call since the last time this was asked, seconds."""
        slowest, self.slowest_s = self.slowest_s, 0.0
        return slowest

    def run(self, work: Coroutine[Any, Any, _T], timeout_s: float = 120.0) -> _T:
        """Run on the load's loop, beside the calls."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def era(self) -> int:
        """Number of the present popularity."""
        return int(time.monotonic() / SHIFT_S)

    async def call(
        self, client: AsyncClient, rng: np.random.Generator, timeout_s: float, address: str
    ) -> Failure | None:
        """One call, compared with the oracle; what was wrong with it."""
        arrays = draw_call(rng, self.seed, self.era())
        layer, hidden, ids, gates = arrays
        began_s = time.monotonic()

        def failure(code: str, text: str) -> Failure:
            return Failure(began_s, time.monotonic(), code, address, text)

        try:
            output = await client.forward(
                layer, hidden, ids, gates, phase=Phase(int(rng.integers(2))), timeout_s=timeout_s
            )
        except MoeServeError as error:
            if time.monotonic() - began_s > timeout_s + LATE_S:
                return failure(LATE, f"{error.code} after {time.monotonic() - began_s:.1f} s")
            return failure(error.code, error.message)
        except Exception as error:  # whatever else comes out is a finding
            return failure(UNTYPED, repr(error))
        worst = error_of(output, marker_oracle(layer, hidden, ids, gates))
        self.worst = max(self.worst, worst)
        if not worst <= TOLERANCE:
            return failure(WRONG, f"by {worst}: layer {layer}, experts {ids.tolist()}")
        took_s = time.monotonic() - began_s
        if took_s > timeout_s + LATE_S:
            return failure(LATE, f"answered after {took_s:.1f} s")
        return None

    def keep(self, failure: Failure) -> None:
        """Keep what went wrong."""
        self.failed += 1
        if len(self.failures) < FAILURES_KEPT or failure.code in (WRONG, LATE, UNTYPED):
            self.failures.append(failure)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        async with asyncio.TaskGroup() as group:
            for number, source in enumerate(self.sources):
                group.create_task(self._front_end(number, source))
        await asyncio.sleep(0.2)  # gRPC hands late events of closed channels to this loop

    async def _front_end(self, number: int, source: Source) -> None:
        rng = np.random.default_rng((self.seed, number))
        async with AsyncClient([source.address], stream=source.stream) as client:
            while not self._stopping.is_set():
                began_s = time.monotonic()
                failure = await self.call(client, rng, TIMEOUT_S, source.address)
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                if failure is None:
                    self.answered += 1
                else:
                    self.keep(failure)
                await asyncio.sleep(source.pause_s)


@dataclass
class Burst:
    """What came of a burst of odd calls. wrong: outcomes that it does not allow, in words."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
