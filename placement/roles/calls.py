"""Exactly once: which partial sums of shards are added to a request, and which rows are sent again.

The theory. A *call* is a fixed set of pairs of one request: some rows, and of each row the pairs
sent together. A *cover* of a call is one attempt to have all of it computed, by one or several
sub-calls to ranks. The first complete cover is added and closes the call; what other covers still
bring is dropped. When a cover ends incomplete while another runs, it waits. When the last running
cover ends and none is complete, the call closes: every row that some cover served whole is added
from the first such cover, and the other rows become one new call. So each pair of a request is in
exactly one open call or was added once, whatever was repeated, lost or late.

Rules of this file. A row of a call is added whole or not at all. A closed call never opens again.
Nothing is added after its call closed. A request is finished when it has no open call.

Responsible for this bookkeeping only. Must never choose ranks, wait, or count budgets
(`placement.roles.router` does).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from placement.roles.assignment import Bytes, Int32s, Mask, Part


class Cause(IntEnum):
    """Why a cover was started. Only FIRST is demand."""

    FIRST = 0
    RETRY = 1
    HEDGE = 2


class Ended(IntEnum):
    """Why rows of a sub-call were not served. The first two are what a shard says of a row (0 is
    served).
    """

    STALE = 1
    REFUSED = 2
    LOST = 3
    """The connection broke, or the answer was malformed."""
    FAILED = 4
    """The shard said that it could not compute."""
    SILENT = 5
    """It did not answer in the time it was given."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a rank failed rows of a call, under which (term, epoch) and in which life of the
    shard."""

    why: Ended
    order: tuple[int, int]
    incarnation: int


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """Rows of one partial sum to add: output[row_id[i]] += partial[take[i]] for each i.

    row_id, take: int32 [m]. partial: raw [served rows, H], as the shard sent it.
    """

    call_id: int
    sub_id: int
    rank: int
    row_id: Int32s
    take: Int32s
    partial: npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class SubCallState:
    """One sub-call on its way.

    position: int64 [R], index of its rows in the rows of its call. pair_row: int32 [P], row of each
    of its pairs. num_pairs: P. work_pairs: what they cost, in pairs.
    """

    sub_id: int
    call_id: int
    cover_id: int
    request_key: int
    cause: Cause
    rank: int
    incarnation: int
    order: tuple[int, int]
    sent_at_s: float
    position: npt.NDArray[np.int64]
    pair_row: Int32s
    num_pairs: int
    work_pairs: float
    timeout_s: float = 0.0
    """Longest wait for its answer."""
    patience_s: float = 0.0
    """Silence for less than this says nothing of the shard."""
    served: Mask | None = None
    partial: npt.NDArray[Any] | None = None

    @property
    def brought(self) -> bool:
        """Whether it served any row."""
        return self.served is not None and bool(self.served.any())


@dataclass(slots=True, eq=False)
class Cover:
    """One attempt at a call. `served`: bool [n], rows that no sub-call of this cover has failed."""

    cover_id: int
    cause: Cause
    subs: list[SubCallState]
    running: int
    served: Mask


@dataclass(slots=True, eq=False)
class Call:
    """An open call: rows int32 [n] of its request, and uint8 [n, k] which of their pairs it holds.

    `attempt` is 0 for first calls and counts retries. `refused_by`: rank -> (why, table it
    was asked under).
    """

    call_id: int
    request_key: int
    attempt: int
    row_id: Int32s
    pairs: Bytes
    opened_at_s: float
    refused_by: dict[int, Refusal]
    covers: dict[int, Cover] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether a cover of it is on its way."""
        return any(cover.running > 0 for cover in self.covers.values())

    def sole(self, sub: SubCallState) -> bool:
        """Whether one sub-call is all that was ever sent for the call: the common case."""
        return len(self.covers) == 1 and len(self.covers[sub.cover_id].subs) == 1

    @property
    def num_pairs(self) -> int:
        """Pairs of the call."""
        return int(np.count_nonzero(self.pairs))


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request with its open calls and what was added so far. ids int32 [T, k], valid uint8 [T,
    k]. left_pairs: valid pairs that were not added yet. given_up: a call of it was dropped, so it
    cannot finish.
    """

    key: int
    layer: int
    ids: Int32s
    valid: Bytes
    deadline_at_s: float
    weights_version: str
    left_pairs: int
    given_up: bool = False
    open_calls: set[int] = field(default_factory=set)
    added: list[Contribution] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Settled:
    """What the end of a sub-call changed: the call that closed, if one did, and the call its
    refused rows became.
    """

    closed: Call | None = None
    reopened: Call | None = None


def _positions(rows: Int32s, some: Int32s) -> npt.NDArray[np.int64]:
    """Index in `rows` of each of `some`; both ascend, and `some` is often all of them."""
    if some is rows:
        return np.arange(rows.shape[0])
    return np.searchsorted(rows, some)


class CallBook:
    """All open requests, calls and sub-calls of one router."""

    def __init__(self, first_id: int = 1) -> None:
        self.requests: dict[int, OpenRequest] = {}
        self.calls: dict[int, Call] = {}
        self.subs: dict[int, SubCallState] = {}
        self.dropped_replies = 0
        self._next_id = first_id

    def open_call(
        self,
        request: OpenRequest,
        row_id: Int32s,
        pairs: Bytes,
        at_s: float,
        *,
        attempt: int = 0,
        refused_by: dict[int, Refusal] | None = None,
    ) -> Call:
        """Open a call of a request. Its pairs must be in no other open call: the caller proves it
        by construction.
        """
        call = Call(self._take_id(), request.key, attempt, row_id, pairs, at_s, refused_by or {})
        self.calls[call.call_id] = call
        request.open_calls.add(call.call_id)
        return call

    def open_cover(
        self,
        call: Call,
        cause: Cause,
        parts: Iterable[Part],
        incarnation: dict[int, int],
        order: tuple[int, int],
        at_s: float,
    ) -> Cover:
        """Start a cover of exactly the call's pairs, one sub-call a part, under the table of that
        (term, epoch)."""
        cover_id = self._take_id()
        subs = []
        for part in parts:
            sub = SubCallState(
                sub_id=self._take_id(),
                call_id=call.call_id,
                cover_id=cover_id,
                request_key=call.request_key,
                cause=cause,
                rank=part.rank,
                incarnation=incarnation[part.rank],
                order=order,
                sent_at_s=at_s,
                position=_positions(call.row_id, part.row_id),
                pair_row=part.pair_row,
                num_pairs=part.num_pairs,
                work_pairs=part.work_pairs,
            )
            subs.append(sub)
            self.subs[sub.sub_id] = sub
        assert sum(sub.num_pairs for sub in subs) == call.num_pairs, "a cover is the whole call"
        cover = Cover(cover_id, cause, subs, len(subs), np.ones(call.row_id.shape[0], np.bool_))
        call.covers[cover_id] = cover
        return cover

    def answer(
        self, sub: SubCallState, row_status: Bytes, partial: npt.NDArray[Any], at_s: float
    ) -> Settled:
        """A shard answered: row_status uint8 [R] (0 = served, else `Ended`), partial [served rows,
        H].
        """
        served = row_status == 0
        assert served.shape == sub.position.shape, "the caller compares the reply with the sub-call"
        assert partial.shape[0] == np.count_nonzero(served), "one partial row a served row"
        sub.served, sub.partial = served, partial
        call = self.calls.get(sub.call_id)
        if call is not None and call.sole(sub) and bool(served.all()):
            del self.subs[sub.sub_id]
            return self._close_at_once(call, sub, partial)
        why = Ended.STALE if bool(np.any(row_status == Ended.STALE)) else Ended.REFUSED
        return self._end(sub, served, why, at_s)

    def lose(self, sub: SubCallState, at_s: float, why: Ended = Ended.LOST) -> Settled:
        """No answer will come (or a late one is not waited for): none of its rows was served."""
        return self._end(sub, np.zeros(sub.position.shape[0], np.bool_), why, at_s)

    def drop_call(self, call: Call) -> None:
        """Give an open call up; its request cannot finish any more."""
        request = self.requests[call.request_key]
        request.open_calls.discard(call.call_id)
        request.given_up = True
        del self.calls[call.call_id]

    def close_request(self, key: int) -> OpenRequest | None:
        """Forget a request and its open calls; sub-calls still on their way become late."""
        request = self.requests.pop(key, None)
        if request is not None:
            for call_id in request.open_calls:
                del self.calls[call_id]
        return request

    def _end(self, sub: SubCallState, served: Mask, why: Ended, at_s: float) -> Settled:
        del self.subs[sub.sub_id]
        call = self.calls.get(sub.call_id)
        if call is None:
            self.dropped_replies += int(sub.brought)
            return Settled()
        cover = call.covers[sub.cover_id]
        cover.running -= 1
        if not served.all():
            cover.served[sub.position[~served]] = False
            call.refused_by[sub.rank] = Refusal(why, sub.order, sub.incarnation)
        if cover.running > 0:
            return Settled()
        if cover.served.all():
            return self._close(call, [cover], at_s)
        if call.running:
            return Settled()
        return self._close(call, list(call.covers.values()), at_s)

    def _close(self, call: Call, covers: list[Cover], at_s: float) -> Settled:
        """Add each row once, from the first of `covers` that served it; what none served becomes a
        new call.
        """
        request = self.requests[call.request_key]
        left = np.ones(call.row_id.shape[0], np.bool_)
        for cover in covers:
            taken = left & cover.served
            left &= ~cover.served
            for sub in cover.subs:
                self._add(request, call, sub, taken)
        for cover in call.covers.values():
            if cover not in covers:
                self.dropped_replies += sum(sub.brought for sub in cover.subs)
        request.open_calls.discard(call.call_id)
        del self.calls[call.call_id]
        request.left_pairs -= int(np.count_nonzero(call.pairs[~left]))
        if not left.any():
            return Settled(closed=call)
        reopened = self.open_call(
            request,
            call.row_id[left],
            call.pairs[left],
            at_s,
            attempt=call.attempt + 1,
            refused_by=dict(call.refused_by),
        )
        return Settled(closed=call, reopened=reopened)

    def _close_at_once(self, call: Call, sub: SubCallState, partial: npt.NDArray[Any]) -> Settled:
        """What `_close` does where one sub-call served the whole call: its rows are the call's, in
        order.
        """
        request = self.requests[call.request_key]
        take = np.arange(call.row_id.shape[0], dtype=np.int32)
        request.added.append(
            Contribution(call.call_id, sub.sub_id, sub.rank, call.row_id, take, partial)
        )
        request.open_calls.discard(call.call_id)
        del self.calls[call.call_id]
        request.left_pairs -= sub.num_pairs
        return Settled(closed=call)

    def _add(self, request: OpenRequest, call: Call, sub: SubCallState, taken: Mask) -> None:
        if sub.served is None or sub.partial is None or not sub.brought:
            return
        wanted = sub.served & taken[sub.position]
        if not wanted.any():
            # Served, but each of its rows failed elsewhere or came from another cover.
            self.dropped_replies += 1
            return
        place = np.cumsum(sub.served, dtype=np.int32) - 1
        request.added.append(
            Contribution(
                call_id=call.call_id,
                sub_id=sub.sub_id,
                rank=sub.rank,
                row_id=call.row_id[sub.position[wanted]],
                take=place[wanted].astype(np.int32),
                partial=sub.partial,
            )
        )

    def _take_id(self) -> int:
        taken = self._next_id
        self._next_id += 1
        return taken
