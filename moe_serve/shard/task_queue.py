"""Work for the compute thread beside batches: proofs of fills and probes, a row each.

Responsible for order, the bound, and for every task's future being settled whatever ends the
thread. Must never run a task by itself while the shard computes: `run_waiting` is the compute
thread's. Called by the shard's core, which puts under its own lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from moe_serve.errors import ResourceExhausted, Unavailable

TASKS_MAX = 64
"""Tasks that may wait between two batches: proofs and probes, of which a few are open at a time."""

_T = TypeVar("_T")


class TaskQueue:
    """Tasks in order of arrival. `closed` says that none is run any more: those fail
    Unavailable."""

    def __init__(self, closed: Callable[[], bool], tasks_max: int = TASKS_MAX) -> None:
        self._closed = closed
        self._tasks_max = tasks_max
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` between two batches. The future fails with Unavailable where the queue is
        closed, also while it waits, and with ResourceExhausted where it is full. Cancel it to take
        back what has not begun."""
        done: Future[_T] = Future()

        def task() -> None:
            if not done.set_running_or_notify_cancel():
                return
            if self._closed():
                done.set_exception(Unavailable("the shard is stopping or broken"))
                return
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
                if not isinstance(error, Exception):
                    raise  # the thread's end

        if self._closed():
            task()
        elif len(self._waiting) >= self._tasks_max:
            full = f"{self._tasks_max} rows wait already; ask later"
            done.set_exception(ResourceExhausted(full))
        else:
            self._waiting.append(task)
        return done

    def run_waiting(self) -> None:
        """Run those that wait now. Each is taken when its turn comes: should one end the thread,
        the others are still here to be refused."""
        for _ in range(len(self._waiting)):
            self._run_next()

    def refuse_waiting(self) -> None:
        """Fail all that wait, once closed."""
        assert self._closed(), "tasks are refused where none is run any more"
        while self._waiting:
            self._run_next()

    def _run_next(self) -> None:
        try:
            task = self._waiting.popleft()
        except IndexError:
            return  # another thread refused it
        task()
