"""The load generator without a service: what is asked for, when, and how it is counted."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from moe_serve.bench import BenchLoad, BenchReport, run_bench, shifting_choices, traced_choices
from moe_serve.bench import load as generator
from moe_serve.bench.figures import Request, latency_of, report_of
from moe_serve.bench.load import BenchClock
from moe_serve.bench.workload import zipf_choices
from moe_serve.client import ModelSpec, Phase
from moe_serve.errors import InvalidArgument, ResourceExhausted, Unavailable

SPEC = ModelSpec(
    model="m",
    weights_version="v1",
    num_layers=2,
    checkpoint_layers=(0, 1),
    num_experts=32,
    top_k=2,
    hidden_size=4,
    data_types=(1,),
    max_message_bytes=1 << 20,
    max_rows=1000,
    router_addresses=("127.0.0.1:1",),
    api_version="1",
    simulated=False,
)
SHAPE = {"layers": 2, "experts": 32, "top_k": 2, "tokens": 200}

# -- what is asked -------------------------------------------------------------------------------


def _share_of_hottest(ids: np.ndarray) -> float:
    return float(np.bincount(ids.reshape(-1), minlength=32).max()) / ids.size


def test_ids_are_distinct_in_a_row_and_skewed_as_asked() -> None:
    shares = []
    for exponent in (0.0, 1.0, 2.0):
        ids = zipf_choices(**SHAPE, exponent=exponent, seed=3)(0, 1, 0.0)
        assert (ids.shape, ids.dtype) == ((200, 2), np.int32)
        assert (ids[:, 0] != ids[:, 1]).all()
        assert 0 <= ids.min() <= ids.max() < 32
        shares.append(_share_of_hottest(ids))
    assert shares[0] < 0.1 < shares[1] < shares[2] <= 0.5


def test_a_seed_gives_the_same_ids_and_another_others() -> None:
    one, same, other = (zipf_choices(**SHAPE, exponent=1.0, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one(5, 0, 0.0), same(5, 0, 0.0))
    assert (one(5, 0, 0.0) != other(5, 0, 0.0)).any()


def test_other_experts_are_hot_after_each_shift() -> None:
    choose = shifting_choices(**SHAPE, exponent=2.0, seed=1, every_s=2.0, seconds=6.0)

    def hottest(at_s: float) -> int:
        return int(np.bincount(choose(0, 0, at_s).reshape(-1)).argmax())

    assert len({hottest(at_s) for at_s in (0.0, 2.0, 4.0)}) > 1
    assert hottest(0.0) == hottest(1.9) == hottest(6.0)
    steady = zipf_choices(**SHAPE, exponent=2.0, seed=1)
    np.testing.assert_array_equal(steady(0, 0, 0.0), steady(0, 0, 1e6))


def test_recorded_ids_come_in_order_and_again() -> None:
    recorded = np.arange(24).reshape(6, 2, 2) % 32
    choose = traced_choices(recorded, layers=2, experts=32, top_k=2, tokens=3)
    np.testing.assert_array_equal(choose(0, 1, 0.0), recorded[:3, 1])
    np.testing.assert_array_equal(choose(1, 0, 0.0), recorded[3:, 0])
    np.testing.assert_array_equal(choose(2, 0, 0.0), recorded[:3, 0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 1}, "the trace has 2 layers"),
        ({"experts": 4}, "expert 23"),
        ({"top_k": 1}, "top-2"),
        ({"tokens": 7}, "fewer than --tokens 7"),
    ],
)
def test_a_trace_of_another_model_is_refused(changes: dict[str, int], words: str) -> None:
    recorded = np.arange(24).reshape(6, 2, 2)
    shape = {"layers": 2, "experts": 32, "top_k": 2, "tokens": 3} | changes
    with pytest.raises(InvalidArgument, match=words):
        traced_choices(recorded, **shape)


def test_more_ids_than_can_be_kept_are_refused() -> None:
    shape = {**SHAPE, "layers": 600, "tokens": 65_536}
    with pytest.raises(InvalidArgument, match="give fewer tokens"):
        zipf_choices(**shape, exponent=1.0, seed=0)


# -- figures -------------------------------------------------------------------------------------


def _request(latency_s: float, code: str = "OK", phase: str = "decode") -> Request:
    return Request(1.0, 0.001, latency_s, phase, 8, code)


def _report(ended: list[Request], target_s: float | None = None) -> BenchReport:
    return report_of(
        ended,
        model="m",
        simulated=False,
        loop="open",
        seconds=2.0,
        in_flight_max=3,
        target_s=target_s,
    )


def test_quantiles_are_values_that_were_seen() -> None:
    found = latency_of(np.arange(1, 1001) / 1000)
    assert (found.p50_s, found.p90_s, found.p99_s, found.p999_s, found.max_s) == (
        *(0.5, 0.9, 0.99, 0.999),
        1.0,
    )
    assert latency_of(np.zeros(0)).count == 0


def test_failed_requests_miss_the_target_and_stand_under_their_code() -> None:
    ended = [_request(0.01), _request(0.03, phase="prefill"), _request(9.0, "UNAVAILABLE")]
    found = _report([*ended, _request(0.001, "RESOURCE_EXHAUSTED")], target_s=0.02)
    assert (found.requests, found.answered, found.goodput_per_s) == (4, 2, 0.5)
    assert found.within_target == 0.25
    assert found.errors == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert found.rows_per_s == 8.0
    assert found.latency.max_s == 0.03
    assert {phase: one.count for phase, one in found.phases.items()} == {"decode": 1, "prefill": 1}


def test_nothing_answered_has_figures_all_the_same() -> None:
    found = _report([_request(1.0, "UNAVAILABLE")], target_s=1.0)
    assert (found.answered, found.latency.p99_s, found.within_target) == (0, 0, 0.0)
    assert (_report([]).requests, _report([], 1.0).within_target) == (0, None)


# -- the generator -------------------------------------------------------------------------------


class _Service:
    """Answers as told; notes what was asked."""

    def __init__(self, answer: Callable[[int], Any] = lambda number: None) -> None:
        self.answer = answer
        self.asked: list[tuple[int, tuple[int, ...], Phase]] = []

    async def forward(self, layer: int, hidden: Any, ids: Any, weights: Any, **given: Any) -> Any:
        number = len(self.asked)
        self.asked.append((layer, ids.shape, given["phase"]))
        assert hidden.shape == (4, SPEC.hidden_size)
        np.testing.assert_allclose(weights.sum(axis=1), 1.0)
        found = self.answer(number)
        if isinstance(found, Exception):
            raise found
        if found is not None:
            await found


def _load(**changes: Any) -> BenchLoad:
    given = {
        "rate_per_s": 500.0,
        "callers": 0,
        "seconds": 0.2,
        "tokens": 4,
        "decode_share": 0.5,
        "warm_up_s": 0.0,
        "timeout_s": 5.0,
        "target_s": None,
        "seed": 1,
    }
    return BenchLoad(**{**given, **changes})


def _choices(request: int, layer: int, at_s: float) -> np.ndarray:
    return np.tile(np.array([[0, 1]], np.int32), (4, 1))


async def _bench(service: _Service, **changes: Any) -> BenchReport:
    return await run_bench(service, SPEC, _load(**changes), _choices)


@pytest.mark.asyncio
async def test_every_request_that_was_due_is_counted_once_on_every_layer() -> None:
    service = _Service()
    found = await _bench(service)
    assert found.requests == found.answered == len(service.asked) > 20
    assert {layer for layer, _, _ in service.asked} == {0, 1}
    assert {phase for _, _, phase in service.asked} == {Phase.PREFILL, Phase.DECODE}
    assert sum(one.count for one in found.phases.values()) == found.answered


@pytest.mark.asyncio
async def test_the_times_are_drawn_beforehand_and_do_not_wait_for_answers() -> None:
    """A service that answers nothing until the end is asked as often as one that answers at
    once."""
    expected = await _bench(_Service())
    held = asyncio.Event()

    def answer(number: int) -> Awaitable[bool]:
        if number + 1 == expected.requests:
            held.set()
        return held.wait()

    found = await _bench(_Service(answer))
    assert found.requests == expected.requests
    assert found.in_flight_max == expected.requests
    assert found.answered == found.requests


@pytest.mark.asyncio
async def test_latency_counts_from_when_a_request_was_due() -> None:
    """The generator itself stands still for a while: what was due meanwhile was late for whoever
    asked."""
    at_s = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal at_s
        at_s += seconds
        await asyncio.sleep(0)

    def stall(number: int) -> None:
        nonlocal at_s
        at_s += 1.0 if number == 5 else 0.0

    found = await run_bench(
        _Service(stall),
        SPEC,
        _load(rate_per_s=100.0, seconds=2.0),
        _choices,
        clock=BenchClock(lambda: at_s, sleep),
    )
    assert found.requests > 150
    # About half of all were due in the second that was lost, and are late by half of it.
    late = found.latency.p90_s
    assert 0.5 < late <= 1.0
    assert found.sent_late_p99_s == pytest.approx(found.latency.p99_s, abs=0.05)


@pytest.mark.asyncio
async def test_errors_are_counted_and_the_load_goes_on() -> None:
    def answer(number: int) -> Exception | None:
        return {0: Unavailable("away"), 1: ResourceExhausted("full")}.get(number)

    found = await _bench(_Service(answer))
    assert found.errors == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert found.answered == found.requests - 2


@pytest.mark.asyncio
async def test_what_the_service_calls_wrong_ends_it_at_once() -> None:
    service = _Service(lambda _: InvalidArgument("topk_ids: no"))
    with pytest.raises(InvalidArgument, match="topk_ids"):
        await _bench(service, seconds=3600.0)


@pytest.mark.asyncio
async def test_the_warm_up_is_asked_and_not_counted() -> None:
    service = _Service()
    found = await _bench(service, warm_up_s=0.2)
    assert 20 < found.requests < len(service.asked)


@pytest.mark.asyncio
async def test_a_closed_loop_has_so_many_callers_and_no_more() -> None:
    service = _Service(lambda _: asyncio.sleep(0.001))
    found = await _bench(service, callers=3)
    assert (found.loop, found.in_flight_max) == ("closed", 3)
    assert found.answered == found.requests > 3


@pytest.mark.asyncio
async def test_what_cannot_be_held_open_is_counted_as_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generator, "IN_FLIGHT_MAX", 2)
    held = asyncio.Event()
    service = _Service(lambda _: held.wait())

    def tell(seconds: float) -> None:
        if seconds >= 0.2:
            held.set()

    found = await run_bench(service, SPEC, _load(), _choices, tell)
    assert (found.in_flight_max, found.answered) == (2, len(service.asked))
    assert found.errors["NOT_SENT"] == found.requests - found.answered > 0


@pytest.mark.asyncio
async def test_it_tells_how_far_it_is() -> None:
    told: list[float] = []
    await run_bench(_Service(), SPEC, _load(), _choices, told.append)
    assert told
    assert all(0.0 <= seconds <= 0.2 for seconds in told)
