"""A recorded journal: does today's engine follow it, and on what fleet was it served?

Responsible for stepping segments and comparing; every rule is the engine's. Called by the replay
command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

import msgspec

from moe_serve.cli.recordings import Segment
from moe_serve.cli.rehearsal.stage import Stage
from placement.engine import EngineState, RebalanceEngine
from placement.load import LoadWindow
from placement.messages.codec import encode
from placement.messages.effects import Effects
from placement.messages.events import WindowClosed
from placement.replay import recomputed
from placement.scoring import balancedness


@dataclass(frozen=True, slots=True)
class SegmentCheck:
    """What came of stepping today's engine through a segment.

    reaches_next: its state then is the snapshot that opens the next segment; None for the newest
    segment of a term, which nothing follows. False: today's engine differs, or inputs were cut
    (a full disk or queue) before the next segment. targets_differ: recorded targets that today's
    policy and planner would not compute.
    """

    number: int
    events: int
    windows: int
    reaches_next: bool | None
    targets_differ: tuple[str, ...]


def check_segments(segments: Sequence[Segment]) -> list[SegmentCheck]:
    """Step every segment and compare it with what followed."""
    checks = []
    for at, segment in enumerate(segments):
        engine = RebalanceEngine.replayed(segment.snapshot)
        effects: list[Effects] = [engine.step(event) for event in segment.events]
        following = segments[at + 1] if at + 1 < len(segments) else None
        reaches = None
        if following is not None and _same_life(segment, following):
            reaches = _tree(encode(engine.snapshot())) == _tree(following.snapshot_bytes)
        checks.append(
            SegmentCheck(
                number=segment.number,
                events=len(segment.events),
                windows=sum(isinstance(event, WindowClosed) for event in segment.events),
                reaches_next=reaches,
                targets_differ=recomputed(segment.events, effects, segment.snapshot.config),
            )
        )
    return checks


def _tree(snapshot: bytes) -> Any:
    """A snapshot as plain values, its sets sorted: the order in which a set is written depends on
    how it came to be."""
    tree = msgspec.msgpack.decode(snapshot)
    for name, hint in get_type_hints(EngineState).items():
        if get_origin(hint) is set:
            tree["state"][name].sort()
    return tree


def _same_life(segment: Segment, following: Segment) -> bool:
    """A restarted controller has another term: its first snapshot follows from recovery, not from
    the events before it."""
    same_term = segment.snapshot.state.term == following.snapshot.state.term
    return same_term and following.number == segment.number + 1


def journal_stage(segments: Sequence[Segment]) -> Stage:
    """Model, fleet and settings as the oldest segment has them."""
    first = segments[0].snapshot
    topology = RebalanceEngine.replayed(first).topology()
    ranks = tuple(msgspec.structs.replace(r, alive=True, draining=False) for r in topology.ranks)
    return Stage(first.spec, msgspec.structs.replace(topology, ranks=ranks), first.config)


def journal_windows(segments: Sequence[Segment]) -> list[LoadWindow]:
    """Closed windows of all segments, in order."""
    return [
        event.window
        for segment in segments
        for event in segment.events
        if isinstance(event, WindowClosed)
    ]


def measured(window: LoadWindow) -> float | None:
    """Balancedness of the pairs that ranks reported in a window; None where none did."""
    if window.rank_pairs.size == 0 or not window.rank_pairs.any():
        return None
    return balancedness(window.rank_pairs)
