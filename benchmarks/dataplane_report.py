"""What the data path benchmark found: tables, bars, and the JSON form.

Responsible for turning samples into figures and lines. Must never measure. Called by
`benchmarks.dataplane`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.dataplane_client import PathTimes
from benchmarks.dataplane_fanout import FanOutTimes, MessageBytes
from benchmarks.dataplane_figures import (
    Bar,
    Figure,
    differences,
    figure,
    ratios,
    relative_error,
    saved_rows,
    table,
)
from benchmarks.dataplane_model import ModelSize, TokenBatch

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
    compute_ms: float


@dataclass(frozen=True)
class BytesFound:
    """Part c at one size: measured savings each way, and the formula's."""

    label: str
    out: float
    back: float
    formula: float
    counted: MessageBytes


@dataclass(frozen=True)
class PathsFound:
    """Parts b and d at one size. Times in ms."""

    backend: str
    tokens: int
    label: str
    local_ms: Figure
    stream_ms: Figure
    unary_ms: Figure
    stream_to_unary: Figure
    stream_to_local: Figure
    added_ms: Figure
    compute_ms: float
    """Compute of a request, all shards together."""


@dataclass
class Report:
    """Everything found so far."""

    fan_out: list[FanOutFound] = field(default_factory=list)
    bytes_: list[BytesFound] = field(default_factory=list)
    paths: list[PathsFound] = field(default_factory=list)

    def add_fan_out(self, tokens: int, label: str, times: FanOutTimes) -> None:
        """Part a at one size."""
        self.fan_out.append(
            FanOutFound(
                tokens,
                label,
                figure(times.wire_s).scaled(1e3),
                figure(times.ray_s).scaled(1e3),
                ratios(times.wire_s, times.ray_s),
                times.compute_s * 1e3,
            )
        )

    def add_bytes(self, label: str, top_k: int, num_shards: int, counted: MessageBytes) -> None:
        """Part c at one size."""
        self.bytes_.append(
            BytesFound(
                label,
                counted.sent_copies / counted.sent,
                counted.answered_copies / counted.answered,
                saved_rows(top_k, num_shards),
                counted,
            )
        )

    def add_paths(
        self, size: ModelSize, batch: TokenBatch, times: PathTimes, compute_s: float
    ) -> None:
        """Parts b and d at one size; `compute_s` of all shards over all requests of `times`."""
        self.paths.append(
            PathsFound(
                size.backend,
                len(batch.hidden),
                batch.label,
                figure(times.local_s).scaled(1e3),
                figure(times.stream_s).scaled(1e3),
                figure(times.unary_s).scaled(1e3),
                ratios(times.stream_s, times.unary_s),
                ratios(times.stream_s, times.local_s),
                differences(times.stream_s, times.local_s).scaled(1e3),
                compute_s / times.calls * 1e3,
            )
        )

    def bars(self) -> list[Bar]:
        """All promises with what was measured."""
        found = [
            Bar(f"a  wire / Ray calls, {one.label}", FAN_OUT_BAR, one.ratio)
            for one in self.fan_out
            if one.tokens == FAN_OUT_BAR_TOKENS
        ]
        found += [
            Bar(f"b  stream / unary, {one.label}", STREAM_BAR, one.stream_to_unary)
            for one in self._echo()
            if one.tokens in STREAM_BAR_TOKENS
        ]
        for one in self.bytes_:
            for way, measured in (("out", one.out), ("back", one.back)):
                error = relative_error(measured, one.formula)
                name = f"c  bytes {way} off the formula, {one.label}"
                found.append(Bar(name, BYTES_BAR, Figure(error, error, error, 1.0, 1)))
        return found

    def fan_out_lines(self) -> list[str]:
        """Table of part a."""
        rows = [
            [
                one.label,
                one.wire_ms.text(2),
                one.ray_ms.text(2),
                f"{one.compute_ms:.2f}",
                one.ratio.text(),
            ]
            for one in self.fan_out
        ]
        header = ["a  one call to 4 shards", "wire ms", "Ray calls ms", "compute ms", "wire / Ray"]
        return table(header, rows)

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

    def stream_lines(self) -> list[str]:
        """Table of part b."""
        rows = [
            [one.label, one.stream_ms.text(2), one.unary_ms.text(2), one.stream_to_unary.text()]
            for one in self._echo()
        ]
        return table(["b  public API", "stream ms", "unary ms", "stream / unary"], rows)

    def overhead_lines(self, size: ModelSize) -> list[str]:
        """Table of part d for one model."""
        rows = [
            [
                one.label,
                one.local_ms.text(2),
                one.stream_ms.text(2),
                f"{one.compute_ms:.2f}",
                one.added_ms.text(2),
                one.stream_to_local.text(2),
            ]
            for one in self.paths
            if one.backend == size.backend
        ]
        name = f"d  {size.num_experts} experts, {size.backend}"
        header = [name, "local ms", "whole path ms", "shards' compute ms", "added ms"]
        return table([*header, "path / local"], rows)

    def verdicts(self) -> list[str]:
        """One line a bar, the missed ones counted."""
        rows = [
            [bar.name, bar.measured.text(), f"<= {bar.at_most:g}", bar.verdict]
            for bar in self.bars()
        ]
        missed = sum(not bar.holds for bar in self.bars())
        summary = f"  {len(rows) - missed} of {len(rows)} bars hold, {missed} missed"
        return [*table(["bars", "measured", "bar", ""], rows), summary]

    def document(self) -> dict[str, Any]:
        """Everything, for the JSON file."""
        return {
            "fan_out": [asdict(one) for one in self.fan_out],
            "bytes": [asdict(one) for one in self.bytes_],
            "paths": [asdict(one) for one in self.paths],
            "bars": [
                {**asdict(bar), "holds": bar.holds, "verdict": bar.verdict} for bar in self.bars()
            ],
        }

    def _echo(self) -> list[PathsFound]:
        return [one for one in self.paths if one.backend == "emulated"]
