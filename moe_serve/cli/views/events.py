"""A decision record as one line, and runs of alike ones as two. Pure. Called by the events
command."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from moe_serve.cli.figures import shown_bytes, shown_number
from moe_serve.rpc import placement_pb2 as pb

NUMBERS_SHOWN = 8
KEPT = "kept"
INDENT = " " * 6


def event_line(record: pb.DecisionRecord) -> str:
    """Time (UTC), number, rule, outcome, and why, with the numbers the rule saw."""
    parts = [
        f"{_when(record)}  {record.seq:>5}  {record.rule:<20}  {record.outcome:<8}  {record.detail}"
    ]
    if record.plan_id:
        parts.append(f"[plan {record.plan_id}]")
    if record.copy_bytes:
        parts.append(shown_bytes(record.copy_bytes))
    if record.expected_gain_s_per_s:
        parts.append(f"expected {shown_number(record.expected_gain_s_per_s, '.3g')} s/s")
    if record.realised_gain_s_per_s:
        parts.append(f"realised {shown_number(record.realised_gain_s_per_s, '.3g')} s/s")
    numbers = sorted(record.numbers.items())[:NUMBERS_SHOWN]
    if numbers:
        words = ", ".join(f"{name} {shown_number(value, '.4g')}" for name, value in numbers)
        parts.append(f"({words})")
    return " ".join(part.rstrip() for part in parts)


def refused_lines(record: pb.DecisionRecord) -> list[str]:
    """What else was looked at and why it was not taken, a line each."""
    return [f"{INDENT}refused  {one}" for one in record.refused]


def _when(record: pb.DecisionRecord) -> str:
    try:
        at = datetime.fromtimestamp(record.wall_time_s, UTC)
    except (ValueError, OverflowError, OSError):  # no number, or no year of the calendar
        return "-"
    return at.strftime("%Y-%m-%d %H:%M:%SZ")


@dataclass(slots=True)
class Fold:
    """Runs of records that say the same: nothing moved, for the same reason in the same words.
    Their numbers may differ. The first of a run is shown, the rest are counted."""

    first: pb.DecisionRecord | None = None
    last: pb.DecisionRecord | None = None
    more: int = 0

    def takes(self, record: pb.DecisionRecord) -> bool:
        """Whether the record goes on with the run; it is counted then. Otherwise it begins one, and
        what was counted is gone: ask `line` before."""
        if record.outcome == KEPT and self.first is not None and _same(self.first, record):
            self.last, self.more = record, self.more + 1
            return True
        self.first, self.last, self.more = record, None, 0
        return False

    @property
    def line(self) -> str:
        """How many more there were and until when; "" where there was none."""
        if self.last is None:
            return ""
        return f"{INDENT}... {self.more} more like it, until {self.last.seq} at {_when(self.last)}"


def _same(one: pb.DecisionRecord, other: pb.DecisionRecord) -> bool:
    return (one.rule, one.outcome, one.detail, one.plan_id, *one.refused) == (
        *(other.rule, other.outcome, other.detail, other.plan_id),
        *other.refused,
    )
