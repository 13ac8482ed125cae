"""The real Fleet: parts as named, detached Ray actors, placed by node labels.

Responsible for creating, finding and ending actors, and for the claim of a term in Ray's key-value
store. Decides nothing about experts. Handed to the controller as a constructor argument, so that
Ray's restart of it has it too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from moe_serve import ray_private
from moe_serve.bootstrap.parts import PartsPlan
from moe_serve.controller.names import PartKind, parse, prefix
from moe_serve.errors import StartRefused, Unavailable
from moe_serve.ports import NodeInfo
from moe_serve.router.actor import RouterActor, RouterRemote
from moe_serve.shard.actor import SHARD_ENV_VARS, RayShardPort, remote_shard_actor

NAMESPACE = "moe_serve"
"""Ray namespace of every actor of every service."""
START_TIMEOUT_S = 120.0
"""A shard computes the manifest once; a cold node also imports Ray's worker."""
NODE_LABEL = "moe.node"
"""Optional label with a node's name for people; else the first characters of its Ray id."""


def controller_name(service: str) -> str:
    """Actor name of a service's controller."""
    return f"{prefix(service)}controller"


def dashboard_name(service: str) -> str:
    """Actor name of a service's page."""
    return f"{prefix(service)}dashboard"


@dataclass(frozen=True, slots=True)
class RayNode:
    """One alive node as Ray lists it. `node` is its name in our tables."""

    node: str
    node_id: str
    ip: str
    labels: dict[str, str]


def node_of(info: dict[str, Any]) -> RayNode:
    """Ours from one entry of `ray.nodes()`."""
    labels = dict(info.get("Labels") or {})
    node_id = str(info["NodeID"])
    return RayNode(
        labels.get(NODE_LABEL, node_id[:12]), node_id, str(info["NodeManagerAddress"]), labels
    )


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
    """`ports.Fleet` over Ray. Picklable: holds the plan only. Blocking Ray calls run in threads."""

    def __init__(self, plan: PartsPlan) -> None:
        self._plan = plan

    @property
    def _service(self) -> str:
        return self._plan.config.service

    async def create_shard(self, name: str, rank: int, incarnation: int) -> RayShardPort:
        """See `ports.Fleet.create_shard`."""
        group = self._plan.config.fleet.group_of(rank)
        node = await self._place(group.node_labels, PartKind.SHARD)
        domain_label = group.failure_domain_label
        settings = self._plan.shard_settings(
            rank,
            incarnation,
            node=node.node,
            failure_domain=node.labels.get(domain_label, node.node) if domain_label else node.node,
            host=self._host(node),
        )
        actor = remote_shard_actor().options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            num_cpus=group.num_cpus,
            num_gpus=group.num_gpus,
            label_selector={"ray.io/node-id": node.node_id},
            runtime_env={"env_vars": self._environment(SHARD_ENV_VARS, group.num_gpus)},
        )
        handle = await asyncio.to_thread(actor.remote, settings)
        port = RayShardPort(handle)
        await self._first_answer(name, handle.describe.remote())
        return port

    async def create_router(self, name: str, router: str, incarnation: int) -> RouterRemote:
        """See `ports.Fleet.create_router`."""
        node = await self._place(self._plan.config.fleet.router_node_labels, PartKind.ROUTER)
        settings = self._plan.router_settings(
            router,
            incarnation,
            node=node.node,
            host=self._host(node),
            port=await self._router_port(router, node),
        )
        actor = _remote(RouterActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            num_cpus=0,
            label_selector={"ray.io/node-id": node.node_id},
            runtime_env={"env_vars": self._environment(SHARD_ENV_VARS, 0)},
        )
        handle = await asyncio.to_thread(actor.remote, settings, self._plan.wire_keys)
        remote = RouterRemote(handle)
        await self._first_answer(name, handle.start.remote())
        await remote.start()  # raises StartRefused with the router's own words
        return remote

    async def find_shard(self, name: str) -> RayShardPort | None:
        """See `ports.Fleet.find_shard`."""
        handle = await asyncio.to_thread(_actor, name)
        return None if handle is None else RayShardPort(handle)

    async def find_router(self, name: str) -> RouterRemote | None:
        """See `ports.Fleet.find_router`."""
        handle = await asyncio.to_thread(_actor, name)
        return None if handle is None else RouterRemote(handle)

    async def part_names(self) -> tuple[str, ...]:
        """See `ports.Fleet.part_names`."""
        return tuple(
            name
            for name in await asyncio.to_thread(actor_names, self._service)
            if parse(self._service, name) is not None
        )

    async def kill(self, name: str) -> None:
        """See `ports.Fleet.kill`."""
        await asyncio.to_thread(kill_actor, name)

    async def alive(self, name: str) -> bool:
        """See `ports.Fleet.alive`. Ray drops the name of a dead actor."""
        return await asyncio.to_thread(_actor, name) is not None

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """See `ports.Fleet.nodes`."""
        listed, draining = await asyncio.gather(
            asyncio.to_thread(_ray_nodes), asyncio.to_thread(ray_private.draining_nodes)
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
        return await asyncio.to_thread(ray_private.claim_term, self._service, term)

    async def highest_term(self) -> int:
        """See `ports.Fleet.highest_term`."""
        return await asyncio.to_thread(ray_private.highest_term, self._service)

    def _host(self, node: RayNode) -> str:
        return "127.0.0.1" if self._plan.config.network == "loopback" else node.ip

    @staticmethod
    def _environment(base: Any, num_gpus: float) -> dict[str, str]:
        # Ray no longer hides GPUs from actors that asked for none.
        return dict(base) if num_gpus else {**base, "CUDA_VISIBLE_DEVICES": ""}

    async def _router_port(self, router: str, node: RayNode) -> int:
        """0, or the configured port: the first router takes it, further ones the next ports."""
        first = self._plan.config.ports.grpc
        return first + int(router.rsplit("-", 1)[1]) if first else 0

    async def _place(self, labels: dict[str, str], kind: str) -> RayNode:
        """The matching node, neither dead nor draining, with the fewest parts of this kind of this
        service.

        Raises StartRefused where none matches.
        """
        nodes = await asyncio.to_thread(alive_nodes)
        draining = await asyncio.to_thread(ray_private.draining_nodes)
        fitting = [
            node
            for node in nodes
            if node.node_id not in draining
            and all(node.labels.get(key) == value for key, value in labels.items())
        ]
        if not fitting:
            raise StartRefused(
                f"no node with labels {labels or '{}'} for a {kind}; the cluster has "
                f"{len(nodes)} alive nodes, {len(draining)} draining"
            )
        held = await asyncio.to_thread(_parts_by_node, self._service, kind)
        return min(fitting, key=lambda node: (held[node.node_id], node.node_id))

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


def _parts_by_node(service: str, kind: str) -> Counter[str]:
    """Number of a service's parts of a kind ("shard", "router") on each node id."""
    begin = f"{prefix(service)}{kind}:"
    return Counter(
        node for name, node in ray_private.actor_nodes().items() if name.startswith(begin)
    )
