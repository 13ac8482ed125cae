"""Bytes of every wire message, both ways.

Responsible for the header of each kind and for checking every declared size against the bytes
received. Must never copy rows, never pickle, and never raise anything but InvalidArgument for bytes
from outside. Called by channel, server and copy client.

Decoded arrays are read-only views of the received frames and keep them alive.

FORWARD: header + router name + request id (`_named`) | index block | rows. The index block holds
pair_tag int64 [P], then pair_gate float32 [P], pair_row, pair_slot, pair_k, pair_expert int32 [P]
each, then row_id int32 [R]: 28 bytes a pair and 4 a row.
REPLY: header + detail | row_status uint8 [R] | partial [served, H]. Its one byte of padding, which
earlier releases send as 0 and never read, holds rest_s (`byte_seconds`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from moe_serve.ports import Cause, DType, RowStatus, SubCall, SubReply
from moe_serve.wire import control_codec
from moe_serve.wire.byte_seconds import SECONDS_OF, byte_of
from moe_serve.wire.frame import (
    DETAIL_BYTES_MAX,
    HEADER_BYTES_MAX,
    HIDDEN_MAX,
    MESSAGE_BYTES_MAX,
    NAME_BYTES_MAX,
    PAIRS_MAX,
    REQUEST_ID_BYTES_MAX,
    ROWS_MAX,
    Buffer,
    Frames,
    Kind,
    check_bytes,
    check_count,
    check_timeout,
    invalid,
    pack,
    pack_prefix,
    raw,
    read_header,
    read_prefix,
    read_text,
    view,
)
from moe_serve.wire.wire_messages import WireMessage
from placement.topology import NUM_PHASES

_FORWARD: Final = struct.Struct("<qqqqdiBBBBHIII")
"""request_key, incarnation, term, epoch, timeout_s, layer, phase, cause, dtype, name bytes, id
bytes, hidden, rows, pairs."""
_REPLY: Final = struct.Struct("<qqqdqddBBHIII")
"""incarnation, term, epoch, backlog_s, backlog_seq, queue_s, compute_s, dtype, rest byte, detail
bytes, hidden, rows, served."""
_PAIR_BYTES: Final = 28
_ROW_BYTES: Final = 4
_BLOCKS: Final = (
    ("pair_tag", np.dtype(np.int64)),
    ("pair_gate", np.dtype(np.float32)),
    ("pair_row", np.dtype(np.int32)),
    ("pair_slot", np.dtype(np.int32)),
    ("pair_k", np.dtype(np.int32)),
    ("pair_expert", np.dtype(np.int32)),
    ("row_id", np.dtype(np.int32)),
)
"""Arrays of the index block, in order."""
_CAUSES: Final = tuple(Cause)
_TRACE_MARK: Final = "\x1f"
"""Stands between request id and trace context."""
_INFINITE: Final = float("inf")
_INT32: Final = np.dtype(np.int32)
_INT64: Final = np.dtype(np.int64)
_UINT8: Final = np.dtype(np.uint8)
_DTYPE_OF: Final = MappingProxyType({dtype.numpy: dtype for dtype in DType})
_DTYPE_OF_CODE: Final = MappingProxyType({int(dtype): dtype for dtype in DType})


def forward_bytes_max(request_bytes_max: int, hidden: int, top_k: int) -> int:
    """Longest sub-call that a request of `request_bytes_max` bytes can become: all its pairs for
    one rank, in an element type of two bytes. A pair takes 8 bytes of a request and more here."""
    row = 2 * hidden + 8 * top_k
    sent = 2 * hidden + _ROW_BYTES + _PAIR_BYTES * top_k
    return -(-request_bytes_max * sent // row) + HEADER_BYTES_MAX


def encode_forward(call: SubCall) -> list[Buffer]:
    """Frames of a sub-call; its arrays are referred to, not copied, and must not change until it is
    answered.

    Raises InvalidArgument where arrays disagree in length or dtype, or a value does not fit the
    header.
    """
    rows, num_pairs = call.rows, len(call.pair_row)
    num_rows = len(rows)
    if rows.ndim != 2 or rows.dtype != call.dtype.numpy:
        raise invalid(
            "rows",
            f"must be [rows, hidden] of {call.dtype.numpy} (got {rows.shape} {rows.dtype})",
        )
    blocks: tuple[Any, ...] = (
        call.pair_tag,
        call.pair_gate,
        call.pair_row,
        call.pair_slot,
        call.pair_k,
        call.pair_expert,
        call.row_id,
    )
    for array, (name, dtype) in zip(blocks, _BLOCKS, strict=True):
        length = num_rows if array is call.row_id else num_pairs
        if array.dtype != dtype or array.shape != (length,):
            raise invalid(name, f"must be {dtype} [{length}] (got {array.dtype} {array.shape})")
    check_count("rows", num_rows, ROWS_MAX)
    check_count("pairs", num_pairs, PAIRS_MAX)
    name_bytes = call.router.encode()
    if len(name_bytes) > NAME_BYTES_MAX:
        raise invalid("router", f"must have at most {NAME_BYTES_MAX} bytes (got {len(name_bytes)})")
    id_bytes = _named(call).encode()
    if len(id_bytes) > REQUEST_ID_BYTES_MAX:
        limit = REQUEST_ID_BYTES_MAX
        raise invalid("request_id", f"must have at most {limit} bytes (got {len(id_bytes)})")
    header = pack(
        _FORWARD,
        "header",
        call.request_key,
        call.incarnation,
        call.term,
        call.epoch,
        check_timeout(call.timeout_s),
        call.layer,
        call.phase,
        int(call.cause),
        int(call.dtype),
        len(name_bytes),
        len(id_bytes),
        call.rows.shape[1],
        num_rows,
        num_pairs,
    )
    prefix = pack_prefix(Kind.FORWARD, call.call_id, call.sub_id)
    try:
        index = b"".join(blocks)  # arrays are buffers
    except (BufferError, TypeError, ValueError):  # not contiguous
        index = b"".join([raw(array) for array in blocks])
    return [prefix + header + name_bytes + id_bytes, index, raw(rows)]


def encode_reply(reply: SubReply) -> list[Buffer]:
    """Frames of a reply; `partial` is referred to, not copied."""
    detail = b""
    if reply.detail:
        detail = reply.detail.encode()[:DETAIL_BYTES_MAX].decode(errors="ignore").encode()
    served, hidden = reply.partial.shape
    header = pack(
        _REPLY,
        "header",
        reply.incarnation,
        reply.term,
        reply.epoch,
        reply.backlog_s,
        reply.backlog_seq,
        reply.queue_s,
        reply.compute_s,
        int(_DTYPE_OF[reply.partial.dtype]),
        byte_of(reply.rest_s),
        len(detail),
        hidden,
        len(reply.row_status),
        served,
    )
    prefix = pack_prefix(Kind.REPLY, reply.call_id, reply.sub_id)
    return [prefix + header + detail, raw(reply.row_status), raw(reply.partial)]


def encode(message: WireMessage) -> list[Buffer]:
    """Frames of any message."""
    if isinstance(message, SubCall):
        return encode_forward(message)
    if isinstance(message, SubReply):
        return encode_reply(message)
    return control_codec.encode(message)


def decode(frames: Frames, message_bytes_max: int = MESSAGE_BYTES_MAX) -> WireMessage:
    """The message in these frames. Raises InvalidArgument naming the field that is wrong, and
    nothing else."""
    kind, call_id, sub_id = read_prefix(frames, message_bytes_max)
    return _DECODERS[kind](frames, call_id, sub_id)


def _named(call: SubCall) -> str:
    """Request id, and behind it the trace context of the few requests that have one: a shard of an
    earlier release takes both for the id, which it only writes into its log."""
    name = call.request_id
    if _TRACE_MARK in name:  # a caller's; what follows it must not be taken for a context
        name = name.replace(_TRACE_MARK, " ")
    if not call.trace:
        return name
    both = f"{name}{_TRACE_MARK}{call.trace}"
    return both if len(both.encode()) <= REQUEST_ID_BYTES_MAX else name


def _dtype(code: int) -> DType:
    dtype = _DTYPE_OF_CODE.get(code)
    if dtype is None:
        raise invalid("dtype", f"unknown dtype {code}; 1 float32, 2 bfloat16, 3 float16")
    return dtype


def _decode_forward(frames: Frames, call_id: int, sub_id: int) -> SubCall:
    values, rest = read_header(frames, _FORWARD, 3)
    request_key, incarnation, term, epoch, timeout_s, layer, phase, cause = values[:8]
    dtype, (name_bytes, id_bytes, hidden, num_rows, num_pairs) = _dtype(values[8]), values[9:]
    check_timeout(timeout_s)
    # The header's counts have no sign, so only their upper limits can be passed.
    if phase >= NUM_PHASES or cause >= len(_CAUSES) or hidden > HIDDEN_MAX:
        check_count("phase", phase, NUM_PHASES - 1)
        check_count("cause", cause, len(_CAUSES) - 1)
        check_count("hidden", hidden, HIDDEN_MAX)
    if num_rows > ROWS_MAX or num_pairs > PAIRS_MAX:
        check_count("rows", num_rows, ROWS_MAX)
        check_count("pairs", num_pairs, PAIRS_MAX)
    if layer < 0:
        raise invalid("layer", f"must be at least 0 (got {layer})")
    router = read_text(rest[:name_bytes], name_bytes, NAME_BYTES_MAX, "router")
    named = read_text(rest[name_bytes:], id_bytes, REQUEST_ID_BYTES_MAX, "request_id")
    request_id, _, trace = named.partition(_TRACE_MARK)
    check_bytes(frames[1], num_pairs * _PAIR_BYTES + num_rows * _ROW_BYTES, "index")
    check_bytes(frames[2], num_rows * hidden * dtype.itemsize, "rows")
    # One view of all that has four bytes: its pieces are then slices, not views of their own.
    words = view(frames[1], _INT32, 8 * num_pairs, 5 * num_pairs + num_rows)
    gate, row, slot, k, expert = words[: 5 * num_pairs].reshape(5, num_pairs)
    rows = view(frames[2], dtype.numpy, 0, num_rows * hidden)
    return SubCall(
        router=router,
        call_id=call_id,
        sub_id=sub_id,
        request_key=request_key,
        layer=layer,
        phase=phase,
        cause=_CAUSES[cause],
        incarnation=incarnation,
        term=term,
        epoch=epoch,
        dtype=dtype,
        timeout_s=timeout_s,
        rows=rows.reshape(num_rows, hidden),
        row_id=words[5 * num_pairs :],
        pair_row=row,
        pair_slot=slot,
        pair_tag=view(frames[1], _INT64, 0, num_pairs),
        pair_gate=gate.view(np.float32),
        pair_k=k,
        pair_expert=expert,
        request_id=request_id,
        trace=trace,
    )


def _decode_reply(frames: Frames, call_id: int, sub_id: int) -> SubReply:
    values, text = read_header(frames, _REPLY, 3)
    incarnation, term, epoch, backlog_s, backlog_seq, queue_s, compute_s = values[:7]
    dtype, (rest_byte, detail_bytes, hidden, num_rows, served) = _dtype(values[7]), values[8:]
    check_count("hidden", hidden, HIDDEN_MAX)
    check_count("rows", num_rows, ROWS_MAX)
    for name, seconds in (("backlog_s", backlog_s), ("queue_s", queue_s), ("compute_s", compute_s)):
        if not 0.0 <= seconds < _INFINITE:
            raise invalid(name, f"must be finite and at least 0 (got {seconds})")
    detail = read_text(text, detail_bytes, DETAIL_BYTES_MAX, "detail")
    check_bytes(frames[1], num_rows, "row_status")
    check_bytes(frames[2], served * hidden * dtype.itemsize, "partial")
    status = view(frames[1], _UINT8, 0, num_rows)
    # SERVED is 0, so a reply that refuses nothing needs no second look at its rows.
    refused = int(np.count_nonzero(status))
    if refused and int(status.max()) >= len(RowStatus):
        raise invalid("row_status", f"unknown status {int(status.max())}")
    if served != num_rows - refused:
        raise invalid("served", f"declared {served} rows, {num_rows - refused} are marked served")
    return SubReply(
        call_id=call_id,
        sub_id=sub_id,
        incarnation=incarnation,
        term=term,
        epoch=epoch,
        row_status=status,
        partial=view(frames[2], dtype.numpy, 0, served * hidden).reshape(served, hidden),
        backlog_s=backlog_s,
        backlog_seq=backlog_seq,
        queue_s=queue_s,
        compute_s=compute_s,
        detail=detail,
        rest_s=SECONDS_OF[rest_byte],
    )


_Decoder = Callable[[Frames, int, int], WireMessage]
_DECODERS: Final[Mapping[Kind, _Decoder]] = MappingProxyType(
    {Kind.FORWARD: _decode_forward, Kind.REPLY: _decode_reply, **control_codec.DECODERS}
)
assert set(_DECODERS) == set(Kind), "every kind has a decoder"
