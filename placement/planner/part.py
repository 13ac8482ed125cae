"""Parts of a plan: layers whose moves belong together, and a plan of only some of them.

Responsible for splitting a plan so that each part can be run, or left, by itself. Must never judge
(the gate does). Called by the engine with each automatic target.

Slots are a pool that a rank shares over its layers, so moves of two layers may hang together: a
replica of one makes room for one of the other, an add waits for the slot that a removal frees, or
an add takes the last empty slot of a rank and a removal in another layer gives it back. Such layers
are *linked*. Example: layer 0 adds on rank 0 over a replica of layer 3, layer 1 exchanges two
experts: the parts are {0, 3} and {1}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from placement.layout import EMPTY, ExpertLayout
from placement.planner.plan import LayerFigure, Plan, PlannedStep, StepKind

Figures = tuple[LayerFigure, ...]


class _Links:
    """Layers that hang together, the lowest speaking for all."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._parent = {layer: layer for layer in layers}

    def root(self, layer: int) -> int:
        while self._parent[layer] != layer:
            layer = self._parent[layer]
        return layer

    def join(self, a: int, b: int) -> None:
        low, high = sorted((self.root(a), self.root(b)))
        self._parent[high] = low

    def groups(self) -> list[tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for layer in sorted(self._parent):
            found.setdefault(self.root(layer), []).append(layer)
        return [tuple(group) for group in found.values()]


def choose_parts(
    plan: Plan,
    layout: ExpertLayout,
    *,
    slot_limit: Sequence[int],
    staging_slots: int,
    starts: Callable[[Figures], bool],
) -> tuple[list[Figures], list[Figures]]:
    """(parts that start, parts that do not), each the figures of its layers, by lowest layer.

    starts: the gate's word on layers that belong together. Parts that start leave every rank its
    staging slots, as the whole plan does: where they would not, the layers that share the rank are
    linked and asked about again. A slot at or above its rank's limit (`slot_limit`; the budget
    fell) is given up for good: emptying it makes no room.
    """
    links = _Links([f.layer for f in plan.layers])
    layer_of = {s.step_id: s.layer for s in plan.steps}
    of_move: dict[int, int] = {}
    for step in plan.steps:
        links.join(step.layer, of_move.setdefault(step.move_id, step.layer))
        for before in step.after:
            links.join(step.layer, layer_of[before])
    figures = {f.layer: f for f in plan.layers}
    empty = [
        int(np.count_nonzero(layout.slots[rank, : slot_limit[rank]] == EMPTY))
        for rank in range(layout.num_ranks)
    ]
    inside = [s for s in plan.steps if s.slot.index < slot_limit[s.slot.rank]]
    while True:
        go: list[Figures] = []
        stay: list[Figures] = []
        for group in links.groups():
            part = tuple(figures[layer] for layer in group)
            (go if starts(part) else stay).append(part)
        chosen = {f.layer for part in go for f in part}
        short = _short_rank([s for s in inside if s.layer in chosen], empty, staging_slots)
        if short is None:
            return go, stay
        here = [s.layer for s in inside if s.slot.rank == short]
        for layer in here:
            links.join(layer, here[0])


def _short_rank(steps: Sequence[PlannedStep], empty: list[int], staging_slots: int) -> int | None:
    """Lowest rank that the steps would leave too few empty slots, None where there is none."""
    left = list(empty)
    for step in steps:
        left[step.slot.rank] += -1 if step.kind is StepKind.ADD else 1
    for rank, (before, after) in enumerate(zip(empty, left, strict=True)):
        if after < min(before, staging_slots):
            return rank
    return None


def part_of(plan: Plan, parts: Sequence[Figures]) -> Plan:
    """The plan of only these parts (of `choose_parts`). Balancedness after is what their share of
    the gain makes of it."""
    layers = {f.layer for part in parts for f in part}
    if len(layers) == len(plan.layers):
        return plan
    steps = tuple(s for s in plan.steps if s.layer in layers)
    moves = tuple(m for m in plan.moves if m.layer in layers)
    figures = tuple(f for f in plan.layers if f.layer in layers)
    gain = sum((f.gain_s_per_s for f in figures), 0.0)
    share = gain / plan.gain_s_per_s if plan.gain_s_per_s > 0.0 else 0.0
    before, after = 1.0 / plan.balancedness_before, 1.0 / plan.balancedness_after
    return msgspec.structs.replace(
        plan,
        moves=moves,
        steps=steps,
        copy_bytes=sum(m.copy_bytes for m in moves),
        cross_node_bytes=sum(m.copy_bytes for m in moves if m.cross_node),
        cost_s=sum((f.cost_s for f in figures), 0.0),
        gain_s_per_s=gain,
        balancedness_after=1.0 / max(1.0, before - share * (before - after)),
        layers=figures,
    )
