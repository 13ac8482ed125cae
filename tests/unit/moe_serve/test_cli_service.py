"""validate, up --size, up --dry-run, down: what needs no cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from moe_serve import __version__
from moe_serve.bootstrap import kept_service, refusals, service
from moe_serve.bootstrap.preflight import NodeCheck, NodeFacts
from moe_serve.bootstrap.record import ServiceRecord, read_record, write_record
from moe_serve.cli.app import app
from moe_serve.cli.commands import service as commands
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.output import Output
from moe_serve.cli.service_file import read_service_file
from moe_serve.cli.views.deployment import nodes_parts, nodes_plain, record_parts
from moe_serve.config import ConfigInvalid

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-moe.yaml"


@pytest.fixture(autouse=True)
def _no_service_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def _run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


def _edited(folder: Path, *pairs: tuple[str, str]) -> Path:
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    file = folder / "service.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def _line(file: Path, text: str) -> int:
    lines = file.read_text(encoding="utf-8").splitlines()
    (number,) = [at for at, line in enumerate(lines, 1) if line.strip(" -").startswith(text)]
    return number


# -- validate ------------------------------------------------------------------------------------


def test_validate_accepts_the_example() -> None:
    result = _run("validate", "-f", str(EXAMPLE))
    assert result.exit_code == 0
    assert "valid; service tiny-moe, model tiny-moe, 4 ranks, 2 routers" in result.stdout


def test_validate_prints_every_fault_with_its_place(tmp_path: Path) -> None:
    file = _edited(
        tmp_path, ("window_s: 2.0", "window_s: -2"), ("backend: numpy", "backend: numpi")
    )
    result = _run("validate", "-f", str(file))
    assert result.exit_code == 2
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{file}:{_line(file, 'backend')}:7: fleet.ranks.0.backend: ")
    assert first.endswith("did you mean numpy?")
    assert f"{file}:{_line(file, 'window_s')}:3: rebalance.window_s: " in second
    assert "(got -2)" in second


def test_validate_as_json(tmp_path: Path) -> None:
    file = _edited(tmp_path, ("window_s: 2.0", "window_s: -2"))
    result = _run("validate", "-f", str(file), "-o", "json")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["valid"]) == (2, False)
    assert shown["faults"][0]["field"] == "rebalance.window_s"
    assert shown["faults"][0]["line"] == _line(file, "window_s")


def test_validate_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "absent.yaml"
    result = _run("validate", "-f", str(file))
    assert result.exit_code == 2
    assert result.stdout.startswith(f"{file}: cannot be read: No such file")
    shown = json.loads(_run("validate", "-f", str(file), "-o", "json").stdout)
    assert [(one["line"], one["column"]) for one in shown["faults"]] == [(None, None)]


def test_validate_says_what_it_does_not_check() -> None:
    shown = _run("validate", "--help").stdout
    assert "--size" in shown
    assert "--dry-run" in shown


def test_validate_shows_what_is_in_force() -> None:
    result = _run("validate", "-f", str(EXAMPLE), "--show-effective")
    assert '"drain_wait_s": 5.0' in result.stdout


# -- up ------------------------------------------------------------------------------------------


def test_size_prints_bytes_slots_spare_and_floor() -> None:
    lines = _run("up", "-f", str(EXAMPLE), "--size").stdout.splitlines()
    assert lines == [
        "Expert   96.0 KiB canonical, 96.0 KiB a slot with what the backend derives",
        "Experts  128 over all layers",
        "RANKS  SLOTS  STAGING   BUDGET",
        "    4     41        1  3.8 MiB",
        "Slots    164 in all, staging included",
        "Spare    32 slots for replicas beyond the first",
        "Floor    2 replicas of every expert: NOT reachable, 96 slots (9.0 MiB) short",
    ]


def test_size_of_a_fleet_that_is_too_small_fails(tmp_path: Path) -> None:
    file = _edited(tmp_path, ("slots: 41", "slots: 20"))
    result = _run("up", "-f", str(file), "--size")
    assert result.exit_code == 1
    assert "DOES NOT FIT: 52 slots (4.9 MiB) short" in result.stdout


def test_size_says_how_far_the_floor_is(tmp_path: Path) -> None:
    file = _edited(tmp_path, ("window_s: 2.0", "window_s: 2.0\n  floor: 2"))
    result = _run("up", "-f", str(file), "--size", "-o", "json")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["fits"], shown["floor"]) == (0, True, 2)
    assert shown["floor_slots_missing"] == 2 * 128 - 4 * 40


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    result = _run("up", "-f", str(EXAMPLE), "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == (
        "Would start service tiny-moe: a controller, 2 routers, 4 shards, a page; network "
        "loopback; on a Ray cluster started here"
    )
    assert not (tmp_path / "state").exists()


def test_dry_run_refuses_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    file = _edited(tmp_path, ("package:tiny_moe", "/no/such/folder"))
    result = _run("up", "-f", str(file), "--dry-run")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: checkpoint '/no/such/folder' is not a folder on this machine\n"
    )


def test_up_with_a_wrong_file_is_exit_2(tmp_path: Path) -> None:
    file = _edited(tmp_path, ("service: tiny-moe", "servise: tiny-moe"))
    result = _run("up", "-f", str(file))
    assert result.exit_code == 2
    assert "did you mean service?" in result.stderr


def test_insecure_cluster_must_be_accepted_in_so_many_words(tmp_path: Path) -> None:
    file = _edited(tmp_path, ("network: loopback", "network: cluster"))
    with pytest.raises(ConfigInvalid, match="--i-accept-insecure"):
        read_service_file(file)
    assert read_service_file(file, accept_insecure=True).security.accept_insecure
    assert read_service_file(EXAMPLE, accept_insecure=True).security.accept_insecure


def test_the_flag_accepts_no_other_fault(tmp_path: Path) -> None:
    file = _edited(tmp_path, ("network: loopback", "network: cluster"), ("slots: 41", "slots: 0"))
    with pytest.raises(ConfigInvalid) as found:
        read_service_file(file, accept_insecure=True)
    assert [fault.field for fault in found.value.faults] == ["fleet.ranks.0.slots"]
    assert found.value.faults[0].line == _line(file, "slots")


def test_the_flag_lets_nothing_else_in(tmp_path: Path) -> None:
    # Written anew without its alias the file would pass.
    file = _edited(
        tmp_path,
        ("service: tiny-moe", "service: &name tiny-moe"),
        ("name: tiny-moe", "name: *name"),
    )
    with pytest.raises(ConfigInvalid, match="aliases"):
        read_service_file(file, accept_insecure=True)


def _check(node: str, *problems: str) -> NodeCheck:
    versions = {"moe-serve": "0.1.0", "ray": "2.60.0", "numba": "0.68.1", "pyzmq": "27.3.0"}
    return NodeCheck(NodeFacts(node, "10.0.0.1", versions, "present", 1 << 30, 1 << 31), problems)


def test_preflight_is_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [_check("node-a"), _check("node-b", "ray is absent, here it is 2.60.0")]
    Output().data(nodes_plain(checks), nodes_parts(checks))
    assert capsys.readouterr().out.splitlines() == [
        "NODE    IP        MOE-SERVE  NUMBA   PYZMQ   RAY     CHECKPOINT   MEMORY     DISK  FIT",
        "node-a  10.0.0.1  0.1.0      0.68.1  27.3.0  2.60.0  present     1.0 GiB  2.0 GiB  yes",
        "node-b  10.0.0.1  0.1.0      0.68.1  27.3.0  2.60.0  present     1.0 GiB  2.0 GiB  no",
        "  ! node-b: ray is absent, here it is 2.60.0",
    ]


def test_a_service_that_is_up_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    Output().data({}, record_parts(_record("tiny")))
    out = capsys.readouterr().out
    assert "admin    127.0.0.1:4000" in out
    assert "(started here)" in out


@pytest.mark.parametrize("keep", [False, True])
def test_up_in_a_pipe_prints_its_steps_and_no_bar(
    monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    def up(_config: object, **given: Any) -> ServiceRecord:
        given["progress"]("filling the ranks")
        given["on_filled"](3, 128)
        return _record("tiny-moe")

    def kept(_service: str, _file: str, start: Any, **given: Any) -> None:
        given["on_up"](start())

    monkeypatch.setattr(service, "up", up)
    monkeypatch.setattr(kept_service, "keep", kept)
    monkeypatch.setattr(commands, "end_as_interrupted", lambda: None)
    result = _run("up", "-f", str(EXAMPLE), *(["--keep"] if keep else []))
    assert (result.exit_code, result.stderr) == (0, "filling the ranks\n")
    assert "Service tiny-moe is up" in result.stdout


# -- down ----------------------------------------------------------------------------------------


def _record(service: str) -> ServiceRecord:
    return ServiceRecord(
        service=service,
        ray_address="127.0.0.1:6379",
        namespace="moe_serve",
        admin_address="127.0.0.1:4000",
        router_addresses=("127.0.0.1:4001",),
        dashboard_url="",
        config_file="",
        network="loopback",
        ray_pids=(1,),
    )


def test_down_without_a_service_says_so() -> None:
    result = _run("down", "-y")
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "no single service record" in result.stderr


def test_a_dry_run_says_that_the_service_runs_already(monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(_record("tiny-moe"))
    monkeypatch.setattr(refusals, "answers", lambda _address: True)
    result = _run("up", "-f", str(EXAMPLE), "--dry-run")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "service 'tiny-moe' is running already" in " ".join(result.stderr.split())


@pytest.mark.parametrize("died", [False, True])
def test_a_dry_run_says_what_a_dead_service_left(
    monkeypatch: pytest.MonkeyPatch, died: bool
) -> None:
    if died:
        write_record(_record("tiny-moe"))
    monkeypatch.setattr(refusals, "answers", lambda _address: False)
    said = _run("up", "-f", str(EXAMPLE), "--dry-run")
    assert said.exit_code == 0
    assert ("is recorded here and does not run" in said.stdout) is died
    shown = json.loads(_run("up", "-f", str(EXAMPLE), "--dry-run", "-o", "json").stdout)
    assert (shown["would_start"], shown["replaces_dead"]) == (True, died)


def test_a_dry_run_refuses_a_token_file_that_others_may_read(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("admin: 0123456789abcdef0123456789abcdef\n", encoding="utf-8")
    tokens.chmod(0o644)
    file = tmp_path / "service.yaml"
    more = f"\nsecurity:\n  token_file: {tokens}\n"
    file.write_text(EXAMPLE.read_text(encoding="utf-8") + more, encoding="utf-8")
    result = _run("up", "-f", str(file), "--dry-run")
    assert result.exit_code == ExitCode.FAILED
    assert "open to others" in result.stderr


DRY_RUN = """
import sys
from typer.testing import CliRunner
from moe_serve.bootstrap import service
from moe_serve.cli.app import app
from moe_serve.errors import StartRefused

def joined(address, ship=False):
    import os
    raise StartRefused(f"mode {os.environ.get('RAY_AUTH_MODE')}, ray {'ray' in sys.modules}")

service.command_connected = joined
told = CliRunner().invoke(app, ["up", "-f", sys.argv[1], "--dry-run", "--ray-address", "h:1"])
print(told.stderr)
"""


def test_a_dry_run_on_a_cluster_sets_up_rays_authentication_before_it_imports_ray(
    tmp_path: Path,
) -> None:
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0" * 64, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", DRY_RUN, str(EXAMPLE)],
        env=environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120.0,
    )
    assert "mode token, ray False" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["foo", "*", "../other/evil"])
def test_down_of_a_name_that_is_not_recorded_names_those_that_are_and_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    write_record(_record("tiny"))
    before = sorted(tmp_path.rglob("*"))
    result = _run("down", "-y", name)
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "found: tiny" in " ".join(result.stderr.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_down_asks_first() -> None:
    write_record(_record("tiny"))
    result = CliRunner().invoke(app, ["down"], input="n\n")
    assert result.exit_code == 1
    assert "End service tiny?" in result.stderr
    assert read_record("tiny") == _record("tiny")


# -- the program ---------------------------------------------------------------------------------


def test_version() -> None:
    assert _run("--version").stdout == f"moe-serve {__version__}\n"


def test_help_names_every_command() -> None:
    result = _run("--help")
    named = "demo validate up down status plan apply pause resume drain undrain budget events"
    fleet = ("add-rank", "remove-rank", "roll")
    for command in [*named.split(), *fleet, "replay", "doctor"]:
        assert f" {command} " in result.stdout
