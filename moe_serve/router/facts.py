"""What a router notes of itself for a history: tables, requests from arrival to answer, what it
holds at rest.

Responsible for these facts and for nothing else: it sees what the router's rules have decided.
Called by `dispatch`, only where settings name a folder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import numpy as np

from moe_serve.errors import MoeServeError
from moe_serve.router.checks import ForwardInput
from moe_serve.router.permits import Permits
from moe_serve.router.settings import RouterSettings
from moe_serve.telemetry.fact_log import FactLog, open_log
from placement.messages.history import (
    Began,
    Died,
    RequestBegun,
    RequestEnded,
    RequestOpened,
    RouterHolds,
    RouterTold,
    TableInstalled,
    TermRefused,
)
from placement.roles.calls import Contribution
from placement.roles.router import RouterRole
from placement.roles.router_records import Acceptance
from placement.routing import RoutingTable
from placement.topology import MoeSpec

_T = TypeVar("_T")
Added = tuple[tuple[int, tuple[int, ...]], ...]


class RouterFacts:
    """Of one life of one router. Only one loop may use it."""

    def __init__(self, log: FactLog, settings: RouterSettings) -> None:
        self._log = log
        self._life = log.life(f"{settings.router}/{settings.incarnation}")
        self._place = settings.router
        self._spec: MoeSpec = settings.spec
        self._open: dict[int, Added] = {}
        """Requests without an answer, with what was added for each."""
        self._ended = False
        self._life.note(Began, place=settings.router, pid=os.getpid())

    def died(self) -> None:
        """The life ends, because it was asked to. Idempotent."""
        if not self._ended:
            self._ended = True
            self._life.note(Died, cause="left")
            self._log.close()

    # ------------------------------------------------------------------------ controller's side
    def accepted(self, accepted: Acceptance, table: RoutingTable, highest_term: int) -> None:
        """The rules have judged a table: it is used from now on, or of a term that is over."""
        if accepted is Acceptance.APPLIED:
            self._life.note(TableInstalled, term=table.term, epoch=table.epoch)
        elif accepted is Acceptance.STALE_TERM:
            self._life.note(TermRefused, term=table.term, seen=highest_term)

    def told(self, role: RouterRole, permits: Permits) -> None:
        """A report is made; with nothing to do, also what is held all the same."""
        self._life.note(
            RouterTold,
            term=-1 if role.table is None else role.table.term,
            router=self._place,
            applied=role.applied_epoch,
            quiesced=role.quiesced_epoch,
        )
        if not self._open:
            self._life.note(
                RouterHolds,
                permits=permits.requests,
                rows=permits.rows,
                waiting=permits.waiting,
                calls=role.open_calls,
                sub_calls=role.open_sub_calls,
            )

    # -------------------------------------------------------------------------------- requests
    async def follow(
        self, key: int, request: ForwardInput, deadline_at_s: float, work: Awaitable[_T]
    ) -> _T:
        """Await the work of a request that arrives now, until its answer is ready to leave."""
        self._opened(key, request, deadline_at_s)
        outcome, detail = "internal", ""
        try:
            result = await work
            outcome = "ok"
        except MoeServeError as error:
            outcome, detail = error.code.lower(), error.message
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            added = self._open.pop(key)
            self._life.note(
                RequestEnded,
                request=key,
                outcome=outcome,
                detail=detail,
                added=added if outcome == "ok" else (),
            )
        return result

    def _opened(self, key: int, request: ForwardInput, deadline_at_s: float) -> None:
        valid = np.flatnonzero(request.valid)
        keys = request.layer * self._spec.num_experts + request.topk_ids.reshape(-1)[valid]
        self._open[key] = ()
        self._life.note(
            RequestOpened,
            request=key,
            deadline_at_s=deadline_at_s,
            pairs=tuple(valid.tolist()),
            keys=tuple(keys.tolist()),
            top_k=int(request.topk_ids.shape[1]),
            counts=request.attempt == 0,
            sound=True,
        )

    def begun(self, key: int) -> None:
        """It was admitted and split; it is demand from now on."""
        self._life.note(RequestBegun, request=key)

    def added(self, key: int, contributions: Sequence[Contribution]) -> None:
        """What its sum is made of."""
        self._open[key] = tuple((one.sub_id, tuple(one.row_id.tolist())) for one in contributions)


def router_facts(settings: RouterSettings) -> RouterFacts | None:
    """Where the router notes facts, None where settings name no folder."""
    log = open_log(settings.history_dir, settings.router)
    return None if log is None else RouterFacts(log, settings)
