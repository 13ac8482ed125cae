"""A front end that never pauses, in a process of its own: each answer with its moment, its time and
how far it is from the oracle.

Responsible for sending and for writing down. Must never retry, and never choose what is measured:
whoever reads the answers does, by their moments. Called by `benchmarks.migrating`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
END_WAIT_S = 60.0
CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Shape:
    """What is asked: `rows` a call with `top_k` experts each, `open_calls` at once a router."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    rows: int
    open_calls: int

    @property
    def pairs(self) -> int:
        """Contributions of a call."""
        return self.rows * self.top_k


@dataclass(frozen=True)
class Answers:
    """began_s: monotonic seconds of this machine; took_s. worst: greatest relative deviation."""

    began_s: Floats
    took_s: Floats
    worst: float
    failures: list[str]

    def within(self, from_s: float, to_s: float) -> Floats:
        """Times of the calls that began in that time."""
        return self.took_s[(self.began_s >= from_s) & (self.began_s < to_s)]


class Load:
    """The front end while it runs; `answers` once it has ended."""

    def __init__(self, addresses: Sequence[str], shape: Shape, seed: int) -> None:
        context = get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(
            target=_front_end, args=(there, list(addresses), shape, seed), daemon=True
        )
        self.answers: Answers | None = None

    def start(self) -> None:
        """Begin; returns once every router has answered."""
        self._process.start()
        if not self._here.poll(END_WAIT_S):
            raise RuntimeError(f"no answer from every router within {END_WAIT_S:g} s")
        self._here.recv()

    @property
    def answered(self) -> int:
        """Calls answered up to now."""
        self._here.send("count")
        return int(self._here.recv())

    def stop(self) -> Answers:
        """Let open calls end; everything that was answered."""
        self._here.send("stop")
        began_s, took_s, worst, failures = self._here.recv()
        self._process.join(END_WAIT_S)
        self.answers = Answers(np.array(began_s), np.array(took_s), worst, failures)
        return self.answers


@contextmanager
def load(addresses: Sequence[str], shape: Shape, seed: int) -> Iterator[Load]:
    """A front end that sends inside the context."""
    made = Load(addresses, shape, seed)
    made.start()
    try:
        yield made
    finally:
        if made.answers is None:
            made.stop()


def _front_end(pipe: Any, addresses: list[str], shape: Shape, seed: int) -> None:
    asyncio.run(_Sender(pipe, shape).run(addresses, seed))


class _Sender:
    def __init__(self, pipe: Any, shape: Shape) -> None:
        self._pipe = pipe
        self._shape = shape
        self._began_s: list[float] = []
        self._took_s: list[float] = []
        self._worst = 0.0
        self._failures: list[str] = []
        self._stopping = False

    async def run(self, addresses: list[str], seed: int) -> None:
        """Send until told to stop."""
        from moe_serve.client.aio import AsyncClient

        clients = [AsyncClient([address], stream=True) for address in addresses]
        for client in clients:
            await client.__aenter__()
        try:
            rng = np.random.default_rng(seed)
            for client in clients:
                await self._call(client, rng)
            self._pipe.send("begun")
            async with asyncio.TaskGroup() as group:
                for number, client in enumerate(clients):
                    for place in range(self._shape.open_calls):
                        mine = np.random.default_rng((seed, number, place))
                        group.create_task(self._calls(client, mine))
                group.create_task(self._listen())
        finally:
            for client in clients:
                await client.__aexit__(None, None, None)
        self._pipe.send((self._began_s, self._took_s, self._worst, self._failures))

    async def _listen(self) -> None:
        while not self._stopping:
            if not self._pipe.poll():
                await asyncio.sleep(0.02)
            elif self._pipe.recv() == "stop":
                self._stopping = True
            else:
                self._pipe.send(len(self._took_s))

    async def _calls(self, client: Any, rng: np.random.Generator) -> None:
        while not self._stopping:
            await self._call(client, rng)

    async def _call(self, client: Any, rng: np.random.Generator) -> None:
        from moe_serve.errors import MoeServeError
        from placement.topology import Phase
        from tests.marker_checkpoint import marker_oracle, marker_rows
        from tests.traffic import error_of

        shape = self._shape
        layer = int(rng.integers(shape.layers))
        rows = marker_rows(rng, shape.rows, shape.hidden)
        first = rng.integers(shape.experts, size=(shape.rows, 1))
        # Different experts a row without a permutation for each, which would cost more than the
        # call.
        step = rng.integers(1, shape.experts // shape.top_k, size=(shape.rows, 1))
        ids = ((first + step * np.arange(shape.top_k)) % shape.experts).astype(np.int32)
        gates = rng.random((shape.rows, shape.top_k)).astype(np.float32)
        began_s = time.monotonic()
        try:
            output = await client.forward(
                layer, rows, ids, gates, phase=Phase.DECODE, timeout_s=CALL_TIMEOUT_S
            )
        except MoeServeError as error:
            self._failures.append(f"{type(error).__name__}: {error.message}")
            return
        self._took_s.append(time.monotonic() - began_s)
        self._began_s.append(began_s)
        self._worst = max(self._worst, error_of(output, marker_oracle(layer, rows, ids, gates)))
