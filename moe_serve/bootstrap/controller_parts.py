"""Settings and actors of controller and page: the two parts that are not the fleet's.

Responsible for composing ControllerSettings and creating the two detached actors. Called by
`service`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_serve.bootstrap.drill import NO_DRILL, Drill
from moe_serve.bootstrap.fleet import (
    NAMESPACE,
    RayFleet,
    controller_name,
    dashboard_name,
)
from moe_serve.bootstrap.parts import PartsPlan
from moe_serve.bootstrap.size import group_slots, rank_slots
from moe_serve.controller.actor import ControllerActor
from moe_serve.controller.settings import ControllerSettings, ExpectedRank, RankKind
from moe_serve.rpc.auth import Role, TokenFile
from moe_serve.rpc.options import RpcLimits
from moe_serve.shard.actor import SHARD_ENV_VARS

PAGE_START_TIMEOUT_S = 60.0
"""Longest wait for the page's port."""


def controller_settings(plan: PartsPlan, drill: Drill = NO_DRILL) -> ControllerSettings:
    """What the controller is told, from the service file."""
    config, spec = plan.config, plan.spec
    ranks = tuple(
        ExpectedRank(
            rank=rank,
            profile=config.fleet.group_of(rank).profile,
            num_slots=rank_slots(config, rank, spec.slot_bytes),
            budget_bytes=rank_slots(config, rank, spec.slot_bytes) * spec.slot_bytes,
        )
        for rank in range(config.fleet.num_ranks)
    )

    return ControllerSettings(
        service_id=config.service,
        spec=spec,
        config=config.core_rebalance(),
        ranks=ranks,
        profiles=tuple(plan.profile(profile.name) for profile in config.profiles),
        groups=tuple(
            RankKind(profile=group.profile, num_slots=group_slots(group, spec.slot_bytes))
            for group in config.fleet.ranks
        ),
        num_routers=config.fleet.routers,
        state_dir=Path(plan.state_dir),
        state_dir_shared=config.state_dir_shared,
        host="127.0.0.1" if config.network == "loopback" else "",
        admin_port=config.ports.admin,
        metrics_port=config.ports.metrics,
        metrics_per_expert=config.metrics.per_expert,
        network=config.network,
        simulated=any(group.backend == "emulated" for group in config.fleet.ranks),
        token_file=config.security.token_file,
        tls_certificate=config.security.tls_cert_file,
        tls_key=config.security.tls_key_file,
        accept_insecure=config.security.accept_insecure,
        limits=RpcLimits(),
        fail_points=drill.fail_points,
        history_dir=plan.history_dir,
    )


def create_controller(plan: PartsPlan, drill: Drill = NO_DRILL) -> Any:
    """The controller's actor: detached, restarted by Ray for ever, preferring this node (it owns
    the journal)."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    kind: Any = ray.remote(ControllerActor)
    return kind.options(
        name=controller_name(plan.config.service),
        namespace=NAMESPACE,
        lifetime="detached",
        enable_task_events=False,
        max_restarts=-1,
        num_cpus=0,
        # Not Ray's soft node affinity: it is not looked at where an actor sets no CPU aside.
        label_selector={"ray.io/node-id": here},
        fallback_strategy=[{"label_selector": {}}],
        runtime_env={"env_vars": {**SHARD_ENV_VARS, "CUDA_VISIBLE_DEVICES": ""}},
    ).remote(controller_settings(plan, drill), drill.fleet(RayFleet(plan)))


def create_dashboard(plan: PartsPlan, admin_address: str) -> str:
    """The page's actor, detached and restarted by Ray; returns its URL, "" where the page will not
    start.

    The page's death, or its absence, touches nothing else.
    """
    import ray
    from ray.exceptions import RayError

    from moe_serve.dashboard.actor import DashboardActor

    kind: Any = ray.remote(DashboardActor)
    config, security = plan.config, plan.config.security
    handle = kind.options(
        name=dashboard_name(config.service),
        namespace=NAMESPACE,
        lifetime="detached",
        enable_task_events=False,
        max_restarts=3,
        num_cpus=0,
        # It binds 127.0.0.1: whoever started the service finds it where they did so.
        label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        fallback_strategy=[{"label_selector": {}}],
        runtime_env={"env_vars": {**SHARD_ENV_VARS, "CUDA_VISIBLE_DEVICES": ""}},
    ).remote(
        admin_address,
        host="127.0.0.1",
        port=config.ports.dashboard,
        token=TokenFile(security.token_file).token(Role.READ) if security.token_file else "",
        tls_authority=str(security.tls_ca_file or ""),
    )
    try:
        return str(ray.get(handle.start.remote(), timeout=PAGE_START_TIMEOUT_S))
    except RayError:
        ray.kill(handle, no_restart=True)
        return ""
