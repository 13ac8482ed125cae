"""Text of what an engine was told and what it said: one line an event, transition, command and
record.

Tags, epochs and ids are shown; times to the millisecond; arrays by their shape. Written for
reviewers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from placement.layout import ExpertLayout
from placement.messages.effects import Effects, PublishTable
from placement.messages.events import AnyEvent
from placement.planner.plan import Plan
from placement.routing import RankAddress, RoutingTable

HIDDEN = frozenset({"at_s", "input", "incarnation", "weights_version", "seq"})
LOW_BITS = 0xFFFFFFFF


def transcript(steps: Sequence[tuple[AnyEvent, Effects]]) -> str:
    """The whole story as text."""
    lines: list[str] = []
    for event, effects in steps:
        lines.append(f"{event.at_s:8.3f}  {describe(event)}")
        lines.extend(
            f"            step {t.step_id & LOW_BITS} {t.kind} L{t.layer}E{t.expert} "
            f"rank {t.rank} slot {t.slot}: {t.before} -> {t.after}"
            for t in effects.transitions
        )
        lines.extend(f"          > {describe(c)}" for c in effects.commands)
        for r in effects.records:
            numbers = " ".join(f"{k}={shown(v)}" for k, v in sorted(r.numbers.items()))
            text = " ".join(x for x in (r.detail, f"[{numbers}]" if numbers else "") if x)
            lines.append(f"          # {r.rule} {r.outcome}: {text}".rstrip(": "))
    return "\n".join(lines) + "\n"


def describe(message: Any) -> str:
    """Name and fields of a message on one line."""
    if isinstance(message, PublishTable):
        return f"PublishTable {shown(message.table)}"
    fields = " ".join(
        f"{name}={shown(getattr(message, name), name)}"
        for name in message.__struct_fields__
        if name not in HIDDEN
    )
    return f"{type(message).__name__} {fields}".rstrip()


def shown(value: Any, name: str = "") -> str:  # noqa: PLR0911  # one return a kind of value
    """A value in a few characters."""
    if name == "step_id":
        return str(int(value) & LOW_BITS)
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, RoutingTable):
        listed = " ".join(
            f"L{layer}E{expert}@"
            + ",".join(f"{rank}.{slot}" for rank, slot, _ in value.replicas(layer, expert))
            for layer in range(value.num_layers)
            for expert in range(value.num_experts)
        )
        return f"term {value.term} epoch {value.epoch}: {listed}"
    if isinstance(value, Plan):
        return f"plan({len(value.moves)} moves, {len(value.steps)} steps)"
    if isinstance(value, RankAddress):
        return value.address
    if isinstance(value, np.ndarray):
        return f"array{list(value.shape)}"
    if isinstance(value, ExpertLayout):
        return f"layout{list(value.slots.shape)}"
    if isinstance(value, msgspec.Struct):
        return f"({describe(value)})"
    return str(value)
