"""The parts of the service as the controller knows them: shards, routers, and those being created.

Responsible for holding them and for the events their words become. Must never call a part (`polls`,
`creation`, `publisher`, `executor` do). Used by everything in the controller that meets a part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_serve.controller.names import PartKind, PartName
from moe_serve.ports import (
    RouterInfo,
    RouterPort,
    RouterReport,
    ShardInfo,
    ShardPort,
    ShardReport,
)
from placement.load import NOTHING_ACKED
from placement.messages.events import RankJoined


@dataclass(slots=True, eq=False)
class ShardPart:
    """One life of one shard. Times are driver times."""

    name: PartName
    port: ShardPort
    info: ShardInfo
    heard_s: float
    """When it last answered anything."""
    progress_s: float
    """When it last reported executed work."""
    report: ShardReport | None = None
    source: str = ""
    """Name it reports load under, "" before its first report of any."""
    suspected: str = ""
    """Why it is suspected, "" while it is not."""
    table_order: tuple[int, int] = (0, 0)
    """(term, epoch) of the table it was last seen to hold."""
    copied: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Step -> when the engine was last told how far its copy is, and how many bytes that was; only
    of copies that ran at the last report."""

    @property
    def busy(self) -> bool:
        """Whether its compute thread was working at its last report."""
        return self.report is not None and self.report.busy


@dataclass(slots=True, eq=False)
class RouterPart:
    """One life of one router. Times are driver times."""

    name: PartName
    port: RouterPort
    info: RouterInfo
    heard_s: float
    report: RouterReport | None = None
    source: str = ""
    silent: bool = False
    """It left the acknowledging set for silence and has not answered since."""
    applied: int = -1
    """Newest epoch the engine was told it applied."""
    quiesced: int = -1
    suspects: frozenset[tuple[int, int]] = frozenset()
    """(rank, incarnation) it avoided at its last report."""
    table_order: tuple[int, int] = (0, 0)
    told: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
    """Addresses of routers, and suspected ranks, that it was last sent."""


AnyPart = ShardPart | RouterPart


@dataclass(slots=True)
class PartTable:
    """All parts now. `names`: every name in the journal. `problems`: why a part is missing, by
    place."""

    shards: dict[int, ShardPart] = field(default_factory=dict)
    routers: dict[str, RouterPart] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    """Times in a row a part refused to start, by place."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Where each router listens, or did last, by its name."""

    def add(self, part: AnyPart) -> None:
        """A part answers from now on."""
        self.forget_problem(place_of(part.name))
        if isinstance(part, ShardPart):
            self.shards[part.name.rank] = part
        else:
            self.routers[part.name.place] = part
            self.addresses[part.name.place] = part.info.grpc_address

    def forget_problem(self, place: str) -> None:
        """Nothing is wrong at the place any more, or nobody is wanted there."""
        self.problems.pop(place, None)
        self.refusals.pop(place, None)

    def holds(self, part: AnyPart) -> bool:
        """Whether this life of the part is still the one that counts."""
        if isinstance(part, ShardPart):
            return self.shards.get(part.name.rank) is part
        return self.routers.get(part.name.place) is part

    def all(self) -> list[AnyPart]:
        """Every part that answers, shards first."""
        return [*self.shards.values(), *self.routers.values()]

    def drop(self, part: AnyPart) -> None:
        """This life of the part is over."""
        if not self.holds(part):
            return
        if isinstance(part, ShardPart):
            del self.shards[part.name.rank]
        else:
            del self.routers[part.name.place]

    def peers(self) -> tuple[str, ...]:
        """gRPC addresses of all routers, in order of name. One that is being made again counts: it
        will listen where it did, and a front end that forgot it meanwhile would have nowhere to go
        should the others fail next."""
        return tuple(self.addresses[name] for name in sorted(self.addresses))

    def suspects(self) -> tuple[int, ...]:
        """Ranks whose shard is suspected now, in order."""
        return tuple(sorted(rank for rank, part in self.shards.items() if part.suspected))


def place_of(name: PartName) -> str:
    """Place in words: "rank 3", or a router's name."""
    return f"rank {name.place}" if name.kind is PartKind.SHARD else name.place


def rank_joined(info: ShardInfo) -> RankJoined:
    """What a shard says of itself, as the event it is."""
    return RankJoined(
        at_s=0.0,
        rank=info.rank,
        node=info.node,
        failure_domain=info.failure_domain,
        profile=info.profile,
        num_slots=info.num_slots,
        address=info.address,
        resident=info.resident,
        group=info.group,
        only_node=info.only_node,
    )


def shard_part(name: PartName, port: ShardPort, info: ShardInfo, now_s: float) -> ShardPart:
    """A shard that has just described itself."""
    return ShardPart(name=name, port=port, info=info, heard_s=now_s, progress_s=now_s)


def router_part(name: PartName, port: RouterPort, info: RouterInfo, now_s: float) -> RouterPart:
    """A router that has just described itself."""
    return RouterPart(name=name, port=port, info=info, heard_s=now_s)


FIRST_ACK = NOTHING_ACKED
"""Acknowledgement sent to a source that has not reported any load yet."""
