"""What the page remembers: imbalance by window, plans, moves and decisions, each with a limit.

Responsible for order, limits and for knowing again what a reconnect sends twice. Must never read a
clock or hold more than its limits. Called by `feed`.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from moe_serve.dashboard.frames import Json, move_view, record_view, worst_layer
from moe_serve.rpc import placement_pb2

POINTS_MAX = 3_600
MARKS_MAX = 400
RECORDS_MAX = 2_000
MOVES_MAX = 400
UNFINISHED = frozenset({"planned", "running"})


class History:
    """Bounded memory of one service's figures. A restart of the page empties it."""

    def __init__(self) -> None:
        self.points: deque[Json] = deque(maxlen=POINTS_MAX)
        """{"wall_s", "window", "imbalance", "worst_layer"}, oldest first."""
        self.marks: deque[Json] = deque(maxlen=MARKS_MAX)
        """{"wall_s", "plan_id", "rule", "detail", "moves"} of each plan that started."""
        self.records: deque[Json] = deque(maxlen=RECORDS_MAX)
        self.last_record = 0
        """Number of the newest record, 0 before the first."""
        self.moves_version = 0
        """Grows with each move that is new or has changed."""
        self._moves: OrderedDict[tuple[str, int], tuple[int, Json]] = OrderedDict()
        self._offset_s: float | None = None
        self._known_records: set[tuple[int, float]] = set()
        self._known_plans: set[str] = set()

    def add_point(self, load: placement_pb2.GetLoadResponse, wall_s: float) -> None:
        """Remember a closed window; one that is known already is not added again."""
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
            }
        )

    def add_record(self, record: placement_pb2.DecisionRecord) -> bool:
        """Remember a decision. False where it is known already (sent again after a reconnect)."""
        key = (record.seq, record.wall_time_s)
        if key in self._known_records:
            return False
        if len(self.records) == RECORDS_MAX:
            oldest = self.records[0]
            self._known_records.discard((oldest["seq"], oldest["wall_s"]))
        self._known_records.add(key)
        self._offset_s = record.wall_time_s - record.at_s
        self.last_record += 1
        self.records.append(record_view(record, self.last_record))
        self._mark(record)
        return True

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
            }
        )

    def update_moves(self, placement: placement_pb2.GetPlacementResponse) -> None:
        """Take over the moves of a placement: the running plan's and the newest finished ones.

        An unfinished move that the controller no longer names is `dropped`: its plan was cancelled
        or forgotten, and to show it as planned for ever would be a lie.
        """
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
        view = view | {
            f"{edge}_wall_s": self._date(view[f"{edge}_at_s"], old, edge)
            for edge in ("started", "ended")
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
        return None if self._offset_s is None else at_s + self._offset_s

    def moves_after(self, version: int) -> list[Json]:
        """Moves that are new or changed since `version`, in the order they were first seen."""
        return [view for at, view in self._moves.values() if at > version]

    def records_after(self, number: int) -> list[Json]:
        """Kept records with a greater number, oldest first."""
        first = self.last_record - len(self.records)
        skip = max(0, number - first)
        return list(self.records)[skip:] if skip else list(self.records)
