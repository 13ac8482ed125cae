"""The controller as one object: lives one after another, an admin port over them all.

Responsible for starting once, for beginning again when fenced, and for ending everything. Must
never decide about experts. Called by the actor, and by tests directly.
"""

from __future__ import annotations

import asyncio
import platform
import traceback
from collections.abc import Callable
from typing import Any

from moe_serve.controller.admin_server import AdminServer
from moe_serve.controller.beginning import begin
from moe_serve.controller.book import Book
from moe_serve.controller.creation import end_parts
from moe_serve.controller.facts import ControllerFacts
from moe_serve.controller.fail_points import FailPoints, kill_self, point_of_term
from moe_serve.controller.journal import open_journal
from moe_serve.controller.life import Life
from moe_serve.controller.metrics_port import ServedMetrics
from moe_serve.controller.settings import ControllerSettings
from moe_serve.controller.tasks import Bell
from moe_serve.controller.views import Sight, placement_view, router_ready
from moe_serve.errors import (
    FailedPrecondition,
    MoeServeError,
    StaleTerm,
    StartRefused,
    Unavailable,
)
from moe_serve.explain.words import NO_START
from moe_serve.ports import Fleet
from moe_serve.telemetry import MetricSink, NullSink, make_logger
from moe_serve.telemetry.fact_log import open_log

FENCED_PAUSE_S = 1.0
"""Wait before a fenced controller claims again; doubles with each fence in a row, up to 60 s, so
that two of them do not chase each other."""
FENCED_PAUSE_MAX_S = 60.0
RESTART_PAUSE_S = 0.2
"""Time for an answer to leave before the controller ends on request."""
TRACE_LINES_MAX = 24
"""Entries of a trace in the log."""
CALM_S = 120.0
"""A life that lasted this long ends the row of fences."""


class ControllerService:
    """Start with `start`; end with `down` (parts too) or `stop` (parts live on).

    owner: name of this machine, as the journal records it. crash: what a fail point does. on_fatal:
    called where the controller cannot go on because of a bug; an actor ends its process then, so
    that Ray restarts it. sink: where samples go beside the metrics port.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        fleet: Fleet,
        *,
        owner: str = "",
        serve_admin: bool = True,
        crash: Callable[[], None] = kill_self,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
        sink: MetricSink | None = None,
    ) -> None:
        self.settings = settings
        self.book = Book(records_kept=settings.records_kept, moves_kept=settings.moves_kept)
        self._fleet = fleet
        self._owner = owner or platform.node()
        self._crash = crash
        self._on_fatal = on_fatal
        self._measured = ServedMetrics(settings, sink or NullSink())
        self._log = make_logger(part="controller", node=settings.node, service=settings.service_id)
        self._history = open_log(settings.history_dir, "controller")
        self._serve_admin = serve_admin
        self._starting = asyncio.Lock()
        self._life: Life | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._admin: AdminServer | None = None
        self._bell: Bell | None = None
        self._started_s = 0.0
        self._ended = False
        self._restarting: asyncio.Task[None] | None = None
        self._fault = ""
        """Why there is no life, "" where there is one or it is not known."""

    @property
    def admin_address(self) -> str:
        """host:port of PlacementService, "" before it is bound."""
        return "" if self._admin is None else self._admin.address

    @property
    def metrics_address(self) -> str:
        """host:port of `/metrics`, "" where it is not served."""
        return self._measured.address

    @property
    def life(self) -> Life:
        """The life of the present term. Raises Unavailable between two, FailedPrecondition where it
        is known why there is none."""
        if self._life is not None:
            return self._life
        if self._fault:
            raise FailedPrecondition(f"{NO_START}: {self._fault}")
        raise Unavailable("the controller is starting; ask again")

    @property
    def bell(self) -> Bell:
        """Rings at every change that people may watch. Raises Unavailable before the start."""
        if self._bell is None:
            raise Unavailable("the controller is starting; ask again")
        return self._bell

    def sight(self) -> Sight:
        """What views are built from, now. Raises as `life` does."""
        life = self.life
        engine = life.driver.engine
        return Sight(
            settings=self.settings,
            state=engine.state,
            parts=life.parts,
            stages=life.stages,
            recent=life.recent,
            book=self.book,
            table=life.publisher.newest,
            now_s=life.clock.now_s(),
            started_s=self._started_s,
            problems=tuple(
                problem
                for problem in (
                    *life.beginning.problems,
                    life.driver.problem,
                    self._measured.fault,
                )
                if problem
            ),
        )

    async def start(self) -> None:
        """Begin the first life and open the admin port; calling it again does nothing. Raises
        StartRefused, Unavailable, JournalFull; nothing is left open then."""
        async with self._starting:
            if self._keeper is not None:
                return
            self._bell = Bell()
            life = await self._begin(term_seen=0, counts_as_start=True)
            try:
                await self._open_admin(life.beginning.admin_port)
                if self._admin is not None:
                    await life.journal.note_admin_port(self._admin.port)
                    await self._admin.tell_serving(True)
                await self._open_metrics()
            except BaseException:
                await self._close_admin()
                await life.stop()
                raise
            self._life, self._fault = life, ""
            self._started_s = life.clock.now_s()
            self._keeper = asyncio.create_task(self._keep(life))

    async def show_fault(self, fault: str) -> None:
        """Say at the admin port why the controller does not start: who asks shall not have to read
        its log. The next `start` may succeed all the same."""
        async with self._starting:
            if self._life is not None or self._ended:
                return
            self._fault = fault
            try:
                await self._open_admin(0)
                if self._admin is not None:
                    await self._admin.tell_serving(False)
            except StartRefused as error:
                self._log.warning("the fault cannot be shown", reason=error.message)
                await self._close_admin()

    async def _open_admin(self, last_port: int) -> None:
        if self._admin is None and self._serve_admin:
            self._admin = AdminServer(self)
            await self._admin.start(last_port)

    async def _open_metrics(self) -> None:
        await self._measured.start()
        if self._measured.address:
            self._log.info("metrics are served", address=self._measured.address)
        elif self._measured.fault:
            self._log.warning("metrics are not served", reason=self._measured.fault)

    async def _close_admin(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            await admin.stop()

    async def stop(self) -> None:
        """End this controller; parts and journal stay as they are."""
        self._ended = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._close_admin()
        await self._measured.stop()
        life, self._life = self._life, None
        if life is not None:
            await life.stop()
        if self._history is not None:
            self._history.close()

    def restart_soon(self) -> None:
        """End this controller's process, parts and journal as they are; whoever runs it starts it
        again. Who asked hears of it first."""
        if self._restarting is None:
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        await asyncio.sleep(RESTART_PAUSE_S)
        self._log.info("controller ends to be started again")
        try:
            await self.stop()
        finally:  # also where a journal would not close: half of a controller serves nobody
            self._on_fatal(Unavailable("restarted on request"))

    async def down(self, grace_s: float = 5.0) -> list[str]:
        """End every part of the service and close the journal for good. grace_s: for the calls that
        routers have open. Returns the names ended."""
        # A start under way comes to its end first: it has the journal open.
        async with asyncio.timeout(max(grace_s, 1.0) + 30.0), self._starting:
            if self._keeper is not None:
                # Before anything else: between two lives it would begin the next one.
                self._keeper.cancel()
                await asyncio.gather(self._keeper, return_exceptions=True)
            if self._life is None:
                names = await self._end_parts_without_life(grace_s)
            else:
                names = await self._life.end_parts(grace_s)
        await self.stop()
        return names

    async def _end_parts_without_life(self, grace_s: float) -> list[str]:
        """`Life.end_parts` before the first life, between two, or after the last."""
        settings = self.settings
        try:
            journal, image = await open_journal(
                settings.state_dir, settings.service_id, settings.journal
            )
        except (MoeServeError, OSError) as error:
            # Damaged, or the disk is full or away: what lives is ended all the same. The next start
            # says what is wrong with it.
            self._log.warning("the journal could not be closed", reason=str(error))
            return await end_parts(self._fleet, settings.service_id, (), grace_s=grace_s)
        try:
            names = await end_parts(self._fleet, settings.service_id, image.parts, grace_s=grace_s)
            await journal.mark_closed()
        finally:
            await journal.close()
        return names

    def describe(self) -> dict[str, Any]:
        """See `ControllerActor.describe`."""
        if self._life is None:
            return {
                "admin_address": self.admin_address,
                "metrics_address": self.metrics_address,
                "term": 0,
                "epoch": 0,
                "ready": False,
                "experts": 0,
                "experts_listed": 0,
                "state": "refused" if self._fault else "starting",
                "problems": [self._fault] if self._fault else [],
                "parts": [],
                "router_addresses": [],
                "restarts": 0,
                "refused": "",
            }
        sight = self.sight()
        view = placement_view(sight)
        parts = sight.parts
        ready = (
            sight.state.published
            and sight.table is not None
            and not sight.table.missing()
            and all(router_ready(sight, router) for router in self.settings.routers)
        )
        experts = view.num_layers * view.num_experts
        refused = sorted(place for place, times in parts.refusals.items() if times >= 2)
        return {
            "admin_address": self.admin_address,
            "metrics_address": self.metrics_address,
            "term": sight.state.term,
            "epoch": sight.state.epoch,
            "ready": ready,
            "experts": experts,
            "experts_listed": 0 if sight.table is None else experts - len(sight.table.missing()),
            "state": view.state,
            "problems": list(view.problems),
            "parts": [
                {
                    "name": str(part.name),
                    "kind": str(part.name.kind),
                    "place": part.name.place,
                    "incarnation": part.name.incarnation,
                    "pid": part.info.pid,
                }
                for part in parts.all()
            ],
            "router_addresses": list(parts.peers()),
            "restarts": self._life.beginning.restarts,
            "refused": parts.problems[refused[0]] if refused else "",
        }

    async def _begin(self, *, term_seen: int, counts_as_start: bool) -> Life:
        beginning = await begin(
            self.settings,
            self._fleet,
            owner=self._owner,
            term_seen=term_seen,
            counts_as_start=counts_as_start,
        )
        armed = point_of_term(self.settings.fail_points, beginning.term)
        life = Life(
            self.settings,
            self._fleet,
            beginning,
            book=self.book,
            bell=self.bell,
            fail_points=FailPoints(armed, self._crash),
            log=self._log,
            metrics=self._measured.metrics,
            routers=self._measured.routers,
            facts=(
                None
                if self._history is None
                else ControllerFacts(self._history, self.settings, beginning)
            ),
        )
        try:
            await life.open()
        except BaseException:
            await life.stop()
            raise
        self._log.info(
            "controller began",
            term=life.term,
            going_on=beginning.going_on,
            adopted=len(beginning.adopted.shards) + len(beginning.adopted.routers),
            problems=beginning.problems,
        )
        return life

    async def _keep(self, life: Life) -> None:
        """Run lives until one ends for another reason than a fence."""
        fences = 0
        while True:
            began_s = life.clock.now_s()
            try:
                await life.run()
            except StaleTerm as error:
                self._life = None
                await life.stop("fenced")
                fences = 1 if life.clock.now_s() - began_s > CALM_S else fences + 1
                self._log.warning("controller was fenced", term=life.term, by_term=error.term)
                life = await self._begin_again(error.term, fences)
                self._life, self._fault = life, ""
                self.bell.ring()
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self._life = None
                # As text without local variables: those may hold what no log may. The newest
                # frames are last.
                trace = traceback.format_exception(error)[-TRACE_LINES_MAX:]
                self._log.error("controller cannot go on", term=life.term, trace=trace)
                await life.stop(f"fault of ours: {type(error).__name__}")
                self._on_fatal(error)
                return

    async def _begin_again(self, term_seen: int, fences: int) -> Life:
        pause_s = min(FENCED_PAUSE_S * 2 ** (fences - 1), FENCED_PAUSE_MAX_S)
        while True:
            await asyncio.sleep(pause_s)
            try:
                return await self._begin(term_seen=term_seen, counts_as_start=False)
            except StaleTerm as error:
                term_seen = max(term_seen, error.term)
            except MoeServeError as error:
                self._fault = error.message
                self._log.warning("controller could not begin again", reason=error.message)
            except Exception as error:
                # A folder without rights, a damaged disk: told and tried again, as a first start
                # is. Nobody else would begin.
                self._fault = f"{type(error).__name__}: {error}"
                self._log.warning("controller could not begin again", reason=self._fault)
            pause_s = min(2 * pause_s, FENCED_PAUSE_MAX_S)
