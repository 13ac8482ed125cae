"""Which living parts a starting controller takes over, and which it ends.

Responsible for the rule: with a journal, adopt what it names and end the rest; without one, adopt
every part of the service that answers and end none. Must never create a part. Called when a life
begins: `adopt` before its term is claimed, `fence` after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from moe_serve.controller.names import Incarnations, PartKind, PartName, parse
from moe_serve.controller.parts import RouterPart, ShardPart, router_part, shard_part
from moe_serve.errors import MoeServeError, StaleTerm
from moe_serve.ports import Fleet

_T = TypeVar("_T")
DESCRIBE_PAUSE_S = 0.2
"""Wait before a part that did not describe itself is asked again."""


@dataclass(slots=True)
class Adopted:
    """Parts that answered, newest life of each place. `to_end`: living names that must not live
    on. `found_any`: something of this service was alive. `seen`: every name that was alive."""

    shards: list[ShardPart] = field(default_factory=list)
    routers: list[RouterPart] = field(default_factory=list)
    to_end: list[str] = field(default_factory=list)
    found_any: bool = False
    seen: frozenset[str] = frozenset()

    @property
    def highest_term(self) -> int:
        """Greatest term an adopted part has seen."""
        shards = (part.info.highest_term for part in self.shards)
        return max([0, *shards, *(part.info.highest_term for part in self.routers)])


async def adopt(
    fleet: Fleet, service_id: str, journal_names: Sequence[str] | None, *, patience_s: float
) -> Adopted:
    """Find the parts. `journal_names`: names in a journal that is trusted, None without one. Each
    part has `patience_s` to describe itself."""
    adopted = Adopted()
    alive = [(name, parse(service_id, name)) for name in sorted(await fleet.part_names())]
    ours = [part for _, part in alive if part is not None]
    adopted.found_any = bool(ours)
    adopted.seen = frozenset(name for name, _ in alive)
    if journal_names is not None:
        named = set(journal_names)
        adopted.to_end = [str(part) for part in ours if str(part) not in named]
        ours = [part for part in ours if str(part) in named]
    newest: dict[tuple[PartKind, str], PartName] = {}
    for part in sorted(ours, key=lambda part: part.incarnation):
        newest[part.kind, part.place] = part
    if journal_names is not None:
        # A life before the newest is the one that was being replaced.
        adopted.to_end += [str(p) for p in ours if newest[p.kind, p.place] is not p]
    await asyncio.gather(*(_take(fleet, p, adopted, patience_s) for p in newest.values()))
    adopted.shards.sort(key=lambda part: part.name.rank)
    adopted.routers.sort(key=lambda part: part.name.place)
    return adopted


async def fence(adopted: Adopted, term: int, *, patience_s: float) -> None:
    """Make adopted shards refuse every lower term, and take what they tell then for what they hold:
    before, an older controller may still have had commands on their way.

    A shard that does not answer within `patience_s` is not adopted. Raises StaleTerm where one has
    seen a higher term.
    """
    told = await asyncio.gather(
        *(_described(partial(part.port.fence, term), patience_s) for part in adopted.shards)
    )
    adopted.shards = [
        replace(part, info=info)
        for part, info in zip(adopted.shards, told, strict=True)
        if info is not None
    ]


async def find_late(adopted: Adopted, fleet: Fleet, service_id: str, term: int) -> None:
    """Parts that an older controller created after `adopt` had looked are in nobody's list, now
    that `term` is claimed and no such controller creates any more: they must not live on. What a
    newer controller creates is not ours to end."""
    for name in sorted(set(await fleet.part_names()) - adopted.seen):
        part = parse(service_id, name)
        if part is not None and part.incarnation <= Incarnations.last_before(term):
            adopted.to_end.append(name)


def refuse_other_weights(adopted: Adopted, weights_version: str) -> list[str]:
    """Give up shards that hold other weights than the service serves, whatever their slots are
    called; each is ended, and replaced as one that was lost. Returns why, in sentences."""
    others = [
        part for part in adopted.shards if part.info.weights_version not in ("", weights_version)
    ]
    adopted.to_end += [str(part.name) for part in others]
    adopted.shards = [part for part in adopted.shards if part not in others]
    return [
        f"rank {part.name.rank} held weights {part.info.weights_version}, not {weights_version}; "
        "its shard was replaced"
        for part in others
    ]


async def _take(fleet: Fleet, name: PartName, adopted: Adopted, patience_s: float) -> None:
    if name.kind is PartKind.SHARD:
        shard = await fleet.find_shard(str(name))
        shard_info = None if shard is None else await _described(shard.describe, patience_s)
        if shard is not None and shard_info is not None:
            adopted.shards.append(shard_part(name, shard, shard_info, 0.0))
        return
    router = await fleet.find_router(str(name))
    router_info = None if router is None else await _described(router.describe, patience_s)
    if router is not None and router_info is not None:
        adopted.routers.append(router_part(name, router, router_info, 0.0))


async def _described(describe: Callable[[], Awaitable[_T]], patience_s: float) -> _T | None:
    try:
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    return await describe()
                except StaleTerm:
                    raise
                except MoeServeError:
                    await asyncio.sleep(DESCRIBE_PAUSE_S)
    except TimeoutError:
        return None
