"""S5: Ray asks for a token, or a person has accepted in so many words that it does not."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from moe_serve.bootstrap.ray_auth import check_open_head, check_ray_auth, join_auth, why_open
from moe_serve.cli.checks.ray_auth import ray_checks
from moe_serve.cli.checks.row import Level
from moe_serve.config import ServiceConfig
from moe_serve.config.load import parse_config
from moe_serve.errors import StartRefused

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-moe.yaml"
TOKEN = "t" * 32


def a_config(network: str, *, accepted: bool = False) -> ServiceConfig:
    text = EXAMPLE.read_text().replace("network: loopback", f"network: {network}")
    text += "security: {token_file: t, tls_cert_file: c, tls_key_file: k, "
    text += f"accept_insecure: {str(accepted).lower()}}}\n"
    return parse_config(text.encode(), "service.yaml")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("environ", "is_open"),
    [
        ({}, True),
        ({"RAY_AUTH_MODE": "disabled"}, True),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": TOKEN}, True),
        ({"RAY_AUTH_MODE": ""}, True),
        ({"RAY_AUTH_MODE": "tokens"}, True),
        ({"RAY_AUTH_TOKEN": ""}, True),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, True),
        ({"RAY_AUTH_MODE": "token"}, False),
        ({"RAY_AUTH_MODE": "TOKEN"}, False),
        ({"RAY_AUTH_TOKEN": TOKEN}, False),
    ],
)
def test_an_open_ray_is_refused_in_a_cluster_and_shown_on_loopback(
    home: Path, environ: dict[str, str], is_open: bool
) -> None:
    assert bool(why_open(environ, home)) is is_open
    if not is_open:
        for network in ("loopback", "cluster"):
            assert check_ray_auth(a_config(network), environ, home) == ""
        return
    with pytest.raises(StartRefused, match="Ray asks for no token") as refused:
        check_ray_auth(a_config("cluster"), environ, home)
    assert "\n" not in refused.value.message
    assert TOKEN not in refused.value.message
    for config in (a_config("loopback"), a_config("cluster", accepted=True)):
        assert "asks for no token" in check_ray_auth(config, environ, home)


def test_a_token_in_the_usual_places_counts(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "named"
    environ = {"RAY_AUTH_TOKEN_PATH": str(file)}
    assert why_open(environ, home)
    file.write_text(TOKEN)
    assert not why_open(environ, home)
    assert why_open({}, home)
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(TOKEN)
    assert not why_open({}, home)


def test_a_head_that_answers_without_a_token_counts_as_open_whatever_we_have() -> None:
    with pytest.raises(StartRefused, match="the head at h:1 answers without one"):
        check_open_head(a_config("cluster"), "h:1")
    for config in (a_config("loopback"), a_config("cluster", accepted=True)):
        assert "asks for no token" in check_open_head(config, "h:1")


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({}, None),
        ({"RAY_AUTH_TOKEN": TOKEN}, "token"),
        ({"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "disabled"}, "disabled"),
    ],
)
def test_a_token_that_is_there_is_shown_to_a_cluster_given_by_address(
    home: Path, environ: dict[str, str], mode: str | None
) -> None:
    join_auth(environ, home)
    assert environ.get("RAY_AUTH_MODE") == mode


OWN_CLUSTER = """
import os, sys
from pathlib import Path
from moe_serve.bootstrap.local_ray import ensure_auth
from moe_serve.bootstrap.ray_auth import why_open
for _ in range(2):
    ensure_auth(Path(sys.argv[1]))
print(os.environ["RAY_AUTH_MODE"], os.environ.get("RAY_AUTH_TOKEN_PATH", "none"))
print(why_open(os.environ, Path.home()) or "closed")
"""


def own_cluster(home: Path, folder: Path, environ: dict[str, str]) -> list[str]:
    """What `ensure_auth` leaves in the environment of a fresh process, where Ray is not imported
    yet: mode and token file, and whether a driver would have a token."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", OWN_CLUSTER, str(folder)],
        env={**kept, "HOME": str(home), **environ},
        cwd=EXAMPLE.parents[1],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.split(maxsplit=2)


def test_a_cluster_of_our_own_gets_a_token_that_only_we_can_read(
    home: Path, tmp_path: Path
) -> None:
    mode, file, state = own_cluster(home, tmp_path, {})
    assert (mode, state.strip()) == ("token", "closed")
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
    first = Path(file).read_text()
    assert len(first) >= 32
    assert own_cluster(home, tmp_path, {})[1] == file
    assert Path(file).read_text() == first


def test_a_token_that_is_configured_is_left_alone(home: Path, tmp_path: Path) -> None:
    found = own_cluster(home, tmp_path, {"RAY_AUTH_TOKEN": TOKEN})
    assert [one.strip() for one in found] == ["token", "none", "closed"]
    assert list(tmp_path.glob("*token*")) == []


def test_a_mode_that_the_operator_switched_off_is_left_alone_and_seen(
    home: Path, tmp_path: Path
) -> None:
    mode, _, state = own_cluster(home, tmp_path, {"RAY_AUTH_MODE": "disabled"})
    assert mode == "disabled"
    assert "RAY_AUTH_MODE is 'disabled'" in state


def test_doctor_shows_what_is_open_and_no_token(home: Path) -> None:
    (_, auth) = ray_checks({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": TOKEN}, home)
    assert auth.level is Level.WARN
    assert "RAY_AUTH_MODE" in auth.next_step
    for environ in ({"RAY_AUTH_TOKEN": TOKEN}, {"RAY_AUTH_MODE": "token"}):
        rows = ray_checks(environ, home)
        assert rows[1].level is Level.OK
        assert TOKEN not in repr(rows)
