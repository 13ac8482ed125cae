"""Recorded events through today's engine: does it answer them as it did then, byte for byte?

Responsible for the comparison. Does no I/O: bytes come in, sentences go out. Called by the CLI, the
simulator's checkers and golden tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from placement.config import RebalanceConfig
from placement.engine import EngineSnapshot, RebalanceEngine, compute_target
from placement.messages import events as ev
from placement.messages.codec import decode_as, decode_effects, decode_event, encode
from placement.messages.effects import ComputeTarget, Effects


def replay_segment(
    snapshot: bytes, events: Iterable[bytes], effects: Iterable[bytes]
) -> tuple[str, ...]:
    """Differences between recorded effects and today's, as sentences; empty where every byte is the
    same.

    snapshot: bytes of the EngineSnapshot that opens the segment. Targets come from the recorded
    TargetComputed events; nothing is planned anew.
    """
    return replay_events(
        decode_as(snapshot, EngineSnapshot),
        [decode_event(data) for data in events],
        [decode_effects(data) for data in effects],
    )


def replay_events(
    snapshot: EngineSnapshot, events: Sequence[ev.AnyEvent], effects: Sequence[Effects]
) -> tuple[str, ...]:
    """As `replay_segment`, for decoded events and effects."""
    engine = RebalanceEngine.replayed(snapshot)
    found: list[str] = []
    for number, (event, want) in enumerate(zip(events, effects, strict=True)):
        got = engine.step(event)
        if encode(got) != encode(want):
            found.append(f"event {number} ({type(event).__name__}): {_first_difference(want, got)}")
    return tuple(found)


def recomputed(
    events: Sequence[ev.AnyEvent], effects: Sequence[Effects], config: RebalanceConfig
) -> tuple[str, ...]:
    """Recorded targets that today's policy and planner would not compute, as sentences."""
    wanted: dict[int, ComputeTarget] = {}
    found: list[str] = []
    for event, effect in zip(events, effects, strict=True):
        if isinstance(event, ev.TargetComputed) and event.request_id in wanted:
            got = compute_target(wanted.pop(event.request_id), config)
            same = isinstance(got, ev.TargetComputed) and encode(got.plan) == encode(event.plan)
            if not same:
                found.append(f"target {event.request_id} is computed differently now")
        for command in effect.commands:
            if isinstance(command, ComputeTarget):
                wanted[command.request_id] = command
    return tuple(found)


def _first_difference(want: Effects, got: Effects) -> str:
    for name in ("transitions", "commands", "records"):
        old, new = getattr(want, name), getattr(got, name)
        for i in range(max(len(old), len(new))):
            a = encode(old[i]) if i < len(old) else b""
            b = encode(new[i]) if i < len(new) else b""
            if a != b:
                was = type(old[i]).__name__ if i < len(old) else "nothing"
                now = type(new[i]).__name__ if i < len(new) else "nothing"
                return f"{name}[{i}] was {was}, is {now}" + (
                    " with other content" if was == now else ""
                )
    raise AssertionError("effects whose bytes differ are equal part by part")
