"""What every command takes, and options that have no say beside another: exit 2, nothing asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from moe_serve.bootstrap.record import ServiceRecord, write_record
from moe_serve.cli.admin import AdminTarget
from moe_serve.cli.app import app
from moe_serve.cli.options import Reach
from tests.fakes.admin import FakeAdmin, make_window

ADDRESS = "127.0.0.1:4000"
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "tiny-moe.yaml")
PRINT_A_FILE = {"completion", "metrics dashboard", "metrics rules", "metrics scrape"}
"""Commands whose standard output is a file of a form that is not ours to choose."""


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def test_every_command_has_an_output_for_programs() -> None:
    found = dict(_commands(get_command(app)))
    assert set(found) > PRINT_A_FILE
    without = {
        name
        for name, command in found.items()
        if not any({"-o", "--output"} <= set(param.opts) for param in command.params)
    }
    assert without == PRINT_A_FILE


@pytest.fixture(autouse=True)
def _no_service_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("SERVICE", "TOKEN_FILE", "TLS_CA", "ADDRESS"):
        monkeypatch.delenv(f"MOE_SERVE_{name}", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_record(
        ServiceRecord(
            service="tiny",
            ray_address="",
            namespace="moe_serve",
            admin_address=ADDRESS,
            router_addresses=("127.0.0.1:4001",),
            dashboard_url="",
            config_file="",
            network="loopback",
        )
    )


class _Untouched(FakeAdmin):
    """Refused before anybody is asked."""

    def __call__(self, target: AdminTarget) -> FakeAdmin:
        raise AssertionError(f"{target} was asked")


def _run(admin: FakeAdmin, *args: str) -> Result:
    return CliRunner().invoke(app, list(args), obj=Reach(connect=admin), catch_exceptions=False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("status --watch --check", "--check has no say beside --watch"),
        ("explain plan --check", "--check has no say beside `explain plan`"),
        ("explain plan --seconds 0", "--seconds has no say beside `explain plan`"),
        ("explain plan 2-4 --seconds 9 --check", "--seconds, --check have no say beside"),
        ("top --once --interval 2", "--interval has no say beside --once"),
        ("top -o yaml --interval 2", "--interval has no say beside -o yaml"),
        ("top --interval 2", "--interval has no say beside a pipe: one table is printed"),
        ("heat --mode replicas --phase decode", "--phase has no say beside --mode replicas"),
        ("apply 2-4 --check --wait 5", "--wait has no say beside --check"),
        ("export -o json", "--output has no say beside an export to stdout"),
        ("export -o table", "--output has no say beside an export to stdout"),
        ("export --layers 1-2", "--layers has no say beside --format moe-serve"),
        ("export --format vllm --layers 1-2", "--layers has no say beside --format vllm"),
        ("add-rank --again 1 --group 1", "--group has no say beside --again"),
        ("add-rank --node b --again 1", "--node has no say beside --again"),
        ("metrics series --experts 8", "--experts has no say beside what is on by default"),
        ("metrics scrape --exporter ray --target h:1", "--target has no say beside --exporter ray"),
        (f"up -f {EXAMPLE} --size --dry-run", "--dry-run has no say beside --size"),
        (f"up -f {EXAMPLE} --size --ray-address h:1", "--ray-address has no say beside --size"),
        (f"up -f {EXAMPLE} --size --ship --keep", "--ship, --keep have no say beside --size"),
        (f"up -f {EXAMPLE} --dry-run --wait 9", "--wait has no say beside --dry-run"),
        (f"up -f {EXAMPLE} --dry-run --keep", "--keep has no say beside --dry-run"),
        ("bench --closed 4 --rate 50", "--rate has no say beside --closed"),
        ("bench --trace x.npz --zipf 1", "--zipf has no say beside --trace"),
        ("bench --trace x.npz --shift 1", "--shift has no say beside --trace"),
        ("bench 127.0.0.1:9 -s tiny", "--service has no say beside 127.0.0.1:9"),
        ("bench 127.0.0.1:9 -s none", "--service has no say beside 127.0.0.1:9"),
        ("status --address h:1 -s tiny", f"tiny was recorded at {ADDRESS}; give one"),
        ("status --address localhost:4001 -s tiny", f"tiny was recorded at {ADDRESS}; give one"),
        ("status --address [::1]:4000 -s tiny", f"tiny was recorded at {ADDRESS}; give one"),
        ("status --address h:1 -s none", "none is not recorded on this machine; give one"),
    ],
)
def test_what_would_not_be_heard_is_refused(line: str, said: str) -> None:
    result = _run(_Untouched(), *line.split())
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "line",
    [
        f"status --address {ADDRESS} -s tiny --check",
        "status --address localhost:4000 -s tiny",
        "explain plan -s tiny",
        "top --once --phase decode -s tiny",
        "heat --mode replicas --phase decode --csv - -s tiny",
        "rollback --dry-run --yes --keep-automatic --wait 5 -s tiny",
        "metrics series --per-expert --experts 8",
        "metrics scrape --exporter port --target h:1",
        f"up -f {EXAMPLE} --size --i-accept-insecure",
    ],
)
def test_what_is_heard_is_not_refused(line: str) -> None:
    result = _run(FakeAdmin(window=make_window(np.ones((2, 2, 2)))), *line.split())
    assert "no say" not in result.output
    assert result.exit_code == 0, result.output


def test_a_variable_of_the_environment_is_for_many_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOE_SERVE_SERVICE", "tiny")
    assert _run(FakeAdmin(), "status", "--address", "127.0.0.1:9").exit_code == 0
    monkeypatch.setenv("RAY_ADDRESS", "h:1")
    assert _run(_Untouched(), "up", "-f", EXAMPLE, "--size").exit_code == 0


def test_a_service_that_is_typed_is_not_overruled_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOE_SERVE_ADDRESS", "127.0.0.1:9")
    result = _run(_Untouched(), "status", "--service", "tiny")
    assert result.exit_code == 2
    assert "beside --address 127.0.0.1:9 (or MOE_SERVE_ADDRESS)" in " ".join(result.stderr.split())
