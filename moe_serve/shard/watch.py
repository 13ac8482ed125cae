"""Looks now and then whether the threads of a shard hang.

Responsible for two bounds: a batch that the receiving thread computes itself and that hangs keeps
it for at most `HELD_S` and a look; what waits behind any batch that hangs is refused once that
counts as stalled. Must never compute, or touch a socket. Owned by `assembly`.

It costs a few wake-ups a second and nothing a batch: the threads it looks at only write down when
they began.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

LOOK_S = 0.1
"""Between two looks."""
HELD_S = 0.1
"""How long the thread that receives may compute before another receives in its stead; it takes on
only what should last a hundredth of that."""

_log = logging.getLogger(__name__)


class Computing(Protocol):
    """The shard's core, as far as it is watched."""

    def refuse_stalled(self) -> None:
        """Refuse what waits behind work that hangs."""


class Receiving(Protocol):
    """The shard's wire, as far as it is watched."""

    def replace_held(self, after_s: float) -> bool:
        """Let another thread receive where the present one is held for longer."""


class Watch:
    """A thread that looks from `start` to `stop`."""

    def __init__(
        self, computing: Computing, receiving: Receiving, *, look_s: float = LOOK_S
    ) -> None:
        self._computing = computing
        self._receiving = receiving
        self._look_s = look_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._look_s):
            try:
                self._look()
            except Exception:
                # Too little memory, say. Nobody else looks, so the next look must come.
                _log.exception("a look at the threads of the shard failed")

    def _look(self) -> None:
        if self._receiving.replace_held(HELD_S):
            _log.warning("a small batch hangs on the thread that received it; another receives")
        self._computing.refuse_stalled()
