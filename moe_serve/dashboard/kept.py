"""Answers of the controller, kept for a moment: fifty tabs cost it one call.

Responsible for asking seldom. Must never look into an answer. Called by `reading` and `operating`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

KEYS_MAX = 16
"""Different questions whose answers are kept."""
_T = TypeVar("_T")


class Kept:
    """Answers of the controller by question, each asked again once it is `ttl_s` old.

    Whoever asks while the same question is under way waits for that answer.
    """

    def __init__(self, clock_s: Callable[[], float], ttl_s: float) -> None:
        self._clock_s = clock_s
        self._ttl_s = ttl_s
        self._kept: OrderedDict[Any, tuple[float, Any]] = OrderedDict()
        self._under_way: dict[Any, asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._generation = 0
        self._newest_at_s: float | None = None

    async def ask(self, key: Any, call: Callable[[], Awaitable[_T]]) -> tuple[_T, float]:
        """(answer, its age in seconds). Raises what the call raises; that is not kept."""
        known = self._kept.get(key)
        if known is not None and self._clock_s() - known[0] < self._ttl_s:
            return known[1], self._clock_s() - known[0]
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._put(key, call, self._generation))
            self._under_way[key] = task
            self._tasks.add(task)
            task.add_done_callback(lambda ended: self._ended(key, ended))
        # Shielded: one asker that leaves must not take the answer of the others along.
        at_s, answer = await asyncio.shield(task)
        return answer, self._clock_s() - at_s

    async def _put(
        self, key: Any, call: Callable[[], Awaitable[Any]], generation: int
    ) -> tuple[float, Any]:
        found = (self._clock_s(), await call())
        # What is forgotten was answered all the same.
        newest_at_s = self._newest_at_s
        self._newest_at_s = found[0] if newest_at_s is None else max(newest_at_s, found[0])
        if generation != self._generation:
            return found
        self._kept[key] = found
        self._kept.move_to_end(key)
        while len(self._kept) > KEYS_MAX:
            self._kept.popitem(last=False)
        return found

    def _ended(self, key: Any, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._under_way.get(key) is task:
            del self._under_way[key]
        if not task.cancelled():
            task.exception()  # whoever asked may have left: then nobody else looks at it

    def last_age_s(self) -> float | None:
        """Age of the newest answer to any question, kept or not; None before the first."""
        return None if self._newest_at_s is None else self._clock_s() - self._newest_at_s

    def close(self) -> None:
        """Let nothing run on."""
        for task in list(self._tasks):
            task.cancel()

    def forget(self) -> None:
        """Ask anew next time: something was changed. Whoever waits for an answer gets it; nobody
        else does."""
        self._generation += 1
        self._kept.clear()
        self._under_way.clear()
