"""What a replay runs on: a declared or configured fleet for a trace, the recorded one of a journal.

Called by the replay command.
"""

from moe_serve.cli.rehearsal.journal import (
    SegmentCheck,
    check_segments,
    journal_stage,
    journal_windows,
    measured,
)
from moe_serve.cli.rehearsal.stage import (
    Stage,
    Trace,
    check_policies,
    service_stage,
    staged_windows,
    trace_stage,
    with_limits,
)

__all__ = [
    "SegmentCheck",
    "Stage",
    "Trace",
    "check_policies",
    "check_segments",
    "journal_stage",
    "journal_windows",
    "measured",
    "service_stage",
    "staged_windows",
    "trace_stage",
    "with_limits",
]
