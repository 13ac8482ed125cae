"""Files of secrets and certificates that a service file names: what each is, and how it is checked.

Responsible for the one list of them. Must never show what they hold. Called by `service`, which
refuses to start with one that cannot be used, and by the doctor command, which reports on all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from moe_serve.config import ServiceConfig
from moe_serve.rpc.auth import TokenFile
from moe_serve.rpc.options import channel_credentials, server_credentials


@dataclass(frozen=True, slots=True)
class NamedFile:
    """`read` raises StartRefused where the file cannot be used by a service on this machine."""

    name: str
    read: Callable[[], object]


def named_files(config: ServiceConfig) -> list[NamedFile]:
    """Those that the service file names, in the order in which `up` reads them; none are read
    here. A certificate and its key are one entry: they must fit each other."""
    security = config.security
    found = []
    if security.token_file is not None:
        found.append(NamedFile("token file", partial(TokenFile, security.token_file)))
    if security.tls_ca_file is not None:
        read = partial(channel_credentials, security.tls_ca_file)
        found.append(NamedFile("TLS authority", read))
    if security.tls_cert_file is not None and security.tls_key_file is not None:
        pair = partial(server_credentials, security.tls_cert_file, security.tls_key_file)
        found.append(NamedFile("TLS certificate", pair))
    return found
