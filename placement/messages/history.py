"""What parts of the service note of themselves, so that somebody outside can check its promises.

Responsible for the one form of such a note, a *fact*: who (a life of a part: "rank2/1"), seq (its
count), at_s (seconds of a clock that no part sets), the event (the fact's name), term and epoch
where they mean something, and ids. Simulated parts write facts into a list, real processes as lines
of JSON; the same checkers read both. Decides nothing, and knows nothing that it does not note.

A key is layer * num_experts + expert. A place is a name without its life: "rank2".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

Listed = tuple[int, int, int, int]
"""(key, rank, slot, tag)."""


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """Base. `term` and `epoch` are -1 where they mean nothing."""

    who: str
    seq: int
    at_s: float
    term: int = -1
    epoch: int = -1


# -- lives -------------------------------------------------------------------------------------


class Began(Fact, frozen=True, kw_only=True, tag=True):
    """A life began. `pid`: process of a real one."""

    place: str
    pid: int = 0


class Died(Fact, frozen=True, kw_only=True, tag=True):
    """It is over. `cause`: fault | left | replaced | fenced | stray."""

    cause: str


class Paused(Fact, frozen=True, kw_only=True, tag=True):
    """It stands still."""


class Resumed(Fact, frozen=True, kw_only=True, tag=True):
    """It goes on."""


class FaultBegan(Fact, frozen=True, kw_only=True, tag=True):
    """Somebody who tests broke something on purpose."""

    kind: str
    target: str


class FaultEnded(Fact, frozen=True, kw_only=True, tag=True):
    """It is mended."""

    kind: str
    target: str


# -- tables ------------------------------------------------------------------------------------


class TablePublished(Fact, frozen=True, kw_only=True, tag=True):
    """A table left the controller. `lives`: (rank, incarnation) of the ranks that it names."""

    num_keys: int
    listed: tuple[Listed, ...]
    lives: tuple[tuple[int, int], ...]


class TableInstalled(Fact, frozen=True, kw_only=True, tag=True):
    """A router or shard keeps this table from now on."""


class RouterTold(Fact, frozen=True, kw_only=True, tag=True):
    """A router tells which epoch it uses for new batches, and below which it has nothing in
    flight, both of the term's."""

    router: str
    applied: int
    quiesced: int


class RouterHeard(Fact, frozen=True, kw_only=True, tag=True):
    """The controller got a router's word. `life`: who that was, as in its own facts. What a router
    tells may be lost on the way, and then it counts as silent."""

    life: str


# -- commands and the journal --------------------------------------------------------------------


class StateWritten(Fact, frozen=True, kw_only=True, tag=True):
    """A transition of a step is in the journal."""

    plan_id: str
    step_id: int
    kind: str
    rank: int
    slot: int
    slot_tag: int
    key: int
    before: str
    after: str


class Recovered(Fact, frozen=True, kw_only=True, tag=True):
    """A controller began with what the journal held. `open_steps`: (step id, state) of steps that
    are neither done nor rolled back. `journal`: False where it began without."""

    journal: bool
    open_steps: tuple[tuple[int, str], ...] = ()
    torn: bool = False


class CommandSent(Fact, frozen=True, kw_only=True, tag=True):
    """A command left the controller. `command` is its type's name."""

    command: str
    step_id: int
    rank: int
    incarnation: int
    slot: int
    slot_tag: int


class CommandTaken(Fact, frozen=True, kw_only=True, tag=True):
    """A shard obeys a command of the term."""

    command: str
    step_id: int


class TermRefused(Fact, frozen=True, kw_only=True, tag=True):
    """A part refused a command or table of `term`, for it has seen a higher one."""

    seen: int


class RankGivenUp(Fact, frozen=True, kw_only=True, tag=True):
    """The controller takes that life of a rank for lost, with all it held."""

    rank: int
    incarnation: int


class PlanStarted(Fact, frozen=True, kw_only=True, tag=True):
    """Its removals wait at most `drain_wait_s` for acknowledgements, and again to be quiesced."""

    plan_id: str
    cause: str
    drain_wait_s: float


class WaitsShortened(Fact, frozen=True, kw_only=True, tag=True):
    """Memory is wanted back soon: removals wait at most `wait_s` from now on."""

    wait_s: float


class PlanEnded(Fact, frozen=True, kw_only=True, tag=True):
    """All its steps have ended. `outcome`: done | aborted, `why` in words."""

    plan_id: str
    outcome: str
    why: str


class StallReported(Fact, frozen=True, kw_only=True, tag=True):
    """The controller said that, and why, something it wanted to do did not go on."""

    why: str


# -- slots ---------------------------------------------------------------------------------------


class SlotProved(Fact, frozen=True, kw_only=True, tag=True):
    """A shard serves a slot from now on. held_key, held_version, intact: what its memory really
    holds."""

    rank: int
    slot: int
    slot_tag: int
    key: int
    version: str
    held_key: int
    held_version: str
    intact: bool


class SlotFreed(Fact, frozen=True, kw_only=True, tag=True):
    """The memory of a slot was given back. `readers`: batches and copies that were reading it."""

    rank: int
    slot: int
    slot_tag: int
    readers: int


class MemoryUsed(Fact, frozen=True, kw_only=True, tag=True):
    """Bytes of a shard by its books, and really held."""

    rank: int
    resident_bytes: int
    reserved_bytes: int
    held_bytes: int
    budget_bytes: int


# -- requests ------------------------------------------------------------------------------------


class RowsServed(Fact, frozen=True, kw_only=True, tag=True):
    """A shard computed rows of a sub-call. By pair: row, k, slot, tag, the key that was asked for
    and the key, version and wholeness that the slot's memory had."""

    rank: int
    sub_id: int
    request: int
    cause: int
    row: tuple[int, ...]
    k: tuple[int, ...]
    slot: tuple[int, ...]
    slot_tag: tuple[int, ...]
    key: tuple[int, ...]
    held_key: tuple[int, ...]
    held_version: str
    intact: bool


class RequestOpened(Fact, frozen=True, kw_only=True, tag=True):
    """A router took a request in. pairs: row * top_k + k of the valid ones; keys: of each.
    `counts`: whether it is demand (a caller's first attempt). `sound`: whether it may be served at
    all."""

    request: int
    deadline_at_s: float
    pairs: tuple[int, ...]
    keys: tuple[int, ...]
    top_k: int
    counts: bool
    sound: bool


class RequestBegun(Fact, frozen=True, kw_only=True, tag=True):
    """It was admitted and split: from here on it is demand, if it is its caller's first attempt."""

    request: int


class RequestEnded(Fact, frozen=True, kw_only=True, tag=True):
    """It has its answer: "ok", or the code of a typed error. added: (sub-call, its rows) that are
    in the sum. wrong_rows: rows that differ from the oracle."""

    request: int
    outcome: str
    detail: str
    added: tuple[tuple[int, tuple[int, ...]], ...] = ()
    wrong_rows: int = 0


class RouterHolds(Fact, frozen=True, kw_only=True, tag=True):
    """What a router holds while it has nothing to do."""

    permits: int
    rows: int
    waiting: int
    calls: int
    sub_calls: int


# -- load ----------------------------------------------------------------------------------------


class WindowFolded(Fact, frozen=True, kw_only=True, tag=True):
    """A load window closed. demand: (key, pairs) of keys with any; executed: pairs that shards
    computed."""

    index: int
    demand: tuple[tuple[int, int], ...]
    executed: int


class DemandUnsure(Fact, frozen=True, kw_only=True, tag=True):
    """Counts that a death took along or may bring twice: (key, pairs) that later windows may lack
    (lost) or hold again (twice)."""

    lost: tuple[tuple[int, int], ...] = ()
    twice: tuple[tuple[int, int], ...] = ()


AnyFact = (
    Began
    | Died
    | Paused
    | Resumed
    | FaultBegan
    | FaultEnded
    | TablePublished
    | TableInstalled
    | RouterTold
    | RouterHeard
    | StateWritten
    | Recovered
    | CommandSent
    | CommandTaken
    | TermRefused
    | RankGivenUp
    | PlanStarted
    | WaitsShortened
    | PlanEnded
    | StallReported
    | SlotProved
    | SlotFreed
    | MemoryUsed
    | RowsServed
    | RequestOpened
    | RequestBegun
    | RequestEnded
    | RouterHolds
    | WindowFolded
    | DemandUnsure
)
_F = TypeVar("_F", bound=Fact)


class Recorder:
    """Facts in the order in which they were noted, each with its writer's count."""

    def __init__(self) -> None:
        self.facts: list[AnyFact] = []
        self._next: dict[str, int] = {}

    def note(self, kind: type[_F], who: str, at_s: float, /, **fields: Any) -> None:
        """Note a fact of this kind."""
        seq = self._next.get(who, 0)
        self._next[who] = seq + 1
        self.facts.append(kind(who=who, seq=seq, at_s=at_s, **fields))  # type: ignore[arg-type]


def to_line(fact: Fact) -> bytes:
    """One line of JSON without its end."""
    return msgspec.json.encode(fact)


def from_lines(lines: Iterable[bytes]) -> list[AnyFact]:
    """Facts of all processes, merged by time and, for one writer, by its count. Raises
    msgspec.ValidationError for a line that is none."""
    facts = [msgspec.json.decode(line, type=AnyFact) for line in lines if line.strip()]
    return sorted(facts, key=lambda fact: (fact.at_s, fact.who, fact.seq))
