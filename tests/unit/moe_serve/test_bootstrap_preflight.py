"""What a node says of itself before a start, and what a silent one is taken for."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, NodeDiedError, RayTaskError, TaskUnschedulableError

from moe_serve import __version__
from moe_serve.bootstrap.parts import checkpoint_folder, moe_spec
from moe_serve.bootstrap.preflight import (
    _why_silent,
    available_memory_bytes,
    local_facts,
    package_versions,
)
from moe_serve.config import ServiceConfig
from moe_serve.errors import StartRefused

TINY = "package:tiny_moe"


def a_config(checkpoint: str) -> ServiceConfig:
    profile = {"name": "p", "flops_per_s": 1.0, "memory_bytes_per_s": 1.0, "copy_bytes_per_s": 1.0}
    return ServiceConfig.model_validate(
        {
            "service": "s",
            "model": {"name": "m", "checkpoint": checkpoint},
            "fleet": {"ranks": [{"slots": 10, "profile": "p"}]},
            "profiles": [profile],
        }
    )


def test_a_node_tells_what_it_has_also_where_the_state_folder_is_not_made_yet(
    tmp_path: Path,
) -> None:
    facts = local_facts("a", "10.0.0.1", TINY, str(tmp_path / "not" / "yet"))
    assert (facts.node, facts.ip, facts.checkpoint, facts.error) == ("a", "10.0.0.1", "present", "")
    assert facts.versions == package_versions()
    assert facts.versions["ray"]
    assert facts.free_disk_bytes > 0
    assert facts.free_memory_bytes > 0
    assert not (tmp_path / "not").exists(), "looking makes nothing"


def test_a_checkpoint_that_is_not_on_the_node_is_told_not_raised(tmp_path: Path) -> None:
    absent = local_facts("a", "10.0.0.1", str(tmp_path / "absent"), str(tmp_path))
    assert absent.checkpoint.endswith("is not a folder on this machine")
    empty = local_facts("a", "10.0.0.1", str(tmp_path), str(tmp_path))
    assert empty.checkpoint == "no config.json"


def test_a_package_that_is_not_installed_has_no_version_but_a_checkout_of_ours_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    versions = package_versions()
    assert versions.pop("moe-serve") == __version__
    assert set(versions.values()) == {""}


def test_memory_is_the_systems_estimate_where_it_gives_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "MemTotal: 9 kB\nMemAvailable:    5 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda _self: text)
    assert available_memory_bytes() == 5 << 10
    text = "MemTotal: 9 kB\n"
    assert available_memory_bytes() > 9 << 10, "free pages, where it gives none"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NodeDiedError("gone"), "has left the cluster meanwhile"),
        (TaskUnschedulableError("no such node"), "has left the cluster meanwhile"),
        (GetTimeoutError("late"), "does not answer within 60 s"),
        (TimeoutError(), "does not answer within 60 s"),
        (
            RayTaskError("f", "Traceback\n  in f\nModuleNotFoundError: No module", ImportError("")),
            "cannot run moe_serve: ModuleNotFoundError: No module",
        ),
        (RuntimeError(""), "cannot run moe_serve: RuntimeError"),
    ],
)
def test_a_silent_node_is_told_in_one_line(error: Exception, says: str) -> None:
    told = _why_silent(error, 60.0)
    assert told.startswith(says)
    assert "\n" not in told


# -- the checkpoint of a service file ------------------------------------------------------------


def test_a_package_holds_one_checkpoint() -> None:
    assert Path(checkpoint_folder(TINY), "config.json").is_file()
    with pytest.raises(StartRefused, match="the package holds only package:tiny_moe"):
        checkpoint_folder("package:huge_moe")


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_start_from_a_folder_that_is_no_checkpoint_is_refused_by_its_name(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    config: Any = a_config(str(tmp_path))
    with pytest.raises(StartRefused, match=f"^checkpoint {tmp_path}: "):
        moe_spec(config)
