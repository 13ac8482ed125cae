"""Which fill is in which slot, what pins it, and how steps ended.

Responsible for the fence (`served`), for pins, and for freeing a slot only once nothing holds it.
Takes no command. Called by `ShardSlots` and, for batches and copies, by whoever computes and
copies.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from placement.messages.events import AddAborted, ResidentSlot, ShardAnswer, SlotReleased
from placement.roles.kernels import match_tags
from placement.roles.shard.records import Slot, SlotPhase

REMEMBERED_STEPS = 65_536
"""Ended steps whose ids are kept, so that a late or repeated command is known. Oldest forgotten
first."""


class SlotLedger:
    """Slots 0..num_slots-1. `tags` int64 [num_slots]: tag of what is served there, -1 where nothing
    is."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.budget_bytes = num_slots * slot_bytes
        self.slots = [Slot() for _ in range(num_slots)]
        self.tags: npt.NDArray[np.int64] = np.full(num_slots, -1, dtype=np.int64)
        self.ended: OrderedDict[int, str] = OrderedDict()
        self.ready: list[ShardAnswer] = []

    def resize(self, num_slots: int, budget_bytes: int) -> None:
        """Take a budget; slots above a smaller one are empty by now."""
        old = len(self.slots)
        assert all(s.phase is SlotPhase.EMPTY for s in self.slots[num_slots:]), "slot not empty"
        del self.slots[num_slots:]
        self.slots.extend(Slot() for _ in range(num_slots - old))
        tags = np.full(num_slots, -1, dtype=np.int64)
        kept = min(old, num_slots)
        tags[:kept] = self.tags[:kept]
        self.tags = tags
        self.budget_bytes = budget_bytes

    @property
    def num_slots(self) -> int:
        """Slots within the present budget."""
        return len(self.slots)

    @property
    def resident_bytes(self) -> int:
        """Bytes of slots that hold an expert, served or not."""
        return self.slot_bytes * sum(
            s.phase in (SlotPhase.FILLED, SlotPhase.VERIFIED, SlotPhase.RELEASING)
            for s in self.slots
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes of slots that are claimed and not filled."""
        return self.slot_bytes * sum(
            s.phase in (SlotPhase.RESERVED, SlotPhase.COPYING, SlotPhase.ABORTING)
            for s in self.slots
        )

    def resident(self) -> tuple[ResidentSlot, ...]:
        """Inventory: every slot that is not empty, claimed ones as not verified."""
        return tuple(
            ResidentSlot(
                slot=i,
                tag=s.tag,
                layer=s.layer,
                expert=s.expert,
                verified=s.phase is SlotPhase.VERIFIED,
            )
            for i, s in enumerate(self.slots)
            if s.phase is not SlotPhase.EMPTY
        )

    def phase(self, slot: int) -> SlotPhase:
        """Phase of a slot."""
        return self.slots[slot].phase

    def holder(self, slot: int) -> tuple[int, int, int]:
        """(layer, expert, tag) of a slot, -1 each where it is empty."""
        found = self.slots[slot]
        return found.layer, found.expert, found.tag

    def served(
        self, slot: npt.NDArray[np.int32], tag: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Which pairs name what is resident now: bool [pairs]. To be called when the batch is taken
        from the queue."""
        assert slot.shape == tag.shape, "a pair names a slot and a tag"
        found = np.empty(slot.shape[0], np.bool_)
        match_tags(self.tags, np.ascontiguousarray(slot), np.ascontiguousarray(tag), found)
        return found

    def pin(self, slots: npt.NDArray[np.integer[Any]]) -> None:
        """Keep the slots of a batch from being freed or refilled until `unpin`. Each slot once a
        batch."""
        served = SlotPhase.VERIFIED
        for index in slots.tolist():
            slot = self.slots[index]
            assert slot.phase is served, f"slot {index} is not served"
            slot.batch_pins += 1

    def unpin(self, slots: npt.NDArray[np.integer[Any]]) -> list[ShardAnswer]:
        """The batch's reply is built. Answers that had waited for it."""
        served = SlotPhase.VERIFIED
        for index in slots.tolist():
            slot = self.slots[index]
            assert slot.batch_pins > 0, f"slot {index} is not pinned"
            slot.batch_pins -= 1
            if slot.phase is not served:
                self.try_free(index)
        return self.take_ready()

    def pin_copy(self, slot: int, tag: int) -> bool:
        """Keep a slot that is copied from. False where it does not hold that fill, proved, any
        more."""
        if not 0 <= slot < len(self.slots):
            return False
        found = self.slots[slot]
        if found.phase is not SlotPhase.VERIFIED or found.tag != tag:
            return False
        found.copy_pins += 1
        return True

    def unpin_copy(self, slot: int) -> list[ShardAnswer]:
        """The copy from the slot ended or passed its deadline."""
        assert self.slots[slot].copy_pins > 0, f"slot {slot} is not copied from"
        self.slots[slot].copy_pins -= 1
        self.try_free(slot)
        return self.take_ready()

    def take_ready(self) -> list[ShardAnswer]:
        """Answers that became ready since the last call."""
        ready, self.ready = self.ready, []
        return ready

    def holding(self, slot: int, tag: int) -> Slot | None:
        """The slot if it holds that fill, whatever its phase."""
        if not 0 <= slot < len(self.slots):
            return None
        found = self.slots[slot]
        return found if found.tag == tag and found.phase is not SlotPhase.EMPTY else None

    def claimed(self, slot: int, tag: int, step_id: int) -> Slot | None:
        """The slot if that add's fill is in it."""
        found = self.holding(slot, tag)
        return found if found is not None and found.step_id == step_id else None

    def end(self, step_id: int, how: str) -> None:
        """Remember how a step ended."""
        self.ended[step_id] = how
        self.ended.move_to_end(step_id)
        while len(self.ended) > REMEMBERED_STEPS:
            self.ended.popitem(last=False)

    def try_free(self, index: int) -> None:
        """Free a slot that is to go, once nothing pins it and nothing writes to it."""
        slot = self.slots[index]
        if slot.pinned or slot.copying:
            return
        if slot.phase is SlotPhase.RELEASING:
            self.end(slot.leaving_step, "released")
            self.ready.append(SlotReleased(at_s=0.0, step_id=slot.leaving_step))
        elif slot.phase is SlotPhase.ABORTING:
            self.end(slot.step_id, "aborted")
            self.ready.append(AddAborted(at_s=0.0, step_id=slot.step_id))
        else:
            return
        self.slots[index] = Slot()
        self.tags[index] = -1
        assert self.resident_bytes + self.reserved_bytes <= self.budget_bytes, "over budget"
