"""When work of a shard counts as hung, and who looks."""

import threading

import pytest

from moe_serve.ports import FAULT_WORDS
from moe_serve.shard.stall import (
    STALL_FACTOR,
    STALL_LEAST_S,
    STALL_ROW_S,
    STALL_UNKNOWN_S,
    Stall,
)
from moe_serve.shard.watch import HELD_S, Watch
from moe_serve.shard.work_queue import BacklogEstimate


@pytest.mark.parametrize(
    ("expected_s", "allowed_s"),
    [
        (0.0, STALL_UNKNOWN_S),
        (float("inf"), STALL_UNKNOWN_S),
        (0.001, STALL_LEAST_S),
        (2.0, 2.0 * STALL_FACTOR),
    ],
)
def test_a_batch_may_take_ten_times_what_its_like_took(expected_s: float, allowed_s: float) -> None:
    stall = Stall()
    assert stall.late_s(1e9) == 0.0
    stall.began(expected_s, 100.0)
    assert stall.late_s(100.0 + allowed_s) == 0.0
    assert stall.late_s(100.5 + allowed_s) == allowed_s + 0.5
    stall.ended()
    assert stall.late_s(1e9) == 0.0


def test_rows_of_proofs_have_a_limit_of_their_own() -> None:
    stall = Stall()
    stall.rows_began(10.0)
    assert stall.late_s(10.0 + STALL_ROW_S) == 0.0
    assert stall.late_s(11.0 + STALL_ROW_S) == STALL_ROW_S + 1.0


def test_what_a_batch_should_take_is_never_less_than_its_pairs_or_its_like() -> None:
    estimate = BacklogEstimate()
    assert estimate.expected_s(100) == 0.0, "nothing is known"
    estimate.began(100, 0.0)
    estimate.ended(100, 1.0, 1.0)
    assert estimate.expected_s(100) == pytest.approx(1.0)
    assert estimate.expected_s(1000) == pytest.approx(10.0)
    for _ in range(50):
        estimate.ended(1000, 1.0, 2.0)
    assert estimate.expected_s(100) == pytest.approx(1.0), "its like took so long"


def test_the_watch_looks_at_both_until_it_is_stopped() -> None:
    looked = threading.Event()
    held: list[float] = []

    class Core:
        def refuse_stalled(self) -> None:
            looked.set()

    class Wire:
        def replace_held(self, after_s: float) -> bool:
            held.append(after_s)
            return False

    watch = Watch(Core(), Wire(), look_s=0.001)
    watch.stop()  # before it began
    watch = Watch(Core(), Wire(), look_s=0.001)
    watch.start()
    assert looked.wait(5)
    watch.stop()
    watch.stop()
    assert held[0] == HELD_S
    seen = len(held)
    assert not threading.Event().wait(0.02)
    assert len(held) == seen


def test_a_look_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    looked = threading.Event()

    class Core:
        def refuse_stalled(self) -> None:
            looked.set()

    class Wire:
        failed = False

        def replace_held(self, after_s: float) -> bool:
            if not self.failed:
                self.failed = True
                raise MemoryError
            return False

    watch = Watch(Core(), Wire(), look_s=0.001)
    watch.start()
    assert looked.wait(5)
    watch.stop()
    assert "a look at the threads" in caplog.text


def test_words_of_fault_are_none_of_load() -> None:
    assert not {"busy", "late", "draining", "stopping"} & set(FAULT_WORDS)
