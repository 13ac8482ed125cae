"""Parts of two versions beside each other, as during a roll: what one version adds the other skips,
what it cannot know it refuses in words."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf.message import Message

from moe_serve.errors import InvalidArgument
from moe_serve.ports import DType, RouterReport, RowStatus, ShardInfo, SubReply
from moe_serve.router.checks import check_forward
from moe_serve.rpc import codec, dispatch_pb2
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.wire import codec as codec_of_the_wire
from moe_serve.wire.frame import MAGIC, PREFIX, VERSION, read_prefix
from placement.messages import events as ev
from placement.messages.codec import decode_as, decode_command, decode_event, encode
from placement.messages.effects import EndRank, ReserveSlot
from placement.routing import RoutingTable
from tests.builders import make_address, make_layout, make_spec, make_table
from tests.fakes.sub_calls import sub_reply

NEW_FIELD = bytes([0xFA, 0xFF, 0x03]) + bytes([5]) + b"later"
"""Field 8191, length-delimited: one that no message of ours has."""


def with_news(value: object) -> bytes:
    """The bytes of a struct as a later version might write them: one field more."""
    raw: dict[str, Any] = msgspec.msgpack.decode(encode(value))
    return msgspec.msgpack.encode(raw | {"of_a_later_version": [1, 2, 3]})


# -- the public API ------------------------------------------------------------------------------


def test_fields_of_a_later_front_end_are_skipped() -> None:
    spec = make_spec()
    rng = np.random.default_rng(0)
    arrays = codec.ForwardArrays(
        model=spec.model,
        layer=0,
        phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
        data_type=codec.FP32,
        hidden=rng.standard_normal((2, spec.hidden_size)).astype(np.float32),
        topk_ids=np.zeros((2, 1), np.int32),
        topk_weights=np.ones((2, 1), np.float32),
    )
    plain = codec.forward_request(arrays)
    later = dispatch_pb2.ForwardRequest.FromString(plain.SerializeToString() + NEW_FIELD)
    ours, theirs = (check_forward(request, spec, 1 << 20) for request in (plain, later))
    np.testing.assert_array_equal(ours.hidden, theirs.hidden)
    np.testing.assert_array_equal(ours.topk_ids, theirs.topk_ids)


@pytest.mark.parametrize(
    "message",
    [
        pb.GetPlacementResponse(term=3, ranks=[pb.Rank(rank=1, state="up")]),
        pb.ReplaceRankRequest(rank=2, incarnation=7),
        pb.AddRankRequest(rank=0),
        dispatch_pb2.GetModelSpecResponse(model="m", num_layers=2),
        dispatch_pb2.StreamForwardResponse(sequence=4),
    ],
)
def test_fields_of_a_later_service_are_skipped(message: Message) -> None:
    later = type(message).FromString(message.SerializeToString() + NEW_FIELD)
    assert {f.name: v for f, v in later.ListFields()} == {
        f.name: v for f, v in message.ListFields()
    }


# -- between controller and parts ----------------------------------------------------------------


def test_a_table_of_a_later_controller_is_used() -> None:
    table = make_table(make_layout([[0, 1], [2, 3]]))
    found = decode_as(with_news(table), RoutingTable)
    assert found.order == table.order
    assert found.ranks == table.ranks
    np.testing.assert_array_equal(found.replica_tag, table.replica_tag)


def test_commands_events_and_answers_with_more_fields_are_understood() -> None:
    command = ReserveSlot(
        step_id=1, rank=0, incarnation=2, slot=3, layer=0, expert=1, weights_version="v1"
    )
    found = decode_command(with_news(command))
    assert isinstance(found, ReserveSlot)
    assert found.slot == 3
    drain = decode_event(with_news(ev.DrainAsked(at_s=1.0, request_id=2, rank=1)))
    assert isinstance(drain, ev.DrainAsked)
    assert drain.rank == 1


def test_what_an_earlier_version_did_not_send_has_a_meaning() -> None:
    joined = ev.RankJoined(
        at_s=0.0,
        rank=0,
        node="n",
        failure_domain="n",
        profile="p",
        num_slots=2,
        address=make_address(0),
        group=1,
        only_node="n",
    )
    raw: dict[str, Any] = msgspec.msgpack.decode(encode(joined))
    del raw["group"], raw["only_node"]
    found = decode_event(msgspec.msgpack.encode(raw))
    assert isinstance(found, ev.RankJoined)
    assert (found.group, found.only_node) == (-1, "")
    info = {f: 0 for f in ("rank", "num_slots", "budget_bytes", "slot_bytes", "pid")}
    told: dict[str, Any] = info | {
        "node": "n",
        "failure_domain": "n",
        "profile": "p",
        "address": msgspec.msgpack.decode(encode(make_address(0))),
        "backend": "numpy",
        "simulated": False,
        "highest_term": 0,
        "highest_epoch": 0,
        "resident": [],
    }
    assert decode_as(msgspec.msgpack.encode(told), ShardInfo).group == -1


def test_a_command_of_a_later_version_is_refused_in_words() -> None:
    raw: dict[str, Any] = msgspec.msgpack.decode(encode(EndRank(rank=0, incarnation=1)))
    raw["type"] = "PolishSlot"
    with pytest.raises(msgspec.ValidationError, match="run one version on all parts"):
        decode_command(msgspec.msgpack.encode(raw))


# -- the wire ------------------------------------------------------------------------------------

EARLIER_REPLY = struct.Struct("<qqqdqddBxHIII")
"""Header of a reply as releases wrote and read it that did not tell `rest_s`."""


def test_a_reply_of_a_later_shard_is_understood_by_an_earlier_router() -> None:
    told = sub_reply(np.ones((1, 4), np.float32), [RowStatus.SERVED], rest_s=0.25, detail="é")
    header, status, partial = (bytes(frame) for frame in codec_of_the_wire.encode(told))
    values = EARLIER_REPLY.unpack_from(header, PREFIX.size)
    assert values[3:7] == (told.backlog_s, told.backlog_seq, told.queue_s, told.compute_s)
    assert values[7:] == (int(DType.FLOAT32), 2, 4, 1, 1)
    assert header[PREFIX.size + EARLIER_REPLY.size :] == "é".encode()
    assert (status, partial) == (b"\0", told.partial.tobytes())


def test_a_reply_of_an_earlier_shard_tells_no_rest() -> None:
    told = sub_reply(np.ones((1, 4), np.float32), [RowStatus.SERVED], rest_s=0.25)
    frames = [bytes(frame) for frame in codec_of_the_wire.encode(told)]
    values = EARLIER_REPLY.unpack_from(frames[0], PREFIX.size)
    frames[0] = frames[0][: PREFIX.size] + EARLIER_REPLY.pack(*values)
    arrived = codec_of_the_wire.decode(frames)
    assert isinstance(arrived, SubReply)
    assert (arrived.queue_s, arrived.compute_s) == (told.queue_s, told.compute_s)
    assert arrived.rest_s == 0.0


def test_a_router_of_an_earlier_release_tells_no_stages() -> None:
    told = RouterReport("r0", 1, 2, 1, (), ())
    raw: dict[str, Any] = msgspec.msgpack.decode(encode(told))
    del raw["stages"]
    assert decode_as(msgspec.msgpack.encode(raw), RouterReport).stages is None


@pytest.mark.parametrize("version", [0, VERSION + 1, 255])
def test_a_message_of_another_wire_version_is_refused_by_name(version: int) -> None:
    prefix = PREFIX.pack(MAGIC, version, 1, 0, 7, 8)
    with pytest.raises(InvalidArgument) as refused:
        read_prefix([prefix], 1 << 20)
    assert [v.field for v in refused.value.violations] == ["version"]
    assert f"must be {VERSION} (got {version}); run one release" in refused.value.message
