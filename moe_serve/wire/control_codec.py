"""Bytes of the small messages: tables, copies of experts, errors.

Responsible for their headers and checks, like `codec`, which calls it. Must never pickle: tables
travel in the placement codec's msgpack, errors as a typed msgpack struct.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from moe_serve import errors
from moe_serve.errors import FieldViolation, MoeServeError
from moe_serve.wire.frame import (
    CHUNK_BYTES_MAX,
    ERROR_BYTES_MAX,
    Buffer,
    Frames,
    Kind,
    check_bytes,
    check_count,
    check_timeout,
    invalid,
    pack,
    pack_prefix,
    read_header,
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
from placement.messages.codec import decode_as
from placement.messages.codec import encode as encode_placement
from placement.routing import RoutingTable

_NOTHING: Final = struct.Struct("<")
_TABLE: Final = struct.Struct("<BxxxQ")
"""1 where a table follows, its bytes."""
_OPEN: Final = struct.Struct("<qqdiii")
"""incarnation, tag, timeout_s, slot, layer, expert."""
_OPENED: Final = struct.Struct("<qQ")
"""copy_id, total bytes."""
_READ: Final = struct.Struct("<qQI")
"""copy_id, offset, bytes."""
_CLOSE: Final = struct.Struct("<q")
_ERROR: Final = struct.Struct("<BxxxI")
"""Kind that was asked, bytes of the body."""

COPY_BYTES_MAX: Final = 1 << 40
"""Largest expert a copy may declare."""


class _ErrorBody(msgspec.Struct, frozen=True):
    name: str
    message: str
    violations: tuple[tuple[str, str], ...] = ()


_ERRORS: Final[Mapping[str, type[MoeServeError]]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            errors.InvalidArgument,
            errors.ResourceExhausted,
            errors.FailedPrecondition,
            errors.NotFound,
            errors.Unavailable,
            errors.DeadlineExceeded,
            errors.PermissionDenied,
        )
    }
)
"""Errors that travel by name; any other arrives as Unavailable."""

_Message = FetchTable | Table | CopyOpen | CopyOpened | CopyRead | CopyChunk | CopyClose


def encode(message: _Message | ErrorReply) -> list[Buffer]:
    """Frames of a message."""
    match message:
        case ErrorReply():
            return _encode_error(message)
        case FetchTable():
            return [pack_prefix(Kind.FETCH_TABLE, message.call_id)]
        case Table():
            body = b"" if message.table is None else encode_placement(message.table)
            header = pack(_TABLE, "header", int(message.table is not None), len(body))
            return [pack_prefix(Kind.TABLE, message.call_id) + header, body]
        case _:
            return _encode_copy(message)


def _encode_copy(
    message: CopyOpen | CopyOpened | CopyRead | CopyChunk | CopyClose,
) -> list[Buffer]:
    match message:
        case CopyOpen():
            header = pack(
                _OPEN,
                "header",
                message.incarnation,
                message.tag,
                check_timeout(message.timeout_s),
                message.slot,
                message.layer,
                message.expert,
            )
            return [pack_prefix(Kind.COPY_OPEN, message.call_id) + header]
        case CopyOpened():
            header = pack(_OPENED, "header", message.copy_id, message.total_bytes)
            return [pack_prefix(Kind.COPY_OPENED, message.call_id) + header]
        case CopyRead():
            header = pack(_READ, "header", message.copy_id, message.offset, message.num_bytes)
            return [pack_prefix(Kind.COPY_READ, message.call_id) + header]
        case CopyChunk():
            header = pack(_READ, "header", message.copy_id, message.offset, len(message.data))
            return [pack_prefix(Kind.COPY_CHUNK, message.call_id) + header, message.data]
        case CopyClose():
            header = pack(_CLOSE, "header", message.copy_id)
            return [pack_prefix(Kind.COPY_CLOSE, message.call_id) + header]


def _encode_error(reply: ErrorReply) -> list[Buffer]:
    error = reply.error
    name = type(error).__name__ if type(error).__name__ in _ERRORS else "Unavailable"
    # Cut by characters so that the body stays below ERROR_BYTES_MAX whatever they are.
    body = msgspec.msgpack.encode(
        _ErrorBody(
            name,
            error.message[:2048],
            tuple((v.field[:128], v.description[:512]) for v in error.violations[:16]),
        )
    )
    header = pack(_ERROR, "header", reply.asked, len(body))
    return [pack_prefix(Kind.ERROR, reply.call_id, reply.sub_id) + header, body]


def _decode_error(frames: Frames, call_id: int, sub_id: int) -> ErrorReply:
    (asked, num_bytes), _rest = _exact(frames, _ERROR, 2)
    check_count("error", num_bytes, ERROR_BYTES_MAX)
    check_bytes(frames[1], num_bytes, "error")
    try:
        body = msgspec.msgpack.decode(frames[1], type=_ErrorBody)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise invalid("error", f"is malformed ({problem})") from problem
    kind = _ERRORS.get(body.name)
    if kind is None:
        raise invalid("error", "names an unknown error")
    violations = tuple(FieldViolation(field, text) for field, text in body.violations)
    return ErrorReply(call_id, sub_id, asked, kind(body.message, violations=violations))


def _exact(
    frames: Frames, layout: struct.Struct, num_frames: int
) -> tuple[tuple[Any, ...], memoryview]:
    values, rest = read_header(frames, layout, num_frames)
    if len(rest):
        raise invalid("header", f"{len(rest)} bytes too many")
    return values, rest


def _decode_fetch(frames: Frames, call_id: int, _sub_id: int) -> FetchTable:
    _exact(frames, _NOTHING, 1)
    return FetchTable(call_id)


def _decode_table(frames: Frames, call_id: int, _sub_id: int) -> Table:
    (present, num_bytes), _rest = _exact(frames, _TABLE, 2)
    check_bytes(frames[1], num_bytes, "table")
    if not present:
        check_bytes(frames[1], 0, "table")
        return Table(call_id, None)
    return Table(call_id, decode_table(bytes(frames[1])))


def decode_table(data: bytes) -> RoutingTable:
    """A routing table from its bytes, its arrays consistent with each other. Raises
    InvalidArgument."""
    try:
        table = decode_as(data, RoutingTable)
    except msgspec.ValidationError as problem:
        raise invalid("table", f"is malformed ({problem})") from problem
    if table.num_layers < 0 or table.num_experts < 0:
        raise invalid("table", "num_layers and num_experts must be at least 0")
    shape = (table.num_layers * table.num_experts + 1,)
    columns = (
        ("replica_ptr", table.replica_ptr, np.int32),
        ("replica_rank", table.replica_rank, np.int32),
        ("replica_slot", table.replica_slot, np.int32),
        ("replica_tag", table.replica_tag, np.int64),
    )
    for name, array, dtype in columns:
        if array.dtype != dtype or array.ndim != 1:
            raise invalid(f"table.{name}", f"must be a vector of {np.dtype(dtype)}")
    ptr = table.replica_ptr
    # Neighbours are compared, not subtracted: a difference of int32 may wrap around.
    if ptr.shape != shape or ptr[0] != 0 or (ptr[1:] < ptr[:-1]).any():
        raise invalid("table.replica_ptr", f"must ascend from 0 and have {shape[0]} elements")
    for name, array, _ in columns[1:]:
        if len(array) != int(ptr[-1]):
            raise invalid(f"table.{name}", f"must have {int(ptr[-1])} elements (got {len(array)})")
    return table


def _decode_open(frames: Frames, call_id: int, _sub_id: int) -> CopyOpen:
    (incarnation, tag, timeout_s, slot, layer, expert), _rest = _exact(frames, _OPEN, 1)
    check_timeout(timeout_s)
    for name, value in (("slot", slot), ("layer", layer), ("expert", expert), ("tag", tag)):
        if value < 0:
            raise invalid(name, f"must be at least 0 (got {value})")
    return CopyOpen(call_id, incarnation, slot, tag, layer, expert, timeout_s)


def _decode_opened(frames: Frames, call_id: int, _sub_id: int) -> CopyOpened:
    (copy_id, total_bytes), _rest = _exact(frames, _OPENED, 1)
    return CopyOpened(call_id, copy_id, check_count("total_bytes", total_bytes, COPY_BYTES_MAX))


def _decode_read(frames: Frames, call_id: int, _sub_id: int) -> CopyRead:
    (copy_id, offset, num_bytes), _rest = _exact(frames, _READ, 1)
    check_count("offset", offset, COPY_BYTES_MAX)
    check_count("num_bytes", num_bytes, CHUNK_BYTES_MAX)
    return CopyRead(call_id, copy_id, offset, num_bytes)


def _decode_chunk(frames: Frames, call_id: int, _sub_id: int) -> CopyChunk:
    (copy_id, offset, num_bytes), _rest = _exact(frames, _READ, 2)
    check_count("offset", offset, COPY_BYTES_MAX)
    check_count("num_bytes", num_bytes, CHUNK_BYTES_MAX)
    check_bytes(frames[1], num_bytes, "data")
    return CopyChunk(call_id, copy_id, offset, frames[1])


def _decode_close(frames: Frames, call_id: int, _sub_id: int) -> CopyClose:
    (copy_id,), _rest = _exact(frames, _CLOSE, 1)
    return CopyClose(call_id, copy_id)


DECODERS: Final[Mapping[Kind, Callable[[Frames, int, int], _Message | ErrorReply]]] = (
    MappingProxyType(
        {
            Kind.ERROR: _decode_error,
            Kind.FETCH_TABLE: _decode_fetch,
            Kind.TABLE: _decode_table,
            Kind.COPY_OPEN: _decode_open,
            Kind.COPY_OPENED: _decode_opened,
            Kind.COPY_READ: _decode_read,
            Kind.COPY_CHUNK: _decode_chunk,
            Kind.COPY_CLOSE: _decode_close,
        }
    )
)
"""Decoder of each kind of this module: (frames, call_id, sub_id) -> message."""
