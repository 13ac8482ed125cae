"""Tasks of one life of the controller: none is forgotten, and the first that fails ends the life.

Responsible for starting, watching and ending them, and for a bell that watchers wait on. Called by
everything that runs beside the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """A set of running tasks. Use within one event loop."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside everything else; its failure is `failure`'s."""
        task = asyncio.get_running_loop().create_task(work)
        self._open.add(task)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: BaseException) -> None:
        """End the life with this error."""
        if not self._failure.done():
            self._failure.set_result(error)

    async def failure(self) -> BaseException:
        """Wait for the first failure."""
        return await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """Cancel what still runs and wait for its end."""
        open_tasks = [task for task in self._open if task is not asyncio.current_task()]
        for task in open_tasks:
            task.cancel()
        if open_tasks:
            await asyncio.gather(*open_tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._open.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


class Bell:
    """Counts changes; those who wait see that something changed, not how often."""

    def __init__(self) -> None:
        self.version = 0
        self._changed = asyncio.Event()

    def ring(self) -> None:
        """Something changed."""
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seen: int) -> int:
        """The newest version, as soon as it is not `seen`."""
        while self.version == seen:
            await self._changed.wait()
        return self.version
