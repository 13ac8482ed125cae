"""How programs that start things are told to end.

Responsible for two rules: whoever ends `up` or `demo` ends what they started, and what ends it is
not cut short. Signals belong to the main thread; elsewhere nothing here does anything.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_as_interrupted() -> None:
    """A supervisor's SIGTERM and a terminal that closes raise KeyboardInterrupt, as Ctrl-C does.

    A signal that this program was started to ignore (nohup) stays ignored.
    """
    if not _in_main_thread():
        return
    for number in _ENDING[1:]:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not stop the work inside, which ends processes and is short."""
    if not _in_main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {n: signal.getsignal(n) for n in _ENDING}
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python cannot be set again from it
                signal.signal(number, handler)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Handlers of this program are in force again after the work inside: joining Ray takes SIGTERM
    for a handler of its own, which prints a stack and ends the program with nothing ended."""
    if not _in_main_thread():
        yield
        return
    taken = {number: signal.getsignal(number) for number in _ENDING}
    before = {n: h for n, h in taken.items() if callable(h) or h is signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
