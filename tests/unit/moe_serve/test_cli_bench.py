"""`moe-serve bench` before it asks anything: what it refuses, and how it shows what it found."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from moe_serve.bench import BenchReport
from moe_serve.bench.figures import latency_of
from moe_serve.bootstrap.record import ServiceRecord, write_record
from moe_serve.cli.app import app
from moe_serve.cli.commands.bench import Routers, _routers
from moe_serve.cli.output import Output
from moe_serve.cli.views.bench import bench_parts

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
HERE = "127.0.0.1:1"
TOKEN = "dispatch-token-of-sixteen"


@pytest.fixture(autouse=True)
def _nothing_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("MOE_SERVE_SERVICE", "MOE_SERVE_TOKEN_FILE", "MOE_SERVE_TLS_CA"):
        monkeypatch.delenv(name, raising=False)


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, args)], catch_exceptions=False)


@pytest.mark.parametrize("address", ["10.0.0.7:4000", "router.example:4000", "[2001:db8::1]:4000"])
def test_another_machine_is_refused_unless_somebody_knows(address: str) -> None:
    result = _run(HERE, address)
    assert result.exit_code == 2
    assert "give --i-know to put load on it" in " ".join(result.stderr.split())


def test_without_address_and_record_there_is_nobody_to_ask() -> None:
    result = _run()
    assert result.exit_code == 3
    assert "moe-serve up" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("--rate", 0),
        ("--rate", "fast"),
        ("--closed", -1),
        ("--seconds", 0),
        ("--tokens", 0),
        ("--phase-mix", 1.1),
        ("--zipf", -1),
        ("--shift", -1),
        ("--slo-ms", 0),
        ("--timeout", 0),
        ("--seed", -1),
        ("--warm-up", -1),
        ("--trace", "none.npz"),
        ("-o", "csv"),
    ],
)
def test_wrong_options_are_exit_2(args: tuple[object, ...]) -> None:
    assert _run(HERE, *args).exit_code == 2


def test_a_trace_of_counts_names_no_tokens(tmp_path: Path) -> None:
    file = tmp_path / "counts.npz"
    np.savez(file, logical_count=np.ones((4, 2, 8), np.int64))
    result = _run(HERE, "--trace", file)
    assert result.exit_code == 2
    assert "give one with topk_ids" in " ".join(result.stderr.split())


def test_an_address_that_is_none_is_exit_2() -> None:
    for address in ("here", "127.0.0.1"):
        result = _run(address, "--i-know")
        assert result.exit_code == 2
        assert "want host:port" in result.stderr


# -- where requests go ---------------------------------------------------------------------------


def _record(tmp_path: Path, **changes: object) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin admin-token-of-sixteen-letters\ndispatch {TOKEN}\n")
    tokens.chmod(0o600)
    given: dict[str, object] = {
        "service": "tiny",
        "ray_address": "",
        "namespace": "moe_serve",
        "admin_address": HERE,
        "router_addresses": ("127.0.0.1:2", "127.0.0.1:3"),
        "dashboard_url": "",
        "config_file": "",
        "network": "loopback",
        "token_file": str(tokens),
    }
    write_record(ServiceRecord(**{**given, **changes}))  # type: ignore[arg-type]


def test_the_recorded_service_gives_routers_and_token(tmp_path: Path) -> None:
    _record(tmp_path)
    found = _routers((), "", None, None)
    assert found == Routers(("127.0.0.1:2", "127.0.0.1:3"), TOKEN, of_record=True)
    assert TOKEN not in repr(found)
    # One of its routers alone is let in the same way; a stranger never sees the token.
    one = _routers(("127.0.0.1:3",), "", None, None)
    assert one == Routers(("127.0.0.1:3",), TOKEN, of_record=True)
    assert _routers((HERE,), "", None, None) == Routers((HERE,))


def test_a_service_that_is_being_started_has_no_routers_yet(tmp_path: Path) -> None:
    _record(tmp_path, router_addresses=())
    result = _run("--service", "tiny")
    assert result.exit_code == 3
    assert "is being started" in result.stderr


def test_a_file_of_tokens_without_one_to_dispatch_is_said(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("read read-token-of-sixteen-letters\n")
    tokens.chmod(0o600)
    result = CliRunner().invoke(app, ["--token-file", str(tokens), "bench", HERE])
    assert result.exit_code == 1
    assert "no token of role dispatch" in " ".join(result.stderr.split())


# -- what is shown -------------------------------------------------------------------------------


def _report(**changes: object) -> BenchReport:
    latency = latency_of(np.arange(1, 101) / 1000)
    given: dict[str, object] = {
        "model": "tiny-moe",
        "simulated": False,
        "loop": "open",
        "offered_per_s": 51.0,
        "seconds": 2.0,
        "requests": 102,
        "answered": 100,
        "answered_per_s": 50.0,
        "errors": {"UNAVAILABLE": 2},
        "latency": latency,
        "phases": {"decode": latency, "prefill": latency_of(np.zeros(0))},
        "sent_late_p99_s": 0.001,
        "in_flight_max": 7,
        "rows_per_s": 400.0,
        "target_s": 0.05,
        "goodput_per_s": 25.0,
        "within_target": 50 / 102,
    }
    return BenchReport(**{**given, **changes})  # type: ignore[arg-type]


def test_figures_as_text(rewrite: bool, capsys: pytest.CaptureFixture[str]) -> None:
    Output().data(None, bench_parts(_report()))
    text = capsys.readouterr().out
    file = GOLDEN / "bench.txt"
    if rewrite:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_a_generator_that_lags_and_a_closed_loop_are_pointed_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Output().data(None, bench_parts(_report(sent_late_p99_s=0.03)))
    assert "part of what was measured" in capsys.readouterr().out
    Output().data(None, bench_parts(_report(loop="closed", target_s=None, simulated=True)))
    closed = capsys.readouterr().out
    assert "not the latency of others" in closed
    assert "Goodput" not in closed
    assert "simulated compute" in closed
