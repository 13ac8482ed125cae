"""The torch backend: expert computation on a CUDA device in the serving dtype; the same code runs
on a CPU for tests.

Responsible for moving rows to the device, computing parts in one of three ways, and combining them
in a fixed order. Must never gather weights, and never lets a batch wait for an allocation it could
keep. Called by the shard's core.

Ways (`path`): `triton`, a kernel that finds weights by slot, for any slots; `grouped`, torch's
grouped matrix product over slabs of consecutive slots, within its limit of groups; `loop`, two
products a slot, for everything else. On a CPU prefer the numpy backend: torch has no fast 16-bit
product there.

Device memory of a slot is `derived_bytes`; its canonical form stays in the host's slot pool as
well, as source of copies to other ranks. With `slab_slots` = 1 device memory is exactly that of the
loaded slots; more lets `grouped` run, and takes whole slabs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from moe_serve.shard.compute.base import ExpertSpec, SlotWork, check_forward, check_loaded
from moe_serve.shard.compute.batch_tables import BatchTables, batch_tables, row_blocks
from moe_serve.shard.compute.device_slabs import DeviceSlabs, torch_dtype
from moe_serve.shard.compute.order import PairOrder
from moe_serve.shard.compute.torch_memory import memory_errors
from moe_serve.shard.compute.torch_paths import GROUP_LIMIT, grouped_parts, loop_parts
from moe_serve.shard.compute.transfer import Transfer
from moe_serve.shard.kernels import warm

Path = Literal["loop", "grouped", "triton"]

TIME_BLOCK_ROWS = 16
"""Unit by which a batch's seconds are shared out among its slots: up to this many rows cost what
one row costs.
"""


class TorchBackend:
    """Torch on `device` ("cpu", "cuda", "cuda:1") in the serving dtype. See `ComputeBackend`.

    `path` is one of the three ways, or "auto": on CUDA triton where installed, else grouped where
    slabs and dtype allow it, else loop. `clock` gives monotonic seconds.

    Raises:
        ValueError: a path that this device, dtype, torch or slab size does not support; says which.
    """

    name = "torch"
    simulated = False

    def __init__(
        self,
        spec: ExpertSpec,
        device: str = "cpu",
        path: Path | Literal["auto"] = "auto",
        slab_slots: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if slab_slots < 1:
            raise ValueError(f"slab_slots: must be at least 1 (got {slab_slots})")
        self._spec = spec
        self._device = torch.device(device)
        self._dtype = torch_dtype(spec.dtype)
        self._slab_slots = slab_slots
        self._clock = clock
        self.path: Path = _resolve_path(spec, self._device, path, slab_slots)
        self._slabs = DeviceSlabs(spec, self._device, slab_slots)
        self._transfer = Transfer(self._device)

    @staticmethod
    def derived_bytes(spec: ExpertSpec) -> int:
        """Bytes of the form on the device, counted like the canonical one."""
        return spec.held_bytes

    @staticmethod
    def slot_bytes(spec: ExpertSpec) -> int:
        """Canonical form on the host and its form on the device."""
        return spec.held_bytes + TorchBackend.derived_bytes(spec)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all slabs on the device."""
        return self._slabs.reserved_bytes

    def load_slot(self, slot: int, canonical_buffer: NDArray[np.uint8]) -> None:
        """Copy the canonical bytes to the device. See `ComputeBackend`."""
        assert canonical_buffer.shape == (self._spec.canonical_bytes,), canonical_buffer.shape
        with memory_errors():
            self._slabs.load(slot, canonical_buffer)

    def unload_slot(self, slot: int) -> None:
        """Free the slot's place on the device. See `ComputeBackend`."""
        self._slabs.unload(slot)

    def canonical_bytes(self, slot: int) -> NDArray[np.uint8]:
        """Bytes read back from the device. See `ComputeBackend`."""
        with memory_errors():
            return self._slabs.read(slot)

    def forward(
        self,
        rows: NDArray[np.float32],
        pair_row: NDArray[np.int32],
        pair_slot: NDArray[np.int32],
        pair_gate: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> SlotWork:
        """One batch; its seconds are shared out among slots by blocks of rows. See
        `ComputeBackend`.
        """
        check_forward(self._spec.hidden_size, rows, pair_row, (pair_slot, pair_gate), out)
        begun_s = self._clock()
        tables = batch_tables(rows.shape[0], pair_row, pair_slot, pair_gate)
        check_loaded(tables.order.slots, self._slabs)
        if pair_row.shape[0]:
            with memory_errors(), torch.inference_mode(), self._transfer.stream():
                self._transfer.fetch(self._combined(rows, tables), out)
        else:
            out.fill(0.0)
        pairs = tables.order.pairs
        blocks = -(-pairs // TIME_BLOCK_ROWS)
        seconds = blocks * np.float64((self._clock() - begun_s) / max(int(blocks.sum()), 1))
        return SlotWork(slots=tables.order.slots, pairs=pairs, seconds=seconds)

    def warm_up(self) -> None:
        """Compute one row and a wide batch through an expert of zeros, loaded and unloaded again;
        call it before any slot.
        """
        warm()
        assert self._slabs.reserved_bytes == 0, "warm_up comes before the first load_slot"
        self.load_slot(0, np.zeros(self._spec.canonical_bytes, np.uint8))
        for num_rows in (1, 8 * TIME_BLOCK_ROWS):
            rows = np.zeros((num_rows, self._spec.hidden_size), np.float32)
            index = np.arange(num_rows, dtype=np.int32)
            gates = np.ones(num_rows, np.float32)
            self.forward(rows, index, np.zeros_like(index), gates, np.empty_like(rows))
        self.unload_slot(0)

    def _combined(self, rows: NDArray[np.float32], tables: BatchTables) -> torch.Tensor:
        """Partial sums on the device, float32 [R, H]."""
        order, combine = tables.order, tables.combine
        num_pairs = tables.row.shape[0]
        device_rows = self._transfer.rows(rows).to(self._dtype)
        int_tables = [tables.row, combine.part.T, combine.gate.T.view(np.int32)]
        # One row more than pairs: the zeros that padded entries of the combine table add.
        parts = torch.empty(
            (num_pairs + 1, self._spec.hidden_size), dtype=torch.float32, device=self._device
        )
        parts[num_pairs:].zero_()
        if self.path == "triton":
            pair_row, part, gate = self._triton(device_rows, order, int_tables, parts)
        else:
            pair_row, part, gate = self._transfer.tables(int_tables)
            sorted_rows = device_rows.index_select(0, pair_row)
            if self.path == "grouped":
                grouped_parts(sorted_rows, order, self._slabs, self._slab_slots, parts)
            else:
                loop_parts(sorted_rows, order, self._slabs, parts)
        total = torch.zeros(rows.shape, dtype=torch.float32, device=self._device)
        for column in range(combine.part.shape[1]):
            # Not fused into one gather of all columns: that would hold K times the memory of the
            # result.
            total.addcmul_(
                parts.index_select(0, part[column]), gate[column].view(torch.float32).unsqueeze(1)
            )
        return total

    def _triton(
        self,
        device_rows: torch.Tensor,
        order: PairOrder,
        int_tables: list[NDArray[np.int32]],
        parts: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Run the kernel; returns the first three tables on the device."""
        from moe_serve.shard.compute.triton_path import block_rows_for, triton_parts

        block_rows = block_rows_for(int(order.pairs.max()))
        blocks = row_blocks(order, block_rows)
        addresses = np.array([self._slabs.address(int(slot)) for slot in order.slots], np.int64)
        block_address = addresses[blocks.group]
        # Addresses go first: a view of eight-byte elements has to begin on one.
        address, *on_device = self._transfer.tables(
            [block_address.view(np.int32), *int_tables, blocks.begin, blocks.end]
        )
        pair_row, part, gate, begin, end = on_device
        triton_parts(
            self._spec,
            device_rows,
            pair_row,
            (begin, end, address.view(torch.int64)),
            block_rows,
            parts,
        )
        return [pair_row, part, gate]


def _resolve_path(
    spec: ExpertSpec, device: torch.device, path: Path | Literal["auto"], slab_slots: int
) -> Path:
    """The way to compute, checked against what is there."""
    if path != "auto" and path not in get_args(Path):
        raise ValueError(f"path: must be auto, {', '.join(get_args(Path))} (got {path!r})")
    no_triton = "" if find_spec("triton") else "triton is not installed"
    no_grouped = _why_not_grouped(spec, device, slab_slots)
    if path == "triton" and no_triton:
        raise ValueError(f"path: triton is not possible here: {no_triton}; use loop")
    if path == "grouped" and no_grouped:
        raise ValueError(f"path: grouped is not possible here: {no_grouped}; use loop")
    if path != "auto":
        return path
    if device.type != "cuda":
        return "loop"
    if not no_triton:
        return "triton"
    return "loop" if no_grouped or slab_slots == 1 else "grouped"


def _why_not_grouped(spec: ExpertSpec, device: torch.device, slab_slots: int) -> str:
    """Why grouped products cannot be used, or an empty string."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if slab_slots > GROUP_LIMIT:
        return f"slab_slots {slab_slots} is above {GROUP_LIMIT} groups"
    if device.type == "cuda" and spec.dtype != "bfloat16":
        return f"on CUDA it takes bfloat16, not {spec.dtype}"
    if spec.hidden_size % 8 or spec.intermediate_size % 8:
        return "hidden and intermediate size must be multiples of 8 (strides of 16 bytes)"
    return ""
