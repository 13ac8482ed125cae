"""Backends by name.

Responsible for the one place that knows every backend. Must never import torch unless the torch
backend is asked for. Called by the shard's actor and by whoever prices slots.
"""

from __future__ import annotations

from typing import Literal, assert_never

from moe_serve.shard.compute.base import ComputeBackend, ExpertSpec
from moe_serve.shard.compute.emulated_backend import EmulatedBackend
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from placement.topology import DeviceProfile

BackendName = Literal["numpy", "torch", "emulated"]


def build_backend(
    name: BackendName,
    spec: ExpertSpec,
    *,
    device: str = "cpu",
    profile: DeviceProfile | None = None,
) -> ComputeBackend:
    """A backend ready for `warm_up` and `load_slot`. `device` concerns torch, `profile` emulated.

    Raises:
        ValueError: emulated without a profile; a device or size that the backend refuses.
    """
    match name:
        case "numpy":
            return NumpyBackend(spec)
        case "torch":
            from moe_serve.shard.compute.torch_backend import TorchBackend

            return TorchBackend(spec, device=device)
        case "emulated":
            if profile is None:
                raise ValueError(
                    "backend emulated: needs a device profile; declare one for the rank"
                )
            return EmulatedBackend(spec, profile)
        case _:
            assert_never(name)


def backend_derived_bytes(name: BackendName, spec: ExpertSpec) -> int:
    """Bytes a backend derives for each slot, without building it: `SlotPool`'s `derived_bytes`."""
    match name:
        case "numpy":
            return NumpyBackend.derived_bytes(spec)
        case "torch":
            return spec.held_bytes
        case "emulated":
            return EmulatedBackend.derived_bytes(spec)
        case _:
            assert_never(name)
