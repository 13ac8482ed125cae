"""What every compute backend does, and the canonical form of an expert that all of them read.

Responsible for the `ComputeBackend` interface and the facts its implementations share. Must never
hold weights or compute. Called by the shard's core (through the interface) and by every backend.

Canonical form of an expert: one contiguous blob in the serving dtype, fused gate|up `[H, 2F]`
row-major, then down `[F, H]` row-major, with H the hidden size and F the intermediate size. An
expert maps a row x to

    y = (silu(x @ gate_up[:, :F]) * (x @ gate_up[:, F:])) @ down
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.shard.pages import page_rounded
from moe_serve.shard.rows import element_bytes
from moe_serve.weights.dtypes import ServingDtype


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Shape of one routed expert: H, F and the serving dtype.

    Raises:
        ValueError: a size is not positive or the dtype is unknown.
    """

    hidden_size: int
    intermediate_size: int
    dtype: ServingDtype = "float32"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1 (got {getattr(self, name)})")
        element_bytes(self.dtype)

    @property
    def gate_up_elements(self) -> int:
        """Elements of the fused gate|up matrix, H * 2F; the down matrix follows them."""
        return self.hidden_size * 2 * self.intermediate_size

    @property
    def elements(self) -> int:
        """Elements of an expert, 3 * H * F."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def canonical_bytes(self) -> int:
        """Bytes of the canonical form: elements times the bytes of the serving dtype."""
        return self.elements * element_bytes(self.dtype)

    @property
    def held_bytes(self) -> int:
        """Memory of the canonical form in a slot pool: canonical bytes in whole pages."""
        return page_rounded(self.canonical_bytes)

    @property
    def flops_per_pair(self) -> int:
        """Floating point operations of one (row, expert) pair."""
        return 2 * self.elements


@dataclass(frozen=True, slots=True)
class SlotWork:
    """What one `forward` executed, by slot: `slots` int32 [G] ascending, `pairs` int64 [G],
    `seconds` float64 [G].
    """

    slots: NDArray[np.int32]
    pairs: NDArray[np.int64]
    seconds: NDArray[np.float64]


class ComputeBackend(Protocol):
    """Expert computation of one rank.

    `forward` is called by one thread at a time. `load_slot`, `unload_slot` and `canonical_bytes`
    may be called by others meanwhile, for slots that no running forward names (the shard pins
    those).

    Where memory is too short, of the host or of the device, `load_slot`, `canonical_bytes` and
    `forward` raise MemoryError and have changed nothing: it says "less at once" or "later", never
    that the device is broken.
    """

    @property
    def name(self) -> str:
        """Name of the backend as configuration and reports use it."""

    @property
    def simulated(self) -> bool:
        """Whether output or time are made up; every report of such figures says so."""

    @property
    def loaded_bytes(self) -> int:
        """Bytes held for loaded slots now beside their canonical form, unused places of slabs
        included."""

    def derived_bytes(self, spec: ExpertSpec) -> int:
        """Bytes the backend holds for each loaded slot beside the canonical form; whole pages."""

    def slot_bytes(self, spec: ExpertSpec) -> int:
        """Bytes a slot costs in all: canonical form in whole pages + `derived_bytes`."""

    def load_slot(self, slot: int, canonical_buffer: NDArray[np.uint8]) -> None:
        """Make a slot computable from its canonical bytes, `uint8 [canonical_bytes]` as
        `SlotPool.buffer` gives them.

        The backend may keep views of the buffer until `unload_slot`; a slot loaded again takes the
        new content.
        """

    def unload_slot(self, slot: int) -> None:
        """Drop views and derived forms of a loaded slot; comes before `SlotPool.release`."""

    def canonical_bytes(self, slot: int) -> NDArray[np.uint8]:
        """Canonical bytes read back from what `forward` really uses, `uint8 [canonical_bytes]`, for
        digests.

        A view or a new array; valid until the slot is unloaded.
        """

    def forward(
        self,
        rows: NDArray[np.float32],
        pair_row: NDArray[np.int32],
        pair_slot: NDArray[np.int32],
        pair_gate: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> SlotWork:
        """Gate-weighted partial sums: out[r] = sum over pairs p of row r of gate[p] *
        expert(slot[p])(rows[r]).

        `rows` and `out` are C-contiguous float32 [R, H], the pairs three arrays of length P; `out`
        is overwritten, rows without a pair become zero. The same pairs in the same order give the
        same bits. A row that is not finite makes no other row so. Slots must be loaded and rows in
        range; the shard has checked both before.
        """

    def warm_up(self) -> None:
        """Compile and touch what the first `forward` would, so that no request waits for it; loads
        no slot.
        """


def check_forward(
    hidden_size: int,
    rows: NDArray[np.float32],
    pair_row: NDArray[np.int32],
    pairs: tuple[NDArray[np.int32], NDArray[np.float32]],
    out: NDArray[np.float32],
) -> None:
    """Assert what `forward` is promised; `pairs` are pair_slot and pair_gate. Compiled loops trust
    it.
    """
    pair_slot, pair_gate = pairs
    assert rows.ndim == 2 and rows.shape[1] == hidden_size, f"rows of shape {rows.shape}"  # noqa: PT018
    assert out.shape == rows.shape, f"out of shape {out.shape} for rows of shape {rows.shape}"
    assert rows.dtype == np.float32, f"rows of {rows.dtype}"
    assert out.dtype == np.float32, f"out of {out.dtype}"
    assert rows.flags.c_contiguous, "rows are C-contiguous"
    assert out.flags.c_contiguous, "out is C-contiguous"
    num_pairs = pair_row.shape[0]
    for name, array, dtype in (
        ("pair_row", pair_row, np.int32),
        ("pair_slot", pair_slot, np.int32),
        ("pair_gate", pair_gate, np.float32),
    ):
        assert array.dtype == dtype, f"{name} of {array.dtype}"
        assert array.shape == (num_pairs,), f"{name} of shape {array.shape} for {num_pairs} pairs"
        assert array.flags.c_contiguous, f"{name} is C-contiguous"
    if num_pairs:
        # Read as unsigned a negative number is above every limit.
        assert int(pair_row.view(np.uint32).max()) < rows.shape[0], (
            f"pair_row {int(pair_row.min())}..{int(pair_row.max())}"
        )


def check_loaded(slots: NDArray[np.integer[Any]], loaded: Container[int]) -> None:
    """Assert that every slot of a batch is loaded, before anything is computed."""
    missing = [slot for slot in slots.tolist() if slot not in loaded]
    assert not missing, f"slots {missing} are not loaded"
