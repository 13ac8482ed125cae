"""What those who look cost those who call: fifty tabs and a browser that takes nothing.

    python -m benchmarks.page_tabs --json FILE

A service answers calls all the time, and its page runs beside it in a process of its own, as it
does in a service. Blocks in which fifty event streams are read (each reader asks why it is slow
after every window, as the page does) and one more is open and never read take turns with blocks in
which nobody looks, beside pairs of blocks in which nobody looks: p99 of calls, processor seconds of
the service and its page a call.

The fifty readers share this machine's cores, which browsers elsewhere would not: they run with the
lowest priority. Responsible for the order of the blocks, the table and the file. A missed bar is
printed and written, and the program still exits 0; it raises where a call fails, or where a reader
did not get what it waits for. About six minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.environment import record, use_one_thread, write_json

EXPERTS, HIDDEN, LAYERS, SLOTS, ROWS = 64, 64, 2, 46, 32
TABS = 50
ROUNDS = 20
BLOCK_S = 4.0
SETTLE_S = 1.0
"""After readers came or went, before a block: opening the page is not this question."""
START_WAIT_S = 60.0
TIMES_BAR = 1.05


@dataclass(frozen=True)
class Block:
    """watched: whether tabs were open. cpu_s: processor seconds of the service and its page."""

    watched: bool
    from_s: float
    to_s: float
    cpu_s: float


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the JSON file if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_tabs", description=__doc__)
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tabs", type=int, default=TABS)
    options = parser.parse_args(arguments)

    use_one_thread()  # before anything below imports numpy
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from tests.service_cluster import local_cluster

    environment = record("page_tabs", options.seed)
    print(*environment.lines(), sep="\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="moe-tabs-") as name, local_cluster():
        results = _measure(Path(name), options.seed, options.rounds, options.tabs)
    results["load_average_at_end"] = os.getloadavg()
    if options.json:
        write_json(options.json, environment, results)
    return 0


def _measure(folder: Path, seed: int, rounds: int, tabs: int) -> dict[str, Any]:
    from benchmarks.migrating_load import Shape, load
    from tests.marker_checkpoint import TOP_K, write_marker_checkpoint
    from tests.service_cluster import running, service_config

    checkpoint = folder / "marker"
    write_marker_checkpoint(checkpoint, experts=EXPERTS, hidden=HIDDEN)
    config = service_config(
        "tabs", str(checkpoint), folder / "state", slots=SLOTS, rebalance={"floor": 1}
    )
    shape = Shape(LAYERS, EXPERTS, TOP_K, HIDDEN, ROWS, open_calls=1)
    blocks: list[Block] = []
    with running(config) as service, _page(service.deployed.admin_address) as (url, page_pid):
        service.wait_quiet()
        service.admin.pause("the benchmark wants nothing to move")
        pids = [*service.pids().values(), service.controller_pid(), page_pid]
        with load(service.routers, shape, seed) as front_end, _readers(url, tabs) as readers:
            time.sleep(BLOCK_S)  # first calls are slower
            for number in range(rounds):
                first = bool(number % 2)
                for watched in (first, not first, False, False):
                    readers.watch(watched)
                    blocks.append(_block(pids, watched=watched))
            readers.watch(False)
            answers = front_end.stop()
            taken = readers.taken
    if answers.failures:
        raise AssertionError(f"{len(answers.failures)} calls failed: {answers.failures[:3]}")
    return _table(blocks, answers, taken, tabs)


def _block(pids: Sequence[int], *, watched: bool) -> Block:
    from benchmarks.migrating import cpu_seconds

    cpu_s, from_s = cpu_seconds(pids), time.monotonic()
    time.sleep(BLOCK_S)
    return Block(watched, from_s, time.monotonic(), cpu_seconds(pids) - cpu_s)


def _table(blocks: Sequence[Block], answers: Any, taken: int, tabs: int) -> dict[str, Any]:
    import numpy as np

    from benchmarks.dataplane_figures import ratios

    def p99(block: Block) -> float:
        return float(np.quantile(answers.within(block.from_s, block.to_s), 0.99))

    def cpu(block: Block) -> float:
        return block.cpu_s / len(answers.within(block.from_s, block.to_s))

    rounds = [blocks[i : i + 4] for i in range(0, len(blocks), 4)]
    alone = [next(b for b in one[:2] if not b.watched) for one in rounds]
    watched = [next(b for b in one[:2] if b.watched) for one in rounds]
    calls = [len(answers.within(b.from_s, b.to_s)) for b in blocks]
    print(
        f"{len(blocks)} blocks of {min(calls)} to {max(calls)} calls; {tabs} tabs took {taken} "
        f"frames; p99 alone {1e3 * float(np.median([p99(b) for b in alone])):.2f} ms, watched "
        f"{1e3 * float(np.median([p99(b) for b in watched])):.2f} ms (medians)"
    )
    results: dict[str, Any] = {"blocks": [asdict(b) for b in blocks], "frames_taken": taken}
    for name, of in (("p99", p99), ("processor seconds a call", cpu)):
        with_tabs = ratios([of(b) for b in watched], [of(b) for b in alone])
        alike = ratios([of(one[3]) for one in rounds], [of(one[2]) for one in rounds])
        print(f"{name}: watched / alone {with_tabs.text()}, alike / alike {alike.text()}")
        results[name] = {"with_tabs": asdict(with_tabs), "alike": asdict(alike)}
    middle, bar = results["p99"]["with_tabs"]["median"], results["p99"]["alike"]["high"] * TIMES_BAR
    holds = bool(middle <= bar)
    print(f"p99: median {middle:.3f} against {bar:.3f}: {'holds' if holds else 'missed'}")
    return results | {"bar": bar, "holds": holds}


# -- the page, in a process of its own -------------------------------------------------------------


@contextmanager
def _page(admin_address: str) -> Iterator[tuple[str, int]]:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve_page, args=(there, admin_address), daemon=True)
    process.start()
    try:
        if not here.poll(START_WAIT_S):
            raise RuntimeError(f"the page did not start within {START_WAIT_S:g} s")
        assert process.pid is not None
        yield here.recv(), process.pid
    finally:
        process.terminate()
        process.join()


def _serve_page(pipe: Any, admin_address: str) -> None:
    from moe_serve.dashboard.server import DashboardServer
    from moe_serve.dashboard.settings import DashboardSettings

    async def serve() -> None:
        pipe.send(await DashboardServer(DashboardSettings(admin_address=admin_address)).start())
        await asyncio.Event().wait()

    asyncio.run(serve())


# -- those who look --------------------------------------------------------------------------------


class Readers:
    """Tabs in a process of their own, open or not."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._open = False
        self.taken = 0
        """Frames that all of them took so far."""

    def watch(self, watched: bool) -> None:
        """Open or close all of them; returns once that has settled."""
        if watched != self._open:
            self._pipe.send(watched)
            if not self._pipe.poll(START_WAIT_S):
                raise RuntimeError("the readers did not open their streams")
            self.taken = self._pipe.recv()
            self._open = watched
        time.sleep(SETTLE_S)


@contextmanager
def _readers(url: str, tabs: int) -> Iterator[Readers]:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_read, args=(there, url, tabs), daemon=True)
    process.start()
    try:
        yield Readers(here)
    finally:
        process.terminate()
        process.join()


def _read(pipe: Any, url: str, tabs: int) -> None:
    os.nice(19)
    asyncio.run(_Tabs(url, tabs).follow(pipe))


class _Tabs:
    def __init__(self, url: str, tabs: int) -> None:
        self._url = f"{url}api/v1/stream"
        self._explain_url = f"{url}api/v1/explain"
        self._tabs = tabs
        self._taken = 0

    async def follow(self, pipe: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            assert await loop.run_in_executor(None, pipe.recv), "opened first"
            opened = [asyncio.Event() for _ in range(self._tabs)]
            tasks = [asyncio.create_task(self._tab(event)) for event in opened]
            tasks.append(asyncio.create_task(self._slow()))
            for event in opened:
                await asyncio.wait_for(event.wait(), START_WAIT_S)
            pipe.send(self._taken)
            assert not await loop.run_in_executor(None, pipe.recv), "closed next"
            failed = [task.exception() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if failed:
                raise RuntimeError(f"{len(failed)} tabs ended by themselves: {failed[:3]}")
            pipe.send(self._taken)

    async def _tab(self, opened: asyncio.Event) -> None:
        """A tab that takes all it is sent, and asks why it is slow after each window, as the page
        does."""
        import aiohttp

        forever = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=forever) as session,
            session.get(self._url) as stream,
        ):
            stream.raise_for_status()
            async for line in stream.content:
                if line.startswith(b"event: frame"):
                    self._taken += 1
                    opened.set()
                    async with session.get(self._explain_url) as answer:
                        answer.raise_for_status()
                        await answer.read()

    async def _slow(self) -> None:
        """A tab that asks and then takes nothing."""
        host, _, port = self._url.split("/")[2].partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"GET /api/v1/stream HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        try:
            await asyncio.Event().wait()
        finally:
            writer.close()


if __name__ == "__main__":
    sys.exit(main())
