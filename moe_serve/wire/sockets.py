"""Options of every socket of the wire, and the monitor's words.

Responsible for the options without which ZeroMQ hides failure: IMMEDIATE, bounded queues, no
linger, a message limit, heartbeats; and for moving frames in and out without a wait. Must never
look into a message. Called by channel, server and copy client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq

from moe_serve.wire.frame import MESSAGE_BYTES_MAX, Buffer

# Plain numbers: pyzmq's enumerations cost more to combine than a small frame does to send.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

COPY_BYTES_MAX: Final = 256 * 1024
"""Frames up to this size are copied into ZeroMQ; larger ones are referred to until they are sent.
Referring costs a message to pyzmq's own collector thread, which has to take the interpreter's lock:
more than the copy up to about this size (measured at 175 KiB and 2 MiB)."""


@dataclass(frozen=True, slots=True)
class WireOptions:
    """How sockets behave. Durations in seconds, sizes in bytes."""

    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Longest message; both ends set the same, an asking side refuses longer ones before
    sending."""
    queue_messages_max: int = 256
    """High-water mark of each socket, in messages and direction."""
    heartbeat_s: float = 0.5
    """Time between heartbeats; they find a peer whose machine or network went away silently."""
    heartbeat_timeout_s: float = 1.5
    """A connection without any answer for this long is closed."""
    handshake_s: float = 10.0
    """A connection that has not finished its handshake by then is closed."""
    reconnect_s: float = 0.05
    """First wait before connecting again; doubles up to `reconnect_max_s`."""
    reconnect_max_s: float = 1.0
    socks_proxy: str = ""
    """host:port of the SOCKS5 proxy that connecting sockets go through; "" = straight."""


def apply_options(socket: zmq.Socket[Any], options: WireOptions) -> None:
    """Set all options. Before bind or connect."""
    socket.linger = 0
    socket.immediate = True
    socket.sndhwm = options.queue_messages_max
    socket.rcvhwm = options.queue_messages_max
    socket.maxmsgsize = options.message_bytes_max
    socket.heartbeat_ivl = _ms(options.heartbeat_s)
    socket.heartbeat_timeout = _ms(options.heartbeat_timeout_s)
    # TIME-TO-LIVE tells the other end when to give up on us, in its own timer.
    socket.heartbeat_ttl = _ms(options.heartbeat_timeout_s)
    socket.handshake_ivl = _ms(options.handshake_s)
    socket.reconnect_ivl = _ms(options.reconnect_s)
    socket.reconnect_ivl_max = _ms(options.reconnect_max_s)
    if options.socks_proxy:
        socket.setsockopt_string(zmq.SOCKS_PROXY, options.socks_proxy)


def has_input(socket: zmq.Socket[Any]) -> bool:
    """Whether a message waits; asking is cheaper than an exception that says no."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def receive_frames(socket: zmq.Socket[Any]) -> list[zmq.Frame]:
    """A waiting message, not copied. Raises zmq.Again where none waits."""
    frame = socket.recv(_NOBLOCK, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame)
    return frames


def send_frames(socket: zmq.Socket[Any], frames: Sequence[Buffer]) -> None:
    """Send a message, whole or not at all. Raises zmq.Again where the queue is full, or
    zmq.ZMQError."""
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        socket.send(frame, _NOBLOCK if i == last else _MORE, copy=size <= COPY_BYTES_MAX)


UP_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED
"""The connection may be used: encryption and admission are done."""
DOWN_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CONNECT_RETRIED
)
"""The connection is not there: closed, refused, or being tried again."""
WATCHED_EVENTS = UP_EVENTS | DOWN_EVENTS

DOWN_REASONS = {
    zmq.EVENT_DISCONNECTED: "disconnected",
    zmq.EVENT_CLOSED: "connection refused or closed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "handshake refused: this key is not admitted",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake failed: other protocol or other key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed: wrong key, or the peer went away",
    zmq.EVENT_CONNECT_RETRIED: "not reachable, being tried again",
}
"""Sentence for each of DOWN_EVENTS."""


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
