"""Limits, keepalive and TLS of gRPC channels and servers: one set of numbers for both ends.

Responsible for options. Must never open a port or a channel. Called by every gRPC server and client
of the service.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

import grpc

from moe_serve.errors import StartRefused

Option = tuple[str, int]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Default of the greatest message, both ways."""

MESSAGE_SLACK_BYTES = 65_536
"""What the transport takes above the advertised limit, so that a message just over it is refused by
us, with the field named. Above the slack gRPC itself answers RESOURCE_EXHAUSTED."""


_IDENTITY_ONLY = 1


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Limits of one gRPC server. Every wait and queue that a peer can fill has one."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Greatest message, advertised to clients."""
    max_metadata_bytes: int = 8192
    """Headers of one call."""
    max_streams_per_connection: int = 256
    """Calls open at once on one connection."""
    max_concurrent_rpcs: int = 1024
    """Calls open at once on the server; above it gRPC answers RESOURCE_EXHAUSTED."""
    keepalive_s: float = 60.0
    """Seconds after which an idle connection with calls is probed, by either end."""
    ping_interval_min_s: float = 20.0
    """Clients that ping more often are sent away."""
    handshake_timeout_s: float = 10.0
    """A connection that has not finished its handshake by then is closed."""
    connection_idle_s: float = 300.0
    """A connection without any call for so long is closed; a client connects anew when it calls."""


def server_options(limits: RpcLimits) -> list[Option]:
    """Options of a server. Its port is its own: a second server cannot steal calls silently."""
    transport_bytes = limits.max_message_bytes + MESSAGE_SLACK_BYTES
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", transport_bytes),
        ("grpc.max_send_message_length", transport_bytes),
        # Soft equals hard: gRPC otherwise rejects at random between the two.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.keepalive_time_ms", round(limits.keepalive_s * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", round(limits.ping_interval_min_s * 1000)),
        ("grpc.server_handshake_timeout_ms", round(limits.handshake_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", round(limits.connection_idle_s * 1000)),
        # Rows hardly shrink, while a compressed message of one MiB may stand for the whole limit.
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
    ]


def channel_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES, keepalive_s: float = 60.0
) -> list[Option]:
    """Options of a client's channel. Retries are off: only the router and our client retry, by
    call.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes + MESSAGE_SLACK_BYTES),
        ("grpc.max_send_message_length", max_message_bytes + MESSAGE_SLACK_BYTES),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.enable_retries", 0),
    ]


def is_loopback(host: str) -> bool:
    """Whether a host to bind reaches this machine only. Names other than localhost are not looked
    up and count as open.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def server_credentials(certificate: Path, key: Path) -> grpc.ServerCredentials:
    """TLS 1.2 or newer of a server from PEM files.

    Raises StartRefused where a file is missing, empty or unreadable, where others may read the key,
    and where the two do not belong together.
    """
    pair = (_read(key, "TLS key", private=True), _read(certificate, "TLS certificate"))
    try:
        # gRPC takes any bytes here and only says later that it cannot bind. An encrypted key fails
        # instead of asking a terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise StartRefused(
            f"TLS certificate {certificate.name} and key {key.name} cannot be used together "
            f"({getattr(error, 'reason', None) or error}); both must be PEM, the key unencrypted"
        ) from error
    return grpc.ssl_server_credentials([pair])


def channel_credentials(authority: Path | None) -> grpc.ChannelCredentials:
    """TLS of a client: trust the PEM file, or the system's authorities where None. Raises
    StartRefused.
    """
    roots = None if authority is None else _read(authority, "TLS authority")
    return grpc.ssl_channel_credentials(root_certificates=roots)


def _read(path: Path, what: str, *, private: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            # Of the open file, so that the file that was checked is the one that is read.
            mode = os.fstat(file.fileno()).st_mode
            if private and mode & (stat.S_IRWXO | stat.S_IWGRP):
                shown = f"{stat.S_IMODE(mode):04o}"
                raise StartRefused(
                    f"{what} file {path.name} is open to others (mode {shown}); run: chmod 600"
                )
            data = file.read()
    except OSError as error:
        raise StartRefused(f"{what} file {path.name} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise StartRefused(f"{what} file {path.name} is empty")
    return data
