"""Pulls one expert's canonical bytes from a peer shard straight into the slot that will hold them.

Responsible for chunks, throttle, deadline and abort. Must never list, verify or keep anything: the
caller digests what arrived. Called by the shard's copy job, on a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from moe_serve.errors import DeadlineExceeded, FailedPrecondition, WireLost
from moe_serve.wire.codec import decode, encode
from moe_serve.wire.frame import CHUNK_BYTES_MAX
from moe_serve.wire.security import CurveKeys, secure_client
from moe_serve.wire.sockets import (
    DOWN_EVENTS,
    DOWN_REASONS,
    WATCHED_EVENTS,
    WireOptions,
    apply_options,
)
from moe_serve.wire.token_bucket import TokenBucket
from moe_serve.wire.wire_messages import (
    CopyChunk,
    CopyClose,
    CopyOpen,
    CopyOpened,
    CopyRead,
    ErrorReply,
    WireMessage,
)
from placement.routing import RankAddress

CHUNKS_IN_FLIGHT = 2
"""Chunks asked for ahead: one travels while the other is read."""
_ABORT_CHECK_MS = 20
"""Longest time for which an abort is not noticed."""


class CopyAborted(FailedPrecondition):
    """The copy was told to stop. What has arrived is worthless."""


@dataclass(frozen=True, slots=True)
class CopyPart:
    """What to pull: slot and tag of that shard incarnation, and the expert that must be there."""

    source: RankAddress
    slot: int
    tag: int
    layer: int
    expert: int


class CopyClient:
    """Pulls experts from peers, each over a connection of its own that lives as long as the copy.

    `bucket` is shared by all copies into this shard: the limit is the shard's. `clock` gives
    monotonic seconds.
    """

    def __init__(
        self,
        bucket: TokenBucket,
        *,
        keys: CurveKeys | None = None,
        options: WireOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._bucket_lock = threading.Lock()
        self.waited_s = 0.0
        """Seconds that copies were held back by the bucket, since the start."""
        self._keys = keys
        self._options = options or WireOptions()
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._context_lock = threading.Lock()

    def pull(
        self,
        part: CopyPart,
        out: memoryview,
        *,
        timeout_s: float,
        abort: threading.Event,
        advance: Callable[[int], None] = lambda _num_bytes: None,
    ) -> None:
        """Fill `out` (writable bytes, exactly the expert's canonical size) from the peer. `advance`
        is told the bytes of each chunk that has come, and may raise to end the copy.

        Raises WireLost (peer gone), NotFound (it does not hold that slot and tag),
        DeadlineExceeded, CopyAborted, and FailedPrecondition where its expert has another size.
        `out` holds undefined bytes after an error.
        """
        _Pull(self, part, out, self._clock() + timeout_s, abort, advance).run()

    def close(self) -> None:
        """End the context. Copies running are ended by their abort events first."""
        with self._context_lock:
            context, self._context = self._context, None
        if context is not None:
            context.destroy(0)

    def wait_for_tokens(self, num_bytes: int, deadline_s: float, abort: threading.Event) -> None:
        """Wait until `num_bytes` may be moved. Raises CopyAborted, DeadlineExceeded (at once where
        the wait is too long)."""
        with self._bucket_lock:
            wait_s = self._bucket.take(num_bytes, self._clock())
            too_late = self._clock() + wait_s > deadline_s
            self.waited_s += 0.0 if too_late else wait_s
        if too_late:
            raise DeadlineExceeded(
                f"the copy limit of this shard makes the copy wait {wait_s:.2f} s more, "
                "past its deadline"
            )
        if abort.wait(wait_s):
            raise CopyAborted("the copy was aborted")

    def connect(self, source: RankAddress) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A connected DEALER socket and its monitor."""
        with self._context_lock:
            # Made when first needed: most shards of a quiet service never pull anything.
            if self._context is None:
                self._context = zmq.Context()
            socket = self._context.socket(zmq.DEALER)
        apply_options(socket, self._options)
        if self._keys is not None and source.public_key:
            secure_client(socket, self._keys, source.public_key)
        if source.address.startswith("tcp://["):
            socket.ipv6 = True
        monitor = socket.get_monitor_socket(WATCHED_EVENTS)
        socket.connect(source.address)
        return socket, monitor

    @property
    def options(self) -> WireOptions:
        """Options of every connection."""
        return self._options

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic seconds."""
        return self._clock


class _Pull:
    """One copy in progress."""

    def __init__(
        self,
        client: CopyClient,
        part: CopyPart,
        out: memoryview,
        deadline_s: float,
        abort: threading.Event,
        advance: Callable[[int], None],
    ) -> None:
        self._client = client
        self._part = part
        self._out = out.cast("B")
        self._deadline_s = deadline_s
        self._abort = abort
        self._advance = advance
        self._socket, self._monitor = client.connect(part.source)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._next_call = 0

    def run(self) -> None:
        try:
            copy_id = self._open()
            try:
                self._read_all(copy_id)
            finally:
                self._close_copy(copy_id)
        finally:
            self._socket.disable_monitor()
            self._monitor.close(0)
            # The CLOSE just sent deserves a moment; the source's own deadline covers its loss.
            self._socket.close(100)

    def _open(self) -> int:
        part = self._part
        self._send(
            CopyOpen(
                call_id=self._new_call(),
                incarnation=part.source.incarnation,
                slot=part.slot,
                tag=part.tag,
                layer=part.layer,
                expert=part.expert,
                timeout_s=max(0.001, self._deadline_s - self._client.clock()),
            )
        )
        opened = self._receive()
        if not isinstance(opened, CopyOpened):
            raise self._lost(f"answered {type(opened).__name__} to an open")
        if opened.total_bytes != self._out.nbytes:
            self._close_copy(opened.copy_id)
            raise FailedPrecondition(
                f"rank {part.source.rank} holds {opened.total_bytes} bytes of layer {part.layer} "
                f"expert {part.expert}, this shard expects {self._out.nbytes}; both must serve the "
                "same dtype and weights version"
            )
        return opened.copy_id

    def _read_all(self, copy_id: int) -> None:
        total = self._out.nbytes
        offsets = list(range(0, total, CHUNK_BYTES_MAX))
        asked = 0
        waiting: dict[int, int] = {}
        arrived = 0
        while arrived < len(offsets):
            while asked < len(offsets) and len(waiting) < CHUNKS_IN_FLIGHT:
                offset = offsets[asked]
                num_bytes = min(CHUNK_BYTES_MAX, total - offset)
                self._client.wait_for_tokens(num_bytes, self._deadline_s, self._abort)
                call_id = self._new_call()
                self._send(CopyRead(call_id, copy_id, offset, num_bytes))
                waiting[call_id] = offset
                asked += 1
            chunk = self._receive()
            if not isinstance(chunk, CopyChunk) or waiting.pop(chunk.call_id, -1) != chunk.offset:
                raise self._lost("answered with a chunk that was not asked for")
            num_bytes = min(CHUNK_BYTES_MAX, total - chunk.offset)
            if len(chunk.data) != num_bytes:
                raise self._lost(f"sent {len(chunk.data)} bytes where {num_bytes} were asked for")
            self._out[chunk.offset : chunk.offset + num_bytes] = chunk.data
            arrived += 1
            self._advance(num_bytes)

    def _close_copy(self, copy_id: int) -> None:
        try:
            self._socket.send_multipart(encode(CopyClose(self._new_call(), copy_id)), zmq.NOBLOCK)
        except zmq.Again:
            # Not connected any more: the source unpins at its own deadline.
            return

    def _new_call(self) -> int:
        self._next_call += 1
        return self._next_call

    def _send(self, message: WireMessage) -> None:
        frames = encode(message)
        while True:
            self._check_time()
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                # IMMEDIATE: nothing is queued before the connection stands.
                if self._monitor.poll(_ABORT_CHECK_MS):
                    self._check_monitor()

    def _receive(self) -> WireMessage:
        while True:
            self._check_time()
            ready = dict(self._poller.poll(_ABORT_CHECK_MS))
            if self._socket in ready:
                parts = self._socket.recv_multipart(copy=False)
                message = decode(
                    [part.buffer for part in parts], self._client.options.message_bytes_max
                )
                if isinstance(message, ErrorReply):
                    raise message.error
                return message
            if self._monitor in ready:
                self._check_monitor()

    def _check_time(self) -> None:
        if self._abort.is_set():
            raise CopyAborted("the copy was aborted")
        if self._client.clock() > self._deadline_s:
            raise DeadlineExceeded(
                f"the copy from rank {self._part.source.rank} did not end before its deadline"
            )

    def _check_monitor(self) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart())["event"]
        if event & DOWN_EVENTS:
            raise self._lost(DOWN_REASONS[zmq.Event(event)])

    def _lost(self, reason: str) -> WireLost:
        source = self._part.source
        return WireLost(f"copy source rank {source.rank} at {source.address}: {reason}")
