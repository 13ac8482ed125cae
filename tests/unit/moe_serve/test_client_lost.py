"""Lost connection or the router's word: decides whether another router is asked."""

import grpc
import pytest

from moe_serve.client.lost import elsewhere, lost_or_typed
from moe_serve.errors import InvalidArgument, MoeServeError, Unavailable, WireLost
from moe_serve.rpc.status import DETAILS_KEY, to_status


class Failed(grpc.RpcError):
    """A failed call of a stub."""

    def __init__(self, code: grpc.StatusCode, sent: MoeServeError | None = None) -> None:
        super().__init__()
        self._code, self._sent = code, sent

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "text"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...] | None:
        if self._sent is None:
            return None
        return ((DETAILS_KEY, to_status(self._sent).SerializeToString()),)


@pytest.mark.parametrize("code", ["UNAVAILABLE", "CANCELLED", "INTERNAL"])
def test_a_lost_connection_is_asked_elsewhere(code: str) -> None:
    error = lost_or_typed(Failed(grpc.StatusCode[code]))
    assert isinstance(error, Unavailable)
    assert elsewhere(error)


@pytest.mark.parametrize(
    "error", [MoeServeError("a fault inside"), InvalidArgument("hidden: bad")], ids=["own", "bad"]
)
def test_the_routers_word_is_final(error: MoeServeError) -> None:
    got = lost_or_typed(Failed(grpc.StatusCode[error.code], error))
    assert type(got) is type(error)
    assert error.message in got.message
    assert not elsewhere(got)


@pytest.mark.parametrize("code", ["UNKNOWN", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"])
def test_other_failures_of_grpc_are_final(code: str) -> None:
    assert not elsewhere(lost_or_typed(Failed(grpc.StatusCode[code])))


def test_a_lost_wire_behind_the_router_counts_as_unavailable() -> None:
    got = lost_or_typed(Failed(grpc.StatusCode.UNAVAILABLE, WireLost("rank 1 is gone")))
    assert isinstance(got, WireLost)
    assert elsewhere(got)


def test_an_error_that_says_nothing_is_final() -> None:
    assert not elsewhere(lost_or_typed(grpc.RpcError()))
