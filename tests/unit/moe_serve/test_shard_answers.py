"""What a shard owes, it gives, whatever becomes of the rest: a reply that cannot be sent leaves no
other unanswered, and neither it nor the limit on bytes keeps a pin longer than was promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from moe_serve.errors import MoeServeError
from moe_serve.ports import RowStatus, SubReply
from moe_serve.shard.assembly import Shard
from moe_serve.shard.copy_server import CopyServer
from moe_serve.shard.stall import STALL_UNKNOWN_S
from moe_serve.wire.token_bucket import TokenBucket
from moe_serve.wire.wire_messages import CopyChunk, CopyOpen, CopyOpened, CopyRead
from tests.fakes.marker_experts import MarkerBackend, add, marker_model, marker_shard
from tests.fakes.sub_calls import sub_call

HIDDEN = 8
WAIT_S = 20.0


def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "condition never held"
        time.sleep(0.001)


class Reply:
    """Takes an answer; `broken`: fails to, as a socket that was closed does."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.value: Any = None

    def __call__(self, value: Any) -> None:
        self.value = value
        if self.broken:
            raise OSError("the socket was closed")


class Rig:
    """A shard that computes only while `free` is set; two experts in slots 0 and 1."""

    def __init__(self) -> None:
        model = marker_model()
        self.now_s = 0.0
        self.began, self.free = threading.Event(), threading.Event()
        self.free.set()
        self.backend = MarkerBackend(model.expert, self._forward)
        self.shard: Shard = marker_shard(model=model, backend=self.backend)
        self.core = self.shard.core
        self.core.start()
        self.tags = [add(self.shard, slot, slot) for slot in range(2)]

    def _forward(self, _pairs: int) -> None:
        self.began.set()
        assert self.free.wait(WAIT_S)

    def submit(self, reply: Reply, **fields: Any) -> Reply:
        rows = np.ones((1, HIDDEN), np.float32)
        call = sub_call(rows, [(0, 0, self.tags[0], 1.0, 0)], timeout_s=600.0, **fields)
        self.core.submit(call, call.rows.nbytes, reply)
        return reply

    def busy(self) -> None:
        """Have something computed that does not end."""
        self.free.clear()
        self.began.clear()
        self.submit(Reply())
        assert self.began.wait(WAIT_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.free.set()
    made.core.stop()


def three(rig: Rig) -> list[Reply]:
    """Sub-calls that wait; the first one's reply cannot be sent."""
    return [rig.submit(Reply(broken), call_id=n) for n, broken in enumerate((True, False, False))]


def served(reply: Reply) -> bool:
    return bool(reply.value is not None and reply.value.row_status.tolist() == [RowStatus.SERVED])


def test_a_reply_that_cannot_be_sent_leaves_the_rest_of_its_batch_answered(rig: Rig) -> None:
    rig.busy()
    replies = three(rig)
    rig.free.set()
    until(lambda: all(served(reply) for reply in replies))
    assert rig.core.counters()["replies_failed"] == 1
    assert not rig.core.broken
    after = rig.submit(Reply())
    until(lambda: served(after))


@pytest.mark.parametrize("how", ["stopping", "stalled"])
def test_all_that_is_refused_at_once_is_answered(
    rig: Rig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.busy()
    replies = three(rig)
    if how == "stalled":
        real_s = rig.core.clock
        monkeypatch.setattr(rig.core, "clock", lambda: real_s() + 10 * STALL_UNKNOWN_S)
        rig.core.refuse_stalled()
    else:
        stopping = threading.Thread(target=rig.core.stop)
        stopping.start()
        rig.core.lock.acquire()  # `stop` has said so, or says so before a batch is taken
        rig.core.lock.release()
        until(lambda: rig.core._stopping)
        rig.free.set()
        stopping.join(WAIT_S)
    answers: list[SubReply] = [reply.value for reply in replies]
    assert [answer.row_status.tolist() for answer in answers] == [[RowStatus.REFUSED]] * 3
    assert all(answer.detail.startswith(how) for answer in answers)
    assert rig.core.counters()["replies_failed"] == 1


def test_what_would_end_the_thread_does_so_once_all_have_their_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_type))
    rig.busy()

    def last(_answer: object) -> None:
        raise SystemExit

    replies = three(rig)
    rig.submit(last, call_id=8)  # type: ignore[arg-type]
    behind = rig.submit(Reply(), call_id=9)
    rig.free.set()
    until(lambda: all(reply.value is not None for reply in (*replies, behind)))
    assert served(behind)
    until(lambda: rig.core.broken)


# -- copies ----------------------------------------------------------------------------------------


class Copies:
    """A copy server whose limit lets a whole expert pass in a long time only."""

    def __init__(self, rig: Rig, bytes_per_s: float) -> None:
        self.rig = rig
        self.server = CopyServer(rig.core, rig.shard.pool, TokenBucket(bytes_per_s, 1.0))
        self.server.start()

    def open(self, slot: int, timeout_s: float) -> int:
        opened = Reply()
        incarnation = self.rig.core.slots.incarnation
        tag = self.rig.tags[slot]
        self.server.open(CopyOpen(1, incarnation, slot, tag, 0, slot, timeout_s), opened)
        assert isinstance(opened.value, CopyOpened), opened.value
        return int(opened.value.copy_id)

    def read(self, copy_id: int, num_bytes: int, reply: Reply) -> Reply:
        self.server.read(CopyRead(2, copy_id, 0, num_bytes), reply)
        return reply


def test_a_pin_ends_when_promised_while_another_copy_waits_for_the_limit(rig: Rig) -> None:
    copies = Copies(rig, bytes_per_s=20.0)  # 384 bytes take 19 s
    try:
        slow = copies.read(copies.open(0, 600.0), 384, Reply())
        copies.open(1, 0.05)
        until(lambda: copies.server.num_open == 1)
        assert slow.value is None, "it still waits for the limit"
    finally:
        copies.server.stop()


def test_a_chunk_that_cannot_be_sent_does_not_end_all_copies(rig: Rig) -> None:
    copies = Copies(rig, bytes_per_s=0.0)
    try:
        copy_id = copies.open(0, 600.0)
        copies.read(copy_id, 8, Reply(broken=True))
        good = copies.read(copy_id, 8, Reply())
        until(lambda: good.value is not None)
        assert isinstance(good.value, CopyChunk)
        assert not isinstance(good.value, MoeServeError)
    finally:
        copies.server.stop()
