"""Targets of the wire between routers and shards, and of copies between shards."""

from __future__ import annotations

import itertools
import random
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import zmq

from moe_serve.errors import (
    FieldViolation,
    InvalidArgument,
    MoeServeError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from moe_serve.ports import DType, RowStatus, SubCall, SubReply
from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.copy_server import OPEN_COPIES_MAX, CopyServer
from moe_serve.shard.served_model import ServedModel
from moe_serve.shard.server import ShardServer
from moe_serve.shard.sub_call_checks import check_sub_call
from moe_serve.wire.codec import decode, encode
from moe_serve.wire.control_codec import decode_table
from moe_serve.wire.copy_client import CopyClient, CopyPart
from moe_serve.wire.frame import FRAMES_MAX, Kind, pack, pack_prefix, read_ids
from moe_serve.wire.token_bucket import TokenBucket
from moe_serve.wire.wire_messages import (
    Answer,
    CopyChunk,
    CopyClose,
    CopyOpen,
    CopyOpened,
    CopyRead,
    ErrorReply,
    FetchTable,
    Table,
    WireMessage,
)
from placement.messages.codec import encode as encode_placement
from placement.routing import RankAddress
from tests.builders import make_address, make_layout, make_table
from tests.fakes.sub_calls import sub_call, sub_reply
from tests.fuzz import mutations
from tests.fuzz.target import Mutate, Target, joined, pieces, refused

MESSAGE_BYTES_MAX = 16_384
HIDDEN = 4
MODEL = ServedModel(2, 6, 3, "v1", ExpertSpec(HIDDEN, 8))
PARTS_MAX = FRAMES_MAX + 2


def of_frames(message: WireMessage) -> bytes:
    return joined([bytes(frame) for frame in encode(message)])


def read(frames: Sequence[bytes]) -> WireMessage | None:
    """The message, None where it was refused; what is read is sent in bytes that are read the
    same."""
    try:
        message = decode(frames, MESSAGE_BYTES_MAX)
    except InvalidArgument as error:
        return _refused(error, frames)
    sent = [bytes(frame) for frame in encode(message)]
    again = [bytes(frame) for frame in encode(decode(sent, 4 * MESSAGE_BYTES_MAX))]
    assert again == sent
    if isinstance(message, SubCall):  # the others have bytes that nobody reads
        assert sent == [bytes(frame) for frame in frames]
    return message


def _refused(error: InvalidArgument, frames: Sequence[bytes]) -> None:
    refused(error)
    assert error.violations, "names no field"
    ids = read_ids(frames)
    if ids is not None:  # as the server answers
        encode(ErrorReply(*ids, error))


def wire_frames(data: bytes) -> bool:
    """One message of any kind."""
    return read(pieces(data, PARTS_MAX)) is not None


def wire_forward(data: bytes) -> bool:
    """A sub-call, checked again as the shard does: no index leads out of an array."""
    message = read(pieces(data, PARTS_MAX))
    if not isinstance(message, SubCall):
        return False
    assert message.rows.nbytes + 28 * len(message.pair_row) <= MESSAGE_BYTES_MAX
    try:
        check_sub_call(message, MODEL)
    except InvalidArgument as error:
        return refused(error)
    rows, pairs = len(message.rows), len(message.pair_row)
    assert message.rows.shape == (rows, HIDDEN)
    assert pairs <= rows * MODEL.top_k
    for array, limit in ((message.pair_row, rows), (message.pair_expert, MODEL.num_experts)):
        assert ((array >= 0) & (array < limit)).all()
    places = set(zip(message.pair_row.tolist(), message.pair_k.tolist(), strict=True))
    assert len(places) == pairs, "a k-slot counts twice"
    assert np.isfinite(message.pair_gate).all()
    return True


def wire_reply(data: bytes) -> bool:
    message = read(pieces(data, PARTS_MAX))
    if not isinstance(message, SubReply):
        return False
    served = int((message.row_status == RowStatus.SERVED).sum())
    assert message.partial.shape[0] == served
    assert message.partial.nbytes <= MESSAGE_BYTES_MAX
    return True


def calls() -> list[SubCall]:
    dtypes = {DType.FLOAT32: np.float32, DType.FLOAT16: np.float16, DType.BFLOAT16: np.uint16}
    pairs = [(0, 5, 70, 0.5, 1), (0, 6, 71, 0.25, 2), (1, 5, 70, 1.0, 1)]
    made = [
        sub_call(np.ones((2, HIDDEN), kind), pairs, call_id=-4, sub_id=2**40, router="router-é")
        for kind in dtypes.values()
    ]
    return [*made, sub_call(np.ones((0, HIDDEN), np.float32), [])]


def replies() -> list[SubReply]:
    status = [RowStatus.STALE, RowStatus.SERVED]
    return [
        sub_reply(np.ones((1, HIDDEN), np.float32), status, detail="slot 5: é"),
        sub_reply(np.ones((2, HIDDEN), np.uint16), [RowStatus.SERVED] * 2),
        sub_reply(np.ones((0, HIDDEN), np.float16), []),
    ]


def copy_messages() -> list[WireMessage]:
    return [
        CopyOpen(1, 7, 1, 30, 0, 2, 5.0),
        CopyOpened(1, 9, 1 << 33),
        CopyRead(2, 1, 3, 10),
        CopyChunk(2, 1, 3, b"abc"),
        CopyClose(3, 1),
    ]


def others() -> list[WireMessage]:
    fields = (FieldViolation("f", "d"),)
    return [
        *copy_messages(),
        FetchTable(4),
        Table(4, table()),
        Table(4, None),
        ErrorReply(1, 2, int(Kind.FORWARD), InvalidArgument("x", violations=fields)),
    ]


@cache
def table() -> Any:
    return make_table(make_layout([[0, 1, -1], [2, 3, 0]]))


def number_of(frame: bytes, rng: random.Random) -> bytes:
    """One aligned piece of a header as another number."""
    at = rng.randrange(0, max(1, len(frame) - 7), 4)
    layout = struct.Struct(rng.choice(("<q", "<i", "<d", "<B")))
    return mutations.header(layout, at)(frame, rng)


FRAMES: Mutate = mutations.of_pieces(PARTS_MAX, number_of, mutations.raw)


# ------------------------------------------------------------------------------ bodies in msgpack
def wire_error(data: bytes) -> bool:
    """The body of an ERROR, with a header that fits it."""
    head = pack_prefix(Kind.ERROR, 1, 2) + pack(struct.Struct("<BxxxI"), "header", 1, len(data))
    message = read([head, data])
    if message is None:
        return False
    assert isinstance(message, ErrorReply)
    return True


def error_seeds() -> list[bytes]:
    made = [
        InvalidArgument("x", violations=(FieldViolation("f", "d"),)),
        ResourceExhausted("full"),
        NotFound("é" * 10),
    ]
    return [bytes(encode(ErrorReply(1, 2, 1, error))[1]) for error in made]


def routing_table(data: bytes) -> bool:
    """A table: consistent, or refused; every look-up a router makes then ends in an array."""
    try:
        found = decode_table(data)
    except InvalidArgument as error:
        return refused(error)
    sent = encode_placement(found)
    assert encode_placement(decode_table(sent)) == sent
    missing = set(found.missing())
    if found.num_layers * found.num_experts <= 4096:
        for layer in range(found.num_layers):
            for expert in range(found.num_experts):
                listed = found.replicas(layer, expert)
                assert bool(listed) != ((layer, expert) in missing)
    return True


def table_seeds() -> list[bytes]:
    wide = make_layout([[0, 1, 2, -1], [3, 4, 5, 0]], num_layers=2, num_experts=3)
    return [encode_placement(table()), encode_placement(make_table(wide, term=3, epoch=9))]


# ----------------------------------------------------------------------------------------- copies
EXPERT = bytes(range(256)) * 2
HELD = {1: (0, 2, 30), 2: (1, 5, 31)}
"""(layer, expert, tag) of verified slots."""
INCARNATION = 7


class Slots:
    """What of a shard's core copies ask for, with counted pins and a clock that stands."""

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.slots: Any = self
        self.table = self.facts = None
        self.rank, self.incarnation = 3, INCARNATION
        self.model: Any = self
        self.expert: Any = self
        self.canonical_bytes = len(EXPERT)
        self.pins: Counter[int] = Counter()

    def clock(self) -> float:
        return 0.0

    def pin_copy(self, slot: int, tag: int, layer: int, expert: int) -> bool:
        if HELD.get(slot) != (layer, expert, tag):
            return False
        self.pins[slot] += 1
        return True

    def unpin_copy(self, slot: int) -> None:
        self.pins[slot] -= 1
        assert self.pins[slot] >= 0, "unpinned twice"

    def buffer(self, slot: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(EXPERT, np.uint8)

    def enqueue(self, call: SubCall, num_bytes: int, answer: Any) -> None:
        try:
            check_sub_call(call, MODEL)
        except InvalidArgument as error:
            answer(error)
        else:
            answer(Unavailable("computes nothing"))


def copy_server(data: bytes) -> bool:
    """Messages in a row to one shard: each question is answered once, bytes are those of the slot
    that was opened, and no pin outlives the copies."""
    core = Slots()
    copies = CopyServer(core, core, TokenBucket(0, 1))  # type: ignore[arg-type]
    handler = ShardServer(core, copies)  # type: ignore[arg-type]
    answers: list[Answer] = []
    arrived = threading.Semaphore(0)

    def reply(answer: Answer) -> None:
        answers.append(answer)
        arrived.release()

    asked = 0
    copies.start()
    try:
        for part in pieces(data, 16):
            message = read(pieces(part, PARTS_MAX))
            if message is None:
                continue
            handler(message, reply)
            assert copies.num_open <= OPEN_COPIES_MAX
            if not isinstance(message, CopyClose):
                asked += 1
                assert arrived.acquire(timeout=10), "a question without an answer"
    finally:
        copies.stop()
    assert len(answers) == asked
    assert not +core.pins, "a pin outlives its copy"
    for answer in answers:
        if isinstance(answer, CopyChunk):
            assert EXPERT[answer.offset : answer.offset + len(answer.data)] == bytes(answer.data)
        for frame in encode(answer):
            assert len(frame) <= MESSAGE_BYTES_MAX * 4
    return any(isinstance(answer, CopyChunk) for answer in answers)


def server_seeds() -> list[bytes]:
    ask: list[WireMessage] = [
        CopyOpen(1, INCARNATION, 1, 30, 0, 2, 5.0),
        CopyRead(2, 1, 0, len(EXPERT)),
        CopyRead(3, 1, 500, 12),
        CopyClose(4, 1),
    ]
    two: list[WireMessage] = [
        CopyOpen(1, INCARNATION, 2, 31, 1, 5, 5.0),
        CopyOpen(2, INCARNATION, 1, 30, 0, 2, 5.0),
        CopyRead(3, 2, 10, 10),
        CopyRead(3, 2, 510, 10),
        calls()[0],
        FetchTable(9),
        CopyClose(4, 9),
    ]
    return [joined([of_frames(message) for message in some]) for some in (ask, two)]


NUMBERS = itertools.count()


class Scripted(CopyClient):
    """A client whose peer has said everything already."""

    def __init__(self, script: list[list[bytes]]) -> None:
        super().__init__(TokenBucket(0, 1), clock=lambda: 0.0)
        self._script = script
        self.asked: list[WireMessage] = []
        self.peer: zmq.Socket[bytes] | None = None

    def connect(self, source: RankAddress) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        context = inproc()
        peer, socket, monitor = (
            context.socket(kind) for kind in (zmq.DEALER, zmq.DEALER, zmq.PAIR)
        )
        address = f"inproc://peer{next(NUMBERS)}"
        peer.bind(address)
        socket.connect(address)
        for frames in self._script:
            peer.send_multipart(frames)
        self.peer = peer
        return socket, monitor

    def finish(self) -> None:
        assert self.peer is not None
        while self.peer.poll(0):
            frames = self.peer.recv_multipart()
            message = read(frames)
            assert message is not None, "the client asks in messages that are refused"
            self.asked.append(message)
        self.peer.close(0)


@cache
def inproc() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context(io_threads=0)


def copy_client(data: bytes) -> bool:
    """Answers in a row to a shard that copies: it ends with a typed error or with the bytes, and
    writes nowhere else."""
    room = bytearray(len(EXPERT) + 2)
    parts = [pieces(part, PARTS_MAX) for part in pieces(data, 16)]
    # A peer that says no more would be waited for: this one says so.
    last = [bytes(f) for f in encode(ErrorReply(0, 0, 0, Unavailable("over")))]
    client = Scripted([*parts, last])
    part = CopyPart(make_address(1, INCARNATION), 1, 30, 0, 2)
    try:
        client.pull(part, memoryview(room)[1:-1], timeout_s=60.0, abort=threading.Event())
        done = True
    except MoeServeError as error:
        done = refused(error)
    client.finish()
    assert room[0] == room[-1] == 0, "wrote outside of its room"
    opened = [m for m in client.asked if isinstance(m, CopyOpened | CopyChunk | Table)]
    assert not opened
    assert len(client.asked) <= 2 + 4
    return done


def client_seeds() -> list[bytes]:
    good: list[WireMessage] = [
        CopyOpened(1, 9, len(EXPERT)),
        CopyChunk(2, 9, 0, EXPERT),
    ]
    return [joined([of_frames(message) for message in good])]


COPIES: Mutate = mutations.of_pieces(16, FRAMES)
TARGETS = (
    Target(
        "wire_frames",
        wire_frames,
        lambda: [of_frames(m) for m in (*calls(), *replies(), *others())],
        FRAMES,
    ),
    Target("wire_forward", wire_forward, lambda: [of_frames(m) for m in calls()], FRAMES),
    Target("wire_reply", wire_reply, lambda: [of_frames(m) for m in replies()], FRAMES),
    Target("wire_error", wire_error, error_seeds, mutations.msgpack),
    Target("routing_table", routing_table, table_seeds, mutations.msgpack),
    Target("copy_server", copy_server, server_seeds, COPIES, base_bytes=1 << 20),
    Target("copy_client", copy_client, client_seeds, COPIES, base_bytes=1 << 20),
)
