"""Is every node fit to run the service? One row a node, before anything is created.

Responsible for asking each node (by a short Ray task pinned to it) what it has, and for comparing
that with this machine. Starts no part. Called by `up` and `doctor`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_serve.bootstrap.nodes import RayNode, needed_bytes
from moe_serve.config import ServiceConfig

PACKAGES = ("moe-serve", "ray", "numba", "pyzmq", "numpy", "grpcio")
"""Distributions whose versions must agree over the nodes."""
MUST_AGREE = frozenset({"moe-serve", "ray", "numba", "pyzmq"})


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself. Bytes free; "" where something is absent."""

    node: str
    ip: str
    versions: dict[str, str]
    checkpoint: str
    """"present", or why not."""
    free_memory_bytes: int
    free_disk_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """A node's facts and what is wrong with it; fit where `problems` is empty."""

    facts: NodeFacts
    problems: tuple[str, ...]


def package_versions() -> dict[str, str]:
    """Installed versions of PACKAGES, "" where absent."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = _source_version(name)
    return found


def _source_version(name: str) -> str:
    """Version of a package that is importable without being installed (a checkout on the path)."""
    if name != "moe-serve":
        return ""
    from moe_serve import __version__

    return __version__


def available_memory_bytes() -> int:
    """Bytes that may be allocated without swapping, the page cache counted as free (Linux's own
    estimate)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def local_facts(node: str, ip: str, checkpoint: str, state_dir: str) -> NodeFacts:
    """Facts of the node this runs on."""
    from moe_serve.bootstrap.parts import checkpoint_folder
    from moe_serve.errors import StartRefused

    try:
        folder = checkpoint_folder(checkpoint)
        present = "present" if (Path(folder) / "config.json").is_file() else "no config.json"
    except StartRefused as error:
        present = error.message
    existing = Path(state_dir)
    while not existing.exists():
        existing = existing.parent
    return NodeFacts(
        node=node,
        ip=ip,
        versions=package_versions(),
        checkpoint=present,
        free_memory_bytes=available_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(existing).free,
    )


def check(facts: NodeFacts, here: dict[str, str], need_bytes: int) -> NodeCheck:
    """Compare a node with this machine's versions and the bytes of the ranks expected on its
    machine. Pure."""
    problems: list[str] = []
    if facts.error:
        return NodeCheck(facts, (facts.error,))
    for name in sorted(MUST_AGREE):
        there = facts.versions.get(name, "")
        if there != here[name]:
            problems.append(
                f"{name} is {there or 'absent'}, here it is {here[name]}: install the same"
                + (" (or give --ship)" if name == "moe-serve" else "")
            )
    if facts.checkpoint != "present":
        problems.append(f"checkpoint: {facts.checkpoint}")
    if facts.free_memory_bytes < need_bytes:
        problems.append(
            f"{need_bytes - facts.free_memory_bytes} bytes of memory missing "
            f"({facts.free_memory_bytes} free, {need_bytes} needed)"
        )
    return NodeCheck(facts, tuple(problems))


def preflight(
    config: ServiceConfig,
    nodes: Sequence[RayNode],
    state_dir: str,
    slot_bytes: int,
    timeout_s: float = 60.0,
) -> list[NodeCheck]:
    """Check every alive node of the connected Ray cluster, in order of name. Blocks.

    Raises StartRefused where a part of the service fits no node at all.
    """
    import ray
    from ray.exceptions import RayError

    need = needed_bytes(config, nodes, slot_bytes)
    ask = ray.remote(local_facts)
    asked = [
        (
            node,
            ask.options(
                num_cpus=0, max_retries=0, label_selector={"ray.io/node-id": node.node_id}
            ).remote(node.node, node.ip, config.model.checkpoint, state_dir),
        )
        for node in nodes
    ]
    here, found = package_versions(), []
    for node, reference in asked:
        try:
            facts = ray.get(reference, timeout=timeout_s)
        except (RayError, TimeoutError) as error:
            facts = NodeFacts(node.node, node.ip, {}, "", 0, 0, _why_silent(error, timeout_s))
        found.append(check(facts, here, need[node.node_id]))
    return sorted(found, key=lambda item: item.facts.node)


def _why_silent(error: Exception, timeout_s: float) -> str:
    from ray.exceptions import GetTimeoutError, NodeDiedError, TaskUnschedulableError

    if isinstance(error, NodeDiedError | TaskUnschedulableError):
        return "has left the cluster meanwhile; start Ray on it again, or try again without it"
    if isinstance(error, GetTimeoutError | TimeoutError):
        return f"does not answer within {timeout_s:g} s; is the machine alive?"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"cannot run moe_serve: {lines[-1].strip()}"
