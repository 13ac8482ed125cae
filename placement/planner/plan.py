"""The plan as data: moves people read, steps machines run, in an order that memory allows.

A *move* (replicate, migrate, evict) is one or two *steps* (`add`, `remove`); a step changes one
slot. Written by the planner, checked and run by the engine, shown by every view.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from placement.layout import SlotId


class StepKind(StrEnum):
    """What a step does to its slot."""

    ADD = "add"
    REMOVE = "remove"


class MoveKind(StrEnum):
    """What a move is to a person."""

    REPLICATE = "replicate"
    MIGRATE = "migrate"
    EVICT = "evict"


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One slot change. `after`: ids of steps that must have ended (add: LISTED, remove: RELEASED)
    before it begins.

    For an `add`, `relies_on` is empty; for a `remove`, it holds the adds whose listing this removal
    relies on.
    """

    step_id: int
    kind: StepKind
    move_id: int
    slot: SlotId
    layer: int
    expert: int
    wave: int
    after: tuple[int, ...] = ()


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """What a person sees moving. Ranks are -1 where there is none (an evict has no target).

    A removal that only makes room for an add belongs to that add's move.
    """

    move_id: int
    kind: MoveKind
    layer: int
    expert: int
    source_rank: int
    target_rank: int
    copy_bytes: int
    cross_node: bool
    reason: str
    gain_s_per_s: float
    """Predicted seconds saved a second by this move (0 for repairs, drains and budget
    evictions)."""


class LayerFigure(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan does to one layer, in seconds: the gate weighs layers apart.

    writes: slots filled. cost_s: of their copies. seconds_per_s: of the layer's slowest rank
    before, seconds a second; 0 where an expert had no replica. gain_s_per_s: what of it is saved.
    spread_s_per_s: standard deviation of the gain from scenario to scenario by chance.
    freed_s_per_s: what the bytes given back are worth at `byte_price` (below 0 for bytes taken).
    """

    layer: int
    writes: int
    cost_s: float
    seconds_per_s: float
    gain_s_per_s: float
    spread_s_per_s: float = 0.0
    freed_s_per_s: float = 0.0

    @property
    def worth_s_per_s(self) -> float:
        """Seconds saved a second, and what bytes given back are worth."""
        return self.gain_s_per_s + self.freed_s_per_s


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An ordered, priced way from one layout to another.

    `steps` are in an order proved slot by slot: run one after another, no rank ever exceeds its
    slots, no expert is ever without a listed replica that had one, and each rank ends with its
    staging slots empty. Steps of one wave may run together. `refused` names what the target wanted
    and no feasible order could do.
    """

    moves: tuple[Move, ...]
    steps: tuple[PlannedStep, ...]
    copy_bytes: int
    cross_node_bytes: int
    cost_s: float
    """Seconds of rank time the copies take from serving."""
    gain_s_per_s: float
    """Predicted seconds saved a second (sum over layers of the slowest rank), before minus
    after."""
    balancedness_before: float
    balancedness_after: float
    refused: tuple[str, ...] = ()
    layers: tuple[LayerFigure, ...] = ()
    """Each layer that a step changes, ascending."""
