"""Looking after parts: what starts when one is welcomed, and the loops over nodes and windows.

Responsible for evacuating draining nodes and for closing load windows on time. Must never decide
what an event means. Made by the life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from moe_serve.controller.clock import DriverClock
from moe_serve.controller.parts import AnyPart, PartTable, ShardPart
from moe_serve.controller.polls import Polls
from moe_serve.controller.publisher import Publisher
from moe_serve.controller.settings import SupervisionLimits
from moe_serve.controller.tasks import Tasks
from moe_serve.errors import FailedPrecondition, MoeServeError, ResourceExhausted
from moe_serve.ports import Fleet, NodeInfo
from placement.engine.state import RankState, RankStatus
from placement.load import LoadFolder
from placement.messages.effects import Answer
from placement.messages.events import (
    AnyEvent,
    DrainAsked,
    DrainCause,
    UndrainAsked,
    WindowClosed,
)

Ask = Callable[[Callable[[int], AnyEvent]], Awaitable[Answer]]


class Supervision:
    """Nursery of one life's parts. Set `polls` and `publisher` before the first welcome. `ranks`
    gives the engine's word on them: which rank is drained, and why, outlives this life there."""

    def __init__(  # noqa: PLR0913  # the nursery meets everything that a part meets
        self,
        fleet: Fleet,
        *,
        limits: SupervisionLimits,
        clock: DriverClock,
        parts: PartTable,
        folder: LoadFolder,
        tasks: Tasks,
        ranks: Callable[[], Sequence[RankState]],
        ask: Ask,
        forget: Callable[[ShardPart], None],
        ensure: Callable[[int], None],
    ) -> None:
        self._fleet = fleet
        self._limits = limits
        self._clock = clock
        self._parts = parts
        self._folder = folder
        self._tasks = tasks
        self._ranks = ranks
        self._ask = ask
        self._forget = forget
        self._ensure = ensure
        self._refused: set[tuple[int, int]] = set()
        """(rank, incarnation) of drains that were refused while their node wants to be empty."""
        self.polls: Polls | None = None
        self.publisher: Publisher | None = None

    def welcome(self, part: AnyPart) -> None:
        """Keep a part supplied with tables and ask it how it is."""
        assert self.polls is not None, "polls are not wired yet"
        assert self.publisher is not None, "the publisher is not wired yet"
        self.publisher.follow(part)
        if isinstance(part, ShardPart):
            self._folder.hold_ranks(part.name.rank + 1)
            self._tasks.spawn(self.polls.report_shard(part))
            self._tasks.spawn(self.polls.probe_shard(part))
        else:
            self._tasks.spawn(self.polls.report_router(part))

    def farewell(self, part: AnyPart) -> None:
        """A part's life is over: nothing waits for it any more."""
        assert self.publisher is not None, "not wired yet"
        if part.source:
            self._folder.forget(part.source)
        if isinstance(part, ShardPart):
            self._forget(part)
        self.publisher.gone()

    def suspects_changed(self) -> None:
        """A shard is suspected now, or not any more."""
        assert self.publisher is not None, "not wired yet"
        self.publisher.suspects_changed()

    async def watch_nodes(self) -> None:
        """Evacuate the ranks of draining nodes; let ranks that have left them hold replicas
        again."""
        while True:
            nodes = await self.nodes()
            leaving = {n.node for n in nodes if n.alive and n.draining_deadline_s is not None}
            if nodes:
                await self._follow(leaving)
            await asyncio.sleep(self._limits.nodes_s)

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """The cluster's nodes, () where it gives no answer: its head may be away, and what is known
        of parts stays."""
        try:
            async with asyncio.timeout(self._limits.call_timeout_s):
                return await self._fleet.nodes()
        except (TimeoutError, MoeServeError):
            return ()

    async def _follow(self, leaving: set[str]) -> None:
        """Make the engine's node drains those of `leaving`. A rank without a shard is left alone:
        the drain of its node ended with the shard."""
        self._refused &= {
            (r, p.name.incarnation) for r, p in self._parts.shards.items() if p.info.node in leaving
        }
        try:
            for rank, part in sorted(self._parts.shards.items()):
                state = self._ranks()[rank]
                wanted, drained = part.info.node in leaving, DrainCause.NODE in state.drained_by
                if wanted and not drained and state.status is RankStatus.LIVE:
                    await self._drain(rank, part.name.incarnation)
                elif drained and not wanted:
                    await self.undrain(rank, DrainCause.NODE)
        except (ResourceExhausted, FailedPrecondition):
            # Too many operators wait for an answer, or the disk is full: the next look asks again.
            return

    async def _drain(self, rank: int, incarnation: int) -> None:
        # A refusal leaves a record, and is asked again only once the node's state changes.
        if (rank, incarnation) not in self._refused:
            answer = await self._ask(partial(_drain, rank))
            if answer.code != "ok":
                self._refused.add((rank, incarnation))

    async def undrain(self, rank: int, cause: DrainCause = DrainCause.OPERATOR) -> Answer:
        """End one cause of a rank's drain; one that was lost while it drained gets a new shard."""
        answer = await self._ask(partial(_undrain, rank, cause))
        if answer.code == "ok":
            state = self._ranks()[rank]
            if not state.holds and not state.draining:
                self._ensure(rank)
        return answer

    async def close_windows(
        self, window_s: float, first_index: int, post: Callable[[AnyEvent], Awaitable[None]]
    ) -> None:
        """Close a load window every `window_s`. Numbers go on where the last controller's ended."""
        next_s = self._clock.now_s() + window_s
        while True:
            await asyncio.sleep(max(0.0, next_s - self._clock.now_s()))
            window = self._folder.close(self._clock.now_s())
            numbered = msgspec.structs.replace(window, index=first_index + window.index)
            await post(WindowClosed(at_s=0.0, window=numbered))
            next_s = max(next_s + window_s, self._clock.now_s())


def _drain(rank: int, request_id: int) -> AnyEvent:
    return DrainAsked(at_s=0.0, request_id=request_id, rank=rank, cause=DrainCause.NODE)


def _undrain(rank: int, cause: DrainCause, request_id: int) -> AnyEvent:
    return UndrainAsked(at_s=0.0, request_id=request_id, rank=rank, cause=cause)
