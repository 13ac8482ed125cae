"""How controller, router and shard meet: Protocols and the plain data that crosses them. No
behaviour.

Each Protocol has a real and a fake implementation and one contract suite. The controller reaches
shards and routers through ShardPort and RouterPort (Ray calls behind), creates them through Fleet;
routers reach shards through ShardChannel (ZeroMQ behind). No part imports another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from moe_serve.stage_counts import StageCounts
from placement.load import DemandReport, HotnessReport
from placement.messages.effects import ShardCommand
from placement.messages.events import ResidentSlot, ShardAnswer
from placement.roles.calls import Cause as Cause  # noqa: PLC0414  # re-exported: why a sub-call was sent
from placement.routing import RankAddress, RoutingTable


class DType(IntEnum):
    """Element type of hidden states. Raw rows of BFLOAT16 travel as uint16."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2

    @property
    def numpy(self) -> np.dtype[Any]:
        """dtype of the raw array: float32, float16, or uint16 for BFLOAT16."""
        return _NUMPY[self]


_NUMPY: Final[Mapping[DType, np.dtype[Any]]] = MappingProxyType(
    {
        DType.FLOAT32: np.dtype(np.float32),
        DType.BFLOAT16: np.dtype(np.uint16),
        DType.FLOAT16: np.dtype(np.float16),
    }
)


class RowStatus(IntEnum):
    """What the shard did with a row of a sub-call. A row is served or refused whole."""

    SERVED = 0
    STALE = 1
    """A pair of the row names a (slot, tag) that is not resident."""
    REFUSED = 2
    """Draining, busy beyond its bound, or past the deadline before it began."""


@dataclass(frozen=True, slots=True)
class SubCall:
    """One message of a call to one shard: R rows and P pairs (a pair = a row and one of its
    experts).

    rows: raw [R, H] of `dtype`. row_id int32 [R]: row number in the request. pair_row int32 [P]
    indexes `rows`; pair_slot int32, pair_tag int64, pair_gate float32, pair_k int32 [P] (k-slot in
    the request), pair_expert int32 [P] (only for counting: the tag is what is checked).
    (request_key, layer, row_id, pair_k) names a contribution.
    """

    router: str
    call_id: int
    sub_id: int
    request_key: int
    layer: int
    phase: int
    cause: Cause
    incarnation: int
    term: int
    epoch: int
    dtype: DType
    timeout_s: float
    rows: npt.NDArray[Any]
    row_id: npt.NDArray[np.int32]
    pair_row: npt.NDArray[np.int32]
    pair_slot: npt.NDArray[np.int32]
    pair_tag: npt.NDArray[np.int64]
    pair_gate: npt.NDArray[np.float32]
    pair_k: npt.NDArray[np.int32]
    pair_expert: npt.NDArray[np.int32]
    request_id: str = ""
    """The caller's name for the request, "" where it gave none; for logs."""
    trace: str = ""
    """W3C `traceparent` of the router's span of this sub-call, "" where the request has none."""


@dataclass(frozen=True, slots=True)
class SubReply:
    """Answer to a SubCall. `partial` raw [served rows, H] of the sub-call's dtype, in row order of
    the SERVED rows: the gate-weighted sum over the row's pairs. row_status uint8 [R]
    (RowStatus)."""

    call_id: int
    sub_id: int
    incarnation: int
    term: int
    epoch: int
    """Newest table this shard knows; a router behind it fetches."""
    row_status: npt.NDArray[np.uint8]
    partial: npt.NDArray[Any]
    backlog_s: float
    """Seconds of work queued at the rank when this reply was built."""
    backlog_seq: int
    queue_s: float
    """From its arrival at the shard until its batch was taken."""
    compute_s: float
    """Its share, by pairs, of the seconds of the batch it was computed in."""
    detail: str = ""
    """Why rows were not served. Where they were REFUSED it begins with one of the words busy, late,
    draining, stopping, stalled, broken; the last two are in `FAULT_WORDS`."""
    rest_s: float = 0.0
    """What it was at the shard beside these two: the shares of others in its batch, merging and
    answering. To 4 % where it came by wire; 0 where the shard does not tell."""


FAULT_WORDS: Final = ("stalled", "broken")
"""First words of `SubReply.detail` that say that the shard itself is at fault, not its load."""


class ShardChannel(Protocol):
    """A router's way to one shard incarnation."""

    @property
    def address(self) -> RankAddress:
        """Whom this channel reaches."""
        ...

    @property
    def connected(self) -> bool:
        """False from the moment the socket monitor saw a disconnect until it is back."""
        ...

    async def forward(self, call: SubCall) -> SubReply:
        """The reply. Raises WireLost (disconnect, no answer in timeout_s), InvalidArgument."""
        ...

    async def fetch_table(self) -> RoutingTable | None:
        """Newest table the shard keeps. Raises WireLost."""
        ...

    async def close(self) -> None:
        """Close the socket; calls in flight end with WireLost."""
        ...


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a shard says of itself."""

    rank: int
    node: str
    failure_domain: str
    profile: str
    address: RankAddress
    num_slots: int
    budget_bytes: int
    slot_bytes: int
    backend: str
    simulated: bool
    pid: int
    highest_term: int
    highest_epoch: int
    resident: tuple[ResidentSlot, ...]
    group: int = -1
    only_node: str = ""
    """Both as in RankPlace."""
    weights_version: str = ""
    """Of the weights it holds; "" = not told."""


@dataclass(frozen=True, slots=True)
class RunningCopy:
    """One copy that runs into a shard; it stands still where `done_bytes` does not grow."""

    step_id: int
    slot: int
    layer: int
    expert: int
    source: str
    """"rank 3", "host cache", "checkpoint", or "" before that is known."""
    done_bytes: int
    total_bytes: int
    seconds: float
    """Since it began."""


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """Where a shard's memory is, in bytes."""

    slab_bytes: int = 0
    """Mapped for canonical forms; resident only where slots are held."""
    free_bytes: int = 0
    """Of these, places that no slot holds."""
    largest_free_run_bytes: int = 0
    """Longest run of neighbours among the free places of one slab: largest_free_run_bytes /
    free_bytes is 1 where the free memory is in one piece."""
    loaded_bytes: int = 0
    """Held by the backend beside the canonical forms, on its device where it has one."""
    process_bytes: int = 0
    """Of the shard's process in memory."""
    host_cache_bytes: int = 0
    """Of the node's cache, which all shards of the node share, when this one added to it last."""

    @property
    def fragmentation(self) -> float:
        """Share of the free places that the largest run of them does not hold: 0 where all are in
        one piece or there are none, towards 1 the more they are scattered."""
        return 1.0 - self.largest_free_run_bytes / self.free_bytes if self.free_bytes else 0.0


@dataclass(frozen=True, slots=True)
class ShardReport:
    """Periodic answer of a shard: un-acknowledged hotness reports and gauges."""

    rank: int
    incarnation: int
    reports: tuple[HotnessReport, ...]
    backlog_s: float
    resident_bytes: int
    reserved_bytes: int
    budget_bytes: int
    highest_term: int
    highest_epoch: int
    busy: bool
    """True where something is being computed and goes on: silence of probes is then explained."""
    counters: dict[str, float] = field(default_factory=dict)
    stalled_s: float = 0.0
    """Seconds for which one batch has been computed where that is far too long; else 0."""
    memory: ShardMemory = field(default_factory=ShardMemory)
    copies: tuple[RunningCopy, ...] = ()
    """Copies into this shard that run now, by slot."""


class ShardPort(Protocol):
    """The controller's way to one shard. Calls carry the term; idempotent by (step id, tag)."""

    async def describe(self) -> ShardInfo:
        """Identity, inventory, budgets."""
        ...

    async def fence(self, term: int) -> ShardInfo:
        """`describe`, and from here on refuse commands of lower terms: nothing that an older
        controller still has on its way changes what was told. Raises StaleTerm, Unavailable."""
        ...

    async def execute(self, term: int, command: ShardCommand) -> ShardAnswer:
        """Run one placement command. Raises StaleTerm where the shard has seen a higher term,
        Unavailable where it is gone. The answer's at_s is the shard's and is restamped by the
        driver."""
        ...

    async def install_table(self, table: RoutingTable) -> int:
        """Keep the table if it is newer. Returns the newest epoch held. Raises StaleTerm."""
        ...

    async def report(self, acked_seq: int) -> ShardReport:
        """Reports after `acked_seq`; those up to it may be forgotten."""
        ...

    async def probe(self) -> float:
        """Seconds of one probe row through queue and compute thread. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class RouterInfo:
    """What a router says of itself."""

    router: str
    incarnation: int
    grpc_address: str
    node: str
    pid: int
    highest_term: int
    highest_epoch: int


@dataclass(frozen=True, slots=True)
class RouterReport:
    """Periodic answer of a router: un-acknowledged demand, acknowledgements, suspects, gauges."""

    router: str
    incarnation: int
    applied_epoch: int
    quiesced_epoch: int
    """Greatest e such that nothing split under an epoch below e is in flight."""
    reports: tuple[DemandReport, ...]
    suspects: tuple[tuple[int, int, str], ...]
    """(rank, incarnation, reason) of shards whose connection broke or which were ejected."""
    counters: dict[str, float] = field(default_factory=dict)
    """Totals since start: requests, tokens, failed, retried_pairs, hedged_pairs, stale_pairs,
    dropped_replies ..."""
    quantiles: dict[str, float] = field(default_factory=dict)
    """dispatch_p50_s, dispatch_p99_s of the last report interval, loop_lag_s."""
    queued_key: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    queued_pairs: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Pairs of requests that wait for a permit now, int64 [n], by key as in DemandReport: no count
    since the last report but what stands in the queue."""
    applied_term: int = 0
    """Term of the table that both epochs count in, 0 = not told. Another controller's epochs say
    nothing of one's own tables, though the numbers may be the same."""
    stopped: bool = False
    """It was told to stop and has: its process lives, and serves nobody any more."""
    stages: StageCounts | None = None
    """Where the time of its answered requests went; None where it does not tell."""


class RouterPort(Protocol):
    """The controller's way to one router."""

    async def describe(self) -> RouterInfo:
        """Identity and port."""
        ...

    async def install_table(
        self, table: RoutingTable, peers: Sequence[str], suspects: Sequence[int] = ()
    ) -> int:
        """Use the table for new batches if it is newer. `peers`: gRPC addresses of all routers, for
        GetModelSpec. `suspects`: exactly the ranks that the controller suspects now; they are used
        where nothing else is left. Sent again with the same table, only peers and suspects change.
        Returns the applied epoch. Raises StaleTerm."""
        ...

    async def report(self, acked_seq: int) -> RouterReport:
        """Demand after `acked_seq`; what is up to it may be forgotten."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let open ones finish for `grace_s`, then serve no more. The part still
        has to be ended. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node of the cluster as the fleet sees it."""

    node: str
    alive: bool
    labels: dict[str, str]
    draining_deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where an added rank's shard belongs. The default is a rank that the service file names."""

    group: int = -1
    """Group of the service file that it is made from; -1 = the one that its number lies in."""
    only_node: str = ""
    """The only node it may run on, "" = any that the group allows."""


FILE_PLACE: Final = RankPlace()
"""Of every rank that the service file names."""


class Fleet(Protocol):
    """Creates, finds and ends parts. Names are journalled by the caller before creation."""

    async def create_shard(
        self, name: str, rank: int, incarnation: int, place: RankPlace = FILE_PLACE
    ) -> ShardPort:
        """Start a rank's shard and wait until it answers. Raises StartRefused, Unavailable."""
        ...

    async def create_router(
        self, name: str, router: str, incarnation: int, port: int = 0
    ) -> RouterPort:
        """Start a router actor and wait until its port is bound. `port`: of its last life, taken
        again where the settings name none and it is free; 0 = there was none. Raises StartRefused,
        Unavailable."""
        ...

    async def find_shard(self, name: str) -> ShardPort | None:
        """Handle of a live shard actor of that name."""
        ...

    async def find_router(self, name: str) -> RouterPort | None:
        """Handle of a live router actor of that name."""
        ...

    async def part_names(self) -> tuple[str, ...]:
        """Names of all live actors of this service id (controller and page excluded)."""
        ...

    async def kill(self, name: str) -> None:
        """End a part by name; absent is fine."""
        ...

    async def alive(self, name: str) -> bool:
        """Ray's word on whether the actor lives."""
        ...

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """Nodes with their labels and drain deadlines."""
        ...

    async def claim_term(self, term: int) -> bool:
        """Create the term in the cluster's key-value store, atomically. False where it is taken."""
        ...

    async def highest_term(self) -> int:
        """Greatest term claimed so far, 0 if none."""
        ...
