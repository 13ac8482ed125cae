"""The outer form of a wire message: a fixed little-endian header in the first frame, raw buffers in
the others.

Responsible for magic, version, kinds, limits, and for turning received bytes into checked arrays.
Must never allocate by a declared size before comparing it with what was received, and never
deserialises objects. Called by `codec`.

Every message is a ZeroMQ multipart of 1 to FRAMES_MAX frames. Frame 0 begins with PREFIX (24
bytes):

| bytes | field | |
|---|---|---|
| 0-3 | magic | `MoEw` |
| 4 | version | 1 |
| 5 | kind | `Kind` |
| 6-7 | reserved | 0 |
| 8-15 | call_id | int64, chosen by the asking side, echoed in the answer |
| 16-23 | sub_id | int64, likewise |

Sizes are computed with Python's integers, which do not overflow: 2^31 rows of 2^31 elements is just
a number that is compared with the bytes received and refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moe_serve.errors import FieldViolation, InvalidArgument, ResourceExhausted

Buffer = bytes | memoryview
Frames = Sequence[Buffer]

MAGIC: Final = b"MoEw"
VERSION: Final = 1
PREFIX: Final = struct.Struct("<4sBBHqq")

FRAMES_MAX: Final = 3
"""Most frames of any message: header, index block, rows."""
MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Default limit on the bytes of one message, all frames together; both ends set it."""
HEADER_BYTES_MAX: Final = 4096
"""Longest frame 0: the largest header and its text."""
ROWS_MAX: Final = 1 << 17
"""Most rows of a sub-call."""
PAIRS_MAX: Final = 1 << 20
"""Most pairs of a sub-call."""
HIDDEN_MAX: Final = 1 << 16
"""Largest hidden size."""
NAME_BYTES_MAX: Final = 128
"""Longest router name, in UTF-8."""
REQUEST_ID_BYTES_MAX: Final = 512
"""Longest request id, in UTF-8: 128 characters."""
DETAIL_BYTES_MAX: Final = 1024
"""Longest detail text of a reply, in UTF-8; longer ones are cut."""
ERROR_BYTES_MAX: Final = 64 * 1024
"""Longest body of an ERROR."""
CHUNK_BYTES_MAX: Final = 256 * 1024
"""Bytes of an expert in one COPY_CHUNK: large enough to be cheap, small enough to let serving in
between."""
TIMEOUT_S_MAX: Final = 3600.0
"""Longest timeout a message may name."""


class Kind(IntEnum):
    """What a message is. Asking kinds come from routers and copying shards, answering kinds from
    the shard."""

    FORWARD = 1
    REPLY = 2
    ERROR = 3
    FETCH_TABLE = 4
    TABLE = 5
    COPY_OPEN = 6
    COPY_OPENED = 7
    COPY_READ = 8
    COPY_CHUNK = 9
    COPY_CLOSE = 10


_KINDS: Final = MappingProxyType({int(kind): kind for kind in Kind})


def invalid(field: str, problem: str) -> InvalidArgument:
    """An InvalidArgument that names one field of a message."""
    return InvalidArgument(f"{field}: {problem}", violations=(FieldViolation(field, problem),))


def message_bytes(frames: Frames) -> int:
    """Bytes of all frames together."""
    return sum(map(_len, frames))


def check_message_size(frames: Frames, message_bytes_max: int) -> None:
    """Raise ResourceExhausted where a message to send is above the limit: the other end would drop
    the connection."""
    size = message_bytes(frames)
    if size > message_bytes_max:
        problem = f"the message has {size} bytes, the limit is {message_bytes_max}; send fewer rows"
        raise ResourceExhausted(problem, violations=(FieldViolation("rows", problem),))


def pack_prefix(kind: Kind, call_id: int, sub_id: int = 0) -> bytes:
    """PREFIX of a message to send."""
    return pack(PREFIX, "prefix", MAGIC, VERSION, int(kind), 0, call_id, sub_id)


def pack(layout: struct.Struct, field: str, *values: object) -> bytes:
    """Pack header values. Raises InvalidArgument where a value does not fit its place."""
    try:
        return layout.pack(*values)
    except struct.error as error:
        raise invalid(field, f"a value does not fit the header ({error})") from error


def read_ids(frames: Frames) -> tuple[int, int, int] | None:
    """(call_id, sub_id, kind) of a message however broken the rest is; None where not even the
    prefix can be trusted."""
    if not frames or _len(frames[0]) < PREFIX.size:
        return None
    magic, version, kind, _reserved, call_id, sub_id = PREFIX.unpack_from(frames[0])
    return (call_id, sub_id, kind) if magic == MAGIC and version == VERSION else None


def read_prefix(frames: Frames, message_bytes_max: int) -> tuple[Kind, int, int]:
    """(kind, call_id, sub_id) after all checks that hold for every kind. Raises InvalidArgument."""
    if not 1 <= len(frames) <= FRAMES_MAX:
        raise invalid("frames", f"a message has 1 to {FRAMES_MAX} frames (got {len(frames)})")
    size = message_bytes(frames)
    if size > message_bytes_max:
        raise invalid("message", f"{size} bytes are above the limit of {message_bytes_max}")
    header_bytes = _len(frames[0])
    if not PREFIX.size <= header_bytes <= HEADER_BYTES_MAX:
        raise invalid(
            "header", f"must have {PREFIX.size} to {HEADER_BYTES_MAX} bytes (got {header_bytes})"
        )
    magic, version, kind, reserved, call_id, sub_id = PREFIX.unpack_from(frames[0])
    if magic != MAGIC:
        raise invalid("magic", "these are no bytes of this protocol; check address and port")
    if version != VERSION:
        raise invalid("version", f"must be {VERSION} (got {version}); run one release on all parts")
    known = _KINDS.get(kind)
    if known is None:
        raise invalid("kind", f"unknown kind {kind}")
    if reserved != 0:
        raise invalid("reserved", f"must be 0 (got {reserved})")
    return known, call_id, sub_id


def read_header(
    frames: Frames, layout: struct.Struct, num_frames: int
) -> tuple[tuple[Any, ...], memoryview]:
    """Values of a kind's header and what follows it in frame 0. Raises InvalidArgument."""
    if len(frames) != num_frames:
        raise invalid("frames", f"this kind has {num_frames} frames (got {len(frames)})")
    need = PREFIX.size + layout.size
    if _len(frames[0]) < need:
        raise invalid("header", f"must have at least {need} bytes (got {_len(frames[0])})")
    return layout.unpack_from(frames[0], PREFIX.size), memoryview(frames[0])[need:]


def read_text(data: memoryview, num_bytes: int, limit: int, field: str) -> str:
    """UTF-8 text that is exactly the rest of a header. Raises InvalidArgument."""
    if num_bytes > limit:
        raise invalid(field, f"must have at most {limit} bytes (declared {num_bytes})")
    if len(data) != num_bytes:
        raise invalid(field, f"declared {num_bytes} bytes, received {len(data)}")
    if not num_bytes:
        return ""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise invalid(field, "is not UTF-8") from error


def check_count(field: str, value: int, limit: int) -> int:
    """A declared count in [0, limit]. Raises InvalidArgument."""
    if not 0 <= value <= limit:
        raise invalid(field, f"must lie in [0, {limit}] (got {value})")
    return value


def check_timeout(value: float) -> float:
    """A finite timeout in (0, TIMEOUT_S_MAX]. Raises InvalidArgument."""
    if not 0.0 < value <= TIMEOUT_S_MAX:
        raise invalid("timeout_s", f"must lie in (0, {TIMEOUT_S_MAX:g}] (got {value})")
    return value


def check_bytes(frame: Buffer, expected: int, field: str) -> None:
    """A frame has exactly the declared bytes. Raises InvalidArgument before anybody allocates."""
    if _len(frame) != expected:
        raise invalid(field, f"declared sizes make {expected} bytes, received {_len(frame)}")


def view(frame: Buffer, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
    """`count` elements of a frame, read-only, without a copy where the bytes are aligned for the
    dtype.

    ZeroMQ hands out small frames as pieces of its receive buffer, at any address; those few bytes
    are copied.
    """
    array: npt.NDArray[Any] = np.frombuffer(frame, dtype, count, offset)
    flags = array.flags
    if not flags.aligned:
        array = array.copy()
        flags = array.flags
    flags.writeable = False
    return array


def raw(array: npt.NDArray[Any]) -> memoryview:
    """Bytes of an array to send, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _len(frame: Buffer) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)
