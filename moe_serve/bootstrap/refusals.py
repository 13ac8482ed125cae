"""What would refuse a start before anything is started: a service that runs already, a journal or a
file of secrets that cannot be used.

Responsible for these checks alone; each refusal is one line (StartRefused). Called by `service`, by
`kept_service`, and by `up --dry-run`, which goes no further.
"""

from __future__ import annotations

import socket

from moe_serve.bootstrap.local_ray import local_ray_alive
from moe_serve.bootstrap.named_files import named_files
from moe_serve.bootstrap.parts import trace_settings
from moe_serve.bootstrap.record import ServiceRecord, read_record, state_home
from moe_serve.config import ServiceConfig
from moe_serve.controller.journal_store import peek
from moe_serve.errors import NotFound, StartRefused
from moe_serve.telemetry.traces import check_traces

CONNECT_TIMEOUT_S = 3.0
"""Longest wait for the admin port of a recorded service to take a connection."""


def check_not_running(service: str) -> ServiceRecord | None:
    """The record of a service that died (or whose machine was restarted), None where there is none.

    Raises StartRefused where the service that the record names is still there: a second one would
    write the first one's journal.
    """
    try:
        record = read_record(service)
    except NotFound:
        return None
    if head_alive(record) or answers(record.admin_address):
        raise StartRefused(
            f"service {service!r} is running already (admin {record.admin_address}); "
            f"`moe-serve down {service}` ends it, or choose another `service:` name"
        )
    return record


def check_no_actors(service: str) -> None:
    """Raises StartRefused where the Ray cluster this process is connected to runs the service, by
    whomever it was started."""
    from moe_serve.bootstrap.fleet import actor_names

    running = actor_names(service)
    if running:
        raise StartRefused(
            f"service {service!r} is running already ({len(running)} actors); "
            f"`moe-serve down` ends it, or choose another `service:` name"
        )


def head_alive(record: ServiceRecord) -> bool:
    """Whether a service has a Ray cluster of its own, and that lives. A cluster without its head
    ends by itself."""
    return local_ray_alive(record.ray_pids[:1], record.ray_temp_dir)


def check_files(config: ServiceConfig) -> None:
    """Raises StartRefused where a token or TLS file that the service file names cannot be used by
    a service on this machine, or a collector of traces is named and nothing here can send to it."""
    for one in named_files(config):
        one.read()
    check_traces(trace_settings(config))


def check_journal(config: ServiceConfig) -> None:
    """Raises StartRefused where this machine holds a journal of the service with which no
    controller of this version could go on."""
    peek(config.state_dir or state_home() / config.service, config.service)


def answers(address: str) -> bool:
    """Whether something listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            return True
    except (OSError, ValueError):
        return False
