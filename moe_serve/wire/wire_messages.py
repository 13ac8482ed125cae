"""Messages of the wire beside SubCall and SubReply, as plain data.

Responsible for nothing but their fields. Made and read by `codec`; handled by the channel, the copy
client and the shard's server.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.errors import MoeServeError
from moe_serve.ports import SubCall, SubReply
from moe_serve.wire.frame import Buffer
from placement.routing import RoutingTable


@dataclass(frozen=True, slots=True)
class FetchTable:
    """Ask for the newest routing table the shard keeps. Answer: Table."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Table:
    """The table, or None where the shard was given none yet."""

    call_id: int
    table: RoutingTable | None


@dataclass(frozen=True, slots=True)
class CopyOpen:
    """Ask to read what a slot holds. The shard pins the slot until COPY_CLOSE or `timeout_s`.
    Answer: CopyOpened."""

    call_id: int
    incarnation: int
    slot: int
    tag: int
    layer: int
    expert: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CopyOpened:
    """`copy_id` names the opened copy of `total_bytes` canonical bytes."""

    call_id: int
    copy_id: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CopyRead:
    """Ask for bytes [offset, offset + num_bytes) of an opened copy. Answer: CopyChunk."""

    call_id: int
    copy_id: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CopyChunk:
    """The bytes asked for."""

    call_id: int
    copy_id: int
    offset: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class CopyClose:
    """The copy is over; the source slot is unpinned. No answer."""

    call_id: int
    copy_id: int


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The question (asked, call_id, sub_id) was refused; the error is raised where it was asked.
    `asked` is its Kind's value."""

    call_id: int
    sub_id: int
    asked: int
    error: MoeServeError


Request = SubCall | FetchTable | CopyOpen | CopyRead | CopyClose
Answer = SubReply | ErrorReply | Table | CopyOpened | CopyChunk
WireMessage = Request | Answer
