"""One expert and all of them: where it is, how hot it is, how hot it was.

History is kept as u16 frames, one a window, summed over phases: 58 x 256 cells are 29,696 bytes.
HISTORY_BYTES_MAX bounds all frames together, HISTORY_S their age; at 58 x 256 and windows of a
second, 15 minutes are 26.7 MB.

Responsible for figures by expert. Must never read a clock. Called by `feed` and `reading`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_serve.dashboard.answers import ApiError
from moe_serve.dashboard.frames import LISTED, Counts, Json, counts_of
from moe_serve.rpc import placement_pb2

HISTORY_S = 900.0
HISTORY_BYTES_MAX = 32 << 20
POINTS_MAX = 900
"""Points of one expert's history that are sent; neighbours are averaged above it."""
CSV_BYTES_MAX = 4 << 20
PHASES = ("prefill", "decode")
CSV_HEAD = "layer,expert,pairs,share,rank_in_layer,replicas,ranks\r\n"
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
        demand = demand_of(load).sum(axis=0)
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
        """{"wall_s": [...], "pairs_per_s": [...]} of one expert, oldest first."""
        past = list(self._frames)
        rates = np.array([f.scale * int(f.units[layer, expert]) / f.seconds for f in past])
        walls = np.array([f.wall_s for f in past])
        if len(past) > POINTS_MAX:
            groups = np.linspace(0, len(past), POINTS_MAX + 1).astype(int)[:-1]
            sizes = np.diff([*groups, len(past)])
            rates, walls = (np.add.reduceat(row, groups) / sizes for row in (rates, walls))
        return {"wall_s": walls.tolist(), "pairs_per_s": rates.tolist()}


def demand_of(load: placement_pb2.GetLoadResponse) -> Counts:
    """Demand [phases, layers, experts] of a window. Raises InvalidArgument."""
    shape = (load.num_phases, load.num_layers, load.num_experts)
    return counts_of("demand", load.demand, shape)


def of_phase(demand: Counts, phase: str) -> Counts:
    """Demand [layers, experts] of one phase, or of all. Raises ApiError 404 where the service does
    not tell phases apart."""
    if phase == "all":
        return np.asarray(demand.sum(axis=0))
    number = PHASES.index(phase)
    if number >= len(demand):
        raise ApiError(404, f"this service has no phase {phase}", field="phase")
    return np.asarray(demand[number])


Holders = dict[tuple[int, int], list[tuple[int, int, str]]]
"""(rank, slot, state) of every replica by (layer, expert)."""


def holders_of(placement: placement_pb2.GetPlacementResponse) -> Holders:
    """Every replica there is or is coming, by rank."""
    found: Holders = {}
    for rank in placement.ranks:
        for slot in rank.slots:
            if slot.layer >= 0 and slot.expert >= 0:
                here = found.setdefault((slot.layer, slot.expert), [])
                here.append((rank.rank, slot.index, slot.state))
    return found


def expert_document(
    load: placement_pb2.GetLoadResponse,
    holders: Holders,
    nodes: dict[int, str],
    *,
    layer: int,
    expert: int,
) -> Json:
    """Share, rank in the layer (1 = hottest, the lower id first of equals) and replicas of one
    expert in the newest window, without its history and moves. Raises ApiError 404."""
    if not (layer < load.num_layers and expert < load.num_experts):
        raise ApiError(
            404,
            f"layer {layer} expert {expert} does not exist; "
            f"there are {load.num_layers} layers of {load.num_experts} experts",
            field="layer" if layer >= load.num_layers else "expert",
        )
    demand = demand_of(load)
    row = demand[:, layer].sum(axis=0)
    mine, total = int(row[expert]), int(row.sum())
    return {
        "layer": layer,
        "expert": expert,
        "window": load.window,
        "pairs": mine,
        "share": mine / total if total else 0.0,
        "fair_share": 1.0 / load.num_experts,
        "rank_in_layer": 1 + int((row > mine).sum() + (row[:expert] == mine).sum()),
        "experts": load.num_experts,
        "by_phase": {
            name: int(demand[number, layer, expert])
            for number, name in enumerate(PHASES)
            if number < len(demand)
        },
        "replicas": [
            {"rank": rank, "slot": slot, "state": state, "node": nodes.get(rank, "")}
            for rank, slot, state in holders.get((layer, expert), [])
        ],
    }


def csv_of(demand: Counts, holders: Holders) -> bytes:
    """All experts as CSV (RFC 4180), one row each, layers in order. `ranks`: of listed replicas,
    apart by spaces. Raises ApiError 413 above CSV_BYTES_MAX."""
    body = bytearray(CSV_HEAD.encode())
    for layer, row in enumerate(demand):
        body += "".join(_rows(layer, row, holders)).encode()
        if len(body) > CSV_BYTES_MAX:
            raise ApiError(
                413,
                f"{demand.size} experts are more than {CSV_BYTES_MAX} bytes of CSV",
                next_step="read /api/v1/frame, which is packed",
            )
    return bytes(body)


def _rows(layer: int, row: npt.NDArray[np.int64], holders: Holders) -> Iterator[str]:
    order = np.empty(len(row), dtype=np.int64)
    order[np.argsort(-row, kind="stable")] = np.arange(1, len(row) + 1)
    total = max(1, int(row.sum()))
    for expert, pairs in enumerate(row.tolist()):
        ranks = [r for r, _, state in holders.get((layer, expert), []) if state == LISTED]
        yield (
            f"{layer},{expert},{pairs},{pairs / total:.8f},{order[expert]},"
            f"{len(ranks)},{' '.join(map(str, ranks))}\r\n"
        )
