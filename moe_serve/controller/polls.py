"""Asking parts how they are: load, acknowledgements, liveness through the compute path.

Responsible for turning answers and silences into events. Suspicion comes from a probe or a router;
loss from the fleet's word; the engine itself makes loss of a suspicion that lasts. Must never
decide what a loss means. Owned by supervision, one loop a part and kind of question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from moe_serve.controller.clock import DriverClock
from moe_serve.controller.parts import (
    FIRST_ACK,
    AnyPart,
    PartTable,
    RouterPart,
    ShardPart,
)
from moe_serve.controller.settings import SupervisionLimits
from moe_serve.controller.stages import StageFolder
from moe_serve.errors import MoeServeError, StaleTerm
from moe_serve.ports import Fleet, RouterReport, ShardReport
from placement.config import RebalanceConfig
from placement.load import HotnessReport, LoadFolder
from placement.messages.events import (
    AnyEvent,
    CopyProgress,
    RankCleared,
    RankLost,
    RankSuspected,
    RouterJoined,
    RouterLeft,
    TableApplied,
    TableQuiesced,
)

HUNG_ROUTER_S = 30.0
"""A router whose actor lives but that has not answered for this long is replaced."""
PROGRESS_SHARE = 0.5
"""Of a window: how often at most the engine is told how far one copy is. Each event is journalled,
and a plan stands still only after two windows without one."""


class Host(Protocol):
    """Who acts on what was found out about a part."""

    def farewell(self, part: AnyPart) -> None:
        """Its life is over."""
        ...

    def suspects_changed(self) -> None:
        """A shard is suspected now, or not any more."""
        ...


class Listener(Protocol):
    """Who hears what parts report, for metrics."""

    def executed(self, report: HotnessReport) -> None:
        """A shard's report that was not heard before."""
        ...

    def router_told(self, report: RouterReport) -> None:
        """A router's report."""
        ...


class Polls:
    """The loops of one life."""

    def __init__(  # noqa: PLR0913  # it meets fleet, folders and driver
        self,
        fleet: Fleet,
        *,
        term: int,
        config: RebalanceConfig,
        limits: SupervisionLimits,
        clock: DriverClock,
        parts: PartTable,
        folder: LoadFolder,
        stages: StageFolder,
        host: Host,
        post: Callable[[AnyEvent], Awaitable[None]],
        fenced: Callable[[StaleTerm], None],
        router_heard: Callable[[str, int], None] | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._router_heard = router_heard
        self._listener = listener
        self._fleet = fleet
        self._term = term
        self._config = config
        self._limits = limits
        self._clock = clock
        self._parts = parts
        self._folder = folder
        self._stages = stages
        self._host = host
        self._post = post
        self._fenced = fenced

    # ------------------------------------------------------------------------------- shards

    async def report_shard(self, part: ShardPart) -> None:
        """Ask for reports until the part's life is over."""
        while self._parts.holds(part):
            acked = self._acked(part.source, part.info.address.incarnation)
            try:
                async with asyncio.timeout(self._limits.call_timeout_s):
                    report = await part.port.report(acked)
            except (TimeoutError, MoeServeError) as error:
                await self._no_answer(part, f"no report: {_words(error)}")
            else:
                await self._shard_reported(part, report)
            await asyncio.sleep(self._limits.report_s)

    async def probe_shard(self, part: ShardPart) -> None:
        """Send probe rows through queue and compute thread until the part's life is over."""
        while self._parts.holds(part):
            await asyncio.sleep(self._limits.probe_s)
            try:
                async with asyncio.timeout(self._limits.call_timeout_s):
                    await part.port.probe()
            except (TimeoutError, MoeServeError) as error:
                if self._explained(part):
                    await self._clear(part)
                else:
                    await self._no_answer(part, f"no answer to a probe: {_words(error)}")
            else:
                part.heard_s = self._clock.now_s()
                await self._clear(part)

    async def _shard_reported(self, part: ShardPart, report: ShardReport) -> None:
        now_s = self._clock.now_s()
        part.heard_s = now_s
        part.report = report
        self._check_term(report.highest_term)
        if report.stalled_s:
            await self.suspect(part, f"one batch has been computed for {report.stalled_s:.1f} s")
        for hotness in report.reports:
            part.source = hotness.source
            if self._folder.add_hotness(hotness, now_s):
                part.progress_s = now_s
                if self._listener is not None:
                    self._listener.executed(hotness)
        await self._copies_reported(part, report, now_s)

    async def _copies_reported(self, part: ShardPart, report: ShardReport, now_s: float) -> None:
        """Tell the engine of copies that have come further since it was last told."""
        told, part.copied = part.copied, {}
        for copy in report.copies:
            at_s, done_bytes = told.get(copy.step_id, (now_s, 0))
            due = now_s - at_s >= PROGRESS_SHARE * self._config.window_s
            grown = copy.done_bytes > done_bytes
            part.copied[copy.step_id] = (
                (now_s, copy.done_bytes)
                if due and grown
                else (
                    at_s,
                    done_bytes,
                )
            )
            if due and grown:
                event = CopyProgress(at_s=0.0, step_id=copy.step_id, copied_bytes=copy.done_bytes)
                await self._post(event)

    def _explained(self, part: ShardPart) -> bool:
        """Whether a probe without an answer only waits behind work that goes on: the shard must
        say so now, for one that stands still said it last of all."""
        now_s = self._clock.now_s()
        fresh = now_s - part.heard_s < self._limits.call_timeout_s
        working = now_s - part.progress_s < self._config.rank_silence_s
        return part.busy and fresh and working

    async def _no_answer(self, part: ShardPart, why: str) -> None:
        if not self._parts.holds(part):
            return
        if not await self._alive(part):
            await self.lose_shard(part, f"the actor is gone ({why})")
        elif not self._explained(part):
            await self.suspect(part, why)

    async def lose_shard(self, part: ShardPart, why: str) -> None:
        """The shard is gone with all it held."""
        if not self._parts.holds(part):
            return
        self._parts.drop(part)
        self._host.farewell(part)
        await self._post(
            RankLost(
                at_s=0.0,
                rank=part.name.rank,
                incarnation=part.info.address.incarnation,
                reason=why,
            )
        )

    async def suspect(self, part: ShardPart, why: str) -> None:
        """The shard may be gone."""
        if not part.suspected:
            part.suspected = why
            self._host.suspects_changed()
            await self._post(RankSuspected(at_s=0.0, rank=part.name.rank, reason=why))

    async def _clear(self, part: ShardPart) -> None:
        if part.suspected and self._parts.holds(part):
            part.suspected = ""
            self._host.suspects_changed()
            await self._post(RankCleared(at_s=0.0, rank=part.name.rank))

    # ------------------------------------------------------------------------------- routers

    async def report_router(self, part: RouterPart) -> None:
        """Ask for reports until the part's life is over."""
        while self._parts.holds(part):
            acked = self._acked(part.source, part.info.incarnation)
            try:
                async with asyncio.timeout(self._limits.call_timeout_s):
                    report = await part.port.report(acked)
            except (TimeoutError, MoeServeError) as error:
                await self._router_silent(part, f"no report: {_words(error)}")
            else:
                await self._router_reported(part, report)
            await asyncio.sleep(self._limits.report_s)

    async def _router_reported(self, part: RouterPart, report: RouterReport) -> None:
        now_s = self._clock.now_s()
        part.heard_s = now_s
        part.report = report
        name = part.name.place
        if self._router_heard is not None:
            self._router_heard(name, part.name.incarnation)
        if part.silent:
            # Registers again first: what it said before no longer counts.
            part.silent = False
            part.applied = part.quiesced = -1
            await self._post(RouterJoined(at_s=0.0, router=name, incarnation=part.name.incarnation))
        for demand in report.reports:
            part.source = demand.source
            self._folder.add_demand(demand, now_s)
        self._folder.set_queued(name, report.queued_key, report.queued_pairs)
        if report.stages is not None:
            self._stages.add(name, report.incarnation, report.stages, now_s)
        if self._listener is not None:
            self._listener.router_told(report)
        self._check_term(report.applied_term)
        ours = report.applied_term in (0, self._term)
        if ours and report.applied_epoch > part.applied:
            part.applied = report.applied_epoch
            await self._post(TableApplied(at_s=0.0, router=name, epoch=part.applied))
        if ours and report.quiesced_epoch > part.quiesced:
            part.quiesced = report.quiesced_epoch
            await self._post(TableQuiesced(at_s=0.0, router=name, epoch=part.quiesced))
        await self._avoided(part, report)
        if report.stopped:
            # Whoever told it so may have died since, or have been told not to wait.
            await self._lose_router(part, "it was told to stop and has")

    async def _lose_router(self, part: RouterPart, why: str) -> None:
        """The router is gone, or as good as gone: it is to be replaced."""
        if self._parts.holds(part):
            self._parts.drop(part)
            self._host.farewell(part)
            await self._post(RouterLeft(at_s=0.0, router=part.name.place, reason=why, gone=True))

    async def _avoided(self, part: RouterPart, report: RouterReport) -> None:
        """A router began to avoid a shard: suspect, or lost where the fleet says so."""
        now = frozenset((rank, life) for rank, life, _ in report.suspects)
        fresh = now - part.suspects
        part.suspects = now
        for rank, life, why in report.suspects:
            shard = self._parts.shards.get(rank)
            known = shard is not None and shard.info.address.incarnation == life
            if shard is not None and known and (rank, life) in fresh:
                await self._avoided_shard(shard, f"{part.name.place}: {why}")

    async def _avoided_shard(self, shard: ShardPart, why: str) -> None:
        if await self._alive(shard):
            await self.suspect(shard, why)
        else:
            await self.lose_shard(shard, f"the actor is gone ({why})")

    async def _router_silent(self, part: RouterPart, why: str) -> None:
        if not self._parts.holds(part):
            return
        silent_s = self._clock.now_s() - part.heard_s
        gone = silent_s > HUNG_ROUTER_S or not await self._alive(part)
        if gone:
            await self._lose_router(part, why)
        elif silent_s > self._config.router_silence_s and not part.silent:
            part.silent = True
            await self._post(RouterLeft(at_s=0.0, router=part.name.place, reason=why, gone=False))

    # ------------------------------------------------------------------------------- both

    def _acked(self, source: str, incarnation: int) -> int:
        return self._folder.acked_seq(source, incarnation) if source else FIRST_ACK

    def _check_term(self, term: int) -> None:
        if term > self._term:
            self._fenced(StaleTerm(f"a part has seen term {term}", term=term))

    async def _alive(self, part: AnyPart) -> bool:
        """The fleet's word; while it gives none, a part counts as alive."""
        try:
            async with asyncio.timeout(self._limits.call_timeout_s):
                return await self._fleet.alive(str(part.name))
        except (TimeoutError, MoeServeError):
            return True


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, MoeServeError) else "it took too long"
