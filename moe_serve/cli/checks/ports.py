"""Ports: can this machine listen on loopback, and are the configured ones free?"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from moe_serve.cli.checks.row import Check, Level
from moe_serve.config import ServiceConfig

TOPIC = "ports"
LOOPBACK = "127.0.0.1"
PROXY_VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")

Listen = Callable[[str, int], None]


def listen_once(host: str, port: int) -> None:
    """Bind a port for a moment. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)


def port_checks(config: ServiceConfig | None, listen: Listen = listen_once) -> list[Check]:
    """Loopback, then each port that the service file names."""
    rows = [_one("loopback", 0, listen)]
    if config is not None:
        ports = config.ports
        wanted = [(f"grpc {ports.grpc + n}", ports.grpc + n) for n in range(config.fleet.routers)]
        wanted = wanted if ports.grpc else [("grpc", 0)]
        wanted += [("admin", ports.admin), ("dashboard", ports.dashboard)]
        for name, port in wanted:
            if port:
                rows.append(_one(name, port, listen))
            else:
                rows.append(Check(TOPIC, name, Level.OK, "chosen by the operating system"))
    return rows + _proxies()


def _one(name: str, port: int, listen: Listen) -> Check:
    try:
        listen(LOOPBACK, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            step = "end what listens there, or choose 0"
            return Check(TOPIC, name, Level.FAIL, f"{LOOPBACK}:{port} is taken", step)
        return Check(TOPIC, name, Level.FAIL, f"{LOOPBACK}:{port}: {error.strerror}")
    where = f"{LOOPBACK}:{port} is free" if port else f"{LOOPBACK} can be listened on"
    return Check(TOPIC, name, Level.OK, where)


def _proxies() -> list[Check]:
    found = sorted(
        name for name in PROXY_VARIABLES if os.environ.get(name) or os.environ.get(name.upper())
    )
    if not found:
        return []
    # The values may hold a password: only the names are shown.
    detail = f"{', '.join(found)} set; the command line ignores it"
    return [Check(TOPIC, "proxy", Level.NOTE, detail)]
