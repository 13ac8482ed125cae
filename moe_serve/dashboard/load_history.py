"""How hot each expert was: a window's load of all of them, for the last minutes.

History is kept as u16 frames, one a window, summed over phases: 58 x 256 cells are 29,696 bytes.
HISTORY_BYTES_MAX bounds all frames together, HISTORY_S their age; at 58 x 256 and windows of a
second, 15 minutes are 26.7 MB.

Responsible for what is kept of load by expert. Must never read a clock. Called by `feed` and
`reading`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_serve.documents.views import Json
from moe_serve.documents.window import counts_of
from moe_serve.rpc import placement_pb2

HISTORY_S = 900.0
HISTORY_BYTES_MAX = 32 << 20
POINTS_MAX = 900
"""Points of one expert's history that are sent; neighbours are averaged above it."""
_U16_MAX = 65_535


@dataclass(frozen=True, slots=True, eq=False)
class _Past:
    """One window: u16 [layers, experts], worth `scale` pairs each."""

    wall_s: float
    seconds: float
    scale: float
    units: npt.NDArray[np.uint16]


class LoadHistory:
    """Load of every expert over the last HISTORY_S, bounded by bytes."""

    def __init__(self, bytes_max: int = HISTORY_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._frames: deque[_Past] = deque()
        self._bytes = 0

    def add(self, load: placement_pb2.GetLoadResponse, wall_s: float) -> None:
        """Keep a window. Frames of another shape are dropped: it is another model."""
        demand = counts_of(load, "demand").sum(axis=0)
        scale = max(1.0, int(demand.max(initial=0)) / _U16_MAX)
        units = np.rint(demand / scale).astype(np.uint16)
        if self._frames and self._frames[-1].units.shape != units.shape:
            self._frames.clear()
            self._bytes = 0
        self._frames.append(_Past(wall_s, max(1e-6, load.end_s - load.start_s), scale, units))
        self._bytes += units.nbytes
        while self._bytes > self._bytes_max or self._frames[0].wall_s < wall_s - HISTORY_S:
            self._bytes -= self._frames.popleft().units.nbytes
            if not self._frames:
                return

    def held_bytes(self) -> int:
        """Bytes of all frames."""
        return self._bytes

    def of(self, layer: int, expert: int) -> Json:
        """{"wall_s": [...], "pairs_per_s": [...]} of one expert, oldest first; none of one that
        the windows do not have."""
        layers, experts = self._frames[-1].units.shape if self._frames else (0, 0)
        known = 0 <= layer < layers and 0 <= expert < experts
        past = list(self._frames) if known else []
        rates = np.array([f.scale * int(f.units[layer, expert]) / f.seconds for f in past])
        walls = np.array([f.wall_s for f in past])
        if len(past) > POINTS_MAX:
            groups = np.linspace(0, len(past), POINTS_MAX + 1).astype(int)[:-1]
            sizes = np.diff([*groups, len(past)])
            rates, walls = (np.add.reduceat(row, groups) / sizes for row in (rates, walls))
        return {"wall_s": walls.tolist(), "pairs_per_s": rates.tolist()}
