"""The client against real gRPC servers on loopback: failover, streams, cutting, deadlines."""

import asyncio
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moe_serve.client import AsyncClient, Client, Phase
from moe_serve.client import aio as client_aio
from moe_serve.client.link import CHECK_TIMEOUT_S, SILENCE_S
from moe_serve.client.sync import CLOSE_WAIT_S
from moe_serve.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    MoeServeError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    WireLost,
)
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import RouterServer
from moe_serve.rpc import dispatch_pb2
from moe_serve.rpc.options import RpcLimits
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec, oracle, router_settings
from tests.fakes.dispatch_service import FakeRouter, fake_routers, threaded_router

Request = dispatch_pb2.ForwardRequest
TOKEN = "a-token-of-sixteen-characters"


def batch(rows: int = 4, k: int = 2, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(6)[:k] for _ in range(rows)], np.int64).reshape(rows, k)
    return {
        "layer": 1,
        "hidden": rng.standard_normal((rows, 8)).astype(np.float32),
        "topk_ids": ids,
        "topk_weights": rng.standard_normal((rows, k)).astype(np.float32),
        "phase": Phase.DECODE,
    }


@contextmanager
def dead_router() -> Iterator[str]:
    """An address that is bound, so that nobody else gets it, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def want(made: dict[str, Any]) -> np.ndarray:
    return oracle(made["hidden"], made["topk_ids"], made["topk_weights"])


def check(output: np.ndarray, made: dict[str, Any]) -> None:
    assert output.dtype == made["hidden"].dtype
    assert not output.flags.writeable
    np.testing.assert_allclose(output, want(made), rtol=1e-5, atol=1e-5)


def router_at(routers: list[FakeRouter], client: AsyncClient | Client) -> FakeRouter:
    """The router this client prefers."""
    return next(r for r in routers if r.address == client.addresses[0])


@asynccontextmanager
async def routers_and_client(
    count: int, **options: Any
) -> AsyncIterator[tuple[list[FakeRouter], AsyncClient]]:
    async with fake_routers(count) as routers:
        client = AsyncClient([router.address for router in routers], **options)
        try:
            yield routers, client
        finally:
            await client.close()


async def until(holds: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------- answers


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_outputs_equal_the_oracle(stream: bool) -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address], stream=stream) as client:
        made = batch()
        check(await client.forward(**made), made)
        assert router.by_stream == int(stream)
        sent = router.requests[0]
        assert (sent.layer, sent.phase, sent.attempt) == (1, 2, 0)
        assert sent.request_id


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.uint16])
async def test_half_types_come_back_as_they_were_sent(dtype: type) -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        made = batch()
        exact = np.round(made["hidden"] * 4) / 4
        narrow = exact.astype(ml_dtypes.bfloat16 if dtype is np.uint16 else dtype)
        made["hidden"] = narrow.view(np.uint16) if dtype is np.uint16 else narrow
        output = await client.forward(**made)
        assert output.dtype == made["hidden"].dtype
        values = output.view(ml_dtypes.bfloat16) if dtype is np.uint16 else output
        exact_output = oracle(exact, made["topk_ids"], made["topk_weights"])
        np.testing.assert_allclose(values.astype(float), exact_output, rtol=2e-2, atol=2e-2)


@pytest.mark.asyncio
async def test_masks_travel_and_zero_rows_come_back() -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        made = batch(5)
        row_valid = np.array([True, False, True, True, False])
        pair_valid = np.ones((5, 2), np.bool_)
        pair_valid[2, 0] = False
        made["topk_ids"][2, 0] = 99
        output = await client.forward(**made, row_valid=row_valid, pair_valid=pair_valid)
        valid = pair_valid & row_valid[:, None]
        exact = oracle(made["hidden"], made["topk_ids"], made["topk_weights"], valid)
        np.testing.assert_allclose(output, exact, rtol=1e-5, atol=1e-5)
        assert not output[1].any()
        assert (await client.forward(**batch(0))).shape == (0, 8)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_batch_above_the_limit_is_cut_by_rows_and_joined_in_order(stream: bool) -> None:
    def slow_first(request: Request) -> float:
        return 0.2 if len(routers[0].requests) == 1 else 0.0

    async with fake_routers(1, max_message_bytes=4096) as routers:
        routers[0].behaviour.delay_s = slow_first
        async with AsyncClient([routers[0].address], stream=stream) as client:
            made = batch(500)
            masks = {"row_valid": np.arange(500) % 7 != 0, "pair_valid": np.ones((500, 2), bool)}
            output = await client.forward(**made, **masks, request_id="whole")
            exact = want(made) * masks["row_valid"][:, None]
            np.testing.assert_allclose(output, exact, rtol=1e-5, atol=1e-5)
        sent = routers[0].requests
        assert len(sent) > 5
        assert max(request.ByteSize() for request in sent) <= 4096
        assert {request.request_id for request in sent} == {"whole"}
        assert 1 < routers[0].open_most <= client_aio.PARTS_OPEN_MAX


@pytest.mark.asyncio
async def test_a_failing_part_fails_the_call_and_cancels_the_others() -> None:
    def fail(request: Request) -> MoeServeError | None:
        first = request is routers[0].requests[0]
        return InvalidArgument("bad", violations=(FieldViolation("x", "y"),)) if first else None

    async with fake_routers(1, max_message_bytes=4096) as routers:
        routers[0].behaviour.fail = fail
        routers[0].behaviour.delay_s = lambda r: 0.05 if r is routers[0].requests[0] else 30.0
        async with AsyncClient([routers[0].address]) as client:
            began_s = time.monotonic()
            with pytest.raises(InvalidArgument, match="bad") as caught:
                await client.forward(**batch(500))
            assert caught.value.violations == (FieldViolation("x", "y"),)
            assert time.monotonic() - began_s < 5
            await asyncio.sleep(0.3)
            sent = len(routers[0].requests)
            # One may have taken the place of the one that failed.
            assert sent <= client_aio.PARTS_OPEN_MAX + 1, "the parts that waited were sent"
            routers[0].behaviour.delay_s = lambda _request: 0.0
            made = batch()
            check(await client.forward(**made), made)
            assert len(routers[0].requests) == sent + 1


# -------------------------------------------------------------------------------- stream


@pytest.mark.asyncio
async def test_a_slow_item_holds_up_no_other() -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        router.behaviour.delay_s = lambda r: 1.0 if r.request_id == "slow" else 0.0
        finished: list[str] = []

        async def one(name: str, seed: int) -> None:
            made = batch(seed=seed)
            check(await client.forward(**made, request_id=name), made)
            finished.append(name)

        await asyncio.gather(one("slow", 1), *(one(f"fast{i}", i) for i in range(10)))
        assert finished[-1] == "slow"
        assert router.streams == 1


@pytest.mark.asyncio
async def test_a_bad_item_gets_its_own_error() -> None:
    def fail(request: Request) -> MoeServeError | None:
        return NotFound("no such thing") if request.request_id == "bad" else None

    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        router.behaviour.fail = fail
        made = batch()
        answers = await asyncio.gather(
            *(client.forward(**made, request_id=name) for name in ("a", "bad", "b")),
            return_exceptions=True,
        )
        assert isinstance(answers[1], NotFound)
        check(answers[0], made)
        check(answers[2], made)
        assert router.streams == 1


@pytest.mark.asyncio
async def test_a_caller_that_gives_up_leaves_the_stream_to_the_others() -> None:
    # gRPC ends a stream whose write is cancelled: the caller must not be the one who writes.
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        router.behaviour.delay_s = lambda r: 0.3 if r.request_id == "stays" else 30.0
        await client.spec()
        made = batch()
        stays = asyncio.create_task(client.forward(**made, request_id="stays"))
        for pause in (0, 0, 0, 0.001, 0.01):
            gone = asyncio.create_task(client.forward(**batch(), request_id="goes"))
            await asyncio.sleep(pause)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            assert gone.cancelled()
        with pytest.raises(DeadlineExceeded):
            await client.forward(**batch(), request_id="late", timeout_s=0.05)
        check(await stays, made)
        assert router.streams == 1


@pytest.mark.asyncio
async def test_a_stream_that_ended_is_opened_again() -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        made = batch()
        check(await client.forward(**made), made)
        router.behaviour.end_stream = True
        again = asyncio.create_task(client.forward(**made))
        await until(lambda: router.by_stream >= 2)
        router.behaviour.end_stream = False
        check(await again, made)
        assert router.streams >= 2
        assert router.requests[-1].attempt >= 1


@pytest.mark.asyncio
async def test_large_requests_do_not_use_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_aio, "STREAM_BYTES_MAX", 64)
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        await client.forward(**batch(2))
        assert router.by_stream == 1
        await client.forward(**batch(3))
        assert router.by_stream == 1


# ------------------------------------------------------------------------------ failover


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_router_that_dies_mid_run_fails_nothing(stream: bool) -> None:
    async with fake_routers(2) as routers:
        one = [routers[0].address]
        async with AsyncClient(one, stream=stream) as client:
            for router in routers:
                router.behaviour.delay_s = lambda _request: 0.02
            stop = asyncio.Event()
            served = [0] * 4

            async def ask(number: int) -> None:
                while not stop.is_set():
                    made = batch(seed=number)
                    check(await client.forward(**made), made)
                    served[number] += 1

            tasks = [asyncio.create_task(ask(number)) for number in range(4)]
            await until(lambda: min(served) >= 3)
            await routers[0].stop()
            before = list(served)
            await until(lambda: all(b + 5 <= s for b, s in zip(before, served, strict=True)))
            stop.set()
            await asyncio.gather(*tasks)
            assert client.addresses[0] == routers[1].address
            attempts = [request.attempt for request in routers[1].requests]
            assert 1 in attempts, "the second try says that it is one"
            assert attempts[-1] == 0, "afterwards the router that works is asked first"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [Unavailable("no replica"), WireLost("a shard is gone")])
async def test_unavailable_is_asked_elsewhere(stream: bool, error: MoeServeError) -> None:
    async with fake_routers(2) as routers:
        addresses = [router.address for router in routers]
        async with AsyncClient(addresses, stream=stream) as client:
            first = router_at(routers, client)
            first.behaviour.fail = lambda _request: error
            made = batch()
            check(await client.forward(**made), made)
            (second,) = [router for router in routers if router is not first]
            assert (len(first.requests), len(second.requests)) == (1, 1)
            assert second.requests[0].attempt == 1


OTHER_ERRORS = [
    InvalidArgument("hidden: bad", violations=(FieldViolation("hidden", "bad"),)),
    ResourceExhausted("full", retry_after_s=1.5),
    FailedPrecondition("paused"),
    NotFound("nothing there"),
    DeadlineExceeded("too slow"),
    MoeServeError("inside"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", OTHER_ERRORS, ids=lambda e: type(e).__name__)
async def test_other_errors_are_typed_and_not_asked_again(
    stream: bool, error: MoeServeError
) -> None:
    async with fake_routers(2) as routers:
        for router in routers:
            router.behaviour.fail = lambda _request: error
        addresses = [router.address for router in routers]
        async with AsyncClient(addresses, stream=stream) as client:
            with pytest.raises(MoeServeError) as caught:
                await client.forward(**batch())
        got = caught.value
        assert type(got) is type(error)
        assert error.message in got.message
        assert got.violations == error.violations
        assert getattr(got, "retry_after_s", None) == getattr(error, "retry_after_s", None)
        assert sum(len(router.requests) for router in routers) == 1


@pytest.mark.asyncio
async def test_three_tries_and_no_more() -> None:
    async with fake_routers(5) as routers:
        for router in routers:
            router.behaviour.fail = lambda _request: Unavailable("no replica")
        async with AsyncClient([router.address for router in routers]) as client:
            with pytest.raises(Unavailable, match="no replica"):
                await client.forward(**batch())
        sent = [request for router in routers for request in router.requests]
        assert sorted(request.attempt for request in sent) == [0, 1, 2]
        assert max(len(router.requests) for router in routers) == 1


@pytest.mark.asyncio
async def test_what_a_router_answered_is_told_rather_than_that_another_is_dead() -> None:
    with dead_router() as dead:
        async with fake_routers(1) as (router,):
            router.behaviour.fail = lambda _request: Unavailable("no replica of expert 3")
            for addresses in ([dead, router.address], [router.address, dead]):
                async with AsyncClient(addresses) as client:
                    with pytest.raises(Unavailable) as caught:
                        await client.forward(**batch())
                    assert type(caught.value) is Unavailable
                    assert caught.value.message.startswith("no replica of expert 3")
                    assert router.address in caught.value.message
                    assert dead in caught.value.message


@pytest.mark.asyncio
async def test_dead_routers_are_all_named() -> None:
    with dead_router() as one, dead_router() as other:
        async with AsyncClient([one, other]) as client:
            with pytest.raises(Unavailable, match="not reached") as caught:
                await client.forward(**batch())
        assert type(caught.value) is Unavailable
        assert one in caught.value.message
        assert other in caught.value.message


@pytest.mark.asyncio
async def test_one_router_that_comes_back_is_tried_again_after_a_wait() -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        router.behaviour.fail = lambda r: Unavailable("not yet") if r.attempt < 2 else None
        made = batch()
        began_s = time.monotonic()
        check(await client.forward(**made), made)
        assert time.monotonic() - began_s >= 3 * client_aio.RETRY_WAIT_S - 0.05


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_router_that_hangs_is_left_long_before_the_deadline(stream: bool) -> None:
    async with fake_routers(2) as routers:
        addresses = [router.address for router in routers]
        async with AsyncClient(addresses, stream=stream) as client:
            await client.spec()
            first = router_at(routers, client)
            made = batch()
            check(await client.forward(**made), made)
            first.behaviour.stuck = True
            began_s = time.monotonic()
            answers = await asyncio.gather(*(client.forward(**made) for _ in range(3)))
            for answer in answers:
                check(answer, made)
            assert time.monotonic() - began_s < SILENCE_S + CHECK_TIMEOUT_S + 4
            began_s = time.monotonic()
            check(await client.forward(**made), made)
            assert time.monotonic() - began_s < SILENCE_S, "the next call does not ask it again"


@pytest.mark.asyncio
async def test_a_router_that_hangs_from_the_start_is_left() -> None:
    async with routers_and_client(2) as (routers, client):
        router_at(routers, client).behaviour.stuck = True
        made = batch()
        check(await client.forward(**made), made)


@pytest.mark.asyncio
async def test_a_slow_router_is_waited_for() -> None:
    async with routers_and_client(2) as (routers, client):
        await client.spec()
        first = router_at(routers, client)
        first.behaviour.delay_s = lambda _request: SILENCE_S * 3
        made = batch()
        check(await client.forward(**made), made)
        assert len(first.requests) == 1
        assert first.health_calls >= 1, "silent for so long, it was asked"
        assert client.addresses[0] == first.address


@pytest.mark.asyncio
async def test_new_routers_are_learned_after_a_failover() -> None:
    async with (
        fake_routers(2) as routers,
        fake_routers(1) as (late,),
        AsyncClient([routers[0].address]) as client,
    ):
        made = batch()
        check(await client.forward(**made), made)
        assert set(client.addresses) == {router.address for router in routers}
        routers[1].peers = (routers[1].address, late.address)
        await routers[0].stop()
        check(await client.forward(**made), made)
        await until(lambda: late.address in client.addresses)
        assert client.addresses[0] == routers[1].address
        assert routers[0].address in client.addresses, "the caller's own is kept"
        await routers[1].stop()
        check(await client.forward(**made), made)
        assert len(late.requests) == 1


@pytest.mark.asyncio
async def test_a_refresh_that_fails_is_logged_and_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with routers_and_client(2) as (routers, client):
        await client.spec()
        router_at(routers, client).behaviour.fail = lambda _request: Unavailable("leaving")
        for router in routers:
            router.behaviour.fail_spec = NotFound("nothing is named here")
        made = batch()
        with caplog.at_level(logging.WARNING, "moe_serve.client"):
            check(await client.forward(**made), made)
            await until(lambda: "nothing is named here" in caplog.text)
        check(await client.forward(**made), made)


# ------------------------------------------------------------------------------ deadlines


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_the_deadline_ends_the_call(stream: bool) -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address], stream=stream) as client:
        router.behaviour.delay_s = lambda _request: 30.0
        await client.spec()
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.forward(**batch(), timeout_s=0.3)
        assert 0.2 < time.monotonic() - began_s < 15


@pytest.mark.asyncio
async def test_one_deadline_covers_the_spec_and_all_tries() -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        router.behaviour.stuck = True
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.forward(**batch(), timeout_s=0.3)
        assert time.monotonic() - began_s < 15
        router.behaviour.stuck = False
        await client.spec()
        router.behaviour.fail = lambda _request: Unavailable("never")
        with pytest.raises(Unavailable):
            await client.forward(**batch(), timeout_s=0.3)
        assert len(router.requests) <= 2


@pytest.mark.asyncio
async def test_a_deadline_that_is_over_sends_nothing() -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        await client.spec()
        for timeout_s in (0.0, -1.0):
            with pytest.raises(DeadlineExceeded, match="before the first try"):
                await client.forward(**batch(), timeout_s=timeout_s)
        with pytest.raises(InvalidArgument, match="timeout_s"):
            await client.forward(**batch(), timeout_s=float("inf"))
        assert router.requests == []


# ------------------------------------------------------------------------- wrong answers


@pytest.mark.asyncio
async def test_an_answer_of_another_shape_is_no_answer() -> None:
    def change(response: dispatch_pb2.ForwardResponse) -> None:
        response.output.shape[:] = [8, 4]

    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        router.behaviour.change = change
        with pytest.raises(MoeServeError, match=r"answered \(8, 4\)"):
            await client.forward(**batch())


@pytest.mark.asyncio
async def test_an_answer_shorter_than_it_says_is_refused() -> None:
    def change(response: dispatch_pb2.ForwardResponse) -> None:
        response.output.raw = response.output.raw[:-1]

    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        router.behaviour.change = change
        with pytest.raises(InvalidArgument, match="needs 128 bytes, got 127"):
            await client.forward(**batch())


@pytest.mark.asyncio
async def test_bad_arguments_reach_no_router() -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address]) as client:
        for change in (
            {"layer": 7},
            {"hidden": np.zeros((4, 9), np.float32)},
            {"hidden": np.zeros((4, 8))},
            {"topk_ids": np.full((4, 2), 2**32)},
            {"request_id": "x" * 129},
            {"row_valid": np.ones(3, np.bool_)},
        ):
            with pytest.raises(InvalidArgument) as caught:
                await client.forward(**(batch() | change))
            assert [v.field for v in caught.value.violations] == list(change)
        assert router.requests == []


# ----------------------------------------------------------------------- tokens and close


@pytest.mark.asyncio
async def test_tokens_travel_on_loopback_and_never_in_the_open() -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address], token=TOKEN) as client:
        router.peers = (router.address, "192.0.2.1:5000")
        await client.spec()
        assert router.tokens == [f"Bearer {TOKEN}"]
        assert client.addresses == (router.address,), "a learned address is no better"
    with pytest.raises(InvalidArgument, match="in the open; give tls_ca"):
        AsyncClient(["192.0.2.1:5000"], token=TOKEN)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_closing_fails_calls_in_flight_and_refuses_new_ones(stream: bool) -> None:
    async with fake_routers(2) as routers:
        for router in routers:
            router.behaviour.delay_s = lambda _request: 30.0
        client = AsyncClient([router.address for router in routers], stream=stream)
        calls = [asyncio.create_task(client.forward(**batch())) for _ in range(3)]
        await until(lambda: sum(len(router.requests) for router in routers) == 3)
        await client.close()
        for call in calls:
            with pytest.raises(Unavailable, match="closed"):
                await call
        with pytest.raises(FailedPrecondition, match="closed"):
            await client.forward(**batch())
        await client.close()


@pytest.mark.asyncio
async def test_cancelling_a_unary_call_is_a_cancellation() -> None:
    async with fake_routers(1) as (router,), AsyncClient([router.address], stream=False) as client:
        router.behaviour.delay_s = lambda _request: 30.0
        call = asyncio.create_task(client.forward(**batch()))
        await until(lambda: router.requests)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: router.open_now == 0)


# ------------------------------------------------------------------------ blocking client


def test_the_blocking_client_serves_many_threads() -> None:
    with threaded_router() as router, Client([router.address]) as client:
        assert client.spec().hidden_size == 8
        failures: list[BaseException] = []

        def ask(seed: int) -> None:
            try:
                for _ in range(10):
                    made = batch(seed=seed)
                    check(client.forward(**made), made)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failures == []
        assert router.streams == 1
        assert len(router.requests) == 80


def test_closing_the_blocking_client_ends_calls_of_other_threads() -> None:
    with threaded_router() as router:
        router.behaviour.delay_s = lambda _request: 30.0
        client = Client([router.address])
        seen: list[BaseException] = []

        def ask() -> None:
            try:
                client.forward(**batch())
            except MoeServeError as error:
                seen.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + 10
        while len(router.requests) < 4 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        began_s = time.monotonic()
        client.close()
        assert time.monotonic() - began_s < CLOSE_WAIT_S / 2, "calls were failed, not waited for"
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)
        assert [type(error) for error in seen] == [Unavailable] * 4
        with pytest.raises(FailedPrecondition, match="closed"):
            client.spec()
        client.close()
        assert not any(t.name == "moe-serve-client" for t in threading.enumerate())


def test_calls_that_race_with_close_end_too() -> None:
    with threaded_router() as router:
        for _ in range(5):
            client = Client([router.address])
            client.spec()
            ended: list[str] = []

            def ask(client: Client = client, ended: list[str] = ended) -> None:
                try:
                    while True:
                        client.forward(**batch())
                except MoeServeError as error:
                    ended.append(error.code)

            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.03)
            client.close()
            for thread in threads:
                thread.join(10)
            assert len(ended) == 3
            assert set(ended) <= {"UNAVAILABLE", "FAILED_PRECONDITION"}


def test_bad_addresses_start_no_thread() -> None:
    with pytest.raises(InvalidArgument):
        Client([])
    gc.collect()
    assert not any(t.name == "moe-serve-client" for t in threading.enumerate())


def test_after_a_fork_the_child_is_told_and_the_parent_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A real fork of a process with gRPC threads may hang; the client sees one by its process id.
    with threaded_router() as router, Client([router.address]) as client:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            with pytest.raises(FailedPrecondition, match="before a fork"):
                client.spec()
            client.close()
        made = batch()
        check(client.forward(**made), made)


# ---------------------------------------------------------------------- the real router


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_with_the_real_router_service_and_failover(stream: bool) -> None:
    world = FakeWorld(marker_spec())
    world.place()
    table = world.table()
    servers = []
    for number in range(2):
        settings = router_settings(world.spec, limits=RpcLimits(max_message_bytes=20_000))
        core = RouterCore(settings, world.open_channel)
        core.install_table(table)
        servers.append((core, RouterServer(core)))
        await servers[number][1].start()
    addresses = tuple(server.address for _, server in servers)
    for core, _ in servers:
        core.peers = addresses
    alive = dict(zip(addresses, (server for _, server in servers), strict=True))
    try:
        async with AsyncClient([addresses[0]], stream=stream) as client:
            spec = await client.spec()
            assert (spec.model, spec.hidden_size, spec.num_experts) == ("marker", HIDDEN, 6)
            assert set(spec.router_addresses) == set(addresses)
            made = batch(300)
            check(await client.forward(**made), made)
            made = batch(6, k=3)
            made["topk_ids"][1, 0] = 6  # the padding id of a front end
            pair_valid = made["topk_ids"] != 6
            output = await client.forward(**made, pair_valid=pair_valid)
            exact = oracle(made["hidden"], made["topk_ids"], made["topk_weights"], pair_valid)
            np.testing.assert_allclose(output, exact, rtol=1e-5, atol=1e-5)
            with pytest.raises(InvalidArgument) as caught:
                await client.forward(**made)
            assert [v.field for v in caught.value.violations] == ["topk_ids[1][0]"]
            before = len(world.executed())
            await alive.pop(addresses[0]).stop(grace_s=0.0)
            made = batch(5)
            check(await client.forward(**made), made)
            assert client.addresses[0] == addresses[1]
            assert len(world.executed()) - before == 10, "no pair was computed twice"
    finally:
        for server in alive.values():
            await server.stop(grace_s=0.0)
