"""The Ray face of a router: bytes in, bytes out, no rule of its own; and the controller's end of
it.

`RouterActor` becomes an async actor by `ray.remote(RouterActor).options(...)` in bootstrap (named,
detached, max_restarts=0). `RouterRemote` is the real `ports.RouterPort`: it awaits the actor's
methods. Tables, infos and reports cross as msgpack of `placement.messages.codec`; errors cross as
fields, since an exception class of ours would have to be unpickled.

Responsible for this translation only. Must never hold state beside the core and the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from ray.exceptions import RayActorError, RayError

from moe_serve.errors import InvalidArgument, MoeServeError, StaleTerm, StartRefused, Unavailable
from moe_serve.ports import RouterInfo, RouterReport, ShardChannel
from moe_serve.router import kernels as router_kernels
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.lanes import ChannelFactory, OnDisconnect
from moe_serve.router.ledger import LedgerPage
from moe_serve.router.service import RouterServer
from moe_serve.router.settings import RouterSettings
from moe_serve.telemetry import Metrics
from moe_serve.telemetry.router_figures import RouterFigures
from moe_serve.telemetry.sink import RaySink, actor_lines
from moe_serve.telemetry.traces import open_traces
from moe_serve.wire.channel import ZmqShardChannel
from moe_serve.wire.security import CurveKeys
from moe_serve.wire.sockets import WireOptions
from placement.messages.codec import decode_as, encode
from placement.roles import kernels as role_kernels
from placement.routing import RankAddress, RoutingTable
from placement.split import kernels as split_kernels
from placement.split.pairs import kernels as pair_kernels

CALL_TIMEOUT_S = 10.0
"""Longest wait for an answer."""
START_TIMEOUT_S = 120.0
"""Longest wait for a start: a cold node compiles the kernels first."""


class InstallAnswer(msgspec.Struct, frozen=True):
    """Answer to install_table: the applied epoch, or why the table was refused."""

    applied_epoch: int = 0
    stale_term: int = 0
    fault: str = ""


class StartAnswer(msgspec.Struct, frozen=True):
    """Answer to start: the router, or why it will not start."""

    info: RouterInfo | None = None
    fault: str = ""


def wire_channels(keys: CurveKeys | None, options: WireOptions | None = None) -> ChannelFactory:
    """Factory of ZeroMQ channels; `keys`: the service's client keys, None without CURVE."""

    def open_channel(address: RankAddress, on_disconnect: OnDisconnect) -> ShardChannel:
        return ZmqShardChannel(
            address,
            keys=keys if address.public_key else None,
            options=options,
            on_disconnect=on_disconnect,
        )

    return open_channel


class RouterActor:
    """One router in an actor process. Call `start` first.

    last_port: where its last life listened, taken again where the settings name no port and it is
    free; 0 = there was none.
    """

    def __init__(
        self, settings: RouterSettings, keys: CurveKeys | None = None, last_port: int = 0
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._last_port = 0 if settings.port else last_port
        self._core: RouterCore | None = None
        self._server: RouterServer | None = None
        self._figures = RouterFigures(Metrics(RaySink()), settings.router)
        self._starting = asyncio.Lock()
        actor_lines(part=settings.router, incarnation=settings.incarnation)

    async def start(self) -> bytes:
        """Compile kernels, bind, serve. Returns StartAnswer; calling it again gives the same
        answer.
        """
        # Two callers at once must not open two ports, one of which nobody would ever close.
        async with self._starting:
            if self._core is None:
                for module in (split_kernels, pair_kernels, role_kernels, router_kernels):
                    module.warm()
                try:
                    self._core, self._server = await self._served()
                except StartRefused as error:
                    return encode(StartAnswer(fault=error.message))
        return encode(StartAnswer(info=self._info()))

    async def _served(self) -> tuple[RouterCore, RouterServer]:
        """Bound and serving: at the last port where that is free, else at any."""
        if self._last_port:
            with contextlib.suppress(StartRefused):
                return await self._bound(replace(self._settings, port=self._last_port))
        return await self._bound(self._settings)

    async def _bound(self, settings: RouterSettings) -> tuple[RouterCore, RouterServer]:
        traces = open_traces(
            settings.traces, service=settings.service, part=settings.router, node=settings.node
        )
        core = RouterCore(settings, wire_channels(self._keys, settings.wire), traces=traces)
        try:
            server = RouterServer(core)
            await server.start()
        except BaseException:
            await core.stop()
            raise
        return core, server

    async def describe(self) -> bytes:
        """RouterInfo."""
        return encode(self._info())

    async def install_table(
        self, table: bytes, peers: Sequence[str], suspects: Sequence[int] = ()
    ) -> bytes:
        """Use a table if it is newer. Returns InstallAnswer."""
        try:
            epoch = self._running().install_table(decode_as(table, RoutingTable), peers, suspects)
        except StaleTerm as error:
            return encode(InstallAnswer(stale_term=error.term, fault=error.message))
        except MoeServeError as error:
            return encode(InstallAnswer(fault=error.message))
        return encode(InstallAnswer(applied_epoch=epoch))

    async def report(self, acked_seq: int) -> bytes:
        """RouterReport after `acked_seq`."""
        report = self._running().report(acked_seq)
        self._figures.tell(report)
        return encode(report)

    async def take_ledger(self, max_entries: int) -> bytes:
        """LedgerPage: the oldest entries of the combined ledger, removed."""
        return encode(self._running().ledger.take(max_entries))

    async def stop(self, grace_s: float = 5.0) -> None:
        """Let open calls finish, then close port and channels."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _running(self) -> RouterCore:
        assert self._core is not None, "start comes first"
        return self._core

    def _info(self) -> RouterInfo:
        assert self._server is not None, "start comes first"
        return self._running().describe(self._server.address, os.getpid())


class RouterRemote:
    """`ports.RouterPort` of a router actor. `handle`: the actor's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def start(self) -> RouterInfo:
        """Start serving. Raises StartRefused, Unavailable."""
        reply = await _call(self._handle.start.remote(), START_TIMEOUT_S)
        answer = decode_as(reply, StartAnswer)
        if answer.info is None:
            raise StartRefused(answer.fault)
        return answer.info

    async def describe(self) -> RouterInfo:
        """Identity and port. Raises Unavailable."""
        return decode_as(await _call(self._handle.describe.remote()), RouterInfo)

    async def install_table(
        self, table: RoutingTable, peers: Sequence[str], suspects: Sequence[int] = ()
    ) -> int:
        """Use a table if it is newer; returns the applied epoch. Raises StaleTerm, InvalidArgument,
        Unavailable.
        """
        reply = await _call(
            self._handle.install_table.remote(encode(table), list(peers), list(suspects))
        )
        answer = decode_as(reply, InstallAnswer)
        if answer.stale_term:
            raise StaleTerm(answer.fault, term=answer.stale_term)
        if answer.fault:
            raise InvalidArgument(answer.fault)
        return answer.applied_epoch

    async def report(self, acked_seq: int) -> RouterReport:
        """Demand after `acked_seq`, acknowledgements, gauges. Raises Unavailable."""
        return decode_as(await _call(self._handle.report.remote(acked_seq)), RouterReport)

    async def take_ledger(self, max_entries: int) -> LedgerPage:
        """Oldest entries of the combined ledger, removed there. Raises Unavailable."""
        return decode_as(await _call(self._handle.take_ledger.remote(max_entries)), LedgerPage)

    async def stop(self, grace_s: float) -> None:
        """Let open calls finish, then close. Raises Unavailable."""
        await _call(self._handle.stop.remote(grace_s), CALL_TIMEOUT_S + grace_s)


async def _call(reply: Awaitable[Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """The answer. Whatever Ray raises is Unavailable: also a part that is there and cannot answer
    yet, such as one whose controller died before it was told to start."""
    try:
        async with asyncio.timeout(timeout_s):
            return await reply
    except TimeoutError as error:
        raise Unavailable(f"the router did not answer within {timeout_s:g} s") from error
    except RayActorError as error:
        raise Unavailable("the router actor is gone") from error
    except RayError as error:
        raise Unavailable(f"the router failed: {type(error).__name__}") from error
