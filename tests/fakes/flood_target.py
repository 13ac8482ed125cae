"""A router over fake shards, or a shard's wire, in a process of its own, to be flooded.

Prints its address and serves until its standard input ends. The memory it takes is looked at from
outside.

    python -m tests.fakes.flood_target router --handshake-s 1
    python -m tests.fakes.flood_target wire --handshake-s 1 --keys
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace

from moe_serve.ports import RowStatus, SubCall
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import RouterServer
from moe_serve.rpc.options import RpcLimits
from moe_serve.wire.security import CurveKeys, ServerSecurity
from moe_serve.wire.server import Reply, WireServer
from moe_serve.wire.sockets import WireOptions
from moe_serve.wire.wire_messages import WireMessage
from tests.fake_shards import FakeWorld, marker_spec, router_settings
from tests.fakes.sub_calls import sub_reply


async def serve_router(handshake_s: float) -> None:
    """A placed router with default limits, except for the handshake."""
    world = FakeWorld(marker_spec())
    world.place()
    limits = replace(RpcLimits(), handshake_timeout_s=handshake_s)
    core = RouterCore(router_settings(world.spec, limits=limits), world.open_channel)
    core.install_table(world.table())
    server = RouterServer(core)
    print(await server.start(), flush=True)
    forgetting = asyncio.create_task(_forget(world))
    await asyncio.to_thread(sys.stdin.read)
    forgetting.cancel()
    await server.stop(0.0)


async def _forget(world: FakeWorld) -> None:
    """Fake shards note every call for tests; here that would look like a leak."""
    while True:
        for shard in world.shards:
            shard.calls.clear()
            shard.executed.clear()
        await asyncio.sleep(0.1)


def serve_wire(handshake_s: float, keys: bool) -> None:
    """A wire server that sends rows back."""

    def echo(message: WireMessage, reply: Reply) -> None:
        if isinstance(message, SubCall):
            served = [RowStatus.SERVED] * len(message.rows)
            reply(sub_reply(message.rows, served, call_id=message.call_id, sub_id=message.sub_id))

    own, client = CurveKeys.generate(), CurveKeys.generate()
    security = ServerSecurity(own, frozenset({client.public})) if keys else None
    # Heartbeats would end a peer that never finishes a message, and hide what the limit does.
    options = WireOptions(handshake_s=handshake_s, heartbeat_s=60.0, heartbeat_timeout_s=120.0)
    server = WireServer(echo, options=options, security=security)
    address = server.bind()
    server.start()
    print(" ".join([address, *((own.public, client.public, client.secret) if keys else ())]))
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["router", "wire"])
    parser.add_argument("--handshake-s", type=float, default=10.0)
    parser.add_argument("--keys", action="store_true")
    chosen = parser.parse_args()
    if chosen.what == "router":
        asyncio.run(serve_router(chosen.handshake_s))
    else:
        serve_wire(chosen.handshake_s, chosen.keys)


if __name__ == "__main__":
    main()
