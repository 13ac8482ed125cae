"""Which controller a command speaks to, with which token."""

from pathlib import Path

import pytest

from moe_serve.bootstrap.record import ServiceRecord, write_record
from moe_serve.cli.admin import find_target, same_place
from moe_serve.cli.exits import CannotReach, ExitCode, error_lines, exit_code_of
from moe_serve.controller.admin_checks import wrong
from moe_serve.errors import (
    FieldViolation,
    InvalidArgument,
    PermissionDenied,
    StartRefused,
    Unavailable,
)

ADMIN_TOKEN = "admin-token-0123456789"
READ_TOKEN = "read-token-0123456789"


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def _tokens(folder: Path, *lines: str) -> Path:
    file = folder / "tokens"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    file.chmod(0o600)
    return file


def _up(service: str, address: str, token_file: str = "", tls_ca_file: str = "") -> None:
    write_record(
        ServiceRecord(
            service=service,
            ray_address="",
            namespace="moe_serve",
            admin_address=address,
            router_addresses=(),
            dashboard_url="",
            config_file="",
            network="loopback",
            token_file=token_file,
            tls_ca_file=tls_ca_file,
        )
    )


def test_the_record_of_the_only_service_is_used(tmp_path: Path) -> None:
    token_file = _tokens(tmp_path, f"read {READ_TOKEN}", f"admin {ADMIN_TOKEN}")
    _up("tiny", "127.0.0.1:4000", str(token_file), "/etc/ca.pem")
    target = find_target("", "", None, None)
    assert target.address == "127.0.0.1:4000"
    assert target.token == ADMIN_TOKEN
    assert target.tls_ca_file == Path("/etc/ca.pem")


def test_an_address_needs_no_record() -> None:
    assert find_target("10.0.0.1:4000", "", None, None).token == ""


def test_secrets_of_a_record_go_to_its_own_address_only(tmp_path: Path) -> None:
    _up("tiny", "127.0.0.1:4000", str(_tokens(tmp_path, f"admin {ADMIN_TOKEN}")))
    assert find_target("127.0.0.1:4000", "", None, None).token == ADMIN_TOKEN
    assert find_target("10.0.0.1:4000", "", None, None).token == ""


def test_secrets_of_a_record_go_to_the_address_as_it_was_recorded(tmp_path: Path) -> None:
    _up("tiny", "127.0.0.1:4000", str(_tokens(tmp_path, f"admin {ADMIN_TOKEN}")))
    target = find_target("localhost:4000", "", None, None)
    assert (target.address, target.token) == ("127.0.0.1:4000", ADMIN_TOKEN)
    assert find_target("localhost:4001", "", None, None).token == ""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("127.0.0.1:4000", "localhost:4000", True),
        ("LOCALHOST:4000", "[::1]:04000", True),
        ("[::1]:4000", "[0:0::1]:4000", True),
        ("node-a:4000", "Node-A:4000", True),
        ("127.0.0.1:4000", "[::1]:4000", False),
        ("127.0.0.1:4000", "localhost:4001", False),
        ("10.0.0.1:4000", "localhost:4000", False),
        ("", "localhost:4000", False),
    ],
)
def test_one_place_may_be_spelled_in_several_ways(one: str, other: str, same: bool) -> None:
    assert same_place(one, other) is same
    assert same_place(other, one) is same


def test_files_given_win_over_the_record(tmp_path: Path) -> None:
    _up("tiny", "127.0.0.1:4000", str(tmp_path / "absent"))
    given = _tokens(tmp_path, f"read {READ_TOKEN}")
    target = find_target("", "", given, Path("ca.pem"))
    assert (target.token, target.tls_ca_file) == (READ_TOKEN, Path("ca.pem"))


def test_two_services_need_a_name() -> None:
    _up("one", "127.0.0.1:4001")
    _up("two", "127.0.0.1:4002")
    with pytest.raises(CannotReach, match="found: one, two"):
        find_target("", "", None, None)
    assert find_target("", "two", None, None).address == "127.0.0.1:4002"


def test_no_service_is_exit_3() -> None:
    with pytest.raises(CannotReach, match="moe-serve up") as found:
        find_target("", "", None, None)
    assert exit_code_of(found.value) is ExitCode.UNREACHABLE


@pytest.mark.parametrize("address", ["nowhere", "host:", ":4000", "host:0", "host:70000", "host:x"])
def test_an_address_that_is_none_is_a_usage_error(address: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port") as found:
        find_target(address, "", None, None)
    assert exit_code_of(found.value) is ExitCode.USAGE


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="token file"):
        find_target("10.0.0.1:4000", "", tmp_path / "absent", None)


def test_a_token_is_not_in_the_text_of_a_target(tmp_path: Path) -> None:
    target = find_target("10.0.0.1:4000", "", _tokens(tmp_path, f"admin {ADMIN_TOKEN}"), None)
    assert ADMIN_TOKEN not in repr(target)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StartRefused("no"), ExitCode.FAILED),
        (PermissionDenied("no"), ExitCode.FAILED),
        (Unavailable("no window has closed yet"), ExitCode.UNREACHABLE),
    ],
)
def test_other_errors_have_their_code(error: Exception, code: ExitCode) -> None:
    assert exit_code_of(error) is code  # type: ignore[arg-type]


def test_an_error_names_its_fields() -> None:
    error = InvalidArgument("wrong", violations=(FieldViolation("rank", "must be below 4"),))
    assert error_lines(error) == ["error: wrong", "  rank: must be below 4"]


def test_an_error_that_is_one_field_is_one_line() -> None:
    assert error_lines(wrong("rank", "must be below 4")) == ["error: rank: must be below 4"]
