"""A network that loses calls, around every async port.

What a caller sees of each kind of loss is what the real port shows: its error of a call without an
answer. The call may nevertheless be carried out: before, meanwhile, or later.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, Protocol, get_args

import numpy as np

from moe_serve.errors import MoeServeError, Unavailable
from moe_serve.ports import Fleet, RouterPort, ShardChannel, ShardPort
from placement.messages.effects import ShardCommand


class Loss(StrEnum):
    """What becomes of one call."""

    REQUEST = "request lost"
    """Never carried out."""
    REPLY = "reply lost"
    """Carried out, and nobody is told."""
    RETRIED = "retried while the first still runs"
    """The caller gives up at once. The call is carried out all the same: now, or, every other time,
    only after it may have been asked for again."""


AT_HOME = {ShardChannel: frozenset({"close"})}
"""Async methods that send nothing: closing one's own socket."""
EXECUTE = "ShardPort.execute"
"""One method, but every kind of command is a call of its own."""
Pick = Callable[[str, int], Loss | None]
"""(method, its how-manieth call from 0) -> what becomes of it, None = it gets through."""


def remote_methods(protocol: type) -> tuple[str, ...]:
    """Async methods of a port, from the protocol itself: a method that is added is in it."""
    inside = AT_HOME.get(protocol, frozenset())
    return tuple(
        name
        for name, kind in vars(protocol).items()
        if inspect.iscoroutinefunction(kind) and name not in inside
    )


def calls_of(protocol: type) -> tuple[str, ...]:
    """Names under which a network knows the calls of a port."""
    names = [f"{protocol.__name__}.{name}" for name in remote_methods(protocol)]
    if EXECUTE in names:
        names.remove(EXECUTE)
        names += [f"{EXECUTE}({kind.__name__})" for kind in get_args(ShardCommand)]
    return tuple(names)


def every_other(loss: Loss, times: int, only: tuple[str, ...] = ()) -> Pick:
    """The first, third, ... call of each method (those of `only` alone, where it names any) is
    lost, `times` in all."""

    def pick(method: str, number: int) -> Loss | None:
        hit = number % 2 == 0 and number < 2 * times and (not only or method in only)
        return loss if hit else None

    return pick


def at_random(seed: int, share: float = 0.25) -> Pick:
    """A share of all calls, each kind of loss as likely."""
    rng = np.random.default_rng(seed)
    kinds = list(Loss)

    def pick(_method: str, _number: int) -> Loss | None:
        return kinds[int(rng.integers(len(kinds)))] if rng.random() < share else None

    return pick


class Network:
    """Decides about calls by method name and counts what it did. `late_s`: how much later a call
    is carried out that comes late. `error`: what a caller without an answer is told."""

    def __init__(
        self,
        pick: Pick,
        *,
        late_s: float = 0.02,
        error: Callable[[str], MoeServeError] = lambda name: Unavailable(f"{name}: no answer"),
    ) -> None:
        self.pick = pick
        self.calls: Counter[str] = Counter()
        self.lost: Counter[tuple[str, Loss]] = Counter()
        self.healed = False
        """From here on every call gets through."""
        self._late_s = late_s
        self._error = error
        self._running: set[asyncio.Task[None]] = set()

    async def carry(self, method: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """One call."""
        number = self.calls[method]
        self.calls[method] += 1
        loss = None if self.healed else self.pick(method, number)
        if loss is None:
            return await call()
        self.lost[method, loss] += 1
        if loss is Loss.REPLY:
            await self._unheard(call)
        elif loss is Loss.RETRIED:
            late_s = self._late_s * (self.lost[method, loss] % 2)
            task = asyncio.create_task(self._unheard(call, late_s))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.sleep(0)
        raise self._error(method)

    async def settle(self) -> None:
        """Wait until every call is over that is still on its way."""
        while self._running:
            await asyncio.gather(*self._running)

    async def _unheard(self, call: Callable[[], Awaitable[Any]], late_s: float = 0.0) -> None:
        await asyncio.sleep(late_s)
        try:
            await call()
        except MoeServeError:
            return  # nobody hears of it


class Lossy:
    """A port behind a network. What is no call of the protocol goes straight to the port."""

    def __init__(self, port: Any, protocol: type, network: Network) -> None:
        self._port = port
        self.network = network
        self._label = protocol.__name__
        self._remote = frozenset(remote_methods(protocol))

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._port, name)
        if name not in self._remote:
            return inner

        async def carried(*args: Any, **kwargs: Any) -> Any:
            label = f"{self._label}.{name}"
            if label == EXECUTE:
                label += f"({type(args[1]).__name__})"
            return await self.network.carry(label, lambda: inner(*args, **kwargs))

        return carried


class LossyFleet(Lossy):
    """A fleet behind a network whose parts are behind it too."""

    def __init__(self, fleet: Fleet, network: Network) -> None:
        super().__init__(fleet, Fleet, network)

    def __getattr__(self, name: str) -> Any:
        made: dict[str, type[Protocol]] = {  # type: ignore[valid-type]
            "create_shard": ShardPort,
            "find_shard": ShardPort,
            "create_router": RouterPort,
            "find_router": RouterPort,
        }
        call = super().__getattr__(name)
        if name not in made:
            return call

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            port = await call(*args, **kwargs)
            return None if port is None else Lossy(port, made[name], self.network)

        return wrapped
