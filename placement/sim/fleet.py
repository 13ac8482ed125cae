"""Processes of a simulated world: which lives there are, who starts and ends them, who may command.

Responsible for what a cluster does: it starts parts when it is asked, ends the lives before them,
restarts a controller that died, and hands terms out once each. Decides nothing about placement.
Made by the world; called by controllers and by the nemesis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from placement.engine import EngineSnapshot, RebalanceEngine
from placement.engine.state import RankStatus
from placement.messages import events as ev
from placement.messages.effects import Effects, ReplaceRank
from placement.messages.events import AnyEvent
from placement.messages.history import Began, DemandUnsure, Died
from placement.roles.router_records import RouterRules
from placement.sim.controller import SimController
from placement.sim.journal import Image, JournalFull, Record, SimJournal
from placement.sim.network import Part
from placement.sim.router import SimRouter
from placement.sim.shard import SimShard
from placement.sim.stage import Stage

RESTART_S = 0.6
"""Seconds until the cluster has restarted a controller that died."""
DESCRIBE_S = 1.0
"""A part that cannot be reached for so long when a controller begins is given up."""
OnStep = Callable[[SimController, Effects], None]
Segment = tuple[EngineSnapshot, list[tuple[AnyEvent, Effects]]]


class Fleet:
    """See the module's text. `controllers`: all lives, oldest first."""

    def __init__(
        self,
        stage: Stage,
        rules: RouterRules,
        num_routers: int,
        on_step: OnStep,
        *,
        start_ranks: int,
    ) -> None:
        self.stage = stage
        self._first = msgspec.structs.replace(
            stage.topology, ranks=stage.topology.ranks[:start_ranks]
        )
        self.journal = SimJournal()
        self.controllers: list[SimController] = []
        self.router_names = [f"router{i}" for i in range(num_routers)]
        self._rules = rules
        self._on_step = on_step
        self._claimed = 0
        self._lives = 0
        self._beginning = 0
        """Number of the newest begin; an older one that has not begun is given up."""

    # -- beginnings ------------------------------------------------------------------------------

    def start(self) -> None:
        """A new service: a controller first, which then makes its parts."""
        self.begin_controller(journal=True)

    @property
    def controller(self) -> SimController | None:
        """The controller with the highest term, if it lives."""
        newest = self.controllers[-1] if self.controllers else None
        return newest if newest is not None and newest.alive else None

    def begin_controller(self, *, journal: bool) -> None:
        """Begin a controller now: journal, term, engine, then the parts that live. journal: False
        where it has none and starts from what the parts hold."""
        self._beginning += 1
        stage, clock = self.stage, self.stage.clock
        if not journal:
            self.journal = SimJournal()
            self.journal.epoch = max([0, *(c.engine.state.epoch for c in self.controllers)])
        image = self.journal.read()
        if image.torn:
            stage.coverage.refused("journal.torn")
        shards = [s for s in stage.shards.values() if s.alive]
        routers = [r for r in stage.routers.values() if r.alive]
        seen = [image.term, self._claimed]
        seen += [s.slots.highest_term for s in shards] + [r.role.highest_term for r in routers]
        self._claimed = term = 1 + max(seen)
        epochs = [image.epoch, *(s.slots.highest_epoch for s in shards)]
        epochs += [r.role.applied_epoch for r in routers]
        engine = self._engine(image, term, 1 + max(epochs), found=bool(shards))
        self.journal.open(term)
        controller = SimController(
            stage,
            engine,
            self.journal,
            replace_rank=self.replace_rank,
            end_rank=self.end_rank,
            replace_router=self.replace_router,
            on_end=self._ended,
            on_step=self._on_step,
        )
        self._note_unsure(controller)
        self.controllers.append(controller)
        stage.note(Began, controller.who, term=term, place="controller")
        controller.facts.recovered(journal=image.snapshot is not None, torn=image.torn)
        try:
            self.journal.write(term, Record(snapshot=engine.snapshot()), engine.state.epoch)
        except JournalFull:
            stage.coverage.refused("journal.full")
            controller.end("fault")  # it refuses to begin; the cluster tries again
            return
        until_s = clock.now_s + DESCRIBE_S
        self._meet(controller, sorted(stage.shards), list(self.router_names), until_s)

    def _engine(self, image: Image, term: int, first_epoch: int, *, found: bool) -> RebalanceEngine:
        stage = self.stage
        if image.snapshot is None:
            return RebalanceEngine(
                stage.spec,
                self._first,
                stage.config,
                term=term,
                first_epoch=first_epoch,
                start_s=stage.clock.now_s,
                paused=found,
            )
        return RebalanceEngine.restore(
            image.snapshot,
            image.transitions,
            term=term,
            first_epoch=first_epoch,
            start_s=stage.clock.now_s,
        )

    def _note_unsure(self, successor: SimController) -> None:
        """Demand at a change of controllers: the open window is lost, and what routers still hold
        may be counted a second time, or was pruned by the old one's word."""
        if not self.controllers:
            return
        kept: Counter[int] = Counter()
        for router in self.stage.routers.values():
            if router.alive:
                kept.update(router.demand.unreported())
        old = self.controllers[-1].folder.close(self.stage.clock.now_s)
        flat = old.demand.sum(axis=(0, 1)).reshape(-1)
        lost = kept + Counter({key: int(flat[key]) for key in flat.nonzero()[0].tolist()})
        self.stage.note(
            DemandUnsure,
            successor.who,
            lost=tuple(sorted(lost.items())),
            twice=tuple(sorted(kept.items())),
        )

    def _meet(
        self, boss: SimController, ranks: list[int], routers: list[str], until_s: float
    ) -> None:
        """Adopt the parts that can be reached; wait a while for the others, then replace them."""
        stage, network = self.stage, self.stage.network
        late_ranks, late_routers = [], []
        for rank in ranks:
            shard = stage.shards[rank]
            if _removed(boss, rank):
                self.kill(shard, "left")
            elif shard.alive and _answers(shard) and network.reaches(boss, shard):
                boss.liaison.welcome_shard(shard)
            elif shard.alive:
                late_ranks.append(rank)
        for name in routers:
            router = stage.routers.get(name)
            if router is None or not router.alive:
                continue
            if _answers(router) and network.reaches(boss, router):
                boss.liaison.welcome_router(router)
            else:
                late_routers.append(name)
        waits = bool(late_ranks or late_routers) and stage.clock.now_s < until_s
        if waits:
            boss.after(0.1, lambda: self._meet(boss, late_ranks, late_routers, until_s))
        else:
            self._tell_gone(boss)

    def _tell_gone(self, boss: SimController) -> None:
        """Parts that nobody found are lost; places without a part get one."""
        for rank in list(boss.engine.state.ranks):
            if rank.rank in boss.liaison.shards:
                continue
            if rank.status == "restored":
                why = "not found when the controller restarted"
                life = rank.incarnation
                boss.feed(ev.RankLost(at_s=0.0, rank=rank.rank, incarnation=life, reason=why))
            elif not rank.draining and rank.rank < len(self.stage.topology.ranks):
                self.replace_rank(boss, ReplaceRank(rank=rank.rank, lost_incarnation=-1))
        known = boss.engine.state.routers
        for name in self.router_names:
            if name in boss.liaison.routers:
                continue
            if name in known:
                why = "not found when the controller restarted"
                boss.feed(ev.RouterLeft(at_s=0.0, router=name, reason=why, gone=True))
            else:
                self.replace_router(boss, name)

    def _ended(self, controller: SimController, cause: str) -> None:
        self.stage.note(Died, controller.who, term=controller.term, cause=cause)
        if controller is self.controllers[-1]:
            self.restart_later()

    def restart_later(self) -> None:
        """The cluster restarts the controller after a while, unless another has begun by then."""
        self._beginning += 1
        number = self._beginning

        def begin() -> None:
            if number == self._beginning:
                self.begin_controller(journal=True)

        self.stage.clock.after(self.stage.dice.around(RESTART_S), begin)

    # -- parts -----------------------------------------------------------------------------------

    def replace_rank(self, boss: SimController, command: ReplaceRank) -> None:
        """End the lost life of a rank and start a new one."""
        known = boss.liaison.shards.get(command.rank)
        if known is not None and known.part.life > command.lost_incarnation:
            return
        boss.liaison.drop_shard(command.rank)
        start_s = self.stage.dice.around(self.stage.delays.start_s)
        boss.after(start_s, lambda: self._make(boss, command.rank))

    def end_rank(self, boss: SimController, rank: int) -> None:
        """End the life of a rank that has left; there is none after it."""
        boss.liaison.drop_shard(rank)
        shard = self.stage.shards.get(rank)

        def end() -> None:
            # Unless it was wanted again meanwhile, and has another life.
            if shard is not None and rank not in boss.liaison.shards:
                self.kill(shard, "left")

        boss.after(self.stage.dice.around(self.stage.delays.network_s), end)

    def _make(self, boss: SimController, rank: int) -> None:
        if rank in boss.liaison.shards or _removed(boss, rank) or self._taken_over(boss):
            return
        old = self.stage.shards.get(rank)
        if old is not None and old.alive:
            self.kill(old, "replaced")
        self._lives += 1
        num_slots = self.stage.topology.ranks[rank].num_slots
        shard = SimShard(self.stage, rank, self._lives, num_slots)
        self.stage.shards[rank] = shard
        self.stage.note(Began, shard.who, place=shard.place)
        boss.liaison.welcome_shard(shard)

    def ensure_rank(self, boss: SimController, rank: int) -> None:
        """A rank without a life, that may hold replicas again, gets one."""
        state = boss.engine.state.ranks[rank]
        if not state.holds and not state.draining:
            # The life that was given up may still live: it is no replacement.
            lost = ReplaceRank(rank=rank, lost_incarnation=state.incarnation)
            self.replace_rank(boss, lost)

    def add_rank(self, boss: SimController, rank: int) -> None:
        """A rank that was never there joins."""
        self._make(boss, rank)

    def replace_router(self, boss: SimController, name: str) -> None:
        """End the life there was of a router and start a new one."""
        boss.liaison.drop_router(name)

        def make() -> None:
            if name in boss.liaison.routers or self._taken_over(boss):
                return
            old = self.stage.routers.get(name)
            if old is not None and old.alive:
                self.kill(old, "replaced")
            self._lives += 1
            router = SimRouter(self.stage, name, self._lives, self._rules)
            self.stage.routers[name] = router
            self.stage.note(Began, router.who, place=name)
            boss.liaison.welcome_router(router)

        boss.after(self.stage.dice.around(self.stage.delays.start_s), make)

    def _taken_over(self, boss: SimController) -> bool:
        """Whether another controller took over, whose parts a part made now would not belong to;
        then `boss` ends."""
        if self._claimed <= boss.term:
            return False
        boss.fenced()
        return True

    def kill(self, part: SimShard | SimRouter, cause: str) -> None:
        """End a shard or router, now. Routers notice a broken connection."""
        if not part.alive:
            return
        part.die()
        self.stage.note(Died, part.who, cause=cause)
        if isinstance(part, SimShard):
            for router in self.stage.routers.values():
                self._tell_broken(router, part)
        else:
            self.stage.lost_demand(part)

    def _tell_broken(self, router: SimRouter, shard: SimShard) -> None:
        if self.stage.network.reaches(shard, router):
            hop_s = self.stage.dice.around(self.stage.delays.network_s)
            router.after(hop_s, lambda: router.disconnected(shard.rank, shard.life))


def _removed(boss: SimController, rank: int) -> bool:
    ranks = boss.engine.state.ranks
    return rank < len(ranks) and ranks[rank].status is RankStatus.REMOVED


def _answers(part: Part) -> bool:
    return part.alive and not part.paused
