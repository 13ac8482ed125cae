"""Points at which tests let the controller die, given as data in its settings.

Responsible for recognising the point. Production settings name none. Called by the driver.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence

from placement.messages.effects import Transition


def kill_self() -> None:
    """End this process as `kill -9` would."""
    os.kill(os.getpid(), signal.SIGKILL)


def point_of_term(points: Sequence[str], term: int) -> str:
    """Where the controller of a term dies, by `ControllerSettings.fail_points`; "" = nowhere."""
    return points[term - 1] if term <= len(points) else ""


class FailPoints:
    """`point`: one of `ControllerSettings.fail_points`. `crash` is called once, at the point; it
    does not return, or raises."""

    def __init__(self, point: str, crash: Callable[[], None] = kill_self) -> None:
        words = point.split(":")
        self._when = words[0]
        self._what = tuple(words[1:])
        self._crash = crash

    def at_commit(self, when: str, transitions: Iterable[Transition]) -> None:
        """`when` is before or after the commit of these transitions."""
        if self._when == when and any((t.kind.value, t.after) == self._what for t in transitions):
            self._fire()

    def at_publish(self, when: str) -> None:
        """`when` is before or after sending a table that followed a transition."""
        if self._when == when and self._what == ("publish",):
            self._fire()

    def _fire(self) -> None:
        self._when = ""
        self._crash()
