"""The event log of a simulated world: what checkers read. Frozen facts in order; no logic."""

from __future__ import annotations

import msgspec

from placement.messages.effects import Effects
from placement.messages.events import AnyEvent

Listed = tuple[int, int, int, int]
"""(key, rank, slot, tag)."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Base: when it happened."""

    at_s: float


class Stepped(Entry, frozen=True, kw_only=True, eq=False):
    """The engine took an event and returned effects."""

    event: AnyEvent
    effects: Effects


class Published(Entry, frozen=True, kw_only=True, eq=False):
    """A table left the controller. `verified`: what shards held, proved and not being freed, at
    that moment."""

    term: int
    epoch: int
    num_keys: int
    listed: frozenset[Listed]
    verified: frozenset[Listed]


class MemoryUsed(Entry, frozen=True, kw_only=True, eq=False):
    """Bytes of a shard after one of its commands or reports."""

    rank: int
    resident_bytes: int
    reserved_bytes: int
    budget_bytes: int


class Freed(Entry, frozen=True, kw_only=True, eq=False):
    """A shard freed a slot that a removal asked for. `pins`: batches and copies on it then."""

    rank: int
    slot: int
    tag: int
    pins: int


class RouterTold(Entry, frozen=True, kw_only=True, eq=False):
    """A router told the controller what it applied and what it has quiesced."""

    router: str
    applied: int
    quiesced: int
    installs: int
    """Epoch of its newest table at that moment; never goes down."""
