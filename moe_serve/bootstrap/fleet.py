"""The real Fleet: parts as named, detached Ray actors, placed by node labels.

Responsible for creating, finding and ending actors, and for the claim of a term in Ray's key-value
store. Decides nothing about experts. Handed to the controller as a constructor argument, so that
Ray's restart of it has it too.

No actor of ours reports its calls to Ray as task events: reports are asked for four times a second
for ever, and keeping an event of each cost a process 18 MB and grew with every call.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from moe_serve import ray_private
from moe_serve.bootstrap.nodes import RayNode, choose_node, node_of
from moe_serve.bootstrap.parts import PartsPlan
from moe_serve.controller.names import PartKind, parse, prefix
from moe_serve.errors import StartRefused, Unavailable
from moe_serve.ports import FILE_PLACE, NodeInfo, RankPlace
from moe_serve.router.actor import RouterActor, RouterRemote
from moe_serve.shard.actor import SHARD_ENV_VARS, RayShardPort, remote_shard_actor

_T = TypeVar("_T")
NAMESPACE = "moe_serve"
"""Ray namespace of every actor of every service."""
START_TIMEOUT_S = 120.0
"""A shard computes the manifest once; a cold node also imports Ray's worker."""


def controller_name(service: str) -> str:
    """Actor name of a service's controller."""
    return f"{prefix(service)}controller"


def dashboard_name(service: str) -> str:
    """Actor name of a service's page."""
    return f"{prefix(service)}dashboard"


def _ray_nodes() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return listed


def _remote(kind: type) -> Any:
    """Ray's actor class of ours; its own types know nothing of `options` on it."""
    return ray.remote(kind)


def alive_nodes() -> list[RayNode]:
    """Alive nodes in order of id. Blocks."""
    return sorted(
        (node_of(info) for info in _ray_nodes() if info["Alive"]), key=lambda node: node.node_id
    )


class RayFleet:
    """`ports.Fleet` over Ray. Picklable: holds the plan, and where parts go that are being made.
    Blocking Ray calls run in threads."""

    def __init__(self, plan: PartsPlan) -> None:
        self._plan = plan
        # Ray does not say where an actor will be before it runs. Without this, parts that are
        # created at once would all see the same empty node.
        self._going: dict[str, str] = {}

    @property
    def _service(self) -> str:
        return self._plan.config.service

    async def create_shard(
        self, name: str, rank: int, incarnation: int, place: RankPlace = FILE_PLACE
    ) -> RayShardPort:
        """See `ports.Fleet.create_shard`."""
        labels = self._plan.group(rank, place).node_labels
        kind, what = PartKind.SHARD, f"rank {rank}"
        async with self._place(name, kind, labels, what, place.only_node) as node:
            return await self._create_shard(name, rank, incarnation, node, place)

    async def _create_shard(
        self, name: str, rank: int, incarnation: int, node: RayNode, place: RankPlace
    ) -> RayShardPort:
        group = self._plan.group(rank, place)
        domain_label = group.failure_domain_label
        settings = self._plan.shard_settings(
            rank,
            incarnation,
            node=node.node,
            failure_domain=node.labels.get(domain_label, node.node) if domain_label else node.node,
            host=self._host(node),
            place=place,
        )
        actor = remote_shard_actor().options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            enable_task_events=False,
            num_cpus=group.num_cpus,
            num_gpus=group.num_gpus,
            label_selector={"ray.io/node-id": node.node_id},
            runtime_env={"env_vars": self._environment(SHARD_ENV_VARS, group.num_gpus)},
        )
        handle = await _off_loop(actor.remote, settings)
        port = RayShardPort(handle)
        await self._first_answer(name, handle.describe.remote())
        return port

    async def create_router(
        self, name: str, router: str, incarnation: int, port: int = 0
    ) -> RouterRemote:
        """See `ports.Fleet.create_router`."""
        labels = self._plan.config.fleet.router_node_labels
        async with self._place(name, PartKind.ROUTER, labels, router) as node:
            return await self._create_router(name, router, incarnation, node, port)

    async def _create_router(
        self, name: str, router: str, incarnation: int, node: RayNode, last_port: int
    ) -> RouterRemote:
        first_port = self._plan.config.ports.grpc
        settings = self._plan.router_settings(
            router,
            incarnation,
            node=node.node,
            host=self._host(node),
            port=first_port + int(router.rsplit("-", 1)[1]) if first_port else 0,
        )
        actor = _remote(RouterActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            enable_task_events=False,
            num_cpus=0,
            label_selector={"ray.io/node-id": node.node_id},
            runtime_env={"env_vars": self._environment(SHARD_ENV_VARS, 0)},
        )
        handle = await _off_loop(actor.remote, settings, self._plan.wire_keys, last_port)
        remote = RouterRemote(handle)
        await self._first_answer(name, handle.start.remote())
        await remote.start()  # raises StartRefused with the router's own words
        return remote

    async def find_shard(self, name: str) -> RayShardPort | None:
        """See `ports.Fleet.find_shard`."""
        handle = await _off_loop(_actor, name)
        return None if handle is None else RayShardPort(handle)

    async def find_router(self, name: str) -> RouterRemote | None:
        """See `ports.Fleet.find_router`."""
        handle = await _off_loop(_actor, name)
        return None if handle is None else RouterRemote(handle)

    async def part_names(self) -> tuple[str, ...]:
        """See `ports.Fleet.part_names`."""
        return tuple(
            name
            for name in await _off_loop(actor_names, self._service)
            if parse(self._service, name) is not None
        )

    async def kill(self, name: str) -> None:
        """See `ports.Fleet.kill`."""
        await _off_loop(kill_actor, name)

    async def alive(self, name: str) -> bool:
        """See `ports.Fleet.alive`. Ray drops the name of a dead actor."""
        return await _off_loop(_actor, name) is not None

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """See `ports.Fleet.nodes`."""
        listed, draining = await asyncio.gather(
            _off_loop(_ray_nodes), _off_loop(ray_private.draining_nodes)
        )
        found = []
        for info in listed:
            node = node_of(info)
            found.append(
                NodeInfo(node.node, bool(info["Alive"]), node.labels, draining.get(node.node_id))
            )
        return tuple(sorted(found, key=lambda node: node.node))

    async def claim_term(self, term: int) -> bool:
        """See `ports.Fleet.claim_term`."""
        return await _off_loop(ray_private.claim_term, self._service, term)

    async def highest_term(self) -> int:
        """See `ports.Fleet.highest_term`."""
        return await _off_loop(ray_private.highest_term, self._service)

    def _host(self, node: RayNode) -> str:
        return "127.0.0.1" if self._plan.config.network == "loopback" else node.ip

    @staticmethod
    def _environment(base: Any, num_gpus: float) -> dict[str, str]:
        # Ray no longer hides GPUs from actors that asked for none.
        return dict(base) if num_gpus else {**base, "CUDA_VISIBLE_DEVICES": ""}

    @asynccontextmanager
    async def _place(
        self,
        name: str,
        kind: PartKind,
        labels: Mapping[str, str],
        what: str,
        only_node: str = "",
    ) -> AsyncIterator[RayNode]:
        """The node for one more part, counted as its place while the part is being made.

        Raises StartRefused where no node matches.
        """
        nodes, draining, listed = await asyncio.gather(
            _off_loop(alive_nodes),
            _off_loop(ray_private.draining_nodes),
            _off_loop(_parts_of, self._service, kind),
        )
        begin = _part_prefix(self._service, kind)
        going = {part: node for part, node in self._going.items() if part.startswith(begin)}
        held = Counter((listed | going).values())
        node = choose_node(nodes, labels, held, what=what, draining=draining, only_node=only_node)
        self._going[name] = node.node_id
        try:
            yield node
        finally:
            del self._going[name]

    async def _first_answer(self, name: str, reference: Any) -> None:
        """Wait until an actor's constructor is done. Ends the actor where it is not."""
        try:
            await asyncio.wait_for(_answer(reference), START_TIMEOUT_S)
        except (TimeoutError, GetTimeoutError) as error:
            await self.kill(name)
            raise Unavailable(f"{name} did not answer within {START_TIMEOUT_S:g} s") from error
        except RayTaskError as error:
            await self.kill(name)
            raise StartRefused(f"{name} will not start: {_last_line(error)}") from error
        except RayActorError as error:
            await self.kill(name)
            raise StartRefused(f"{name} will not start: {_last_line(error)}") from error
        except RayError as error:
            await self.kill(name)
            raise Unavailable(f"{name} did not start: {type(error).__name__}") from error


async def _off_loop(call: Callable[..., _T], *args: Any) -> _T:
    """Run a blocking call of Ray in a thread. Raises Unavailable where the cluster's head gives no
    answer: that says nothing about the parts."""
    try:
        return await asyncio.to_thread(call, *args)
    except (RayError, ConnectionError) as error:
        raise Unavailable(f"Ray gives no answer: {type(error).__name__}") from error


async def _answer(reference: Any) -> Any:
    return await reference


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def actor_names(service: str) -> list[str]:
    """Names of a service's live actors, controller and page included. Blocks."""
    return sorted(
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix(service))
    )


def kill_actor(name: str) -> None:
    """End an actor by name, without restart; absent is fine. Blocks."""
    handle = _actor(name)
    if handle is not None:
        ray.kill(handle, no_restart=True)


def _part_prefix(service: str, kind: PartKind) -> str:
    return f"{prefix(service)}{kind}:"


def _parts_of(service: str, kind: PartKind) -> dict[str, str]:
    """Name -> node id of a service's parts of a kind that run somewhere."""
    begin = _part_prefix(service, kind)
    return {
        name: node
        for name, node in ray_private.actor_nodes().items()
        if node and name.startswith(begin)
    }
