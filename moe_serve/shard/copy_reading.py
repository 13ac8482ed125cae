"""A copy's right to write into its slot, how far it is, and when it must stop.

Responsible for the one question on which freeing a slot depends: may this copy's thread still touch
the slot's bytes? Must never read or write any itself. Owned by the copy job; handed to the readers
of weights as their `Reading`.

The thread of a copy holds the right from start to end, but for the parts that may hang in the
system (`blocking`): there it touches only memory of its own. Whoever gets the right then
(`give_up`) may free the slot while the thread still hangs; the thread finds the right gone when it
comes back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moe_serve.errors import DeadlineExceeded
from moe_serve.shard.faults import Faults
from moe_serve.wire.copy_client import CopyAborted

GIVE_UP_WAIT_S = 0.5
"""Longest wait for a copy that writes a chunk just now to come to a part that may hang."""


class CopyReading:
    """The `Reading` of one copy of `total_bytes`. `clock` gives monotonic seconds."""

    def __init__(
        self, total_bytes: int, deadline_s: float, clock: Callable[[], float], faults: Faults
    ) -> None:
        self.abort = threading.Event()
        """Set where the copy is to stop."""
        self.done_bytes = 0
        """Bytes that have come so far."""
        self.total_bytes = total_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        self._faults = faults
        self._right = threading.Lock()
        self._given_up = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the right; around everything the copy's thread does. Raises CopyAborted where it was
        given up before."""
        self._take()
        try:
            yield
        finally:
            self._right.release()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """See `Reading`. Raises CopyAborted on leaving, where the copy was given up."""
        self._right.release()
        try:
            yield
        finally:
            # Also where an error passes: `writing` will release it. No time limit: who gives up
            # keeps it for an instant.
            self._right.acquire()
            if self._given_up:
                # Whatever else went wrong: nobody may go on from here.
                raise CopyAborted("the copy was given up")

    def advance(self, num_bytes: int) -> None:
        """See `Reading`. Raises CopyAborted, DeadlineExceeded."""
        self.done_bytes = min(self.total_bytes, self.done_bytes + num_bytes)
        stop_at = self._faults.points.stop_copy_at
        if stop_at < 1.0 and self.done_bytes >= stop_at * self.total_bytes:
            self.abort.wait(max(0.0, self._deadline_s - self._clock()))
        self.check()

    def check(self) -> None:
        """Raises CopyAborted, DeadlineExceeded where the copy is to stop."""
        if self.abort.is_set():
            raise CopyAborted("the copy was aborted")
        if self._clock() > self._deadline_s:
            raise DeadlineExceeded("the copy did not end before its deadline")

    def left_s(self) -> float:
        """Seconds until the deadline, a little more than 0 where it has passed."""
        return max(0.001, self._deadline_s - self._clock())

    def give_up(self) -> bool:
        """Take the right away for ever; False where the thread does not let go of it."""
        if not self._right.acquire(timeout=GIVE_UP_WAIT_S):
            return False
        self._given_up = True
        self._right.release()
        return True

    def _take(self) -> None:
        self._right.acquire()
        if self._given_up:
            self._right.release()
            raise CopyAborted("the copy was given up")
