"""Shards between which an expert moves a thousand times, and a channel that connects as often, in
a process of their own: what else a process does opens and closes descriptors and threads as well.

`python -m tests.kinds.moved_often WHAT` prints figures, seen ten times on the way, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import zmq

from moe_serve.ports import RowStatus, SubCall
from moe_serve.shard.assembly import Shard
from moe_serve.shard.pages import process_resident_bytes
from moe_serve.wire.channel import ZmqShardChannel
from moe_serve.wire.server import Reply, WireServer
from moe_serve.wire.wire_messages import WireMessage
from placement.messages.effects import CopySource, ReleaseSlot
from placement.messages.events import SlotReleased
from placement.routing import RankAddress
from tests.fake_shards import until
from tests.fakes.marker_experts import add, marker_model, marker_shard
from tests.fakes.sub_calls import sub_call, sub_reply

TIMES = 1000
WARM = 100
PARTS = 10

Figures = dict[str, Callable[[], float]]
Seen = dict[str, list[float]]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def watch(figures: Figures, step: Callable[[int], None]) -> Seen:
    """Figures before, and after each of ten parts of the repetitions."""
    for number in range(WARM):
        step(number)
    seen: Seen = {name: [read()] for name, read in figures.items()}
    part = TIMES // PARTS
    for number in range(TIMES):
        step(WARM + number)
        if number % part == part - 1:
            for name, read in figures.items():
                seen[name].append(read())
    return seen


class Ends:
    """Two shards of one process over loopback, and where the expert is."""

    def __init__(self) -> None:
        model = marker_model()
        self.shards = [marker_shard(model=model, rank=rank, num_slots=3) for rank in range(2)]
        self.addresses = [shard.start() for shard in self.shards]
        self.steps = 0
        self.at, self.slot = 0, 0
        self.tag = self.add(0, 0, CopySource(rank=-1))

    def add(self, rank: int, slot: int, source: CopySource) -> int:
        self.steps += 1
        return add(self.shards[rank], slot, 1, step_id=self.steps, source=source)

    def release(self, rank: int, slot: int, tag: int) -> None:
        self.steps += 1
        shard = self.shards[rank]
        command = ReleaseSlot(
            step_id=self.steps, rank=rank, incarnation=1, slot=slot, slot_tag=tag, layer=0, expert=1
        )
        answer = shard.execute(1, command)
        assert isinstance(answer, SlotReleased), answer

    def move(self, number: int) -> None:
        """From the rank it is on to the other, into another slot each time."""
        goal, slot = 1 - self.at, number % 3
        source = CopySource(
            rank=self.at, slot=self.slot, slot_tag=self.tag, address=self.addresses[self.at]
        )
        tag = self.add(goal, slot, source)
        self.release(self.at, self.slot, self.tag)
        self.at, self.slot, self.tag = goal, slot, tag

    def stop(self) -> None:
        for shard in self.shards:
            shard.stop()


def held_bytes(shard: Shard) -> int:
    report = shard.report(-1)
    return report.resident_bytes + report.reserved_bytes


def migration() -> Seen:
    before = threading.active_count()
    ends = Ends()
    memory = lambda name: sum(getattr(s.report(-1).memory, name) for s in ends.shards)  # noqa: E731
    figures: Figures = {
        "held_bytes": lambda: sum(held_bytes(shard) for shard in ends.shards),
        "slab_bytes": lambda: memory("slab_bytes"),
        "loaded_bytes": lambda: memory("loaded_bytes"),
        "pinned_slots": lambda: sum(
            slot.pinned for shard in ends.shards for slot in shard.core.slots.ledger.slots
        ),
        "open_copies": lambda: sum(shard.copies.num_open for shard in ends.shards),
        "descriptors": descriptors,
        "threads": threading.active_count,
        "resident_bytes_of_process": process_resident_bytes,
    }
    seen = watch(figures, ends.move)
    ends.stop()
    return seen | {"threads_of_none": [before, threading.active_count()]}


def echo(message: WireMessage, reply: Reply) -> None:
    if isinstance(message, SubCall):
        served = [RowStatus.SERVED] * len(message.rows)
        reply(sub_reply(message.rows, served, call_id=message.call_id, sub_id=message.sub_id))


async def reconnects() -> Seen:
    server = WireServer(echo)
    server.bind()
    server.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = RankAddress(rank=0, node="n", address=server.address, incarnation=1)
    rows = np.ones((1, 8), np.float32)
    figures: Figures = {
        "descriptors": descriptors,
        "threads": threading.active_count,
        "tasks": lambda: len(asyncio.all_tasks()),
        "resident_bytes_of_process": process_resident_bytes,
    }
    seen: Seen = {name: [] for name in figures}
    part = TIMES // PARTS
    for number in range(WARM + TIMES + 1):
        channel = ZmqShardChannel(address, context=context)
        call = sub_call(rows, [(0, 0, 1, 1.0, 0)], call_id=number, sub_id=number)
        assert (await channel.forward(call)).call_id == number
        await channel.close()
        if number >= WARM and (number - WARM) % part == 0:
            # ZeroMQ closes behind one's back: what is closed goes a moment later.
            for name in ("descriptors", "threads", "tasks"):
                first = seen[name][0] if seen[name] else float("inf")
                with suppress(TimeoutError):
                    await until(lambda n=name, f=first: figures[n]() <= f, 1.0)
            for name, read in figures.items():
                seen[name].append(read())
    server.stop()
    context.destroy(0)
    return seen


if __name__ == "__main__":
    print(json.dumps(migration() if sys.argv[1] == "migration" else asyncio.run(reconnects())))
