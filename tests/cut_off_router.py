"""A real router, in the test's own process, that no controller knows: it hears of a new table only
from a shard that refuses it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moe_serve.bootstrap.parts import moe_spec
from moe_serve.config import ServiceConfig
from moe_serve.ports import Cause, DType, SubCall, SubReply
from moe_serve.router.actor import wire_channels
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.lanes import ChannelFactory
from moe_serve.router.service import RouterServer
from moe_serve.router.settings import RouterSettings
from moe_serve.wire.channel import ZmqShardChannel
from placement.routing import RankAddress, RoutingTable
from placement.topology import Phase
from tests.marker_checkpoint import marker_rows

_T = TypeVar("_T")


class CutOffRouter:
    """`channels`: what it reaches shards with. `history_dir`: where it notes facts."""

    def __init__(
        self,
        config: ServiceConfig,
        channels: ChannelFactory | None = None,
        *,
        history_dir: Path | str = "",
    ) -> None:
        self._channels = channels or wire_channels(None)
        spec, layers = moe_spec(config)
        self._settings = RouterSettings(
            router="router-9",
            router_number=9,
            incarnation=1,
            spec=spec,
            checkpoint_layers=layers,
            history_dir=str(history_dir),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.core: RouterCore
        self.server: RouterServer

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run on the router's loop."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(60.0)

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def counters(self) -> dict[str, float]:
        async def ask() -> dict[str, float]:
            return self.core.report(-1).counters

        return self.run(ask)

    @property
    def table(self) -> RoutingTable:
        table = self.core.role.table
        assert table is not None
        return table

    @contextmanager
    def serving(self, first: RankAddress) -> Iterator[CutOffRouter]:
        """Serve under the table that a shard keeps now; whatever comes later is not told."""

        async def start() -> None:
            self.core = RouterCore(self._settings, self._channels)
            self.server = RouterServer(self.core)
            await self.server.start()
            channel = ZmqShardChannel(first)
            table = await channel.fetch_table()
            await channel.close()
            assert table is not None
            self.core.install_table(table, [self.server.address])

        async def stop() -> None:
            await self.server.stop(1.0)

        self._thread.start()
        try:
            self.run(start)
            yield self
            self.run(stop)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
            self._loop.close()

    def ask_slot(self, address: RankAddress, layer: int, expert: int, slot: int, tag: int) -> Any:
        """One pair of one row sent to one slot under a tag. Returns the row and the reply."""
        row = marker_rows(np.random.default_rng(slot), 1)
        call = SubCall(
            router="router-9",
            call_id=1,
            sub_id=1,
            request_key=1,
            layer=layer,
            phase=int(Phase.DECODE),
            cause=Cause.FIRST,
            incarnation=address.incarnation,
            term=self.table.term,
            epoch=self.table.epoch,
            dtype=DType.FLOAT32,
            timeout_s=10.0,
            rows=row,
            row_id=np.zeros(1, np.int32),
            pair_row=np.zeros(1, np.int32),
            pair_slot=np.array([slot], np.int32),
            pair_tag=np.array([tag], np.int64),
            pair_gate=np.ones(1, np.float32),
            pair_k=np.zeros(1, np.int32),
            pair_expert=np.array([expert], np.int32),
        )

        async def send() -> SubReply:
            channel = ZmqShardChannel(address)
            try:
                return await channel.forward(call)
            finally:
                await channel.close()

        return row, self.run(send)
