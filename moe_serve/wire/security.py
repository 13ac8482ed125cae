"""CURVE keys of the wire: who may connect, and with whom one speaks.

Responsible for holding keys so that a secret never shows in text, and for setting them on sockets.
Must never write a key to a log, an argument list or an error. Called by channel, server and copy
client; keys travel only through actor handles.

Each server has a key pair of its own (its public half stands in the routing table's RankAddress).
All routers and shards of a service share one client key pair; a server admits exactly the client
keys it was given, since knowing a server's public key proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

KEY_CHARS = 40
"""Length of a Z85-encoded CURVE key."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair in Z85 text. `repr` shows the public half only.

    Raises ValueError where a key has not 40 characters.
    """

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        for name, key in (("public", self.public), ("secret", self.secret)):
            if len(key) != KEY_CHARS:
                raise ValueError(
                    f"curve key {name}: must have {KEY_CHARS} characters (got {len(key)})"
                )

    @staticmethod
    def generate() -> CurveKeys:
        """A new key pair from the system's randomness."""
        public, secret = zmq.curve_keypair()
        return CurveKeys(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """Keys of a server and the public keys of the clients it admits."""

    keys: CurveKeys
    clients: frozenset[str]


def secure_client(socket: zmq.Socket[Any], keys: CurveKeys, server_public: str) -> None:
    """Make a client socket speak CURVE with the server of that public key. Before connect."""
    socket.curve_serverkey = server_public.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


def secure_server(socket: zmq.Socket[Any], security: ServerSecurity) -> None:
    """Make a server socket admit CURVE clients only, each asked about at the context's ZAP
    endpoint. Before bind."""
    socket.curve_server = True
    socket.curve_secretkey = security.keys.secret.encode()
    socket.zap_domain = b"moe_serve"


def zap_answer(request: list[bytes], clients: frozenset[str]) -> list[bytes]:
    """Answer to a ZAP 1.0 request: 200 for an admitted CURVE key, 400 for anything else."""
    if len(request) != 7 or request[0] != b"1.0":
        return [b"1.0", request[1] if len(request) > 1 else b"", b"500", b"malformed", b"", b""]
    _version, request_id, _domain, _address, _identity, mechanism, key = request
    known = mechanism == b"CURVE" and len(key) == 32 and z85.encode(key).decode() in clients
    status = (b"200", b"OK") if known else (b"400", b"unknown key")
    return [b"1.0", request_id, *status, b"", b""]
