"""The CPU backend: per-slot matrix products on numpy arrays, with compiled loops around them.

Responsible for exact float32 results at the speed of the CPU. Must never gather weights or share a
thread pool: BLAS runs on one thread a shard (the launcher sets it). Called by the shard's core.

Weights are multiplied in the layout they are stored in, `[H, 2F]` and `[F, H]`, by the library that
`warm_up` measured to be the fastest on this CPU (see `products`; before it, by numpy's).
Serving in bfloat16 or float16 keeps a derived float32 form, because CPUs without such units
multiply them far slower; `derived_bytes` counts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.shard.compute.base import ExpertSpec, SlotWork, check_forward, check_loaded
from moe_serve.shard.compute.order import PairOrder, order_by_slot
from moe_serve.shard.compute.products import measured_products, unmeasured_products
from moe_serve.shard.kernels import add_gated, gather_rows, silu_mul, warm
from moe_serve.shard.pages import Pages, page_rounded
from moe_serve.shard.rows import from_float32, raw_dtype, to_float32

_F32_BYTES = 4

CHUNK_ROWS = 1024
"""Rows of a slot computed at once: bounds scratch memory; a matrix product is at its peak speed
well below it.
"""


@dataclass(slots=True)
class _Weights:
    """One loaded slot. `derived` is set when the canonical form is not float32."""

    canonical: NDArray[np.uint8]
    gate_up: NDArray[np.float32]
    down: NDArray[np.float32]
    derived: Pages | None


@dataclass(slots=True)
class _Scratch:
    """Buffers of one chunk, reused: rows [C, H], gate_up [C, 2F], act [C, F], parts [C, H]."""

    rows: NDArray[np.float32]
    gate_up: NDArray[np.float32]
    act: NDArray[np.float32]
    parts: NDArray[np.float32]


class NumpyBackend:
    """CPU backend, float32 arithmetic whatever the serving dtype. See `ComputeBackend`.

    `clock` gives monotonic seconds and prices each slot's work.
    """

    name = "numpy"
    simulated = False

    def __init__(self, spec: ExpertSpec, clock: Callable[[], float] = time.perf_counter) -> None:
        self._spec = spec
        self._clock = clock
        self._weights: dict[int, _Weights] = {}
        self._scratch = _scratch(spec, 1)
        self.products = unmeasured_products()

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the float32 forms. See `ComputeBackend`."""
        # A copy of the values: slots are loaded and unloaded by other threads.
        derived = (weights.derived for weights in tuple(self._weights.values()))
        return sum(pages.array.nbytes for pages in derived if pages is not None)

    @staticmethod
    def derived_bytes(spec: ExpertSpec) -> int:
        """Bytes of the float32 form, in whole pages; 0 when the canonical form is float32."""
        return 0 if spec.dtype == "float32" else page_rounded(spec.elements * _F32_BYTES)

    @staticmethod
    def slot_bytes(spec: ExpertSpec) -> int:
        """Canonical form in whole pages and the derived float32 form."""
        return spec.held_bytes + NumpyBackend.derived_bytes(spec)

    def load_slot(self, slot: int, canonical_buffer: NDArray[np.uint8]) -> None:
        """View the buffer as weights (float32), or widen it into the derived form. See
        `ComputeBackend`.
        """
        spec = self._spec
        assert canonical_buffer.shape == (spec.canonical_bytes,), f"{canonical_buffer.shape} bytes"
        if slot in self._weights:
            self.unload_slot(slot)
        raw = canonical_buffer.view(raw_dtype(spec.dtype))
        derived: Pages | None = None
        if spec.dtype == "float32":
            weights = raw
        else:
            derived = Pages(spec.elements * _F32_BYTES)
            weights = derived.array[: spec.elements * _F32_BYTES].view(np.float32)
            to_float32(raw, spec.dtype, out=weights)
        hidden, inner, split = spec.hidden_size, spec.intermediate_size, spec.gate_up_elements
        self._weights[slot] = _Weights(
            canonical=canonical_buffer,
            gate_up=weights[:split].reshape(hidden, 2 * inner),
            down=weights[split:].reshape(inner, hidden),
            derived=derived,
        )

    def unload_slot(self, slot: int) -> None:
        """Drop the views and give the derived form's memory back. See `ComputeBackend`."""
        weights = self._weights.pop(slot)
        if weights.derived is not None:
            weights.derived.free()

    def canonical_bytes(self, slot: int) -> NDArray[np.uint8]:
        """The buffer itself for float32, else the derived form narrowed back (exact for finite
        weights).
        """
        weights = self._weights[slot]
        if weights.derived is None:
            return weights.canonical
        elements = self._spec.elements
        resident = weights.derived.array[: elements * _F32_BYTES].view(np.float32)
        return from_float32(resident, self._spec.dtype).view(np.uint8)

    def forward(
        self,
        rows: NDArray[np.float32],
        pair_row: NDArray[np.int32],
        pair_slot: NDArray[np.int32],
        pair_gate: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> SlotWork:
        """Slot by slot, each in chunks of CHUNK_ROWS; seconds are measured a slot. See
        `ComputeBackend`.
        """
        check_forward(self._spec.hidden_size, rows, pair_row, (pair_slot, pair_gate), out)
        order = order_by_slot(pair_slot)
        check_loaded(order.slots, self._weights)
        pairs = order.pairs
        self._grow_scratch(int(pairs.max(initial=0)))
        out.fill(0.0)
        seconds = np.zeros(order.slots.shape[0])
        index = pair_row[order.order]
        gates = pair_gate[order.order]
        # Rows that are not finite are served as they are; a warning for each batch of a client
        # would tell nobody anything.
        with np.errstate(all="ignore"):
            before_s = self._clock()
            for group in range(order.slots.shape[0]):
                self._run_group(order, group, rows, (index, gates), out)
                after_s = self._clock()
                seconds[group] = after_s - before_s
                before_s = after_s
        return SlotWork(slots=order.slots, pairs=pairs, seconds=seconds)

    def warm_up(self) -> None:
        """Run the compiled loops once and choose the products. See `ComputeBackend`."""
        warm()
        self.products = measured_products(self._spec)
        self._grow_scratch(CHUNK_ROWS)

    def _run_group(
        self,
        order: PairOrder,
        group: int,
        rows: NDArray[np.float32],
        sorted_pairs: tuple[NDArray[np.int32], NDArray[np.float32]],
        out: NDArray[np.float32],
    ) -> None:
        """Add the parts of one slot's pairs to `out`."""
        index, gates = sorted_pairs
        weights = self._weights[int(order.slots[group])]
        scratch = self._scratch
        end = int(order.end[group])
        for begin in range(int(order.begin[group]), end, CHUNK_ROWS):
            chunk = slice(begin, min(begin + CHUNK_ROWS, end))
            n = chunk.stop - chunk.start
            gather_rows(rows, index[chunk], scratch.rows[:n])
            product = self.products.of(n)
            product(scratch.rows[:n], weights.gate_up, scratch.gate_up[:n])
            silu_mul(scratch.gate_up[:n], scratch.act[:n])
            product(scratch.act[:n], weights.down, scratch.parts[:n])
            add_gated(out, index[chunk], gates[chunk], scratch.parts[:n])

    def _grow_scratch(self, most_pairs: int) -> None:
        """Room for the largest group, up to one chunk; doubled, so that growing batches do not
        reallocate each time.
        """
        needed = min(most_pairs, CHUNK_ROWS)
        have = self._scratch.rows.shape[0]
        if needed > have:
            self._scratch = _scratch(self._spec, min(max(needed, 2 * have), CHUNK_ROWS))


def _scratch(spec: ExpertSpec, num_rows: int) -> _Scratch:
    return _Scratch(
        rows=np.empty((num_rows, spec.hidden_size), np.float32),
        gate_up=np.empty((num_rows, 2 * spec.intermediate_size), np.float32),
        act=np.empty((num_rows, spec.intermediate_size), np.float32),
        parts=np.empty((num_rows, spec.hidden_size), np.float32),
    )
