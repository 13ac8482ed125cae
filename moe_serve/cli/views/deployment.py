"""What `up` would need, would start, and has started: sizes, nodes, addresses. Pure. Called by the
service commands."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import RenderableType

from moe_serve.bootstrap.preflight import MUST_AGREE, NodeCheck
from moe_serve.bootstrap.record import ServiceRecord
from moe_serve.bootstrap.size import SizeReport
from moe_serve.cli.figures import shown_bytes
from moe_serve.cli.output import columns
from moe_serve.config import ServiceConfig


def size_parts(size: SizeReport) -> list[RenderableType]:
    """Bytes an expert, slots a rank, what is spare, and whether the floor can be reached."""
    table = columns(
        ("RANKS", "SLOTS", "STAGING", "BUDGET"), right=("RANKS", "SLOTS", "STAGING", "BUDGET")
    )
    for group in size.groups:
        budget = shown_bytes(group.budget_bytes)
        table.add_row(str(group.count), str(group.slots), str(size.staging_slots), budget)
    return [
        f"Expert   {shown_bytes(size.expert_bytes)} canonical, {shown_bytes(size.slot_bytes)} a "
        "slot with what the backend derives",
        f"Experts  {size.num_keys} over all layers",
        table,
        f"Slots    {size.total_slots} in all, staging included",
        _spare(size),
        _floor(size),
    ]


def _spare(size: SizeReport) -> str:
    if size.fits:
        return f"Spare    {size.spare_slots} slots for replicas beyond the first"
    return (
        f"DOES NOT FIT: {-size.spare_slots} slots ({shown_bytes(size.missing_bytes)}) short of one "
        "replica of every expert; raise slots or budget, or add ranks"
    )


def _floor(size: SizeReport) -> str:
    if not size.floor_slots_missing:
        return f"Floor    {size.floor} replicas of every expert: reachable by count"
    return (
        f"Floor    {size.floor} replicas of every expert: NOT reachable, "
        f"{size.floor_slots_missing} slots "
        f"({shown_bytes(size.floor_slots_missing * size.slot_bytes)}) short"
    )


def size_plain(size: SizeReport) -> dict[str, Any]:
    """The same for programs."""
    facts: dict[str, Any] = msgspec.to_builtins(size)
    return {**facts, "fits": size.fits, "missing_bytes": size.missing_bytes}


def nodes_parts(checks: list[NodeCheck]) -> list[RenderableType]:
    """The preflight: one row a node, then what is wrong."""
    names = sorted(MUST_AGREE)
    table = columns(
        ("NODE", "IP", *(name.upper() for name in names), "CHECKPOINT", "MEMORY", "DISK", "FIT"),
        right=("MEMORY", "DISK"),
    )
    for check in checks:
        facts = check.facts
        table.add_row(
            facts.node,
            facts.ip,
            *(facts.versions.get(name) or "-" for name in names),
            facts.checkpoint or "-",
            shown_bytes(facts.free_memory_bytes),
            shown_bytes(facts.free_disk_bytes),
            "no" if check.problems else "yes",
        )
    problems = [f"  ! {one.facts.node}: {text}" for one in checks for text in one.problems]
    return [table, *problems]


def nodes_plain(checks: list[NodeCheck]) -> list[dict[str, Any]]:
    """The same for programs."""
    found: list[dict[str, Any]] = msgspec.to_builtins(checks)
    return found


def intent_line(config: ServiceConfig, ray_address: str) -> str:
    """What `up` would start, in one line."""
    where = f"on Ray at {ray_address}" if ray_address else "on a Ray cluster started here"
    page = ", a page" if config.dashboard else ""
    return (
        f"Would start service {config.service}: a controller, {config.fleet.routers} routers, "
        f"{config.fleet.num_ranks} shards{page}; network {config.network}; {where}"
    )


def died_line(service: str) -> str:
    """That a service of the name was up here and is not any more."""
    return f"A service {service} is recorded here and does not run: what it left is cleared away"


def record_parts(record: ServiceRecord) -> list[RenderableType]:
    """Where a service that is up can be reached, and what to run next."""
    page = [f"  page     {record.dashboard_url}"] if record.dashboard_url else []
    return [
        f"Service {record.service} is up",
        f"  gRPC     {' '.join(record.router_addresses)}",
        f"  admin    {record.admin_address}",
        *page,
        f"  Ray      {record.ray_address}" + (" (started here)" if record.ray_pids else ""),
        f"Next: moe-serve status   moe-serve plan   moe-serve down {record.service}",
    ]


def record_plain(record: ServiceRecord) -> dict[str, Any]:
    """The same for programs."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    return plain
