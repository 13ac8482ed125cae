"""The admin port: a gRPC server around PlacementService, with tokens, TLS, health, and reflection
on loopback.

Responsible for binding and ending. Must never answer a request itself. Owned by the service.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import grpc.aio
from grpc_health.v1 import (  # type: ignore[import-untyped]
    health,
    health_pb2,
    health_pb2_grpc,
)
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from moe_serve.controller.admin import PlacementServicer, Source
from moe_serve.controller.settings import ControllerSettings
from moe_serve.errors import MoeServeError, StartRefused
from moe_serve.rpc import placement_pb2, placement_pb2_grpc
from moe_serve.rpc.audit import AuditInterceptor, admin_methods
from moe_serve.rpc.auth import AuthInterceptor, TokenFile, method_roles
from moe_serve.rpc.options import server_credentials, server_options
from moe_serve.rpc.undecodable import DecodeInterceptor
from moe_serve.telemetry import AuditLog, audit_file

SERVICE_NAME = placement_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name
PORT_FILE = "admin.port"


class AdminServer:
    """Bind, serve, stop. `address`: host:port that others reach, "" before the start. `port`: the
    one that was bound, 0 before."""

    def __init__(self, source: Source) -> None:
        settings = source.settings
        tokens = None if settings.token_file is None else TokenFile(settings.token_file)
        self._source = source
        self._audit = AuditLog(
            partial(audit_file, settings.state_dir), part="controller", node=settings.node
        )
        self._server = grpc.aio.server(
            interceptors=[
                *([] if tokens is None else [AuthInterceptor(tokens, audit=self._audit)]),
                AuditInterceptor(self._audit, admin_methods(method_roles()), self._epoch),
                DecodeInterceptor(),
            ],
            options=server_options(settings.limits),
            maximum_concurrent_rpcs=settings.limits.max_concurrent_rpcs,
        )
        self._health = health.aio.HealthServicer()
        self.address = ""
        self.port = 0

    async def start(self, last_port: int = 0) -> None:
        """Bind and serve.

        `last_port`: taken again where the settings leave the choice and it is free, so that clients
        of a controller that restarted find it; 0 = where this folder's last controller noted that
        it listened. Raises StartRefused where the port is taken or TLS files are bad.
        """
        settings = self._source.settings
        last_port = last_port or noted_port(settings.state_dir)
        self.port = _bind(self._server, settings, last_port)
        self.address = f"{settings.advertise_host or settings.host}:{self.port}"
        placement_pb2_grpc.add_PlacementServiceServicer_to_server(
            PlacementServicer(self._source), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.loopback:
            names = (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.tell_serving(True)
        await self._server.start()
        await asyncio.to_thread(_note_port, settings.state_dir, self.port)

    async def tell_serving(self, serving: bool) -> None:
        """Health of PlacementService: whether there is a controller behind it."""
        state = health_pb2.HealthCheckResponse
        await self._health.set(SERVICE_NAME, state.SERVING if serving else state.NOT_SERVING)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Take no new calls, let open ones finish for `grace_s`, then end everything."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        self._audit.close()

    def _epoch(self) -> int:
        try:
            table = self._source.sight().table
        except MoeServeError:  # between two lives there is no table to tell of
            return -1
        return -1 if table is None else table.epoch


def noted_port(folder: Path) -> int:
    """Port of the last admin server over this folder, 0 where none is noted. A file of its own: a
    controller that cannot read its journal still says so where it is looked for."""
    try:
        text = (folder / PORT_FILE).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return 0
    known = text.isascii() and text.isdecimal() and len(text) <= 5
    return int(text) if known and int(text) < 1 << 16 else 0


def _note_port(folder: Path, port: int) -> None:
    if noted_port(folder) != port:
        with contextlib.suppress(OSError):  # a full disk: it is looked for in the journal, too
            (folder / PORT_FILE).write_text(f"{port}\n", encoding="ascii")


def _bind(server: grpc.aio.Server, settings: ControllerSettings, last_port: int) -> int:
    wanted = settings.admin_port
    if not wanted and last_port:
        with contextlib.suppress(RuntimeError):  # taken meanwhile: any other will do
            return _add_port(server, settings, last_port)
    try:
        port = _add_port(server, settings, wanted)
    except RuntimeError as error:
        raise StartRefused(
            f"the controller cannot listen on {settings.host}:{wanted}; is the port taken?"
        ) from error
    if port == 0 or wanted not in (0, port):
        raise StartRefused(
            f"the controller cannot listen on {settings.host}:{wanted}; got port {port}"
        )
    return port


def _add_port(server: grpc.aio.Server, settings: ControllerSettings, port: int) -> int:
    address = f"{settings.host}:{port}"
    if settings.tls_certificate is None or settings.tls_key is None:
        return server.add_insecure_port(address)
    credentials = server_credentials(settings.tls_certificate, settings.tls_key)
    return server.add_secure_port(address, credentials)
