"""The default policy: from the live layout, few slot writes, each for what it gains under the
split the router runs.

Responsible for repairs first (`repair`), then a greedy search, then evictions of what does not
pay. Must never write a slot that brings nothing: same load, same layout gives zero moves. Called
through `propose`.

The search. Every layer that is not balanced enough proposes its best change
(`kernels.best_change`): replicate an expert of a hot rank on a cold one, into an empty slot, over
the least useful surplus replica of any layer, or exchange two experts. The best change a slot write
over all layers is made, the layers it touched are levelled anew, and so on, until no change saves
`GAIN_MIN` of its layer's fair seconds a write, or the limits on moves or bytes are reached. Where a
replicated expert is no longer used on the hot rank, and that rank is full, it leaves it: the
replication was a migration. At the end, trailing changes that did not lower the objective are taken
back.

Objective: sum over layers of the predicted seconds a second of the slowest rank, weighted over
scenarios, plus `byte_price` x resident bytes. Seconds are compute-bound: pairs / speed of the
rank, both phases alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from placement.cost import seconds_per_pair
from placement.layout import ExpertLayout
from placement.policy.base import PolicyInput
from placement.policy.feasibility import check_request
from placement.policy.kernels import (
    EXCHANGE,
    NONE,
    REPLICATE_OVER,
    Room,
    best_change,
    shortlist_for,
)
from placement.policy.leveled import Leveled
from placement.policy.occupancy import Occupancy
from placement.policy.repair import repair

GAIN_MIN = 2e-3
"""Share of a layer's fair seconds that a slot write must save."""


class Edit(NamedTuple):
    """One slot filled (`added`) or emptied. Undone by its opposite, in reverse order."""

    key: int
    rank: int
    slot: int
    added: bool


class Proposal(NamedTuple):
    """A layer's best change (experts by position) and what it assumes of the cold rank."""

    score: float
    gain: float
    kind: int
    expert: int
    hot: int
    cold: int
    other: int
    room: tuple[int, int, float]
    """(free slots of the cold rank or none, layer of its victim, victim's loss)."""

    @property
    def writes(self) -> int:
        """Slots it writes."""
        return 2 if self.kind == EXCHANGE else 1


def propose_incremental(request: PolicyInput) -> ExpertLayout:
    """Layout a few writes better than the live one; the live one itself where nothing pays.

    Raises PolicyError where the ranks cannot hold every expert.
    """
    floor = check_request(request)
    demand = request.scenarios.sum(axis=1)
    known = bool(demand.any())
    if not known:
        demand = np.ones_like(demand)
    occupancy, leveled = _repaired(request, floor, demand)
    if known:
        search = Search(request, occupancy, leveled)
        search.run()
        search.take_back()
    return occupancy.to_layout()


def objective_s(request: PolicyInput, layout: ExpertLayout) -> float:
    """What the policy lowers: seconds a second of the slowest rank, summed over layers, plus the
    price of residents.
    """
    seen = PolicyInput(
        spec=request.spec,
        topology=request.topology,
        layout=layout,
        scenarios=request.scenarios,
        weights=request.weights,
        staging_slots=request.staging_slots,
    )
    occupancy = Occupancy(seen, 1)
    leveled = Leveled(
        occupancy,
        request.scenarios.sum(axis=1),
        request.weights,
        seconds_per_pair(request.spec, request.topology),
    )
    price = request.byte_price * request.spec.slot_bytes
    return float(leveled.slowest_s.sum()) + price * int(occupancy.filled.sum())


class LeveledJudge:
    """Judge of repairs: exact losses under the levelled split."""

    def __init__(
        self, occupancy: Occupancy, leveled: Leveled, mean: npt.NDArray[np.float64]
    ) -> None:
        self._num_experts = occupancy.num_experts
        self._occupancy = occupancy
        self._leveled = leveled
        self._mean = mean.reshape(-1)

    def cheapest(self, rank: int) -> tuple[float, int] | None:
        """Least value lost, then lowest layer."""
        loss, _, key = self._leveled.cheapest(rank)
        return (loss, key) if key >= 0 else None

    def strain(self, key: int, rank: int) -> float:
        """Seconds a second of the rank in the key's layer with a share of the key."""
        layer = key // self._num_experts
        share = float(self._mean[key]) / (self._occupancy.count(key) + 1)
        load = float(self._leveled.mean_load(layer)[rank])
        return load + share * float(self._leveled.world.pair_s[rank])

    def changed(self, key: int) -> None:
        """Level the key's layer anew."""
        self._leveled.refresh(key // self._num_experts)


def _repaired(
    request: PolicyInput, floor: int, demand: npt.NDArray[np.float64]
) -> tuple[Occupancy, Leveled]:
    pair_s = seconds_per_pair(request.spec, request.topology)
    mean = np.tensordot(request.weights, demand, axes=1)
    order = [int(key) for key in np.argsort(-mean.reshape(-1), kind="stable")]
    occupancy = Occupancy(request, floor)
    leveled = Leveled(occupancy, demand, request.weights, pair_s)
    repair(occupancy, LeveledJudge(occupancy, leveled, mean), order)
    return occupancy, leveled


class Search:
    """Greedy search over one occupancy; every figure in it is a function of the layout reached,
    not of the way.
    """

    def __init__(self, request: PolicyInput, occupancy: Occupancy, leveled: Leveled) -> None:
        self._occupancy = occupancy
        self._leveled = leveled
        self._num_experts = occupancy.num_experts
        self._enough = request.balance_enough
        self._price = request.byte_price * request.spec.slot_bytes
        by_bytes = (
            None if request.max_bytes is None else request.max_bytes // request.spec.expert_bytes
        )
        limits = [limit for limit in (request.max_moves, by_bytes) if limit is not None]
        self._moves_left = min(limits, default=1 << 40)
        self._short = shortlist_for(occupancy.num_experts, occupancy.num_ranks)
        self._edits: list[Edit] = []
        self._marks: list[tuple[int, float]] = [(0, self._objective())]

    def run(self) -> None:
        """Make changes until none pays, looking at every layer again after each round that made
        one.
        """
        progress = True
        while progress and self._moves_left > 0:
            while self._price > 0 and self._moves_left > 0 and self._evict():
                pass
            progress = self._round()

    def take_back(self) -> None:
        """Undo what came after the (first) change with the lowest objective."""
        keep = min(range(len(self._marks)), key=lambda i: (self._marks[i][1], i))
        self._undo(self._marks[keep][0])

    def _objective(self) -> float:
        resident = self._price * int(self._occupancy.filled.sum())
        return float(self._leveled.slowest_s.sum()) + resident

    def _round(self) -> bool:
        """Start with every layer open; a layer closes when it has no change that pays. Whether
        any was made.
        """
        made = False
        layers = range(self._occupancy.num_layers)
        proposals = {layer: self._propose(layer) for layer in layers}
        while proposals and self._moves_left > 0:
            layer = min(proposals, key=lambda i: (-proposals[i].score, i))
            proposal = proposals[layer]
            if proposal.kind == NONE:
                break
            if proposal.room != self._room_of(layer, proposal.cold) or (
                proposal.writes > self._moves_left
            ):
                proposals[layer] = self._propose(layer)
                continue
            touched = self._apply(layer, proposal)
            if not touched:
                del proposals[layer]
                continue
            made = True
            for changed in sorted(touched & proposals.keys()):
                proposals[changed] = self._propose(changed)
        return made

    def _propose(self, layer: int) -> Proposal:
        leveled = self._leveled
        nothing = Proposal(0.0, 0.0, NONE, -1, -1, -1, -1, (0, -1, 0.0))
        if leveled.balance(layer) >= self._enough:
            return nothing
        elsewhere = leveled.victim_loss.copy()
        elsewhere[layer] = np.inf
        room = Room(
            free=self._occupancy.free(),
            victim_loss=elsewhere.min(axis=0),
            resident_price=self._price,
            writes_left=self._moves_left,
        )
        score, gain, kind, expert, hot, cold, other = best_change(
            leveled.layers[layer],
            leveled.world,
            leveled.scratch,
            room,
            self._short,
            float(leveled.value[layer]),
        )
        found = Proposal(score, gain, kind, expert, hot, cold, other, (0, -1, 0.0))
        if kind == NONE or gain < GAIN_MIN * float(leveled.fair_s[layer]) * found.writes:
            return nothing
        return found._replace(room=self._room_of(layer, cold))

    def _room_of(self, layer: int, rank: int) -> tuple[int, int, float]:
        loss, victim_layer, _ = self._leveled.cheapest(rank, but_layer=layer)
        return int(self._occupancy.free()[rank] > 0), victim_layer, loss

    def _apply(self, layer: int, proposal: Proposal) -> set[int]:
        """Make the change; undo it, and return nothing, where levelling from nothing shows that
        it does not pay.
        """
        start, before = len(self._edits), self._potential()
        key, cold = self._leveled.key(layer, proposal.expert), proposal.cold
        touched = {layer}
        if proposal.kind == EXCHANGE:
            other = self._leveled.key(layer, proposal.other)
            freed = self._drop(key, proposal.hot)
            self._add(key, cold, self._drop(other, cold))
            self._add(other, proposal.hot, freed)
        elif proposal.kind == REPLICATE_OVER:
            other = self._leveled.key(layer, proposal.other)
            self._add(key, cold, self._drop(other, cold))
        elif proposal.room[0]:
            self._add(key, cold, None)
        else:
            _, victim_layer, victim = self._leveled.cheapest(cold, but_layer=layer)
            touched.add(victim_layer)
            self._add(key, cold, self._drop(victim, cold))
        self._refresh(touched)
        if proposal.kind != EXCHANGE:
            self._leave_behind(layer, proposal)
        gain_min = GAIN_MIN * float(self._leveled.fair_s[layer]) * proposal.writes
        if before - self._potential() < gain_min:
            self._undo(start)
            return set()
        self._moves_left -= proposal.writes
        self._marks.append((len(self._edits), self._objective()))
        return touched

    def _leave_behind(self, layer: int, proposal: Proposal) -> None:
        """Migrate instead of replicate: a full hot rank drops the replica that none uses now."""
        key = self._leveled.key(layer, proposal.expert)
        hot = proposal.hot
        if self._occupancy.free()[hot] > 0 or key not in self._occupancy.removable_on(hot):
            return
        if self._leveled.used(layer, proposal.expert, hot):
            return
        self._drop(key, hot)
        self._refresh({layer})

    def _evict(self) -> bool:
        """Evict the least useful surplus replica if it saves less than its bytes cost."""
        loss = self._leveled.victim_loss
        layer, rank = divmod(int(np.argmin(loss)), loss.shape[1])
        if not float(loss[layer, rank]) < self._price:
            return False
        self._drop(self._leveled.key(layer, int(self._leveled.victim[layer, rank])), rank)
        self._refresh({layer})
        self._moves_left -= 1
        self._marks.append((len(self._edits), self._objective()))
        return True

    def _potential(self) -> float:
        resident = self._price * int(self._occupancy.filled.sum())
        return float(self._leveled.value.sum()) + resident

    def _refresh(self, layers: set[int]) -> None:
        for layer in sorted(layers):
            self._leveled.refresh(layer)

    def _add(self, key: int, rank: int, index: int | None) -> None:
        self._edits.append(Edit(key, rank, self._occupancy.add(key, rank, index), True))

    def _drop(self, key: int, rank: int) -> int:
        index = self._occupancy.drop(key, rank)
        self._edits.append(Edit(key, rank, index, False))
        return index

    def _undo(self, length: int) -> None:
        """Take back edits until `length` are left."""
        touched = {edit.key // self._num_experts for edit in self._edits[length:]}
        for edit in reversed(self._edits[length:]):
            if edit.added:
                self._occupancy.drop(edit.key, edit.rank)
            else:
                self._occupancy.add(edit.key, edit.rank, edit.slot)
        del self._edits[length:]
        self._refresh(touched)
