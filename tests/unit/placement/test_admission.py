"""The bounded queue in front of a router's permits."""

import numpy as np
import pytest

from placement.roles.admission import Admission, Admitted, Verdict


def make(permits=2, size=100, queue=2):
    return Admission(permits_max=permits, rows_max=size, queue_max=queue)


def test_permits_are_given_in_the_order_of_asking():
    queue = make()
    assert queue.ask(1, 10, 9.0, 0.0) is Verdict.ADMITTED
    assert queue.ask(2, 10, 9.0, 0.0) is Verdict.ADMITTED
    assert queue.ask(3, 10, 9.0, 0.0) is Verdict.WAITING
    assert queue.ask(4, 10, 9.0, 0.0) is Verdict.WAITING
    assert queue.finish(1, 1.0) == Admitted(started=(3,))
    assert queue.finish(3, 1.0) == Admitted(started=(4,))
    assert (queue.at_work, queue.waiting, queue.rows_at_work) == (2, 0, 20)


def test_a_full_queue_refuses():
    queue = make(permits=1, queue=0)
    queue.ask(1, 10, 9.0, 0.0)
    assert queue.ask(2, 10, 9.0, 0.0) is Verdict.QUEUE_FULL


def test_more_rows_than_may_be_at_work_together_wait_until_they_are_alone():
    queue = make()
    assert queue.ask(1, 101, 9.0, 0.0) is Verdict.ADMITTED
    assert queue.ask(2, 1, 9.0, 0.0) is Verdict.WAITING
    assert queue.finish(1, 1.0) == Admitted(started=(2,))
    assert queue.ask(3, 101, 9.0, 1.0) is Verdict.WAITING
    assert queue.finish(2, 1.0) == Admitted(started=(3,))


def test_a_small_request_does_not_pass_a_large_one():
    queue = make(permits=9, queue=9)
    queue.ask(1, 60, 9.0, 0.0)
    assert queue.ask(2, 60, 9.0, 0.0) is Verdict.WAITING
    assert queue.ask(3, 1, 9.0, 0.0) is Verdict.WAITING
    assert queue.finish(1, 1.0) == Admitted(started=(2, 3))


def test_deadlines_end_the_wait_and_free_who_stood_behind():
    queue = make(permits=9, queue=9)
    queue.ask(1, 60, 9.0, 0.0)
    queue.ask(2, 60, 2.0, 0.0)
    queue.ask(3, 1, 9.0, 0.0)
    queue.ask(4, 1, 2.0, 0.0)
    assert queue.cancel(2, 2.0) == Admitted(started=(3,), expired=(4,))
    assert queue.ask(5, 1, 2.0, 2.0) is Verdict.TOO_LATE


def test_cancel_gives_everything_back_wherever_the_request_was():
    queue = make(permits=1)
    queue.ask(1, 10, 9.0, 0.0)
    queue.ask(2, 10, 9.0, 0.0)
    queue.ask(3, 10, 9.0, 0.0)
    assert queue.cancel(2, 1.0) == Admitted()
    assert queue.cancel(1, 1.0) == Admitted(started=(3,))
    assert queue.cancel(99, 1.0) == Admitted()


def test_a_closed_queue_hands_back_who_waited():
    queue = make(permits=1)
    queue.ask(1, 10, 9.0, 0.0)
    queue.ask(2, 10, 9.0, 0.0)
    assert queue.close() == (2,)
    assert queue.ask(3, 10, 9.0, 0.0) is Verdict.CLOSED
    assert queue.finish(1, 1.0) == Admitted()


def test_bounds_must_make_sense():
    with pytest.raises(ValueError, match="permits_max 0"):
        make(permits=0)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_leaks_under_random_use(seed):
    rng = np.random.default_rng(seed)
    queue = make(permits=3, size=50, queue=5)
    open_requests: set[int] = set()
    for number in range(400):
        at_s = float(number)
        if rng.random() < 0.6:
            verdict = queue.ask(number, int(rng.integers(1, 60)), at_s + rng.integers(-1, 8), at_s)
            if verdict in (Verdict.ADMITTED, Verdict.WAITING):
                open_requests.add(number)
        elif open_requests:
            request = int(rng.choice(sorted(open_requests)))
            open_requests -= {request, *queue.cancel(request, at_s).expired}
        assert queue.at_work <= 3
        assert queue.rows_at_work <= 50 or queue.at_work == 1
        assert queue.at_work + queue.waiting == len(open_requests)
    for request in sorted(open_requests):
        queue.cancel(request, 1e9)
    assert (queue.at_work, queue.waiting, queue.rows_at_work) == (0, 0, 0)
