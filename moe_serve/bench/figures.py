"""What a load felt like, as figures. Pure. Called by `load`.

Latency is from the time a request was due to its answer. Quantiles are of single requests, not of
averages; one that would lie above all that were seen but the greatest is still told, with the count
beside it. *Goodput* is requests a second that were answered within the target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

ANSWERED: Final = "OK"


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from due to answered. Every field is 0 where nothing was answered."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    p999_s: float
    max_s: float


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run, warm-up left out.

    loop: open or closed. seconds: in which requests became due. sent_late_p99_s: how far the
    generator itself lagged behind; where that is not far below the latency, it was the limit.
    in_flight_max: open at once. errors: requests that failed, by code. rows_per_s: rows answered a
    second, one row being one token in one layer. goodput_per_s, within_target: None without a
    target.
    """

    model: str
    simulated: bool
    loop: str
    offered_per_s: float
    seconds: float
    requests: int
    answered: int
    answered_per_s: float
    errors: dict[str, int]
    latency: Latency
    phases: dict[str, Latency]
    sent_late_p99_s: float
    in_flight_max: int
    rows_per_s: float
    target_s: float | None
    goodput_per_s: float | None
    within_target: float | None


class Request(msgspec.Struct, frozen=True):
    """One request that has ended. due_s: since the load began; code: ANSWERED or that of its
    error."""

    due_s: float
    sent_late_s: float
    latency_s: float
    phase: str
    rows: int
    code: str


def latency_of(seconds: npt.NDArray[np.float64]) -> Latency:
    """Figures of some latencies.

    >>> latency_of(np.array([0.001, 0.003])).mean_s
    0.002
    """
    if not len(seconds):
        return Latency(count=0, mean_s=0, p50_s=0, p90_s=0, p99_s=0, p999_s=0, max_s=0)
    # The value that so many are not above: never one that nobody saw.
    cuts = np.quantile(seconds, (0.5, 0.9, 0.99, 0.999), method="inverted_cdf").tolist()
    return Latency(
        count=len(seconds),
        mean_s=float(seconds.mean()),
        p50_s=cuts[0],
        p90_s=cuts[1],
        p99_s=cuts[2],
        p999_s=cuts[3],
        max_s=float(seconds.max()),
    )


def report_of(
    ended: Sequence[Request],
    *,
    model: str,
    simulated: bool,
    loop: str,
    seconds: float,
    in_flight_max: int,
    target_s: float | None,
) -> BenchReport:
    """Figures of the requests that became due in `seconds` seconds."""
    fine = [one for one in ended if one.code == ANSWERED]
    latencies = np.array([one.latency_s for one in fine], dtype=np.float64)
    phases = sorted({one.phase for one in ended})
    within = int((latencies <= target_s).sum()) if target_s is not None else 0
    late = latency_of(np.array([one.sent_late_s for one in ended], dtype=np.float64))
    return BenchReport(
        model=model,
        simulated=simulated,
        loop=loop,
        offered_per_s=len(ended) / seconds,
        seconds=seconds,
        requests=len(ended),
        answered=len(fine),
        answered_per_s=len(fine) / seconds,
        errors=dict(sorted(Counter(one.code for one in ended if one.code != ANSWERED).items())),
        latency=latency_of(latencies),
        phases={
            phase: latency_of(
                np.array([one.latency_s for one in fine if one.phase == phase], dtype=np.float64)
            )
            for phase in phases
        },
        sent_late_p99_s=late.p99_s,
        in_flight_max=in_flight_max,
        rows_per_s=sum(one.rows for one in fine) / seconds,
        target_s=target_s,
        goodput_per_s=None if target_s is None else within / seconds,
        # A request that failed did not meet its target.
        within_target=None if target_s is None or not ended else within / len(ended),
    )
