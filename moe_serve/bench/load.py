"""The generator: requests sent when they are due, and what became of each.

Responsible for the times and for counting every request exactly once, also those that fail. Called
by the bench command.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moe_serve.bench.figures import ANSWERED, BenchReport, Request, report_of
from moe_serve.bench.workload import Choices
from moe_serve.client import ModelSpec, Phase
from moe_serve.errors import InvalidArgument, MoeServeError

IN_FLIGHT_MAX = 10_000
"""Requests open at once. One that becomes due above it is counted as failed and not sent: the
generator must not run out of memory where the service stands still."""
NOT_SENT = "NOT_SENT"
HIDDEN_POOL = 16
"""Sets of hidden states that requests use in turn."""
TELL_EVERY_S = 0.25

Tell = Callable[[float], None]
"""Told now and then how many seconds of the load are over."""
FloatRows = npt.NDArray[np.float32]


class Caller(Protocol):
    """What is asked: the one method of `moe_serve.client.AsyncClient` that is used."""

    async def forward(
        self,
        layer: int,
        hidden: npt.NDArray[Any],
        topk_ids: npt.NDArray[Any],
        topk_weights: npt.NDArray[Any],
        *,
        phase: Phase,
        timeout_s: float | None = None,
    ) -> npt.NDArray[Any]:
        """See `AsyncClient.forward`."""
        ...


@dataclass(frozen=True, slots=True)
class BenchClock:
    """Where time comes from: monotonic seconds, and a wait."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """What is asked for, and how often. rate_per_s: of the Poisson process; callers > 0 = closed
    loop of so many instead. tokens: rows of a request. decode_share: of the requests, the rest are
    prefill. warm_up_s: at the beginning, not counted. target_s: for goodput, None = none."""

    rate_per_s: float
    callers: int
    seconds: float
    tokens: int
    decode_share: float
    warm_up_s: float
    timeout_s: float
    target_s: float | None
    seed: int


@dataclass(slots=True)
class _Run:
    """One load under way. Times are seconds since it began."""

    client: Caller
    spec: ModelSpec
    load: BenchLoad
    choices: Choices
    clock: BenchClock
    began_s: float
    rng: np.random.Generator
    hidden: list[FloatRows]
    ended: list[Request] = field(default_factory=list)
    in_flight: int = 0
    in_flight_max: int = 0
    sent: int = 0

    def now_s(self) -> float:
        return self.clock.now_s() - self.began_s

    async def ask(self, due_s: float) -> None:
        """Send one request and note what became of it."""
        number, self.sent = self.sent, self.sent + 1
        decode = self.rng.random() < self.load.decode_share
        phase = Phase.DECODE if decode else Phase.PREFILL
        if self.in_flight >= IN_FLIGHT_MAX:
            self._note(due_s, self.now_s(), phase, NOT_SENT)
            return
        layer = number % self.spec.num_layers
        # A round of all layers asks for one set of tokens.
        ids = self.choices(number // self.spec.num_layers, layer, due_s)
        weights = np.full(ids.shape, 1.0 / ids.shape[1], dtype=np.float32)
        hidden = self.hidden[number % HIDDEN_POOL]
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        sent_s, code = self.now_s(), ANSWERED
        try:
            await self.client.forward(
                layer, hidden, ids, weights, phase=phase, timeout_s=self.load.timeout_s
            )
        except InvalidArgument:
            raise  # every other one would be refused as well
        except MoeServeError as error:
            code = error.code
        finally:
            self.in_flight -= 1
        self._note(due_s, sent_s, phase, code)

    def _note(self, due_s: float, sent_s: float, phase: Phase, code: str) -> None:
        self.ended.append(
            Request(
                due_s,
                sent_s - due_s,
                self.now_s() - due_s,
                phase.name.lower(),
                self.load.tokens,
                code,
            )
        )

    async def due_times(self) -> AsyncIterator[float]:
        """Each time at which a request is due, once it has come. The times are drawn, not measured:
        where this lags, what was due meanwhile follows at once, due when it was."""
        due_s = 0.0
        while True:
            due_s += self.rng.exponential(1.0 / self.load.rate_per_s)
            if due_s >= self.load.warm_up_s + self.load.seconds:
                return
            await self.clock.sleep(max(0.0, due_s - self.now_s()))
            yield due_s

    async def caller(self) -> None:
        """One of a closed loop: a request is due when the one before has been answered."""
        while (due_s := self.now_s()) < self.load.warm_up_s + self.load.seconds:
            await self.ask(due_s)


async def run_bench(
    client: Caller,
    spec: ModelSpec,
    load: BenchLoad,
    choices: Choices,
    tell: Tell = lambda seconds: None,
    clock: BenchClock | None = None,
) -> BenchReport:
    """Put the load on the service; returns when every request has ended.

    Raises InvalidArgument where the service refuses what is asked.
    """
    clock = clock or BenchClock()
    rng = np.random.default_rng(load.seed)
    shape = (load.tokens, spec.hidden_size)
    run = _Run(
        client,
        spec,
        load,
        choices,
        clock,
        began_s=clock.now_s(),
        rng=rng,
        hidden=[rng.standard_normal(shape).astype(np.float32) for _ in range(HIDDEN_POOL)],
    )
    telling = asyncio.get_running_loop().create_task(_tell(run, tell))
    try:
        async with asyncio.TaskGroup() as group:
            if load.callers:
                for _ in range(load.callers):
                    group.create_task(run.caller())
            else:
                async for due_s in run.due_times():
                    group.create_task(run.ask(due_s))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        telling.cancel()
    return report_of(
        [one for one in run.ended if one.due_s >= load.warm_up_s],
        model=spec.model,
        simulated=spec.simulated,
        loop="closed" if load.callers else "open",
        seconds=load.seconds,
        in_flight_max=run.in_flight_max,
        target_s=load.target_s,
    )


async def _tell(run: _Run, tell: Tell) -> None:
    while True:
        tell(min(run.now_s(), run.load.warm_up_s + run.load.seconds))
        await asyncio.sleep(TELL_EVERY_S)
