"""Cores, memory, shared memory, open files, GPUs, and the folder of state."""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path

from moe_serve.bootstrap.record import state_home
from moe_serve.cli.checks.row import Check, Level, shown_path
from moe_serve.cli.figures import shown_bytes

TOPIC = "machine"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, nothing is written there
SHARED_MEMORY_MIN_BYTES = 256 << 20
"""Ray's object store of 100 MiB, twice."""
MEMORY_MIN_BYTES = 2 << 30
OPEN_FILES_MIN = 4096
"""Sockets of a router grow with ranks x routers; Ray's own processes need some hundreds."""
DISK_MIN_BYTES = 1 << 30
PROCESSORS_MIN = 2


def machine_checks(proc: Path = Path("/proc"), shared_memory: Path = SHARED_MEMORY) -> list[Check]:
    """One row for each thing that a shard, a router or Ray may run out of."""
    return [
        _processors(),
        _memory(proc / "meminfo"),
        _folder("shared memory", shared_memory, SHARED_MEMORY_MIN_BYTES, "enlarge it (--shm-size)"),
        _open_files(),
        _state_folder(),
        *_clock(),
    ]


def gpu_checks() -> list[Check]:
    """GPUs as torch sees them. Imports torch: seconds."""
    try:
        import torch
    except ImportError as error:
        return [Check(TOPIC, "gpu", Level.WARN, f"torch cannot be imported: {error}")]
    if not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        return [Check(TOPIC, "gpu", Level.NOTE, f"none (torch was built for CUDA {built})")]
    rows = []
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        detail = f"{device.name}, {shown_bytes(device.total_memory)}, CUDA {torch.version.cuda}"
        rows.append(Check(TOPIC, f"gpu {number}", Level.OK, detail))
    return rows


def _processors() -> Check:
    usable = len(os.sched_getaffinity(0))
    detail = f"{usable} usable of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}"
    if usable < PROCESSORS_MIN:
        step = "Ray and one shard share a core: expect slow starts"
        return Check(TOPIC, "cpu", Level.WARN, detail, step)
    return Check(TOPIC, "cpu", Level.OK, detail)


def _memory(meminfo: Path) -> Check:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, free = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError) as error:
        return Check(TOPIC, "memory", Level.NOTE, f"cannot be read ({type(error).__name__})")
    detail = f"{shown_bytes(free)} available of {shown_bytes(total)}"
    if free < MEMORY_MIN_BYTES:
        return Check(TOPIC, "memory", Level.WARN, detail, "a small service takes about 2 GiB")
    return Check(TOPIC, "memory", Level.OK, detail)


def _folder(name: str, folder: Path, least_bytes: int, next_step: str) -> Check:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Check(TOPIC, name, Level.WARN, f"{shown_path(folder)}: {error.strerror}", next_step)
    detail = f"{shown_path(folder)}: {shown_bytes(usage.free)} free of {shown_bytes(usage.total)}"
    if usage.free < least_bytes:
        return Check(TOPIC, name, Level.WARN, detail, next_step)
    return Check(TOPIC, name, Level.OK, detail)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} (hard limit {hard})"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN:
        step = f"ulimit -n {OPEN_FILES_MIN} before `ray start`"
        return Check(TOPIC, "open files", Level.WARN, detail, step)
    return Check(TOPIC, "open files", Level.OK, detail)


def _state_folder() -> Check:
    home = state_home()
    existing = home
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        step = "set state_dir in the service file, or XDG_STATE_HOME"
        return Check(TOPIC, "state", Level.FAIL, f"{shown_path(home)} is not writable", step)
    return _folder("state", existing, DISK_MIN_BYTES, "free space: journal and manifests go there")


def _clock() -> list[Check]:
    clock = time.get_clock_info("monotonic")
    if clock.resolution > 1e-3:
        detail = f"monotonic, resolution {clock.resolution:g} s"
        return [Check(TOPIC, "clock", Level.WARN, detail, "timers need a millisecond")]
    return [Check(TOPIC, "clock", Level.OK, f"monotonic, resolution {clock.resolution:g} s")]
