"""One term of the controller: everything that lives from one claim of a term to its end.

Responsible for wiring, for the order of a start (journal, term, snapshot, then the first event),
and for ending all of it together. Must never decide. Called by the service.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from moe_serve.controller.beginning import Beginning
from moe_serve.controller.book import Book
from moe_serve.controller.creation import PartCreator, end_parts
from moe_serve.controller.driver import Driver
from moe_serve.controller.executor import CommandExecutor
from moe_serve.controller.facts import ControllerFacts
from moe_serve.controller.fail_points import FailPoints
from moe_serve.controller.figures import Figures
from moe_serve.controller.journal_rows import snapshot_row
from moe_serve.controller.names import PartKind, PartName, parse
from moe_serve.controller.parts import AnyPart, PartTable, ShardPart
from moe_serve.controller.polls import Polls
from moe_serve.controller.publisher import Publisher
from moe_serve.controller.recent import Recent
from moe_serve.controller.rolling import RouterReplacement
from moe_serve.controller.settings import ControllerSettings
from moe_serve.controller.stages import StageFolder
from moe_serve.controller.supervision import Supervision
from moe_serve.controller.tasks import Bell, Tasks
from moe_serve.errors import StaleTerm
from moe_serve.ports import Fleet, RankPlace
from moe_serve.telemetry import Metrics
from moe_serve.telemetry.router_figures import RoutersFigures
from placement.engine.state import RankStatus
from placement.load import LoadFolder
from placement.messages.effects import Answer
from placement.messages.events import AnyEvent, RankLost, RouterLeft


class Life:
    """`open` first, then `run` until it ends; `stop` in any case."""

    def __init__(  # noqa: PLR0913  # everything of a term is wired here
        self,
        settings: ControllerSettings,
        fleet: Fleet,
        beginning: Beginning,
        *,
        book: Book,
        bell: Bell,
        fail_points: FailPoints,
        log: structlog.typing.FilteringBoundLogger,
        metrics: Metrics,
        routers: RoutersFigures | None = None,
        facts: ControllerFacts | None = None,
    ) -> None:
        self._facts = facts
        self.settings = settings
        self.beginning = beginning
        self.journal = beginning.journal
        self.clock = beginning.clock
        self.term = beginning.term
        self.parts = PartTable(names=dict.fromkeys(self._names()))
        self.stages = StageFolder()
        self.recent = Recent(self.parts, settings.spec)
        self._fleet = fleet
        self._book = book
        self._tasks = Tasks()
        self._ended = False
        limits, config = settings.supervision, settings.config
        folder = self._folder()
        self.supervision = Supervision(
            fleet,
            limits=limits,
            clock=self.clock,
            parts=self.parts,
            folder=folder,
            tasks=self._tasks,
            ranks=lambda: self.driver.engine.state.ranks,
            ask=self._ask,
            forget=self._forget,
            # The life that the engine gave up may still be in the table: it is no replacement.
            ensure=lambda rank: self.creator.replace_shard(
                rank, self.driver.engine.state.ranks[rank].incarnation
            ),
        )
        self.publisher = Publisher(
            self.parts,
            self._tasks,
            self._post,
            self._fenced,
            limits.call_timeout_s,
            None if facts is None else facts.engine,
        )
        self.creator = self._creator()
        self._routers = self._replacement()
        self.figures = Figures(
            settings.spec,
            self.parts,
            log=log.bind(term=self.term),
            metrics=metrics,
            stages=lambda: self.stages.total,
            routers=routers,
        )
        self._executor = CommandExecutor(
            self.term,
            config,
            parts=self.parts,
            publisher=self.publisher,
            maker=self.creator,
            tasks=self._tasks,
            post=self._post,
            fenced=self._fenced,
            solved=self.figures.solved,
        )
        self.supervision.publisher = self.publisher
        self.supervision.polls = self._polls(folder)
        self.driver = self._driver(bell, fail_points)

    def _driver(self, bell: Bell, fail_points: FailPoints) -> Driver:
        return Driver(
            self.beginning.engine,
            journal=self.journal,
            clock=self.clock,
            executor=self._executor,
            book=self._book,
            figures=self.figures,
            recent=self.recent,
            bell=bell,
            parts=lambda: tuple(self.parts.names),
            fail_points=fail_points,
            snapshot_every=self.settings.journal.snapshot_every,
            facts=None if self._facts is None else self._facts.engine,
        )

    def _folder(self) -> LoadFolder:
        config, spec = self.settings.config, self.settings.spec
        return LoadFolder(
            num_layers=spec.num_layers,
            num_experts=spec.num_experts,
            num_ranks=len(self.beginning.engine.state.ranks),
            window_s=config.window_s,
            sub_windows=config.sub_windows,
            start_s=self.clock.now_s(),
        )

    def _creator(self) -> PartCreator:
        return PartCreator(
            self.settings.service_id,
            self._fleet,
            term=self.term,
            journal=self.journal,
            clock=self.clock,
            parts=self.parts,
            host=self.supervision,
            tasks=self._tasks,
            limits=self.settings.supervision,
            post=self._post,
            fenced=self._fenced,
            routers=self.settings.routers,
            router_ports=self.beginning.router_ports,
            rank_place=self._rank_place,
        )

    def _replacement(self) -> RouterReplacement:
        return RouterReplacement(
            self.settings.service_id,
            self._fleet,
            parts=self.parts,
            host=self.supervision,
            tasks=self._tasks,
            post=self._post,
            serves=self._router_serves,
        )

    def _router_serves(self, router: str) -> bool:
        known = self.driver.engine.state.routers.get(router)
        part = self.parts.routers.get(router)
        return part is not None and known is not None and known.in_set and part.applied >= 0

    async def replace_router(self, router: str, incarnation: int, *, accept_gap: bool) -> str:
        """See `RouterReplacement.replace`."""
        return await self._routers.replace(router, incarnation, accept_gap=accept_gap)

    def _polls(self, folder: LoadFolder) -> Polls:
        return Polls(
            self._fleet,
            term=self.term,
            config=self.settings.config,
            limits=self.settings.supervision,
            clock=self.clock,
            parts=self.parts,
            folder=folder,
            stages=self.stages,
            host=self.supervision,
            post=self._post,
            fenced=self._fenced,
            router_heard=None if self._facts is None else self._facts.router_heard,
            listener=self.figures,
        )

    async def run(self) -> None:
        """Serve until something ends this life; raises what did: StaleTerm where another
        controller has a higher term."""
        self._tasks.spawn(self.driver.run())
        self._tasks.spawn(self._start_parts())
        self._tasks.spawn(self.supervision.watch_nodes())
        self._tasks.spawn(self.creator.end_late(earlier_terms=self.beginning.going_on))
        history = self.driver.engine.state.history.windows
        first_index = history[-1].index + 1 if history else 0
        window_s = self.settings.config.window_s
        self._tasks.spawn(self.supervision.close_windows(window_s, first_index, self._post))
        raise await self._tasks.failure()

    async def stop(self, cause: str = "left") -> None:
        """End every task and close the journal. Parts live on. cause: for the history."""
        if self._ended:
            return
        self._ended = True
        try:
            await self._tasks.stop()
        finally:  # also where whoever stops us is stopped
            if self._facts is not None:
                self._facts.died(cause)
            await self.journal.close()

    async def end_parts(self, grace_s: float) -> list[str]:
        """End every part by the journal's list, and what else answers to the service id; the
        journal is closed for good. grace_s: for the calls that routers have open. Returns the names
        ended."""
        await self._tasks.stop()
        names = await end_parts(
            self._fleet, self.settings.service_id, self.parts.names, grace_s=grace_s
        )
        await self.journal.mark_closed()
        return names

    async def open(self) -> None:
        """The journal is ours, and says where we begin, before anything is commanded. Raises
        StaleTerm, JournalFull."""
        self._book.epochs_published = self.beginning.epochs_published
        self._book.replicas_replaced = self.beginning.replicas_replaced
        self._book.befores.recall(self.beginning.befores)
        self._book.recall_run(self.driver.engine.state)
        await self.journal.open_term(
            self.term,
            snapshot_row(self.driver.snapshot(self.clock.now_s())),
            owner=self.beginning.owner,
            starts=self.beginning.starts,
        )
        if self._facts is not None:
            self._facts.began()

    async def _start_parts(self) -> None:
        """Adopted parts first, then what the engine must know to be gone, then what is missing."""
        for name in [*self.beginning.adopted.to_end, *self._not_wanted()]:
            # Beside the rest: the cluster's head may be away, and those who serve do not wait.
            self.creator.end_soon(name)
        for part in self._found():
            part.heard_s = self.clock.now_s()
            self.parts.add(part)
            await self.creator.introduce(part)
        await self._tell_gone()
        for rank in self.driver.engine.state.ranks:
            if rank.rank not in self.parts.shards and rank.wants_shard:
                self.creator.replace_shard(rank.rank, -1)
        for router in self.settings.routers:
            if router not in self.parts.routers:
                self.creator.replace_router(router)

    def _found(self) -> list[AnyPart]:
        """Adopted parts that have a place here. Routers first: a removal goes on once its rank is
        heard of, and must find every router there is in the acknowledging set."""
        adopted = self.beginning.adopted
        return [
            *(part for part in adopted.routers if part.name.place in self.settings.routers),
            *(p for p in adopted.shards if self._rank_place(p.name.rank) is not None),
        ]

    def _not_wanted(self) -> list[str]:
        """Shards of ranks that have left, and routers that the service is not to have any more,
        which nobody has ended yet: those that answered, and those that the journal names, for one
        that does not answer may live as well."""
        ranks = self.beginning.engine.state.ranks
        removed = {rank.rank for rank in ranks if rank.status is RankStatus.REMOVED}
        answered: list[AnyPart] = [
            *self.beginning.adopted.shards,
            *self.beginning.adopted.routers,
        ]
        names = [*(str(part.name) for part in answered), *self.beginning.journal_names]

        def left(part: PartName) -> bool:
            if part.kind is PartKind.SHARD:
                return part.rank in removed
            return part.place not in self.settings.routers

        return [
            name
            for name in dict.fromkeys(names)
            if (part := parse(self.settings.service_id, name)) is not None and left(part)
        ]

    def _rank_place(self, rank: int) -> RankPlace | None:
        """Where a rank's shard belongs, None where no such rank is served."""
        ranks = self.beginning.engine.state.ranks
        if rank >= len(ranks) or ranks[rank].status is RankStatus.REMOVED:
            return None
        return RankPlace(ranks[rank].group, ranks[rank].only_node)

    def _names(self) -> list[str]:
        """Parts to be remembered: those of the journal, and those adopted without one."""
        return [*self.beginning.journal_names, *(str(part.name) for part in self._found())]

    async def _tell_gone(self) -> None:
        state = self.driver.engine.state
        for rank in state.ranks:
            if rank.rank not in self.parts.shards and rank.status is RankStatus.RESTORED:
                await self._post(
                    RankLost(
                        at_s=0.0,
                        rank=rank.rank,
                        incarnation=rank.incarnation,
                        reason="not found when the controller restarted",
                    )
                )
        for router in sorted(state.routers):
            if router not in self.parts.routers:
                await self._post(
                    RouterLeft(
                        at_s=0.0,
                        router=router,
                        reason="not found when the controller restarted",
                        gone=True,
                    )
                )

    async def _ask(self, make: Callable[[int], AnyEvent]) -> Answer:
        return await self.driver.ask(make)

    def _forget(self, part: ShardPart) -> None:
        self._executor.forget(part)

    async def _post(self, event: AnyEvent) -> None:
        await self.driver.post(event)

    def _fenced(self, error: StaleTerm) -> None:
        self._tasks.fail(error)
