"""Where a copy comes from: the nearest sound source, those that failed lately last.

Responsible for the order of sources and for remembering which of them failed. Starts no copy.
Called by steps and supervise.

The order: a replica on the same rank, on the same node, on another node, then the checkpoint; of
equals the least busy. (A shard that keeps canonical bytes in host memory answers a checkpoint read
from there.) A source that failed for this expert goes behind all that did not, the latest failure
last: so a retry goes elsewhere as long as there is an elsewhere, and round again where there is
none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from placement.cost import copy_seconds
from placement.engine.state import NEVER_S, RankStatus, SourceFailure, StepRun
from placement.engine.turn import Turn
from placement.layout import SlotId
from placement.messages.effects import CopySource
from placement.migration import AddState

CHECKPOINT = -1
"""Rank of a source that is no replica."""
FAILED_FOR_S = 120.0
"""How long a failure counts against its source."""
FAILURES_MAX = 1024
"""Failures remembered, oldest forgotten first."""
SOURCE_CODES = frozenset({"source_lost", "digest", "timeout", "io"})
"""Codes of a failed copy that may be its source's doing."""

_Order = tuple[float, bool, bool, bool, int, int]


def find_source(turn: Turn, run: StepRun) -> CopySource:
    """Source of the add's bytes now; see the module's text."""
    key = turn.spec.key(run.step.layer, run.step.expert)
    target = turn.rank(run.step.slot.rank)
    hosts = turn.layout().slots_of(run.step.layer, run.step.expert)
    failed = _failed_at(turn, key)
    busy = copies_out_of(turn.open_steps(turn.state.copying)) if hosts else {}
    never = -NEVER_S
    order: _Order = (failed.get(CHECKPOINT, never), True, True, True, 0, CHECKPOINT)
    best: SlotId | None = None
    for slot_id in hosts:
        rank = turn.rank(slot_id.rank)
        if rank.status is not RankStatus.LIVE or rank.suspected_at_s != NEVER_S:
            continue
        mine: _Order = (
            failed.get(rank.rank, never),
            False,
            rank.rank != target.rank,
            rank.node != target.node,
            busy.get(rank.rank, 0),
            rank.rank,
        )
        if mine < order:
            order, best = mine, slot_id
    if best is None:
        return CopySource(rank=CHECKPOINT)
    rank = turn.rank(best.rank)
    tag = rank.slots[best.index].tag
    return CopySource(rank=rank.rank, slot=best.index, slot_tag=tag, address=rank.address)


def copies_out_of(copying: Sequence[StepRun]) -> dict[int, int]:
    """Copies running out of each rank (checkpoint reads are -1), of the adds under way."""
    return Counter([s.source_rank for s in copying if s.state != AddState.ABORTING])


def price_copy(turn: Turn, run: StepRun, source: CopySource) -> float:
    """Seconds the copy should take by the declared rates."""
    return copy_seconds(turn.spec.expert_bytes, source.rank, run.step.slot.rank, turn.topology())


def source_failed(turn: Turn, run: StepRun) -> None:
    """The copy of this step failed, or did not go on: its source is asked last for a while."""
    assert run.state == AddState.COPYING, f"step {run.step.step_id} copies nothing: {run.state}"
    key = turn.spec.key(run.step.layer, run.step.expert)
    state = turn.state
    kept = [
        f
        for f in state.source_failures
        if (f.key, f.rank) != (key, run.source_rank) and turn.at_s < f.at_s + FAILED_FOR_S
    ]
    kept.append(SourceFailure(key=key, rank=run.source_rank, at_s=turn.at_s))
    state.source_failures = kept[-FAILURES_MAX:]


def _failed_at(turn: Turn, key: int) -> dict[int, float]:
    """Rank -> time of its newest failure for the key, of those that still count."""
    return {
        f.rank: f.at_s
        for f in turn.state.source_failures
        if f.key == key and turn.at_s < f.at_s + FAILED_FOR_S
    }
