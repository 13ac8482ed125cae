"""Order, bounds and the estimate of the shard's queue."""

import math

import numpy as np
import pytest

from moe_serve.shard.work_queue import BacklogEstimate, QueueLimits, Work, WorkQueue
from tests.fakes.sub_calls import sub_call


def work(call_id: int, layer: int, rows: int = 1) -> Work:
    x = np.zeros((rows, 4), np.float32)
    call = sub_call(x, [(r, 0, 1, 1.0, 0) for r in range(rows)], call_id=call_id, layer=layer)
    return Work(call, lambda _answer: None, float(call_id), 1e9, x.nbytes)


def ids(works: list[Work]) -> list[int]:
    return [one.call.call_id for one in works]


def filled(*works: Work, **limits: int) -> WorkQueue:
    queue = WorkQueue(QueueLimits(**limits))
    for one in works:
        queue.put(one)
    return queue


def test_the_worked_example() -> None:
    queue = filled(work(1, 0), work(2, 1), work(3, 0))
    assert ids(queue.take()) == [1, 3]
    assert ids(queue.take()) == [2]
    assert queue.take() == []


def test_what_a_full_batch_leaves_keeps_its_place_by_age() -> None:
    queue = filled(
        work(1, 0, 3), work(2, 1), work(3, 0, 3), work(4, 2), work(5, 0), batch_rows_max=4
    )
    # Layer 0's rest has waited since 3: after layer 1 (2), before layer 2 (4).
    assert [ids(queue.take()) for _ in range(4)] == [[1], [2], [3, 5], [4]]
    assert (queue.rows, queue.pairs, queue.num_bytes, queue.sub_calls) == (0, 0, 0, 0)


def test_a_sub_call_larger_than_a_batch_is_taken_alone() -> None:
    queue = filled(work(1, 0, 9), work(2, 0), batch_rows_max=4)
    assert ids(queue.take()) == [1]
    assert ids(queue.take()) == [2]


def test_an_empty_queue_takes_any_and_a_full_one_none() -> None:
    queue = filled(rows_max=4)
    large = work(1, 0, 9)
    assert queue.has_room(large.call, large.num_bytes)
    queue.put(large)
    assert not queue.has_room(work(2, 0).call, 16)


def test_draining_gives_everything_by_age() -> None:
    queue = filled(work(1, 1), work(2, 0), work(3, 1))
    assert ids(queue.drain()) == [1, 2, 3]
    assert queue.take() == []
    assert queue.rows == 0


def test_the_estimate_of_the_worked_example() -> None:
    estimate = BacklogEstimate()
    assert estimate.seconds(1000, 0.0) == 0.0, "nothing is known yet"
    estimate.ended(100, 0.01, 1.0)
    estimate.began(40, 2.0)
    assert estimate.seconds(50, 2.003) == pytest.approx(0.006)
    assert estimate.seconds(0, 9.0) == 0.0, "a batch that takes longer than estimated adds nothing"
    estimate.ended(0, 0.5, 9.0)
    assert estimate.seconds(1, 9.0) == pytest.approx(1e-4), "an empty batch says nothing of pairs"


def test_a_batch_that_was_put_off_once_hardly_changes_what_its_like_are_taken_to_last() -> None:
    estimate = BacklogEstimate()
    assert estimate.batch_s(5) == math.inf, "nothing is known of a size before one was computed"
    estimate.ended(5, 0.002, 1.0)
    estimate.ended(7, 0.001, 2.0)
    assert estimate.batch_s(4) == 0.001, "shorter counts at once; 4 to 7 pairs are one size"
    estimate.ended(6, 0.5, 3.0)
    assert estimate.batch_s(5) == pytest.approx(0.0011)
    assert estimate.batch_s(8) == math.inf
