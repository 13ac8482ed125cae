"""A router's way to one shard: `ShardChannel` over a ZeroMQ DEALER socket.

Responsible for sending, matching answers by (kind of question, call_id, sub_id), timeouts, and for
failing everything in flight within milliseconds of a disconnect. Must never retry, reorder or look
into rows: a lost call is the router's to decide. Called by the router.

One event loop owns a channel; none of its methods may be called from another thread. The loop
watches the sockets' own descriptors: `zmq.asyncio` makes a future and several callbacks of each
send and receive, which measured half of a router's work on a small call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from moe_serve.errors import InvalidArgument, MoeServeError, WireLost
from moe_serve.ports import SubCall, SubReply
from moe_serve.wire.codec import decode, encode
from moe_serve.wire.frame import Buffer, Kind, check_message_size, invalid
from moe_serve.wire.security import CurveKeys, secure_client
from moe_serve.wire.sockets import (
    DOWN_EVENTS,
    DOWN_REASONS,
    UP_EVENTS,
    WATCHED_EVENTS,
    WireOptions,
    apply_options,
    has_input,
    receive_frames,
    send_frames,
)
from moe_serve.wire.wire_messages import ErrorReply, FetchTable, Table, WireMessage
from placement.routing import RankAddress, RoutingTable

FETCH_TIMEOUT_S = 2.0
"""Longest wait for a table."""
RECEIVE_BURST = 64
"""Answers taken in a row before the loop's other work gets its turn."""

_Key = tuple[type[Any], int, int]
_ANSWER_TO = MappingProxyType({int(Kind.FORWARD): SubReply, int(Kind.FETCH_TABLE): Table})
OnDisconnect = Callable[[RankAddress, str], None]


class ZmqShardChannel:
    """`ShardChannel` to `address`, connecting in the background from the moment it is made (inside
    a running loop).

    `keys` are the service's client keys; needed exactly where `address.public_key` is set.
    `on_disconnect(address, reason)` is called on the loop once for each loss of a connection that
    was up. Until the first attempt to connect has succeeded or failed calls wait for it; after a
    failure or loss they fail at once until the connection is back.
    """

    def __init__(
        self,
        address: RankAddress,
        *,
        context: zmq.Context[Any] | None = None,
        keys: CurveKeys | None = None,
        options: WireOptions | None = None,
        on_disconnect: OnDisconnect | None = None,
    ) -> None:
        if bool(address.public_key) != (keys is not None):
            raise InvalidArgument(
                f"rank {address.rank} {'has' if address.public_key else 'has no'} public key and "
                f"this channel {'has' if keys else 'has no'} client keys; the network mode must be "
                "the same on all parts"
            )
        self._address = address
        self._options = options or WireOptions()
        self._on_disconnect = on_disconnect
        self._waiting: dict[_Key, asyncio.Future[Any]] = {}
        self._first = asyncio.Event()
        self._connected = False
        self._closed = False
        self._reason = "not connected yet"
        self._next_id = 0
        self.late_answers = 0
        """Answers that came after their question had ended."""
        self.malformed_answers = 0
        """Answers the codec refused."""
        # A shadow, so that the sockets are plain ones whatever kind of context was given.
        own: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(
            (context or zmq.Context.instance()).underlying
        )
        self._socket: zmq.Socket[bytes] = own.socket(zmq.DEALER)
        apply_options(self._socket, self._options)
        if keys is not None:
            secure_client(self._socket, keys, address.public_key)
        if address.address.startswith("tcp://["):
            self._socket.ipv6 = True
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(WATCHED_EVENTS)
        self._socket.connect(address.address)
        self._unsent: dict[_Key, list[Buffer]] = {}
        self._loop = asyncio.get_running_loop()
        self._watched = (
            int(self._socket.getsockopt(zmq.FD)),
            int(self._monitor.getsockopt(zmq.FD)),
        )
        for descriptor, work in zip(self._watched, (self._pump, self._watch), strict=True):
            self._loop.add_reader(descriptor, work)
            # Such a descriptor tells changes only: what came before it was watched is asked for.
            self._loop.call_soon(work)

    @property
    def address(self) -> RankAddress:
        """Whom this channel reaches."""
        return self._address

    @property
    def connected(self) -> bool:
        """False from the moment the socket monitor saw a disconnect until it is back."""
        return self._connected

    async def forward(self, call: SubCall) -> SubReply:
        """Send and await the reply. The arrays of `call` must not change until it ends.

        Raises WireLost (disconnect, no answer in `timeout_s`), InvalidArgument, ResourceExhausted
        (above the message limit).
        """
        frames = encode(call)
        check_message_size(frames, self._options.message_bytes_max)
        key = (SubReply, call.call_id, call.sub_id)
        reply: SubReply = await self._ask(key, frames, call.timeout_s)
        return reply

    async def fetch_table(self) -> RoutingTable | None:
        """Newest table the shard keeps. Raises WireLost."""
        question = FetchTable(self._new_id())
        answer: Table = await self._ask(
            (Table, question.call_id, 0), encode(question), FETCH_TIMEOUT_S
        )
        return answer.table

    async def close(self) -> None:
        """Close the socket; calls in flight end with WireLost. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._connected = False
        self._fail_all("the channel was closed")
        self._first.set()
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _ask(self, key: _Key, frames: list[Buffer], timeout_s: float) -> Any:
        if key in self._waiting:
            raise invalid("sub_id", f"call {key[1]} sub-call {key[2]} is in flight already")
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[key] = answer
        timer = self._loop.call_later(timeout_s, self._expire, answer, timeout_s)
        try:
            if not self._connected:
                await self._until_connected(answer)
            if not answer.done():
                self._send(key, frames)
            return await answer
        finally:
            timer.cancel()
            self._waiting.pop(key, None)
            self._unsent.pop(key, None)
            if answer.done() and not answer.cancelled():
                # Failed before it was awaited: it must still count as seen.
                answer.exception()
            answer.cancel()

    def _expire(self, answer: asyncio.Future[Any], timeout_s: float) -> None:
        if not answer.done():
            how = "connected" if self._connected else self._reason
            problem = f"rank {self._address.rank} did not answer within {timeout_s:g} s ({how})"
            answer.set_exception(WireLost(problem))

    async def _until_connected(self, answer: asyncio.Future[Any]) -> None:
        """Wait for the end of the first attempt to connect, or for `answer` to fail."""
        if not self._first.is_set():
            first = asyncio.ensure_future(self._first.wait())
            try:
                await asyncio.wait((first, answer), return_when=asyncio.FIRST_COMPLETED)
            finally:
                first.cancel()
        if not self._connected and not answer.done():
            raise self._lost(self._reason)

    def _send(self, key: _Key, frames: list[Buffer]) -> None:
        """Send now, or when a full queue to a peer that reads nothing has room again."""
        if self._unsent or not self._sent(frames):
            self._unsent[key] = frames
        self._ask_again()

    def _ask_again(self) -> None:
        """After sending, which may have taken the descriptor's only word of an answer that came
        meanwhile."""
        if has_input(self._socket):
            self._loop.call_soon(self._pump)

    def _sent(self, frames: list[Buffer]) -> bool:
        try:
            send_frames(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def _pump(self) -> None:
        """Take what has come, then send what had to wait."""
        if self._closed:
            return
        for _ in range(RECEIVE_BURST):
            if not has_input(self._socket):
                break
            self._take(receive_frames(self._socket))
        else:
            self._loop.call_soon(self._pump)
        if self._unsent:
            self._send_waiting()
            self._ask_again()

    def _send_waiting(self) -> None:
        while self._unsent:
            key = next(iter(self._unsent))
            if not self._sent(self._unsent[key]):
                return
            del self._unsent[key]

    def _take(self, parts: list[zmq.Frame]) -> None:
        try:
            message = decode([part.buffer for part in parts], self._options.message_bytes_max)
        except InvalidArgument:
            self.malformed_answers += 1
        else:
            self._settle(message)

    def _settle(self, message: WireMessage) -> None:
        if isinstance(message, ErrorReply):
            expected = _ANSWER_TO.get(message.asked, ErrorReply)
            waiting = self._waiting.get((expected, message.call_id, message.sub_id))
        else:
            sub_id = message.sub_id if isinstance(message, SubReply) else 0
            waiting = self._waiting.get((type(message), message.call_id, sub_id))
        if waiting is None or waiting.done():
            self.late_answers += 1
        elif isinstance(message, ErrorReply):
            waiting.set_exception(message.error)
        else:
            waiting.set_result(message)

    def _watch(self) -> None:
        while not self._closed and has_input(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event & UP_EVENTS:
                self._connected = True
                self._first.set()
            elif event & DOWN_EVENTS:
                self._went_down(DOWN_REASONS[zmq.Event(event)])

    def _went_down(self, reason: str) -> None:
        was_connected, self._connected = self._connected, False
        self._reason = reason
        # Whoever waits for the first connection hears of its failure at once.
        self._first.set()
        if not was_connected:
            return
        self._fail_all(reason)
        if self._on_disconnect is not None:
            self._on_disconnect(self._address, reason)

    def _fail_all(self, reason: str) -> None:
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(self._lost(reason))

    def _lost(self, reason: str) -> MoeServeError:
        return WireLost(f"rank {self._address.rank} at {self._address.address}: {reason}")
