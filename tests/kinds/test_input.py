"""One bad request that harms others: ids out of range, stale or repeated ids, gates that are no
numbers. Refused at the router with the field's name and nothing sent; refused again by a shard that
is asked directly; neighbours in work at the time get their right output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from moe_serve.errors import InvalidArgument
from moe_serve.router.checks import check_forward
from moe_serve.rpc import codec, dispatch_pb2
from tests.fake_shards import HIDDEN
from tests.fakes.served import EXPERTS, Served, a_request, check, serving
from tests.fakes.sub_calls import sub_call

Change = Callable[[dispatch_pb2.ForwardRequest], None]
NAN = float("nan")


def ids(values: list[list[int]], dtype: type = np.int32) -> Change:
    def change(request: dispatch_pb2.ForwardRequest) -> None:
        raw = np.array(values, np.int64).astype(dtype)
        request.topk_ids.raw = raw.tobytes()

    return change


def gates(values: list[list[float]]) -> Change:
    def change(request: dispatch_pb2.ForwardRequest) -> None:
        request.topk_weights.raw = np.array(values, np.float32).tobytes()

    return change


def stale(request: dispatch_pb2.ForwardRequest) -> None:
    """Bytes that nobody wrote ids into."""
    request.topk_ids.raw = np.array([3_655_558_880, 1, 2, 0], np.uint32).tobytes()


BAD = {
    "minus one": (ids([[-1, 1], [0, 1]]), "topk_ids[0][0]"),
    "one too many": (ids([[0, 1], [2, EXPERTS]]), "topk_ids[1][1]"),
    "largest int32": (ids([[0, 2**31 - 1], [0, 1]]), "topk_ids[0][1]"),
    "2^32 as int64": (ids([[2**32, 1], [0, 1]], np.int64), "topk_ids.raw"),
    "bytes of old memory": (stale, "topk_ids[0][0]"),
    "a gate's NaN cast to an id": (
        ids([[int(np.array(NAN, np.float32).view(np.int32)), 1], [0, 1]]),
        "topk_ids[0][0]",
    ),
    "one expert k times": (ids([[0, 0], [1, 2]]), "topk_ids[0][1]"),
    "gates of NaN": (gates([[NAN, NAN], [1.0, 1.0]]), "topk_weights[0][0]"),
    "an infinite gate": (gates([[1.0, 1.0], [1.0, float("inf")]]), "topk_weights[1][1]"),
}


def a_message(change: Change) -> dispatch_pb2.ForwardRequest:
    request = codec.forward_request(
        codec.ForwardArrays(
            model="marker",
            layer=1,
            phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
            data_type=codec.FP32,
            hidden=np.ones((2, HIDDEN), np.float32),
            topk_ids=np.array([[0, 1], [2, 3]], np.int32),
            topk_weights=np.ones((2, 2), np.float32),
        )
    )
    change(request)
    return request


@pytest.mark.asyncio
@pytest.mark.parametrize("what", BAD)
async def test_bad_routing_is_refused_by_field_and_nobody_else_sees_it(what: str) -> None:
    change, field = BAD[what]
    served = Served()
    async with serving(served) as (router,):
        neighbours = [
            asyncio.create_task(router.forward(a_request(5, seed=n), 10.0)) for n in (1, 2)
        ]
        sent = sum(len(channel.calls) for channel in served.channels)
        with pytest.raises(InvalidArgument) as refused:
            check_forward(a_message(change), served.spec, 1 << 20)
        assert [v.field for v in refused.value.violations] == [field]
        assert sum(len(channel.calls) for channel in served.channels) == sent
        for seed, got in zip((1, 2), await asyncio.gather(*neighbours), strict=True):
            check(a_request(5, seed=seed), got)


DIRECT = {
    "an expert below 0": {"pair_expert": np.array([-1], np.int32)},
    "an expert too many": {"pair_expert": np.array([EXPERTS], np.int32)},
    "a slot below 0": {"pair_slot": np.array([-1], np.int32)},
    "a slot too many": {"pair_slot": np.array([2**31 - 1], np.int32)},
    "a row that is not there": {"pair_row": np.array([1], np.int32)},
    "a gate that is no number": {"pair_gate": np.array([NAN], np.float32)},
    "a layer too many": {"layer": 2},
}


@pytest.mark.asyncio
@pytest.mark.parametrize("what", DIRECT)
async def test_a_shard_that_is_asked_directly_refuses_and_serves_on(what: str) -> None:
    served = Served()
    async with serving(served) as (router,):
        (slot, (expert, tag)) = next(
            (slot, held) for (rank, slot), held in served.held.items() if rank == 0
        )
        rows = np.ones((1, HIDDEN), np.float32)
        good = sub_call(rows, [(0, slot, tag, 1.0, expert)], layer=1)
        bad = sub_call(rows, [(0, slot, tag, 1.0, expert)], **{"layer": 1, **DIRECT[what]})
        channel = next(c for c in served.channels if c.address.rank == 0)
        with pytest.raises(InvalidArgument):
            await channel.forward(bad)
        reply = await channel.forward(good)
        assert reply.partial[0, 0] == expert + 1
        request = a_request(4)
        check(request, await router.forward(request, 10.0))


@pytest.mark.asyncio
async def test_a_row_that_is_not_finite_stays_in_its_row() -> None:
    served = Served()
    async with serving(served) as (router,):
        request = a_request(6, seed=3)
        request.hidden[2] = NAN
        request.hidden[4, 1] = float("inf")
        got = (await router.forward(request, 10.0)).output
        clean = [0, 1, 3, 5]
        assert np.isnan(got[2]).all()
        assert np.isfinite(got[clean]).all()
        alone = a_request(6, seed=3)
        check(alone, await router.forward(alone, 10.0))
