"""Services that `up` recorded on this machine: does the controller answer, and are the secrets'
files safe?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moe_serve.bootstrap.named_files import NamedFile, named_files
from moe_serve.bootstrap.record import ServiceRecord, read_record, recorded_services
from moe_serve.cli.admin import Admin, AdminTarget
from moe_serve.cli.checks.row import Check, Level
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.views.status import degraded
from moe_serve.config import ServiceConfig
from moe_serve.errors import MoeServeError, NotFound, StartRefused
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc.auth import Role, TokenFile

TOPIC = "services"
Connect = Callable[[AdminTarget], Admin]


def service_checks(connect: Connect) -> list[Check]:
    """One row a recorded service."""
    names = recorded_services()
    if not names:
        return [Check(TOPIC, "recorded", Level.NOTE, "none")]
    return [_service(name, connect) for name in names]


def _service(name: str, connect: Connect) -> Check:
    try:
        record = read_record(name)
        placement = _placement(record, connect)
    except NotFound as error:
        return Check(TOPIC, name, Level.FAIL, error.message)
    except CannotReach as error:
        step = f"`moe-serve down -y {name}` clears what is left"
        return Check(TOPIC, name, Level.FAIL, error.message, step)
    except MoeServeError as error:
        return Check(TOPIC, name, Level.WARN, error.message)
    detail = f"{placement.state}, term {placement.term}, epoch {placement.epoch}, {record.network}"
    if degraded(placement):
        return Check(TOPIC, name, Level.WARN, detail, f"moe-serve status --service {name}")
    return Check(TOPIC, name, Level.OK, detail)


def _placement(record: ServiceRecord, connect: Connect) -> pb.GetPlacementResponse:
    token = TokenFile(Path(record.token_file)).token(Role.READ) if record.token_file else ""
    authority = Path(record.tls_ca_file) if record.tls_ca_file else None
    admin = connect(AdminTarget(record.admin_address, token, authority))
    try:
        return admin.placement()
    finally:
        admin.close()


def file_checks(config: ServiceConfig) -> list[Check]:
    """Token and TLS files that the service file names."""
    rows = [_readable(one) for one in named_files(config)]
    if config.security.accept_insecure:
        detail = "accepted: gRPC without token and TLS"
        rows.append(Check(TOPIC, "insecure", Level.WARN, detail))
    return rows


def _readable(one: NamedFile) -> Check:
    try:
        one.read()
    except StartRefused as error:
        return Check(TOPIC, one.name, Level.FAIL, error.message)
    return Check(TOPIC, one.name, Level.OK, "readable, well-formed, closed to others")
