"""What ends `up` and `demo`, and what does not cut their end short."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from moe_serve.bootstrap.signals import end_as_interrupted, handlers_kept, uninterrupted

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ALL}
    for number in ALL:  # whoever started the tests may have had one ignored (nohup)
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_a_terminal_or_a_supervisor_is_ctrl_c(number: signal.Signals) -> None:
    end_as_interrupted()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_as_interrupted()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", ALL)
def test_an_end_is_not_cut_short(number: signal.Signals) -> None:
    signal.signal(number, signal.default_int_handler)
    done = []
    with uninterrupted():
        os.kill(os.getpid(), number)
        done.append(True)
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_a_handler_that_something_inside_takes_is_given_back() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with handlers_kept():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "only what this program had set"


def test_an_end_stays_uncut_where_something_inside_takes_its_signals() -> None:
    with uninterrupted():
        with handlers_kept():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_other_threads_leave_signals_alone() -> None:
    before = {number: signal.getsignal(number) for number in ALL}
    seen: list[object] = []

    def work() -> None:
        end_as_interrupted()
        with uninterrupted(), handlers_kept():
            seen.append({number: signal.getsignal(number) for number in ALL})

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
