"""The engine over what was recorded: a journal segment, or an expert trace given as arrays.

Responsible for three questions: does today's code answer recorded events as it did then, byte for
byte; what balance, writes and moves would the production trigger, policies and planner have given
on this traffic, beside what could have been had; and would that be worth a trial. Does no I/O:
bytes and arrays come in, figures go out. Called by the CLI, benchmarks, the simulator's checkers
and golden tests.
"""

from placement.replay.comparison import (
    WRITE_PRICES,
    Comparison,
    CompetitiveRatio,
    PolicyOutcome,
    compare,
)
from placement.replay.executor import PerfectExecutor, ranks_joined
from placement.replay.optimum import offline_optimum
from placement.replay.recorded import recomputed, replay_events, replay_segment
from placement.replay.screening import ScreenedLayout, Screening, screen
from placement.replay.trace import TraceFigures, WindowFigures, replay_trace, static_layout
from placement.replay.windows import count_windows, trace_windows

__all__ = [
    "WRITE_PRICES",
    "Comparison",
    "CompetitiveRatio",
    "PerfectExecutor",
    "PolicyOutcome",
    "ScreenedLayout",
    "Screening",
    "TraceFigures",
    "WindowFigures",
    "compare",
    "count_windows",
    "offline_optimum",
    "ranks_joined",
    "recomputed",
    "replay_events",
    "replay_segment",
    "replay_trace",
    "screen",
    "static_layout",
    "trace_windows",
]
