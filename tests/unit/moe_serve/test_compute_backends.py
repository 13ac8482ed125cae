"""What is particular to one backend: chunks, declared time, device slabs, paths, prices."""

from __future__ import annotations

import numpy as np
import pytest

from moe_serve.shard.compute import numpy_backend
from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.compute.build import backend_derived_bytes, build_backend
from moe_serve.shard.compute.emulated_backend import EmulatedBackend
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from moe_serve.shard.compute.torch_backend import TorchBackend
from moe_serve.shard.pages import PAGE_BYTES
from moe_serve.shard.rows import from_float32
from placement.topology import DeviceProfile

SPEC = ExpertSpec(hidden_size=32, intermediate_size=16)
PROFILE = DeviceProfile(
    name="slow",
    flops_per_s=1e6,
    memory_bytes_per_s=1e6,
    copy_bytes_per_s=1e6,
    overhead_s=0.5,
)


def _blob(spec: ExpertSpec, seed: int = 1) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(spec.elements).astype(np.float32) * 0.1
    return from_float32(values, spec.dtype).view(np.uint8).copy()


def _forward(backend, pair_row, pair_slot, num_rows):  # type: ignore[no-untyped-def]
    rows = np.random.default_rng(2).standard_normal((num_rows, 32)).astype(np.float32)
    out = np.empty_like(rows)
    work = backend.forward(
        rows,
        np.array(pair_row, np.int32),
        np.array(pair_slot, np.int32),
        np.ones(len(pair_row), np.float32),
        out,
    )
    return rows, out, work


class Ticks:
    """A clock that says 0, 1, 2, ... seconds."""

    def __init__(self) -> None:
        self.now_s = -1.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_spec_knows_its_sizes_and_refuses_nonsense() -> None:
    spec = ExpertSpec(32, 16, "bfloat16")
    assert (spec.elements, spec.gate_up_elements) == (1536, 1024)
    assert (spec.canonical_bytes, spec.held_bytes) == (3072, PAGE_BYTES)
    assert spec.flops_per_pair == 6 * 32 * 16
    with pytest.raises(ValueError, match="hidden_size"):
        ExpertSpec(0, 16)
    with pytest.raises(ValueError, match="intermediate_size"):
        ExpertSpec(32, 0)
    with pytest.raises(ValueError, match="dtype"):
        ExpertSpec(32, 16, "int8")  # type: ignore[arg-type]


def test_numpy_computes_a_group_longer_than_a_chunk() -> None:
    backend = NumpyBackend(SPEC)
    backend.load_slot(0, _blob(SPEC))
    count = 2 * numpy_backend.CHUNK_ROWS + 5
    rows, out, work = _forward(backend, range(count), [0] * count, count)
    assert work.pairs.tolist() == [count]
    last = np.empty((1, 32), np.float32)
    index = np.zeros(1, np.int32)
    backend.forward(rows[-1:].copy(), index, index, np.ones(1, np.float32), last)
    assert np.allclose(out[-1:], last, rtol=1e-5, atol=1e-6)
    assert out.any(axis=1).all()


def test_numpy_measures_each_slot() -> None:
    backend = NumpyBackend(SPEC, clock=Ticks())
    for slot in (1, 4):
        backend.load_slot(slot, _blob(SPEC, slot))
    _, _, work = _forward(backend, [0, 0], [4, 1], 1)
    assert work.seconds.tolist() == [1.0, 1.0]


def test_numpy_float32_computes_from_the_buffer_itself() -> None:
    """Nothing is copied: poisoning the buffer poisons the result."""
    backend, blob = NumpyBackend(SPEC), _blob(SPEC)
    backend.load_slot(0, blob)
    assert np.shares_memory(backend.canonical_bytes(0), blob)
    blob[:] = 0
    _, out, _ = _forward(backend, [0], [0], 1)
    assert not out.any()


def test_numpy_16_bit_reads_back_what_it_computes_with() -> None:
    spec = ExpertSpec(32, 16, "bfloat16")
    backend, blob = NumpyBackend(spec), _blob(spec)
    original = blob.tobytes()
    backend.load_slot(0, blob)
    blob[:] = 0
    assert backend.canonical_bytes(0).tobytes() == original


def test_emulated_time_is_declared() -> None:
    """3072 operations a pair and 6144 bytes an expert, both at 1e6/s; 0.5 s overhead."""
    slept: list[float] = []
    backend = EmulatedBackend(SPEC, PROFILE, slept.append)
    for slot in (0, 2):
        backend.load_slot(slot, _blob(SPEC))
    _, _, work = _forward(backend, [0, 1, 2, 3], [0, 2, 2, 2], 4)
    assert work.seconds.tolist() == pytest.approx([0.25 + 0.006144, 0.25 + 0.009216])
    assert slept == [pytest.approx(0.51536)]


def test_emulated_output_is_the_row_times_its_gates() -> None:
    backend = EmulatedBackend(SPEC, PROFILE, lambda _: None)
    backend.load_slot(0, _blob(SPEC))
    rows, out, _ = _forward(backend, [0, 0, 2], [0, 0, 0], 3)
    assert np.array_equal(out, rows * np.array([[2], [0], [1]], np.float32))


def test_emulated_does_not_wait_for_nothing() -> None:
    slept: list[float] = []
    _forward(EmulatedBackend(SPEC, PROFILE, slept.append), [], [], 2)
    assert slept == []


@pytest.mark.parametrize("field", ["flops_per_s", "memory_bytes_per_s"])
def test_emulated_refuses_a_profile_without_rates(field: str) -> None:
    sizes = {"flops_per_s": 1.0, "memory_bytes_per_s": 1.0, "copy_bytes_per_s": 1.0, field: 0.0}
    with pytest.raises(ValueError, match=f"'flat': {field}"):
        EmulatedBackend(SPEC, DeviceProfile(name="flat", **sizes))


def test_torch_takes_and_returns_device_memory_by_slab() -> None:
    backend = TorchBackend(SPEC, slab_slots=4)
    slab_bytes = 4 * SPEC.canonical_bytes
    for slot in (0, 3, 5):
        backend.load_slot(slot, _blob(SPEC, slot))
    assert backend.loaded_bytes == 2 * slab_bytes
    backend.unload_slot(5)
    backend.unload_slot(0)
    assert backend.loaded_bytes == slab_bytes
    assert backend.canonical_bytes(3).tobytes() == _blob(SPEC, 3).tobytes()
    backend.unload_slot(3)
    assert backend.loaded_bytes == 0


def test_torch_with_slabs_of_one_slot_holds_exactly_the_loaded_slots() -> None:
    backend = TorchBackend(SPEC)
    backend.load_slot(900, _blob(SPEC))
    assert backend.loaded_bytes == SPEC.canonical_bytes
    assert backend.derived_bytes(SPEC) >= SPEC.canonical_bytes


def test_torch_shares_its_seconds_out_by_blocks_of_rows() -> None:
    backend = TorchBackend(SPEC, clock=Ticks())
    for slot in (0, 1):
        backend.load_slot(slot, _blob(SPEC))
    _, _, work = _forward(backend, range(33), [0] + [1] * 32, 33)
    assert work.pairs.tolist() == [1, 32]
    assert work.seconds.tolist() == pytest.approx([1 / 3, 2 / 3])


def test_torch_loads_a_read_only_buffer() -> None:
    backend, blob = TorchBackend(SPEC), _blob(SPEC)
    blob.flags.writeable = False
    backend.load_slot(0, blob)
    assert backend.canonical_bytes(0).tobytes() == blob.tobytes()


def test_torch_warm_up_after_a_slot_is_our_bug() -> None:
    backend = TorchBackend(SPEC)
    backend.load_slot(0, _blob(SPEC))
    with pytest.raises(AssertionError, match="warm_up"):
        backend.warm_up()


def test_torch_refuses_a_path_it_cannot_take_and_says_why() -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        TorchBackend(ExpertSpec(33, 16), path="grouped")
    with pytest.raises(ValueError, match="above 1023 groups"):
        TorchBackend(SPEC, path="grouped", slab_slots=1024)
    with pytest.raises(ValueError, match="path: must be"):
        TorchBackend(SPEC, path="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slab_slots"):
        TorchBackend(SPEC, slab_slots=0)
    assert TorchBackend(SPEC).path == "loop"


@pytest.mark.parametrize("name", ["numpy", "torch", "emulated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backends_by_name_price_slots_as_they_do_themselves(name: str, dtype: str) -> None:
    spec = ExpertSpec(32, 16, dtype)  # type: ignore[arg-type]
    backend = build_backend(name, spec, profile=PROFILE)  # type: ignore[arg-type]
    assert backend.name == name
    assert backend_derived_bytes(name, spec) == backend.derived_bytes(spec)  # type: ignore[arg-type]


def test_emulated_needs_a_profile() -> None:
    with pytest.raises(ValueError, match="device profile"):
        build_backend("emulated", SPEC)
