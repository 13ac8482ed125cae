"""What a simulated controller has to do with parts: commands in order, tables until they are kept,
polls and probes.

Responsible for messages and silences becoming events. Decides nothing about them. Owned by one life
of the controller, and ends with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from placement.load import HotnessReport
from placement.messages import events as ev
from placement.messages.effects import (
    AnyCommand,
    CopyExpert,
    ReleaseSlot,
    SetRankSlots,
    ShardCommand,
    VerifyExpert,
)
from placement.messages.events import ShardAnswer
from placement.messages.history import RouterHeard
from placement.roles.shard import TermRefused
from placement.routing import RankAddress, RoutingTable
from placement.sim.demand import RouterReport
from placement.sim.network import Part
from placement.sim.router import SimRouter
from placement.sim.shard import SimShard

if TYPE_CHECKING:
    from placement.sim.controller import SimController

_T = TypeVar("_T")
REPUBLISH_S = 0.3
"""Wait before a part that did not take the table is sent it again."""
HUNG_ROUTER_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class ShardReport:
    """Answer of a shard to a poll."""

    highest_term: int
    busy: bool
    hotness: HotnessReport


@dataclass(slots=True, eq=False)
class Line:
    """Commands to one life of a shard, in order: one that is answered at once is waited for."""

    queue: deque[ShardCommand] = field(default_factory=deque)
    waits: bool = False


@dataclass(slots=True, eq=False)
class Known:
    """A part as the controller knows it. order: of the table it keeps. heard_s: when it last
    answered."""

    part: Part
    heard_s: float
    order: tuple[int, int] = (0, 0)
    line: Line = field(default_factory=Line)
    suspected: bool = False
    silent: bool = False
    applied: int = -1
    quiesced: int = -1
    progress_s: float = 0.0
    busy: bool = False
    suspects: frozenset[tuple[int, int]] = frozenset()


class Liaison:
    """See the module's text. `shards` by rank, `routers` by name: the lives that count."""

    def __init__(self, controller: SimController) -> None:
        self._boss = controller
        self._stage = controller.stage
        self.shards: dict[int, Known] = {}
        self.routers: dict[str, Known] = {}

    # -- parts -------------------------------------------------------------------------------------

    def welcome_shard(self, shard: SimShard) -> None:
        """A shard answers from now on: it obeys this term, tells what it holds, and is kept
        supplied."""
        try:
            resident = shard.slots.inventory(self._boss.term)
        except TermRefused:
            self._boss.fenced()
            return
        known = Known(shard, self._now_s, progress_s=self._now_s)
        self.shards[shard.rank] = known
        spec = self._stage.topology.ranks[shard.rank]
        self._boss.feed(
            ev.RankJoined(
                at_s=0.0,
                rank=shard.rank,
                node=spec.node,
                failure_domain=spec.failure_domain,
                profile=spec.profile,
                num_slots=shard.slots.ledger.num_slots,
                address=RankAddress(
                    rank=shard.rank,
                    node=spec.node,
                    address=f"sim://{shard.who}",
                    incarnation=shard.life,
                ),
                resident=resident,
            )
        )
        self._send_table(known)
        self._later(self._stage.delays.report_s, lambda: self._poll_shard(known))
        self._later(self._stage.delays.probe_s, lambda: self._probe(known))

    def welcome_router(self, router: SimRouter) -> None:
        """A router answers from now on: in the acknowledging set before it gets a table."""
        known = Known(router, self._now_s)
        self.routers[router.place] = known
        self._boss.feed(ev.RouterJoined(at_s=0.0, router=router.place, incarnation=router.life))
        self._send_table(known)
        self._later(self._stage.delays.report_s, lambda: self._poll_router(known))

    def drop_shard(self, rank: int) -> None:
        """That rank's life counts no more."""
        self.shards.pop(rank, None)

    def drop_router(self, name: str) -> None:
        """That router's life counts no more."""
        self.routers.pop(name, None)

    def _holds(self, known: Known) -> bool:
        part = known.part
        if isinstance(part, SimShard):
            return self.shards.get(part.rank) is known
        return self.routers.get(part.place) is known

    @property
    def _now_s(self) -> float:
        return self._stage.clock.now_s

    def _later(self, mean_s: float, action: Callable[[], None]) -> None:
        self._boss.after(self._stage.dice.around(mean_s), action)

    def _call(
        self,
        part: Part,
        work: Callable[[Callable[[_T], None]], None],
        done: Callable[[_T], None],
        failed: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """Have the part do work, which replies once or later. Exactly one of `done` and `failed`
        follows, unless this life ends."""
        open_now = [True]

        def over() -> bool:
            was, open_now[0] = open_now[0], False
            return was

        def came(reply: _T) -> None:
            if over():
                timer.cancel()
                done(reply)

        def late() -> None:
            if over():
                failed()

        network, boss = self._stage.network, self._boss
        timer = boss.after(timeout_s, late)
        network.send(
            boss,
            part,
            lambda: work(lambda reply: network.send(part, boss, lambda: came(reply))),
        )

    # -- commands ----------------------------------------------------------------------------------

    def submit(self, command: AnyCommand) -> None:
        """Hand a command over to its shard, after those before it."""
        assert isinstance(command, ShardCommand), f"{type(command).__name__} is for no shard"
        known = self.shards.get(command.rank)
        if known is None or known.part.life != command.incarnation:
            self._later(0.001, lambda: self._failed(command, "that incarnation is gone"))
            return
        known.line.queue.append(command)
        self._pump(known)

    def _pump(self, known: Known) -> None:
        line = known.line
        while line.queue and not line.waits:
            command = line.queue.popleft()
            line.waits = not isinstance(command, CopyExpert | VerifyExpert | ReleaseSlot)
            self._run(known, command)

    def _run(self, known: Known, command: ShardCommand) -> None:
        shard = known.part
        assert isinstance(shard, SimShard), "commands go to shards"
        delays, waits = self._stage.delays, known.line.waits
        limit_s = 2 * delays.call_timeout_s
        if isinstance(command, CopyExpert):
            limit_s += command.timeout_s

        def next_one() -> None:
            if waits:
                known.line.waits = False
                self._pump(known)

        def done(reply: ShardAnswer | TermRefused) -> None:
            if isinstance(reply, TermRefused):
                self._boss.fenced()
                return
            self._boss.feed(reply)
            next_one()

        def failed() -> None:
            self._stage.coverage.refused("step.io")
            self._failed(command, "no answer")
            next_one()

        def work(reply: Callable[[ShardAnswer | TermRefused], None]) -> None:
            shard.execute(self._boss.term, command, reply)

        self._call(shard, work, done, failed, limit_s)

    def _failed(self, command: ShardCommand, detail: str) -> None:
        step_id = -1 if isinstance(command, SetRankSlots) else command.step_id
        self._boss.feed(ev.StepFailed(at_s=0.0, step_id=step_id, code="io", detail=detail))

    # -- tables ------------------------------------------------------------------------------------

    def publish(self, table: RoutingTable) -> None:
        """Send the table to every part, until it is kept."""
        del table  # it is the newest one of the controller
        for known in [*self.routers.values(), *self.shards.values()]:
            self._send_table(known)

    def _send_table(self, known: Known) -> None:
        table = self._boss.table
        if table is None or not self._holds(known) or known.order >= table.order:
            return
        part = known.part
        assert isinstance(part, SimShard | SimRouter), "only they keep tables"

        def done(epoch: int) -> None:
            if epoch < 0:
                self._boss.fenced()
                return
            known.order = max(known.order, table.order)
            if isinstance(part, SimRouter) and epoch > known.applied and not known.silent:
                known.applied = epoch
                self._boss.feed(ev.TableApplied(at_s=0.0, router=part.place, epoch=epoch))

        suspects = [r for r, k in self.shards.items() if k.suspected]

        def work(reply: Callable[[int], None]) -> None:
            if isinstance(part, SimRouter):
                part.install(table, reply, suspects)
            else:
                part.install(table, reply)

        self._call(
            part,
            work,
            done,
            lambda: self._later(REPUBLISH_S, lambda: self._send_table(known)),
            self._stage.delays.call_timeout_s,
        )

    # -- polls and probes --------------------------------------------------------------------------

    def _poll_shard(self, known: Known) -> None:
        if not self._holds(known):
            return
        shard = known.part
        assert isinstance(shard, SimShard), "a shard is polled"

        def work(reply: Callable[[ShardReport], None]) -> None:
            reply(ShardReport(shard.slots.highest_term, shard.compute.busy, shard.compute.report()))

        def done(report: ShardReport) -> None:
            known.heard_s, known.busy = self._now_s, report.busy
            if report.highest_term > self._boss.term:
                self._boss.fenced()
            elif self._boss.folder.add_hotness(report.hotness, self._now_s):
                known.progress_s = self._now_s

        self._call(
            shard, work, done, lambda: self._no_answer(known), self._stage.delays.call_timeout_s
        )
        self._later(self._stage.delays.report_s, lambda: self._poll_shard(known))

    def _probe(self, known: Known) -> None:
        """A row through queue and compute thread."""
        if not self._holds(known):
            return
        shard = known.part
        assert isinstance(shard, SimShard), "a shard is probed"

        def work(reply: Callable[[None], None]) -> None:
            shard.compute.probe(lambda: reply(None))

        def done(_reply: None) -> None:
            known.heard_s = self._now_s
            self._clear(known)

        self._call(
            shard, work, done, lambda: self._no_answer(known), self._stage.delays.call_timeout_s
        )
        self._later(self._stage.delays.probe_s, lambda: self._probe(known))

    def _explained(self, known: Known) -> bool:
        silence_s = self._stage.config.rank_silence_s
        fresh = self._now_s - known.heard_s < silence_s
        return known.busy and fresh and self._now_s - known.progress_s < silence_s

    def _no_answer(self, known: Known) -> None:
        if not self._holds(known):
            return
        if not known.part.alive:
            self._lose_shard(known)
        elif not self._explained(known) and not known.suspected:
            known.suspected = True
            shard = known.part
            assert isinstance(shard, SimShard), "ranks are suspected"
            self._boss.feed(ev.RankSuspected(at_s=0.0, rank=shard.rank, reason="no answer"))

    def _clear(self, known: Known) -> None:
        if known.suspected and self._holds(known):
            known.suspected = False
            shard = known.part
            assert isinstance(shard, SimShard), "ranks are cleared"
            self._boss.feed(ev.RankCleared(at_s=0.0, rank=shard.rank))

    def _lose_shard(self, known: Known) -> None:
        shard = known.part
        assert isinstance(shard, SimShard), "ranks are lost"
        del self.shards[shard.rank]
        self._boss.folder.forget(shard.place)
        why = "the process is gone"
        self._boss.feed(ev.RankLost(at_s=0.0, rank=shard.rank, incarnation=shard.life, reason=why))

    def _poll_router(self, known: Known) -> None:
        if not self._holds(known):
            return
        router = known.part
        assert isinstance(router, SimRouter), "a router is polled"
        folder = self._boss.folder
        acked = folder.acked_seq(router.place, router.life)

        def work(reply: Callable[[RouterReport], None]) -> None:
            reply(router.report(acked, router.jump_s))

        self._call(
            router,
            work,
            lambda report: self._router_reported(known, report),
            lambda: self._router_silent(known),
            self._stage.delays.call_timeout_s,
        )
        self._later(self._stage.delays.report_s, lambda: self._poll_router(known))

    def _router_reported(self, known: Known, report: RouterReport) -> None:
        name, life = known.part.place, known.part.life
        if not self._holds(known):
            return
        known.heard_s = self._now_s
        if report.highest_term > self._boss.term:
            self._boss.fenced()
            return
        self._stage.note(RouterHeard, self._boss.who, term=self._boss.term, life=known.part.who)
        if known.silent:
            known.silent = False
            known.applied = known.quiesced = -1
            self._boss.feed(ev.RouterJoined(at_s=0.0, router=name, incarnation=life))
        for demand in report.reports:
            self._boss.folder.add_demand(demand, self._now_s)
        ours = report.term == self._boss.term
        if ours and report.applied > known.applied:
            known.applied = report.applied
            self._boss.feed(ev.TableApplied(at_s=0.0, router=name, epoch=report.applied))
        if ours and report.quiesced > known.quiesced:
            known.quiesced = report.quiesced
            self._boss.feed(ev.TableQuiesced(at_s=0.0, router=name, epoch=report.quiesced))
        self._avoided(known, report)

    def _avoided(self, known: Known, report: RouterReport) -> None:
        now = frozenset((rank, life) for rank, life, _ in report.suspects)
        fresh, known.suspects = now - known.suspects, now
        for rank, life in sorted(fresh):
            shard = self.shards.get(rank)
            if shard is not None and shard.part.life == life:
                self._no_answer(shard)

    def _router_silent(self, known: Known) -> None:
        if not self._holds(known):
            return
        name = known.part.place
        silent_s = self._now_s - known.heard_s
        if not known.part.alive or silent_s > HUNG_ROUTER_S:
            del self.routers[name]
            self._boss.folder.forget(name)
            left = ev.RouterLeft(at_s=0.0, router=name, reason="no report", gone=True)
            self._boss.feed(left)
        elif silent_s > self._stage.config.router_silence_s and not known.silent:
            known.silent = True
            left = ev.RouterLeft(at_s=0.0, router=name, reason="no report", gone=False)
            self._boss.feed(left)
