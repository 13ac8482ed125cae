"""Load as data: the closed window that the engine decides on, and how raw reports become one.

Responsible for folding raw reports of routers (demand) and shards (hotness as executed) into
`LoadWindow`, once each. Reads no clock: times arrive as `at_s`. Called by the controller's driver
and by the simulator; the engine sees windows.

Words and an example. A *report* is named by (source, incarnation, seq): a poll that is answered
twice counts once, and a source that starts again counts from zero under its next incarnation. A
*window* of 2 s with 4 *sub-windows* files a report that arrives 1.2 s after the window opened in
sub-window 2. Times are the driver's: clocks of sources are not compared.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from placement.topology import NUM_PHASES

Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
_Number = TypeVar("_Number", np.int64, np.float64)


def _unknown() -> Counts:
    return np.zeros((0, 0, 0), dtype=np.int64)


class LoadWindow(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One closed window of `end_s - start_s` seconds.

    demand: int64 [sub_windows, phases, layers, experts], valid rows x k, each counted once by a
    router. executed_pairs: int64 [phases, layers, experts], what shards computed (retries and
    hedges included). rank_pairs: int64 [ranks, layers], pairs each rank computed (for the served
    balance). rank_busy_s: float64 [ranks, phases], seconds of compute each rank reported.
    sources_missing: routers and shards that did not report in time; their counts are absent, not
    zero. queued: int64 [phases, layers, experts], pairs of requests that waited in routers for a
    permit when the window closed: demand of a later window, in no count of this one. Zeros where
    nothing waited or nobody knows. calls: layer calls that demand came in, by phase; 0 where
    nobody counted.
    """

    index: int
    start_s: float
    end_s: float
    demand: Counts
    executed_pairs: Counts
    rank_pairs: Counts
    rank_busy_s: Seconds
    sources_missing: tuple[str, ...] = ()
    queued: Counts = msgspec.field(default_factory=_unknown)
    calls: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Windows written before `queued` existed, or made without it, get its zeros."""
        if not self.queued.size:
            zeros = np.zeros(self.demand.shape[1:], dtype=np.int64)
            msgspec.structs.force_setattr(self, "queued", _frozen(zeros))


class DemandReport(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one router accepted since its last report. Deduplicated by (source, incarnation, seq).

    Sparse: `key` int32 [n] = (phase * layers + layer) * experts + expert, `pairs` int64 [n].
    `calls`: layer calls that they came in, by phase; 0 where the source does not count them.
    """

    source: str
    incarnation: int
    seq: int
    at_s: float
    """Reporter's monotonic time; only differences within one incarnation mean anything."""
    key: npt.NDArray[np.int32]
    pairs: Counts
    calls: tuple[int, int] = (0, 0)


class HotnessReport(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one shard executed since its last report. `key` as in DemandReport; `seconds` float64
    [n]."""

    source: str
    incarnation: int
    seq: int
    rank: int
    at_s: float
    key: npt.NDArray[np.int32]
    pairs: Counts
    seconds: Seconds


NOTHING_ACKED: Final = -1
"""`acked_seq` of a source that has not reported: everything it still holds is wanted."""
REORDER_MAX: Final = 256
"""Reports kept in mind behind a gap in `seq`. Beyond it the gap counts as lost for good and is
passed over.
"""
INCARNATIONS_MAX: Final = 2
"""Lives of a source that may still report: the newest, and the one before it, whose last report
may be on its way.
"""


class LoadError(ValueError):
    """A report cannot be counted: names the field, what was found, and what is allowed."""


class LoadHistory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The last `kept` closed windows, oldest first. A value: `with_window` returns a new one.
    Part of the engine's state.
    """

    kept: int
    windows: tuple[LoadWindow, ...] = ()

    def with_window(self, window: LoadWindow) -> LoadHistory:
        """This history and one window more, without the oldest where there are more than `kept`.

        Raises LoadError where the window's shape is not that of the last one.
        """
        if self.windows and self.windows[-1].demand.shape != window.demand.shape:
            raise LoadError(
                f"window {window.index}: demand has shape {window.demand.shape}, the history holds "
                f"{self.windows[-1].demand.shape}; start a new history"
            )
        windows = (*self.windows, window)
        return LoadHistory(kept=self.kept, windows=windows[max(0, len(windows) - self.kept) :])

    def rates(self) -> Seconds:
        """Demand of each window in pairs a second: float64 [windows, phases, layers, experts],
        oldest first.
        """
        assert self.windows, "rates of an empty history"
        return np.stack([demand_rate(window) for window in self.windows])


def demand_rate(window: LoadWindow) -> Seconds:
    """Demand of a window in pairs a second: float64 [phases, layers, experts]. A window of no
    length gives zeros.
    """
    seconds = window.end_s - window.start_s
    total = window.demand.sum(axis=0, dtype=np.int64).astype(np.float64)
    return total / seconds if seconds > 0 else np.zeros_like(total)


class _Life(msgspec.Struct):
    """Reports seen of one incarnation: all up to `acked`, and those in `ahead` behind a gap."""

    acked: int
    ahead: set[int]


class _Shape(NamedTuple):
    """Sizes a folder counts in."""

    sub_windows: int
    num_layers: int
    num_experts: int
    num_ranks: int


class LoadFolder:
    """Folds reports into the open window and closes it. Belongs to one driver, which calls it
    from one thread.

    sub_windows: equal parts of `window_s` that demand is kept at. start_s: driver time at which
    the first window opens. A window may be closed later than `window_s`; what arrives after its
    last sub-window falls into that one.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        num_ranks: int,
        window_s: float,
        sub_windows: int,
        start_s: float,
    ) -> None:
        if min(num_layers, num_experts, num_ranks, sub_windows) < 1 or not window_s > 0:
            raise LoadError(
                f"num_layers {num_layers}, num_experts {num_experts}, num_ranks {num_ranks}, "
                f"sub_windows {sub_windows} must be >= 1 and window_s {window_s} > 0"
            )
        self._shape = _Shape(sub_windows, num_layers, num_experts, num_ranks)
        self._sub_window_s = window_s / sub_windows
        self._lives: dict[str, dict[int, _Life]] = {}
        self._queued: dict[str, tuple[npt.NDArray[np.int32], Counts]] = {}
        self._expected: set[str] = set()
        self._index = 0
        self._open(start_s)

    def expect(self, source: str) -> None:
        """From now on a window in which this source is silent names it. A first report does the
        same.
        """
        self._expected.add(source)

    def forget(self, source: str) -> None:
        """The source is gone for good: it is missed no longer. What it counted stays."""
        self._expected.discard(source)
        self._lives.pop(source, None)
        self._queued.pop(source, None)

    def acked_seq(self, source: str, incarnation: int) -> int:
        """Highest `seq` up to which every report of the incarnation is counted; NOTHING_ACKED
        where none was seen.
        """
        life = self._lives.get(source, {}).get(incarnation)
        return NOTHING_ACKED if life is None else life.acked

    def add_demand(self, report: DemandReport, at_s: float) -> bool:
        """Count a router's report in the open window. False where it was counted before or its
        life is long over.

        Raises LoadError for keys, counts or lengths that cannot be; the report then stays unseen.
        """
        self._check(report.source, report.key, report.pairs)
        if min(report.calls) < 0:
            raise LoadError(f"{report.source}: calls must be >= 0, got {report.calls}")
        if not self._is_new(report.source, report.incarnation, report.seq):
            return False
        self._calls += report.calls
        np.add.at(self._demand[self._sub_window(at_s)].reshape(-1), report.key, report.pairs)
        return True

    def add_hotness(self, report: HotnessReport, at_s: float) -> bool:
        """Count a shard's report in the open window; as `add_demand`. `at_s` is when it arrived."""
        del at_s  # executed work has no sub-windows; the argument keeps both calls alike
        self._check(report.source, report.key, report.pairs)
        if not 0 <= report.rank < self._shape.num_ranks:
            raise LoadError(
                f"{report.source}: rank {report.rank} must lie in [0, {self._shape.num_ranks})"
            )
        seconds = report.seconds
        if seconds.shape != report.key.shape or not bool(
            np.all(np.isfinite(seconds) & (seconds >= 0))
        ):
            raise LoadError(
                f"{report.source}: seconds must be {len(report.key)} finite values >= 0"
            )
        if not self._is_new(report.source, report.incarnation, report.seq):
            return False
        layer_of = report.key // self._shape.num_experts % self._shape.num_layers
        phase_of = report.key // (self._shape.num_experts * self._shape.num_layers)
        np.add.at(self._executed.reshape(-1), report.key, report.pairs)
        np.add.at(self._rank_pairs[report.rank], layer_of, report.pairs)
        np.add.at(self._rank_busy_s[report.rank], phase_of, seconds)
        return True

    def set_queued(self, source: str, key: npt.NDArray[np.int32], pairs: Counts) -> None:
        """What waits in a router now, in place of what it said before: no count, so said twice it
        counts once. Until the window closes it is the newest word; it is not kept for the next.

        key, pairs: as in DemandReport. Raises LoadError as `add_demand`; the word before stands.
        """
        self._check(source, key, pairs)
        self._queued[source] = (key, pairs)

    def close(self, at_s: float) -> LoadWindow:
        """The open window, ended at `at_s`; the next one opens at once. What arrives later falls
        into that one.

        Raises LoadError where `at_s` lies before the window's start.
        """
        if at_s < self._start_s:
            raise LoadError(f"window cannot close at {at_s} s, it opened at {self._start_s} s")
        window = LoadWindow(
            index=self._index,
            start_s=self._start_s,
            end_s=at_s,
            demand=_frozen(self._demand),
            executed_pairs=_frozen(self._executed),
            rank_pairs=_frozen(self._rank_pairs),
            rank_busy_s=_frozen(self._rank_busy_s),
            sources_missing=tuple(sorted(self._expected - self._heard)),
            queued=_frozen(self._waiting()),
            calls=(int(self._calls[0]), int(self._calls[1])),
        )
        self._index += 1
        self._open(at_s)
        return window

    def _open(self, at_s: float) -> None:
        shape = self._shape
        per_expert = (NUM_PHASES, shape.num_layers, shape.num_experts)
        self._start_s = at_s
        self._demand: Counts = np.zeros((shape.sub_windows, *per_expert), dtype=np.int64)
        self._executed: Counts = np.zeros(per_expert, dtype=np.int64)
        self._rank_pairs: Counts = np.zeros((shape.num_ranks, shape.num_layers), dtype=np.int64)
        self._rank_busy_s: Seconds = np.zeros((shape.num_ranks, NUM_PHASES), dtype=np.float64)
        self._calls: Counts = np.zeros(NUM_PHASES, dtype=np.int64)
        self._heard: set[str] = set()
        self._queued.clear()

    def hold_ranks(self, num_ranks: int) -> None:
        """Count for so many ranks from now on, in the open window too. Never for fewer than before:
        a rank that has left keeps its number."""
        more = num_ranks - self._shape.num_ranks
        if more <= 0:
            return
        self._shape = self._shape._replace(num_ranks=num_ranks)
        self._rank_pairs = np.pad(self._rank_pairs, ((0, more), (0, 0)))
        self._rank_busy_s = np.pad(self._rank_busy_s, ((0, more), (0, 0)))

    def _waiting(self) -> Counts:
        shape = self._shape
        queued: Counts = np.zeros((NUM_PHASES, shape.num_layers, shape.num_experts), dtype=np.int64)
        for key, pairs in self._queued.values():
            np.add.at(queued.reshape(-1), key, pairs)
        return queued

    def _sub_window(self, at_s: float) -> int:
        part = int((at_s - self._start_s) / self._sub_window_s)
        return min(max(part, 0), self._shape.sub_windows - 1)

    def _check(self, source: str, key: npt.NDArray[np.int32], pairs: Counts) -> None:
        if key.ndim != 1 or pairs.shape != key.shape:
            raise LoadError(
                f"{source}: key has shape {key.shape} and pairs {pairs.shape}; "
                "send one pair count a key"
            )
        if key.dtype.kind not in "iu" or pairs.dtype.kind not in "iu":
            raise LoadError(
                f"{source}: key and pairs must be integers, got {key.dtype} and {pairs.dtype}"
            )
        keys_max = NUM_PHASES * self._shape.num_layers * self._shape.num_experts
        if len(key) and (int(key.min()) < 0 or int(key.max()) >= keys_max):
            raise LoadError(
                f"{source}: key must lie in [0, {keys_max}), got {key.min()}..{key.max()}; "
                "does the source serve another model?"
            )
        if len(pairs) and int(pairs.min()) < 0:
            raise LoadError(f"{source}: pairs must be >= 0, got {pairs.min()}")

    def _is_new(self, source: str, incarnation: int, seq: int) -> bool:
        if seq < 0:
            raise LoadError(f"{source}: seq must be >= 0, got {seq}")
        self._expected.add(source)
        self._heard.add(source)
        lives = self._lives.setdefault(source, {})
        life = lives.get(incarnation)
        if life is None:
            if len(lives) >= INCARNATIONS_MAX and incarnation < min(lives):
                return False
            # Numbers before the first one seen were counted by an earlier driver or are gone.
            lives[incarnation] = _Life(acked=seq, ahead=set())
            if len(lives) > INCARNATIONS_MAX:
                del lives[min(lives)]
            return True
        if seq <= life.acked or seq in life.ahead:
            return False
        life.ahead.add(seq)
        if len(life.ahead) > REORDER_MAX:
            life.acked = min(life.ahead) - 1
        while life.acked + 1 in life.ahead:
            life.acked += 1
            life.ahead.remove(life.acked)
        return True


def _frozen(array: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    array.setflags(write=False)
    return array
