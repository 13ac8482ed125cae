"""Weights that are not those of the expert: something derived goes stale when experts move often, a
copy between different inner forms loses the conversion, two copies share a buffer, a checkpoint
lacks or renames what it should hold, another version's weights are taken for this one's."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_serve.router.checks import ForwardInput
from moe_serve.shard.assembly import Shard
from moe_serve.shard.compute.base import ComputeBackend, ExpertSpec
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from moe_serve.shard.compute.torch_backend import TorchBackend
from moe_serve.shard.served_model import ServedModel
from moe_serve.weights import Checkpoint
from moe_serve.weights.errors import WeightsError
from moe_serve.weights.reading import UNINTERRUPTED, Reading
from placement.messages.effects import (
    CopyExpert,
    CopySource,
    ReleaseSlot,
    ReserveSlot,
    VerifyExpert,
)
from placement.messages.events import SlotReleased, SlotReserved, StepFailed
from tests.checkpoint_builder import expert_name, tensors, write_checkpoint
from tests.fake_shards import HIDDEN
from tests.fakes.marker_experts import MarkerSource, add, marker_model, marker_shard
from tests.fakes.served import EXPERTS, LAYER, TOP_K, Served, a_request, serving

INNER = 8


def weights_of(layer: int, expert: int) -> NDArray[np.float32]:
    """Canonical elements of an expert: each its own, and sizes that differ a thousandfold, so that
    anything kept of one expert and used for another shows."""
    rng = np.random.default_rng(100 * layer + expert)
    scale = 10.0 ** (expert % 4 - 1.5)
    return (rng.standard_normal(3 * HIDDEN * INNER) * scale).astype(np.float32)


class OwnWeights(MarkerSource):
    """`weights_of` in place of markers."""

    def canonical(self, layer: int, expert: int) -> NDArray[np.uint8]:
        return weights_of(layer, expert).view(np.uint8)


def expert_output(layer: int, expert: int, rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Float64 output of one expert."""
    canonical = weights_of(layer, expert).astype(np.float64)
    gate_up = canonical[: 2 * HIDDEN * INNER].reshape(HIDDEN, 2 * INNER)
    down = canonical[2 * HIDDEN * INNER :].reshape(INNER, HIDDEN)
    inner = rows.astype(np.float64) @ gate_up
    gate, up = inner[:, :INNER], inner[:, INNER:]
    return (gate / (1 + np.exp(-gate)) * up) @ down


def check_all(request: ForwardInput, got: NDArray[np.float32]) -> None:
    """Within 1e-5 of the sum of sizes of what is added."""
    want = np.zeros(request.hidden.shape)
    size = np.full((len(want), 1), 1e-9)
    for k in range(TOP_K):
        for row, expert in enumerate(request.topk_ids[:, k].tolist()):
            part = request.gates[row, k] * expert_output(
                LAYER, expert, request.hidden[row : row + 1]
            )
            want[row] += part[0]
            size[row] += np.abs(part).max()
    assert np.all(np.abs(got - want) <= 1e-4 * size), np.abs(got - want).max()


BACKENDS: dict[str, Callable[[ServedModel], ComputeBackend]] = {
    "numpy": lambda model: NumpyBackend(model.expert),
    "torch, slot by slot": lambda model: TorchBackend(model.expert, device="cpu", path="loop"),
    "torch, in slabs": lambda model: TorchBackend(
        model.expert, device="cpu", path="grouped", slab_slots=4
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kinds", [("numpy",), ("torch, in slabs",), tuple(BACKENDS)])
async def test_experts_that_move_after_every_batch_keep_their_own_weights(
    kinds: tuple[str, ...],
) -> None:
    """Fifty moves, a batch after each: what a backend keeps beside the weights (sums, scales, other
    layouts) is that of the expert which is there now."""

    def backend(model: ServedModel, rank: int) -> ComputeBackend:
        return BACKENDS[kinds[rank % len(kinds)]](model)

    served = Served(3, copies=1, num_slots=5, backend=backend, source=OwnWeights, inner=INNER)
    rng = np.random.default_rng(1)
    async with serving(served) as (router,):
        for move in range(50):
            expert = move % EXPERTS
            old = served.ranks_of(expert)[0]
            goal = (old + 1 + int(rng.integers(2))) % 3
            served.fill(goal, expert)
            served.empty(old, expert)
            router.install_table(served.table())
            request = a_request(6, seed=move)
            check_all(request, (await router.forward(request, 10.0)).output)


class Twins:
    """Two shards with different backends, over loopback: the second may read no checkpoint."""

    def __init__(self, first: str, second: str) -> None:
        model = marker_model(layers=2, experts=EXPERTS, hidden=HIDDEN, inner=INNER)
        self.model = model

        def forbidden(_layer: int, _expert: int) -> None:
            raise OSError(13, "the target is not to read the checkpoint")

        self.shards: list[Shard] = [
            marker_shard(model=model, source=OwnWeights(model), backend=BACKENDS[first](model)),
            marker_shard(
                model=model,
                source=OwnWeights(model, forbidden),
                backend=BACKENDS[second](model),
                rank=1,
            ),
        ]
        self.addresses = [shard.start() for shard in self.shards]
        self.steps = 0

    def put(self, rank: int, slot: int, expert: int, source: CopySource) -> int:
        self.steps += 1
        return add(self.shards[rank], slot, expert, layer=LAYER, step_id=self.steps, source=source)

    def empty(self) -> None:
        """Release everything on both."""
        for shard in self.shards:
            for held in shard.describe().resident:
                self.steps += 1
                command = ReleaseSlot(
                    step_id=self.steps,
                    rank=shard.settings.rank,
                    incarnation=1,
                    slot=held.slot,
                    slot_tag=held.tag,
                    layer=held.layer,
                    expert=held.expert,
                )
                assert isinstance(shard.execute(1, command), SlotReleased)

    def from_(self, rank: int, slot: int, tag: int) -> CopySource:
        return CopySource(rank=rank, slot=slot, slot_tag=tag, address=self.addresses[rank])

    def check(self, rank: int, slot: int, expert: int) -> None:
        backend = self.shards[rank].core.backend
        held = np.asarray(backend.canonical_bytes(slot))[: self.model.expert.canonical_bytes]
        assert held.tobytes() == weights_of(LAYER, expert).tobytes()
        rows = np.random.default_rng(expert).standard_normal((3, HIDDEN)).astype(np.float32)
        out = np.zeros_like(rows)
        three = np.arange(3, dtype=np.int32)
        backend.forward(rows, three, np.full(3, slot, np.int32), np.ones(3, np.float32), out)
        want = expert_output(LAYER, expert, rows)
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())

    def stop(self) -> None:
        for shard in self.shards:
            shard.stop()


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("first", "second"), [("numpy", "torch, in slabs"), ("torch, slot by slot", "numpy")]
)
def test_an_expert_comes_back_from_another_inner_form_as_it_went(first: str, second: str) -> None:
    """From one to the other and back, each expert twice: bytes in the common form and outputs are
    what they were."""
    twins = Twins(first, second)
    try:
        for expert in range(4):
            slot = expert
            tag = twins.put(0, slot, expert, CopySource(rank=-1))
            for back in range(2):
                there = twins.put(1, back, expert, twins.from_(0, slot, tag))
                twins.check(1, back, expert)
                slot = 4 + back
                tag = twins.put(0, slot, expert, twins.from_(1, back, there))
                twins.check(0, slot, expert)
            twins.empty()
    finally:
        twins.stop()


class SlowToLoad(NumpyBackend):
    """Takes its time between the arrival of the bytes and their use, and says how many loads run at
    once."""

    def __init__(self, spec: ExpertSpec) -> None:
        super().__init__(spec)
        self.loading = 0
        self.most = 0
        self._count = threading.Lock()

    def load_slot(self, slot: int, canonical_buffer: NDArray[np.uint8]) -> None:
        with self._count:
            self.loading += 1
            self.most = max(self.most, self.loading)
        time.sleep(0.2)
        super().load_slot(slot, canonical_buffer)
        with self._count:
            self.loading -= 1


def test_copies_that_are_slow_to_be_taken_in_do_not_share_a_buffer() -> None:
    """Two layers' experts arrive back to back, and both wait to be taken in."""
    model = marker_model(layers=2, experts=EXPERTS, hidden=HIDDEN, inner=INNER)
    backend = SlowToLoad(model.expert)
    shard = marker_shard(model=model, source=OwnWeights(model), backend=backend)
    shard.core.start()
    threads = [
        threading.Thread(
            target=add, args=(shard, layer, 3), kwargs={"layer": layer, "step_id": layer + 1}
        )
        for layer in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    held = {r.slot: (r.layer, r.expert, r.verified) for r in shard.core.slots.ledger.resident()}
    assert held == {0: (0, 3, True), 1: (1, 3, True)}
    for layer in range(2):
        stored = np.asarray(backend.canonical_bytes(layer))[: model.expert.canonical_bytes]
        assert stored.tobytes() == weights_of(layer, 3).tobytes()
    shard.core.stop()


UP = expert_name(1, 2, "up")


def removed(folder: Path) -> None:
    made = tensors()
    del made[UP]
    write_checkpoint(folder, made=made)


def renamed(folder: Path) -> None:
    made = tensors()
    made[UP.replace("up_proj", "upp_proj")] = made.pop(UP)
    write_checkpoint(folder, made=made)


def stacked(folder: Path) -> None:
    made = tensors()
    made["model.layers.1.mlp.experts.gate_up_proj"] = np.zeros((3, 8, 6), np.float32)
    del made[UP]
    write_checkpoint(folder, made=made)


def truncated(folder: Path) -> None:
    file = write_checkpoint(folder) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "word"),
    [(removed, UP), (renamed, UP), (stacked, "gate_up_proj"), (truncated, "model.layers")],
)
def test_a_checkpoint_that_lacks_what_it_should_hold_is_never_loaded(
    tmp_path: Path, damage: Callable[[Path], None], word: str
) -> None:
    damage(tmp_path / "m")
    with pytest.raises(WeightsError, match=word):
        Checkpoint.open(tmp_path / "m")


class Flipped(OwnWeights):
    """One bit is not what the manifest says."""

    def read_into(
        self, layer: int, expert: int, out: memoryview, reading: Reading = UNINTERRUPTED
    ) -> None:
        super().read_into(layer, expert, out, reading)
        out[17] ^= 1

    def canonical_sha256(self, layer: int, expert: int) -> str:
        return hashlib.sha256(weights_of(layer, expert).tobytes()).hexdigest()


def reserve(shard: Shard, version: str) -> SlotReserved | StepFailed:
    answer = shard.execute(
        1,
        ReserveSlot(
            step_id=1,
            rank=0,
            incarnation=1,
            slot=0,
            layer=0,
            expert=3,
            weights_version=version,
        ),
    )
    assert isinstance(answer, SlotReserved | StepFailed), answer
    return answer


def test_a_flipped_bit_is_found_before_the_expert_may_serve() -> None:
    model = marker_model(layers=2, experts=EXPERTS, hidden=HIDDEN, inner=INNER)
    shard = marker_shard(model=model, source=Flipped(model), backend=NumpyBackend(model.expert))
    shard.core.start()
    reserved = reserve(shard, "v1")
    assert isinstance(reserved, SlotReserved)
    where = {"step_id": 1, "rank": 0, "incarnation": 1, "slot": 0, "slot_tag": reserved.slot_tag}
    copy = CopyExpert(
        layer=0,
        expert=3,
        source=CopySource(rank=-1),
        timeout_s=10.0,
        **where,  # type: ignore[arg-type]
    )
    shard.execute(1, copy)
    answer = shard.execute(1, VerifyExpert(**where))  # type: ignore[arg-type]
    assert isinstance(answer, StepFailed), answer
    assert "the manifest says" in answer.detail
    assert not any(held.verified for held in shard.core.slots.ledger.resident())
    shard.core.stop()


def test_weights_of_another_version_have_no_place_beside_these() -> None:
    """A service has one version of weights: whatever names another one is refused, so none is
    mixed in by a move that was planned for the other."""
    model = marker_model(layers=2, experts=EXPERTS, hidden=HIDDEN, inner=INNER)
    shard = marker_shard(model=model, source=OwnWeights(model), backend=NumpyBackend(model.expert))
    shard.core.start()
    refused = reserve(shard, "v2")
    assert isinstance(refused, StepFailed), refused
    assert "v1" in refused.detail
    assert "v2" in refused.detail
    assert shard.core.slots.ledger.resident() == ()
    shard.core.stop()
