"""What the data path benchmark found: tables, bars, and the JSON form.

Responsible for turning samples into figures and lines. Must never measure. Called by
`benchmarks.dataplane`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.dataplane_client import (
    EDGE_STREAM,
    EDGE_UNARY,
    LOCAL,
    STREAM,
    UNARY,
    PathTimes,
)
from benchmarks.dataplane_fanout import FanOutTimes, MessageBytes
from benchmarks.dataplane_figures import (
    Bar,
    Figure,
    differences,
    exact,
    figure,
    ratios,
    relative_error,
    saved_rows,
    table,
)
from benchmarks.dataplane_model import TokenBatch

FAN_OUT_BAR = 0.12
FAN_OUT_BAR_TOKENS = 64
STREAM_BAR = 0.8
STREAM_BAR_TOKENS = (1, 8)
BYTES_BAR = 0.05


@dataclass(frozen=True)
class FanOutFound:
    """Part a at one size. Times in ms; `ratio` is wire / Ray."""

    tokens: int
    label: str
    wire_ms: Figure
    ray_ms: Figure
    ratio: Figure


@dataclass(frozen=True)
class StreamFound:
    """Part b at one size. Times in ms; `edge` is without shards."""

    tokens: int
    label: str
    stream_ms: Figure
    unary_ms: Figure
    ratio: Figure
    edge_stream_ms: Figure
    edge_unary_ms: Figure
    edge_ratio: Figure


@dataclass(frozen=True)
class BytesFound:
    """Part c at one size: how many times less than k copies, each way, and the formula's."""

    label: str
    out: float
    back: float
    formula: float
    counted: MessageBytes


@dataclass(frozen=True)
class OverheadFound:
    """Part d at one size. Times in ms; `compute_ms` of one request, all shards together."""

    tokens: int
    label: str
    local_ms: Figure
    path_ms: Figure
    added_ms: Figure
    ratio: Figure
    compute_ms: float


@dataclass
class Report:
    """Everything found so far."""

    fan_out: list[FanOutFound] = field(default_factory=list)
    stream: list[StreamFound] = field(default_factory=list)
    bytes_: list[BytesFound] = field(default_factory=list)
    overhead: list[OverheadFound] = field(default_factory=list)

    def add_fan_out(self, batch: TokenBatch, times: FanOutTimes) -> None:
        """Part a at one size."""
        self.fan_out.append(
            FanOutFound(
                batch.tokens,
                batch.label,
                figure(times.wire_s).scaled(1e3),
                figure(times.ray_s).scaled(1e3),
                ratios(times.wire_s, times.ray_s),
            )
        )

    def add_stream(self, batch: TokenBatch, times: PathTimes) -> None:
        """Part b at one size."""
        by_path = times.seconds
        self.stream.append(
            StreamFound(
                batch.tokens,
                batch.label,
                figure(by_path[STREAM]).scaled(1e3),
                figure(by_path[UNARY]).scaled(1e3),
                ratios(by_path[STREAM], by_path[UNARY]),
                figure(by_path[EDGE_STREAM]).scaled(1e3),
                figure(by_path[EDGE_UNARY]).scaled(1e3),
                ratios(by_path[EDGE_STREAM], by_path[EDGE_UNARY]),
            )
        )

    def add_bytes(self, batch: TokenBatch, num_shards: int, counted: MessageBytes) -> None:
        """Part c at one size."""
        self.bytes_.append(
            BytesFound(
                batch.label,
                counted.sent_copies / counted.sent,
                counted.answered_copies / counted.answered,
                saved_rows(batch.top_k, num_shards),
                counted,
            )
        )

    def add_overhead(self, batch: TokenBatch, times: PathTimes, compute_s: float) -> None:
        """Part d at one size; `compute_s` of one request, all shards together."""
        local_s, path_s = times.seconds[LOCAL], times.seconds[STREAM]
        self.overhead.append(
            OverheadFound(
                batch.tokens,
                batch.label,
                figure(local_s).scaled(1e3),
                figure(path_s).scaled(1e3),
                differences(path_s, local_s).scaled(1e3),
                ratios(path_s, local_s),
                compute_s * 1e3,
            )
        )

    def bars(self) -> list[Bar]:
        """All promises with what was measured."""
        found = [
            Bar(f"a  wire / Ray calls, {one.label}", FAN_OUT_BAR, one.ratio)
            for one in self.fan_out
            if one.tokens == FAN_OUT_BAR_TOKENS
        ]
        # The ratio without shards explains this one and is no bar: callers wait for the shards.
        found += [
            Bar(f"b  stream / unary, {one.label}", STREAM_BAR, one.ratio)
            for one in self.stream
            if one.tokens in STREAM_BAR_TOKENS
        ]
        for counted in self.bytes_:
            for way, measured in (("out", counted.out), ("back", counted.back)):
                error = relative_error(measured, counted.formula)
                name = f"c  bytes {way} off the formula, {counted.label}"
                found.append(Bar(name, BYTES_BAR, exact(error)))
        return found

    def fan_out_lines(self) -> list[str]:
        """Table of part a."""
        rows = [
            [one.label, one.wire_ms.text(2), one.ray_ms.text(2), one.ratio.text()]
            for one in self.fan_out
        ]
        header = ["a  one call to 4 shards", "wire ms", "Ray calls ms", "wire / Ray"]
        return [*table(header, rows), "     (identity experts on both sides, the same core)"]

    def stream_lines(self) -> list[str]:
        """Table of part b."""
        rows = [
            [
                one.label,
                one.stream_ms.text(2),
                one.unary_ms.text(2),
                one.ratio.text(),
                one.edge_stream_ms.text(2),
                one.edge_unary_ms.text(2),
                one.edge_ratio.text(),
            ]
            for one in self.stream
        ]
        whole = ["stream ms", "unary ms", "stream / unary"]
        edge = [f"no shards: {name}" for name in whole]
        return table(["b  public API", *whole, *edge], rows)

    def bytes_lines(self) -> list[str]:
        """Table of part c."""
        rows = [
            [
                one.label,
                f"{one.counted.pairs / one.counted.rows:.3f}",
                f"{one.out:.3f}",
                f"{one.back:.3f}",
                f"{one.formula:.3f}",
            ]
            for one in self.bytes_
        ]
        return table(["c  k copies / ours", "rows", "bytes out", "bytes back", "formula"], rows)

    def overhead_lines(self) -> list[str]:
        """Table of part d: real experts; the last column is part b's stream, identity experts."""
        alone = {one.tokens: one.stream_ms for one in self.stream}
        rows = [
            [
                one.label,
                one.local_ms.text(2),
                one.path_ms.text(2),
                one.added_ms.text(2),
                one.ratio.text(2),
                f"{one.compute_ms:.2f}",
                alone[one.tokens].text(2) if one.tokens in alone else "",
            ]
            for one in self.overhead
        ]
        header = ["d  whole path, real experts", "local ms", "path ms", "added ms", "path / local"]
        return table([*header, "4 shards' compute ms", "path with identity experts ms"], rows)

    def verdicts(self) -> list[str]:
        """One line a bar, the missed ones counted."""
        bars = self.bars()
        rows = [[bar.name, bar.measured.text(), f"<= {bar.at_most:g}", bar.verdict] for bar in bars]
        missed = sum(not bar.holds for bar in bars)
        summary = f"  {len(bars) - missed} of {len(bars)} bars hold, {missed} missed"
        return [*table(["bars", "measured", "bar", ""], rows), summary]

    def document(self) -> dict[str, Any]:
        """Everything, for the JSON file."""
        return {
            "fan_out": [asdict(one) for one in self.fan_out],
            "stream": [asdict(one) for one in self.stream],
            "bytes": [asdict(one) for one in self.bytes_],
            "overhead": [asdict(one) for one in self.overhead],
            "bars": [
                {**asdict(bar), "holds": bar.holds, "verdict": bar.verdict} for bar in self.bars()
            ],
        }
