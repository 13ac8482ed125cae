"""What the soak does inside an actor's process: lose messages of a router, count what only the
process itself can count.

Production has no method for any of it: Ray's `__ray_call__` runs a function in an actor. All are
made inside of another function, because Ray sends only such functions whole; the others it would
look for in modules, and a part's process has none of the tests'. They do not run on the actor's
loop. Ray is imported late, as in `tests.service_cluster`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ANSWER_S = 20.0


def actor_of(name: str) -> Any:
    """Handle of a live actor. Raises ValueError where there is none."""
    import ray

    from moe_serve.bootstrap.fleet import NAMESPACE

    return ray.get_actor(name, namespace=NAMESPACE)


def call_in(name: str, function: Callable[[Any], Any], timeout_s: float = ANSWER_S) -> Any:
    """Result of `function(actor)` in the actor's process. Raises ValueError or Ray's errors."""
    import ray

    handle = actor_of(name)
    return ray.get(handle.__ray_call__.remote(function), timeout=timeout_s)


def lose_messages(rank: int, seconds: float, *, replies: bool) -> Callable[[Any], None]:
    """In a router: what it sends to a rank's shard, or what that answers, is lost for a while. The
    connection stays up."""

    def lose(actor: Any) -> None:
        core = actor._core
        loop = core._ticker.get_loop()
        name = "_take" if replies else "_sent"

        def drop(_anything: Any) -> bool:
            return True  # "sent", or taken and not looked at

        def begin() -> None:
            lanes = core._lanes._lanes
            channels = [lane.channel for (number, _), lane in lanes.items() if number == rank]
            for channel in channels:
                setattr(channel, name, drop)
            loop.call_later(seconds, end, channels)

        def end(channels: list[Any]) -> None:
            for channel in channels:
                vars(channel).pop(name, None)

        loop.call_soon_threadsafe(begin)

    return lose


def shard_counts() -> Callable[[Any], dict[str, float]]:
    """In a shard: what it holds and what runs for it."""

    def count(actor: Any) -> dict[str, float]:
        shard = actor._shard
        pool, memory = shard.pool, shard._memory()
        return {
            "held_slots": float(len(pool.held_slots)),
            "resident": float(len(shard.describe().resident)),
            "slot_bytes": float(pool.resident_bytes),
            "slab_bytes": float(memory.slab_bytes),
            "loaded_bytes": float(memory.loaded_bytes),
            "copies": float(len(shard.report(-1).copies)),
            "waiting": float(shard.core.counters()["queued_rows"]),
        }

    return count


def router_counts() -> Callable[[Any], dict[str, float]]:
    """In a router: what is open. All 0 where nobody calls."""

    def count(actor: Any) -> dict[str, float]:
        core = actor._core
        return {
            "open_requests": float(core.open_requests),
            "flights": float(len(core._flights)),
            "waiting_requests": float(core._permits.waiting),
        }

    return count


def task_names() -> Callable[[Any], dict[str, int]]:
    """In a router or the controller: how many tasks of which coroutine its loop has."""

    def count(actor: Any) -> dict[str, int]:
        import asyncio

        anchor = vars(actor).get("_starting")
        if not isinstance(anchor, asyncio.Task):
            anchor = actor._core._ticker
        found: dict[str, int] = {}
        for task in asyncio.all_tasks(anchor.get_loop()):
            name = getattr(task.get_coro(), "__qualname__", "?")
            found[name] = found.get(name, 0) + 1
        return found

    return count
