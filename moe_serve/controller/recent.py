"""The newest load windows and what happened beside them: copies that ran, ranks that were cold,
batches, failures, targets that could not be computed.

Responsible for keeping them, bounded, for one life of the controller. Must never be read by
anything that decides. Filled by the driver, read by `explaining`.

Parts tell totals since their start; what is new of a part is what it told more than when the last
window closed. A part that this life of the controller has not met before may have run for hours:
nothing of its first word is new. A later life of one that is known begins at zero.

A shard is young for a while where it came after something was served; those that a service starts
with are old.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from moe_serve.controller.names import PartKind
from moe_serve.controller.parts import AnyPart, PartTable
from moe_serve.controller.targets import Targets
from placement.engine.state import EngineState, PlanRun, SlotUse
from placement.load import LoadWindow
from placement.messages.effects import Transition
from placement.topology import MoeSpec

WINDOWS_KEPT: Final = 10
"""Load windows kept."""
COPIES_KEPT: Final = 512
"""Copies remembered, oldest forgotten first."""
YOUNG_WINDOWS: Final = 3
"""A shard counts as cold until so many windows after it joined have closed."""
COPYING: Final = "copying"
"""State of an add from the first byte to the proof."""
NEVER_S: Final = float("inf")

_NO_COUNTS: Final[Mapping[str, float]] = {}


@dataclass(slots=True)
class CopySpan:
    """A copy: from a rank, or -1, into a rank. ended_s: NEVER_S while it runs."""

    source_rank: int
    target_rank: int
    began_s: float
    ended_s: float = NEVER_S


@dataclass(frozen=True, slots=True)
class Sample:
    """What was new since the sample before it, and how things stood at its end. batches,
    memory_errors: by rank. cold: ranks that do not serve, or only just began to. missing: experts
    without a listed replica. failed, refused: requests."""

    batches: Mapping[int, int] = field(default_factory=dict)
    memory_errors: Mapping[int, int] = field(default_factory=dict)
    cold: frozenset[int] = frozenset()
    missing: int = 0
    failed: int = 0
    refused: int = 0


class Recent:
    """See the module's text. `parts`: of this life. Times are driver times."""

    def __init__(self, parts: PartTable, spec: MoeSpec) -> None:
        self._parts = parts
        self._spec = spec
        self._told: dict[tuple[PartKind, str], tuple[int, Mapping[str, float]]] = {}
        """Place -> (its life, totals that it had told) when the last window closed."""
        self._joined: dict[str, int] = {}
        """Shard -> number of the sample that it was first there at."""
        self._samples = 0
        self._served = False
        """Whether something was served when the last window closed: who joins later is young."""
        self._copies: OrderedDict[int, CopySpan] = OrderedDict()
        self.windows: deque[tuple[LoadWindow, Sample]] = deque(maxlen=WINDOWS_KEPT)
        """Newest last."""
        self.targets = Targets()

    def window_closed(self, window: LoadWindow, state: EngineState) -> None:
        """A window closed; `state` is the engine's after it."""
        shards = {str(part.name) for part in self._parts.shards.values()}
        first = self._samples if self._served else -YOUNG_WINDOWS
        self._joined = {name: self._joined.get(name, first) for name in shards}
        self.windows.append((window, self.sample(state)))
        self._samples += 1
        self._served = self._served or state.published
        for part in self._parts.all():
            if part.report is not None:
                name = part.name
                self._told[name.kind, name.place] = name.incarnation, part.report.counters

    def sample(self, state: EngineState) -> Sample:
        """What is new since the last window closed."""
        shards = self._parts.shards.items()
        routers = self._parts.routers.values()
        return Sample(
            batches={rank: self._new(part, "batches") for rank, part in shards},
            memory_errors={rank: self._new(part, "memory_errors") for rank, part in shards},
            cold=self._cold(state),
            missing=self._missing(state) if state.published else 0,
            failed=sum(self._new(part, "failed") for part in routers),
            refused=sum(self._new(part, "rejected") for part in routers),
        )

    def note(self, transitions: Iterable[Transition], run: PlanRun | None) -> None:
        """Steps changed their state; `run` is the running plan after it."""
        for change in transitions:
            known = self._copies.get(change.step_id)
            if change.after == COPYING and known is None:
                step = None if run is None else run.steps.get(change.step_id)
                source = -1 if step is None else step.source_rank
                self._copies[change.step_id] = CopySpan(source, change.rank, change.at_s)
                while len(self._copies) > COPIES_KEPT:
                    self._copies.popitem(last=False)
            elif change.before == COPYING and change.after != COPYING and known is not None:
                known.ended_s = change.at_s

    def copies(self, start_s: float, end_s: float) -> list[CopySpan]:
        """Copies that ran at any moment from start_s to end_s."""
        return [c for c in self._copies.values() if c.began_s < end_s and c.ended_s > start_s]

    def _cold(self, state: EngineState) -> frozenset[int]:
        young = {
            part.name.rank
            for part in self._parts.shards.values()
            if self._samples - self._joined.get(str(part.name), self._samples) < YOUNG_WINDOWS
            and self._served
        }
        away = {rank.rank for rank in state.ranks if rank.wants_shard and not rank.holds}
        return frozenset(young | away)

    def _missing(self, state: EngineState) -> int:
        listed = np.zeros(self._spec.num_keys, np.bool_)
        for rank in state.ranks:
            if rank.holds:
                listed[[s.key for s in rank.slots if s.use is SlotUse.LISTED]] = True
        return int(self._spec.num_keys - np.count_nonzero(listed))

    def _new(self, part: AnyPart, name: str) -> int:
        known = self._told.get((part.name.kind, part.name.place))
        if known is None or part.report is None:
            return 0
        before = known[1] if known[0] == part.name.incarnation else _NO_COUNTS
        return max(0, int(part.report.counters.get(name, 0.0) - before.get(name, 0.0)))
