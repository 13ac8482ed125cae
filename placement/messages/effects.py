"""What to do: every output of `RebalanceEngine.step`. Imperative.

Order is part of the contract. Of one `Effects`: (1) `transitions` are committed to the journal
before any command is executed; (2) `commands` are executed in the order given; a PublishTable is
sent before the commands after it; (3) `records` are shown to people and change nothing. Commands
are idempotent: they carry the step id and, where a slot is meant, its tag, and may be executed
twice. The driver stamps each command to a shard or router with the term.
"""

from __future__ import annotations

import msgspec

from placement.messages.records import DecisionRecord
from placement.planner.plan import Plan, StepKind
from placement.policy.base import PolicyInput
from placement.routing import RankAddress, RoutingTable


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One step changed its state. To be journalled before the command that follows from it is
    executed.

    `event` is the event kind of the step machine, `before`/`after` its states (values of the
    machine's enums).
    """

    at_s: float
    plan_id: str
    step_id: int
    kind: StepKind
    rank: int
    slot: int
    layer: int
    expert: int
    event: str
    before: str
    after: str
    slot_tag: int = -1
    epoch: int = -1


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """Base of all commands."""


class ComputeTarget(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Run policy and planner on `input` off the loop and answer TargetComputed or TargetFailed. One
    is outstanding."""

    request_id: int
    layout_revision: int
    cause: str
    """auto | repair | budget | drain | staging | asked | initial."""
    policy: str
    input: PolicyInput
    deadline_s: float
    """Driver time after which the answer is dropped."""
    target: tuple[tuple[int, ...], ...] = ()
    """Keys by rank that an operator wants, whatever the policy would; () = none."""


class CopySource(msgspec.Struct, frozen=True, kw_only=True):
    """Where an expert's canonical bytes come from: a verified replica, or the checkpoint (rank =
    -1)."""

    rank: int
    slot: int = -1
    slot_tag: int = -1
    address: RankAddress | None = None


class ReserveSlot(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Reserve an empty slot for an expert. Answer SlotReserved or StepFailed."""

    step_id: int
    rank: int
    incarnation: int
    slot: int
    layer: int
    expert: int
    weights_version: str


class CopyExpert(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Fill a reserved slot. Not before the reservation is journalled. Answer ExpertCopied or
    StepFailed."""

    step_id: int
    rank: int
    incarnation: int
    slot: int
    slot_tag: int
    layer: int
    expert: int
    source: CopySource
    timeout_s: float


class VerifyExpert(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Digest the resident bytes and compute a probe row. Answer ExpertVerified or
    StepFailed(code=digest)."""

    step_id: int
    rank: int
    incarnation: int
    slot: int
    slot_tag: int


class AbortAdd(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Stop the copy and give the slot back. Answer AddAborted."""

    step_id: int
    rank: int
    incarnation: int
    slot: int
    slot_tag: int
    """-1 where the reservation was never answered: the shard finds the slot by step id."""


class PublishTable(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Send the table to every router and shard. Only verified slots are listed in it."""

    table: RoutingTable


class ReleaseSlot(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Free an unlisted, drained slot once no batch or copy pins it. Answer SlotReleased or
    StepFailed."""

    step_id: int
    rank: int
    incarnation: int
    slot: int
    slot_tag: int
    layer: int
    expert: int


class SetRankSlots(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Give a rank this many slots; slots above it are empty by now. Answer BudgetApplied."""

    rank: int
    incarnation: int
    num_slots: int
    budget_bytes: int


class ReplaceRank(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Create a new shard for a lost rank. The answer is RankJoined, whenever it comes."""

    rank: int
    lost_incarnation: int
    emptied: bool = False
    """Nothing is known to be wrong with the life that ends: it was emptied to be replaced."""


class EndRank(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """End the shard of a rank that has left, and create none. There is no answer."""

    rank: int
    incarnation: int


class ReplaceRouter(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Create a new router for a lost one. The answer is RouterJoined."""

    router: str


class WakeAt(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Send TimerFired at this driver time. Only the latest WakeAt counts."""

    at_s: float


class Answer(Command, frozen=True, kw_only=True, tag=True, eq=False):
    """Answer to an operator's request. `code`: ok | refused | not_found | busy | failed."""

    request_id: int
    code: str
    message: str
    plan_id: str = ""
    plan: Plan | None = None
    missing_bytes: int = 0
    rank: int = -1
    """The rank that was added, removed or replaced."""
    notes: tuple[str, ...] = ()
    """Of a plan to a given placement: what follows from it that nobody asked for."""


ShardCommand = ReserveSlot | CopyExpert | VerifyExpert | AbortAdd | ReleaseSlot | SetRankSlots
"""What a shard obeys."""
AnyCommand = (
    ComputeTarget
    | ShardCommand
    | PublishTable
    | ReplaceRank
    | EndRank
    | ReplaceRouter
    | WakeAt
    | Answer
)


class Effects(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything one `step` asks for."""

    transitions: tuple[Transition, ...] = ()
    commands: tuple[AnyCommand, ...] = ()
    records: tuple[DecisionRecord, ...] = ()
