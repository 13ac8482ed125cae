"""A shard of a simulated world: the production slots, over memory that remembers what it really
holds.

Responsible for carrying commands out after a while, for copies and proofs, and for memory that is
taken and given back as a shard's is. Decides nothing: what a shard may do is `roles.shard`'s to
say. Batches are in `compute`. Called by the controller, routers and other shards of a world, all
over the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    ShardCommand,
    VerifyExpert,
)
from placement.messages.events import BudgetApplied, ShardAnswer, SlotReserved, StepFailed
from placement.messages.history import (
    CommandTaken,
    MemoryUsed,
    SlotFreed,
    SlotProved,
    TableInstalled,
    TermRefused,
)
from placement.roles.shard import ShardSlots, SlotPhase, Start, Work
from placement.roles.shard import TermRefused as OldTerm
from placement.routing import RoutingTable
from placement.sim.compute import Compute
from placement.sim.network import Part
from placement.sim.stage import Stage

Reply = Callable[[ShardAnswer | OldTerm], None]
CHECKPOINT = -1
"""Source rank of a copy that is read from the checkpoint."""


@dataclass(slots=True)
class Cell:
    """Memory of one slot: the fill it was taken for, and what was written to it. key -1: nothing
    yet."""

    tag: int
    key: int = -1
    version: str = ""
    intact: bool = False


@dataclass(slots=True)
class Trouble:
    """What goes wrong in a shard now, set by the nemesis."""

    copy_factor: float = 1.0
    copies_stuck: bool = False
    copies_corrupt: bool = False
    no_memory: bool = False
    jump_s: float = 0.0
    """Offset of the clock that its answers are stamped with."""


@dataclass(slots=True)
class _Job:
    """A running copy into a slot."""

    slot: int
    tag: int


class SimShard(Part):
    """One life of one rank."""

    def __init__(self, stage: Stage, rank: int, incarnation: int, num_slots: int) -> None:
        super().__init__(f"rank{rank}", incarnation, stage.clock)
        spec = stage.spec
        self.rank = rank
        self.node = stage.topology.ranks[rank].node
        self.version = spec.weights_version
        self.slots = ShardSlots(
            rank=rank,
            incarnation=incarnation,
            num_slots=num_slots,
            slot_bytes=spec.slot_bytes,
            weights_version=spec.weights_version,
        )
        self.trouble = Trouble()
        self.cells: dict[int, Cell] = {}
        self.readers: Counter[int] = Counter()
        """Batches and copies that read a slot's memory now: kept apart from the role's pins."""
        self.stage = stage
        self.compute = Compute(self)
        self._jobs: dict[int, _Job] = {}
        self._waiting: dict[int, list[Callable[[ShardAnswer], None]]] = {}

    @property
    def ledger_bytes(self) -> tuple[int, int, int]:
        """Resident, reserved and budget bytes by the books."""
        ledger = self.slots.ledger
        return ledger.resident_bytes, ledger.reserved_bytes, ledger.budget_bytes

    # -- tables and commands ---------------------------------------------------------------------

    def install(self, table: RoutingTable, reply: Callable[[int], None]) -> None:
        """Keep a table; replies its epoch, or -(term seen) where its term is over."""
        known = self.slots.table
        try:
            epoch = self.slots.install_table(table)
        except OldTerm as refused:
            self._refused(table.term, refused)
            reply(-refused.term)
            return
        if self.slots.table is not known:
            self.stage.note(TableInstalled, self.who, term=table.term, epoch=table.epoch)
        reply(epoch)

    def execute(self, term: int, command: ShardCommand, reply: Reply) -> None:
        """Carry a command out. The reply may come much later, or, if the life ends, never."""
        try:
            self.slots.accept_term(term)
        except OldTerm as refused:
            self._refused(term, refused)
            reply(refused)
            return
        step_id = -1 if isinstance(command, SetRankSlots) else command.step_id
        name = type(command).__name__
        self.stage.note(CommandTaken, self.who, term=term, command=name, step_id=step_id)
        done = self._execute(command)
        self.deliver(self.slots.ledger.take_ready())
        if isinstance(done, Start):
            assert not isinstance(command, SetRankSlots), "a budget is applied at once"
            self._wait_for(command, done, reply)
        else:
            reply(self._counted(done))

    def _refused(self, term: int, refused: OldTerm) -> None:
        self.stage.coverage.refused("shard.term")
        self.stage.note(TermRefused, self.who, term=term, seen=refused.term)

    def _counted(self, answer: ShardAnswer) -> ShardAnswer:
        if isinstance(answer, StepFailed):
            self.stage.coverage.refused(f"step.{answer.code}")
        return answer

    def _execute(self, command: ShardCommand) -> ShardAnswer | Start:
        match command:
            case ReserveSlot():
                return self._reserve(command)
            case CopyExpert():
                return self.slots.begin_copy(command)
            case VerifyExpert():
                return self.slots.begin_verify(command)
            case AbortAdd():
                return self.slots.abort(command)
            case ReleaseSlot():
                return self.slots.release(command)
            case SetRankSlots():
                return self.slots.resize(command)
            case _:
                assert_never(command)

    def _reserve(self, command: ReserveSlot) -> ShardAnswer:
        if self.trouble.no_memory and command.slot not in self.cells:
            return StepFailed(
                at_s=0.0, step_id=command.step_id, code="over_budget", detail="out of memory"
            )
        answer = self.slots.reserve(command)
        if isinstance(answer, SlotReserved) and command.slot not in self.cells:
            # Memory is taken with the reservation, before the first byte is copied.
            self.cells[command.slot] = Cell(answer.slot_tag)
        return answer

    def _wait_for(self, command: ShardCommand, start: Start, reply: Reply) -> None:
        """The answer comes from the work, or from the end of pins; at the end of its time it is a
        failure, to be asked for again."""
        assert not isinstance(command, SetRankSlots), "it never waits"
        step_id = command.step_id
        waiting = self._waiting.setdefault(step_id, [])

        def answered(answer: ShardAnswer) -> None:
            timer.cancel()
            reply(answer)

        def too_late() -> None:
            if self._waiting.get(step_id) is not waiting:
                return  # answered while it stood still
            waiting.remove(answered)
            problem = "not done in time; ask again"
            failed = StepFailed(at_s=0.0, step_id=step_id, code="timeout", detail=problem)
            reply(self._counted(failed))

        limit_s = self.stage.delays.pin_wait_s
        if isinstance(command, CopyExpert):
            limit_s = command.timeout_s + self.stage.delays.call_timeout_s
        elif isinstance(command, VerifyExpert):
            limit_s = self.stage.delays.call_timeout_s
        timer = self.after(limit_s, too_late)
        waiting.append(answered)
        if start.work is Work.COPY:
            assert isinstance(command, CopyExpert), "only a copy starts one"
            self._start_copy(command)
        elif start.work is Work.VERIFY:
            verify_s = self.stage.dice.around(self.stage.delays.verify_s)
            self.after(verify_s, lambda: self._verified(start.slot, start.tag))
        elif start.work is Work.STOP_COPY:
            hop_s = self.stage.dice.around(self.stage.delays.network_s)
            self.after(hop_s, lambda: self._stopped(start.slot, start.tag))

    def deliver(self, answers: Sequence[ShardAnswer]) -> None:
        """Answers that became ready: to whoever waits for them."""
        self._after_change()
        for answer in answers:
            assert not isinstance(answer, BudgetApplied), "it never waits"
            self._counted(answer)
            for waiting in self._waiting.pop(answer.step_id, ()):
                waiting(answer)

    def _after_change(self) -> None:
        """Give back the memory of slots that the role has emptied, and note what is used."""
        ledger = self.slots.ledger
        freed = [
            slot
            for slot in self.cells
            if slot >= ledger.num_slots or ledger.phase(slot) is SlotPhase.EMPTY
        ]
        for slot in freed:
            cell = self.cells.pop(slot)
            self._jobs.pop(slot, None)
            self.stage.note(
                SlotFreed,
                self.who,
                rank=self.rank,
                slot=slot,
                slot_tag=cell.tag,
                readers=self.readers[slot],
            )
        resident, reserved, budget = self.ledger_bytes
        self.stage.note(
            MemoryUsed,
            self.who,
            rank=self.rank,
            resident_bytes=resident,
            reserved_bytes=reserved,
            held_bytes=len(self.cells) * self.stage.spec.slot_bytes,
            budget_bytes=budget,
        )

    # -- copies ----------------------------------------------------------------------------------

    def _start_copy(self, command: CopyExpert) -> None:
        job = _Job(command.slot, command.slot_tag)
        self._jobs[command.slot] = job
        began_s = self.clock.now_s

        def arrived(cell: Cell | None, why: str) -> None:
            if self._jobs.get(job.slot) is not job:
                return  # stopped, or too late
            del self._jobs[job.slot]
            took_s = self.clock.now_s - began_s
            self._copy_ended(job, cell, why, took_s)

        self.after(command.timeout_s, lambda: arrived(None, "timeout"))
        source = command.source
        if source.rank == CHECKPOINT:
            key = self.stage.spec.key(command.layer, command.expert)
            intact = not self.trouble.copies_corrupt
            cell = Cell(command.slot_tag, key, self.version, intact=intact)
            if not self.trouble.copies_stuck:
                self.after(self._copy_s(), lambda: arrived(cell, ""))
            return
        assert source.address is not None, "a replica has an address"
        peer = self.stage.shard(source.rank, source.address.incarnation)
        if peer is None:
            hop_s = self.stage.dice.around(self.stage.delays.network_s)
            self.after(hop_s, lambda: arrived(None, "source_lost"))
            return
        found, network = peer, self.stage.network

        def sent(cell: Cell | None, why: str) -> None:
            network.send(found, self, lambda: arrived(cell, why))

        network.send(
            self,
            peer,
            lambda: found.send_copy(source.slot, source.slot_tag, command.timeout_s, sent),
        )

    def _copy_s(self) -> float:
        return self.stage.dice.around(self.stage.delays.copy_s) * self.trouble.copy_factor

    def send_copy(
        self, slot: int, tag: int, timeout_s: float, sent: Callable[[Cell | None, str], None]
    ) -> None:
        """Send a slot's bytes: pinned while they are read, at most for the copy's time."""
        if not self.slots.ledger.pin_copy(slot, tag):
            sent(None, "source_lost")
            return
        self.readers[slot] += 1
        took_s, trouble = self._copy_s(), self.trouble
        whole = took_s < timeout_s and not trouble.copies_stuck

        def read() -> None:
            cell = self.cells[slot]
            intact = cell.intact and not trouble.copies_corrupt
            copied = Cell(cell.tag, cell.key, cell.version, intact=intact)
            self.readers[slot] -= 1
            self.deliver(self.slots.ledger.unpin_copy(slot))
            if whole:
                sent(copied, "")

        self.after(min(took_s, timeout_s) if whole else timeout_s, read)

    def _copy_ended(self, job: _Job, cell: Cell | None, why: str, took_s: float) -> None:
        if self.trouble.no_memory:
            cell, why = None, "io"
        if cell is None:
            detail = "out of memory" if why == "io" else "the copy ended early"
            self.deliver(self.slots.copy_failed(job.slot, job.tag, why, detail))
            return
        held = self.cells[job.slot]
        assert held.tag == job.tag, "a copy writes only to the memory it was begun for"
        held.key, held.version, held.intact = cell.key, cell.version, cell.intact
        size = self.stage.spec.expert_bytes
        self.deliver(self.slots.copied(job.slot, job.tag, size, took_s))

    def _stopped(self, slot: int, tag: int) -> None:
        job = self._jobs.get(slot)
        if job is not None and job.tag == tag:
            del self._jobs[slot]
            self.deliver(self.slots.copy_stopped(slot, tag))

    # -- proofs ----------------------------------------------------------------------------------

    def _verified(self, slot: int, tag: int) -> None:
        """Compare what memory holds with what the manifest says."""
        cell = self.cells.get(slot)
        if cell is None or cell.tag != tag:
            return
        layer, expert, _ = self.slots.ledger.holder(slot)
        key = self.stage.spec.key(layer, expert)
        right = cell.intact and cell.key == key and cell.version == self.version
        answers = self.slots.verified(slot, tag, "" if right else "digest differs")
        if self.slots.ledger.phase(slot) is SlotPhase.VERIFIED:
            self.stage.note(
                SlotProved,
                self.who,
                rank=self.rank,
                slot=slot,
                slot_tag=tag,
                key=key,
                version=self.version,
                held_key=cell.key,
                held_version=cell.version,
                intact=cell.intact,
            )
        self.deliver(answers)
