"""W3C trace context: which trace a request belongs to, as two headers say it.

`traceparent` is `00-<trace id>-<span id>-<flags>`; `tracestate` is text of whoever made it, handed
on as it is. What breaks the grammar is dropped and counted, never an error: a request is served
whatever its headers say.

Responsible for the grammar. Pure. Called by clients (what a caller hands in), by routers (what
arrived) and by shards (what a router handed on).

Worked example: `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01` is span
00f067aa0ba902b7 of trace 4bf92f..., sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
TRACEPARENT_CHARS = 55
"""Of version 00; a later version may say more behind it."""
TRACEPARENT_CHARS_MAX = 256
"""What is looked at of a later version's text."""
STATE_CHARS_MAX = 512
"""The least that the standard wants handed on; longer ones are dropped."""
STATE_MEMBERS_MAX = 32

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_\-*/@]{0,255})=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[!-+\--<>-~])"
)
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of one trace. trace_id, span_id: 32 and 16 hex digits, not all zero. state: the
    `tracestate` that came with it, "" where none did."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    def header(self) -> str:
        """As a `traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    def child(self, span_id: str) -> TraceContext:
        """Another span of the same trace."""
        return replace(self, span_id=span_id)


def parse(traceparent: str, tracestate: str = "") -> tuple[TraceContext | None, int]:
    """The context that two headers name, and how many of them were given and are malformed.

    Without a sound `traceparent` there is no context, whatever `tracestate` says; without a sound
    `tracestate` there is one without it.
    """
    if not traceparent:
        return None, 0
    found = _parent(traceparent)
    if found is None:
        return None, 1
    state = tracestate.strip(" \t")
    if state and not _is_state(state):
        return found, 1
    return replace(found, state=state) if state else found, 0


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, str]:
    """(traceparent, tracestate) of a call's headers, "" where there is none. Several `tracestate`
    are one list; several `traceparent` make none sound."""
    parents, states = [], []
    for key, value in metadata or ():
        if isinstance(value, str):
            if key == TRACEPARENT:
                parents.append(value)
            elif key == TRACESTATE:
                states.append(value)
    return ",".join(parents), ",".join(states)


def to_metadata(traceparent: str, tracestate: str) -> tuple[tuple[str, str], ...]:
    """Headers to send; none without a `traceparent`."""
    if not traceparent:
        return ()
    parent = ((TRACEPARENT, traceparent),)
    return (*parent, (TRACESTATE, tracestate)) if tracestate else parent


def _parent(text: str) -> TraceContext | None:
    if len(text) > TRACEPARENT_CHARS_MAX:
        return None
    match = _PARENT.fullmatch(text.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def _is_state(text: str) -> bool:
    if len(text) > STATE_CHARS_MAX:
        return False
    keys = []
    for part in text.split(","):
        member = part.strip(" \t")
        if not member:
            continue  # the grammar lets a member be empty
        match = _MEMBER.fullmatch(member)
        if match is None:
            return False
        keys.append(match[1])
    return len(keys) == len(set(keys)) <= STATE_MEMBERS_MAX
