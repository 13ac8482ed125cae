"""What happened: every input of `RebalanceEngine.step`. Past tense. `at_s` is the driver's
monotonic time.

Events are journalled in order before `step` sees them; replaying them gives the same effects, byte
for byte.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from placement.load import LoadWindow
from placement.planner.plan import Plan
from placement.routing import RankAddress


class DrainCause(StrEnum):
    """Why a rank is to be empty: a person wants it so, the cluster empties the node it is on, it is
    to leave the service, or its shard is to be replaced by a new one."""

    OPERATOR = "operator"
    NODE = "node"
    REMOVE = "remove"
    REPLACE = "replace"


class ResidentSlot(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard says one of its slots holds. Only verified slots may be listed."""

    slot: int
    tag: int
    layer: int
    expert: int
    verified: bool


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """Base of all events."""

    at_s: float


class RankJoined(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A shard answered and may be used. Replaces an earlier incarnation of the same rank (which is
    then lost)."""

    rank: int
    node: str
    failure_domain: str
    profile: str
    num_slots: int
    address: RankAddress
    resident: tuple[ResidentSlot, ...] = ()
    group: int = -1
    """Group of the service file it was made from, where an operator added the rank; else -1."""
    only_node: str = ""
    """The only node it may run on, "" = any its group allows."""


class RankSuspected(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A rank stopped answering; routers avoid it. Not yet lost."""

    rank: int
    reason: str


class RankCleared(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A suspected rank answered again."""

    rank: int


class RankLost(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """That incarnation of the rank is gone with all it held."""

    rank: int
    incarnation: int
    reason: str


class RouterJoined(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A router is in the acknowledging set. It fetches the table after this."""

    router: str
    incarnation: int


class RouterLeft(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A router was silent too long or is gone: it leaves the acknowledging set."""

    router: str
    reason: str
    gone: bool
    """True where the process is dead and must be replaced; False where it may come back and
    rejoin."""


class TableApplied(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A router uses this epoch for every new batch."""

    router: str
    epoch: int


class TableQuiesced(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A router has nothing in flight that was split under an epoch below this one."""

    router: str
    epoch: int


class WindowClosed(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A load window closed."""

    window: LoadWindow


class TargetComputed(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """Answer to ComputeTarget. `slots` is the target layout, int32 [ranks, slots]."""

    request_id: int
    layout_revision: int
    slots: npt.NDArray[np.int32]
    plan: Plan
    notes: tuple[str, ...] = ()


class TargetFailed(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """ComputeTarget could not be answered; `reason` says what was short."""

    request_id: int
    reason: str


class SlotReserved(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """The shard reserved the slot; `slot_tag` is its new fill number."""

    step_id: int
    slot_tag: int


class CopyProgress(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """So many bytes of a copy that is under way have come. Tells that it goes on: without a word a
    plan counts as stalled after a while."""

    step_id: int
    copied_bytes: int


class ExpertCopied(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """All bytes of the expert are in the slot."""

    step_id: int
    copy_bytes: int
    seconds: float


class ExpertVerified(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """Digest of the resident bytes equals the canonical one, and the probe row was right."""

    step_id: int


class AddAborted(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """The shard gave the slot of an aborted add back."""

    step_id: int


class SlotReleased(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """The slot is empty and its memory is free."""

    step_id: int


class StepFailed(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A command of the step failed. `code`: no_slot | over_budget | source_lost | digest | timeout
    | stale_term | io | recalled. `recalled` answers a ReleaseSlot that a recall (VerifyExpert after
    it) forbade: the slot is kept, and the answer to the recall decides."""

    step_id: int
    code: str
    detail: str


class BudgetApplied(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """The shard has this many slots now."""

    rank: int
    num_slots: int


class TimerFired(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """The time of the last WakeAt has come (or any time later)."""


class PauseAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """An operator stops automatic plans (repairs go on)."""

    request_id: int
    reason: str = ""


class ResumeAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """An operator lets automatic plans run again."""

    request_id: int


class DrainAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """Move everything off a rank. Refused where the rest cannot hold every expert."""

    request_id: int
    rank: int
    cause: DrainCause = DrainCause.OPERATOR


class UndrainAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """One cause of a drain is over; the rank may hold replicas again once none is left. OPERATOR:
    so is all that people asked for, a removal or a replacement that has not come to its end."""

    request_id: int
    rank: int
    cause: DrainCause = DrainCause.OPERATOR


class RankAddAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """An operator wants one more rank, or one back that was removed. Its shard is made from a group
    of the service file; what the engine knows of it until it has joined stands here."""

    request_id: int
    rank: int = -1
    """A removed rank that is to come back in its own place; -1 = a new number."""
    group: int = 0
    """Group of the service file."""
    profile: str = ""
    num_slots: int = 0
    only_node: str = ""
    """The only node it may run on, "" = any its group allows."""
    key: str = ""
    """Chosen by who asks: a request with the key of an earlier one is answered as that was and adds
    nothing. "" = each adds a rank."""


class RankRemoveAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A rank is to leave: emptied first, then its shard is ended and stays so. Refused where the
    rest cannot hold every expert, or only in fewer failure domains."""

    request_id: int
    rank: int
    accept_lower_floor: bool = False
    """Go on where the rest can only hold every expert in fewer failure domains than now."""


class RankReplaceAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """A rank's shard is to be replaced by a new one: emptied first, then ended, and filled again as
    it was. Refused as a removal is."""

    request_id: int
    rank: int
    incarnation: int = -1
    """The life to be replaced; where another is there already, nothing is left to do. -1 = the
    present one."""
    accept_lower_floor: bool = False


class BudgetAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """Change the bytes of expert slots a rank may use. A lower budget evicts the least useful
    replicas first."""

    request_id: int
    rank: int
    budget_bytes: int


class PlanAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """Compute a plan to look at; nothing moves."""

    request_id: int
    policy: str = ""
    max_moves: int = -1
    """-1 = the configured limit."""
    target: tuple[tuple[int, ...], ...] = ()
    """Keys by rank: a plan to exactly this placement, and no policy nor limit has a say. () = what
    the policy wants."""


class ApplyAsked(Event, frozen=True, kw_only=True, tag=True, eq=False):
    """Run a computed plan, if nothing it touches has changed."""

    request_id: int
    plan_id: str


ShardAnswer = (
    SlotReserved
    | ExpertCopied
    | ExpertVerified
    | AddAborted
    | SlotReleased
    | BudgetApplied
    | StepFailed
)
"""How a shard answers a command."""
AnyEvent = (
    RankJoined
    | RankSuspected
    | RankCleared
    | RankLost
    | RouterJoined
    | RouterLeft
    | TableApplied
    | TableQuiesced
    | WindowClosed
    | TargetComputed
    | TargetFailed
    | SlotReserved
    | CopyProgress
    | ExpertCopied
    | ExpertVerified
    | AddAborted
    | SlotReleased
    | StepFailed
    | BudgetApplied
    | TimerFired
    | PauseAsked
    | ResumeAsked
    | DrainAsked
    | UndrainAsked
    | RankAddAsked
    | RankRemoveAsked
    | RankReplaceAsked
    | BudgetAsked
    | PlanAsked
    | ApplyAsked
)
