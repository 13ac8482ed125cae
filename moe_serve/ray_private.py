"""The few private Ray calls the service needs, in one place so that a Ray upgrade is checked here.

Responsible for: draining nodes, the atomic create-if-absent in Ray's key-value store that claims a
term, the first question to a cluster's head, and starting a node without Ray Client. Called by
`bootstrap` only. Written for ray>=2.60,<2.62.
"""

from __future__ import annotations

import sys
from typing import Any

from ray._private import services as _services
from ray._private.authentication import grpc_authentication_client_interceptor as _grpc_auth
from ray._private.state import state as _ray_state
from ray.experimental import internal_kv as _kv

_TERM_PREFIX = "moe_serve/term/"
HEAD_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""gRPC method of a cluster's head that answers at once and asks for the token; an empty message is
a request."""


def head_address(address: str) -> str:
    """host:port of a cluster's head as Ray itself reads an address ("auto", localhost), "" where it
    finds none. Raises ValueError, ConnectionError."""
    return str(_services.canonicalize_bootstrap_address(address) or "")


def token_metadata() -> tuple[tuple[str, str], ...]:
    """What Ray's own clients send to be let in; empty without token authentication. Raises
    RuntimeError where a token is wanted and none is found."""
    found: tuple[tuple[str, str], ...] = _grpc_auth._get_authentication_metadata_tuple()
    return found


def draining_nodes() -> dict[str, float]:
    """Node id -> deadline of its drain, in seconds of the Unix epoch (0 = none given). Blocks: call
    off the loop."""
    found: dict[str, int] = _ray_state.get_draining_nodes()
    return {node: deadline_ms / 1000.0 for node, deadline_ms in found.items()}


def claim_term(service: str, term: int) -> bool:
    """Create the key of a term. True for exactly one caller, ever; the losers get False. Blocks."""
    already_there = _kv._internal_kv_put(
        f"{_TERM_PREFIX}{service}/{term:012d}", b"1", overwrite=False
    )
    return not already_there


def highest_term(service: str) -> int:
    """Greatest claimed term of a service, 0 if none. Blocks."""
    keys: list[bytes] = _kv._internal_kv_list(f"{_TERM_PREFIX}{service}/")
    return max((int(key.decode().rsplit("/", 1)[1]) for key in keys), default=0)


def actor_nodes() -> dict[str, str]:
    """Name -> node id of every live named actor. Blocks."""
    table: dict[str, dict[str, Any]] = _ray_state.actor_table(None)
    return {
        str(entry["Name"]): str(entry["Address"]["NodeID"])
        for entry in table.values()
        if entry["Name"] and entry["State"] in {"ALIVE", "PENDING_CREATION", "RESTARTING"}
    }


def start_node(arguments: list[str]) -> None:
    """`ray start` with these arguments, Ray Client's server left out.

    Nothing here uses it, no option switches it off, and it would listen on one fixed port, which
    two clusters of a machine would share without a word. Does not return with --block.
    """
    from ray.scripts import scripts

    off = ImportError("not wanted here")
    scripts.get_ray_client_dependency_error = lambda: off  # type: ignore[attr-defined]
    scripts.start.main(args=arguments, prog_name="ray start")


if __name__ == "__main__":
    start_node(sys.argv[1:])
