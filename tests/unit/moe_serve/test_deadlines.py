"""Deadlines of milliseconds and cancels at any moment, through routers and shards of one process:
no batch is begun for a call that is over, and permits, queues and tasks are given back."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_serve.errors import DeadlineExceeded, MoeServeError, ResourceExhausted, Unavailable
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from moe_serve.shard.compute.base import SlotWork
from moe_serve.shard.served_model import ServedModel
from tests.fake_shards import HIDDEN, until
from tests.fakes.marker_experts import MarkerBackend
from tests.fakes.served import Served, a_request, check, serving

ROWS = 4
TYPED = (DeadlineExceeded, Unavailable, ResourceExhausted)


class Watched(MarkerBackend):
    """Notes whose rows each forward computes: a request's rows are all its number. While
    `closed`, forwards wait in `began`."""

    def __init__(self, model: ServedModel, _rank: int) -> None:
        super().__init__(model.expert)
        self.computed: set[int] = set()
        self.open = threading.Event()
        self.open.set()
        self.began = threading.Event()

    def forward(self, rows: NDArray[np.float32], *pairs: Any, **named: Any) -> SlotWork:
        self.began.set()
        self.computed |= {round(float(value)) for value in rows[:, 0]}
        assert self.open.wait(20)
        return super().forward(rows, *pairs, **named)


def numbered(number: int) -> ForwardInput:
    hidden = np.full((ROWS, HIDDEN), float(number), np.float32)
    return a_request(ROWS, seed=number, hidden=hidden)


def backends(served: Served) -> list[Watched]:
    found = [served.backend(rank) for rank in range(len(served.shards))]
    assert all(isinstance(one, Watched) for one in found)
    return found  # type: ignore[return-value]


async def ended(core: RouterCore, number: int, timeout_s: float) -> MoeServeError | None:
    try:
        request = numbered(number)
        check(request, await core.forward(request, timeout_s))
    except MoeServeError as error:
        return error
    return None


async def all_given_back(served: Served, core: RouterCore) -> float:
    """Seconds until nothing is held any more."""
    began_s = time.monotonic()
    held = ("open_requests", "open_rows", "waiting_requests")
    await until(lambda: not any(core.report(0).counters[name] for name in held), 10.0)
    for shard in served.shards:
        await until(lambda core=shard.core: core.counters()["queued_rows"] == 0, 10.0)
        await until(lambda core=shard.core: not core.busy, 10.0)
        with shard.core.lock:
            assert not any(slot.pinned for slot in shard.core.slots.ledger.slots)
    assert (core.role.open_calls, core.role.open_sub_calls) == (0, 0)
    assert not core.role.waiting
    return time.monotonic() - began_s


@pytest.mark.asyncio
async def test_what_is_over_while_it_waits_is_never_begun() -> None:
    rng = np.random.default_rng(1)
    served = Served(3, backend=Watched)
    async with serving(served, max_open_requests=2000, max_open_rows=100_000) as (core,):
        for backend in backends(served):
            backend.computed.clear()
            backend.began.clear()
            backend.open.clear()
        first = [asyncio.create_task(ended(core, n, 30.0)) for n in range(1, 5)]
        await until(lambda: all(b.began.is_set() for b in backends(served)))
        short = [
            asyncio.create_task(ended(core, n, float(rng.uniform(0.001, 0.02))))
            for n in range(1000, 1200)
        ]
        cut = [asyncio.create_task(ended(core, n, 30.0)) for n in range(2000, 2200)]
        loop = asyncio.get_running_loop()
        for task in cut:
            loop.call_later(float(rng.uniform(0.0, 0.02)), task.cancel)
        late = [asyncio.create_task(ended(core, n, 30.0)) for n in range(3000, 3020)]
        assert {type(end) for end in await asyncio.gather(*short)} <= {*TYPED}
        ends = await asyncio.gather(*cut, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        for backend in backends(served):
            backend.open.set()
        assert await asyncio.gather(*first) == [None] * len(first)
        assert await asyncio.gather(*late) == [None] * len(late)
        took_s = await all_given_back(served, core)
        computed = set().union(*(backend.computed for backend in backends(served)))
        assert not computed & set(range(1000, 1200)), "begun past its deadline"
        assert computed >= set(range(3000, 3020)) | set(range(1, 5))
        print(f"permits and queues given back in {took_s:.3f} s (bar 1 s)")


@pytest.mark.asyncio
async def test_deadlines_and_cancels_at_any_moment_leave_nothing_behind() -> None:
    rng = np.random.default_rng(2)
    served = Served(3, backend=Watched)
    for rank in range(3):
        served.backend(rank).on_forward = lambda _pairs: time.sleep(0.001)
    async with serving(served, max_open_requests=400) as (core,):
        tasks = {task for task in asyncio.all_tasks()}
        took_s = 0.0
        counts = {"served": 0, "typed": 0, "cancelled": 0}
        for _ in range(20):
            calls = [
                # Every third caller has time: on a slow machine nobody else is served.
                asyncio.create_task(
                    ended(core, n, float(rng.uniform(0.001, 0.02)) if n % 3 else 30.0)
                )
                for n in range(1, 16)
            ]
            loop = asyncio.get_running_loop()
            for task in calls[::3]:
                loop.call_later(float(rng.uniform(0.0, 0.02)), task.cancel)
            for end in await asyncio.gather(*calls, return_exceptions=True):
                assert end is None or isinstance(end, (*TYPED, asyncio.CancelledError)), end
                kind = "served" if end is None else "typed"
                counts["cancelled" if isinstance(end, asyncio.CancelledError) else kind] += 1
            took_s = max(took_s, await all_given_back(served, core))
        print(f"{counts}; all given back in {took_s:.3f} s (bar 1 s)")
        assert all(counts.values()), counts
        assert core.report(0).suspects == (), "callers in a hurry are no fault of a shard"
        await until(lambda: len(asyncio.all_tasks() - tasks) <= 1)
        assert await ended(core, 5, 10.0) is None
