"""What seeds have met: pairs of (step state, fault), typed refusals, and how often.

Responsible for counting and for saying what was never met. Decides nothing. Filled by the parts of
a world, merged and printed by whoever runs many of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from placement.migration import AddState, RemoveState
from placement.sim.faults import FaultKind

STATES = (*(f"add.{s.value}" for s in AddState), *(f"remove.{s.value}" for s in RemoveState))
"""Every state of a step."""

REFUSALS = (
    # shards, to commands
    "shard.term",
    "step.no_slot",
    "step.over_budget",
    "step.source_lost",
    "step.digest",
    "step.timeout",
    "step.io",
    "step.recalled",
    # shards, to rows
    "row.stale",
    "row.refused_late",
    "row.refused_busy",
    "row.refused_draining",
    "row.no_memory",
    # routers
    "router.term",
    "router.misfit",
    "request.no_table",
    "request.no_replica",
    "request.attempts",
    "request.busy",
    "request.unreachable",
    "request.budget",
    "request.deadline",
    "request.invalid",
    "request.cancelled",
    "admission.queue_full",
    "admission.too_late",
    "admission.closed",
    # the controller
    "admin.refused",
    "admin.not_found",
    "admin.busy",
    "admin.failed",
    "join.refused",
    "target.stale",
    "target.failed",
    "target.unfit",
    "journal.torn",
    "journal.owner",
    "journal.full",
)
"""Every typed refusal that a world can bring about, by who says it."""


class Coverage(msgspec.Struct, kw_only=True):
    """Counts. pairs: (state, fault) as "state x fault"."""

    pairs: Counter[str] = msgspec.field(default_factory=Counter)
    refusals: Counter[str] = msgspec.field(default_factory=Counter)
    faults: Counter[str] = msgspec.field(default_factory=Counter)

    def met(self, state: str, kind: FaultKind) -> None:
        """A step was in the state while the fault lasted, or as it struck."""
        self.pairs[f"{state} x {kind.value}"] += 1

    def refused(self, name: str) -> None:
        """A typed refusal was given."""
        assert name in REFUSALS, f"{name} is no known refusal"
        self.refusals[name] += 1

    def add(self, other: Coverage) -> None:
        """Count another world's with this one's."""
        self.pairs.update(other.pairs)
        self.refusals.update(other.refusals)
        self.faults.update(other.faults)

    def missing(self) -> tuple[list[str], list[str]]:
        """Pairs and refusals without a single hit."""
        return (
            [pair for pair in all_pairs() if not self.pairs[pair]],
            [name for name in REFUSALS if not self.refusals[name]],
        )


def all_pairs() -> Iterable[str]:
    """Every pair that must be met, in order."""
    return [f"{state} x {kind.value}" for state in STATES for kind in FaultKind]
