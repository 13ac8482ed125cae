"""One suite for every compute backend, against a float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.shard.compute.base import ComputeBackend, ExpertSpec, SlotWork
from moe_serve.shard.compute.emulated_backend import EmulatedBackend
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from moe_serve.shard.compute.torch_backend import TorchBackend
from moe_serve.shard.rows import from_float32, raw_dtype, to_float32
from placement.topology import DeviceProfile

H, F = 48, 40
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}
PROFILE = DeviceProfile(
    name="declared", flops_per_s=1e12, memory_bytes_per_s=1e11, copy_bytes_per_s=1e9
)


CUDA = torch.cuda.is_available()


@dataclass(frozen=True)
class Kind:
    """A backend under test: how to build it, and whether experts are the identity in it."""

    name: str
    dtype: str
    build: Callable[[ExpertSpec], ComputeBackend]
    identity: bool = False


def _torch(device: str, path: str, slab_slots: int = 1) -> Callable[[ExpertSpec], ComputeBackend]:
    return lambda spec: TorchBackend(spec, device=device, path=path, slab_slots=slab_slots)


KINDS = [
    *[Kind("numpy", dtype, NumpyBackend) for dtype in TOLERANCE],
    *[Kind("torch-loop", dtype, _torch("cpu", "loop")) for dtype in TOLERANCE],
    *[Kind("torch-slabs", dtype, _torch("cpu", "loop", 4)) for dtype in ("float32",)],
    *[Kind("torch-grouped", dtype, _torch("cpu", "grouped", 4)) for dtype in TOLERANCE],
    Kind("emulated", "float32", lambda spec: EmulatedBackend(spec, PROFILE, _no_wait), True),
]
CUDA_KINDS = [
    *[Kind("cuda-loop", dtype, _torch("cuda", "loop")) for dtype in TOLERANCE],
    *[Kind("cuda-triton", dtype, _torch("cuda", "triton")) for dtype in TOLERANCE],
    Kind("cuda-grouped", "bfloat16", _torch("cuda", "grouped", 4)),
]


def _no_wait(seconds: float) -> None:
    assert seconds >= 0


@pytest.fixture(
    params=[
        *KINDS,
        # Not listed as skipped without a device: that would be two hundred lines saying the same.
        *[pytest.param(kind, marks=pytest.mark.gpu) for kind in CUDA_KINDS if CUDA],
    ],
    ids=lambda kind: f"{kind.name}-{kind.dtype}",
)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


class Rig:
    """A backend with random experts, and the oracle for it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.spec = ExpertSpec(H, F, kind.dtype)
        self.backend = kind.build(self.spec)
        self.rng = np.random.default_rng(7)
        self.weights: dict[int, np.ndarray[Any, Any]] = {}

    def blob(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return from_float32(values, self.spec.dtype).view(np.uint8).copy()

    def random_values(self) -> np.ndarray[Any, Any]:
        return (self.rng.standard_normal(self.spec.elements) * 0.3).astype(np.float32)

    def load(self, slot: int, values: np.ndarray[Any, Any] | None = None) -> None:
        blob = self.blob(self.random_values() if values is None else values)
        self.backend.load_slot(slot, blob)
        self.weights[slot] = to_float32(blob.view(raw_dtype(self.spec.dtype)), self.spec.dtype)

    def rows(self, count: int) -> np.ndarray[Any, Any]:
        return self.rng.standard_normal((count, H)).astype(np.float32)

    def forward(self, rows: Any, pairs: list[tuple[int, int, float]]) -> tuple[Any, SlotWork]:
        out = np.full((len(rows), H), 9e9, np.float32)
        work = self.backend.forward(
            rows,
            np.array([p[0] for p in pairs], np.int32),
            np.array([p[1] for p in pairs], np.int32),
            np.array([p[2] for p in pairs], np.float32),
            out,
        )
        return out, work

    def oracle(self, rows: Any, pairs: list[tuple[int, int, float]]) -> Any:
        out = np.zeros((len(rows), H))
        for row, slot, gate in pairs:
            out[row] += np.float64(np.float32(gate)) * self._expert(slot, rows[row])
        return out

    def _expert(self, slot: int, row: Any) -> Any:
        x = row.astype(np.float64)
        if self.kind.identity:
            return x
        values = self.weights[slot].astype(np.float64)
        gate_up = values[: H * 2 * F].reshape(H, 2 * F)
        gate, up = x @ gate_up[:, :F], x @ gate_up[:, F:]
        return (gate / (1 + np.exp(-gate)) * up) @ values[H * 2 * F :].reshape(F, H)

    def check(self, rows: Any, pairs: list[tuple[int, int, float]]) -> SlotWork:
        out, work = self.forward(rows, pairs)
        expected = self.oracle(rows, pairs)
        scale = max(np.abs(expected).max(initial=0.0), 1e-30)
        assert np.abs(out - expected).max(initial=0.0) / scale <= TOLERANCE[self.kind.dtype]
        return work


def test_random_batch_equals_the_oracle(rig: Rig) -> None:
    for slot in (0, 1, 3, 9):
        rig.load(slot)
    pairs = [(r, s, 0.1 + 0.2 * s + 0.01 * r) for r in range(17) for s in (9, 0, 3, 1)[: 1 + r % 4]]
    work = rig.check(rig.rows(17), pairs)
    assert work.slots.tolist() == [0, 1, 3, 9]
    assert work.pairs.tolist() == [sum(p[1] == s for p in pairs) for s in (0, 1, 3, 9)]
    assert work.seconds.shape == (4,)
    assert (work.seconds > 0).all()


def test_no_rows(rig: Rig) -> None:
    rig.load(0)
    work = rig.check(rig.rows(0), [])
    assert work.slots.size == work.pairs.size == work.seconds.size == 0


def test_rows_without_pairs_become_zero(rig: Rig) -> None:
    rig.load(0)
    rows = rig.rows(3)
    out, _ = rig.forward(rows, [])
    assert not out.any()
    rows[0] = np.nan
    out, _ = rig.forward(rows, [(1, 0, 1.0)])
    assert not out[[0, 2]].any()
    assert out[1].any()


def test_one_pair(rig: Rig) -> None:
    rig.load(5)
    work = rig.check(rig.rows(1), [(0, 5, 0.75)])
    assert (work.slots.tolist(), work.pairs.tolist()) == ([5], [1])


def test_a_slot_of_many_rows_and_a_row_of_one_slot_twice(rig: Rig) -> None:
    rig.load(2)
    work = rig.check(rig.rows(70), [(r, 2, 1.0) for r in range(70)] + [(4, 2, 0.5)])
    assert work.pairs.tolist() == [71]


def test_one_row_of_many_slots(rig: Rig) -> None:
    for slot in range(40):
        rig.load(slot)
    rig.check(rig.rows(2), [(1, slot, 0.01 * slot) for slot in reversed(range(40))])


def test_gates_weigh_and_may_be_zero_or_negative(rig: Rig) -> None:
    rig.load(0)
    rig.load(1)
    rig.check(rig.rows(3), [(0, 0, 0.0), (1, 0, -2.0), (1, 1, 3.0), (2, 1, 1e-3)])


def test_a_slot_loaded_again_computes_with_the_new_weights(rig: Rig) -> None:
    for _ in range(2):
        rig.load(3)
        rig.check(rig.rows(4), [(r, 3, 1.0) for r in range(4)])
    rig.backend.unload_slot(3)
    rig.load(3)
    rig.check(rig.rows(4), [(r, 3, 1.0) for r in range(4)])


def test_marker_weights_name_the_expert_that_answered(rig: Rig) -> None:
    """Expert e is (e + 1) times expert 0."""
    base = rig.random_values()
    for expert in range(6):
        values = base.copy()
        values[H * 2 * F :] *= expert + 1
        rig.load(expert, values)
    rows = np.repeat(rig.rows(1), 6, axis=0)
    out, _ = rig.forward(rows, [(r, r, 1.0) for r in range(6)])
    factor = out[:, 0] / out[0, 0]
    expected = np.ones(6) if rig.kind.identity else np.arange(1, 7)
    assert np.allclose(factor, expected, rtol=TOLERANCE[rig.kind.dtype])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_touches_no_other(rig: Rig, bad: float) -> None:
    rig.load(0)
    rig.load(1)
    rows = rig.rows(20)
    pairs = [(r, s, 1.0) for r in range(20) for s in (0, 1)]
    clean, _ = rig.forward(rows, pairs)
    rows[7, 3] = bad
    out, _ = rig.forward(rows, pairs)
    others = np.arange(20) != 7
    assert np.array_equal(out[others], clean[others])
    assert not np.isfinite(out[7]).all()


def test_same_batch_same_bits(rig: Rig) -> None:
    for slot in range(5):
        rig.load(slot)
    rows = rig.rows(33)
    pairs = [(r, (r * k) % 5, 0.3) for r in range(33) for k in (1, 2, 3)]
    first, _ = rig.forward(rows, pairs)
    second, _ = rig.forward(rows, pairs)
    assert first.tobytes() == second.tobytes()


def test_read_only_input_is_served(rig: Rig) -> None:
    rig.load(0)
    rows = np.frombuffer(rig.rows(2).tobytes(), np.float32).reshape(2, H)
    out = np.empty((2, H), np.float32)
    index = np.frombuffer(np.array([1, 0], np.int32).tobytes(), np.int32)
    gates = np.frombuffer(np.ones(2, np.float32).tobytes(), np.float32)
    rig.backend.forward(rows, index, np.frombuffer(bytes(8), np.int32), gates, out)
    expected = rig.oracle(rows, [(1, 0, 1.0), (0, 0, 1.0)])
    assert np.abs(out - expected).max() / np.abs(expected).max() <= TOLERANCE[rig.kind.dtype]


def test_canonical_bytes_are_read_back(rig: Rig) -> None:
    first, second = rig.blob(rig.random_values()), rig.blob(rig.random_values())
    rig.backend.load_slot(1, first)
    rig.backend.load_slot(2, second)
    assert bytes(rig.backend.canonical_bytes(1)) == bytes(first)
    assert bytes(rig.backend.canonical_bytes(2)) == bytes(second)


def test_a_slot_costs_its_canonical_and_derived_bytes(rig: Rig) -> None:
    spec = rig.spec
    derived = rig.backend.derived_bytes(spec)
    assert rig.backend.slot_bytes(spec) == spec.held_bytes + derived
    assert spec.held_bytes >= spec.canonical_bytes
    if rig.kind.name == "numpy":
        assert (derived == 0) if spec.dtype == "float32" else (derived >= 4 * spec.elements)


def test_an_unloaded_slot_is_not_served(rig: Rig) -> None:
    rig.load(0)
    rig.load(1)
    rig.backend.unload_slot(1)
    with pytest.raises(AssertionError, match=r"slots \[1\] are not loaded"):
        rig.forward(rig.rows(1), [(0, 0, 1.0), (0, 1, 1.0)])
    rig.check(rig.rows(1), [(0, 0, 1.0)])


def test_a_pair_of_a_row_that_is_not_there_is_our_bug(rig: Rig) -> None:
    rig.load(0)
    for row in (-1, 2):
        with pytest.raises(AssertionError, match="pair_row"):
            rig.forward(rig.rows(2), [(row, 0, 1.0)])
    with pytest.raises(AssertionError, match="pair_slot"):
        rig.forward(rig.rows(2), [(0, -1, 1.0)])


def test_warm_up_comes_first_and_leaves_no_slot(rig: Rig) -> None:
    rig.backend.warm_up()
    with pytest.raises(AssertionError, match="not loaded"):
        rig.forward(rig.rows(1), [(0, 0, 1.0)])
    rig.load(0)
    rig.check(rig.rows(1), [(0, 0, 1.0)])


def test_only_the_emulated_backend_is_simulated(rig: Rig) -> None:
    assert rig.backend.simulated == rig.kind.identity
    assert rig.backend.name == rig.kind.name.split("-")[0].replace("cuda", "torch")
