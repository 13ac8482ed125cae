"""`cluster.yaml` is what Ray's launcher takes, checked offline: its schema, and its flags."""

import copy
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start

FILE = Path(__file__).parents[2] / "cluster.yaml"


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tree


def _validate(cluster: dict[str, Any]) -> None:
    # Defaults first: the schema is of a filled file.
    validate_config(prepare_config(copy.deepcopy(cluster)))


def _starts(cluster: dict[str, Any]) -> list[str]:
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    parts = [part.strip() for command in commands for part in command.split(";")]
    return [part for part in parts if part.startswith("ray start")]


def _flags(part: str) -> dict[str, Any]:
    found: dict[str, Any] = start.make_context("ray start", shlex.split(part)[2:]).params
    return found


def test_ray_takes_the_file(cluster: dict[str, Any]) -> None:
    _validate(cluster)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda c: c.update(cluster_nam="x"), id="unknown key"),
        pytest.param(lambda c: c.update(setup_commands="pip install"), id="text for a list"),
        pytest.param(lambda c: c["provider"].pop("worker_ips"), id="no machines"),
        pytest.param(lambda c: c["docker"].update(immage="x"), id="unknown docker key"),
    ],
)
def test_ray_refuses_a_spoiled_file(cluster: dict[str, Any], spoil: Any) -> None:
    spoiled = copy.deepcopy(cluster)
    spoil(spoiled)
    # Ray raises its schema's error, its own or a bare assertion, as it finds it.
    with pytest.raises(Exception):  # noqa: B017, PT011
        _validate(spoiled)


def test_every_flag_of_ray_start_exists(cluster: dict[str, Any]) -> None:
    head, worker = (_flags(part) for part in _starts(cluster))
    assert head["head"] is True
    assert head["port"] == 6379
    assert worker["head"] is False
    assert worker["address"].endswith(":6379")


@pytest.mark.parametrize("flag", ["--portt=6379", "--port=abc", "--labels"])
def test_a_wrong_flag_is_seen(cluster: dict[str, Any], flag: str) -> None:
    with pytest.raises(click.ClickException):
        _flags(f"{_starts(cluster)[0]} {flag}")


def test_the_pinned_ray_is_the_tested_one(cluster: dict[str, Any]) -> None:
    pinned = (FILE.parent / "constraints.txt").read_text(encoding="utf-8")
    version = cluster["docker"]["image"].split(":")[1].split("-")[0]
    assert f"\nray=={version}\n" in pinned


def test_authentication_stays_on(cluster: dict[str, Any]) -> None:
    for part in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert any("RAY_AUTH_MODE=token" in command for command in cluster[part])
