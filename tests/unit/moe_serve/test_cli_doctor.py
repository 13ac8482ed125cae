"""The doctor's rows, each from a machine that is made up where it matters."""

import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_serve.bootstrap.record import ServiceRecord, write_record
from moe_serve.cli.admin import Admin, AdminTarget
from moe_serve.cli.app import app
from moe_serve.cli.checks import Check, Level
from moe_serve.cli.checks.machine import machine_checks
from moe_serve.cli.checks.ports import port_checks
from moe_serve.cli.checks.ray_auth import ray_checks
from moe_serve.cli.checks.row import shown_path
from moe_serve.cli.checks.services import file_checks, service_checks
from moe_serve.cli.checks.software import version_checks
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.options import Reach
from moe_serve.config import load_config
from moe_serve.config.schema import SecurityConfig
from tests.fakes.admin import FakeAdmin, make_placement

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-moe.yaml"
SECRET = "read-token-0123456789"


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def _row(rows: list[Check], name: str) -> Check:
    (row,) = [row for row in rows if row.name == name]
    return row


def _levels(rows: list[Check]) -> dict[str, Level]:
    return {row.name: row.level for row in rows}


# -- software and machine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.60.0", Level.OK), ("2.61.3", Level.OK), ("2.59.1", Level.FAIL), ("2.62.0", Level.FAIL)],
)
def test_ray_must_be_a_version_that_was_tested(version: str, level: Level) -> None:
    rows = version_checks(lambda name: version if name == "ray" else "1.0")
    assert _row(rows, "ray").level is level


def test_what_is_absent_is_named_with_its_remedy() -> None:
    rows = version_checks(lambda _name: None)
    assert _row(rows, "pyzmq") == Check(
        "versions", "pyzmq", Level.FAIL, "absent", "pip install pyzmq"
    )
    assert _row(rows, "transformers").level is Level.NOTE


def test_memory_is_what_is_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n")
    row = _row(machine_checks(proc=tmp_path), "memory")
    assert (row.level, row.detail) == (Level.OK, "4.0 GiB available of 8.0 GiB")
    meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\n")
    assert _row(machine_checks(proc=tmp_path), "memory").level is Level.WARN
    meminfo.write_text("nothing: known\n")
    assert _row(machine_checks(proc=tmp_path), "memory").level is Level.NOTE


def test_shared_memory_that_is_missing_is_a_warning(tmp_path: Path) -> None:
    row = _row(machine_checks(shared_memory=tmp_path / "absent"), "shared memory")
    assert row.level is Level.WARN
    assert "--shm-size" in row.next_step


def test_a_path_is_shown_without_the_user() -> None:
    assert shown_path(Path.home() / ".ray") == "~/.ray"
    assert shown_path("/dev/shm") == "/dev/shm"
    assert shown_path(f"{Path.home()}x") == f"{Path.home()}x"


# -- ports ---------------------------------------------------------------------------------------


def _taken(port: int) -> object:
    def listen(_host: str, asked: int) -> None:
        if asked == port:
            raise OSError(errno.EADDRINUSE, "Address already in use")

    return listen


def test_a_port_of_the_service_file_that_is_taken_fails() -> None:
    config = load_config(EXAMPLE)
    ports = config.ports.model_copy(update={"grpc": 4001, "admin": 5000})
    config = config.model_copy(update={"ports": ports})
    rows = port_checks(config, _taken(4002))  # type: ignore[arg-type]
    assert _levels(rows) == {
        "loopback": Level.OK,
        "grpc 4001": Level.OK,
        "grpc 4002": Level.FAIL,
        "admin": Level.OK,
        "dashboard": Level.OK,
    }
    assert _row(rows, "grpc 4002").detail == "127.0.0.1:4002 is taken"
    assert _row(rows, "dashboard").detail == "chosen by the operating system"


def test_no_loopback_fails() -> None:
    rows = port_checks(None, _taken(0))  # type: ignore[arg-type]
    assert _levels(rows) == {"loopback": Level.FAIL}


def test_a_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hunter2@proxy")
    row = _row(port_checks(None, lambda _host, _port: None), "proxy")
    assert "https_proxy" in row.detail
    assert "hunter2" not in str(row)


# -- Ray -----------------------------------------------------------------------------------------


def _auth(environ: dict[str, str], home: Path) -> Check:
    return _row(ray_checks(environ, home), "auth")


def test_authentication_that_is_off_is_a_warning(tmp_path: Path) -> None:
    assert _auth({"RAY_AUTH_MODE": "disabled"}, tmp_path).level is Level.WARN


def test_a_token_is_never_shown(tmp_path: Path) -> None:
    row = _auth({"RAY_AUTH_TOKEN": "abcdef"}, tmp_path)
    assert row.level is Level.OK
    assert "abcdef" not in str(row)


def test_a_token_file_must_be_there_and_closed(tmp_path: Path) -> None:
    assert _auth({}, tmp_path).level is Level.OK
    file = tmp_path / ".ray" / "auth_token"
    assert _auth({"RAY_AUTH_TOKEN_PATH": str(file)}, tmp_path).level is Level.FAIL
    file.parent.mkdir()
    file.write_text("abcdef")
    file.chmod(0o644)
    assert _auth({}, tmp_path).level is Level.WARN
    file.chmod(0o600)
    row = _auth({}, tmp_path)
    assert row.level is Level.OK
    assert "abcdef" not in str(row)


def test_the_cluster_of_the_shell_is_shown(tmp_path: Path) -> None:
    rows = ray_checks({"RAY_ADDRESS": "10.0.0.1:6379"}, tmp_path)
    assert _row(rows, "address").detail == "RAY_ADDRESS=10.0.0.1:6379"


# -- services ------------------------------------------------------------------------------------


def _up(token_file: str = "") -> None:
    write_record(
        ServiceRecord(
            service="tiny",
            ray_address="",
            namespace="moe_serve",
            admin_address="127.0.0.1:4000",
            router_addresses=(),
            dashboard_url="",
            config_file="",
            network="loopback",
            token_file=token_file,
        )
    )


def _nobody(_target: AdminTarget) -> Admin:
    raise CannotReach("the controller at 127.0.0.1:4000 does not answer")


def test_no_service_is_only_a_note() -> None:
    assert [row.level for row in service_checks(FakeAdmin())] == [Level.NOTE]


def test_a_recorded_service_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"read {SECRET}\n")
    file.chmod(0o600)
    _up(str(file))
    admin = FakeAdmin()
    row = _row(service_checks(admin), "tiny")
    assert (row.level, row.detail) == (Level.OK, "steady, term 2, epoch 7, loopback")
    assert admin.targets[0].token == SECRET
    assert admin.closed


def test_a_degraded_service_is_a_warning() -> None:
    _up()
    admin = FakeAdmin(placements=[make_placement(state="degraded")])
    assert _row(service_checks(admin), "tiny").level is Level.WARN


def test_a_service_that_does_not_answer_fails_with_the_next_step() -> None:
    _up()
    row = _row(service_checks(_nobody), "tiny")
    assert row.level is Level.FAIL
    assert "moe-serve down -y tiny" in row.next_step


def test_a_token_file_that_is_open_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"read {SECRET}\n")
    file.chmod(0o644)
    security = SecurityConfig(
        token_file=file, tls_ca_file=tmp_path / "ca.pem", accept_insecure=True
    )
    config = load_config(EXAMPLE).model_copy(update={"security": security})
    assert _levels(file_checks(config)) == {
        "token file": Level.FAIL,
        "TLS authority": Level.FAIL,
        "insecure": Level.WARN,
    }
    assert SECRET not in str(file_checks(config))


def test_a_certificate_and_its_key_are_looked_at_together(tmp_path: Path) -> None:
    security = SecurityConfig(tls_cert_file=tmp_path / "c.pem", tls_key_file=tmp_path / "k.pem")
    config = load_config(EXAMPLE).model_copy(update={"security": security})
    row = _row(file_checks(config), "TLS certificate")
    assert row.level is Level.FAIL
    assert "k.pem" in row.detail


# -- the command ---------------------------------------------------------------------------------


def test_the_report_fails_where_something_will_not_work() -> None:
    _up()
    args = ["doctor", "--no-gpu", "-o", "json"]
    result = CliRunner().invoke(app, args, obj=Reach(connect=_nobody, listen=_taken(0)))  # type: ignore[arg-type]
    failed = {row["name"] for row in json.loads(result.stdout)["checks"] if row["level"] == "fail"}
    assert result.exit_code == 1
    assert failed == {"tiny", "loopback"}


def test_the_report_is_text_to_paste() -> None:
    args = ["doctor", "--no-gpu", "-f", str(EXAMPLE)]
    result = CliRunner().invoke(app, args, obj=Reach(connect=FakeAdmin(), listen=_taken(-1)))  # type: ignore[arg-type]
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["TOPIC", "CHECK", "WHAT"]
    assert str(Path.home()) not in result.stdout
