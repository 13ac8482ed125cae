"""Where and with what a figure was measured: the record every benchmark prints and writes.

Responsible for seed, commit, machine and versions, and for one thread in numerical libraries. Must
never import one of those libraries itself. Called by the benchmarks, first of all.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)

PACKAGES = ("numpy", "numba", "torch", "triton", "ray", "pyzmq", "grpcio", "uvloop", "scipy")


@dataclass(frozen=True)
class Environment:
    """What a reader needs to judge or repeat a figure."""

    benchmark: str
    seed: int
    commit: str
    """Commit of the checkout, with "+changes" where files differ from it; "unknown" outside one."""

    measured_at: str
    python: str
    system: str
    cpu: str
    cpu_count: int
    memory_bytes: int
    load_average: tuple[float, float, float]
    """Runnable tasks over 1, 5 and 15 minutes when the benchmark began: above cpu_count, absolute
    times mean little."""

    threads: dict[str, str]
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain form for the JSON file."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The record for people."""
        return [
            f"{self.benchmark}: seed {self.seed}, commit {self.commit}, {self.measured_at}",
            f"  {self.cpu_count} x {self.cpu}, {self.memory_bytes / 2**30:.1f} GiB, "
            f"load {', '.join(f'{load:.1f}' for load in self.load_average)}, {self.system}",
            f"  python {self.python}, "
            + ", ".join(f"{name} {number}" for name, number in self.versions.items()),
            "  threads: "
            + (", ".join(f"{name}={value}" for name, value in self.threads.items()) or "not set"),
        ]


def use_one_thread() -> None:
    """Give BLAS, OpenMP and numba one thread each, as a shard has; they read it when first
    imported.

    Raises:
        RuntimeError: numpy or torch is imported already, so that it would come too late.
    """
    loaded = [name for name in ("numpy", "torch") if name in sys.modules]
    if loaded:
        raise RuntimeError(f"{' and '.join(loaded)} imported before the thread count was set")
    for name in THREAD_VARIABLES:
        os.environ[name] = "1"


def record(benchmark: str, seed: int) -> Environment:
    """The record of a run that begins now."""
    return Environment(
        benchmark=benchmark,
        seed=seed,
        commit=_commit(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg(),
        threads={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        versions={name: number for name in PACKAGES if (number := _version(name))},
    )


def write_json(path: Path, environment: Environment, results: dict[str, Any]) -> None:
    """Write environment and results to a file, keys in the order given."""
    document = {"environment": environment.as_dict(), **results}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _commit() -> str:
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    """Output of git in the checkout, or None where there is no git, checkout or commit."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
