"""The search of the incremental policy: paths of changes of single layers, merged under common
limits.

Every layer that is not balanced enough writes down the path of changes it would take
(`kernels.improve`): replicate an expert of a hot rank on a cold one, into an empty slot, over its
own least useful surplus replica or another layer's, or exchange two experts; a rank that is full
and no longer used by the replicated expert loses it, which makes a migration. The paths are merged:
always the change with the highest gain a slot write over all layers, a change only after those
before it in its layer, until nothing pays or the limits on writes, bytes or bytes between nodes are
reached. All writes have as many bytes, so gain a write is gain a byte. Writing over another layer's
replica comes last (`_trade`), one change a layer, as it changes what two layers see. At the end,
trailing changes that did not lower the objective are taken back.

Responsible for limits and for the order of changes. Must never judge a change by anything but the
kernels' figures, which are functions of the layout reached and not of the way. Called by
`incremental`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from placement.policy.base import PolicyInput
from placement.policy.candidates.estimates.kernels import shortlist_for
from placement.policy.candidates.kernels import EXCHANGE, REPLICATE_OVER, Room
from placement.policy.kernels import (
    COLD,
    CUT,
    EXPERT,
    HOT,
    KIND,
    LEFT,
    NOTHING_PAYS,
    OTHER,
    PRICE,
    SCORE,
    SLOWEST,
    TAKEN,
    VALUE,
    improve,
)
from placement.policy.leveled import Leveled
from placement.policy.occupancy import Occupancy

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

GAIN_MIN = 5e-4
"""Share of a layer's fair seconds that a slot write must save."""
PATH_MAX = 32
"""Changes that a layer plans at once."""
ROUNDS_MAX = 64
"""Rounds of trades of one search."""
NO_LIMIT = 1 << 40


class Edit(NamedTuple):
    """One slot filled (`added`) or emptied. Undone by its opposite, in reverse order."""

    key: int
    rank: int
    slot: int
    added: bool


class Path:
    """Changes that a layer would take, and how many of them were made.

    ended: whether nothing pays after them; otherwise the path is cut.
    """

    def __init__(self, layer: int, rows: IntArray, figures: FloatArray, ended: bool) -> None:
        self.layer = layer
        self.ended = ended
        self.rows = rows
        self.figures = figures
        self.made = 0

    @property
    def waiting(self) -> bool:
        """Whether a change is left."""
        return self.made < len(self.rows)

    @property
    def score(self) -> float:
        """Gain a write of the next change."""
        return float(self.figures[self.made, SCORE])

    @property
    def writes(self) -> int:
        """Slots that the next change writes."""
        return 2 if self.rows[self.made, KIND] == EXCHANGE else 1


class StillLayers:
    """Layers of which is known that no change pays, so that later rounds need not look again.

    Whether a change pays depends on the layer's hosts, on which ranks have room, on whether limits
    bind, and on what writing over other layers' victims costs. Each candidate was seen to fail by
    itself, and a dearer victim does not make it better: known for some costs, known for higher
    ones.
    """

    def __init__(self) -> None:
        self._cost: dict[int, dict[bytes, FloatArray]] = {}

    def known(self, layer: int, room: Room) -> bool:
        """Whether no change of the layer pays."""
        cost = self._cost.get(layer, {}).get(_bounds(room))
        return cost is not None and bool((room.victim_loss >= cost).all())

    def learn(self, layer: int, room: Room) -> None:
        """No change of the layer pays."""
        costs = self._cost.setdefault(layer, {})
        bounds = _bounds(room)
        costs[bounds] = np.minimum(room.victim_loss, costs.get(bounds, room.victim_loss))

    def forget(self, layer: int) -> None:
        """The layer's hosts changed."""
        self._cost.pop(layer, None)


def _bounds(room: Room) -> bytes:
    """What decides which candidates a layer has, as the kernels look at it."""
    limits = np.array([room.writes_left > 1, room.far_left > 0, room.far_left > 1])
    return np.concatenate((room.free > 0, np.isfinite(room.victim_loss), limits)).tobytes()


class Search:
    """Greedy search over one occupancy."""

    def __init__(self, request: PolicyInput, occupancy: Occupancy, leveled: Leveled) -> None:
        self._occupancy = occupancy
        self._leveled = leveled
        self._num_experts = occupancy.num_experts
        self._enough = request.balance_enough
        self._planned = (
            tuple(range(occupancy.num_layers)) if request.layers is None else request.layers
        )
        self._price = request.byte_price * request.spec.slot_bytes
        each = request.spec.expert_bytes
        self._moves_left = min(
            NO_LIMIT if request.max_moves is None else request.max_moves,
            NO_LIMIT if request.max_bytes is None else request.max_bytes // each,
        )
        far = request.max_cross_node_bytes
        self._far_left = NO_LIMIT if far is None else far // each
        self._near = _near(request)
        self._short = shortlist_for(
            occupancy.num_experts, occupancy.num_ranks, len(request.weights)
        )
        self._still = StillLayers()
        self._edits: list[Edit] = []
        self._marks: list[tuple[int, float]] = [(0, self._objective())]

    def run(self) -> None:
        """Make changes until none pays or the limits are reached."""
        for _ in range(ROUNDS_MAX):
            while self._price > 0 and self._moves_left > 0 and self._evict():
                pass
            made = self._moves_left > 0 and self._merge()
            if self._moves_left < 1 or not (self._trade() or (made and self._price > 0)):
                return

    def take_back(self) -> None:
        """Undo what came after the (first) change with the lowest objective."""
        keep = min(range(len(self._marks)), key=lambda i: (self._marks[i][1], i))
        self._undo(self._marks[keep][0])

    def _objective(self) -> float:
        resident = self._price * int(self._occupancy.filled.sum())
        return float(self._leveled.slowest_s.sum()) + resident

    def _unbalanced(self) -> list[int]:
        return [layer for layer in self._planned if self._leveled.balance(layer) < self._enough]

    def _merge(self) -> bool:
        """The paths of all layers, within their own and empty slots, best change first; whether a
        change was made.
        """
        layers = self._unbalanced()
        if not layers:
            return False
        # Every layer plans a little more than its even share of the writes left; more on demand.
        share = min(-(-self._moves_left // len(layers)) + 1, PATH_MAX)
        shared = self._shared_free(len(layers))
        paths = {layer: self._path(layer, share, shared) for layer in layers}
        waiting = {layer: path for layer, path in paths.items() if path.waiting}
        progress = False
        while waiting and self._moves_left > 0:
            layer = min(waiting, key=lambda i: (-waiting[i].score, i))
            path = waiting[layer]
            if path.writes <= self._moves_left and self._make(path):
                progress = True
                if path.waiting:
                    continue
            else:
                # an empty slot, or the last of the writes, went to another layer
                self._leveled.refresh(layer)
                path.ended = False
            if not path.ended:
                paths[layer] = waiting[layer] = self._path(layer, share)
            if not waiting[layer].waiting:
                del waiting[layer]
        for layer in waiting:
            self._leveled.refresh(layer)
        return progress

    def _trade(self) -> bool:
        """One change of each layer, worst balanced first, that may also write over another layer's
        victim; whether any was made.
        """
        if len(set(self._occupancy.pools.tolist())) > 1 or self._occupancy.num_layers < 2:
            return False
        progress = False
        for layer in sorted(self._unbalanced(), key=lambda i: (self._leveled.balance(i), i)):
            if self._moves_left < 1:
                break
            path = self._path(layer, 1, trade=True)
            if path.waiting:
                # Planned this moment, alone: what it counts on cannot have gone to another layer.
                made = self._make(path)
                assert made, f"the only change of layer {layer} cannot be made"
                progress = True
        return progress

    def _shared_free(self, num_layers: int) -> IntArray | None:
        """Empty slots of a rank that each layer may count on, so that layers of a pool do not plan
        with the same ones; None where they have slots of their own.
        """
        if len(set(self._occupancy.pools.tolist())) > 1 or num_layers < 2:
            return None
        free = np.maximum(self._occupancy.free(), 0)
        return -(-free // num_layers)

    def _path(
        self, layer: int, limit: int, shared: IntArray | None = None, *, trade: bool = False
    ) -> Path:
        """Path of a layer from where it is, at most `limit` changes. shared: empty slots it may
        count on, None = all that it sees. trade: whether it may write over other layers' victims.
        """
        leveled, occupancy = self._leveled, self._occupancy
        free = np.maximum(occupancy.free_of(layer), 0) if shared is None else shared.copy()
        room = Room(
            free=free,
            victim_loss=(
                self._victims_elsewhere(layer) if trade else np.full(occupancy.num_ranks, np.inf)
            ),
            near=self._near[layer][leveled.expert_at[layer]],
            resident_price=self._price,
            gain_min=GAIN_MIN * float(leveled.fair_s[layer]),
            slowest_enough=float(leveled.fair_s[layer]) / max(self._enough, 1e-9),
            writes_left=self._moves_left,
            far_left=self._far_left,
        )
        rows = np.zeros((limit, TAKEN + 1), dtype=np.int64)
        figures = np.zeros((limit, PRICE + 1), dtype=np.float64)
        if self._still.known(layer, room):
            return Path(layer, rows[:0], figures[:0], ended=True)
        made, end = improve(
            leveled.view(layer), leveled.world, leveled.scratch, room, self._short, rows, figures
        )
        if made == 0 and end == NOTHING_PAYS:
            self._still.learn(layer, room)
        return Path(layer, rows[:made], figures[:made], end != CUT)

    def _victims_elsewhere(self, layer: int) -> FloatArray:
        """Value lost by the cheapest surplus replica of another layer on each rank."""
        loss = self._leveled.victim_loss.copy()
        loss[layer] = np.inf
        found: FloatArray = loss.min(axis=0)
        return found

    def _make(self, path: Path) -> bool:
        """Make the next change of a path; False, and nothing done, where what it counts on is
        gone.
        """
        row, figures, layer = path.rows[path.made], path.figures[path.made], path.layer
        kind, hot, cold = int(row[KIND]), int(row[HOT]), int(row[COLD])
        key = self._leveled.key(layer, int(row[EXPERT]))
        other = self._leveled.key(layer, int(row[OTHER])) if row[OTHER] >= 0 else -1
        far = int(not self._near_key(key, cold))
        if kind == EXCHANGE:
            far += int(not self._near_key(other, hot))
        if far > self._far_left:
            return False
        slot, victim_layer = None, -1
        if kind == EXCHANGE:
            freed = self._drop(key, hot)
            self._add(key, cold, self._drop(other, cold))
            self._add(other, hot, freed)
        elif kind == REPLICATE_OVER:
            self._add(key, cold, self._drop(other, cold))
        else:
            if row[TAKEN]:
                _, victim_layer, victim = self._leveled.cheapest(cold, but_layers=(layer,))
                slot = self._drop(victim, cold)
            elif self._occupancy.free_of(layer)[cold] < 1:
                return False
            self._add(key, cold, slot)
        if row[LEFT]:
            self._drop(key, hot)
        self._leveled.settle(layer, float(figures[VALUE]), float(figures[SLOWEST]))
        if victim_layer >= 0:
            self._leveled.refresh(victim_layer)
        path.made += 1
        self._moves_left -= 2 if kind == EXCHANGE else 1
        self._far_left -= far
        self._marks.append((len(self._edits), self._objective()))
        return True

    def _near_key(self, key: int, rank: int) -> bool:
        layer, expert = divmod(key, self._num_experts)
        return bool(self._near[layer, expert, rank])

    def _evict(self) -> bool:
        """Evict the least useful surplus replica if it saves less than its bytes cost."""
        loss = self._leveled.victim_loss
        layer, rank = divmod(int(np.argmin(loss)), loss.shape[1])
        if not float(loss[layer, rank]) < self._price:
            return False
        self._drop(self._leveled.cheapest(rank, layer=layer)[2], rank)
        self._leveled.refresh(layer)
        self._moves_left -= 1
        self._marks.append((len(self._edits), self._objective()))
        return True

    def _add(self, key: int, rank: int, index: int | None) -> None:
        self._still.forget(key // self._num_experts)
        self._edits.append(Edit(key, rank, self._occupancy.add(key, rank, index), True))

    def _drop(self, key: int, rank: int) -> int:
        self._still.forget(key // self._num_experts)
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
        for layer in sorted(touched):
            self._still.forget(layer)
            self._leveled.refresh(layer)


def _near(request: PolicyInput) -> npt.NDArray[np.bool_]:
    """Whether a rank's node has a live replica of an expert: bool [layers, experts, ranks]."""
    layout, ranks = request.layout, request.topology.ranks
    names = sorted({spec.node for spec in ranks})
    node = np.array([names.index(spec.node) for spec in ranks], dtype=np.int64)
    alive = np.array([spec.alive for spec in ranks])
    member = (node[:, None] == np.arange(len(names))[None]) & alive[:, None]
    on_node = (layout.hosts > 0).astype(np.float32) @ member.astype(np.float32) > 0
    found: npt.NDArray[np.bool_] = on_node[:, node]
    return found.reshape(layout.num_layers, layout.num_experts, len(ranks))
