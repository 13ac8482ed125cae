"""Marker experts: expert e multiplies its row by e + 1, read from the bytes that are really
resident.

A slot that holds another expert, or another expert's bytes, therefore gives a wrong result that a
test sees. The weights are float32 and all of one value, e + 1 + 1000 * layer; the backend divides
the layer out.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moe_serve.shard.assembly import Shard
from moe_serve.shard.compute.base import ComputeBackend, ExpertSpec, SlotWork
from moe_serve.shard.served_model import ServedModel
from moe_serve.shard.settings import ShardSettings
from moe_serve.telemetry.traces import NO_TRACES, Traces
from moe_serve.weights.canonical import canonical_digest
from moe_serve.weights.reading import UNINTERRUPTED, Reading
from placement.messages.effects import (
    CopyExpert,
    CopySource,
    ReleaseSlot,
    ReserveSlot,
    VerifyExpert,
)
from placement.messages.events import ExpertVerified, SlotReserved
from placement.topology import DeviceProfile

LAYER_STEP = 1000.0
PROFILE = DeviceProfile(name="test", flops_per_s=1e9, memory_bytes_per_s=1e9, copy_bytes_per_s=1e9)


def marker_model(
    *, layers: int = 2, experts: int = 8, top_k: int = 4, hidden: int = 8, inner: int = 4
) -> ServedModel:
    """Shape of a marker model; an expert of the default has 384 bytes."""
    return ServedModel(layers, experts, top_k, "v1", ExpertSpec(hidden, inner, "float32"))


class MarkerSource:
    """Canonical bytes of marker experts. `read` counts; `on_read` may delay or raise, where the
    disk would; `on_write` may do so while the bytes are written into the slot."""

    def __init__(
        self,
        model: ServedModel,
        on_read: Callable[[int, int], None] = lambda _layer, _expert: None,
        on_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._on_read = on_read
        self._on_write = on_write
        self.reads = 0

    def canonical(self, layer: int, expert: int) -> NDArray[np.uint8]:
        value = expert + 1 + LAYER_STEP * layer
        return np.full(self._model.expert.elements, value, np.float32).view(np.uint8)

    def read_into(
        self, layer: int, expert: int, out: memoryview, reading: Reading = UNINTERRUPTED
    ) -> None:
        self.reads += 1
        with reading.blocking():
            self._on_read(layer, expert)
        content = self.canonical(layer, expert)
        step = max(1, len(content) // 8)
        for begin in range(0, len(content), step):
            chunk = content[begin : begin + step]
            self._on_write()
            out[begin : begin + len(chunk)] = chunk.data
            reading.advance(len(chunk))

    def canonical_sha256(self, layer: int, expert: int) -> str:
        return canonical_digest(self.canonical(layer, expert))


class MarkerBackend:
    """Computes gate * (expert + 1) * row from the slot's bytes. `on_forward(pairs)` is called in
    each forward, to block or raise."""

    name = "marker"
    simulated = True

    def __init__(self, spec: ExpertSpec, on_forward: Callable[[int], None] = lambda _n: None):
        self.spec = spec
        self.on_forward = on_forward
        self.buffers: dict[int, NDArray[np.uint8]] = {}
        self.forwards: list[int] = []

    @property
    def loaded_bytes(self) -> int:
        return 0

    @staticmethod
    def derived_bytes(spec: ExpertSpec) -> int:
        return 0

    @staticmethod
    def slot_bytes(spec: ExpertSpec) -> int:
        return spec.held_bytes

    def load_slot(self, slot: int, canonical_buffer: NDArray[np.uint8]) -> None:
        self.buffers[slot] = canonical_buffer

    def unload_slot(self, slot: int) -> None:
        del self.buffers[slot]

    def canonical_bytes(self, slot: int) -> NDArray[np.uint8]:
        return self.buffers[slot]

    def forward(
        self,
        rows: NDArray[np.float32],
        pair_row: NDArray[np.int32],
        pair_slot: NDArray[np.int32],
        pair_gate: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> SlotWork:
        self.forwards.append(len(pair_row))
        self.on_forward(len(pair_row))
        out.fill(0.0)
        slots, counts = np.unique(pair_slot, return_counts=True)
        factor = {
            int(s): float(self.buffers[int(s)].view(np.float32)[-1]) % LAYER_STEP for s in slots
        }
        with np.errstate(all="ignore"):
            for row, slot, gate in zip(pair_row, pair_slot, pair_gate, strict=True):
                out[row] += gate * np.float32(factor[int(slot)]) * rows[row]
        seconds = np.full(len(slots), 1e-4)
        return SlotWork(slots.astype(np.int32), counts.astype(np.int64), seconds)

    def warm_up(self) -> None:
        return


def marker_settings(**changed: object) -> ShardSettings:
    """Settings of a shard over marker experts: rank 0, incarnation 1, six slots."""
    values: dict[str, object] = {
        "rank": 0,
        "incarnation": 1,
        "node": "node-0",
        "failure_domain": "node-0",
        "profile": PROFILE,
        "num_slots": 6,
        "budget_bytes": 1 << 20,
        "slab_slots": 2,
        "checkpoint": "none",
        "manifest_dir": "none",
        "model_name": "marker",
        "weights_version": "v1",
        "ledger_rows_max": 100_000,
    }
    return ShardSettings(**(values | changed))  # type: ignore[arg-type]


def marker_shard(
    *,
    model: ServedModel | None = None,
    source: MarkerSource | None = None,
    backend: ComputeBackend | None = None,
    traces: Traces = NO_TRACES,
    **settings: object,
) -> Shard:
    """A shard over marker experts, not started."""
    model = model or marker_model()
    return Shard(
        marker_settings(**settings),
        model,
        source or MarkerSource(model),
        backend or MarkerBackend(model.expert),
        traces=traces,
    )


CHECKPOINT = CopySource(rank=-1)


def add(
    shard: Shard,
    slot: int,
    expert: int,
    *,
    layer: int = 0,
    step_id: int = -1,
    term: int = 1,
    source: CopySource = CHECKPOINT,
) -> int:
    """Reserve, copy and verify an expert; returns the tag."""
    where = {"rank": shard.settings.rank, "incarnation": shard.settings.incarnation, "slot": slot}
    step = 1000 + slot if step_id < 0 else step_id
    reserved = shard.execute(
        term,
        ReserveSlot(step_id=step, layer=layer, expert=expert, weights_version="v1", **where),  # type: ignore[arg-type]
    )
    assert isinstance(reserved, SlotReserved), reserved
    tag = reserved.slot_tag
    copied = shard.execute(
        term,
        CopyExpert(  # type: ignore[arg-type]
            step_id=step,
            slot_tag=tag,
            layer=layer,
            expert=expert,
            source=source,
            timeout_s=10.0,
            **where,
        ),
    )
    verified = shard.execute(term, VerifyExpert(step_id=step, slot_tag=tag, **where))  # type: ignore[arg-type]
    assert isinstance(verified, ExpertVerified), (copied, verified)
    return tag


def release(shard: Shard, slot: int, tag: int, *, layer: int = 0, expert: int = 0, term: int = 1):  # type: ignore[no-untyped-def]
    """Release a slot; returns the answer."""
    return shard.execute(
        term,
        ReleaseSlot(
            step_id=5000 + slot,
            rank=shard.settings.rank,
            incarnation=shard.settings.incarnation,
            slot=slot,
            slot_tag=tag,
            layer=layer,
            expert=expert,
        ),
    )
