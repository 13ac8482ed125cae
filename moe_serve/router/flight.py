"""One request in work: its tasks, its unsettled sub-calls, its end; and the messages made from it.

Responsible for the life of one request's tasks. Must never talk to a channel or to the role. Called
by `dispatch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moe_serve.errors import MoeServeError, ResourceExhausted, Unavailable
from moe_serve.ports import SubCall, SubReply
from moe_serve.router.checks import ForwardInput
from moe_serve.router.ledger import CombinedEntry, Entry, RequestEntry
from moe_serve.rpc.codec import pack_bits
from moe_serve.wire.frame import TIMEOUT_S_MAX
from placement.roles.calls import Contribution
from placement.roles.router_records import Dispatch, Failure, FailureKind
from placement.routing import RoutingTable

BUSY_RETRY_S = 0.05
"""Wait that a caller is told where every shard that could serve it is busy."""
ANSWER: Final = (
    "rank",
    "pairs",
    "split_s",
    "sent_s",
    "came_s",
    "queue_s",
    "compute_s",
    "rest_s",
)
"""What is kept of an answered sub-call. split_s: of planning it, where it was a second try; 0 for
the first ones, which were planned together. The last three are the shard's words."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """output: raw [T, H] of the request's dtype. (term, epoch): newest table the batch was split
    under.
    """

    output: npt.NDArray[Any]
    term: int
    epoch: int
    weights_version: str


@dataclass(slots=True, eq=False)
class Stamps:
    """When a request came and had its permit, and how long its first split took.

    answers: the numbers `ANSWER` of each sub-call that served something until the request was
    finished, one sub-call after another in the order of their answers. Plain numbers in one list:
    they are made for every sub-call there is, and this costs a third of an object for each.
    """

    began_s: float
    permit_s: float = 0.0
    split_s: float = 0.0
    answers: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Flight:
    """One request in work. `done` ends with None, or with the typed error that fails the request.

    order: (term, epoch) of the newest table it was split under. unsettled: sub-calls whose end the
    role was not told yet.
    """

    key: int
    request: ForwardInput
    deadline_at_s: float
    stamps: Stamps
    done: asyncio.Future[None]
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    unsettled: dict[int, Dispatch] = field(default_factory=dict)
    order: tuple[int, int] = (0, 0)
    weights_version: str = ""

    def finish(self) -> None:
        """All contributions are there."""
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: MoeServeError) -> None:
        """The request cannot be finished."""
        if not self.done.done():
            self.done.set_exception(error)

    def answered(
        self, dispatch: Dispatch, reply: SubReply, split_s: float, sent_s: float, came_s: float
    ) -> None:
        """A sub-call came back while the request was open; what served nothing is not kept."""
        if not len(reply.partial) or self.done.done():
            return
        part, status = dispatch.part, reply.row_status
        num_pairs = part.num_pairs
        if len(reply.partial) < len(status):
            num_pairs = int(np.count_nonzero(status[part.pair_row] == 0))
        told = reply.queue_s, reply.compute_s, reply.rest_s
        self.stamps.answers.extend((part.rank, num_pairs, split_s, sent_s, came_s, *told))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run work of this request; what it raises fails the request."""

        async def guarded() -> None:
            try:
                await work()
            except MoeServeError as error:
                self.fail(error)
            except Exception as error:
                self.fail(internal(error))

        task = asyncio.create_task(guarded())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def end_tasks(self) -> None:
        """Cancel what still runs and wait until it has ended, also where the caller is cancelled
        meanwhile."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            if not self.done.cancel() and not self.done.cancelled():
                # Looked at, so that asyncio does not report an error that nobody waits for.
                self.done.exception()


def nothing_to_do(
    request: ForwardInput, table: RoutingTable | None, weights_version: str
) -> ForwardOutput:
    """Output of a request without a valid pair. weights_version: of a router without a table."""
    zeros = np.zeros(request.hidden.shape, request.hidden.dtype)
    if table is None:
        return ForwardOutput(zeros, 0, 0, weights_version)
    return ForwardOutput(zeros, *table.order, table.weights_version)


def sub_call_of(flight: Flight, dispatch: Dispatch, router: str, rows: npt.NDArray[Any]) -> SubCall:
    """Message of one sub-call; `rows` are the gathered rows of its part."""
    request, part = flight.request, dispatch.part
    return SubCall(
        router=router,
        call_id=dispatch.call_id,
        sub_id=dispatch.sub_id,
        request_key=flight.key,
        layer=request.layer,
        phase=int(request.phase),
        cause=dispatch.cause,
        incarnation=dispatch.incarnation,
        term=dispatch.term,
        epoch=dispatch.epoch,
        dtype=request.dtype,
        # A caller may give more time than the wire takes for a sound figure.
        timeout_s=min(dispatch.timeout_s, TIMEOUT_S_MAX),
        rows=rows,
        row_id=part.row_id,
        pair_row=part.pair_row,
        pair_slot=part.pair_slot,
        pair_tag=part.pair_tag,
        pair_gate=request.gates[part.row_id[part.pair_row], part.pair_k],
        pair_k=part.pair_k,
        pair_expert=part.pair_expert,
        request_id=request.request_id,
        trace=request.trace,
    )


def well_formed(reply: SubReply, sub_call: SubCall) -> bool:
    """Whether a reply answers this sub-call row by row, in its dtype. Anything else is the shard's
    fault.
    """
    status, partial = reply.row_status, reply.partial
    if status.shape != sub_call.row_id.shape:
        return False
    refused = int(np.count_nonzero(status))
    if refused and int(status.max()) > 2:
        return False
    served = len(status) - refused
    return (
        reply.sub_id == sub_call.sub_id
        and partial.shape == (served, sub_call.rows.shape[1])
        and partial.dtype == sub_call.rows.dtype
    )


def internal(error: Exception) -> MoeServeError:
    """A bug of ours, typed: it fails one request alone; the cause stays attached for the log."""
    found = MoeServeError("the router failed on this request; see its log")
    found.__cause__ = error
    return found


def named(error: MoeServeError, request_id: str) -> MoeServeError:
    """The error, telling which request it ended; for a request without an id as it is."""
    if request_id and request_id not in error.message:
        error.message = f"{error.message} [request {request_id}]"
        error.args = (error.message,)
    return error


def error_of(failure: Failure) -> MoeServeError:
    """Typed error of a request that the rules gave up."""
    if failure.kind is FailureKind.NO_TABLE:
        return Unavailable("the router has no routing table yet; retry, or use another router")
    if failure.kind is FailureKind.BUSY:
        return ResourceExhausted(f"{failure.detail}; wait", retry_after_s=BUSY_RETRY_S)
    return Unavailable(f"{failure.detail}; retry later")


def ledger_entries(flight: Flight, added: tuple[Contribution, ...]) -> list[Entry]:
    """What the combined ledger keeps of a request: what it wanted, and what was added."""
    valid = flight.request.valid
    layer = flight.request.layer
    wanted = RequestEntry(
        flight.key,
        layer,
        int(valid.shape[0]),
        int(valid.shape[1]),
        pack_bits(valid.view(np.bool_)),
    )
    combined = [
        CombinedEntry(
            flight.key,
            layer,
            one.call_id,
            one.sub_id,
            one.rank,
            np.ascontiguousarray(one.row_id, "<i4").tobytes(),
        )
        for one in added
    ]
    return [wanted, *combined]
