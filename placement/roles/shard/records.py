"""Words of a shard's slots: phases, work to be done, answers, the refusal of an old term. No
logic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SlotPhase(StrEnum):
    """Where a slot stands; see the module's text."""

    EMPTY = "empty"
    RESERVED = "reserved"
    COPYING = "copying"
    FILLED = "filled"
    VERIFIED = "verified"
    RELEASING = "releasing"
    ABORTING = "aborting"


class Work(StrEnum):
    """What the caller must now do, and report when it is done."""

    COPY = "copy"
    """Bring the bytes; then `copied` or `copy_failed`."""
    VERIFY = "verify"
    """Digest and probe; then `verified`."""
    STOP_COPY = "stop_copy"
    """Stop the copy; then `copy_stopped`."""
    WAIT = "wait"
    """Nothing: the answer comes from a later `unpin`, `unpin_copy` or report."""


@dataclass(frozen=True, slots=True)
class Start:
    """No answer yet: do this work for the slot."""

    work: Work
    slot: int
    tag: int
    step_id: int


class TermRefused(ValueError):
    """A command of a term lower than one already seen. `term` is the higher one."""

    def __init__(self, term: int, seen: int) -> None:
        self.term = seen
        super().__init__(
            f"command of term {term}, but term {seen} was seen; its controller was replaced"
        )


@dataclass(slots=True)
class Slot:
    """One slot as the shard sees it."""

    phase: SlotPhase = SlotPhase.EMPTY
    tag: int = -1
    layer: int = -1
    expert: int = -1
    step_id: int = -1
    """The add that fills or filled it."""
    leaving_step: int = -1
    """The remove (RELEASING) that waits for its pins."""
    batch_pins: int = 0
    copy_pins: int = 0
    copying: bool = False
    """Whether bytes are being written: ABORTING waits for the end of it."""
    copy_bytes: int = 0
    copy_s: float = 0.0

    @property
    def pinned(self) -> bool:
        """Whether a batch or a copy holds it."""
        return self.batch_pins > 0 or self.copy_pins > 0
