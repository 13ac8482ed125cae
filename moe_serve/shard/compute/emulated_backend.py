"""A backend without matrix products: slots, pairs and counts are real, the time is that of a
declared device.

Responsible for making a fleet of big devices testable on a small machine. Must never be mistaken
for one: `simulated` is True and every report repeats it. Called by the shard's core.

The rule of its output: an expert is the identity, so out[r] = (sum of the gates of row r's pairs) *
rows[r]. Counts, routing, combine and every loss or doubling of a contribution can be checked with
it; what the weights are cannot.

The rule of its time, for a forward of G slots with n_g pairs each on a device of `flops_per_s` and
`memory_bytes_per_s`:

    overhead_s + sum over g of max(n_g * flops_per_pair / flops_per_s, canonical_bytes /
    memory_bytes_per_s)

Example: 1 MiB experts at 1 GiB/s of memory, few pairs: 1/1024 s for each expert touched, however
few rows it sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moe_serve.shard.compute.base import ExpertSpec, SlotWork, check_forward, check_loaded
from moe_serve.shard.kernels import count_by_slot, scale_rows, warm
from placement.topology import DeviceProfile


class EmulatedBackend:
    """Declared time, identity experts. See `ComputeBackend` and the module's two rules.

    `profile` declares the device. `sleep` is called once a forward that takes any time, with the
    seconds it would take (less than what the emulation itself took is not possible and not
    corrected); give a function that records them to run in virtual time.

    Raises:
        ValueError: a rate of the profile is not positive.
    """

    name = "emulated"
    simulated = True

    def __init__(
        self,
        spec: ExpertSpec,
        profile: DeviceProfile,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        for field in ("flops_per_s", "memory_bytes_per_s"):
            if not getattr(profile, field) > 0:
                raise ValueError(
                    f"profile {profile.name!r}: {field} must be above 0 "
                    f"(got {getattr(profile, field)})"
                )
        self._spec = spec
        self._profile = profile
        self._sleep = sleep
        self._takes_time = (
            profile.overhead_s > 0
            or spec.flops_per_pair / profile.flops_per_s > 0
            or spec.canonical_bytes / profile.memory_bytes_per_s > 0
        )
        self._buffers: dict[int, NDArray[np.uint8]] = {}

    @property
    def loaded_bytes(self) -> int:
        """Nothing is derived: 0."""
        return 0

    @staticmethod
    def derived_bytes(spec: ExpertSpec) -> int:
        """Nothing is derived: 0."""
        return 0

    @staticmethod
    def slot_bytes(spec: ExpertSpec) -> int:
        """Canonical form in whole pages."""
        return spec.held_bytes

    def load_slot(self, slot: int, canonical_buffer: NDArray[np.uint8]) -> None:
        """Keep a view of the buffer. See `ComputeBackend`."""
        assert canonical_buffer.shape == (self._spec.canonical_bytes,), canonical_buffer.shape
        self._buffers[slot] = canonical_buffer

    def unload_slot(self, slot: int) -> None:
        """Drop the view. See `ComputeBackend`."""
        del self._buffers[slot]

    def canonical_bytes(self, slot: int) -> NDArray[np.uint8]:
        """The buffer itself. See `ComputeBackend`."""
        return self._buffers[slot]

    def forward(
        self,
        rows: NDArray[np.float32],
        pair_row: NDArray[np.int32],
        pair_slot: NDArray[np.int32],
        pair_gate: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> SlotWork:
        """Identity experts, declared seconds by slot; `overhead_s` is spread over the slots. See
        `ComputeBackend`.
        """
        check_forward(self._spec.hidden_size, rows, pair_row, (pair_slot, pair_gate), out)
        slots, pairs = count_by_slot(pair_slot)
        assert slots.size or not pair_slot.size, f"pair_slot {int(pair_slot.min())}"
        check_loaded(slots, self._buffers)
        scale_rows(rows, pair_row, pair_gate, out)
        seconds = self._seconds(pairs)
        needed_s = float(seconds.sum()) if self._takes_time else 0.0
        if needed_s > 0.0:
            # Even a sleep of no time gives the processor away.
            self._sleep(needed_s)
        return SlotWork(slots=slots, pairs=pairs, seconds=seconds)

    def warm_up(self) -> None:
        """Run the compiled loops once. See `ComputeBackend`."""
        warm()

    def _seconds(self, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
        if not pairs.size or not self._takes_time:
            return np.zeros(pairs.size)
        profile, spec = self._profile, self._spec
        compute_s = pairs * spec.flops_per_pair / profile.flops_per_s
        memory_s = spec.canonical_bytes / profile.memory_bytes_per_s
        seconds: NDArray[np.float64] = np.maximum(compute_s, memory_s)
        return seconds + profile.overhead_s / pairs.size
