"""Long fuzz runs: `python -m tests.fuzz.run --inputs 1000000 --target wire_frames`, all targets
where none is named; `make fuzz` calls it. One process at a time.

Each target runs in a process of its own and prints a line: inputs, share taken, inputs a second of
processor time, growth of the process once warm, slowest input, new inputs, findings. The exit
status is 1 where something was found or a process grew by more than GROWN_BYTES_MAX. What is found
lies in `.fuzz/findings`, new inputs in `.fuzz/corpus`; `--keep` takes those that reach something
new into the committed corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz import engine

GROWN_BYTES_MAX = 64 << 20
ROOT = Path(__file__).resolve().parents[2]
HEAD = "target                 inputs  taken    /cpu s  grown MiB  slowest ms  new  findings"
ONE_THREAD = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def line(report: engine.Report) -> str:
    """A report as a line of the table."""
    found = ", ".join(f"{place} x{times}" for place, times in report.findings.items()) or "0"
    return (
        f"{report.target:20} {report.inputs:8,} {report.taken / max(1, report.inputs):6.1%} "
        f"{report.inputs / max(report.cpu_s, 1e-9):8,.0f} {report.grown_bytes / 2**20:10.1f} "
        f"{report.slowest_s * 1e3:11.1f} {report.new_files:4}  {found}"
    )


def bad(report: engine.Report) -> bool:
    """Whether a run must not pass."""
    return bool(report.findings) or report.grown_bytes > GROWN_BYTES_MAX


def run_target(name: str, given: argparse.Namespace) -> engine.Report:
    """One target in a process of its own; one that dies is a finding."""
    work = Path(given.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    kind = given.engine or (engine.ATHERIS if engine.load_atheris() else engine.OWN)
    with tempfile.TemporaryDirectory(prefix="fuzz-run-") as scratch:
        out = Path(scratch) / "report.json"
        said = work / f"{name}.log"
        order = {
            "name": name,
            "engine": kind,
            "seed": given.seed,
            "inputs": given.inputs,
            "seconds": given.seconds,
            "work": str(work),
            "out": str(out),
        }
        with said.open("wb") as log:
            ended = subprocess.run(
                [sys.executable, "-m", "tests.fuzz.engine", json.dumps(order)],
                cwd=ROOT,
                check=False,
                stderr=log,
                env={**os.environ, **dict.fromkeys(ONE_THREAD, "1")},
            )
        if out.exists():
            return engine.Report(**json.loads(out.read_text()))
    report = engine.Report(name, kind, given.seed)
    report.findings[f"the process ended with {ended.returncode}, see {said}"] = 1
    return report


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Fuzz the decoders.")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs of each target")
    parser.add_argument("--target", action="append", default=[], help="a target; all by default")
    parser.add_argument("--seconds", type=float, default=1e9, help="end a target earlier")
    parser.add_argument("--seed", type=int, default=1, help="first choice of the search")
    parser.add_argument("--engine", choices=(engine.ATHERIS, engine.OWN), help="best there is")
    parser.add_argument("--work", default=str(ROOT / ".fuzz"), help="new inputs and findings")
    parser.add_argument("--keep", action="store_true", help="add new inputs to the corpus")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run targets one after another; 1 where something was found."""
    from tests.fuzz.targets import TARGETS, target

    given = parsed(words)
    chosen = [target(name) for name in given.target] or list(TARGETS)
    kind = given.engine or (engine.ATHERIS if engine.load_atheris() else engine.OWN)
    print(f"engine {kind}, seed {given.seed}\n{HEAD}", flush=True)
    found = False
    for one in chosen:
        report = run_target(one.name, given)
        print(line(report), flush=True)
        found |= bad(report)
        if given.keep:
            keep(one, Path(given.work))
    return int(found)


def keep(one: Any, work: Path) -> None:
    """Make the committed corpus of a target anew from it and the new inputs."""
    from tests.fuzz.keep import smallest
    from tests.fuzz.targets import CORPUS, kept

    new = [file.read_bytes() for file in (work / "corpus" / one.name).glob("*")]
    chosen = smallest(one, [*kept(one.name), *new])
    shutil.rmtree(CORPUS / one.name, ignore_errors=True)
    (CORPUS / one.name).mkdir(parents=True)
    for name, data in chosen.items():
        (CORPUS / one.name / name).write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
