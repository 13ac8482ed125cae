"""Carries out the engine's commands: shard commands, tables, targets, replacements.

Responsible for sending, for the order of commands to one shard, and for turning answers and
failures into events. Must never decide. Called by the driver.

Commands to one shard are handed over in order. One that is answered at once is waited for before
the next; a copy, a proof or a release may take long, so the next (its abort, say) does not wait for
its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from moe_serve.controller.parts import PartTable, ShardPart
from moe_serve.controller.publisher import Publisher
from moe_serve.controller.tasks import Tasks
from moe_serve.errors import MoeServeError, StaleTerm
from placement.config import RebalanceConfig
from placement.engine import compute_target
from placement.messages.effects import (
    AnyCommand,
    ComputeTarget,
    CopyExpert,
    EndRank,
    ReleaseSlot,
    ReplaceRank,
    ReplaceRouter,
    SetRankSlots,
    ShardCommand,
    VerifyExpert,
)
from placement.messages.events import AnyEvent, StepFailed
from placement.routing import RoutingTable

NO_STEP = -1
"""Step of commands that belong to none; the engine ignores its failure and asks again."""
COMMANDS_MAX = 4096
"""Commands to one shard that may be open, queued or unanswered: more than the engine's waves ask
for of a healthy one. Beyond it they fail, and the engine decides what to do."""


class PartMaker(Protocol):
    """Who creates parts."""

    def replace_shard(self, rank: int, lost_incarnation: int) -> None:
        """Create a new shard for a rank, ending the lost one."""
        ...

    def end_shard(self, rank: int) -> None:
        """End a rank's shard and create none."""
        ...

    def replace_router(self, router: str) -> None:
        """Create a new router, ending the lost one."""
        ...


@dataclass(slots=True, eq=False)
class _Line:
    """Commands to one life of one shard, in order. `open`: those without an answer yet."""

    queue: asyncio.Queue[ShardCommand | None]
    open: int = 0


class CommandExecutor:
    """`driver.Executor` over the parts of one life. `solved`: told the policy of each target that
    was computed, or could not be, and the seconds it took."""

    def __init__(  # noqa: PLR0913  # it meets parts, publisher and driver
        self,
        term: int,
        config: RebalanceConfig,
        *,
        parts: PartTable,
        publisher: Publisher,
        maker: PartMaker,
        tasks: Tasks,
        post: Callable[[AnyEvent], Awaitable[None]],
        fenced: Callable[[StaleTerm], None],
        solved: Callable[[str, float], None] = lambda _policy, _seconds: None,
        commands_max: int = COMMANDS_MAX,
    ) -> None:
        self._term = term
        self._config = config
        self._parts = parts
        self._publisher = publisher
        self._maker = maker
        self._tasks = tasks
        self._post = post
        self._fenced = fenced
        self._solved = solved
        self._commands_max = commands_max
        self._lines: dict[ShardPart, _Line] = {}

    def publish(self, table: RoutingTable) -> None:
        """See `driver.Executor`."""
        self._publisher.publish(table)

    def start(self, command: AnyCommand) -> None:
        """See `driver.Executor`."""
        if isinstance(command, ComputeTarget):
            self._tasks.spawn(self._compute(command))
        elif isinstance(command, ReplaceRank):
            self._maker.replace_shard(command.rank, command.lost_incarnation)
        elif isinstance(command, EndRank):
            self._maker.end_shard(command.rank)
        elif isinstance(command, ReplaceRouter):
            self._maker.replace_router(command.router)
        else:
            assert isinstance(command, ShardCommand), f"{type(command).__name__} has no executor"
            self._enqueue(command)

    async def _compute(self, command: ComputeTarget) -> None:
        began_s = time.monotonic()
        answer = await asyncio.to_thread(compute_target, command, self._config)
        self._solved(command.policy, time.monotonic() - began_s)
        await self._post(answer)

    def _enqueue(self, command: ShardCommand) -> None:
        part = self._parts.shards.get(command.rank)
        if part is None or part.info.address.incarnation != command.incarnation:
            self._tasks.spawn(self._failed(command, "that incarnation of the rank is gone"))
            return
        line = self._lines.get(part)
        if line is None:
            line = self._lines[part] = _Line(asyncio.Queue())
            self._tasks.spawn(self._serve(part, line))
        if line.open >= self._commands_max:
            full = f"{line.open} commands to the rank are open already"
            self._tasks.spawn(self._failed(command, full))
            return
        line.open += 1
        line.queue.put_nowait(command)

    def forget(self, part: ShardPart) -> None:
        """The shard's life is over: what is queued for it is handed over, then its queue ends."""
        line = self._lines.pop(part, None)
        if line is not None:
            line.queue.put_nowait(None)

    async def _serve(self, part: ShardPart, line: _Line) -> None:
        while (command := await line.queue.get()) is not None:
            if isinstance(command, CopyExpert | VerifyExpert | ReleaseSlot):
                self._tasks.spawn(self._run(part, line, command))
                await asyncio.sleep(0)  # lets the call go out before the next one
            else:
                await self._run(part, line, command)

    async def _run(self, part: ShardPart, line: _Line, command: ShardCommand) -> None:
        try:
            answer = await part.port.execute(self._term, command)
        except StaleTerm as error:
            self._fenced(error)
        except MoeServeError as error:
            await self._failed(command, error.message)
        else:
            await self._post(answer)
        finally:
            line.open -= 1

    async def _failed(self, command: ShardCommand, detail: str) -> None:
        step_id = NO_STEP if isinstance(command, SetRankSlots) else command.step_id
        await self._post(StepFailed(at_s=0.0, step_id=step_id, code="io", detail=detail))
