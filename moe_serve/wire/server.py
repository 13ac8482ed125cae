"""The shard's end of the wire: one thread that owns a ROUTER socket.

Responsible for receiving, decoding and handing over messages, and for sending answers given by any
thread. Must never block or touch slots; computes only what its handler chooses to, and as long
receives nothing. Made by the shard's assembly, whose server is the handler.

The thread is the only one that touches the socket. Other threads put answers into an outbox and
wake it through a pipe. A message that cannot be decoded is answered with ERROR where its ids can be
read, counted, and otherwise dropped: it touches no other request.

While the handler is busy with a burst (`burst_ended`) the thread does not touch the socket either,
so another may take its place then (`replace_held`): a handler that hangs there holds nobody up. The
old thread ends when it comes back. Sockets may change threads where a lock lies between.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from moe_serve.errors import InvalidArgument, StartRefused
from moe_serve.wire.codec import decode, encode
from moe_serve.wire.frame import Buffer, Frames, read_ids
from moe_serve.wire.security import ServerSecurity, secure_server, zap_answer
from moe_serve.wire.sockets import (
    WireOptions,
    apply_options,
    has_input,
    receive_frames,
    send_frames,
)
from moe_serve.wire.wire_messages import Answer, ErrorReply, WireMessage

OUTBOX_MESSAGES_MAX = 65_536
"""Answers waiting to be sent. The shard's own queue is smaller; reaching this drops answers,
counted, and callers time out."""
RECEIVE_BURST = 64
"""Messages taken in a row before answers get their turn."""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


Reply = Callable[[Answer], None]
"""Sends an answer to whoever asked. May be called once, from any thread, also after the peer is
gone."""
Handler = Callable[[WireMessage, Reply], None]
"""Takes a decoded message on the wire thread; must not block. What it raises is our bug and ends
the thread."""


class WireServer:
    """A bound ROUTER socket and its thread.

    `handler` gets every decoded message with a way to answer it; `burst_ended` is called after all
    that had come was handed over, so that work may be begun once for several messages. `host` is an
    IP address to bind, `port` 0 lets the system choose. With `security` only admitted CURVE clients
    connect. `bind()` binds, so that `address` is known; `start()` begins to serve.

    Raises StartRefused from `bind` where the address cannot be bound, or is not loopback and there
    is no `security`: the wire knows no other authentication.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        burst_ended: Callable[[], None] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        options: WireOptions | None = None,
        security: ServerSecurity | None = None,
    ) -> None:
        self._handler = handler
        self._burst_ended = burst_ended
        self._host, self._port = host, port
        self._options = options or WireOptions()
        self._security = security
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._zap: zmq.Socket[bytes] | None = None
        self._outbox: deque[tuple[bytes, list[Buffer]]] = deque()
        self._wake_read = self._wake_write = -1
        self._wake_sent = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="moe-wire", daemon=True)
        """The one that serves; guarded by `_lock` once it runs, as is `_held_since_s`."""
        self._held_since_s: float | None = None
        """When the handler got the burst it is busy with; monotonic seconds."""
        self._address = ""
        self.malformed = 0
        """Messages refused by the codec."""
        self.dropped_answers = 0
        """Answers whose peer was gone or did not read."""
        self.replaced_threads = 0
        """Times that another thread took over from one that the handler held."""

    @property
    def address(self) -> str:
        """Endpoint to connect to, as "tcp://host:port". Empty before `bind`."""
        return self._address

    @property
    def alive(self) -> bool:
        """Whether the thread serves."""
        return self._thread.is_alive()

    def bind(self) -> str:
        """Bind and return the endpoint. Messages wait until `start`."""
        if self._security is None and not _is_loopback(self._host):
            raise StartRefused(
                f"the wire will not listen on {self._host} without CURVE keys; "
                "bind 127.0.0.1, or give the shard the service's client keys"
            )
        # An own context: its ZAP endpoint asks this server only, and closing it closes nothing
        # else.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if self._security is not None:
            self._zap = context.socket(zmq.REP)
            self._zap.linger = 0
            self._zap.bind(_ZAP_ENDPOINT)
        socket = context.socket(zmq.ROUTER)
        apply_options(socket, self._options)
        socket.router_mandatory = True
        if ":" in self._host:
            socket.ipv6 = True
        if self._security is not None:
            secure_server(socket, self._security)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            socket.bind(f"tcp://{host}:{self._port or '*'}")
        except zmq.ZMQError as error:
            context.destroy(0)
            raise StartRefused(
                f"the wire cannot bind {host}:{self._port}: {error.strerror}; "
                "give a free port (0 lets the system choose) and an address of this machine"
            ) from error
        self._context, self._socket = context, socket
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return self._address

    def start(self) -> None:
        """Begin to serve."""
        assert self._socket is not None, "bind comes first"
        self._thread.start()

    def replace_held(self, after_s: float) -> bool:
        """Let a new thread serve where the handler has held the present one for longer than
        `after_s`. Whether it did; not where the system has no thread to give."""
        with self._lock:
            since_s = self._held_since_s
            if since_s is None or time.monotonic() - since_s <= after_s:
                return False
            self._held_since_s = None
            thread = threading.Thread(target=self._run, name="moe-wire", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._held_since_s = since_s  # the present one still serves: ask again
                return False
            # Only now, so that `alive` is true at every moment. The old thread, should it come back
            # just now, waits for the lock before it touches anything.
            self._thread = thread
            self.replaced_threads += 1
        return True

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and close the socket; peers see a disconnect. Idempotent."""
        with self._lock:
            first, self._stopping = not self._stopping, True
        if self._thread.ident is not None:
            self._wake()
            end_s = time.monotonic() + timeout_s
            # In short waits: another thread may be taking over.
            while self._thread.is_alive() and time.monotonic() < end_s:
                self._thread.join(0.1)
            assert not self._thread.is_alive(), "the wire thread does not end: its handler blocks"
        elif first:
            self._close()
        with self._lock:
            ends, self._wake_read, self._wake_write = (self._wake_read, self._wake_write), -1, -1
        for end in ends:
            if end >= 0:
                os.close(end)

    def _reply_to(self, peer: bytes) -> Reply:
        def reply(answer: Answer) -> None:
            self._send(peer, encode(answer))

        return reply

    def _send(self, peer: bytes, frames: list[Buffer]) -> None:
        if len(self._outbox) >= OUTBOX_MESSAGES_MAX:
            self.dropped_answers += 1
            return
        self._outbox.append((peer, frames))
        if threading.current_thread() is not self._thread:
            self._wake()

    def _wake(self) -> None:
        # One byte is enough however many answers wait: the thread clears the flag before it empties
        # the outbox.
        if self._wake_sent.is_set():
            return
        # Under the lock: once the pipe is closed its number may be another file's.
        with self._lock:
            if self._wake_write < 0:
                return
            self._wake_sent.set()
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
                os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        socket = self._socket
        assert socket is not None, "bind comes first"
        # The sockets' own descriptors tell changes only: what waits is asked of the sockets before
        # each sleep. A poll of theirs would ask as well and costs several times as much.
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
        if self._zap is not None:
            poll.register(int(self._zap.getsockopt(zmq.FD)), select.POLLIN)
        try:
            while not self._stopping:
                worked = self._receive_burst(socket)
                if worked and not self._hand_over():
                    return
                if not (self._flush(socket) or worked):
                    for descriptor, _ in poll.poll():
                        if descriptor == self._wake_read:
                            self._drain_pipe()
        finally:
            with self._lock:
                mine = self._thread is threading.current_thread()
            if mine:
                self._close()

    def _receive_burst(self, socket: zmq.Socket[bytes]) -> bool:
        """Take what has come; False where nothing had.

        Sending counts as work too: it may take in the very change the descriptor told of, which
        then is silent about the message that came.
        """
        worked = False
        if self._zap is not None and has_input(self._zap):
            self._admit(self._zap)
            worked = True
        if has_input(socket):
            self._receive(socket)
            worked = True
        return worked

    def _hand_over(self) -> bool:
        """Tell the handler that a burst has ended, off the socket. False where another thread has
        taken over meanwhile: then this one touches nothing any more."""
        if self._burst_ended is None:
            return True
        me = threading.current_thread()
        # Only this thread sets it, and only a second one, under the lock, takes it away: there is
        # nothing to guard against here.
        self._held_since_s = time.monotonic()
        try:
            self._burst_ended()
        finally:
            with self._lock:
                mine = self._thread is me
                if mine:
                    self._held_since_s = None
        return mine

    def _drain_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        self._wake_sent.clear()

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        assert self._security is not None, "ZAP is asked only by secured sockets"
        zap.send_multipart(zap_answer(zap.recv_multipart(), self._security.clients))

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(RECEIVE_BURST):
            parts = receive_frames(socket)
            peer, frames = parts[0].bytes, [part.buffer for part in parts[1:]]
            self._handle(peer, frames)
            if not has_input(socket):
                return

    def _handle(self, peer: bytes, frames: Frames) -> None:
        reply = self._reply_to(peer)
        try:
            message = decode(frames, self._options.message_bytes_max)
        except InvalidArgument as error:
            self.malformed += 1
            ids = read_ids(frames)
            if ids is not None:
                reply(ErrorReply(*ids, error))
            return
        self._handler(message, reply)

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        """Send what waits; False where nothing did."""
        sent = False
        while self._outbox:
            sent = True
            peer, frames = self._outbox.popleft()
            try:
                send_frames(socket, (peer, *frames))
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self.dropped_answers += 1
        return sent

    def _close(self) -> None:
        for socket in (self._socket, self._zap):
            if socket is not None:
                socket.close(0)
        if self._context is not None:
            self._context.term()


def _is_loopback(host: str) -> bool:
    # `host` is an IP address: a name would be looked up by nobody and is refused as open.
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
