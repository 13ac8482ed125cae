"""One call of `step`: the state, the time, and the effects collected so far.

Responsible for giving records and transitions their numbers and for facts that are cheap to look up
once a call. Decides nothing. Every module of this package takes a Turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from placement.config import RebalanceConfig
from placement.engine.shown import planning_topology, shown_key, shown_slots
from placement.engine.state import NEVER_S, EngineState, RankState, RankStatus, SlotState, StepRun
from placement.layout import ExpertLayout, IntArray
from placement.messages.effects import AnyCommand, Effects, Transition
from placement.messages.records import REFUSED_MAX, DecisionRecord
from placement.planner.price import StackedLayers, stack
from placement.split import CompiledLayer, compile_layer
from placement.topology import DeviceProfile, MoeSpec, Topology


@dataclass(slots=True)
class LayoutCache:
    """The layout of the newest revision, and its matrix kept slot by slot: derived, so no part of
    the state."""

    slots: IntArray | None = None
    layout: ExpertLayout | None = None
    compiled: dict[int, CompiledLayer] = field(default_factory=dict)
    """Layers of the layout indexed for the split, as far as they were asked for."""
    stacked: StackedLayers | None = None
    """All of them together."""
    candidate_slots: IntArray | None = None
    candidate_compiled: dict[int, CompiledLayer] = field(default_factory=dict)
    """The same of the kept target."""
    floor: tuple[object, int, npt.NDArray[np.int64]] | None = None
    """(what it was found for, reachable floor, failure domains of each key)."""
    clean_at_revision: int = -1
    """Revision of the state that was found without orphan slots."""


@dataclass(slots=True)
class Turn:
    """Everything a rule may look at or say during one step."""

    spec: MoeSpec
    config: RebalanceConfig
    profiles: tuple[DeviceProfile, ...]
    cross_node_bytes_per_s: float
    state: EngineState
    at_s: float
    cache: LayoutCache
    transitions: list[Transition] = field(default_factory=list)
    commands: list[AnyCommand] = field(default_factory=list)
    records: list[DecisionRecord] = field(default_factory=list)

    def effects(self) -> Effects:
        """What this call asks for."""
        return Effects(
            transitions=tuple(self.transitions),
            commands=tuple(self.commands),
            records=tuple(self.records),
        )

    def record(  # noqa: PLR0913  # one keyword a field of the record
        self,
        rule: str,
        outcome: str,
        detail: str = "",
        *,
        numbers: dict[str, float] | None = None,
        plan_id: str = "",
        move_id: int = -1,
        expected_gain_s_per_s: float = 0.0,
        realised_gain_s_per_s: float = 0.0,
        copy_bytes: int = 0,
        refused: Sequence[str] = (),
    ) -> None:
        """Leave a decision record."""
        self.records.append(
            DecisionRecord(
                at_s=self.at_s,
                seq=self.state.next_record,
                rule=rule,
                outcome=outcome,
                detail=detail,
                plan_id=plan_id,
                move_id=move_id,
                numbers=numbers or {},
                expected_gain_s_per_s=expected_gain_s_per_s,
                realised_gain_s_per_s=realised_gain_s_per_s,
                copy_bytes=copy_bytes,
                refused=tuple(refused[:REFUSED_MAX]),
            )
        )
        self.state.next_record += 1

    def rank(self, rank: int) -> RankState:
        """State of a rank."""
        return self.state.ranks[rank]

    def slot(self, rank: int, index: int) -> SlotState | None:
        """State of a slot, None where the rank is lost or has fewer slots."""
        slots = self.state.ranks[rank].slots
        return slots[index] if 0 <= index < len(slots) else None

    def changed(self, rank: int = -1, index: int = -1, *, stale: bool = True) -> None:
        """What is listed, resident or allowed changed (in one slot, or anywhere): older targets are
        stale, unless all that changed is that a slot is free which they did without."""
        self.state.revision += stale
        self.cache.layout = self.cache.stacked = None
        if index < 0 or self.cache.slots is None:
            self.cache.slots = None
            self.cache.compiled.clear()
            return
        shown = shown_key(self.state.ranks[rank].slots[index])
        for key in (int(self.cache.slots[rank, index]), shown):
            self.cache.compiled.pop(key // self.spec.num_experts, None)
        self.cache.slots[rank, index] = shown

    def layout(self) -> ExpertLayout:
        """What is listed or will be."""
        if self.cache.slots is None:
            self.cache.slots = shown_slots(self.state)
        if self.cache.layout is None:
            self.cache.layout = ExpertLayout(
                self.cache.slots, self.spec.num_layers, self.spec.num_experts
            )
        return self.cache.layout

    def compiled(self, layer: int) -> CompiledLayer:
        """A layer of `layout`, indexed for the split."""
        found = self.cache.compiled.get(layer)
        if found is None:
            expert, rank = self.layout().layer_slots(layer)
            found = compile_layer(expert, rank, self.spec.num_experts, len(self.state.ranks))
            self.cache.compiled[layer] = found
        return found

    def stacked(self) -> StackedLayers:
        """All layers of `layout`, indexed for the split."""
        if self.cache.stacked is None:
            self.cache.stacked = stack([self.compiled(i) for i in range(self.spec.num_layers)])
        return self.cache.stacked

    def compiled_candidate(self, layer: int) -> CompiledLayer:
        """A layer of the kept target, indexed for the split."""
        kept, cache = self.state.candidate, self.cache
        assert kept is not None, "no target is kept"
        if cache.candidate_slots is not kept.slots:
            cache.candidate_slots = kept.slots
            cache.candidate_compiled.clear()
        found = cache.candidate_compiled.get(layer)
        if found is None:
            experts = self.spec.num_experts
            low = layer * experts
            rank, index = np.nonzero((kept.slots >= low) & (kept.slots < low + experts))
            expert = kept.slots[rank, index] - low
            found = compile_layer(expert, rank, experts, len(self.state.ranks))
            cache.candidate_compiled[layer] = found
        return found

    def topology(self) -> Topology:
        """Ranks as the next plan must see them."""
        return planning_topology(self.state, self.profiles, self.cross_node_bytes_per_s)

    def known_step(self, step_id: int) -> StepRun:
        """A step that must be known."""
        found = self.find_step(step_id)
        assert found is not None, f"step {step_id} is not known"
        return found

    def plan_of(self, step_id: int) -> str:
        """Id of the running plan where the step is part of it, "" for a parked one."""
        run = self.state.run
        return run.plan_id if run is not None and step_id in run.steps else ""

    def open_steps(self, ids: Collection[int]) -> list[StepRun]:
        """Steps that must be known, by ascending id. Every event looks at all open steps several
        times, so this is where a first fill spends its time."""
        run = self.state.run
        steps = {} if run is None else run.steps
        parked = self.state.parked
        return [parked[i] if i in parked else steps[i] for i in sorted(ids)]

    def soonest_deadline_s(self) -> float:
        """Earliest deadline of a step that copies or is being removed; NEVER_S without one."""
        state, steps = self.state, self.state.parked
        if state.run is not None:
            steps = state.run.steps if not steps else state.run.steps | steps
        soonest = [steps[i].deadline_s for i in state.copying]
        soonest += [steps[i].deadline_s for i in state.removing]
        return min(soonest, default=NEVER_S)

    def find_step(self, step_id: int) -> StepRun | None:
        """A step that is still known, by id."""
        if step_id in self.state.parked:
            return self.state.parked[step_id]
        return self.state.run.steps.get(step_id) if self.state.run is not None else None

    def waiting_for_ranks(self) -> list[int]:
        """Ranks that may still say what they hold: no table may leave them out yet."""
        wanted = (
            (RankStatus.RESTORED,)
            if self.state.published
            else (RankStatus.EXPECTED, RankStatus.RESTORED)
        )
        return [r.rank for r in self.state.ranks if r.status in wanted]
