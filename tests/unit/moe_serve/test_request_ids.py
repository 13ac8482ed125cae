"""A request's id is found in the error its caller gets, in the router's log and in the shard's."""

import json
import logging
import queue
import threading

import numpy as np
import pytest

from moe_serve.errors import MoeServeError, Unavailable
from moe_serve.ports import SubReply
from moe_serve.router.service import DispatchServicer
from moe_serve.rpc import codec, dispatch_pb2
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec
from tests.fakes.marker_experts import MarkerBackend, add, marker_model, marker_shard
from tests.fakes.sub_calls import sub_call
from tests.unit.moe_serve.test_router_dispatch import a_core, a_request


def an_item(request_id: str, sequence: int = 1) -> dispatch_pb2.StreamForwardRequest:
    arrays = codec.ForwardArrays(
        model="marker",
        layer=1,
        phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
        data_type=codec.FP32,
        hidden=np.ones((2, HIDDEN), np.float32),
        topk_ids=np.array([[0, 1], [0, 1]], np.int32),
        topk_weights=np.ones((2, 2), np.float32),
        request_id=request_id,
    )
    request = codec.forward_request(arrays)
    return dispatch_pb2.StreamForwardRequest(sequence=sequence, request=request)


@pytest.mark.asyncio
async def test_the_error_and_the_routers_log_name_the_request_and_a_storm_is_a_line_or_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = FakeWorld(marker_spec())
    world.place()
    core = a_core(world)
    servicer = DispatchServicer(core, "here:1")

    def fail(_reply: SubReply) -> SubReply:
        raise Unavailable("compute failed: RuntimeError")

    for shard in world.shards:
        shard.change_reply = fail
    for number in range(5):
        answer = await servicer.answer_item(an_item(f"order-{number}"), 2.0)
        assert f"[request order-{number}]" in answer.error.message
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    failed = [line for line in lines if line["event"] == "request failed"]
    assert 1 <= len(failed) < 5
    assert failed[0]["request_id"] == "order-0"
    assert "layer 1, expert" in failed[0]["cause"]
    again = [line for line in lines if line["event"] == "call sent again"]
    assert {line["request_id"][:6] for line in again} == {"order-"}
    await core.stop()


@pytest.mark.asyncio
async def test_each_sub_call_carries_the_id() -> None:
    world = FakeWorld(marker_spec())
    world.place()
    core = a_core(world)
    await core.forward(a_request(request_id="order-7"), 5.0)
    named = {call.request_id for shard in world.shards for call in shard.calls}
    assert named == {"order-7"}
    await core.stop()


def test_the_shards_log_names_the_requests_of_a_batch_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = marker_model()
    broken = threading.Event()

    def fail(_pairs: int) -> None:
        if broken.is_set():
            raise RuntimeError("the device said no")

    shard = marker_shard(model=model, backend=MarkerBackend(model.expert, on_forward=fail))
    shard.core.start()
    tag = add(shard, 0, 0)
    broken.set()
    rows = np.ones((1, 8), np.float32)
    answered: queue.SimpleQueue[SubReply | MoeServeError] = queue.SimpleQueue()
    with caplog.at_level(logging.ERROR):
        for request_id in ("order-1", ""):
            call = sub_call(rows, [(0, 0, tag, 1.0, 0)], request_id=request_id)
            shard.core.submit(call, rows.nbytes, answered.put)
        ends = [answered.get(timeout=5.0) for _ in range(2)]
    assert [type(end) for end in ends] == [Unavailable, Unavailable]
    assert "'order-1'" in caplog.text
    assert "'unnamed'" in caplog.text
    shard.core.stop()
