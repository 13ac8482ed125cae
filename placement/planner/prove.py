"""Proof that the steps of a plan can be run, by running them on paper: one slot at a time, in their
order.

Written apart from the ordering so that one checks the other. Called by `make_plan` on every plan,
and by tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placement.layout import EMPTY, ExpertLayout
from placement.planner.plan import PlannedStep, StepKind


def prove(
    current: ExpertLayout,
    steps: Sequence[PlannedStep],
    *,
    slot_limit: list[int],
    staging_slots: int,
) -> ExpertLayout:
    """Layout after all steps. Raises AssertionError where a step breaks memory, coverage or its own
    order.

    Rules: an add goes into an empty slot below the rank's limit; a slot freed in a wave is used
    only in a later one; no removal takes an expert's last listed replica; what a step waits for
    stands before it; no rank ends with fewer empty slots than staging asks for, unless it began so.
    """
    slots, replicas = current.slots.copy(), current.replica_counts.reshape(-1).copy()
    seen: set[int] = set()
    freed_in: dict[tuple[int, int], int] = {}
    wave = 0
    for step in steps:
        rank, index = step.slot
        key = step.layer * current.num_experts + step.expert
        name = (
            f"step {step.step_id} ({step.kind} layer {step.layer} expert {step.expert} "
            f"rank {rank} slot {index})"
        )
        assert step.wave >= wave, f"{name}: waves go backwards"
        wave = step.wave
        assert set(step.after) <= seen, f"{name}: waits for a step that comes later"
        seen.add(step.step_id)
        if step.kind is StepKind.ADD:
            assert index < slot_limit[rank], f"{name}: rank has {slot_limit[rank]} slots"
            assert slots[rank, index] == EMPTY, f"{name}: slot holds {slots[rank, index]}"
            assert freed_in.get((rank, index), -1) < wave, f"{name}: slot is freed in the same wave"
            slots[rank, index] = key
            replicas[key] += 1
        else:
            assert slots[rank, index] == key, f"{name}: slot holds {slots[rank, index]}"
            assert replicas[key] > 1, f"{name}: last replica"
            slots[rank, index] = EMPTY
            replicas[key] -= 1
            freed_in[rank, index] = wave
    for rank, limit in enumerate(slot_limit):
        empty, before = (
            int(np.count_nonzero(rows[rank, :limit] == EMPTY)) for rows in (slots, current.slots)
        )
        assert empty >= min(staging_slots, before), f"rank {rank} ends with {empty} empty slots"
    return ExpertLayout(slots, current.num_layers, current.num_experts)
