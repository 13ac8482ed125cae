"""What a shard decides about its slots: reserve, fill, prove, serve, pin, release. Pure.

Responsible for tags, pins, terms and budgets: a pair is served if and only if its (slot, tag) is
what is resident now; a slot is refilled or freed only when no batch and no copy pins it; commands
may come twice or out of order and have one effect. Moves no byte and starts no thread: where work
is to be done it says so (`Start`), and is told when it is done. Called by the shard actor (on its
compute thread or under its lock) and by the simulator.

Life of a slot:

    EMPTY -> RESERVED -> COPYING -> FILLED -> VERIFIED -> RELEASING -> EMPTY        ABORTING ->
    EMPTY

The *tag* is the fill number given at RESERVED: never used twice in a life of the shard, whatever
becomes of the fill. Only VERIFIED slots answer to their tag. RELEASING and ABORTING wait for pins
and for the running copy.

>>> slots = ShardSlots(rank=0, incarnation=1, num_slots=2, slot_bytes=100, weights_version="v1")
"""

from __future__ import annotations

from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    VerifyExpert,
)
from placement.messages.events import (
    AddAborted,
    BudgetApplied,
    ExpertCopied,
    ExpertVerified,
    ResidentSlot,
    ShardAnswer,
    SlotReleased,
    SlotReserved,
    StepFailed,
)
from placement.roles.shard.ledger import SlotLedger
from placement.roles.shard.records import Slot, SlotPhase, Start, TermRefused, Work
from placement.routing import RoutingTable


class ShardSlots:
    """Commands of one shard: its ledger, its highest term and its newest table."""

    def __init__(
        self, *, rank: int, incarnation: int, num_slots: int, slot_bytes: int, weights_version: str
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.ledger = SlotLedger(num_slots, slot_bytes)
        self.highest_term = 0
        self.draining = False
        self.table: RoutingTable | None = None
        self._weights_version = weights_version
        self._next_tag = 1

    @property
    def highest_epoch(self) -> int:
        """Epoch of the newest table kept, -1 without one."""
        return -1 if self.table is None else self.table.epoch

    def accept_term(self, term: int) -> None:
        """Obey this term from now on. Raises TermRefused where a higher one was seen."""
        if term < self.highest_term:
            raise TermRefused(term, self.highest_term)
        self.highest_term = term

    def inventory(self, term: int) -> tuple[ResidentSlot, ...]:
        """What is held, told to the controller of this term: from here on an older one is refused,
        so nothing that it still has on its way changes what was told. Raises TermRefused."""
        self.accept_term(term)
        return self.ledger.resident()

    def install_table(self, table: RoutingTable) -> int:
        """Keep the table if it is newer; the newest epoch held. Raises TermRefused."""
        self.accept_term(table.term)
        if self.table is None or table.is_newer(self.table):
            self.table = table
        return self.table.epoch

    def reserve(self, command: ReserveSlot) -> ShardAnswer:
        """Claim an empty slot and give it its tag; the same tag when asked again."""
        refused = self._refusal(command.step_id, command.incarnation)
        if refused is not None:
            return refused
        if command.weights_version != self._weights_version:
            return self._failed(
                command.step_id,
                "io",
                f"weights version {command.weights_version!r}, "
                f"this shard has {self._weights_version!r}",
            )
        if self.draining:
            return self._failed(command.step_id, "no_slot", "the shard is draining")
        if not 0 <= command.slot < len(self.ledger.slots):
            return self._failed(
                command.step_id,
                "over_budget",
                f"slot {command.slot}, the budget allows {len(self.ledger.slots)}",
            )
        slot = self.ledger.slots[command.slot]
        if slot.step_id == command.step_id and slot.phase is not SlotPhase.EMPTY:
            return SlotReserved(at_s=0.0, step_id=command.step_id, slot_tag=slot.tag)
        if slot.phase is not SlotPhase.EMPTY:
            return self._failed(command.step_id, "no_slot", f"slot {command.slot} is {slot.phase}")
        self.ledger.slots[command.slot] = Slot(
            phase=SlotPhase.RESERVED,
            tag=self._next_tag,
            layer=command.layer,
            expert=command.expert,
            step_id=command.step_id,
        )
        self._next_tag += 1
        return SlotReserved(
            at_s=0.0, step_id=command.step_id, slot_tag=self.ledger.slots[command.slot].tag
        )

    def begin_copy(self, command: CopyExpert) -> ShardAnswer | Start:
        """Start(COPY) the first time, Start(WAIT) while it runs, the answer once it is done."""
        refused = self._refusal(command.step_id, command.incarnation)
        if refused is not None:
            return refused
        slot = self.ledger.claimed(command.slot, command.slot_tag, command.step_id)
        if slot is None:
            return self._failed(command.step_id, "no_slot", f"slot {command.slot} is not reserved")
        if slot.phase is SlotPhase.RESERVED:
            slot.phase, slot.copying = SlotPhase.COPYING, True
            return Start(Work.COPY, command.slot, slot.tag, command.step_id)
        if slot.phase is SlotPhase.COPYING:
            if slot.copying:
                return Start(Work.WAIT, command.slot, slot.tag, command.step_id)
            slot.copying = True
            return Start(Work.COPY, command.slot, slot.tag, command.step_id)
        if slot.phase in (SlotPhase.FILLED, SlotPhase.VERIFIED):
            return ExpertCopied(
                at_s=0.0, step_id=command.step_id, copy_bytes=slot.copy_bytes, seconds=slot.copy_s
            )
        return self._failed(command.step_id, "no_slot", f"slot {command.slot} is {slot.phase}")

    def copied(self, slot_id: int, tag: int, copy_bytes: int, seconds: float) -> list[ShardAnswer]:
        """All bytes are there. Nothing where the add was aborted meanwhile (the slot is then
        freed)."""
        slot = self.ledger.slots[slot_id]
        if slot.tag != tag:
            return []
        slot.copying = False
        if slot.phase is SlotPhase.COPYING:
            slot.phase, slot.copy_bytes, slot.copy_s = SlotPhase.FILLED, copy_bytes, seconds
            self.ledger.ready.append(
                ExpertCopied(at_s=0.0, step_id=slot.step_id, copy_bytes=copy_bytes, seconds=seconds)
            )
        self.ledger.try_free(slot_id)
        return self.ledger.take_ready()

    def copy_failed(self, slot_id: int, tag: int, code: str, detail: str) -> list[ShardAnswer]:
        """The bytes did not come. The slot stays claimed until the add is aborted or tried
        again."""
        slot = self.ledger.slots[slot_id]
        if slot.tag != tag:
            return []
        slot.copying = False
        if slot.phase is SlotPhase.COPYING:
            self.ledger.ready.append(self._failed(slot.step_id, code, detail))
        self.ledger.try_free(slot_id)
        return self.ledger.take_ready()

    def copy_stopped(self, slot_id: int, tag: int) -> list[ShardAnswer]:
        """A copy that was to stop has stopped."""
        return self.copy_failed(slot_id, tag, "timeout", "the copy was stopped")

    def begin_verify(self, command: VerifyExpert) -> ShardAnswer | Start:
        """Start(VERIFY) for a filled slot. Asked by a remove's step id it recalls that removal: the
        slot is kept."""
        refused = self._refusal(command.step_id, command.incarnation, but="recalled")
        if refused is not None:
            return refused
        slot = self.ledger.holding(command.slot, command.slot_tag)
        if slot is None:
            return self._failed(
                command.step_id, "no_slot", f"slot {command.slot} has no tag {command.slot_tag}"
            )
        if slot.step_id != command.step_id and slot.phase in (
            SlotPhase.VERIFIED,
            SlotPhase.RELEASING,
        ):
            return self._recall(command, slot)
        if slot.phase is SlotPhase.FILLED:
            return Start(Work.VERIFY, command.slot, slot.tag, command.step_id)
        if slot.phase is SlotPhase.VERIFIED:
            return ExpertVerified(at_s=0.0, step_id=command.step_id)
        return self._failed(command.step_id, "no_slot", f"slot {command.slot} is {slot.phase}")

    def _recall(self, command: VerifyExpert, slot: Slot) -> ShardAnswer:
        if slot.phase is SlotPhase.RELEASING:
            self.ledger.ready.append(
                self._failed(slot.leaving_step, "recalled", "the removal was taken back")
            )
            slot.phase, slot.leaving_step = SlotPhase.VERIFIED, -1
            self.ledger.tags[command.slot] = slot.tag
        # The release may still be on its way: it will find itself recalled.
        self.ledger.end(command.step_id, "recalled")
        return ExpertVerified(at_s=0.0, step_id=command.step_id)

    def verified(self, slot_id: int, tag: int, problem: str = "") -> list[ShardAnswer]:
        """The proof of a filled slot: from now on served, or (with a problem) still only
        claimed."""
        slot = self.ledger.slots[slot_id]
        if slot.tag != tag or slot.phase is not SlotPhase.FILLED:
            return []
        if problem:
            return [self._failed(slot.step_id, "digest", problem)]
        slot.phase = SlotPhase.VERIFIED
        self.ledger.tags[slot_id] = tag
        return [ExpertVerified(at_s=0.0, step_id=slot.step_id)]

    def abort(self, command: AbortAdd) -> ShardAnswer | Start:
        """Give the slot back; Start(STOP_COPY) while bytes are being written, Start(WAIT) while it
        is pinned."""
        if self.ledger.ended.get(command.step_id) == "aborted":
            return AddAborted(at_s=0.0, step_id=command.step_id)
        if command.incarnation != self.incarnation:
            return self._wrong_life(command.step_id, command.incarnation)
        index = next(
            (
                i
                for i, s in enumerate(self.ledger.slots)
                if s.step_id == command.step_id and s.tag >= 0
            ),
            None,
        )
        if index is None:
            # Also where the reservation is still on its way: it will find itself aborted.
            self.ledger.end(command.step_id, "aborted")
            return AddAborted(at_s=0.0, step_id=command.step_id)
        slot = self.ledger.slots[index]
        slot.phase = SlotPhase.ABORTING
        self.ledger.tags[index] = -1
        was_copying, tag = slot.copying, slot.tag
        self.ledger.try_free(index)
        if self.ledger.ended.get(command.step_id) == "aborted":
            self.ledger.ready = [
                a for a in self.ledger.ready if getattr(a, "step_id", -1) != command.step_id
            ]
            return AddAborted(at_s=0.0, step_id=command.step_id)
        return Start(Work.STOP_COPY if was_copying else Work.WAIT, index, tag, command.step_id)

    def release(self, command: ReleaseSlot) -> ShardAnswer | Start:
        """Free the slot, whatever fill it holds; Start while a batch or a copy pins it or it is
        written."""
        ended = self.ledger.ended.get(command.step_id)
        if ended == "released":
            return SlotReleased(at_s=0.0, step_id=command.step_id)
        if ended == "recalled":
            return self._failed(command.step_id, "recalled", "the removal was taken back")
        if command.incarnation != self.incarnation:
            return self._wrong_life(command.step_id, command.incarnation)
        slot = self.ledger.holding(command.slot, command.slot_tag)
        if slot is None or slot.phase is SlotPhase.ABORTING:
            return self._failed(
                command.step_id,
                "no_slot",
                f"slot {command.slot} does not hold tag {command.slot_tag}",
            )
        slot.phase, slot.leaving_step = SlotPhase.RELEASING, command.step_id
        self.ledger.tags[command.slot] = -1
        tag, was_copying = slot.tag, slot.copying
        self.ledger.try_free(command.slot)
        if self.ledger.ended.get(command.step_id) == "released":
            self.ledger.ready = [
                a for a in self.ledger.ready if getattr(a, "step_id", -1) != command.step_id
            ]
            return SlotReleased(at_s=0.0, step_id=command.step_id)
        work = Work.STOP_COPY if was_copying else Work.WAIT
        return Start(work, command.slot, tag, command.step_id)

    def resize(self, command: SetRankSlots) -> ShardAnswer:
        """Take the budget. Slots above a smaller one must be empty. StepFailed (step id -1)
        otherwise."""
        if command.incarnation != self.incarnation:
            return self._wrong_life(-1, command.incarnation)
        if (
            command.num_slots < 0
            or command.num_slots * self.ledger.slot_bytes > command.budget_bytes
        ):
            return self._failed(
                -1,
                "over_budget",
                f"{command.num_slots} slots of {self.ledger.slot_bytes} bytes "
                f"exceed {command.budget_bytes}",
            )
        high = [
            i
            for i, s in enumerate(self.ledger.slots)
            if i >= command.num_slots and s.phase is not SlotPhase.EMPTY
        ]
        if high:
            return self._failed(-1, "no_slot", f"slots {high[:8]} are not empty")
        self.ledger.resize(command.num_slots, command.budget_bytes)
        return BudgetApplied(at_s=0.0, rank=self.rank, num_slots=command.num_slots)

    def drain(self) -> None:
        """Refuse new reservations and new batches from now on."""
        self.draining = True

    def _refusal(self, step_id: int, incarnation: int, but: str = "") -> ShardAnswer | None:
        if incarnation != self.incarnation:
            return self._wrong_life(step_id, incarnation)
        ended = self.ledger.ended.get(step_id)
        if ended is not None and ended != but:
            return self._failed(step_id, "no_slot", f"the step was {ended}")
        return None

    def _wrong_life(self, step_id: int, incarnation: int) -> StepFailed:
        return self._failed(
            step_id, "io", f"incarnation {incarnation} was meant, this is {self.incarnation}"
        )

    @staticmethod
    def _failed(step_id: int, code: str, detail: str) -> StepFailed:
        return StepFailed(at_s=0.0, step_id=step_id, code=code, detail=detail)
