"""A real shard with real weights over the wire, and what a forward costs (printed, not
asserted)."""

import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import zmq.asyncio

import moe_serve
from moe_serve.errors import Unavailable
from moe_serve.ports import RowStatus
from moe_serve.shard.assembly import open_shard
from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from moe_serve.shard.served_model import ServedModel
from moe_serve.weights.checkpoint import Checkpoint
from moe_serve.wire.channel import ZmqShardChannel
from placement.messages.effects import CopyExpert, ReserveSlot, VerifyExpert
from placement.messages.events import ExpertVerified, SlotReserved
from tests.fakes.marker_experts import CHECKPOINT, MarkerSource, add, marker_settings, marker_shard
from tests.fakes.sub_calls import sub_call

TINY = Path(moe_serve.__file__).parent / "demo" / "tiny_moe"


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_tiny_model_from_checkpoint_to_reply(tmp_path: Path, dtype: str) -> None:
    settings = marker_settings(
        checkpoint=str(TINY), manifest_dir=str(tmp_path), model_name="tiny", dtype=dtype
    )
    shard = open_shard(settings)
    address = shard.start()
    where = {"rank": 0, "incarnation": 1}
    tags = {}
    for slot, (layer, expert) in enumerate([(1, 3), (1, 30)]):
        step = {"step_id": slot, "slot": slot, **where}
        reserved = shard.execute(
            1, ReserveSlot(layer=layer, expert=expert, weights_version="v1", **step)
        )
        assert isinstance(reserved, SlotReserved)
        tags[slot] = reserved.slot_tag
        step["slot_tag"] = reserved.slot_tag
        shard.execute(
            1, CopyExpert(layer=layer, expert=expert, source=CHECKPOINT, timeout_s=10.0, **step)
        )
        verified = shard.execute(1, VerifyExpert(**step))
        assert isinstance(verified, ExpertVerified), verified

    context = zmq.asyncio.Context()
    channel = ZmqShardChannel(address, context=context)
    x = np.random.default_rng(7).normal(size=(5, 128)).astype(np.float32)
    pairs = [(0, 0, tags[0], 0.25, 3), (0, 1, tags[1], 0.75, 30), (4, 1, tags[1], -1.5, 30)]
    reply = await channel.forward(sub_call(x, pairs, layer=1))
    assert reply.row_status.tolist() == [RowStatus.SERVED] * 5

    checkpoint = Checkpoint.open(TINY)
    want = np.zeros((5, 128))
    for row, _slot, _tag, gate, expert in pairs:
        canonical = checkpoint.read_expert(1, expert, "float32").view(np.float32).astype(np.float64)
        gate_up = canonical[: 128 * 128].reshape(128, 128)
        down = canonical[128 * 128 :].reshape(64, 128)
        both = x[row].astype(np.float64) @ gate_up
        g, u = both[:64], both[64:]
        want[row] += gate * ((g / (1 + np.exp(-g)) * u) @ down)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert np.abs(reply.partial - want).max() <= tolerance * np.abs(want).max()
    (report,) = shard.report(-1).reports
    assert report.key.tolist() == [32 + 3, 32 + 30]
    assert report.pairs.tolist() == [1, 2]
    await channel.close()
    context.term()
    shard.stop()


@pytest.mark.asyncio
async def test_the_cost_of_a_forward_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = ServedModel(1, 8, 4, "v1", ExpertSpec(1024, 64, "float32"))
    shard = marker_shard(
        model=model,
        source=MarkerSource(model),
        backend=NumpyBackend(model.expert),
        budget_bytes=64 << 20,
    )
    address = shard.start()
    tags = {slot: add(shard, slot, slot) for slot in range(4)}
    context = zmq.asyncio.Context()
    channel = ZmqShardChannel(address, context=context)
    x = np.random.default_rng(1).normal(size=(64, 1024)).astype(np.float32) * 1e-3
    pairs = [(r, s, tags[s], 0.25, s) for r in range(64) for s in (r % 4, (r + 1) % 4)]
    times, computes = [], []
    for i in range(60):
        call = sub_call(x, pairs, call_id=i)
        began_s = time.perf_counter()
        reply = await channel.forward(call)
        times.append(time.perf_counter() - began_s)
        computes.append(reply.compute_s)
        assert reply.row_status.tolist() == [RowStatus.SERVED] * 64
    whole, compute = statistics.median(times[10:]), statistics.median(computes[10:])
    with capsys.disabled():
        print(
            f"\n64 rows x 1024 float32 over the wire: p50 {whole * 1e3:.2f} ms, "
            f"of which compute {compute * 1e3:.2f} ms"
        )
    await channel.close()
    context.term()
    shard.stop()


def test_a_shard_whose_wire_thread_has_ended_says_so_when_probed() -> None:
    shard = marker_shard()
    shard.start()
    try:
        assert shard.probe() >= 0.0
        shard.wire.stop()
        with pytest.raises(Unavailable, match="wire thread"):
            shard.probe()
    finally:
        shard.stop()
