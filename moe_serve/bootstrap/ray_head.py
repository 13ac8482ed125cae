"""Is there a Ray cluster at this address, does it ask for a token, and is ours the right one?

Responsible for one quick answer before Ray's own client is let loose: that tries a dead address for
many minutes, and says of a refused token only that it cannot connect. Must never log a token.
Called by `service`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from moe_serve.errors import StartRefused, first_line

Metadata = tuple[tuple[str, str], ...]

ANSWER_TIMEOUT_S = 10.0
"""A head answers in milliseconds, on a very busy machine in seconds."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """A head that answers. `asks_for_token`: False = whoever reaches it runs code on every node;
    None = not known (Ray runs with TLS)."""

    address: str
    asks_for_token: bool | None


def find_head(address: str) -> RayHead:
    """The head at an address of the form Ray takes (host:port, auto), ready to be joined.

    Raises StartRefused where nothing answers, where it is no Ray head, and where the token that
    this process would show is missing or wrong.
    """
    from moe_serve import ray_private

    if "://" in address:
        raise StartRefused(
            f"{address} is an address of Ray Client, which cannot deploy a service; give the "
            "head's own, host:port (usually port 6379)"
        )
    try:
        found = ray_private.head_address(address)
        shown = ray_private.token_metadata()
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartRefused(f"cannot join Ray at {address}: {first_line(error)}") from error
    if not found:
        raise StartRefused(f"no Ray cluster found for address {address!r}; give host:port")
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return RayHead(found, None)  # only Ray's own client has the certificates
    return ask_head(found, shown)


def ask_head(address: str, shown: Metadata) -> RayHead:
    """The head at host:port, asked without a token and, where it wants one, with `shown`.

    Raises StartRefused where it is not there or refuses `shown`.
    """
    if _admitted(address, ()):
        return RayHead(address, False)
    if _admitted(address, shown):
        return RayHead(address, True)
    what = "another one" if shown else "none"
    raise StartRefused(
        f"Ray at {address} asks for a token and this shell has {what}; set RAY_AUTH_MODE=token "
        "and RAY_AUTH_TOKEN_PATH to the file with the cluster's token"
    )


def _admitted(address: str, metadata: Metadata) -> bool:
    """Whether the head answers with this metadata. Raises StartRefused where it is not there."""
    from moe_serve import ray_private

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask: Callable[..., bytes] = channel.unary_unary(ray_private.HEAD_ALIVE)
        try:
            ask(b"", timeout=ANSWER_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            raise StartRefused(
                f"no Ray cluster answers at {address} ({error.code().name}); is the head running, "
                "and is this the port of its GCS (usually 6379)?"
            ) from error
    return True
