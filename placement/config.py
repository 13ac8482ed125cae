"""Settings of the brain, frozen and bounded. Checked where they are made; inside, modules take the
fields they need."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]


class RebalanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the controller decides and how steps are run. Every duration in seconds, every size in
    bytes."""

    policy: str = "incremental"
    """Name in `placement.policy.POLICIES`."""
    first_policy: str = "static"
    """The same, for empty ranks while no load is known. `static` fills every slot; `incremental`
    leaves the spare ones empty for the first experts that get hot."""
    window_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 2.0
    """Length of a load window; a decision may follow each."""
    windows_kept: Annotated[int, Meta(ge=2, le=64)] = 8
    """Closed windows the forecasters may look at."""
    sub_windows: Annotated[int, Meta(ge=1, le=16)] = 4
    """Equal parts of a window that demand is kept at."""
    balance_enough: Share = 0.97
    """Balancedness at or above which a layer is left alone before anything is computed."""
    balance_band: Share = 0.01
    """A layer once below `balance_enough` is planned until it is this much above it. A plan must
    save at least this share of its layers' seconds."""
    regret_decay: Share = 0.9
    """Factor on accumulated regret (seconds lost) at each window."""
    cooldown_s: Seconds = 4.0
    """Least time between a plan and the next automatic one for the same layers; a detected shift
    ends it, and so does a layer that has lost meanwhile what its moves cost. Doubled for layers
    whose last moves did not bring what they promised."""
    plan_life_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 60.0
    """Expected life of a plan: predicted saving is counted over this time."""
    target_timeout_s: Seconds = 30.0
    """A ComputeTarget without an answer is dropped, with a record, after this time."""
    max_moves: Count = 24
    """Slot writes an automatic plan may hold."""
    max_bytes: Annotated[int, Meta(ge=0)] = 1 << 40
    """Bytes an automatic plan may copy."""
    max_cross_node_bytes: Annotated[int, Meta(ge=0)] = 1 << 40
    """Bytes an automatic plan may copy between nodes."""
    uniform: bool = False
    """The same number of slots for a layer on every rank, as engines with fixed slot tables need;
    otherwise a rank's slots are a pool that its layers share."""
    floor: Annotated[int, Meta(ge=1, le=8)] = 2
    """Failure domains in which every expert has a replica, where slots and ranks allow it; a record
    says which experts have fewer. 1 leaves all spare slots to load."""
    staging_slots: Annotated[int, Meta(ge=0, le=64)] = 1
    """Empty slots every rank has after each plan."""
    byte_price: Annotated[float, Meta(ge=0.0)] = 0.0
    """Seconds saved a second that a resident byte must bring; 0 keeps replicas while memory is
    free."""
    wave_adds_per_rank: Annotated[int, Meta(ge=1, le=64)] = 2
    """Copies into one rank that may run at once."""
    wave_copies_from_rank: Annotated[int, Meta(ge=1, le=64)] = 2
    """Copies out of one rank that may run at once."""
    drain_wait_s: Seconds = 5.0
    """Longest wait UNLISTED -> ACKED and ACKED -> DRAINED, each."""
    budget_drain_wait_s: Seconds = 1.0
    """The same for removals that SetBudget asked for."""
    copy_timeout_s: Seconds = 30.0
    """Least deadline of RESERVED -> VERIFIED; the plan's price may lengthen it (5 x expected)."""
    router_silence_s: Seconds = 5.0
    """A router without an answer for this long leaves the acknowledging set."""
    rank_silence_s: Seconds = 5.0
    """A suspected rank without an answer for this long is lost."""
    retry_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 5.0
    """Wait before what failed whole, or was not answered, is tried again: a repair or drain whose
    plan moved nothing, a budget. A change of ranks ends the wait at once."""
