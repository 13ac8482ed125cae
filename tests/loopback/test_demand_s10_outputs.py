"""S10: what a tenant sends comes out of nothing but its own answer: no token, row, gate weight or
header of a call stands in a log, a metric, a span, an error, a report or the audit log, whatever
goes wrong with it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import RouterServer
from moe_serve.rpc import codec, dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.auth import Role, bearer_metadata
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec, router_settings
from tests.fakes.secured import TOKENS, token_file
from tests.fakes.traces import PARENT, TRACE_ID, KeptSpans

ROW = 7351.25
GATE = 0.6180339
TEXT = "xyzzy-marker"
WRONG = "plugh-token-" + "q" * 12
"""What is looked for, as bytes and as text."""


def marks() -> list[bytes]:
    numbers = [np.float32(value) for value in (ROW, GATE)]
    texts = [repr(ROW), "0.618033", TEXT, WRONG, *TOKENS.values()]
    return [*(number.tobytes() * 2 for number in numbers), *(text.encode() for text in texts)]


def marked(**changes: Any) -> dispatch_pb2.ForwardRequest:
    made: dict[str, Any] = {
        "model": "marker",
        "layer": 1,
        "phase": int(dispatch_pb2.FORWARD_PHASE_DECODE),
        "data_type": codec.FP32,
        "hidden": np.full((4, HIDDEN), ROW, np.float32),
        "topk_ids": np.array([[0, 1], [2, 3], [4, 5], [1, 0]], np.int32),
        "topk_weights": np.full((4, 2), GATE, np.float32),
    }
    return codec.forward_request(codec.ForwardArrays(**made | changes))


def requests() -> Iterator[tuple[str, dispatch_pb2.ForwardRequest]]:
    """One good request and one that is wrong in each field, marked everywhere else."""
    yield "good", marked()
    yield "layer", marked(layer=99)
    yield "id", marked(topk_ids=np.array([[0, 1], [2, 77], [4, 5], [1, 0]], np.int32))
    yield "twice", marked(topk_ids=np.array([[0, 0], [2, 3], [4, 5], [1, 0]], np.int32))
    gates = np.full((4, 2), GATE, np.float32)
    gates[2, 1] = np.nan
    yield "gate", marked(topk_weights=gates)
    short = marked()
    short.hidden_states.raw = short.hidden_states.raw[:-4]
    yield "bytes", short
    wide = marked()
    wide.hidden_states.shape[:] = [4, HIDDEN + 1]
    yield "shape", wide
    kind = marked()
    kind.hidden_states.data_type = dispatch_pb2.DATA_TYPE_INT32
    yield "type", kind
    mask = marked()
    mask.row_valid = TEXT.encode()
    yield "mask", mask
    large = marked()
    large.request_id = "i" * 200
    yield "request id", large


@pytest.mark.asyncio
async def test_s10_nothing_a_tenant_sends_comes_out_elsewhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world = FakeWorld(marker_spec())
    world.place()
    settings = router_settings(world.spec, token_file=token_file(tmp_path), slow_request_s=1e-9)
    kept = KeptSpans(share=1.0)
    core = RouterCore(settings, world.open_channel, traces=kept.of("r0"))
    core.install_table(world.table())
    server = RouterServer(core)
    await server.start()
    told: list[str] = []
    endings: dict[str, str] = {}
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
            right = bearer_metadata(TOKENS[Role.DISPATCH])
            callers = {
                "": (*right, ("x-tenant", TEXT), ("x-tenant-bin", TEXT.encode())),
                "traced ": (*right, ("traceparent", PARENT), ("x-tenant", TEXT)),
                "wrong trace ": (*right, ("traceparent", PARENT), ("tracestate", TEXT)),
                "no trace ": (*right, ("traceparent", TEXT), ("tracestate", f"a={TEXT}")),
                "wrong token ": (*bearer_metadata(WRONG), ("x-tenant", TEXT)),
                "wrong role ": bearer_metadata(TOKENS[Role.READ]),
            }
            for who, metadata in callers.items():
                for what, request in requests():
                    try:
                        await stub.Forward(request, metadata=metadata, timeout=5)
                        endings[who + what] = "OK"
                    except grpc.aio.AioRpcError as error:
                        endings[who + what] = error.code().name
                        told.append(f"{error.details()} {error.trailing_metadata()}")
            for shard in world.shards:
                shard.connected = False
            try:
                await stub.Forward(marked(), metadata=right, timeout=1)
            except grpc.aio.AioRpcError as error:
                endings["no shard"] = error.code().name
                told.append(f"{error.details()} {error.trailing_metadata()}")
            told.append(repr(core.report(0)))
    finally:
        await server.stop(0.0)
    served = {"good", "traced good", "wrong trace good", "no trace good"}
    assert {what: endings[what] for what in served} == dict.fromkeys(served, "OK")
    refused = {what: code for what, code in endings.items() if what not in served}
    assert "OK" not in refused.values(), refused
    assert set(refused.values()) >= {"INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED"}
    out = capfd.readouterr()
    logs = out.out + out.err
    assert "call refused" in logs, "what is searched is what was written"
    assert "slow request" in logs
    spans = "\n".join(span.to_json() for span in kept.all())
    for word in ("Forward", "sub-call", "invalid_argument", "unavailable", TRACE_ID):
        assert word in spans, "what is searched is what was told"
    found = [
        (mark, where)
        for where, text in (("logs", logs), ("answers", "\n".join(told)), ("spans", spans))
        for mark in marks()
        if mark in text.encode()
    ]
    assert found == []
    paths = [line for line in told if "/work" in line or ".py" in line or "Traceback" in line]
    assert paths == []


def test_s10_the_marks_are_what_a_leak_would_show() -> None:
    """The search would see a row, a gate weight or a token that was printed or copied."""
    leaks = (
        repr([ROW]),
        f"gate {np.float32(GATE)}",
        json.dumps({"token": WRONG}),
        np.full(3, GATE, np.float32).tobytes(),
    )
    for leak in leaks:
        text = leak if isinstance(leak, bytes) else leak.encode()
        assert any(mark in text for mark in marks()), leak
