"""What doctor says of a machine that is short of something."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_serve.cli.checks.machine import OPEN_FILES_MIN, gpu_checks, machine_checks
from moe_serve.cli.checks.row import Check, Level


def row(name: str, **where: Path) -> Check:
    (found,) = [one for one in machine_checks(**where) if one.name == name]
    return found


def test_a_machine_without_gpu_is_a_note_and_one_without_torch_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = gpu_checks()
    assert (found.level, found.detail[:4]) == (Level.NOTE, "none")
    monkeypatch.setitem(sys.modules, "torch", None)
    (found,) = gpu_checks()
    assert found.level is Level.WARN
    assert found.detail.startswith("torch cannot be imported")


def test_every_gpu_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="A", total_memory=141 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _number: device)
    rows = gpu_checks()
    assert [one.name for one in rows] == ["gpu 0", "gpu 1"]
    assert all(one.level is Level.OK and "A, 141.0 GiB" in one.detail for one in rows)


def test_one_core_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert row("cpu").level is Level.WARN
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    assert row("cpu").level is Level.OK


@pytest.mark.parametrize(
    ("soft", "level"),
    [
        (OPEN_FILES_MIN - 1, Level.WARN),
        (OPEN_FILES_MIN, Level.OK),
        (resource.RLIM_INFINITY, Level.OK),
    ],
)
def test_few_open_files_are_a_warning_and_no_limit_is_none(
    monkeypatch: pytest.MonkeyPatch, soft: int, level: Level
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (soft, resource.RLIM_INFINITY))
    assert row("open files").level is level


def test_a_full_disk_is_a_warning_and_a_closed_folder_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "not" / "yet"))
    assert row("state").level is Level.OK, "it is made where it is not there"
    usage = SimpleNamespace(total=10 << 30, free=1 << 20)
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _folder: usage)
        found = row("state", shared_memory=tmp_path)
        assert (found.level, "journal" in found.next_step) == (Level.WARN, True)
    monkeypatch.setattr(os, "access", lambda _folder, _mode: False)
    found = row("state")
    assert (found.level, "state_dir" in found.next_step) == (Level.FAIL, True)


def test_a_coarse_clock_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(resolution=0.0156)
    monkeypatch.setattr(time, "get_clock_info", lambda _name: clock)
    found = row("clock")
    assert (found.level, found.next_step) == (Level.WARN, "timers need a millisecond")
