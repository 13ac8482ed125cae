"""Replies of a shard to sub-calls.

Responsible for what every reply says of the shard: life, newest table, backlog; and for sending
each, whatever becomes of the others. Must never decide what is served. Called by the shard's core
and by its batches.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from moe_serve.errors import MoeServeError
from moe_serve.ports import RowStatus, SubReply
from moe_serve.shard.batch import Admitted, refuse
from moe_serve.shard.executed import Counts
from moe_serve.shard.served_model import ServedModel
from moe_serve.shard.work_queue import ReplyTo, Work
from placement.roles.shard import ShardSlots

_log = logging.getLogger(__name__)


class Replies:
    """Makes them. `backlog_s` gives seconds of work that wait, `clock` monotonic seconds."""

    def __init__(
        self,
        model: ServedModel,
        slots: ShardSlots,
        counts: Counts,
        *,
        backlog_s: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._hidden_size = model.expert.hidden_size
        self._slots = slots
        self._counts = counts
        self._backlog_s = backlog_s
        self._clock = clock
        self._backlog_seq = itertools.count(1)

    def of(
        self, one: Admitted, partial: npt.NDArray[np.generic], now_s: float, compute_s: float
    ) -> SubReply:
        """The reply with `partial` [served rows, H], of a batch that was taken at `now_s`."""
        call = one.work.call
        table = self._slots.table
        rest_s = self._clock() - now_s - compute_s
        return SubReply(
            call_id=call.call_id,
            sub_id=call.sub_id,
            incarnation=self._slots.incarnation,
            term=self._slots.highest_term if table is None else table.term,
            epoch=-1 if table is None else table.epoch,
            row_status=one.row_status,
            partial=partial,
            backlog_s=self._backlog_s(),
            backlog_seq=next(self._backlog_seq),
            queue_s=max(0.0, now_s - one.work.arrived_s),
            compute_s=compute_s,
            detail=one.detail,
            rest_s=max(0.0, rest_s),
        )

    def refusal(self, work: Work, detail: str) -> SubReply:
        """Answer to a sub-call that was not taken or not begun; counted. `detail` begins with one
        of the words that `SubReply.detail` lists."""
        call = work.call
        nothing = np.zeros((0, self._hidden_size), call.dtype.numpy)
        refused = refuse(work, RowStatus.REFUSED, detail)
        self._counts.add_rows(refused.row_status)
        return self.of(refused, nothing, self._clock(), 0.0)

    def refuse(self, works: Iterable[Work], detail: str) -> None:
        """Send each the refusal that `refusal` makes."""
        self.send((work.reply, self.refusal(work, detail)) for work in works)

    def send(self, answers: Iterable[tuple[ReplyTo, SubReply | MoeServeError]]) -> None:
        """Send every answer. One that cannot be sent is logged and counted, and the router that
        waits for it asks elsewhere; what would end this thread does so once all were sent."""
        ending: BaseException | None = None
        for reply, answer in answers:
            try:
                reply(answer)
            except Exception:
                self._counts.add("replies_failed")
                _log.exception("a reply could not be sent")
            except BaseException as error:  # raised below
                ending = error
        if ending is not None:
            raise ending
