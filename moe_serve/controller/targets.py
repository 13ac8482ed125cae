"""Targets that could not be computed, several times in a row: a planner that fails is said.

One failure may be a busy second; from the second in a row on it is a problem, by cause (auto |
repair | drain ...), until a target of that cause is answered: with moves, or with nothing to gain.
What an operator asked for is left out: it was answered to them. What is no longer tried (the drain
was taken back, there is no load) is not spoken of for long.

Example: no answer at 30 s and at 64 s, now it is 70 s -> "no target placement could be computed for
40 s (auto, 2 times in a row): no answer in 30.0 s; placement stays as it is. Give ..."

Responsible for judging, from decision records. Must never be read by anything that decides. Filled
by `recent`, read by views.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from moe_serve.controller.plan_figures import CAUSES, WEIGHED
from placement.config import RebalanceConfig
from placement.messages.records import DecisionRecord

TIMES: Final = 2
"""Failures in a row that are a problem."""
TRIES: Final = 2
"""A cause is spoken of for as long as so many tries take at most, since it failed last."""
AUTO: Final = "auto"
ASKED: Final = "asked"
NO_REASON: Final = "the planner gave no reason"
_ANSWERS: Final = frozenset({"started", "kept"})
REASON_CHARS_MAX: Final = 300
"""Longer reasons are cut: a problem is a sentence, and many may stand in one answer."""
_LATE: Final = "no answer in"
"""Begins the reason of a target that did not come in time."""
_NEXT_LATE: Final = "Give the controller's node more CPU, or raise rebalance.target_timeout_s"
_NEXT: Final = "Mend what the reason names; moe-serve events has each try"
_NEXT_UNKNOWN: Final = "moe-serve events has each try"


@dataclass(slots=True)
class _Row:
    """Failures of one cause in a row. Driver times."""

    first_s: float
    last_s: float = 0.0
    times: int = 0
    reason: str = ""


class Targets:
    """See the module's text."""

    def __init__(self) -> None:
        self._failing: dict[str, _Row] = {}

    def decided(self, records: Iterable[DecisionRecord], config: RebalanceConfig) -> None:
        """Decisions, in their order."""
        for record in records:
            if record.rule == "target_failed":
                self._failed(record, config)
            elif record.outcome in _ANSWERS:
                self._failing.pop(_cause(record), None)

    def _failed(self, record: DecisionRecord, config: RebalanceConfig) -> None:
        cause, _, reason = record.detail.partition(": ")
        if cause == ASKED:
            return
        row = self._failing.get(cause)
        if row is None or record.at_s > row.last_s + _spoken_of_s(config):
            row = self._failing[cause] = _Row(first_s=record.at_s)
        row.last_s, row.reason, row.times = record.at_s, _sentence(reason), row.times + 1

    def problems(self, now_s: float, config: RebalanceConfig) -> list[str]:
        """What fails now, a sentence for each cause."""
        return [
            f"no target placement could be computed for {max(0.0, now_s - row.first_s):.0f} s "
            f"({cause}, {row.times} times in a row): {row.reason}; placement stays as it is. "
            f"{_next_step(row.reason)}"
            for cause, row in sorted(self._failing.items())
            if row.times >= TIMES and now_s <= row.last_s + _spoken_of_s(config)
        ]


def _spoken_of_s(config: RebalanceConfig) -> float:
    return TRIES * (config.window_s + config.retry_s + config.target_timeout_s)


def _next_step(reason: str) -> str:
    if reason == NO_REASON:
        return _NEXT_UNKNOWN
    return _NEXT_LATE if reason.startswith(_LATE) else _NEXT


def _sentence(reason: str) -> str:
    """A reason as part of a sentence: on one line, printable, at most REASON_CHARS_MAX."""
    text = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
    return f"{text[:REASON_CHARS_MAX]}..." if len(text) > REASON_CHARS_MAX else text or NO_REASON


def _cause(record: DecisionRecord) -> str:
    """Cause of the target that a record answers, "" where it is about none."""
    if record.rule in CAUSES:
        return record.rule
    return AUTO if WEIGHED in record.numbers else ""
