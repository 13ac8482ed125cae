"""The Ray side of a shard: an actor class that turns calls into method calls, and the controller's
port to it.

Responsible for bytes in, bytes out, and for mapping Ray's errors to ours. Must never decide:
everything that can be wrong lies in `assembly` and below. Called by bootstrap, which makes actors
of `remote_shard_actor()`.

A threaded actor: commands block in their group while others are answered. Errors cross as values
(`Outcome`): Ray's pickling would lose the fields of ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from moe_serve.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    MoeServeError,
    ResourceExhausted,
    StaleTerm,
    Unavailable,
)
from moe_serve.ports import ShardInfo, ShardReport
from moe_serve.shard.assembly import Shard, open_shard
from moe_serve.shard.executed import LedgerEntry
from moe_serve.shard.faults import FaultPoints
from moe_serve.shard.settings import ShardSettings
from moe_serve.telemetry.sink import actor_lines
from moe_serve.wire.control_codec import decode_table
from placement.messages.codec import decode_command, decode_event, encode
from placement.messages.effects import AbortAdd, CopyExpert, ReleaseSlot, ShardCommand, VerifyExpert
from placement.messages.events import ShardAnswer
from placement.routing import RoutingTable

CONCURRENCY_GROUPS: Final = MappingProxyType({"ctl": 4, "copy": 8, "abort": 2, "probe": 2})
"""Threads: `ctl` answers at once (describe, report, tables, reserve), `copy` may take long (copy,
verify, release). An `abort` waits for the copy that it ends, possibly for seconds, and must not
wait behind eight of them. A `probe` waits for the compute thread, so it takes no thread of theirs:
a table must get through where a probe does not."""

SHARD_ENV_VARS: Final = MappingProxyType(
    {
        # One BLAS thread an actor: on shared cores a second one spins and costs 2 to 15 times.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Message buffers stay mapped and are reused: without this each large message faults in its
        # pages anew, which measured three to five times slower. Weights do not come from malloc, so
        # they are still given back.
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
        "MALLOC_TOP_PAD_": "67108864",
        "MALLOC_ARENA_MAX": "1",
    }
)
"""`env_vars` of the actor's runtime environment. They must be there when the process starts."""

_T = TypeVar("_T")
_ERRORS: Final = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (Unavailable, FailedPrecondition, DeadlineExceeded, ResourceExhausted)
    }
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave: `value`, or the name and text of an error; `term` where it is StaleTerm."""

    value: Any = None
    error: str = ""
    message: str = ""
    term: int = 0

    def unwrap(self) -> Any:
        """The value, or the error raised."""
        if not self.error:
            return self.value
        if self.error == StaleTerm.__name__:
            raise StaleTerm(self.message, term=self.term)
        raise _ERRORS.get(self.error, Unavailable)(self.message)


def outcome_of(error: MoeServeError) -> Outcome:
    """An error as a value."""
    term = error.term if isinstance(error, StaleTerm) else 0
    return Outcome(error=type(error).__name__, message=error.message, term=term)


class ShardActor:
    """One rank's shard in a process of its own. The constructor returns once the shard serves."""

    def __init__(self, settings: ShardSettings) -> None:
        self._name = f"shard {settings.rank}.{settings.incarnation}"
        actor_lines(part=f"shard-{settings.rank}", incarnation=settings.incarnation)
        self._shard: Shard = open_shard(settings)
        self._shard.start()

    def __repr__(self) -> str:
        return self._name

    @ray.method(concurrency_group="ctl")
    def describe(self) -> ShardInfo:
        """See `ShardPort.describe`."""
        return self._shard.describe()

    @ray.method(concurrency_group="ctl")
    def fence(self, term: int) -> Outcome:
        """See `ShardPort.fence`; `value` is the ShardInfo."""
        try:
            return Outcome(self._shard.fence(term))
        except MoeServeError as error:
            return outcome_of(error)

    @ray.method(concurrency_group="ctl")
    def execute(self, term: int, command: bytes) -> Outcome:
        """Run a command that is answered at once; see `ShardPort.execute`. `value` is the event's
        bytes."""
        return self._execute(term, command)

    @ray.method(concurrency_group="copy")
    def execute_long(self, term: int, command: bytes) -> Outcome:
        """The same for commands that may take long."""
        return self._execute(term, command)

    @ray.method(concurrency_group="abort")
    def execute_abort(self, term: int, command: bytes) -> Outcome:
        """The same for AbortAdd."""
        return self._execute(term, command)

    @ray.method(concurrency_group="ctl")
    def install_table(self, table: bytes) -> Outcome:
        """See `ShardPort.install_table`; `value` is the epoch."""
        try:
            return Outcome(self._shard.install_table(decode_table(table)))
        except MoeServeError as error:
            return outcome_of(error)

    @ray.method(concurrency_group="ctl")
    def report(self, acked_seq: int) -> ShardReport:
        """See `ShardPort.report`."""
        return self._shard.report(acked_seq)

    @ray.method(concurrency_group="probe")
    def probe(self) -> Outcome:
        """See `ShardPort.probe`; `value` is seconds."""
        try:
            return Outcome(self._shard.probe())
        except MoeServeError as error:
            return outcome_of(error)

    @ray.method(concurrency_group="ctl")
    def order_faults(self, points: FaultPoints) -> None:
        """For tests: the faults that are due from here on."""
        self._shard.order_faults(points)

    @ray.method(concurrency_group="ctl")
    def take_ledger(self) -> tuple[LedgerEntry, ...]:
        """Executed contributions since the last take; empty where the ledger is off."""
        return self._shard.take_ledger()

    @ray.method(concurrency_group="ctl")
    def stop(self) -> None:
        """End every thread; the process is ended by whoever started it."""
        self._shard.stop()

    def _execute(self, term: int, command: bytes) -> Outcome:
        parsed = decode_command(command)
        assert isinstance(parsed, ShardCommand), f"{type(parsed).__name__} is no shard command"
        try:
            return Outcome(encode(self._shard.execute(term, parsed)))
        except MoeServeError as error:
            return outcome_of(error)


def remote_shard_actor() -> Any:
    """The actor class: threaded, never restarted by Ray (a restart would lose the weights under the
    same name), calls never repeated by Ray. Resources, name, labels and `runtime_env` (with
    SHARD_ENV_VARS) are given by `.options(...)`.
    """
    # Ray takes concurrency groups here only, not in `.options`; its stub does not know them.
    options: dict[str, Any] = {
        "concurrency_groups": dict(CONCURRENCY_GROUPS),
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    return ray.remote(**options)(ShardActor)


class RayShardPort:
    """`ShardPort` over the handle of a ShardActor. `timeout_s` bounds every call but copies, which
    bring their own."""

    def __init__(self, handle: Any, timeout_s: float = 10.0) -> None:
        self._handle = handle
        self._timeout_s = timeout_s

    @property
    def handle(self) -> Any:
        """The actor handle."""
        return self._handle

    async def describe(self) -> ShardInfo:
        """Identity, inventory, budgets. Raises Unavailable."""
        return await self._wait(self._handle.describe.remote(), self._timeout_s)

    async def fence(self, term: int) -> ShardInfo:
        """Refuse lower terms from here on, and describe. Raises StaleTerm, Unavailable."""
        outcome: Outcome = await self._wait(self._handle.fence.remote(term), self._timeout_s)
        info = outcome.unwrap()
        assert isinstance(info, ShardInfo), f"{type(info).__name__} describes no shard"
        return info

    async def execute(self, term: int, command: ShardCommand) -> ShardAnswer:
        """Run one placement command. Raises StaleTerm, Unavailable, FailedPrecondition."""
        data = encode(command)
        if isinstance(command, CopyExpert | VerifyExpert | ReleaseSlot):
            reference = self._handle.execute_long.remote(term, data)
        elif isinstance(command, AbortAdd):
            reference = self._handle.execute_abort.remote(term, data)
        else:
            reference = self._handle.execute.remote(term, data)
        extra_s = command.timeout_s if isinstance(command, CopyExpert) else 0.0
        outcome: Outcome = await self._wait(reference, self._timeout_s + extra_s)
        answer = decode_event(outcome.unwrap())
        assert isinstance(answer, ShardAnswer), f"{type(answer).__name__} answers no command"
        return answer

    async def install_table(self, table: RoutingTable) -> int:
        """Keep the table if it is newer. Returns the newest epoch held. Raises StaleTerm,
        Unavailable."""
        outcome: Outcome = await self._wait(
            self._handle.install_table.remote(encode(table)), self._timeout_s
        )
        return int(outcome.unwrap())

    async def report(self, acked_seq: int) -> ShardReport:
        """Reports after `acked_seq`. Raises Unavailable."""
        return await self._wait(self._handle.report.remote(acked_seq), self._timeout_s)

    async def probe(self) -> float:
        """Seconds of one probe row. Raises Unavailable."""
        outcome: Outcome = await self._wait(self._handle.probe.remote(), self._timeout_s)
        return float(outcome.unwrap())

    async def take_ledger(self) -> tuple[LedgerEntry, ...]:
        """Executed contributions since the last take. Raises Unavailable."""
        return await self._wait(self._handle.take_ledger.remote(), self._timeout_s)

    async def _wait(self, reference: Awaitable[_T], timeout_s: float) -> _T:
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError as error:
            raise Unavailable(f"the shard did not answer within {timeout_s:g} s") from error
        except RayActorError as error:
            raise Unavailable(f"the shard is gone: {type(error).__name__}") from error
        except RayError as error:
            raise Unavailable(f"the shard failed: {type(error).__name__}") from error
