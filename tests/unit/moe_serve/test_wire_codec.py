"""Bytes of wire messages: what is sent arrives, and what is broken is refused by name."""

import contextlib
import dataclasses
import pickle
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe_serve.errors import (
    FieldViolation,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    StaleTerm,
    Unavailable,
)
from moe_serve.ports import Cause, DType, RowStatus, SubCall, SubReply
from moe_serve.rpc import codec
from moe_serve.wire.byte_seconds import SECONDS_OF, byte_of
from moe_serve.wire.codec import decode, encode, forward_bytes_max
from moe_serve.wire.frame import (
    CHUNK_BYTES_MAX,
    PAIRS_MAX,
    PREFIX,
    ROWS_MAX,
    Kind,
    check_message_size,
    message_bytes,
    read_ids,
)
from moe_serve.wire.wire_messages import (
    CopyChunk,
    CopyClose,
    CopyOpen,
    CopyOpened,
    CopyRead,
    ErrorReply,
    FetchTable,
    Table,
)
from placement.layout import ExpertLayout, SlotId
from placement.routing import RankAddress, RoutingTable, build_table
from tests.fakes.sub_calls import sub_call, sub_reply

CANARY: list[str] = []


def table() -> RoutingTable:
    layout = ExpertLayout.from_rows([[0, 1, -1], [2, 3, 0]], num_layers=1, num_experts=4)
    return build_table(
        layout,
        {SlotId(0, 0): 1, SlotId(0, 1): 2, SlotId(1, 0): 1, SlotId(1, 1): 2, SlotId(1, 2): 9},
        term=3,
        epoch=5,
        model="m",
        weights_version="w",
        ranks=tuple(
            RankAddress(rank=r, node="n", address=f"tcp://127.0.0.1:{r + 1}", incarnation=1)
            for r in range(2)
        ),
    )


def forward(dtype: type[Any] = np.float32) -> SubCall:
    rows = np.arange(12, dtype=dtype).reshape(3, 4)
    return sub_call(
        rows,
        [(0, 5, 70, 0.5, 1), (0, 6, 71, 0.25, 2), (2, 5, 70, 1.0, 1)],
        call_id=-4,
        sub_id=2**40,
        cause=Cause.HEDGE,
        phase=1,
        router="router-é",
    )


def reply() -> SubReply:
    return sub_reply(
        np.ones((1, 4), np.float32), [RowStatus.STALE, RowStatus.SERVED], detail="slot 5: é"
    )


MESSAGES = [
    forward(),
    reply(),
    FetchTable(4),
    Table(4, table()),
    Table(4, None),
    CopyOpen(1, 2, 3, 4, 5, 6, 7.5),
    CopyOpened(1, 9, 1 << 33),
    CopyRead(1, 9, 1 << 32, CHUNK_BYTES_MAX),
    CopyChunk(1, 9, 3, b"abc"),
    CopyClose(1, 9),
    ErrorReply(
        1, 2, int(Kind.FORWARD), InvalidArgument("x", violations=(FieldViolation("f", "d"),))
    ),
]


def frames_of(message: Any) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


def assert_same(left: Any, right: Any) -> None:
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            assert a.tobytes() == b.tobytes(), field.name
            assert a.shape == b.shape, field.name
        elif isinstance(a, RoutingTable):
            assert a.order == b.order
            assert a.replica_tag.tolist() == b.replica_tag.tolist()
            assert a.ranks == b.ranks
        elif isinstance(a, Exception):
            assert type(a) is type(b)
            assert a.args == b.args
            assert a.violations == b.violations
        elif isinstance(a, bytes | memoryview):
            assert bytes(a) == bytes(b)
        else:
            assert a == b, field.name


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_what_is_sent_arrives(message: Any) -> None:
    arrived = decode(frames_of(message))
    assert type(arrived) is type(message)
    assert_same(message, arrived)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_rows_travel_raw_in_every_dtype(dtype: type[Any]) -> None:
    call = forward(dtype)
    assert_same(call, decode(frames_of(call)))


def test_rows_and_partials_are_not_copied() -> None:
    call, answer = forward(), reply()
    assert np.shares_memory(np.frombuffer(encode(call)[2], np.uint8), call.rows)
    assert np.shares_memory(np.frombuffer(encode(answer)[2], np.uint8), answer.partial)
    frames = frames_of(call)
    arrived = decode(frames)
    assert isinstance(arrived, SubCall)
    assert np.shares_memory(arrived.rows, np.frombuffer(frames[2], np.uint8))
    assert not arrived.rows.flags.writeable


def test_a_frame_at_an_odd_address_gives_aligned_arrays() -> None:
    frames = frames_of(forward())
    shifted = [memoryview(b"\0" + frame)[1:] for frame in frames]
    arrived = decode(shifted)
    assert isinstance(arrived, SubCall)
    assert arrived.pair_tag.flags.aligned
    assert arrived.rows.flags.aligned
    assert_same(forward(), arrived)


def test_a_call_without_rows_and_pairs_travels() -> None:
    call = sub_call(np.zeros((0, 4), np.float32), [])
    assert_same(call, decode(frames_of(call)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_truncation_and_every_extra_byte_is_refused(message: Any) -> None:
    frames = frames_of(message)
    for number, frame in enumerate(frames):
        cuts = range(len(frame)) if len(frame) < 512 else range(0, len(frame), 7)
        for cut in cuts:
            with pytest.raises(InvalidArgument) as caught:
                decode([*frames[:number], frame[:cut], *frames[number + 1 :]])
            assert caught.value.violations
        with pytest.raises(InvalidArgument):
            decode([*frames[:number], frame + b"\0", *frames[number + 1 :]])
    for few in range(len(frames)):
        with pytest.raises(InvalidArgument):
            decode(frames[:few])
    with pytest.raises(InvalidArgument):
        decode([*frames, b""])


@pytest.mark.parametrize(
    ("at", "value", "field"),
    [
        (0, b"MoEx", "magic"),
        (4, b"\2", "version"),
        (5, b"\0", "kind"),
        (5, b"\xff", "kind"),
        (6, b"\1", "reserved"),
    ],
)
def test_a_wrong_prefix_is_named(at: int, value: bytes, field: str) -> None:
    frames = frames_of(forward())
    frames[0] = frames[0][:at] + value + frames[0][at + len(value) :]
    with pytest.raises(InvalidArgument) as caught:
        decode(frames)
    assert caught.value.violations[0].field == field


BODY = struct.Struct("<qqqqdiBBBBHIII")
FIELDS = [
    *("request_key", "incarnation", "term", "epoch", "timeout_s", "layer", "phase", "cause"),
    *("dtype", "name", "id", "hidden", "rows", "pairs"),
]


def forward_with(**changed: Any) -> list[bytes]:
    frames = frames_of(forward())
    body = list(BODY.unpack_from(frames[0], PREFIX.size))
    for name, value in changed.items():
        body[FIELDS.index(name)] = value
    head = frames[0][: PREFIX.size] + BODY.pack(*body) + frames[0][PREFIX.size + BODY.size :]
    return [head, *frames[1:]]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"rows": 2**31, "hidden": 2**31}, "hidden"),
        ({"rows": 2**32 - 1}, "rows"),
        ({"rows": ROWS_MAX, "hidden": 65_536}, "index"),
        ({"rows": 0, "hidden": 65_536}, "index"),
        ({"pairs": 2**32 - 1}, "pairs"),
        ({"pairs": 1 << 20}, "index"),
        ({"hidden": 8}, "rows"),
        ({"hidden": 0}, "rows"),
        ({"dtype": 2}, "rows"),
        ({"dtype": 0}, "dtype"),
        ({"dtype": 77}, "dtype"),
        ({"phase": 2}, "phase"),
        ({"cause": 3}, "cause"),
        ({"layer": -1}, "layer"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"name": 255}, "router"),
        ({"name": 3}, "request_id"),
        ({"id": 1}, "request_id"),
        ({"id": 65_535}, "request_id"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(
    changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(forward_with(**changed))
    assert caught.value.violations[0].field == field


def test_a_router_name_that_is_not_text_is_refused() -> None:
    frames = frames_of(forward())
    frames[0] = frames[0][:-1] + b"\xff"
    with pytest.raises(InvalidArgument, match="router"):
        decode(frames)


def test_a_request_id_arrives_and_one_that_is_not_text_is_refused() -> None:
    named = dataclasses.replace(forward(), request_id="é" * 128)
    frames = frames_of(named)
    assert decode(frames).request_id == named.request_id
    frames[0] = frames[0][:-1] + b"\xff"
    with pytest.raises(InvalidArgument, match="request_id"):
        decode(frames)


def test_served_rows_must_match_their_marks() -> None:
    frames = frames_of(reply())
    with pytest.raises(InvalidArgument, match="served"):
        decode([frames[0], bytes([RowStatus.SERVED, RowStatus.SERVED]), frames[2]])
    with pytest.raises(InvalidArgument, match="row_status"):
        decode([frames[0], bytes([9, 0]), frames[2]])


def test_a_table_whose_columns_disagree_is_refused() -> None:
    good = table()
    bad = RoutingTable(
        **{
            **{name: getattr(good, name) for name in good.__struct_fields__},
            "replica_tag": good.replica_tag[:-1],
        }
    )
    with pytest.raises(InvalidArgument, match="replica_tag"):
        decode(frames_of(Table(1, bad)))


def test_an_error_that_does_not_travel_arrives_as_unavailable() -> None:
    arrived = decode(frames_of(ErrorReply(1, 0, 1, StaleTerm("old", term=3))))
    assert isinstance(arrived, ErrorReply)
    assert type(arrived.error) is Unavailable
    kept = decode(frames_of(ErrorReply(1, 0, 1, NotFound("x" * 10_000))))
    assert isinstance(kept, ErrorReply)
    assert type(kept.error) is NotFound
    assert len(kept.error.message) == 2048


def test_a_long_detail_is_cut_between_characters() -> None:
    arrived = decode(frames_of(dataclasses.replace(reply(), detail="é" * 2000)))
    assert isinstance(arrived, SubReply)
    assert arrived.detail == "é" * 512


seconds = st.floats(0.0, 1e6)


@given(seconds, seconds, seconds, seconds)
@example(0.0, 0.0, 0.0, SECONDS_OF[1])
@example(0.0, 0.0, 0.0, SECONDS_OF[255])
def test_what_a_shard_says_of_its_time_arrives(
    backlog_s: float, queue_s: float, compute_s: float, rest_s: float
) -> None:
    told = {"backlog_s": backlog_s, "queue_s": queue_s, "compute_s": compute_s}
    arrived = decode(frames_of(dataclasses.replace(reply(), **told, rest_s=rest_s)))
    assert isinstance(arrived, SubReply)
    assert told == {name: getattr(arrived, name) for name in told}
    assert arrived.rest_s == pytest.approx(min(rest_s, SECONDS_OF[255]), rel=0.04, abs=1e-6)
    again = decode(frames_of(arrived))
    assert isinstance(again, SubReply)
    assert again.rest_s == arrived.rest_s


@given(st.floats(), st.floats())
def test_every_number_has_a_byte_and_a_longer_time_no_lower_one(one: float, other: float) -> None:
    assert 0 <= byte_of(one) <= 255
    if one <= other:
        assert byte_of(one) <= byte_of(other)


def test_every_byte_has_seconds_of_its_own() -> None:
    assert [byte_of(found) for found in SECONDS_OF] == list(range(256))


@pytest.mark.parametrize(
    "change",
    [
        {"pair_tag": np.zeros(3, np.int32)},
        {"pair_gate": np.zeros(3, np.float64)},
        {"pair_k": np.zeros(2, np.int32)},
        {"row_id": np.zeros(2, np.int32)},
        {"rows": np.zeros((3, 4), np.float64)},
        {"rows": np.zeros(12, np.float32)},
        {"router": "r" * 129},
        {"request_id": "é" * 257},
        {"call_id": 2**63},
        {"layer": 2**31},
        {"timeout_s": 0.0},
        {"dtype": DType.FLOAT16},
    ],
)
def test_what_cannot_be_said_is_refused_when_sent(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        encode(dataclasses.replace(forward(), **change))


def test_the_limit_is_on_all_frames_together() -> None:
    frames = frames_of(forward())
    size = sum(map(len, frames))
    assert isinstance(decode(frames, size), SubCall)
    check_message_size(frames, size)
    with pytest.raises(InvalidArgument, match=f"limit of {size - 1}"):
        decode(frames, size - 1)
    with pytest.raises(ResourceExhausted, match=f"limit is {size - 1}"):
        check_message_size(frames, size - 1)


@given(
    rows=st.integers(1, 12),
    top_k=st.integers(1, 12),
    hidden=st.integers(1, 24),
    dtype=st.sampled_from([DType.FLOAT32, DType.BFLOAT16]),
    bitmaps=st.booleans(),
)
def test_a_request_whose_pairs_all_go_to_one_rank_fits(
    rows: int, top_k: int, hidden: int, dtype: DType, bitmaps: bool
) -> None:
    valid = np.ones((rows, top_k), np.bool_) if bitmaps else None
    request = codec.forward_request(
        codec.ForwardArrays(
            model="",
            layer=0,
            phase=1,
            data_type=codec.FP32 if dtype is DType.FLOAT32 else codec.BF16,
            hidden=np.zeros((rows, hidden), dtype.numpy),
            topk_ids=np.zeros((rows, top_k), np.int32),
            topk_weights=np.zeros((rows, top_k), np.float32),
            pair_valid=valid,
        )
    ).ByteSize()
    pairs = [(row, k, 1, 1.0, k) for row in range(rows) for k in range(top_k)]
    call = sub_call(np.zeros((rows, hidden), dtype.numpy), pairs, dtype=dtype)
    assert message_bytes(encode(call)) <= forward_bytes_max(request, hidden, top_k)


def test_most_rows_and_pairs_of_a_request_are_no_more_than_of_a_sub_call() -> None:
    assert codec.ROWS_MAX <= ROWS_MAX
    assert codec.PAIRS_MAX <= PAIRS_MAX


def test_ids_are_read_from_a_message_that_is_broken_behind_them() -> None:
    assert read_ids([frames_of(forward())[0][: PREFIX.size]]) == (-4, 2**40, Kind.FORWARD)
    assert read_ids([b"GET / HTTP/1.1 and more bytes than a prefix has"]) is None
    assert read_ids([b"short"]) is None
    assert read_ids([]) is None


class Canary:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return CANARY.append, ("unpickled",)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_pickled_objects_are_never_unpickled(message: Any) -> None:
    bomb = pickle.dumps(Canary())
    frames = frames_of(message)
    for number in range(len(frames)):
        with pytest.raises(InvalidArgument):
            decode([*frames[:number], bomb, *frames[number + 1 :]])
    assert CANARY == []


@given(st.lists(st.binary(max_size=200), max_size=4))
@example([b""])
def test_random_bytes_are_refused_and_nothing_else_is_raised(frames: list[bytes]) -> None:
    with pytest.raises(InvalidArgument):
        decode(frames)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_changed_byte_is_read_or_refused_and_nothing_else(message: Any, data: Any) -> None:
    frames = frames_of(message)
    number = data.draw(st.sampled_from([i for i, frame in enumerate(frames) if frame] or [0]))
    at = data.draw(st.integers(0, len(frames[number]) - 1))
    value = data.draw(st.integers(0, 255))
    frames[number] = frames[number][:at] + bytes([value]) + frames[number][at + 1 :]
    with contextlib.suppress(InvalidArgument):
        decode(frames)
