"""Expert weights on a torch device, in slabs of consecutive slots.

Responsible for device memory of weights: taking a slab when its first slot is loaded, giving it
back with its last. Must never compute. Called by the torch backend.

Slot s lies at place s % slab_slots of slab s // slab_slots, so the slots of a slab have one stride
and can be handed to a grouped matrix product as they are.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.pages import Pages
from moe_serve.weights.dtypes import ServingDtype


def torch_dtype(dtype: ServingDtype) -> torch.dtype:
    """The torch dtype of a serving dtype."""
    return {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
    }[dtype]


@dataclass(slots=True)
class _Slab:
    weights: torch.Tensor
    """[slab_slots, elements] in the serving dtype."""

    pages: Pages | None
    """The memory behind `weights` on a CPU."""

    loaded: set[int] = field(default_factory=set)


class DeviceSlabs:
    """Weights of loaded slots on `device`."""

    def __init__(self, spec: ExpertSpec, device: torch.device, slab_slots: int) -> None:
        self._spec = spec
        self._device = device
        self._slab_slots = slab_slots
        self._slabs: dict[int, _Slab] = {}
        # Copies for several slots may run at once, and their slots may share a slab.
        self._lock = threading.Lock()
        # Weights go up while batches are computed; on the compute stream a copy would queue behind
        # them.
        self._copies = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )

    @property
    def reserved_bytes(self) -> int:
        """Device bytes of all slabs; with slabs of one slot, exactly those of the loaded slots."""
        slot_bytes = self._spec.canonical_bytes
        return len(self._slabs) * self._slab_slots * slot_bytes

    def __contains__(self, slot: object) -> bool:
        if not isinstance(slot, int):
            return False
        slab = self._slabs.get(slot // self._slab_slots)
        return slab is not None and slot in slab.loaded

    def load(self, slot: int, canonical_buffer: NDArray[np.uint8]) -> None:
        """Copy canonical bytes to the slot's place; complete on the device on return. A slot whose
        bytes did not get there is not loaded, and holds no memory."""
        slab_id, place = divmod(slot, self._slab_slots)
        with self._lock:
            slab = self._slabs.get(slab_id)
            if slab is None:
                slab = self._new_slab()
                self._slabs[slab_id] = slab
            # Loaded before its bytes are there: an unload of its neighbour must not free the slab.
            slab.loaded.add(slot)
        try:
            self._fill(slab.weights[place].view(torch.uint8), canonical_buffer)
        except BaseException:
            self.unload(slot)
            raise

    def _fill(self, target: torch.Tensor, canonical_buffer: NDArray[np.uint8]) -> None:
        # torch warns about tensors over read-only memory, even when they are only read.
        source = torch.from_numpy(np.require(canonical_buffer, requirements=["C", "W"]))
        if self._copies is None:
            target.copy_(source)
        else:
            with torch.cuda.stream(self._copies):
                target.copy_(source)
            self._copies.synchronize()

    def unload(self, slot: int) -> None:
        """Forget a slot; its slab goes back to the device when no other slot of it is loaded."""
        slab_id = slot // self._slab_slots
        with self._lock:
            slab = self._slabs[slab_id]
            slab.loaded.remove(slot)
            if slab.loaded:
                return
            del self._slabs[slab_id]
        if slab.pages is not None:
            slab.pages.free()
        del slab
        if self._device.type == "cuda":
            # Without it the memory would stay with this process's allocator, and the budget would
            # be a fiction.
            torch.cuda.empty_cache()

    def read(self, slot: int) -> NDArray[np.uint8]:
        """Canonical bytes of a loaded slot as they are on the device; a new array on CUDA, a view
        on a CPU.
        """
        weights = self._weights(slot).view(torch.uint8)
        if self._copies is None:
            return weights.numpy()
        with torch.cuda.stream(self._copies):
            host: torch.Tensor = weights.cpu()
        return host.numpy()

    def gate_up(self, slot: int) -> torch.Tensor:
        """Fused gate|up of a loaded slot, [H, 2F]."""
        return self._weights(slot)[: self._spec.gate_up_elements].view(
            self._spec.hidden_size, 2 * self._spec.intermediate_size
        )

    def down(self, slot: int) -> torch.Tensor:
        """Down matrix of a loaded slot, [F, H]."""
        return self._weights(slot)[self._spec.gate_up_elements :].view(
            self._spec.intermediate_size, self._spec.hidden_size
        )

    def address(self, slot: int) -> int:
        """Device address of a loaded slot's canonical form."""
        return self._weights(slot).data_ptr()

    def slab_gate_up(self, slab_id: int) -> torch.Tensor:
        """Fused gate|up of every place of a slab, a view [slab_slots, H, 2F]; places without a slot
        hold anything.
        """
        spec = self._spec
        weights = self._slabs[slab_id].weights[:, : spec.gate_up_elements]
        return weights.view(self._slab_slots, spec.hidden_size, 2 * spec.intermediate_size)

    def slab_down(self, slab_id: int) -> torch.Tensor:
        """Down matrix of every place of a slab, a view [slab_slots, F, H]; places without a slot
        hold anything.
        """
        spec = self._spec
        weights = self._slabs[slab_id].weights[:, spec.gate_up_elements :]
        return weights.view(self._slab_slots, spec.intermediate_size, spec.hidden_size)

    def _weights(self, slot: int) -> torch.Tensor:
        slab_id, place = divmod(slot, self._slab_slots)
        slab = self._slabs.get(slab_id)
        assert slab is not None, f"slot {slot} is not loaded"
        assert slot in slab.loaded, f"slot {slot} is not loaded"
        return slab.weights[place]

    def _new_slab(self) -> _Slab:
        shape = (self._slab_slots, self._spec.elements)
        dtype = torch_dtype(self._spec.dtype)
        if self._device.type == "cuda":
            return _Slab(weights=torch.empty(shape, dtype=dtype, device=self._device), pages=None)
        slab_bytes = self._slab_slots * self._spec.canonical_bytes
        pages = Pages(slab_bytes)
        weights = torch.from_numpy(pages.array[:slab_bytes]).view(dtype).view(shape)
        return _Slab(weights=weights, pages=pages)
