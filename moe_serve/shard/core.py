"""The heart of a shard: its queue, its compute thread, and the fence in front of every expert.

Responsible for: refusing what is wrong, late or stale; computing the rest in natural batches;
counting what was executed. Must never open a socket, know Ray, or compute a pair whose tag is not
resident at the moment its batch is taken. Called by the shard's server (sub-calls, tables),
its commands (slots) and its actor (reports, probes).

Threads: any thread may call any method. One at a time takes batches and computes: the compute
thread, started by `start`, or, where that one is idle and the batch little, the thread that
received it (`serve_waiting`), which saves two changes of threads. `lock` guards the slots and the
queue; it is never held while something is computed, read or sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from moe_serve.errors import (
    InvalidArgument,
    ResourceExhausted,
    StaleTerm,
    Unavailable,
)
from moe_serve.ports import RowStatus, SubCall
from moe_serve.shard.batch import Admitted, admit, refuse
from moe_serve.shard.batch_run import BatchRun, Tally, no_memory
from moe_serve.shard.compute.base import ComputeBackend
from moe_serve.shard.executed import Counts, Hotness, Ledger
from moe_serve.shard.facts import ShardFacts
from moe_serve.shard.kernels import count_absent
from moe_serve.shard.replies import Replies
from moe_serve.shard.served_model import ServedModel
from moe_serve.shard.stall import Stall
from moe_serve.shard.sub_call_checks import check_sub_call
from moe_serve.shard.task_queue import TaskQueue
from moe_serve.shard.work_queue import BacklogEstimate, QueueLimits, ReplyTo, Work, WorkQueue
from placement.messages.events import ShardAnswer
from placement.roles.shard import ShardSlots, TermRefused
from placement.routing import RoutingTable

PROBES_WITHOUT_MEMORY_MAX = 3
"""Probes in a row that may find no memory for their row before they fail: the compute path lives,
and memory comes back."""
STOP_TIMEOUT_S = 10.0
"""Longest wait for the compute thread to end its batch."""

_T = TypeVar("_T")


class ShardCore:
    """One shard without sockets. `slots` is its pure state; `backend` computes; `clock` gives
    monotonic seconds."""

    def __init__(
        self,
        model: ServedModel,
        slots: ShardSlots,
        backend: ComputeBackend,
        *,
        limits: QueueLimits | None = None,
        ledger_rows_max: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.slots = slots
        self.backend = backend
        self.clock = clock
        self.lock = threading.Condition(threading.RLock())
        """Guards `slots` and the queue; notified when work arrives and when pins are dropped."""
        self.hotness = Hotness(f"shard-{slots.rank}", slots.rank, slots.incarnation, model.num_keys)
        self.ledger = Ledger(ledger_rows_max)
        self._counts = Counts()
        self.keys: npt.NDArray[np.int32] = np.full(slots.ledger.num_slots, -1, np.int32)
        """Key (layer * num_experts + expert) of each slot's newest fill. Meaningful where the tag
        matches."""
        self.facts: ShardFacts | None = None
        """Where facts are noted, for tests."""
        self.on_answers: Callable[[Sequence[ShardAnswer]], None] = lambda _answers: None
        """Takes, under the lock, answers to commands that had waited for pins."""
        self._limits = limits or QueueLimits()
        self._queue = WorkQueue(self._limits)
        self._estimate = BacklogEstimate()
        self._stall = Stall()
        self._replies = Replies(model, slots, self._counts, backlog_s=self.backlog_s, clock=clock)
        self._run_batch = BatchRun(
            backend,
            model.expert.hidden_size,
            Tally(self._counts, self.hotness, self.ledger, self._estimate, self._stall),
            self._replies,
            rank=slots.rank,
            clock=clock,
        )
        self._tasks = TaskQueue(lambda: self._stopping or self.broken)
        self._busy = False
        self._lent = False
        self._stopping = False
        self._probes_without_memory = 0
        self._thread = threading.Thread(target=self._run, name="moe-compute", daemon=True)

    def use_backend(self, backend: ComputeBackend) -> None:
        """Compute through another object that holds the same slots, from the next batch on."""
        self.backend = self._run_batch.backend = backend

    # ------------------------------------------------------------------------------- lifecycle
    def start(self) -> None:
        """Warm the backend up and begin to compute. What arrived before waits in the queue."""
        self.backend.warm_up()
        self._thread.start()

    def stop(self) -> None:
        """End the compute thread after its batch and refuse what waits. Idempotent."""
        with self.lock:
            self._stopping = True
            self.lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self._refuse_waiting("stopping")

    def _refuse_waiting(self, why: str) -> None:
        """Answer everything that waits, now that nothing will be computed any more."""
        with self.lock:
            works = self._queue.drain()
        self._replies.refuse(works, why)
        self._tasks.refuse_waiting()

    @property
    def busy(self) -> bool:
        """Whether something is being computed."""
        return self._busy

    @property
    def broken(self) -> bool:
        """Whether too many batches failed in a row: the shard refuses everything and must be
        replaced."""
        return self._run_batch.broken

    @property
    def stalled_s(self) -> float:
        """Seconds for which one batch has been computed where that is far too long, else 0: a
        device or a library hangs, and nothing else is computed."""
        return self._stall.late_s(self.clock())

    def refuse_stalled(self) -> None:
        """Where computing has stalled, refuse what waits behind it, so that it is computed
        elsewhere. Called now and then by a thread that does not compute."""
        stalled_s = self.stalled_s
        if not stalled_s:
            return
        with self.lock:
            works = self._queue.drain()
        self._replies.refuse(works, f"stalled: computing for {stalled_s:.1f} s")

    # -------------------------------------------------------------------------------- data path
    def submit(self, call: SubCall, num_bytes: int, reply: ReplyTo) -> None:
        """Queue a sub-call of a message of `num_bytes`. `reply` is called exactly once, from any
        thread, possibly before this returns: with a SubReply, InvalidArgument, ResourceExhausted or
        Unavailable. Never blocks on compute.
        """
        self.enqueue(call, num_bytes, reply)
        with self.lock:
            self.lock.notify_all()

    def enqueue(self, call: SubCall, num_bytes: int, reply: ReplyTo) -> None:
        """`submit`, but `serve_waiting` must follow, once for all that was received together."""
        try:
            check_sub_call(call, self.model)
        except InvalidArgument as error:
            self._counts.add("invalid_sub_calls")
            self._replies.send([(reply, error)])
            return
        arrived_s = self.clock()
        work = Work(call, reply, arrived_s, arrived_s + call.timeout_s, num_bytes)
        with self.lock:
            why = self._why_not(call, num_bytes)
            if not why:
                self._queue.put(work)
        if why:
            self._replies.refuse([work], why)

    def serve_waiting(self) -> None:
        """Have what waits computed: by the calling thread, before this returns, where little waits
        and nothing is being computed; else by the compute thread."""
        with self.lock:
            if not self._queue.sub_calls:
                return
            if not self._may_lend():
                self.lock.notify_all()
                return
            self._busy = self._lent = True
        try:
            self._serve_batch()
        except BaseException:
            self._run_batch.set_broken()  # as where the compute thread dies
            self._refuse_waiting("broken: computing has ended")
            raise
        finally:
            with self.lock:
                self._busy = self._lent = False
                if self._queue.sub_calls or self._tasks or self._stopping:
                    self.lock.notify_all()

    def _may_lend(self) -> bool:
        """Whether the turn is free and what waits is so little that its receiver may compute it."""
        if self._busy or self._tasks or self._stopping or self._thread.ident is None:
            return False
        limits, queue = self._limits, self._queue
        expected_s = self._estimate.batch_s(queue.pairs)
        return queue.rows <= limits.direct_rows_max and expected_s <= limits.direct_s_max

    def _why_not(self, call: SubCall, num_bytes: int) -> str:
        """Why a sub-call is not queued, "" where it is."""
        if self._stopping:
            return "stopping"
        if self.broken:
            return "broken: too many batches failed in a row"
        stalled_s = self.stalled_s
        if stalled_s:
            return f"stalled: computing for {stalled_s:.1f} s"
        if self.slots.draining:
            return "draining"
        return "" if self._queue.has_room(call, num_bytes) else "busy: the queue is full"

    def probe(self) -> Future[float]:
        """Seconds of one row through the compute thread; it uses any verified slot, none where
        there is none.

        The future fails as `on_compute_thread` says, and with ResourceExhausted where there was no
        memory for the row several times in a row.
        """
        began_s = self.clock()

        def probed() -> float:
            try:
                self._probe_row()
            except MemoryError:
                self._counts.add("memory_errors")
                self._probes_without_memory += 1
                if self._probes_without_memory >= PROBES_WITHOUT_MEMORY_MAX:
                    raise ResourceExhausted("no memory for one row") from None
            else:
                self._probes_without_memory = 0
            return self.clock() - began_s

        return self.on_compute_thread(probed)

    def _probe_row(self) -> None:
        row = np.ones((1, self.model.expert.hidden_size), np.float32)
        with self.lock:
            verified = [held.slot for held in self.slots.ledger.resident() if held.verified]
            pins = np.array(verified[:1], np.int32)
            self.slots.ledger.pin(pins)
        try:
            pair_row, gate = np.zeros(len(pins), np.int32), np.ones(len(pins), np.float32)
            self.backend.forward(row, pair_row, pins, gate, np.empty_like(row))
        finally:
            self.unpin(pins)

    def compute_row(
        self, slot: int, row: npt.NDArray[np.float32]
    ) -> Future[npt.NDArray[np.float32]]:
        """One row [H] through one loaded slot with gate 1, on the compute thread; the caller holds
        the slot until the future is done (or was cancelled). It fails as `on_compute_thread`
        says."""

        def computed() -> npt.NDArray[np.float32]:
            out = np.empty((1, len(row)), np.float32)
            zero, gate = np.zeros(1, np.int32), np.ones(1, np.float32)
            self.backend.forward(row[None, :], zero, np.array([slot], np.int32), gate, out)
            result: npt.NDArray[np.float32] = out[0]
            return result

        return self.on_compute_thread(computed)

    def on_compute_thread(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` between two batches; the future fails as `TaskQueue.put` says."""
        with self.lock:
            done = self._tasks.put(work)
            self.lock.notify_all()
        return done

    def unpin(self, slots: npt.NDArray[np.integer[Any]]) -> None:
        """Drop a batch's pins; commands that waited for them are answered."""
        with self.lock:
            self.on_answers(self.slots.ledger.unpin(slots))

    def unpin_copy(self, slot: int) -> None:
        """Drop the pin of a copy from a slot; likewise."""
        with self.lock:
            self.on_answers(self.slots.ledger.unpin_copy(slot))

    def pin_copy(self, slot: int, tag: int, layer: int, expert: int) -> bool:
        """Pin a slot that is copied from. False where it does not hold that verified fill of that
        expert."""
        with self.lock:
            ledger = self.slots.ledger
            if not 0 <= slot < ledger.num_slots:
                return False
            return ledger.holder(slot) == (layer, expert, tag) and ledger.pin_copy(slot, tag)

    # --------------------------------------------------------------------------- terms and tables
    def accept_term(self, term: int) -> None:
        """Obey this term from now on. Raises StaleTerm where a higher one was seen."""
        try:
            with self.lock:
                self.slots.accept_term(term)
        except TermRefused as refused:
            self._note_refused(term, refused)
            raise StaleTerm(str(refused), term=refused.term) from refused

    def install_table(self, table: RoutingTable) -> int:
        """Keep the table if it is newer; returns the newest epoch held. Raises StaleTerm."""
        try:
            with self.lock:
                before = self.slots.table
                epoch = self.slots.install_table(table)
                if self.facts is not None and self.slots.table is not before:
                    self.facts.installed(table)
                return epoch
        except TermRefused as refused:
            self._note_refused(table.term, refused)
            raise StaleTerm(str(refused), term=refused.term) from refused

    def _note_refused(self, term: int, refused: TermRefused) -> None:
        if self.facts is not None:
            self.facts.refused(term, refused.term)

    # ---------------------------------------------------------------------------------- figures
    def backlog_s(self) -> float:
        """Estimated seconds of work queued or running."""
        return self._estimate.seconds(self._queue.pairs, self.clock())

    def counters(self) -> dict[str, float]:
        """Totals since start, by name: rows_served, rows_stale, rows_refused, invalid_sub_calls,
        batches, memory_errors, compute_failures, replies_failed (each from its first on),
        executed_pairs, compute_s, ledger_dropped_pairs; and what waits now: queued_rows,
        queued_bytes.
        """
        return {
            **self._counts.all(),
            "executed_pairs": float(self.hotness.total_pairs),
            "compute_s": self.hotness.total_s,
            "ledger_dropped_pairs": float(self.ledger.dropped_pairs),
            "queued_rows": float(self._queue.rows),
            "queued_bytes": float(self._queue.num_bytes),
        }

    # --------------------------------------------------------------------------- compute thread
    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if self._tasks:
                    self._stall.rows_began(self.clock())
                    self._tasks.run_waiting()
                    self._stall.ended()
                self._serve_batch()
        finally:
            with self.lock:
                self._busy = False
                died = not self._stopping
                if died:
                    # A bug ended the thread: nothing may be taken that nobody would compute.
                    self._run_batch.set_broken()
            if died:
                self._stall.ended()
                self._refuse_waiting("broken: the compute thread has ended")

    def _wait_for_work(self) -> bool:
        """Whether there is some; False where the shard stops."""
        with self.lock:
            while not self._stopping and (self._lent or not (self._queue.sub_calls or self._tasks)):
                self._busy = self._lent
                self.lock.wait()
            self._busy = not self._stopping
            return self._busy

    def _serve_batch(self) -> None:
        works: list[Work] = []
        try:
            with self.lock:
                works = self._queue.take()
                if not works:
                    return
                now_s = self.clock()
                try:
                    admitted, pinned = self._admit_all(works, now_s)
                except MemoryError:
                    self._counts.add("memory_errors")
                    admitted = []
            if admitted:
                try:
                    run = partial(self._run_batch.answers, admitted, now_s, self.keys)
                    facts = self.facts
                    answers = run() if facts is None else facts.watched(admitted, pinned, run)
                finally:
                    self.unpin(pinned)
            else:
                answers = [no_memory(work) for work in works]
        except BaseException:
            ended = Unavailable("the thread that computed has ended")
            self._replies.send((work.reply, ended) for work in works)
            raise
        replies = (work.reply for work in works)
        self._replies.send(zip(replies, answers, strict=True))

    def _admit_all(
        self, works: Sequence[Work], now_s: float
    ) -> tuple[list[Admitted], npt.NDArray[np.intp]]:
        """The fence of a batch, and the slots pinned for it: all that some pair names rightly."""
        named = np.zeros(len(self.keys), np.bool_)
        admitted = [self._admit(work, now_s, named) for work in works]
        # Also slots of refused rows: it is their pairs that are resident.
        pinned = np.flatnonzero(named)
        self.slots.ledger.pin(pinned)
        return admitted, pinned

    def _admit(self, work: Work, now_s: float, named: npt.NDArray[np.bool_]) -> Admitted:
        """The fence: under the lock, at the moment the batch is taken. Sets `named` [slots] for the
        slots of pairs that are resident."""
        call = work.call
        if now_s >= work.deadline_s:
            late_s = now_s - work.deadline_s
            return refuse(
                work, RowStatus.REFUSED, f"late: {late_s:.3f} s past its deadline at its turn"
            )
        if call.incarnation != self.slots.incarnation:
            return refuse(
                work,
                RowStatus.STALE,
                f"meant for incarnation {call.incarnation}, this is {self.slots.incarnation}",
            )
        resident = self.slots.ledger.served(call.pair_slot, call.pair_tag)
        # The tag alone proves the fill; a pair that takes it for another expert comes from a broken
        # router and must not be counted or combined as what it is not.
        first_key = call.layer * self.model.num_experts
        absent = count_absent(
            resident, named, self.keys, call.pair_slot, call.pair_expert, first_key
        )
        return admit(work, resident, absent)
