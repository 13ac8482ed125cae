"""The first question to a Ray head: is it there, does it ask for a token, is ours the right one?"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from moe_serve.bootstrap.ray_head import ask_head, find_head
from moe_serve.errors import StartRefused

ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
TOKEN = (("authorization", "Bearer " + "t" * 32),)


class Head(grpc.GenericRpcHandler):
    """Answers the one method as a Ray head does, to callers with the token, or to all."""

    def __init__(self, token: tuple[tuple[str, str], ...]) -> None:
        self._token = token

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        assert handler_call_details.method == ALIVE
        shown = tuple(handler_call_details.invocation_metadata)
        refused = any(pair not in shown for pair in self._token)

        def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
            if refused:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "token is missing or incorrect")
            return b"\x12\x062.60.0"

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def a_head(token: tuple[tuple[str, str], ...] = ()) -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((Head(token),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.mark.parametrize(("token", "asks"), [((), False), (TOKEN, True)])
def test_a_head_says_whether_it_asks_for_a_token(
    token: tuple[tuple[str, str], ...], asks: bool
) -> None:
    with a_head(token) as address:
        head = ask_head(address, TOKEN)
    assert (head.address, head.asks_for_token) == (address, asks)


@pytest.mark.parametrize(
    ("shown", "what"),
    [((), "has none"), ((("authorization", "Bearer " + "w" * 32),), "has another one")],
)
def test_a_token_that_is_not_taken_is_one_line_without_the_token(
    shown: tuple[tuple[str, str], ...], what: str
) -> None:
    with a_head(TOKEN) as address, pytest.raises(StartRefused, match=what) as refused:
        ask_head(address, shown)
    assert "\n" not in refused.value.message
    assert "RAY_AUTH_TOKEN_PATH" in refused.value.message
    assert "wwww" not in refused.value.message


def test_nobody_there_is_found_out_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(StartRefused, match=f"no Ray cluster answers at {address} .UNAVAILABLE."):
        ask_head(address, ())


def test_ray_client_is_not_a_head() -> None:
    with pytest.raises(StartRefused, match="address of Ray Client"):
        find_head("ray://127.0.0.1:10001")
