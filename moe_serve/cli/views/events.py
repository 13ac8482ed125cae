"""A decision record as one line. Pure. Called by the events command."""

from __future__ import annotations

from datetime import UTC, datetime

from moe_serve.cli.figures import shown_bytes
from moe_serve.rpc import placement_pb2 as pb

NUMBERS_SHOWN = 8


def event_line(record: pb.DecisionRecord) -> str:
    """Time (UTC), number, rule, outcome, and why, with the numbers the rule saw."""
    when = datetime.fromtimestamp(record.wall_time_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    parts = [f"{when}  {record.seq:>5}  {record.rule:<20}  {record.outcome:<8}  {record.detail}"]
    if record.plan_id:
        parts.append(f"[plan {record.plan_id}]")
    if record.copy_bytes:
        parts.append(shown_bytes(record.copy_bytes))
    if record.expected_gain_s_per_s:
        parts.append(f"expected {record.expected_gain_s_per_s:.3g} s/s")
    if record.realised_gain_s_per_s:
        parts.append(f"realised {record.realised_gain_s_per_s:.3g} s/s")
    numbers = sorted(record.numbers.items())[:NUMBERS_SHOWN]
    if numbers:
        parts.append("(" + ", ".join(f"{name} {value:.4g}" for name, value in numbers) + ")")
    return " ".join(part.rstrip() for part in parts)
