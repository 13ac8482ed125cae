"""Totals since a part's start, as growth.

Responsible for what is new between two reports. A part that this controller has not met before may
have run for hours under an earlier one: its first report is where counting begins. A later life of
a part that is known begins at zero. Called by figures.
"""

from __future__ import annotations

from collections.abc import Mapping


class Growth:
    """Of one kind of part; `source` names one of them."""

    def __init__(self) -> None:
        self._told: dict[str | int, tuple[int, dict[str, float]]] = {}

    def of(
        self, source: str | int, incarnation: int, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """What each total has grown by since the source's last report, never below 0."""
        known = self._told.get(source)
        if known is not None and incarnation < known[0]:
            return {}  # a late word of a life that is over
        self._told[source] = incarnation, dict(totals)
        if known is None:
            return {}
        before = known[1] if known[0] == incarnation else {}
        return {name: max(0.0, total - before.get(name, 0.0)) for name, total in totals.items()}
