"""The data path of a simulated shard: its queue, its batches, and the fence in front of every slot.

Responsible for serving a row if and only if all its pairs name what is resident as its batch is
taken, for pins as long as the batch lasts, and for sums of what memory really holds as it ends.
Called by routers over the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from placement.load import HotnessReport
from placement.messages.history import RowsServed
from placement.roles.calls import Ended
from placement.topology import Phase

if TYPE_CHECKING:
    from placement.sim.shard import SimShard

QUEUE_ROWS_MAX = 48
"""Rows that may wait; a sub-call beyond them is refused at once, unless nothing waits."""

Words = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class SubCall:
    """Some pairs of a request for one shard. key: of each pair, as the router has it. values:
    uint64 [P]. reply: what the router does with the answer, sent over the network."""

    sub_id: int
    request: int
    cause: int
    layer: int
    incarnation: int
    timeout_s: float
    row_id: npt.NDArray[np.int32]
    pair_row: npt.NDArray[np.int32]
    pair_k: npt.NDArray[np.int32]
    pair_slot: npt.NDArray[np.int32]
    pair_tag: npt.NDArray[np.int64]
    pair_key: npt.NDArray[np.int64]
    values: Words
    reply: Callable[[SubReply | None], None]


@dataclass(slots=True, eq=False)
class SubReply:
    """row_status uint8 [R] (0 = served, else `Ended`); partial uint64 [served rows, 1]. (term,
    epoch) of the newest table that the shard keeps."""

    row_status: npt.NDArray[np.uint8]
    partial: Words
    backlog_s: float
    backlog_seq: int
    queue_s: float
    compute_s: float
    term: int
    epoch: int


@dataclass(slots=True, eq=False)
class _Taken:
    """A sub-call of the batch that is being computed."""

    call: SubCall
    status: npt.NDArray[np.uint8]
    pairs: npt.NDArray[np.bool_]
    queue_s: float


class Compute:
    """One compute thread. `factor`: how much longer than usual it takes."""

    def __init__(self, shard: SimShard) -> None:
        self._shard = shard
        self._queue: deque[tuple[SubCall, float]] = deque()
        """Sub-calls with the time at which each came."""
        self._probes: list[Callable[[], None]] = []
        self._rows = 0
        self._busy_until_s = -1.0
        self._seq = 0
        self._report_seq = 0
        self._executed: dict[int, int] = {}
        self._busy_s = 0.0
        self.busy = False
        self.factor = 1.0

    def submit(self, call: SubCall) -> None:
        """Queue a sub-call, or refuse it at once."""
        shard = self._shard
        why = ""
        if shard.slots.draining:
            why = "row.refused_draining"
        elif self._queue and self._rows + len(call.row_id) > QUEUE_ROWS_MAX:
            why = "row.refused_busy"
        if why:
            shard.stage.coverage.refused(why)
            status = np.full(len(call.row_id), Ended.REFUSED, np.uint8)
            self._reply(call, status, np.zeros((0, 1), np.uint64), 0.0, 0.0)
            return
        self._queue.append((call, shard.clock.now_s))
        self._rows += len(call.row_id)
        self._begin()

    def probe(self, done: Callable[[], None]) -> None:
        """Answer once the compute thread is free."""
        if self.busy:
            self._probes.append(done)
        else:
            done()

    def _begin(self) -> None:
        """Take a batch: everything of the oldest one's layer."""
        if self.busy or not self._queue:
            return
        layer = self._queue[0][0].layer
        works = [work for work in self._queue if work[0].layer == layer]
        self._queue = deque(work for work in self._queue if work[0].layer != layer)
        self._rows -= sum(len(call.row_id) for call, _ in works)
        shard, stage = self._shard, self._shard.stage
        taken = [self._admit(call, came_s) for call, came_s in works]
        ledger = shard.slots.ledger
        slots = [t.call.pair_slot[t.pairs] for t in taken]
        pinned = np.unique(np.concatenate(slots))
        ledger.pin(pinned)
        readers = pinned.tolist()
        for slot in readers:
            shard.readers[slot] += 1
        num_pairs = sum(len(s) for s in slots)
        took_s = stage.dice.around(stage.delays.compute_s) + stage.delays.pair_s * num_pairs
        took_s *= self.factor
        self.busy = True
        self._busy_until_s = shard.clock.now_s + took_s
        shard.after(took_s, lambda: self._end(taken, pinned, took_s))

    def _admit(self, call: SubCall, came_s: float) -> _Taken:
        """The fence: as the batch is taken."""
        shard = self._shard
        status = np.zeros(len(call.row_id), np.uint8)
        none = np.zeros(len(call.pair_row), np.bool_)
        queue_s = shard.clock.now_s - came_s
        if queue_s >= call.timeout_s:
            shard.stage.coverage.refused("row.refused_late")
            status[:] = Ended.REFUSED
            return _Taken(call, status, none, queue_s)
        assert call.incarnation == shard.life, "a call reaches only the life it was sent to"
        resident = shard.slots.ledger.served(call.pair_slot, call.pair_tag)
        if bool(resident.all()):
            return _Taken(call, status, resident, queue_s)
        shard.stage.coverage.refused("row.stale")
        status[call.pair_row[~resident]] = Ended.STALE
        return _Taken(call, status, status[call.pair_row] == 0, queue_s)

    def _end(self, taken: list[_Taken], pinned: npt.NDArray[np.int32], took_s: float) -> None:
        """The batch is done: sums of what memory holds now, then the pins go."""
        shard = self._shard
        memory_short = shard.trouble.no_memory
        replies: list[tuple[_Taken, Words | None]] = []
        for one in taken:
            short = memory_short and bool(one.pairs.any())
            replies.append((one, None if short else self._sum(one)))
        for slot in pinned.tolist():
            shard.readers[slot] -= 1
        answers = shard.slots.ledger.unpin(pinned)
        if answers:
            shard.deliver(answers)
        self.busy = False
        self._busy_s += took_s
        for one, partial in replies:
            if partial is None:
                shard.stage.coverage.refused("row.no_memory")
                one.call.reply(None)
            else:
                self._reply(one.call, one.status, partial, one.queue_s, took_s / len(taken))
        probes, self._probes = self._probes, []
        for done in probes:
            done()
        self._begin()

    def _sum(self, one: _Taken) -> Words:
        """Sum of each served row: uint64 [served rows, 1]. Notes what was read for it."""
        shard, call, pairs = self._shard, one.call, one.pairs
        slots = call.pair_slot[pairs]
        cells = [shard.cells[slot] for slot in slots.tolist()]
        held = [cell.key for cell in cells]
        served = one.status == 0
        out = np.zeros((int(served.sum()), 1), np.uint64)
        if not cells:
            return out
        place = np.cumsum(served) - 1
        rows = call.pair_row[pairs]
        made = call.values[pairs] * shard.stage.marks[held]
        np.add.at(out[:, 0], place[rows], made)
        for key in held:
            self._executed[key] = self._executed.get(key, 0) + 1
        shard.stage.note(
            RowsServed,
            shard.who,
            rank=shard.rank,
            sub_id=call.sub_id,
            request=call.request,
            cause=call.cause,
            row=tuple(call.row_id[rows].tolist()),
            k=tuple(call.pair_k[pairs].tolist()),
            slot=tuple(slots.tolist()),
            slot_tag=tuple(call.pair_tag[pairs].tolist()),
            key=tuple(call.pair_key[pairs].tolist()),
            held_key=tuple(held),
            held_version=cells[0].version,
            intact=all(cell.intact for cell in cells),
        )
        return out

    def _reply(
        self,
        call: SubCall,
        status: npt.NDArray[np.uint8],
        partial: Words,
        queue_s: float,
        compute_s: float,
    ) -> None:
        shard = self._shard
        table = shard.slots.table
        self._seq += 1
        waits_s = max(0.0, self._busy_until_s - shard.clock.now_s) if self.busy else 0.0
        call.reply(
            SubReply(
                row_status=status,
                partial=partial,
                backlog_s=waits_s + self._rows * shard.stage.delays.pair_s,
                backlog_seq=self._seq,
                queue_s=queue_s,
                compute_s=compute_s,
                term=shard.slots.highest_term if table is None else table.term,
                epoch=-1 if table is None else table.epoch,
            )
        )

    def report(self) -> HotnessReport:
        """What was executed since the last report, counted once. A report that is lost is lost:
        executed pairs are figures, and no plan rests on them."""
        shard, spec = self._shard, self._shard.stage.spec
        executed, self._executed = self._executed, {}
        busy_s, self._busy_s = self._busy_s, 0.0
        self._report_seq += 1
        keys = sorted(executed)
        pairs = np.array([executed[key] for key in keys], dtype=np.int64)
        seconds = np.full(len(keys), busy_s / max(1, int(pairs.sum())))
        return HotnessReport(
            source=shard.place,
            incarnation=shard.life,
            seq=self._report_seq,
            rank=shard.rank,
            at_s=shard.clock.now_s + shard.trouble.jump_s,
            key=np.array(keys, dtype=np.int32) + Phase.PREFILL * spec.num_keys,
            pairs=pairs,
            seconds=seconds * pairs,
        )
