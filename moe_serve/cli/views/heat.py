"""Heat of layers x experts: what is measured, its scale, and its words. Pure. Called by the heat
command."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.cli.charts.heat import Field
from moe_serve.cli.hotness import Hotness

LAYER_COLUMNS = 32
"""Experts in a row where one layer fills the screen."""

FloatArray = npt.NDArray[np.float64]


class Mode(StrEnum):
    """What a cell's colour tells."""

    LOAD = "load"
    SHARE = "share"
    REPLICAS = "replicas"


_TITLES = {
    Mode.LOAD: "pairs a second, log scale",
    Mode.SHARE: "load / fair share",
    Mode.REPLICAS: "replicas",
}


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """A field, what it shows, and the ends of its scale as text."""

    field: Field
    title: str
    low: str
    high: str


def heat_map(hot: Hotness, mode: Mode, layer: int | None) -> HeatMap:
    """All layers, a row each; or one layer, LAYER_COLUMNS experts a row."""
    values = _values(hot, mode)
    if layer is not None:
        values = values[layer : layer + 1]
    most = float(values.max(initial=0.0))
    levels = np.zeros(values.shape)
    if most > 0:
        levels = np.log1p(values) / np.log1p(most) if mode is Mode.LOAD else values / most
    title = _TITLES[mode] if mode is Mode.REPLICAS else f"{_TITLES[mode]}, {hot.phase.value} phase"
    title = title.replace("all phase", "all phases")
    high = f"{most:.0f}" if mode is Mode.REPLICAS or most >= 100 else f"{most:.3g}"
    if layer is None:
        return HeatMap(Field(levels), f"layers x experts: {title}", "0", high)
    return HeatMap(_wrapped(levels[0]), f"layer {layer}: {title}", "0", high)


def _values(hot: Hotness, mode: Mode) -> FloatArray:
    if mode is Mode.LOAD:
        return hot.rates
    return hot.times_fair_share if mode is Mode.SHARE else hot.replicas.astype(np.float64)


def _wrapped(levels: FloatArray) -> Field:
    rows = max(1, ceil(len(levels) / LAYER_COLUMNS))
    grown = np.full(rows * LAYER_COLUMNS, np.nan)
    grown[: len(levels)] = levels
    return Field(grown.reshape(rows, LAYER_COLUMNS), row_step=LAYER_COLUMNS)


def pooled_line(before: Field, after: Field, layer: int | None) -> str:
    """What was pooled to fit, or ""."""
    rows = after.row_step // before.row_step
    experts = after.column_step // before.column_step
    if rows == experts == 1:
        return ""
    rows_word = "layers" if layer is None else "rows"
    return (
        f"a cell is the greatest of {rows} {rows_word} x {experts} experts: the terminal has no "
        "room for each; --png or --csv has"
    )


def heat_plain(hot: Hotness, layer: int | None) -> dict[str, Any]:
    """The same for programs: pairs, share and replicas of each expert as lists by layer."""
    layers = list(range(hot.num_layers)) if layer is None else [layer]
    return {
        "phase": hot.phase.value,
        "window": hot.window,
        "window_s": hot.seconds,
        "age_s": hot.age_s,
        "sources_missing": list(hot.missing),
        "layers": layers,
        "pairs": hot.pairs[layers].tolist(),
        "share": hot.shares[layers].tolist(),
        "replicas": hot.replicas[layers].tolist(),
    }
