"""Looking again and again without ever standing still: a thread that asks, a screen that draws.

Responsible for going on where the controller is away, and for ending at once at `q`. The thread
that asks may wait as long as a call's deadline; the screen is drawn meanwhile and says how old what
it shows is. Called by the commands top and status.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moe_serve.cli.exits import CannotReach
from moe_serve.cli.figures import shown_seconds
from moe_serve.errors import DeadlineExceeded, Unavailable

_T = TypeVar("_T")
AWAY = (CannotReach, Unavailable, DeadlineExceeded)
"""What a controller that may be back soon is told by; anything else ends the watch."""
AGAIN_S = 1.0
"""Between two tries while it is away."""
KEY_S = 0.25
"""Between two looks whether there is something new."""
DRAW_S = 1.0
"""Between two drawings of the same: ages grow."""
END_KEYS = frozenset("qQ")


@dataclass(frozen=True, slots=True)
class Glance(Generic[_T]):
    """What is known now: the newest value and when it came; since when nobody answers, and what was
    said then. Times are monotonic seconds, None = never and not at all."""

    value: _T | None = None
    came_s: float | None = None
    away_since_s: float | None = None
    why: str = ""

    def age_s(self, now_s: float) -> float:
        """Seconds since the value came; 0 without one."""
        return 0.0 if self.came_s is None else max(0.0, now_s - self.came_s)


class Watch(Generic[_T]):
    """Asks in a thread of its own, every `interval_s` seconds. To be used as a context."""

    def __init__(self, ask: Callable[[], _T], interval_s: float) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._glance: Glance[_T] = Glance()
        self._broken: Exception | None = None
        self._over = threading.Event()
        # A daemon: a call that waits for its deadline must not hold up the end of the program.
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch[_T]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def glance(self) -> Glance[_T]:
        """What is known now. Raises what the last question met, where asking again is vain."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            return self._glance

    def _run(self) -> None:
        while not self._over.is_set():
            self._over.wait(self._interval_s if self._look() else AGAIN_S)

    def _look(self) -> bool:
        """Ask once. Whether there was an answer."""
        try:
            value = self._ask()
        except AWAY as error:
            with self._lock:
                since_s = self._glance.away_since_s or time.monotonic()
                self._glance = replace(self._glance, away_since_s=since_s, why=error.message)
            return False
        except Exception as error:
            # Carried to the thread that draws, which raises it.
            with self._lock:
                self._broken = error
            self._over.set()
            return False
        with self._lock:
            self._glance = Glance(value, time.monotonic())
        return True


def away_line(glance: Glance[_T], now_s: float) -> RenderableType | None:
    """The line on top while the controller does not answer, else None."""
    if glance.away_since_s is None:
        return None
    away = shown_seconds(max(0.0, now_s - glance.away_since_s))
    old = ""
    if glance.value is not None:
        old = f"; below is what it said {shown_seconds(glance.age_s(now_s))} ago"
    text = f"NO ANSWER for {away}{old}; trying again ({glance.why})"
    return Text(text, style="bold red")


def show_live(
    console: Console,
    watch: Watch[_T],
    draw: Callable[[_T, float], list[RenderableType]],
    wait_key: Callable[[float], str],
) -> None:
    """Draw until `q`. draw: parts of the screen for a value and its age in seconds.

    A screen is drawn over the one before in one write, so that nothing flickers. Raises what the
    watch met where asking again is vain.
    """
    drawn: Glance[_T] | None = None
    drawn_s = 0.0
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            glance, now_s = watch.glance(), time.monotonic()
            if glance is not drawn or now_s >= drawn_s + DRAW_S:
                live.update(screen_of(glance, draw, now_s), refresh=True)
                drawn, drawn_s = glance, now_s
            if wait_key(KEY_S) in END_KEYS:
                return


def screen_of(
    glance: Glance[_T], draw: Callable[[_T, float], list[RenderableType]], now_s: float
) -> Group:
    """One screen."""
    away = away_line(glance, now_s)
    parts = [] if away is None else [away]
    if glance.value is not None:
        parts += draw(glance.value, glance.age_s(now_s))
    elif away is None:
        parts.append("asking the controller ...")
    return Group(*parts)


@contextmanager
def keys_read() -> Iterator[Callable[[float], str]]:
    """What waits for a key: at most so many seconds; "" = none came. Without a terminal to read
    from it only waits. Ctrl-C stays what it is."""
    if not sys.stdin.isatty():
        yield _only_waits
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait_key(wait_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], wait_s)
        return _key(descriptor) if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield wait_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _key(descriptor: int) -> str:
    """A key; that which ends where the terminal is gone, for nobody looks any more."""
    try:
        found = os.read(descriptor, 1)
    except OSError:
        found = b""
    return found.decode(errors="replace") or "q"


def _only_waits(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


class Following(Generic[_T]):
    """A stream as something to ask: each question waits for the next entry. A stream that broke or
    ended is begun anew. Raises what the stream raises, Unavailable at its end."""

    def __init__(self, begin: Callable[[], Iterator[_T]]) -> None:
        self._begin = begin
        self._stream: Iterator[_T] | None = None

    def __call__(self) -> _T:
        """The next entry."""
        stream = self._begin() if self._stream is None else self._stream
        self._stream = None
        try:
            value = next(stream)
        except StopIteration:
            raise Unavailable("the stream ended") from None
        self._stream = stream
        return value
