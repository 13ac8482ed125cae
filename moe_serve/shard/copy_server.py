"""Serves the bytes of this shard's slots to shards that copy them.

Responsible for pinning a source slot while it is read, for chunks, and for the shard's limit on
bytes sent. Must never serve a slot that is not verified, nor bytes of another fill. Called by the
shard's server on the wire thread; reads are answered from a thread of its own, so that neither the
throttle nor the memory copy holds up sub-calls.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.errors import InvalidArgument, MoeServeError, NotFound, ResourceExhausted
from moe_serve.shard.core import ShardCore
from moe_serve.shard.slot_pool import SlotPool
from moe_serve.wire.frame import CHUNK_BYTES_MAX
from moe_serve.wire.token_bucket import TokenBucket
from moe_serve.wire.wire_messages import CopyChunk, CopyClose, CopyOpen, CopyOpened, CopyRead

OPEN_COPIES_MAX = 64
"""Copies that may be open at once; the planner runs a few, so reaching this means that peers do not
close theirs."""
WAITING_READS_MAX = 256
"""Reads that may wait; each open copy asks for two at a time."""
_SWEEP_S = 0.25
"""Longest time for which an expired copy keeps its pin."""

_log = logging.getLogger(__name__)

CopyReply = Callable[[CopyOpened | CopyChunk | MoeServeError], None]


@dataclass(frozen=True, slots=True)
class _OpenCopy:
    slot: int
    deadline_s: float


class CopyServer:
    """Copies open at this shard. `bucket` limits the bytes sent; 0 bytes/s in it means no limit."""

    def __init__(self, core: ShardCore, pool: SlotPool, bucket: TokenBucket) -> None:
        self._core = core
        self._pool = pool
        self._bucket = bucket
        self._copies: dict[int, _OpenCopy] = {}
        """By copy_id. Guarded by the core's lock."""
        self._next_id = 1
        self._reads: queue.Queue[tuple[CopyRead, CopyReply] | None] = queue.Queue(WAITING_READS_MAX)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe-copy-out", daemon=True)
        self.sent_bytes = 0
        """Bytes of experts sent since start."""

    def start(self) -> None:
        """Begin to answer reads."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and unpin everything. Idempotent."""
        self._stop.set()
        with contextlib.suppress(queue.Full):  # then the thread has work and looks at the flag soon
            self._reads.put_nowait(None)
        if self._thread.ident is not None:
            self._thread.join()
        with self._core.lock:
            for copy_id in list(self._copies):
                self._end(copy_id)

    @property
    def num_open(self) -> int:
        """Copies open now."""
        return len(self._copies)

    def open(self, message: CopyOpen, reply: CopyReply) -> None:
        """Pin the slot until it is closed or `timeout_s` is over. Refuses with NotFound where it
        does not hold that verified fill."""
        core, slots = self._core, self._core.slots
        with core.lock:
            full = len(self._copies) >= OPEN_COPIES_MAX
            held = (
                not full
                and message.incarnation == slots.incarnation
                and core.pin_copy(message.slot, message.tag, message.layer, message.expert)
            )
            copy_id = self._next_id
            if held:
                self._next_id += 1
                if core.facts is not None:
                    core.facts.begin_reading(message.slot)
                self._copies[copy_id] = _OpenCopy(message.slot, core.clock() + message.timeout_s)
        if full:
            reply(ResourceExhausted(f"rank {slots.rank} has {OPEN_COPIES_MAX} copies open already"))
        elif not held:
            reply(
                NotFound(
                    f"rank {slots.rank} incarnation {slots.incarnation}: slot {message.slot} does "
                    f"not hold layer {message.layer} expert {message.expert} with tag {message.tag}"
                )
            )
        else:
            reply(CopyOpened(message.call_id, copy_id, core.model.expert.canonical_bytes))

    def read(self, message: CopyRead, reply: CopyReply) -> None:
        """Queue a read."""
        try:
            self._reads.put_nowait((message, reply))
        except queue.Full:
            reply(ResourceExhausted(f"{WAITING_READS_MAX} reads wait already"))

    def close(self, message: CopyClose) -> None:
        """Unpin; unknown ones (expired, closed twice) are fine."""
        with self._core.lock:
            self._end(message.copy_id)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                item = self._reads.get(timeout=_SWEEP_S)
            except queue.Empty:
                item = None
            self._expire()
            if item is not None:
                message, reply = item
                self._throttle(message.num_bytes)
                try:
                    reply(self._chunk(message))
                except Exception:
                    # Whoever asked runs into its deadline; pins have nobody but this thread.
                    _log.exception("a chunk of copy %d could not be sent", message.copy_id)

    def _throttle(self, num_bytes: int) -> None:
        """Wait for the limit's permission; copies expire meanwhile as ever."""
        left_s = self._bucket.take(num_bytes, self._core.clock())
        while left_s > 0 and not self._stop.wait(min(left_s, _SWEEP_S)):
            left_s -= _SWEEP_S
            self._expire()

    def _chunk(self, message: CopyRead) -> CopyChunk | MoeServeError:
        with self._core.lock:
            copy = self._copies.get(message.copy_id)
            if copy is None:
                return NotFound(
                    f"copy {message.copy_id} is not open (closed, or past its deadline)"
                )
            total = self._core.model.expert.canonical_bytes
            end = message.offset + message.num_bytes
            if end > total or message.num_bytes > CHUNK_BYTES_MAX:
                return InvalidArgument(f"bytes {message.offset} to {end} are outside of {total}")
            # Copied under the lock: the pin cannot expire meanwhile, and what is sent later is ours
            # alone.
            data = self._pool.buffer(copy.slot)[message.offset : end].tobytes()
        self.sent_bytes += len(data)
        return CopyChunk(message.call_id, message.copy_id, message.offset, data)

    def _expire(self) -> None:
        now_s = self._core.clock()
        with self._core.lock:
            for copy_id, copy in list(self._copies.items()):
                if copy.deadline_s <= now_s:
                    self._end(copy_id)

    def _end(self, copy_id: int) -> None:
        """Under the lock."""
        copy = self._copies.pop(copy_id, None)
        if copy is not None:
            if self._core.facts is not None:
                self._core.facts.end_reading(copy.slot)
            self._core.unpin_copy(copy.slot)
