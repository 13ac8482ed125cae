"""Names of parts: `service:kind:place:incarnation`, unique for ever.

Responsible for writing and reading them. Called by parts and by the fleet, which lists actors of a
service by `prefix`.

An incarnation is term * 1,000,000 + a number counted within the term. Terms only grow, even where
the journal is lost, so no two lives of a rank ever share a name or an incarnation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

INCARNATIONS_PER_TERM = 1_000_000


class PartKind(StrEnum):
    """What a part is."""

    SHARD = "shard"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class PartName:
    """One life of one part. `place`: the rank's number as text, or the router's name."""

    service_id: str
    kind: PartKind
    place: str
    incarnation: int

    def __str__(self) -> str:
        return f"{prefix(self.service_id)}{self.kind}:{self.place}:{self.incarnation}"

    @property
    def rank(self) -> int:
        """Rank of a shard."""
        assert self.kind is PartKind.SHARD, f"{self} is no shard"
        return int(self.place)


def prefix(service_id: str) -> str:
    """What the name of every part of a service begins with: "tiny:" for service tiny."""
    return f"{service_id}:"


def parse(service_id: str, name: str) -> PartName | None:
    """The part a name names, None where it is none of this service's shards and routers.

    parse("tiny", "tiny:shard:3:1000002") names rank 3.
    """
    words = name.split(":")
    if len(words) != 4 or words[0] != service_id or words[1] not in set(PartKind):
        return None
    kind, place, life = PartKind(words[1]), words[2], words[3]
    if not life.isascii() or not life.isdecimal() or not place:
        return None
    if kind is PartKind.SHARD and not (place.isascii() and place.isdecimal()):
        return None
    return PartName(service_id, kind, place, int(life))


class Incarnations:
    """Numbers of new lives in one term."""

    def __init__(self, term: int) -> None:
        self._next = term * INCARNATIONS_PER_TERM

    @staticmethod
    def last_before(term: int) -> int:
        """Greatest number that a controller of a lower term may have given."""
        return term * INCARNATIONS_PER_TERM

    def next(self) -> int:
        """A number never given before."""
        self._next += 1
        return self._next
