"""Calls of the controller to its parts that are lost, on a real service: ordered from a test while
the service runs, and counted for it.

`LosingFleet` stands between controller and fleet (`Drill.fleet`), in the controller's process. What
is to be lost is read from a file, so that it can change, and holds for every later controller; what
was lost is written to another. The losses are those of `tests.fakes.lossy`: the request, the reply,
a call that still runs while it is asked for again. Beside them a part may be cut off whole.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_serve.bootstrap.drill import Drill
from moe_serve.ports import Fleet, RouterPort, ShardPort
from tests.fakes.lossy import Loss, Lossy, Network

ORDERS, LOST = "orders.json", "lost.txt"
KINDS = tuple(Loss)


@dataclass(frozen=True, slots=True)
class Orders:
    """each: so many losses of every kind on each method since the service began, every other call.
    share: of all further calls, at random by `seed`. cut: parts ("rank 1", "router-0") that no call
    reaches."""

    each: int = 0
    share: float = 0.0
    seed: int = 0
    cut: tuple[str, ...] = ()


class RpcLoss:
    """The test's end. `folder` is of this service alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.order(Orders())

    def order(self, orders: Orders) -> None:
        """From the next call on."""
        fresh = self._folder / "orders.new"
        fresh.write_text(json.dumps(asdict(orders)))
        fresh.replace(self._folder / ORDERS)

    def heal(self) -> None:
        """Every call gets through."""
        self.order(Orders())

    @property
    def lost(self) -> Counter[tuple[str, str]]:
        """(method, kind of loss) -> how often, since the service began."""
        file = self._folder / LOST
        lines = file.read_text().splitlines() if file.exists() else []
        return Counter((method, kind) for method, kind in (line.split("\t") for line in lines))

    def drill(self, **more: Any) -> Drill:
        """To deploy the service with."""
        folder = str(self._folder)
        return Drill(fleet=lambda fleet: LosingFleet(fleet, folder), **more)


class LosingFleet:
    """A fleet whose parts are behind a network of orders. Picklable."""

    def __init__(self, fleet: Fleet, folder: str) -> None:
        self.fleet = fleet
        self.folder = folder
        self.made: dict[str, _Ordered] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("fleet", "folder", "made"):
            raise AttributeError(name)  # asked for while this is unpickled
        return getattr(self.fleet, name)

    async def create_shard(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._behind(name, ShardPort, await self.fleet.create_shard(name, *args, **kwargs))

    async def find_shard(self, name: str) -> Any:
        return self._behind(name, ShardPort, await self.fleet.find_shard(name))

    async def create_router(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._behind(name, RouterPort, await self.fleet.create_router(name, *args, **kwargs))

    async def find_router(self, name: str) -> Any:
        return self._behind(name, RouterPort, await self.fleet.find_router(name))

    def _behind(self, name: str, protocol: type, port: Any) -> Any:
        if port is None:
            return None
        place = name.split(":")[2]
        part = f"rank {place}" if protocol is ShardPort else place
        ordered = self.made.setdefault("all", _Ordered(Path(self.folder)))
        return Lossy(port, protocol, Network(lambda method, _: ordered.loss(part, method)))


class _Ordered:
    """What the orders say of a call, in the controller's process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp = 0
        self._orders = Orders()
        self._calls: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._rng = np.random.default_rng(0)

    def loss(self, part: str, method: str) -> Loss | None:
        """What becomes of one call."""
        self._read()
        if part in self._orders.cut:
            return self._note("cut", Loss.REQUEST)
        number = self._calls[method]
        self._calls[method] += 1
        lost = self._lost[method]
        if lost < self._orders.each * len(KINDS):
            # Every other call, so that each is asked for again with success.
            return self._note(method, KINDS[lost % len(KINDS)]) if number % 2 == 0 else None
        if self._rng.random() < self._orders.share:
            return self._note(method, KINDS[int(self._rng.integers(len(KINDS)))])
        return None

    def _read(self) -> None:
        file = self._folder / ORDERS
        stamp = file.stat().st_mtime_ns
        if stamp != self._stamp:
            self._stamp = stamp
            read = json.loads(file.read_text())
            self._orders = Orders(**{**read, "cut": tuple(read["cut"])})
            self._rng = np.random.default_rng([self._orders.seed, os.getpid()])
            # A controller before this one may have begun with the same orders.
            self._lost = Counter()
            for line in self._lines():
                self._lost[line.split("\t")[0]] += 1
            self._calls = Counter()

    def _lines(self) -> list[str]:
        file = self._folder / LOST
        return file.read_text().splitlines() if file.exists() else []

    def _note(self, method: str, loss: Loss) -> Loss:
        self._lost[method] += 1
        with (self._folder / LOST).open("a") as lines:
            lines.write(f"{method}\t{loss}\n")
        return loss
