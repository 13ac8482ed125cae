"""Order of routers: sticky, failed ones last, the caller's own never forgotten."""

import pytest

from moe_serve.client.endpoints import ADDRESSES_MAX, SET_ASIDE_S, Endpoints
from moe_serve.errors import InvalidArgument

A, B, C, D = "a:1", "b:1", "c:1", "d:1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "1 to 256"),
        ("127.0.0.1:5000", "want a list"),
        (["localhost"], "host:port"),
        ([":5000"], "host:port"),
        (["host:http"], "host:port"),
        ([f"h{i}:1" for i in range(ADDRESSES_MAX + 1)], "holds 257"),
    ],
)
def test_bad_addresses_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        Endpoints(given)
    assert caught.value.violations[0].field == "addresses"


def test_ipv6_addresses_have_a_port() -> None:
    assert Endpoints(["[::1]:5000"]).addresses == ("[::1]:5000",)


def test_first_rotates_and_doubles_are_dropped() -> None:
    assert Endpoints([A, B, A, C], first=4).addresses == (B, C, A)


def test_the_preferred_router_is_kept_while_it_works() -> None:
    endpoints = Endpoints([A, B])
    assert [endpoints.pick(float(t)) for t in range(3)] == [A, A, A]


def test_a_failed_router_is_tried_last_and_stays_behind_the_one_that_works() -> None:
    endpoints = Endpoints([A, B])
    endpoints.failed(A, 0.0)
    assert endpoints.pick(0.0) == B
    endpoints.worked(B)
    # No return to A when its time is over: each return could cost a failed try.
    assert endpoints.pick(SET_ASIDE_S) == B
    endpoints.failed(B, SET_ASIDE_S)
    assert endpoints.pick(SET_ASIDE_S) == A


def test_all_set_aside_gives_the_one_that_failed_first() -> None:
    endpoints = Endpoints([A, B])
    endpoints.failed(B, 0.0)
    endpoints.failed(A, 1.0)
    assert endpoints.pick(2.0) == B
    assert endpoints.pick(2.0, frozenset({B})) == A
    assert endpoints.pick(2.0, frozenset({A, B})) == B


def test_a_router_tried_in_this_call_is_passed_over() -> None:
    endpoints = Endpoints([A, B])
    assert endpoints.pick(0.0, frozenset({A})) == B
    assert endpoints.pick(0.0, frozenset({A, B})) == A


def test_worked_ends_the_setting_aside() -> None:
    endpoints = Endpoints([A, B])
    endpoints.failed(A, 0.0)
    endpoints.failed(B, 0.5)
    endpoints.worked(A)
    assert endpoints.pick(1.0) == A


def test_learning_adds_new_routers_and_drops_learned_ones_that_left() -> None:
    endpoints = Endpoints([A])
    endpoints.learn([A, B, C])
    assert endpoints.addresses == (A, B, C)
    endpoints.learn([C, D])
    assert endpoints.addresses == (A, C, D), "A is the caller's: a name may lead to new routers"


def test_an_empty_list_forgets_nothing_that_the_caller_gave() -> None:
    endpoints = Endpoints([A, B])
    endpoints.learn([])
    assert endpoints.addresses == (A, B)


def test_learning_is_bounded() -> None:
    endpoints = Endpoints([A])
    endpoints.learn([f"h{i}:1" for i in range(2 * ADDRESSES_MAX)])
    assert len(endpoints.addresses) == ADDRESSES_MAX
    assert endpoints.addresses[0] == A


def test_failure_of_a_router_that_left_changes_nothing() -> None:
    endpoints = Endpoints([A])
    endpoints.failed(D, 0.0)
    assert endpoints.addresses == (A,)
