"""Bursts of odd calls: bad input, calls that are cancelled, deadlines of a few milliseconds.

Each says which outcomes it allows; any other is a violation. Common calls go on beside them and are
judged as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np

from moe_serve.client.aio import AsyncClient
from moe_serve.errors import MoeServeError
from moe_serve.rpc import dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.codec import FP32, ForwardArrays, forward_request
from moe_serve.rpc.options import channel_options
from tests.marker_checkpoint import LAYERS, TOP_K, marker_rows
from tests.soak.load import TIMEOUT_S, Burst, Load
from tests.soak.rig import EXPERTS, HIDDEN

BAD_CALLS = 60
CANCELLED_CALLS = 60
SHORT_CALLS = 80
AT_ONCE = 8
SHORT_S = (0.001, 0.020)
SPENT = "too much is failing to try again"
"""How a router says that its retry budget is spent."""
REFUSED = frozenset({"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "NOT_FOUND"})
FORWARD = f"/{dispatch_pb2.DESCRIPTOR.services_by_name['DispatchService'].full_name}/Forward"

Spoil = Callable[[dispatch_pb2.ForwardRequest, np.random.Generator], None]


def good_request(rng: np.random.Generator) -> dispatch_pb2.ForwardRequest:
    """A request that is computed."""
    rows = int(rng.integers(1, 5))
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
    return forward_request(
        ForwardArrays(
            model="",
            layer=int(rng.integers(LAYERS)),
            phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
            data_type=FP32,
            hidden=marker_rows(rng, rows, HIDDEN),
            topk_ids=ids,
            topk_weights=rng.random((rows, TOP_K)).astype(np.float32),
        )
    )


def _ids(value: int) -> Spoil:
    def spoil(request: dispatch_pb2.ForwardRequest, _rng: np.random.Generator) -> None:
        ids = np.frombuffer(request.topk_ids.raw, "<i4").copy()
        ids[0] = value
        request.topk_ids.raw = ids.tobytes()

    return spoil


def _twice(request: dispatch_pb2.ForwardRequest, _rng: np.random.Generator) -> None:
    ids = np.frombuffer(request.topk_ids.raw, "<i4").copy()
    ids[1] = ids[0]
    request.topk_ids.raw = ids.tobytes()


def _gate(value: float) -> Spoil:
    def spoil(request: dispatch_pb2.ForwardRequest, _rng: np.random.Generator) -> None:
        gates = np.frombuffer(request.topk_weights.raw, "<f4").copy()
        gates[-1] = value
        request.topk_weights.raw = gates.tobytes()

    return spoil


def _layer(request: dispatch_pb2.ForwardRequest, rng: np.random.Generator) -> None:
    request.layer = int(rng.choice([-1, LAYERS, 1 << 30]))


def _short(request: dispatch_pb2.ForwardRequest, _rng: np.random.Generator) -> None:
    request.hidden_states.raw = request.hidden_states.raw[:-1]


def _shape(request: dispatch_pb2.ForwardRequest, _rng: np.random.Generator) -> None:
    request.hidden_states.shape[0] = (1 << 62) - 1


def _model(request: dispatch_pb2.ForwardRequest, _rng: np.random.Generator) -> None:
    request.model = "another"


def _type(request: dispatch_pb2.ForwardRequest, _rng: np.random.Generator) -> None:
    request.hidden_states.data_type = dispatch_pb2.DATA_TYPE_INT32


def _empty(request: dispatch_pb2.ForwardRequest, _rng: np.random.Generator) -> None:
    request.hidden_states.shape[0] = 0
    request.hidden_states.raw = b""


SPOILS: tuple[Spoil, ...] = (
    _ids(-1),
    _ids(EXPERTS),
    _ids((1 << 31) - 1),
    _twice,
    _gate(float("nan")),
    _gate(float("-inf")),
    _layer,
    _short,
    _shape,
    _model,
    _type,
    _empty,
)


async def bad_input(load: Load, address: str, seed: int) -> Burst:
    """Requests that are each wrong in one way, as messages and as arbitrary bytes: all are refused
    in words."""
    burst, rng = Burst(), np.random.default_rng(seed)
    options = [*channel_options(), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = dispatch_pb2_grpc.DispatchServiceStub(channel)
        raw = channel.unary_unary(FORWARD)
        for number in range(BAD_CALLS):
            spoil = SPOILS[number % len(SPOILS)] if number % 7 else None
            request = good_request(rng)
            name = "bytes"
            try:
                if spoil is None:
                    await raw(rng.bytes(int(rng.integers(1, 400))), timeout=TIMEOUT_S)
                else:
                    name = f"spoil {number % len(SPOILS)}"
                    spoil(request, rng)
                    await stub.Forward(request, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                code = error.code().name
                burst.outcomes[code] += 1
                if code not in REFUSED:
                    burst.wrong.append(f"bad input ({name}) was answered {code}: {error.details()}")
            else:
                burst.wrong.append(f"bad input ({name}) was computed")
    return burst


async def cancels(load: Load, address: str, seed: int) -> Burst:
    """Calls that their caller gives up after 0 to 30 ms. What ended before is right."""
    burst, rng = Burst(), np.random.default_rng(seed)
    async with AsyncClient([address], stream=bool(seed % 2)) as client:
        await client.spec()
        for _ in range(0, CANCELLED_CALLS, AT_ONCE):
            tasks = [
                asyncio.create_task(load.call(client, rng, TIMEOUT_S, address))
                for _ in range(AT_ONCE)
            ]
            for task in tasks:
                await asyncio.sleep(float(rng.uniform(0.0, 0.03)) / AT_ONCE)
                if rng.random() < 0.8:
                    task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, asyncio.CancelledError):
                    burst.outcomes["cancelled"] += 1
                elif ended is None:
                    burst.outcomes["right"] += 1
                else:
                    burst.wrong.append(f"beside cancelled calls: {ended}")
    return burst


async def short_deadlines(load: Load, address: str, seed: int) -> Burst:
    """Calls with deadlines of 1 to 20 ms: right answers, DEADLINE_EXCEEDED, or UNAVAILABLE where so
    many of them have been tried again that the router tries no more."""
    burst, rng = Burst(), np.random.default_rng(seed)
    async with AsyncClient([address], stream=bool(seed % 2)) as client:
        await client.spec()
        for _ in range(0, SHORT_CALLS, AT_ONCE):
            tasks = [
                load.call(client, rng, float(rng.uniform(*SHORT_S)), address)
                for _ in range(AT_ONCE)
            ]
            for ended in await asyncio.gather(*tasks):
                burst.outcomes["right" if ended is None else ended.code] += 1
                if ended is None or ended.code == "DEADLINE_EXCEEDED":
                    continue
                if ended.code != "UNAVAILABLE" or SPENT not in ended.text:
                    burst.wrong.append(f"with a short deadline: {ended}")
    return burst


async def spec_of(address: str) -> str:
    """Error of asking one router for its spec, "" where it answers."""
    async with AsyncClient([address]) as client:
        try:
            await client.spec(timeout_s=5.0)
        except MoeServeError as error:
            return error.message
    return ""
