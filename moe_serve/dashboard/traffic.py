"""How fast requests are served, from what routers count: differences between two looks.

Routers count since their start and tell quantiles of the time since their last report. Rows a
second are the growth of `tokens` over the controller's own seconds; p50 is the mean of the routers'
medians weighted by requests, p99 the worst of theirs: quantiles of different routers cannot be
added, and a mean would hide the slow one.

Responsible for this arithmetic. Must never read a clock. Called by `feed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_serve.dashboard.frames import UNKNOWN
from moe_serve.documents.views import Json
from moe_serve.rpc import placement_pb2 as pb

_Life = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Look:
    """Counters of every router life at one time of the controller."""

    at_s: float
    term: int
    tokens: dict[_Life, float]
    requests: dict[_Life, float]


class Traffic:
    """Speed between two windows. `see` every placement, `take` at the end of each window."""

    def __init__(self) -> None:
        self._taken: _Look | None = None
        self._newest: pb.GetPlacementResponse | None = None

    def see(self, placement: pb.GetPlacementResponse) -> None:
        """A placement has come."""
        self._newest = placement

    def take(self) -> Json:
        """{"p50_s", "p99_s", "rows_per_s"} since the last call, each null where unknown."""
        newest = self._newest
        if newest is None:
            return dict(UNKNOWN)
        routers = [router for router in newest.routers if router.counters]
        look = _Look(newest.uptime_s, newest.term, _of(routers, "tokens"), _of(routers, "requests"))
        before, self._taken = self._taken, look
        if before is None or not routers:
            return dict(UNKNOWN)
        # Another term counts its seconds anew. A router that was not seen before may have counted
        # for hours: it joins with the next window.
        seconds = look.at_s - before.at_s if look.term == before.term else 0.0
        rows = sum(_growth(before.tokens, look.tokens).values())
        answered = _growth(before.requests, look.requests)
        p50 = [(answered[_life(r)], r.quantiles["dispatch_p50_s"]) for r in _timed(routers)]
        weight = sum(requests for requests, _ in p50)
        return {
            "p50_s": sum(n * s for n, s in p50) / weight if weight else None,
            "p99_s": max((r.quantiles["dispatch_p99_s"] for r in _timed(routers)), default=None)
            if weight
            else None,
            "rows_per_s": rows / seconds if seconds > 0 else None,
        }


def _life(router: pb.Router) -> _Life:
    return router.router, router.incarnation


def _of(routers: Iterable[pb.Router], name: str) -> dict[_Life, float]:
    return {_life(router): router.counters.get(name, 0.0) for router in routers}


def _growth(before: dict[_Life, float], now: dict[_Life, float]) -> dict[_Life, float]:
    return {life: max(0.0, total - before.get(life, total)) for life, total in now.items()}


def _timed(routers: Iterable[pb.Router]) -> list[pb.Router]:
    wanted = {"dispatch_p50_s", "dispatch_p99_s"}
    return [r for r in routers if r.state == "up" and wanted <= set(r.quantiles)]
