"""What the page remembers: imbalance by window, plans, moves and decisions, each with a limit.

Times of a move: `started_at_s` (when its plan started) and `ended_at_s` are the controller's own
seconds (0 = not yet), the same with `_wall_s` dates (null = not yet, or not known). A move is
`planned` from its plan's start, `running` from its first step, `done` or `aborted` at its end;
`dropped` where the controller no longer names one that had not ended. A plan's measured gain
arrives later, by a record of the rule `realised_gain`, and changes its moves then.

Responsible for order, limits and for knowing again what a reconnect sends twice. Must never read a
clock or hold more than its limits. Called by `feed`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from moe_serve.dashboard.frames import UNKNOWN, worst_layer
from moe_serve.documents.views import Json, move_view, record_view
from moe_serve.rpc import placement_pb2

POINTS_MAX = 3_600
MARKS_MAX = 400
RECORDS_MAX = 2_000
MOVES_MAX = 400
UNFINISHED = frozenset({"planned", "running"})
_UNMEASURED: Json = {"expected_gain_s_per_s": None, "realised_gain_s_per_s": None}


class History:
    """Bounded memory of one service's figures. A restart of the page empties it."""

    def __init__(self) -> None:
        self.points: deque[Json] = deque(maxlen=POINTS_MAX)
        """{"wall_s", "window", "imbalance", "worst_layer", "p50_s", "p99_s", "rows_per_s"}, oldest
        first."""
        self.marks: deque[Json] = deque(maxlen=MARKS_MAX)
        """{"wall_s", "plan_id", "rule", "detail", "moves", "expected_gain_s_per_s",
        "realised_gain_s_per_s"} of each plan that started; gains are null until measured."""
        self.records: deque[Json] = deque(maxlen=RECORDS_MAX)
        self.last_record = 0
        """Number of the newest record, 0 before the first."""
        self.moves_version = 0
        """Grows with each move that is new or has changed."""
        self._moves: OrderedDict[tuple[str, int], tuple[int, Json]] = OrderedDict()
        self._offset_s: float | None = None
        self._life_began_s = -math.inf
        self._known_records: set[tuple[float, int]] = set()
        self._forgotten: tuple[float, int] = (float("-inf"), 0)
        self._known_plans: set[str] = set()
        self._gains: OrderedDict[str, Json] = OrderedDict()

    def add_point(
        self, load: placement_pb2.GetLoadResponse, wall_s: float, speed: Json = UNKNOWN
    ) -> None:
        """Remember a closed window; one that is known already is not added again. speed: what
        `Traffic.take` said of it."""
        if self._offset_s is None:
            self._offset_s = wall_s - load.end_s
        last = self.points[-1] if self.points else None
        if last is not None and last["window"] == load.window:
            return
        self.points.append(
            {
                "wall_s": wall_s,
                "window": load.window,
                "imbalance": load.imbalance,
                "worst_layer": worst_layer(load.layer_imbalance),
                **speed,
            }
        )

    def add_record(self, record: placement_pb2.DecisionRecord) -> bool:
        """Remember a decision. False where it is known already (sent again after a reconnect)."""
        key = (record.wall_time_s, record.seq)
        # What was forgotten for want of room is told again too, by a controller that keeps more.
        # By date first, for one that lost its journal counts anew; by number where its clock was
        # set back and it counts on.
        newest = self.records[-1]["seq"] if self.records else 0
        told_before = key <= self._forgotten and record.seq <= newest
        if told_before or key in self._known_records:
            return False
        if len(self.records) == RECORDS_MAX:
            oldest = (self.records[0]["wall_s"], self.records[0]["seq"])
            self._known_records.discard(oldest)
            self._forgotten = max(self._forgotten, oldest)
        self._known_records.add(key)
        self._offset_s = record.wall_time_s - record.at_s
        self.last_record += 1
        self.records.append(record_view(record, self.last_record))
        self._mark(record)
        self._measure(record)
        return True

    def _measure(self, record: placement_pb2.DecisionRecord) -> None:
        """Take over what a plan was found to have brought, into its mark and its moves."""
        if record.rule != "realised_gain" or not record.plan_id:
            return
        gain = {
            "expected_gain_s_per_s": record.expected_gain_s_per_s,
            "realised_gain_s_per_s": record.realised_gain_s_per_s,
        }
        self._gains[record.plan_id] = gain
        while len(self._gains) > MARKS_MAX:
            self._gains.popitem(last=False)
        for at, mark in enumerate(self.marks):
            if mark["plan_id"] == record.plan_id:
                self.marks[at] = mark | gain
        for key, (_, view) in list(self._moves.items()):
            if key[0] == record.plan_id:
                self._put(key, view)

    def _mark(self, record: placement_pb2.DecisionRecord) -> None:
        started = record.outcome == "started" and record.plan_id != "" and record.move_id < 0
        if not started or record.plan_id in self._known_plans:
            return
        if len(self.marks) == MARKS_MAX:
            self._known_plans.discard(self.marks[0]["plan_id"])
        self._known_plans.add(record.plan_id)
        self.marks.append(
            {
                "wall_s": record.wall_time_s,
                "plan_id": record.plan_id,
                "rule": record.rule,
                "detail": record.detail,
                "moves": int(record.numbers.get("moves", 0.0)),
                **self._gains.get(record.plan_id, _UNMEASURED),
            }
        )

    def update_moves(
        self, placement: placement_pb2.GetPlacementResponse, life_began_s: float = -math.inf
    ) -> None:
        """Take over the moves of a placement: the running plan's and the newest finished ones.
        life_began_s: second at which the controller's present life began; an earlier one has no
        date, for its seconds stood still while it was down.

        An unfinished move that the controller no longer names is `dropped`: its plan was cancelled
        or forgotten, and to show it as planned for ever would be a lie.
        """
        self._life_began_s = life_began_s
        named = set()
        for move in placement.moves[-MOVES_MAX:]:
            key = (move.plan_id, move.move_id)
            named.add(key)
            self._put(key, move_view(move))
        for key, (_, view) in list(self._moves.items()):
            if key not in named and view["state"] in UNFINISHED:
                self._put(key, view | {"state": "dropped"})
        while len(self._moves) > MOVES_MAX:
            self._moves.popitem(last=False)

    def _put(self, key: tuple[str, int], view: Json) -> None:
        old = self._moves[key][1] if key in self._moves else {}
        gain = self._gains.get(key[0], _UNMEASURED)
        view = view | {
            "plan_expected_gain_s_per_s": gain["expected_gain_s_per_s"],
            "realised_gain_s_per_s": gain["realised_gain_s_per_s"],
            **{
                f"{edge}_wall_s": self._date(view[f"{edge}_at_s"], old, edge)
                for edge in ("started", "ended")
            },
        }
        if view != old:
            self.moves_version += 1
            self._moves[key] = (self.moves_version, view)

    def _date(self, at_s: float, old: Json, edge: str) -> float | None:
        # Fixed when first known: the controller's seconds may begin anew with the controller.
        if at_s <= 0:
            return None
        if old.get(f"{edge}_at_s") == at_s and old.get(f"{edge}_wall_s") is not None:
            return float(old[f"{edge}_wall_s"])
        if self._offset_s is None or at_s < self._life_began_s:
            return None
        return at_s + self._offset_s

    def moves_after(self, version: int) -> list[Json]:
        """Moves that are new or changed since `version`, in the order they were first seen."""
        return [view for at, view in self._moves.values() if at > version]

    def moves_page(
        self, version: int, limit: int, since_wall_s: float | None = None
    ) -> tuple[list[Json], int]:
        """At most `limit` moves that are new or changed since `version`, oldest change first, and
        the version to ask for what comes after them. since_wall_s: only those that began or ended
        then or later, or have not ended."""
        fresh = sorted(
            (
                row
                for row in self._moves.values()
                if row[0] > version and (since_wall_s is None or _touched(row[1], since_wall_s))
            ),
            key=_version,
        )
        if len(fresh) <= limit:
            return [view for _, view in fresh], self.moves_version
        return [view for _, view in fresh[:limit]], fresh[limit - 1][0]

    def moves_of(self, plan_id: str) -> list[Json]:
        """Moves of one plan, in the order they were first seen."""
        return [view for key, (_, view) in self._moves.items() if key[0] == plan_id]

    def moves_of_expert(self, layer: int, expert: int, limit: int) -> list[Json]:
        """The newest moves of one expert, and those that it left a rank for, newest last."""
        found = [
            view
            for _, view in self._moves.values()
            if any(
                (one["layer"], one["expert"]) == (layer, expert) for one in (view, *view["room"])
            )
        ]
        return found[-limit:]

    def records_after(self, number: int, since_wall_s: float | None = None) -> list[Json]:
        """Kept records with a greater number, oldest first. since_wall_s: only those made then or
        later."""
        first = self.last_record - len(self.records)
        skip = max(0, number - first)
        found = list(self.records)[skip:] if skip else list(self.records)
        # Not cut at the first that is late enough: a clock may have been set back.
        return [r for r in found if since_wall_s is None or r["wall_s"] >= since_wall_s]


def _version(row: tuple[int, Json]) -> int:
    return row[0]


def _touched(view: Json, since_wall_s: float) -> bool:
    """Whether a move began or ended then or later, or has not ended: all moves of a plan begin
    with it, so one that is under way may have begun long before."""
    if view["state"] in UNFINISHED:
        return True
    dates = (view["started_wall_s"], view["ended_wall_s"])
    return any(date is not None and date >= since_wall_s for date in dates)
