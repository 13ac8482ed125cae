"""Server-sent events: what one browser does not have yet.

One multiplexed stream a tab: `status`, `placement`, `frame` (whole documents, the newest form
only), `move` and `record` (lists of what is new; a page that has none yet gets all that are kept).
Records carry the id `life-number`, which a browser sends back as Last-Event-ID.

Responsible for the order and form of events. Must never hold a document of its own: a client is a
few numbers, so that a slow one costs nothing. Called by `app`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator

import msgspec

from moe_serve.dashboard.feed import Feed

_NUMBER = re.compile(r"[0-9]{1,18}")


class Event(msgspec.Struct, frozen=True):
    """One event: its name, one line of JSON, and its id, "" where a reconnect need not name it."""

    name: str
    data: bytes
    event_id: str = ""

    def encoded(self) -> bytes:
        """The event as it goes over the wire."""
        line = f"id: {self.event_id}\n".encode() if self.event_id else b""
        return line + b"event: %s\ndata: %s\n\n" % (self.name.encode(), self.data)


def record_cursor(feed: Feed, last_event_id: str) -> int:
    """Number of the newest record that a browser has; 0 where its id is of another life or none."""
    life, _, number = last_event_id.partition("-")
    return int(number) if life == feed.life and _NUMBER.fullmatch(number) else 0


async def updates(feed: Feed, after_record: int = 0) -> AsyncGenerator[list[Event], None]:
    """Batches of what is newer than the browser's, for ever; waits while nothing is."""
    status = placement = frame = moves = 0
    while True:
        batch: list[Event] = []
        if feed.status.version > status:
            status = feed.status.version
            batch.append(Event("status", feed.status.body))
        if feed.placement.version > placement:
            placement = feed.placement.version
            batch.append(Event("placement", feed.placement.body))
        if feed.frame.version > frame:
            frame = feed.frame.version
            batch.append(Event("frame", feed.frame.body))
        if feed.history.moves_version > moves:
            batch.append(Event("move", msgspec.json.encode(feed.history.moves_after(moves))))
            moves = feed.history.moves_version
        if feed.history.last_record > after_record:
            records = feed.history.records_after(after_record)
            after_record = feed.history.last_record
            name = f"{feed.life}-{after_record}"
            batch.append(Event("record", msgspec.json.encode(records), name))
        if batch:
            yield batch
        else:
            await feed.changed()
