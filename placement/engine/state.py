"""Everything the engine remembers, as data: one mutable struct that is its own snapshot.

Responsible for the form of the state and for the facts derived from it alone (layouts, coverage,
topology). Decides nothing. Used by every module of this package; encoded by `messages.codec`.

A slot's use says who may touch it. EMPTY -> TAKEN (an add has claimed it) -> VERIFIED (proved, in
no table yet) -> LISTED (in the newest table) -> LEAVING (a remove took it out of the table) ->
EMPTY. ORPHAN is what a shard holds and nobody asked for: it is to be released. PARKED is what an
ended plan left behind: its shard was asked to give the slot back and has not said that it did.
Nothing waits for such a slot, and nothing is put into it.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum, StrEnum

import msgspec

from placement.config import RebalanceConfig
from placement.forecast import ForecastState, initial_state
from placement.layout import EMPTY, ExpertLayout, IntArray
from placement.load import LoadHistory
from placement.messages.codec import decode_as, encode
from placement.messages.events import DrainCause
from placement.planner.gate import FloatArray, GateState, initial_gate
from placement.planner.plan import Plan, PlannedStep
from placement.routing import RankAddress
from placement.topology import NUM_PHASES, DeviceProfile, MoeSpec, Topology

NEVER_S = float("inf")


class SlotUse(IntEnum):
    """Who may touch a slot; see the module's text."""

    EMPTY = 0
    TAKEN = 1
    VERIFIED = 2
    LISTED = 3
    LEAVING = 4
    ORPHAN = 5
    PARKED = 6


class SlotState(msgspec.Struct):
    """One slot: its use, the key it holds or is claimed for (-1 empty) and its tag (-1 unknown)."""

    use: SlotUse = SlotUse.EMPTY
    key: int = EMPTY
    tag: int = -1


class RankStatus(StrEnum):
    """EXPECTED: never seen. LIVE: joined. RESTORED: joined before the controller restarted, not
    heard since. LOST: a new shard is wanted, once nothing drains the rank. REMOVED: it has left,
    and keeps its number for the day it may come back."""

    EXPECTED = "expected"
    LIVE = "live"
    RESTORED = "restored"
    LOST = "lost"
    REMOVED = "removed"


class RankState(msgspec.Struct, kw_only=True):
    """One rank. `wanted_slots` >= 0: a lower budget was asked for and is not applied yet.

    `drained_by`: why it is to hold nothing, sorted; each cause ends by itself. NODE and REPLACE
    stand only while the rank holds something: they end for it with the life that was there.
    """

    rank: int
    node: str
    failure_domain: str
    profile: str
    num_slots: int
    budget_bytes: int
    status: RankStatus = RankStatus.EXPECTED
    incarnation: int = -1
    address: RankAddress | None = None
    suspected_at_s: float = NEVER_S
    drained_by: tuple[DrainCause, ...] = ()
    wanted_slots: int = -1
    wanted_bytes: int = -1
    resize_sent_at_s: float = NEVER_S
    slots: list[SlotState] = []
    lost_keys: list[int] = []
    """Of a lost rank: the key that the newest table listed in each slot, EMPTY for none."""
    lost_at_s: float = -NEVER_S
    owed_keys: list[int] = []
    """Of a rank that is being replaced: the key it listed in each slot when that was asked for,
    EMPTY for none. Its next life is filled so."""
    group: int = -1
    """Group of the service file that an added rank's shard is made from; -1 = the file itself names
    the rank."""
    only_node: str = ""
    """The only node its shard may run on, "" = any its group allows."""
    asked_key: str = ""
    """Key of the request that added the rank or brought it back, "" = it had none."""

    @property
    def holds(self) -> bool:
        """Whether what it holds counts: live, or not yet heard of since the controller
        restarted."""
        return self.status in (RankStatus.LIVE, RankStatus.RESTORED)

    @property
    def draining(self) -> bool:
        """Whether it is to be emptied and kept empty, for whatever cause."""
        return bool(self.drained_by)

    @property
    def wants_shard(self) -> bool:
        """Whether the rank, where it has no shard, is to get one: while nothing drains it, and
        where its shard was to be replaced all the same."""
        owed = bool(self.owed_keys) and DrainCause.REMOVE not in self.drained_by
        return owed or not self.draining

    def set_num_slots(self, num_slots: int) -> None:
        """Take the shard's word on how many slots it has. Slots that still hold something stay
        until it is told."""
        while len(self.slots) < num_slots:
            self.slots.append(SlotState())
        while len(self.slots) > num_slots and self.slots[-1].use is SlotUse.EMPTY:
            self.slots.pop()
        self.num_slots = len(self.slots)


class RouterState(msgspec.Struct, kw_only=True):
    """One router: newest epoch it uses, newest below which it has nothing in flight, and whether it
    is waited for."""

    router: str
    incarnation: int
    joined_at_s: float
    applied: int = -1
    quiesced: int = -1
    in_set: bool = True


class StepRun(msgspec.Struct, kw_only=True):
    """One step and where it stands. `state` is the text of its machine's state."""

    step: PlannedStep
    state: str = "planned"
    tag: int = -1
    epoch: int = -1
    """add: unused. remove: first epoch that does not list the replica."""
    deadline_s: float = NEVER_S
    source_rank: int = -1
    source_slot: int = -1
    source_tag: int = -1
    copy_s: float = 0.0
    why: str = ""
    asked: int = 0
    """Times its shard was asked, in the present state, to abort, release or prove the slot."""
    copied_bytes: int = 0
    """Of a copy that is under way, as far as its shard has told."""
    cause: str = ""
    """Of a parked step: cause of the plan that left it behind."""

    @property
    def stuck(self) -> bool:
        """Whether its shard let the first wait pass without an answer: nothing waits for it any
        more."""
        return self.asked >= STUCK_AFTER_ASKED


STUCK_AFTER_ASKED = 2
"""Times a shard is asked before nothing waits for its answer any more (it is asked on all the
same)."""


class RunState(StrEnum):
    """RUNNING: waves follow each other. ENDING: nothing new begins; what has begun finishes or
    aborts."""

    RUNNING = "running"
    ENDING = "ending"


class PlanRun(msgspec.Struct, kw_only=True):
    """The plan being run. `plan` carries the numbers the steps have here (unique in the engine's
    life)."""

    plan_id: str
    cause: str
    plan: Plan
    steps: dict[int, StepRun]
    started_at_s: float
    drain_wait_s: float
    before: ExpertLayout
    wave: int = 0
    waiting: dict[int, list[int]] = {}
    """Adds of the present wave that have not begun, in their order, by target rank."""
    state: RunState = RunState.RUNNING
    copied_bytes: int = 0
    progress_at_s: float = -NEVER_S
    """Last time that a step of it changed its state or a copy of it told of more bytes."""
    longest_gap_s: float = 0.0
    """Longest time between two of these."""
    stalled: str = ""
    """Why it does not go on, in words; "" while it does."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """The last plan that stood still for too long, until another one gets something done."""

    plan_id: str
    cause: str
    at_s: float
    why: str


class SourceFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of this key from this rank (-1: the checkpoint) failed. The newest of each."""

    key: int
    rank: int
    at_s: float


class Outstanding(msgspec.Struct, kw_only=True):
    """The one ComputeTarget without an answer. `asked_by` >= 0: the operator's request it is
    for. `layers`: the layers it names. `target`: the placement that was asked for, () = none."""

    request_id: int
    revision: int
    cause: str
    deadline_s: float
    asked_by: int = -1
    policy: str = ""
    max_moves: int = -1
    layers: tuple[int, ...] = ()
    target: tuple[tuple[int, ...], ...] = ()


class StoredPlan(msgspec.Struct, kw_only=True):
    """A computed plan that may be applied: with the (rank, slot) -> key and key -> ranks it was
    computed on. `begun`: it has been applied. `given`: it leads to a placement that was asked for,
    not to what a policy wants."""

    plan_id: str
    plan: Plan
    slots: list[tuple[int, int, int]]
    hosts: list[tuple[int, list[int]]]
    begun: bool = False
    given: bool = False


class PlanAsk(msgspec.Struct, kw_only=True):
    """An operator's wish for a plan, waiting for its turn."""

    request_id: int
    policy: str
    max_moves: int
    target: tuple[tuple[int, ...], ...] = ()


class Realised(msgspec.Struct, kw_only=True):
    """A finished plan whose gain is measured on the first whole window with load after it.
    `promised`: predicted gain by layer."""

    plan_id: str
    ended_at_s: float
    expected_gain_s_per_s: float
    before: ExpertLayout
    after: ExpertLayout
    cost_s: float = 0.0
    promised: dict[int, float] = {}


class Candidate(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The last target that was not started: what regret is measured against. `layers`: of these,
    ascending; `slots`: int32 [ranks, slots], as in a layout."""

    layers: tuple[int, ...]
    slots: IntArray


class EngineState(msgspec.Struct, kw_only=True):
    """All of it. Every collection is bounded: by the fleet, by the plan, or by a limit named where
    it grows."""

    term: int
    epoch: int
    """Newest epoch published (or the one before the first)."""
    published: bool = False
    table_dirty: bool = False
    """What should be listed differs from the newest table."""
    published_at_s: float = 0.0
    now_s: float
    started_at_s: float
    paused: bool = False
    ranks: list[RankState]
    routers: dict[str, RouterState] = {}
    acks_count_from_s: float = -1e18
    """Before this time the set of routers is not known, so nothing counts as acknowledged by
    all."""
    revision: int = 0
    run: PlanRun | None = None
    parked: dict[int, StepRun] = {}
    """Steps that ended runs left open: verified adds that wait for the first table, and what a
    shard was asked to give back and has not answered."""
    copying: set[int] = set()
    """Adds that have begun and are neither verified nor ended."""
    removing: set[int] = set()
    """Removals between UNLISTED and their end."""
    outstanding: Outstanding | None = None
    asks: list[PlanAsk] = []
    apply_next: StoredPlan | None = None
    stored: list[StoredPlan] = []
    retry_at_s: dict[str, float] = {}
    gate: GateState = msgspec.field(default_factory=lambda: initial_gate(0))
    candidate: Candidate | None = None
    failed_demand: FloatArray | None = None
    """Demand of each layer in the last windows in which its moves failed, newest first: float64
    [FAILURES_KEPT, phases, layers, experts], pairs a second; zeros where they did not."""
    history: LoadHistory
    forecast: ForecastState
    call_tokens: tuple[float, float] = (0.0, 0.0)
    """Mean tokens of a layer call by phase, smoothed over windows; 0 where no router counted."""
    realised: Realised | None = None
    stall: Stall | None = None
    plans_stalled: int = 0
    stalls_in_a_row: int = 0
    """Plans that were aborted because they stood still; each doubles the patience with the next."""
    source_failures: list[SourceFailure] = []
    """Oldest first."""
    restoring_until_s: float = -NEVER_S
    """After everything was lost: until then lost ranks are waited for, and filled as they were."""
    floor_told: tuple[int, int] = (-1, 0)
    """(reachable floor, experts below the configured one), as last recorded."""
    wake_at_s: float = NEVER_S
    next_step_id: int = 0
    next_move_id: int = 0
    next_request_id: int = 0
    next_record: int = 0
    moves_done: dict[str, int] = {}
    moves_aborted: int = 0
    copy_bytes_done: int = 0


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What `RebalanceEngine.restore` needs: settings and state, a copy that later steps do not
    change."""

    spec: MoeSpec
    config: RebalanceConfig
    profiles: tuple[DeviceProfile, ...]
    cross_node_bytes_per_s: float
    state: EngineState


def first_step_id(term: int) -> int:
    """Step ids of a term start here: shards remember ids, and a controller without a journal must
    not reuse one."""
    return term << 32


def initial(
    spec: MoeSpec,
    topology: Topology,
    config: RebalanceConfig,
    *,
    term: int,
    first_epoch: int,
    start_s: float,
    paused: bool,
) -> EngineState:
    """State before the first event: every rank of the topology is expected, nothing is held."""
    ranks = [
        RankState(
            rank=r.rank,
            node=r.node,
            failure_domain=r.failure_domain,
            profile=r.profile,
            num_slots=r.num_slots,
            budget_bytes=r.num_slots * spec.slot_bytes,
            status=RankStatus.EXPECTED if r.alive else RankStatus.LOST,
            drained_by=(DrainCause.OPERATOR,) if r.draining else (),
        )
        for r in topology.ranks
    ]
    state = EngineState(
        term=term,
        epoch=first_epoch - 1,
        now_s=start_s,
        started_at_s=start_s,
        paused=paused,
        next_step_id=first_step_id(term),
        ranks=ranks,
        gate=initial_gate(spec.num_layers),
        history=LoadHistory(kept=config.windows_kept),
        forecast=initial_state(
            num_phases=NUM_PHASES, num_layers=spec.num_layers, num_experts=spec.num_experts
        ),
    )
    if first_epoch > 1:
        # Tables of an earlier controller, whose journal is gone, may be in use. As after a restart,
        # no router being known does not mean that none is there.
        state.acks_count_from_s = start_s + config.router_silence_s
    return state


def copy_of(state: EngineState) -> EngineState:
    """A copy that shares nothing that can change."""
    return decode_as(encode(state), EngineState)


def short_hash(plan: Plan) -> str:
    """Eight hex digits that name a plan's content."""
    return hashlib.blake2s(encode(plan), digest_size=4).hexdigest()
