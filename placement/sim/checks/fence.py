"""I3, the fence: old terms are refused, and a row is computed only by what is resident.

Responsible for this one. Knows slots only by what shards noted of them.
"""

from __future__ import annotations

from placement.messages.history import CommandTaken, RowsServed, SlotFreed, SlotProved
from placement.sim.checks.base import InvariantBroken, Rules


class Fence:
    """I3: a shard obeys only the highest term it has seen, and computes a pair only where its slot
    holds the fill that the pair names, of the expert that was asked for, whole."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._held: dict[str, dict[int, tuple[int, int]]] = {}

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            CommandTaken: self._taken,
            SlotProved: self._proved,
            SlotFreed: self._freed,
            RowsServed: self._served,
        }

    def _taken(self, fact: CommandTaken) -> None:
        seen = self._seen.get(fact.who, -1)
        if fact.term < seen:
            raise InvariantBroken(
                f"I3: {fact.who} obeys {fact.command} of term {fact.term} after term {seen}"
            )
        self._seen[fact.who] = fact.term

    def _proved(self, fact: SlotProved) -> None:
        self._held.setdefault(fact.who, {})[fact.slot] = (fact.slot_tag, fact.key)

    def _freed(self, fact: SlotFreed) -> None:
        self._held.get(fact.who, {}).pop(fact.slot, None)

    def _served(self, fact: RowsServed) -> None:
        held = self._held.get(fact.who, {})
        pairs = zip(fact.slot, fact.slot_tag, fact.key, fact.held_key, strict=True)
        for slot, tag, key, held_key in pairs:
            if held.get(slot) != (tag, key) or held_key != key:
                raise InvariantBroken(
                    f"I3: {fact.who} computed key {key} in slot {slot} tag {tag}, which holds "
                    f"(tag, key) {held.get(slot)}, in memory key {held_key}"
                )
        if not fact.intact:
            raise InvariantBroken(f"I3: {fact.who} computed with damaged weights")

    def finish(self) -> None:
        """See `Checker`."""
