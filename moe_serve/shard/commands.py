"""Placement commands of a shard, carried out: what `placement.roles.shard` decides, with memory,
copies and digests.

Responsible for the work that a command asks for and for waiting for its answer, fenced by the
controller's term. Must never decide whether a command is right, late or repeated (the role does),
exceed the byte budget, or give memory back before the role has freed the slot. Called by the
shard's actor, each call on a thread of its own (commands block; copies for as long as they take).

All state changes happen under the core's lock: the role frees a slot and its memory is given back
in one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from moe_serve.errors import DeadlineExceeded
from moe_serve.ports import RunningCopy
from moe_serve.shard.copy_job import CopyJob, CopyOutcome, CopySources
from moe_serve.shard.core import ShardCore
from moe_serve.shard.faults import Faults
from moe_serve.shard.probe_row import probe_input, probe_problem
from moe_serve.shard.slot_pool import BudgetExceeded, SlotPool
from moe_serve.weights.canonical import canonical_digest
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    ShardCommand,
    VerifyExpert,
)
from placement.messages.events import (
    AddAborted,
    BudgetApplied,
    ShardAnswer,
    SlotReserved,
    StepFailed,
)
from placement.roles.shard import SlotPhase, Start, Work

PIN_WAIT_S = 2.0
"""Longest wait of a release or abort for pins and copies to end; then it answers
StepFailed(timeout) and is sent again."""
COPY_GRACE_S = 5.0
"""Time beyond its own deadline that a copy gets to notice it."""
GIVE_UP_AFTER_S = 0.5
"""Time in which a copy that is told to stop usually does; one that hangs in a read is then given
up."""
HUNG_READS_MAX = 4
"""Copies given up whose threads still hang in a read: with so many the checkpoint is asked for
nothing more."""
ROW_WAIT_S = 30.0
"""Longest wait of a proof for its probe row, which queues behind batches."""


class ShardCommands:
    """Runs commands against one core and its pool."""

    def __init__(
        self,
        core: ShardCore,
        pool: SlotPool,
        sources: CopySources,
        *,
        faults: Faults | None = None,
        pin_wait_s: float = PIN_WAIT_S,
        row_wait_s: float = ROW_WAIT_S,
    ) -> None:
        self._core = core
        self._slots = core.slots
        self._pool = pool
        self._sources = sources
        self._faults = faults or Faults()
        self._pin_wait_s = pin_wait_s
        self._row_wait_s = row_wait_s
        self._jobs: dict[int, CopyJob] = {}
        """Running copies by slot. This and the rest is guarded by the core's lock."""
        self._hung: list[CopyJob] = []
        """Copies given up whose threads may still hang."""
        self.copies_by_source: Counter[str] = Counter()
        """Copies that succeeded, by where their bytes came from."""
        self.copies_s = 0.0
        """Seconds that these took."""
        self._loaded: set[int] = set()
        """Slots that the backend holds."""
        self._leaving: set[int] = set()
        """Slots that the role frees once nothing pins them."""
        self._verifying: set[int] = set()
        """Slots whose bytes are being digested and probed."""
        self._rows: dict[int, Future[npt.NDArray[np.float32]]] = {}
        """Probe rows of such slots."""
        self._waiting: dict[int, list[SimpleQueue[ShardAnswer]]] = {}
        """Threads that wait for the answer to a step."""
        core.on_answers = self._deliver

    def execute(self, term: int, command: ShardCommand) -> ShardAnswer:
        """Run one command; blocks until it is answered. Raises StaleTerm (a higher term has been
        seen), and where a probe row was not computed DeadlineExceeded, Unavailable or
        ResourceExhausted."""
        self._obey(term, command)
        point = _FAULT_OF.get(type(command), "")
        if self._faults.fails(point):
            assert not isinstance(command, SetRankSlots), "no fault point for it"
            return self._failed(command.step_id, "io", "ordered by a fault point")
        try:
            answer = self._carry_out(term, command)
        except MemoryError as error:
            step_id = -1 if isinstance(command, SetRankSlots) else command.step_id
            answer = self._failed(step_id, "over_budget", f"no memory for the command: {error}")
        return msgspec.structs.replace(answer, at_s=self._core.clock())

    def _obey(self, term: int, command: ShardCommand) -> None:
        with self._core.lock:
            self._core.accept_term(term)
            if self._core.facts is not None:
                self._core.facts.taken(term, command)

    def _carry_out(self, term: int, command: ShardCommand) -> ShardAnswer:
        match command:
            case ReserveSlot():
                return self._reserve(term, command)
            case CopyExpert():
                return self._copy(command)
            case VerifyExpert():
                return self._verify(command)
            case AbortAdd() | ReleaseSlot():
                return self._leave(term, command)
            case SetRankSlots():
                return self._set_slots(term, command)

    def progress(self) -> tuple[RunningCopy, ...]:
        """How far each running copy is, by slot."""
        with self._core.lock:
            return tuple(job.progress() for _slot, job in sorted(self._jobs.items()))

    @property
    def hung_reads(self) -> int:
        """Copies given up whose threads still hang in a read."""
        with self._core.lock:
            self._hung = [job for job in self._hung if job.alive]
            return len(self._hung)

    def abort_all(self) -> None:
        """Tell every running copy to stop and wait for it, for a shard that ends."""
        with self._core.lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.abort()
        for job in jobs:
            self._stop_copy(job)

    def _reserve(self, term: int, command: ReserveSlot) -> ShardAnswer:
        model = self._core.model
        if not model.holds(command.layer, command.expert):
            return self._failed(
                command.step_id, "no_slot", f"no layer {command.layer} expert {command.expert}"
            )
        pool = self._pool
        with self._core.lock:
            self._core.accept_term(term)  # under the lock: nothing changes after an inventory
            claimed = 0 <= command.slot < pool.num_slots and not pool.holds(command.slot)
            if claimed:
                # The bytes count against the budget from here on, before the first one is copied,
                # and before the role gives a tag: what fails here has changed nothing.
                problem = self._claim(command.slot)
                if problem:
                    return self._failed(command.step_id, "over_budget", problem)
            answer = self._slots.reserve(command)
            if claimed and isinstance(answer, SlotReserved):
                self._core.keys[command.slot] = model.key(command.layer, command.expert)
                if self._core.facts is not None:
                    self._core.facts.claimed(command.slot, answer.slot_tag)
            elif claimed:
                pool.release(command.slot)
            self._note_memory()
        return answer

    def _claim(self, slot: int) -> str:
        """Take a slot's memory; why that is not possible, "" where it was."""
        try:
            self._faults.out_of_memory("oom-reserve")
            self._pool.acquire(slot)
        except BudgetExceeded as error:
            return (
                f"{error.missing_bytes} bytes of the rank's budget missing "
                f"({error.resident_bytes} of {error.budget_bytes} are taken)"
            )
        except MemoryError as error:
            return f"no memory for a slot of {self._pool.slot_bytes} bytes: {error}"
        return ""

    def _copy(self, command: CopyExpert) -> ShardAnswer:
        with self._core.lock:
            begun = self._slots.begin_copy(command)
            if not isinstance(begun, Start):
                return begun
            answers = self._expect(command.step_id)
            if begun.work is Work.COPY:
                self._start_copy(command)
        answer = self._wait(command.step_id, answers, command.timeout_s + COPY_GRACE_S)
        if isinstance(answer, AddAborted):
            # The abort has its own answer; this one is to the copy.
            return self._failed(command.step_id, "no_slot", "the step was aborted")
        return answer

    def _start_copy(self, command: CopyExpert) -> None:
        def ended(outcome: CopyOutcome) -> None:
            with self._core.lock:
                self._jobs.pop(command.slot, None)
                if outcome.loaded:
                    self._loaded.add(command.slot)
                slot, tag = command.slot, command.slot_tag
                if outcome.code:
                    answers = self._slots.copy_failed(slot, tag, outcome.code, outcome.detail)
                else:
                    self.copies_by_source[outcome.source] += 1
                    self.copies_s += outcome.seconds
                    size = self._core.model.expert.canonical_bytes
                    answers = self._slots.copied(slot, tag, size, outcome.seconds)
                self._deliver(answers)

        if command.source.rank < 0 and self.hung_reads >= HUNG_READS_MAX:
            ended(CopyOutcome("io", f"{HUNG_READS_MAX} reads of the checkpoint hang", 0.0, False))
            return
        sources = self._sources
        if command.source.rank >= 0 and self.hung_reads:
            # It may be the cache's disk that hangs, and a rank needs none.
            sources = replace(sources, cache=None)
        job = CopyJob(self._core, self._pool, sources, command, faults=self._faults, on_end=ended)
        self._jobs[command.slot] = job
        job.start()

    def _verify(self, command: VerifyExpert) -> ShardAnswer:
        with self._core.lock:
            begun = self._slots.begin_verify(command)
            if not isinstance(begun, Start):
                return begun
            if begun.slot in self._verifying:
                return self._failed(command.step_id, "timeout", "is being verified already")
            self._verifying.add(begun.slot)
            layer, expert, _tag = self._slots.ledger.holder(begun.slot)
        code, problem = "digest", "the probe row was not computed"
        try:
            problem = self._problem(begun.slot, layer, expert)
            if self._core.facts is not None:
                self._core.facts.look(begun.slot, self._core.model.key(layer, expert))
        except MemoryError as error:
            code, problem = "over_budget", f"no memory to prove the fill: {error}"
        finally:
            with self._core.lock:
                row = self._rows.pop(begun.slot, None)
                answers = self._slots.verified(begun.slot, begun.tag, problem)
                self._note_proof(begun)
            if row is None:
                self._verified(begun.slot)
            else:
                # Usually at once. A row that hangs in the backend still reads the slot.
                row.add_done_callback(lambda _row: self._verified(begun.slot))
        if not answers:
            return self._failed(command.step_id, "timeout", "was aborted")
        answer = answers[0]
        if isinstance(answer, StepFailed):
            return msgspec.structs.replace(answer, code=code)
        return answer

    def _problem(self, slot: int, layer: int, expert: int) -> str:
        """What is wrong with a filled slot, "" where its digest and probe row are right."""
        backend, spec = self._core.backend, self._core.model.expert
        canonical = backend.canonical_bytes(slot)
        want = self._sources.experts.canonical_sha256(layer, expert)
        got = canonical_digest(canonical)
        where = f"slot {slot}, layer {layer} expert {expert}"
        if got != want:
            return f"{where}: resident bytes have SHA-256 {got}, the manifest says {want}"
        out = self._probe_row(slot, probe_input(spec.hidden_size))
        problem = probe_problem(spec, canonical, out, backend.simulated)
        return f"{where}: {problem}" if problem else ""

    def _probe_row(self, slot: int, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        computed = self._core.compute_row(slot, row)
        with self._core.lock:
            self._rows[slot] = computed
        try:
            return computed.result(self._row_wait_s)
        except TimeoutError as error:
            computed.cancel()
            raise DeadlineExceeded(
                f"slot {slot}: its probe row was not computed within {self._row_wait_s:g} s"
            ) from error

    def _verified(self, slot: int) -> None:
        """Nothing reads the slot for its proof any more."""
        with self._core.lock:
            self._verifying.discard(slot)
            self._core.lock.notify_all()

    def _leave(self, term: int, command: AbortAdd | ReleaseSlot) -> ShardAnswer:
        with self._core.lock:
            # A slot that is being digested and probed is held by nothing the role knows of.
            free = self._core.lock.wait_for(
                lambda: command.slot not in self._verifying, self._pin_wait_s
            )
            if not free:
                return self._failed(command.step_id, "timeout", "is being verified")
            self._core.accept_term(term)  # a higher one may have taken stock meanwhile
            if isinstance(command, AbortAdd):
                begun = self._slots.abort(command)
            else:
                begun = self._slots.release(command)
            if not isinstance(begun, Start):
                for slot in self._pool.held_slots:
                    self._give_back(slot)
                self._note_memory()
                return begun
            self._leaving.add(begun.slot)
            answers = self._expect(command.step_id)
            job = self._jobs.get(begun.slot) if begun.work is Work.STOP_COPY else None
        if job is not None:
            self._stop_copy(job)
        return self._wait(command.step_id, answers, self._pin_wait_s)

    def _stop_copy(self, job: CopyJob) -> None:
        """Have a copy end, if need be without its thread."""
        job.abort()
        if job.join(min(GIVE_UP_AFTER_S, self._pin_wait_s)) or not job.give_up():
            return
        with self._core.lock:
            self._hung.append(job)

    def _set_slots(self, term: int, command: SetRankSlots) -> ShardAnswer:
        with self._core.lock:
            self._core.accept_term(term)
            pool = self._pool
            missing = pool.resident_bytes - command.budget_bytes
            # Where slots above the new number are held, the role names them.
            if missing > 0 and max(pool.held_slots) < command.num_slots:
                return self._failed(
                    -1,
                    "over_budget",
                    f"{missing} bytes missing: slots hold {pool.resident_bytes}",
                )
            # First, because it may find no memory; keys of slots that are not there are never read.
            more = command.num_slots - len(self._core.keys)
            if more > 0 and command.num_slots * pool.slot_bytes <= command.budget_bytes:
                self._core.keys = np.append(self._core.keys, np.full(more, -1, np.int32))
            answer = self._slots.resize(command)
            if isinstance(answer, BudgetApplied):
                pool.budget_bytes = command.budget_bytes
                if command.num_slots > pool.num_slots:
                    pool.grow(command.num_slots)
                self._note_memory()
        return answer

    # -------------------------------------------------------------------------- under the lock
    def _deliver(self, answers: Sequence[ShardAnswer]) -> None:
        """Give back the memory of slots just freed, then wake whoever waits for these answers."""
        for slot in tuple(self._leaving):
            self._give_back(slot)
        self._note_memory()
        for answer in answers:
            assert not isinstance(answer, BudgetApplied), "it never waits"
            for waiting in self._waiting.pop(answer.step_id, ()):
                waiting.put(answer)

    def _give_back(self, slot: int) -> None:
        """Free the memory of a slot that the role has emptied."""
        if self._pool.holds(slot) and self._slots.ledger.phase(slot) is SlotPhase.EMPTY:
            if slot in self._loaded:
                self._core.backend.unload_slot(slot)
                self._loaded.discard(slot)
            self._pool.release(slot)
            self._leaving.discard(slot)
            if self._core.facts is not None:
                self._core.facts.freed(slot)

    def _note_memory(self) -> None:
        if self._core.facts is not None:
            self._core.facts.memory()

    def _note_proof(self, begun: Start) -> None:
        facts, ledger = self._core.facts, self._slots.ledger
        if facts is not None and ledger.phase(begun.slot) is SlotPhase.VERIFIED:
            layer, expert, tag = ledger.holder(begun.slot)
            if tag == begun.tag:
                facts.proved(begun.slot, tag, self._core.model.key(layer, expert))

    def _expect(self, step_id: int) -> SimpleQueue[ShardAnswer]:
        answers: SimpleQueue[ShardAnswer] = SimpleQueue()
        self._waiting.setdefault(step_id, []).append(answers)
        return answers

    def _wait(
        self, step_id: int, answers: SimpleQueue[ShardAnswer], timeout_s: float
    ) -> ShardAnswer:
        """Not under the lock."""
        try:
            return answers.get(timeout=timeout_s)
        except Empty:
            with self._core.lock:
                waiting = self._waiting.get(step_id, [])
                if answers in waiting:
                    waiting.remove(answers)
                if not waiting:
                    self._waiting.pop(step_id, None)
            return self._failed(step_id, "timeout", f"not done within {timeout_s:g} s; ask again")

    def _failed(self, step_id: int, code: str, detail: str) -> StepFailed:
        return StepFailed(at_s=self._core.clock(), step_id=step_id, code=code, detail=detail)


_FAULT_OF: Final[Mapping[type, str]] = MappingProxyType(
    {
        ReserveSlot: "reserve",
        CopyExpert: "copy",
        VerifyExpert: "verify",
        ReleaseSlot: "release",
    }
)
"""Fault point of each kind of command that has one."""
