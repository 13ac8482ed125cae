"""Bring a service up on a Ray cluster and take it down: what `moe-serve up`, `down` and `demo` do.

Responsible for the order of things and for leaving nothing behind where a start fails. Decides
nothing about experts: from `start` on, the controller does everything. Every wait has a deadline;
every refusal is one line (StartRefused).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moe_serve.bootstrap.drill import NO_DRILL, Drill
from moe_serve.bootstrap.leftovers import clear_dead
from moe_serve.bootstrap.local_ray import (
    LocalRay,
    ensure_auth,
    stop_local_ray,
)
from moe_serve.bootstrap.parts import PartsPlan, moe_spec
from moe_serve.bootstrap.preflight import NodeCheck, preflight
from moe_serve.bootstrap.ray_auth import check_open_head, check_ray_auth, join_auth
from moe_serve.bootstrap.ray_head import RayHead, find_head
from moe_serve.bootstrap.record import (
    ServiceRecord,
    claimed,
    read_record,
    remove_record,
    service_dir,
    write_record,
)
from moe_serve.bootstrap.refusals import (
    check_files,
    check_journal,
    check_no_actors,
    check_not_running,
)
from moe_serve.bootstrap.signals import handlers_kept
from moe_serve.bootstrap.size import size_report
from moe_serve.bootstrap.starting import findable, own_cluster
from moe_serve.config import ServiceConfig
from moe_serve.errors import StartRefused, first_line
from moe_serve.router.faults import ContributionFault
from moe_serve.wire.security import CurveKeys
from placement.topology import MoeSpec

READY_TIMEOUT_S = 180.0
"""Longest wait for every expert to have a listed replica and every router to be ready."""
DOWN_TIMEOUT_S = 60.0
"""Longest wait for the controller to end its parts; after it they are ended by name."""

Progress = Callable[[str], None]
Filled = Callable[[int, int], None]
"""Told how many experts have a listed replica, of how many."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """A service that is ready. Addresses are host:port."""

    service: str
    admin_address: str
    router_addresses: tuple[str, ...]
    dashboard_url: str
    metrics_address: str = ""
    """Of `/metrics`, "" where it is not served."""


_NOT_YET = Deployed("", "", (), "")
"""Of a service that is being started."""


def up(
    config: ServiceConfig,
    *,
    config_file: str,
    address: str = "",
    ship: bool = False,
    wait_s: float = READY_TIMEOUT_S,
    progress: Progress = lambda line: None,
    on_checks: Callable[[list[NodeCheck]], None] = lambda checks: None,
    on_filled: Filled = lambda done, total: None,
) -> ServiceRecord:
    """Deploy a service and leave it running.

    Args:
        config: the checked service file.
        config_file: its path, for the record.
        address: of a running Ray cluster; empty = start a local one.
        ship: send this machine's moe_serve and placement packages to every node.
        wait_s: longest wait until the service is ready.
        progress: called with a line of text at each step.
        on_checks: called with the preflight's rows before they are judged.
        on_filled: called while the ranks are filled.

    Raises:
        StartRefused: one line with the reason; nothing is left running.
    """
    with claimed(config.service):
        return _up(config, config_file, address, ship, wait_s, progress, on_checks, on_filled)


def _up(
    config: ServiceConfig,
    config_file: str,
    address: str,
    ship: bool,
    wait_s: float,
    progress: Progress,
    on_checks: Callable[[list[NodeCheck]], None],
    on_filled: Filled,
) -> ServiceRecord:
    dead = check_not_running(config.service)
    # What the files alone can say is said before anything starts.
    checked_model(config)
    check_journal(config)
    if not address:
        check_files(config)
    if dead is not None and dead.ray_temp_dir:
        progress(f"clearing away what the last {config.service!r} left, which died")
        clear_dead(dead)
        dead = None
    if address:
        join_auth(os.environ, Path.home())
    else:
        ensure_auth(service_dir(config.service, config.state_dir))
    if warning := check_ray_auth(config, os.environ, Path.home()):
        progress(warning)
    with (
        contextlib.nullcontext() if address else own_cluster(progress) as local,
        command_connected(local.address if local else address, ship=ship) as head,
    ):
        if head.asks_for_token is False and not warning:
            progress(check_open_head(config, head.address))
        nothing_yet = _record(config, config_file, address, local, _NOT_YET)
        with contextlib.nullcontext() if local else findable(nothing_yet, dead):
            found = deploy(
                config,
                wait_s=wait_s,
                progress=progress,
                on_checks=on_checks,
                on_filled=on_filled,
            )
        record = _record(config, config_file, address, local, found)
        try:
            write_record(record)
        except BaseException:  # what no command could find again must not stay
            undeploy(config.service)
            raise
    return record


def _record(
    config: ServiceConfig, config_file: str, address: str, local: LocalRay | None, found: Deployed
) -> ServiceRecord:
    return ServiceRecord(
        service=config.service,
        ray_address=address or (local.address if local else ""),
        namespace="moe_serve",
        admin_address=found.admin_address,
        router_addresses=found.router_addresses,
        dashboard_url=found.dashboard_url,
        config_file=str(Path(config_file).resolve()) if config_file else "",
        network=config.network,
        ray_pids=local.pids if local else (),
        ray_temp_dir=local.temp_dir if local else "",
        state_dir=str(config.state_dir or ""),
        token_file=str(config.security.token_file or ""),
        tls_ca_file=str(config.security.tls_ca_file or ""),
    )


def down(service: str = "", *, progress: Progress = lambda line: None) -> ServiceRecord:
    """End a running service and, where `up` started it, its Ray cluster. Returns the record it had.

    Raises NotFound where there is no such service.
    """
    record = read_record(service)
    # Said before it begins, so that whoever keeps the service up does not start it again.
    write_record(msgspec.structs.replace(record, ending=True))
    if record.ray_pids:
        ensure_auth(
            service_dir(record.service, Path(record.state_dir) if record.state_dir else None)
        )
    else:
        join_auth(os.environ, Path.home())
    try:
        with command_connected(record.ray_address):
            progress("ending routers, shards and controller")
            undeploy(record.service)
    except (ConnectionError, StartRefused) as error:
        # The cluster is gone already, and the actors with it; ours is ended by process id below.
        progress(f"Ray at {record.ray_address} does not answer ({error}); the record is removed")
    if record.ray_pids:
        progress("ending the local Ray cluster")
        stop_local_ray(record.ray_pids, record.ray_temp_dir)
        shutil.rmtree(record.ray_temp_dir, ignore_errors=True)
    remove_record(record.service)
    return record


@contextlib.contextmanager
def command_connected(address: str, *, ship: bool = False) -> Iterator[RayHead]:
    """`connected`, for a program whose stdout is its own: what Ray tells its drivers meanwhile goes
    to stderr. Streams that were taken before are not touched."""
    with contextlib.redirect_stdout(sys.stderr), connected(address, ship=ship) as head:
        yield head


@contextlib.contextmanager
def connected(address: str, *, ship: bool = False) -> Iterator[RayHead]:
    """Be a driver of a Ray cluster for a while. Raises StartRefused where it cannot be reached."""
    import ray
    from ray.exceptions import RayError

    head = find_head(address)
    modules = [str(folder) for folder in package_folders()] if ship else []
    try:
        with handlers_kept():
            ray.init(
                address=head.address,
                namespace="moe_serve",
                log_to_driver=False,
                logging_level=logging.WARNING,
                runtime_env={"py_modules": modules} if modules else None,
            )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise StartRefused(f"cannot join Ray at {address}: {first_line(error)}") from error
    try:
        yield head
    finally:
        # Leaving gives every signal back to the system, whatever Python thinks its handler is.
        with handlers_kept():
            ray.shutdown()


def package_folders() -> tuple[Path, Path]:
    """Folders of the two packages, as this machine imports them."""
    import moe_serve
    import placement

    return Path(moe_serve.__path__[0]), Path(placement.__path__[0])


def checked_model(config: ServiceConfig) -> tuple[MoeSpec, tuple[int, ...]]:
    """Spec of the model and its checkpoint layers, once it is sure that its experts fit the fleet.

    Raises StartRefused naming what is wrong with the checkpoint, or the bytes that are missing.
    """
    spec, checkpoint_layers = moe_spec(config)
    sizes = size_report(config, spec)
    if not sizes.fits:
        raise StartRefused(
            f"{sizes.missing_bytes} bytes of slots missing: {sizes.num_keys} experts and "
            f"{sizes.staging_slots} staging slots a rank need more than {sizes.total_slots} slots "
            f"of {sizes.slot_bytes} bytes; raise fleet.ranks budget or slots"
        )
    return spec, checkpoint_layers


def deploy(
    config: ServiceConfig,
    *,
    wait_s: float = READY_TIMEOUT_S,
    progress: Progress = lambda line: None,
    on_checks: Callable[[list[NodeCheck]], None] = lambda checks: None,
    on_filled: Filled = lambda done, total: None,
    fault: ContributionFault | None = None,
    drill: Drill = NO_DRILL,
    history_dir: str = "",
) -> Deployed:
    """Create the controller and wait until the service is ready, on the Ray cluster this process is
    connected to.

    Raises StartRefused; every actor of the service is ended then.
    """
    from moe_serve.bootstrap.fleet import alive_nodes

    check_no_actors(config.service)
    spec, checkpoint_layers = checked_model(config)
    nodes = alive_nodes()
    if config.network == "loopback" and len({node.ip for node in nodes}) > 1:
        raise StartRefused(
            f"network: loopback reaches one machine, the cluster has {len({n.ip for n in nodes})}; "
            "set network: cluster"
        )
    folder = service_dir(config.service, config.state_dir)
    progress("checking every node")
    checks = preflight(config, nodes, str(folder), spec.slot_bytes)
    on_checks(checks)
    broken = [f"node {item.facts.node}: {item.problems[0]}" for item in checks if item.problems]
    if broken:
        raise StartRefused(
            f"{broken[0]}" + (f" (and {len(broken) - 1} more nodes)" if broken[1:] else "")
        )
    plan = PartsPlan(
        config=config,
        spec=spec,
        checkpoint_layers=checkpoint_layers,
        state_dir=str(folder),
        wire_keys=CurveKeys.generate() if config.network == "cluster" else None,
        fault=fault,
        history_dir=history_dir,
        socks_proxy=drill.socks_proxy,
    )
    try:
        return _start(plan, wait_s, progress, drill, on_filled)
    except BaseException:
        undeploy(config.service)
        raise


def _answer(reference: Any, timeout_s: float, advice: str = "") -> Mapping[str, Any]:
    """What the starting controller says. Raises StartRefused where its process ended, or is silent:
    then with `advice`."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        said: Mapping[str, Any] = ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        raise StartRefused(
            f"the controller did not answer within {timeout_s:g} s{advice}"
        ) from error
    except RayError as error:
        raise StartRefused(
            f"the controller ended or hangs while it starts: {first_line(error)}"
        ) from error
    return said


def _start(
    plan: PartsPlan, wait_s: float, progress: Progress, drill: Drill, on_filled: Filled
) -> Deployed:
    from moe_serve.bootstrap.controller_parts import create_controller, create_dashboard

    config = plan.config
    progress("starting the controller")
    controller = create_controller(plan, drill)
    deadline_s = time.monotonic() + wait_s
    started = _answer(controller.start.remote(), wait_s, "; it may need longer: `--wait`")
    if started["fault"]:
        raise StartRefused(str(started["fault"]))
    progress("filling the ranks and waiting for the first routing table")
    while True:
        state = _answer(controller.describe.remote(), 30.0)
        on_filled(state["experts_listed"], state["experts"])
        if state["ready"]:
            break
        if state["refused"] or state["fault"]:
            raise StartRefused(str(state["refused"] or state["fault"]))
        if time.monotonic() > deadline_s:
            problems: Sequence[str] = state["problems"]
            raise StartRefused(
                f"not ready within {wait_s:g} s: {problems[0] if problems else 'no reason given'}; "
                "where it only needs longer, raise `--wait`"
            )
        time.sleep(0.1)
    admin = str(state["admin_address"])
    url = create_dashboard(plan, admin) if config.dashboard else ""
    metrics = str(state["metrics_address"])
    if metrics:
        progress(f"metrics for Prometheus at {metrics}/metrics")
    return Deployed(config.service, admin, tuple(state["router_addresses"]), url, metrics)


def undeploy(service: str) -> None:
    """End every actor of a service: by the controller's own list first, then by name. Blocks."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    from moe_serve.bootstrap.fleet import (
        NAMESPACE,
        actor_names,
        controller_name,
        kill_actor,
    )

    controller = controller_name(service)
    if controller in actor_names(service):
        with contextlib.suppress(RayError, GetTimeoutError, ValueError):
            # A controller that cannot end its parts any more is ended below, and they by name.
            handle = ray.get_actor(controller, namespace=NAMESPACE)
            ray.get(handle.down.remote(), timeout=DOWN_TIMEOUT_S)
        kill_actor(controller)
    for name in actor_names(service):
        kill_actor(name)
