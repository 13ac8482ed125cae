"""Parameters and bodies, the one place that says what is taken; answers kept for a moment."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from moe_serve.controller.explaining import SECONDS_MAX
from moe_serve.dashboard import answers, endpoints, operating, reading
from moe_serve.dashboard.answers import ApiError
from moe_serve.dashboard.endpoints import Endpoint, Param
from moe_serve.dashboard.kept import KEYS_MAX, Kept
from moe_serve.errors import (
    FieldViolation,
    MoeServeError,
    NotFound,
    ResourceExhausted,
    StaleTerm,
    Unavailable,
)
from moe_serve.rpc import placement_pb2 as pb

ENDPOINTS = [
    one for module in (reading, operating) for one in vars(module).values() if type(one) is Endpoint
]


@pytest.mark.parametrize(
    ("param", "text", "value"),
    [
        (Param("n", "integer", "", low=1, high=9), "9", 9),
        (Param("n", "integer", "", low=1, high=9), "007", 7),
        (Param("n", "text", "", high=3), "äöü", "äöü"),
        (Param("n", "text", "", choices=("a", "b")), "b", "b"),
    ],
)
def test_values_within_bounds_are_taken(param: Param, text: str, value: Any) -> None:
    assert param.read(text) == value


@pytest.mark.parametrize(
    ("param", "texts"),
    [
        (
            Param("n", "integer", "", low=1, high=9),
            ["0", "10", "", "-1", "1.0", "x", "٣", "9" * 30],
        ),
        (Param("n", "text", "", high=3), ["abcd"]),
        (Param("n", "text", "", choices=("a", "b")), ["", "A", "ab"]),
    ],
)
def test_what_is_out_of_bounds_is_named(param: Param, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ApiError, match=r"^n must be") as refused:
            param.read(text)
        assert (refused.value.status, refused.value.field) == (400, "n")


@pytest.mark.parametrize(
    ("accept", "taken"),
    [
        ("", True),
        ("*/*", True),
        ("application/json", True),
        ("APPLICATION/JSON; charset=utf-8", True),
        ("text/html,application/xhtml+xml,*/*;q=0.8", True),
        ("application/*", True),
        (",", True),
        (" , ,", True),
        (",text/html", False),
        (",application/json,", True),
        ("text/html", False),
        ("application/json;q=0", False),
        ("application/json; q=0.000, text/html", False),
        ("applicationn/json", False),
    ],
)
def test_accept_is_understood(accept: str, taken: bool) -> None:
    endpoint = Endpoint("GET", "/x", "", {})
    request = make_mocked_request("GET", "/x", headers={"Accept": accept} if accept else {})
    if taken:
        endpoint.check_accept(request)
        return
    with pytest.raises(ApiError) as refused:
        endpoint.check_accept(request)
    assert refused.value.status == 406


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: f"{e.method} {e.path}")
def test_every_change_needs_csrf_and_no_look_does(endpoint: Endpoint) -> None:
    login = endpoint is operating.LOGIN
    assert endpoint.csrf == (endpoint.method != "GET" and not login)
    assert (endpoint.body is not None) == (endpoint.method == "POST")
    if endpoint.body is not None:
        assert {408, 413, 415} <= set(endpoint.errors)
        assert endpoint.body.__struct_config__.forbid_unknown_fields


def test_a_whole_number_may_be_written_with_a_point() -> None:
    async def read(data: bytes) -> Any:
        request = make_mocked_request("POST", "/x", headers={"Content-Type": "application/json"})
        request._read_bytes = data
        return await endpoints.read_body(request, operating.RankBody, 5.0)

    assert asyncio.run(read(b'{"rank": 3.0}')).rank == 3
    for wrong in (b'{"rank": 3.5}', b'{"rank": 1e300}', b'{"rank": "3"}', b'{"rank": true}'):
        with pytest.raises(ApiError, match="rank"):
            asyncio.run(read(wrong))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unavailable("x"), 503),
        (StaleTerm("x", term=3), 503),
        (MoeServeError("x"), 503),
        (ResourceExhausted("x", retry_after_s=2.5), 429),
    ],
)
def test_what_may_succeed_later_says_when(error: MoeServeError, status: int) -> None:
    found = answers.of_controller(error)
    assert found.status == status
    assert found.headers["Retry-After"] == ("3" if status == 429 else "5")


def test_what_no_document_is_of_is_not_found_and_named() -> None:
    error = NotFound("no phase decode", violations=(FieldViolation("phase", "no such"),))
    found = answers.of_nothing(error)
    assert (found.status, found.field, found.code) == (404, "phase", "not_found")


def test_csv_has_a_limit_that_names_another_way() -> None:
    with pytest.raises(ApiError) as refused:
        reading.csv_of(np.ones((400, 1024), dtype=np.int64), {})
    assert refused.value.status == 413
    assert "/api/v1/frame" in refused.value.next_step
    least = reading.csv_of(np.ones((64, 512), dtype=np.int64), {})
    assert len(least) < reading.CSV_BYTES_MAX


def test_errors_of_the_web_server_do_not_repeat_what_was_sent() -> None:
    found = answers.of_http(web.HTTPRequestEntityTooLarge(max_size=5, actual_size=9))
    assert (found.status, found.code) == (413, "too_large")
    odd = answers.of_http(web.HTTPExpectationFailed())
    assert odd.status == 400


def test_every_status_has_a_code_and_a_next_step() -> None:
    assert set(answers.CODES) == set(answers.NEXT_STEPS)
    error = ApiError(409, "<script>", field="x")
    body = msgspec.json.decode(error.response(as_json=True).body or b"")
    assert body["error"]["field"] == "x"
    assert error.response(as_json=False).content_type == "text/plain"


class Source:
    """Counts what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None

    async def answer(self, key: Any) -> str:
        self.asked.append(key)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return f"{key}/{len(self.asked)}"


@pytest.mark.asyncio
async def test_an_answer_is_kept_for_a_moment_and_asked_for_once() -> None:
    now_s, source = [10.0], Source()
    kept = Kept(lambda: now_s[0], 1.0)
    assert kept.last_age_s() is None
    many = await asyncio.gather(*(kept.ask("k", lambda: source.answer("k")) for _ in range(9)))
    assert {answer for answer, _ in many} == {"k/1"}
    now_s[0] += 0.75
    assert await kept.ask("k", lambda: source.answer("k")) == ("k/1", 0.75)
    now_s[0] += 0.25
    assert await kept.ask("k", lambda: source.answer("k")) == ("k/2", 0.0)
    kept.forget()
    assert (await kept.ask("k", lambda: source.answer("k")))[0] == "k/3"


@pytest.mark.asyncio
async def test_what_was_forgotten_was_answered_all_the_same() -> None:
    now_s, source = [10.0], Source()
    kept = Kept(lambda: now_s[0], 1.0)
    await kept.ask("k", lambda: source.answer("k"))
    now_s[0] += 4.0
    kept.forget()
    assert kept.last_age_s() == 4.0
    begun, gate = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        begun.set()
        await gate.wait()
        return "old"

    asked = asyncio.create_task(kept.ask("slow", slow))
    await begun.wait()
    now_s[0] += 2.0
    await kept.ask("k", lambda: source.answer("k"))
    gate.set()
    await asked
    assert kept.last_age_s() == 0.0, "it was asked before the newest"
    source.error = Unavailable("away")
    now_s[0] += 2.0
    with pytest.raises(Unavailable):
        await kept.ask("other", lambda: source.answer("other"))
    assert kept.last_age_s() == 2.0


@pytest.mark.asyncio
async def test_an_error_is_told_to_all_who_asked_and_not_kept() -> None:
    source = Source()
    kept = Kept(lambda: 0.0, 1.0)
    source.error = Unavailable("away")
    told = await asyncio.gather(
        *(kept.ask("k", lambda: source.answer("k")) for _ in range(3)), return_exceptions=True
    )
    assert [type(one) for one in told] == [Unavailable] * 3
    assert len(source.asked) == 1
    source.error = None
    assert (await kept.ask("k", lambda: source.answer("k")))[0] == "k/2"


@pytest.mark.asyncio
async def test_one_who_leaves_takes_no_answer_along() -> None:
    source, gate = Source(), asyncio.Event()

    async def slow() -> str:
        await gate.wait()
        return await source.answer("k")

    kept = Kept(lambda: 0.0, 1.0)
    first = asyncio.create_task(kept.ask("k", slow))
    second = asyncio.create_task(kept.ask("k", slow))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert (await second)[0] == "k/1"


@pytest.mark.asyncio
async def test_what_was_asked_before_a_change_answers_nobody_after_it() -> None:
    source, gate = Source(), asyncio.Event()

    async def slow() -> str:
        await gate.wait()
        return "old"

    kept = Kept(lambda: 0.0, 1.0)
    before = asyncio.create_task(kept.ask("k", slow))
    await asyncio.sleep(0)
    kept.forget()
    assert (await kept.ask("k", lambda: source.answer("k")))[0] == "k/1"
    gate.set()
    assert (await before)[0] == "old"
    assert (await kept.ask("k", lambda: source.answer("k")))[0] == "k/1", "the old is not kept"


@pytest.mark.asyncio
async def test_kept_answers_are_bounded() -> None:
    source = Source()
    kept = Kept(lambda: 0.0, 1.0)
    for key in range(KEYS_MAX + 1):
        await kept.ask(key, lambda key=key: source.answer(key))  # type: ignore[misc]
    await kept.ask(KEYS_MAX, lambda: source.answer(KEYS_MAX))
    assert len(source.asked) == KEYS_MAX + 1
    await kept.ask(0, lambda: source.answer(0))
    assert len(source.asked) == KEYS_MAX + 2, "the oldest was forgotten"


def test_the_page_looks_back_as_far_as_the_controller_does() -> None:
    (seconds,) = reading.EXPLAIN.params
    assert seconds.high == SECONDS_MAX
    with pytest.raises(ApiError, match="seconds must be"):
        seconds.read(str(int(SECONDS_MAX) + 1))


@pytest.mark.asyncio
async def test_what_changes_on_the_loop_is_looked_up_on_the_loop() -> None:
    looked_up: list[int] = []

    def noted(*_args: Any, **_options: Any) -> Any:
        looked_up.append(threading.get_ident())
        return []

    feed: Any = SimpleNamespace(
        history=SimpleNamespace(moves_of=noted),
        beginnings=SimpleNamespace(before=lambda *a, **o: noted() or None),
    )
    unused: Any = None
    of = reading.Reading(feed, unused, unused, unused)
    document = await of.drawn(pb.ExplainPlanResponse(plan=pb.PlanView(plan_id="p")), priced=False)
    assert document["plan"]["plan_id"] == "p"
    assert looked_up == [threading.get_ident()] * 2
