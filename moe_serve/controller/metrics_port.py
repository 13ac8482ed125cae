"""The metrics port: `GET /metrics` for a plain Prometheus, and nothing else.

Responsible for binding, for who may read, and for ending. Must never hold up the controller: pages
are written out on another thread, a few at once, and a port that cannot be had is a problem told,
not a controller that does not start. Owned by the service.

Where the service has tokens, one of role `read` is asked for, as at the admin port; where it has
TLS files, the port speaks TLS only.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from aiohttp import hdrs, web

from moe_serve.controller.settings import ControllerSettings
from moe_serve.errors import MoeServeError, StartRefused
from moe_serve.rpc.auth import Role, TokenFile
from moe_serve.telemetry import Metrics, MetricSink, TeeSink
from moe_serve.telemetry.prometheus import PrometheusSink
from moe_serve.telemetry.router_figures import RoutersFigures

PATH: Final = "/metrics"
READERS_MAX: Final = 4
"""Pages written out at once; who asks beyond that is told to ask again."""
BACKLOG: Final = 16
KEEPALIVE_S: Final = 30.0
SHUTDOWN_S: Final = 1.0


class MetricsPort:
    """`start`, then `stop`. `sink`: what is shown."""

    def __init__(self, settings: ControllerSettings, sink: PrometheusSink) -> None:
        self._settings = settings
        self._sink = sink
        self._tokens: TokenFile | None = None
        self._readers = 0
        self._runner: web.AppRunner | None = None
        self.address = ""
        """host:port that others reach, "" before the start."""

    async def start(self) -> None:
        """Bind and serve. Raises StartRefused."""
        settings = self._settings
        assert settings.metrics_port is not None, "the settings name no metrics port"
        context = self._tls()
        if settings.token_file is not None:
            self._tokens = TokenFile(settings.token_file)
        application = web.Application(client_max_size=0)
        application.router.add_get(PATH, self._page, allow_head=False)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=SHUTDOWN_S,
            max_field_size=4096,
            max_line_size=4096,
        )
        await self._runner.setup()
        site = web.TCPSite(
            self._runner,
            settings.host,
            settings.metrics_port,
            ssl_context=context,
            backlog=BACKLOG,
        )
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise StartRefused(
                f"metrics cannot be served on {settings.host}:{settings.metrics_port}: "
                f"{error.strerror}; choose another ports.metrics, or 0 for any free one"
            ) from error
        port = int(self._runner.addresses[0][1])
        host = settings.advertise_host or settings.host
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Close the port. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _tls(self) -> ssl.SSLContext | None:
        certificate, key = self._settings.tls_certificate, self._settings.tls_key
        if certificate is None or key is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise StartRefused(f"metrics cannot be served: TLS files: {error}") from error
        return context

    async def _page(self, request: web.Request) -> web.Response:
        if not self._may_read(request):
            challenge = {hdrs.WWW_AUTHENTICATE: "Bearer"}
            return web.Response(status=401, text="a read token is needed\n", headers=challenge)
        if self._readers >= READERS_MAX:
            busy = {hdrs.RETRY_AFTER: "1"}
            return web.Response(status=503, text="too many readers at once\n", headers=busy)
        self._readers += 1
        try:
            accept = request.headers.get(hdrs.ACCEPT, "")
            page, content_type = await asyncio.to_thread(self._sink.snapshot().text, accept)
        finally:
            self._readers -= 1
        return web.Response(
            body=page,
            headers={hdrs.CONTENT_TYPE: content_type, hdrs.CACHE_CONTROL: "no-store"},
        )

    def _may_read(self, request: web.Request) -> bool:
        if self._tokens is None:
            return True
        try:
            return Role.READ in self._tokens.roles(request.headers.get(hdrs.AUTHORIZATION))
        except MoeServeError:
            return False


class ServedMetrics:
    """Metrics of one controller process: those it tells, to `sink` and to the metrics port where
    there is one, and that port. `routers`: what routers report, for the port alone, since with
    Ray's exporter they tell it themselves; None without a port."""

    def __init__(self, settings: ControllerSettings, sink: MetricSink) -> None:
        plain = None if settings.metrics_port is None else PrometheusSink()
        # Ray's exporter takes 0.2 s for the experts of a large model, on the controller's loop.
        per_expert = plain if settings.metrics_per_expert else None
        both = sink if plain is None else TeeSink(sink, plain)
        self.metrics = Metrics(both, per_expert=per_expert)
        self.metrics.begin()
        self.routers = None if plain is None else RoutersFigures(Metrics(plain))
        self._port = None if plain is None else MetricsPort(settings, plain)
        self.fault = ""
        """Why the port is not served, "" where it is or is not wanted."""

    @property
    def address(self) -> str:
        """host:port of the metrics port, "" where there is none."""
        return "" if self._port is None else self._port.address

    async def start(self) -> None:
        """Serve the port, where one is wanted; `fault` says why it could not be."""
        if self._port is None or self._port.address:
            return
        try:
            await self._port.start()
        except StartRefused as error:
            self.fault = error.message
        else:
            self.fault = ""

    async def stop(self) -> None:
        """Close the port."""
        if self._port is not None:
            await self._port.stop()
