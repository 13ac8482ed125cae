"""Does Ray ask for a token? If not, whoever reaches one of its ports runs code on every node.

Responsible for reading the environment the way Ray does, and for refusing `network: cluster` over
an open Ray. Must never read a token. Called by `service`.

A driver that has no token joins only clusters that ask for none, so a start without one is over an
open cluster. A driver that has one joins both kinds: whether the head of a cluster given by address
asks for it is found out by asking it (`ray_head`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from moe_serve.config import ServiceConfig
from moe_serve.errors import StartRefused

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - the same


def why_open(environ: Mapping[str, str], home: Path) -> str:
    """Why a driver with this environment would join Ray without a token; "" where it has one."""
    mode = environ.get(MODE)
    if mode is not None:
        return "" if mode.lower() == "token" else f"{MODE} is {mode!r}"
    named = environ.get(TOKEN_PATH)
    file = Path(named) if named else home / ".ray" / "auth_token"
    if environ.get(TOKEN) or file.is_file():
        return ""
    return f"{MODE} is not set and there is no token"


def check_ray_auth(config: ServiceConfig, environ: Mapping[str, str], home: Path) -> str:
    """A line to show where Ray asks for no token, "" otherwise. Raises StartRefused with `network:
    cluster`, unless the operator accepts insecure access."""
    reason = why_open(environ, home)
    if not reason:
        return ""
    return _open(config, reason)


def check_open_head(config: ServiceConfig, address: str) -> str:
    """The same for a head that answered without a token, whatever this machine would have sent."""
    return _open(config, f"the head at {address} answers without one")


def join_auth(environ: MutableMapping[str, str], home: Path) -> None:
    """Show the token that this machine has to a cluster given by address.

    Ray does so by itself only where it finds the cluster by itself. Before Ray is imported.
    """
    if MODE not in environ and not why_open(environ, home):
        environ[MODE] = "token"


def _open(config: ServiceConfig, reason: str) -> str:
    line = f"Ray asks for no token ({reason}): whoever reaches its ports runs code on every node"
    if config.network == "cluster" and not config.security.accept_insecure:
        raise StartRefused(
            f"{line}; start every node with {MODE}=token and one token, set the same here, "
            "or accept the risk explicitly (--i-accept-insecure)"
        )
    return line
