"""One long run of one target, in a process of its own: coverage-guided where atheris is installed,
else by changes to what was taken before.

Started by `run`. A finding does not end the run: it is kept as a file, counted, and told once a
place in the code.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ATHERIS, OWN = "atheris", "own"
INSTRUMENTED = (
    "moe_serve.rpc",
    "moe_serve.router.checks",
    "moe_serve.router.service",
    "moe_serve.wire",
    "moe_serve.weights",
    "moe_serve.config",
    "moe_serve.cli.recordings",
    "moe_serve.controller.journal",
    "moe_serve.controller.journal_rows",
    "moe_serve.controller.journal_store",
    "moe_serve.controller.admin",
    "moe_serve.shard.copy_server",
    "moe_serve.shard.server",
    "moe_serve.shard.sub_call_checks",
    "placement.messages",
    "placement.routing",
    "placement.adapters",
)
"""Modules whose branches guide the search, beside PyYAML's. Compiled kernels cannot be among
them."""
WATCHED_EVERY = 500
"""One input in so many is looked at with the allocation tracer, which slows it down several
times."""
WARM_INPUTS = 2000
"""After so many inputs caches are full; what the process grows from there on is counted."""
OWN_CHANGES = 0.7
"""Share of inputs that the target's own changes make; libFuzzer makes the others."""
POOL_MAX = 300
ROOT = Path(__file__).resolve().parents[2]
TRACE_LINES = 6


@dataclass
class Report:
    """What a run saw. Sizes in bytes, times in seconds."""

    target: str
    engine: str
    seed: int
    inputs: int = 0
    taken: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    grown_bytes: int = 0
    slowest_s: float = 0.0
    new_files: int = 0
    new_bytes: int = 0
    findings: dict[str, int] = field(default_factory=dict)


class Run:
    """Counts inputs of a target and keeps what it finds in `folder`, until `most` inputs or
    `seconds_max` seconds are over; then `done` is true."""

    def __init__(
        self, target: Any, report: Report, folder: Path, most: int, seconds_max: float
    ) -> None:
        from tests.fuzz.watch import INPUT_S_MAX, Costly, run_watched

        self._target = target
        self._report = report
        self._folder = folder
        self._most = most
        self._began_s = time.monotonic()
        self._began_cpu_s = time.process_time()
        self._ends_s = self._began_s + seconds_max
        self._watched, self._input_s_max, self._costly = run_watched, INPUT_S_MAX, Costly
        self._warm_bytes = 0

    @property
    def done(self) -> bool:
        """Whether enough was seen."""
        return self._report.inputs >= self._most or time.monotonic() >= self._ends_s

    def one(self, data: bytes) -> bool:
        """Run one input; a finding is kept. Returns whether the input was taken."""
        report = self._report
        report.inputs += 1
        taken = False
        began_s = time.process_time()
        try:
            watched = report.inputs % WATCHED_EVERY == 0
            taken = self._watched(self._target, data) if watched else self._target.run(data)
            took_s = time.process_time() - began_s
            report.slowest_s = max(report.slowest_s, took_s)
            if took_s > self._input_s_max:
                raise self._costly(f"took {took_s:.1f} s")
        except Exception as error:
            self._keep(error, data)
        report.taken += taken
        if report.inputs == min(WARM_INPUTS, self._most // 2):
            self._warm_bytes = _peak_bytes()
        return taken

    def finish(self, engine_folder: Path) -> Report:
        """The report, complete."""
        report = self._report
        report.seconds = time.monotonic() - self._began_s
        report.cpu_s = time.process_time() - self._began_cpu_s
        report.grown_bytes = _peak_bytes() - self._warm_bytes
        files = [path for path in engine_folder.glob("*") if path.is_file()]
        report.new_files = len(files)
        report.new_bytes = sum(path.stat().st_size for path in files)
        return report

    def _keep(self, error: Exception, data: bytes) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
        findings = self._report.findings
        findings[place] = findings.get(place, 0) + 1
        if findings[place] > 1:
            return
        name = f"{self._target.name}-{hashlib.sha256(data).hexdigest()[:16]}"
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_bytes(data)
        lines = traceback.format_exception(error)[-TRACE_LINES:]
        print(f"{self._target.name}: {place}, kept as {name}\n{''.join(lines)[:4000]}", flush=True)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load_atheris() -> ModuleType | None:
    """The coverage-guided engine, None where it is not installed."""
    try:
        import atheris
    except ImportError:
        return None
    found: ModuleType = atheris
    return found


def search(
    name: str, *, engine: str, seed: int, inputs: int, seconds: float, work: Path, out: Path
) -> None:
    """Run a target and write its report to `out`. With atheris this ends the process."""
    report = Report(name, engine, seed)
    corpus = work / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)

    def written(run: Run) -> None:
        out.write_text(json.dumps(asdict(run.finish(corpus))))

    if engine == OWN:
        from tests.fuzz.targets import kept, target

        run = Run(target(name), report, work / "findings", inputs, seconds)
        _warm(target(name))
        found = [file.read_bytes() for file in sorted(corpus.glob("*"))]
        _own(run, target(name), [*target(name).seeds(), *kept(name), *found], seed)
        written(run)
        return
    atheris = load_atheris()
    assert atheris is not None, "the caller looked"
    with atheris.instrument_imports(include=["moe_serve", "placement", "yaml"], exclude=_others()):
        from tests.fuzz.targets import CORPUS, target
    one = target(name)
    _warm(one)
    seeds = work / "seeds" / name
    seeds.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(one.seeds()):
        (seeds / str(number)).write_bytes(data)
    run = Run(one, report, work / "findings", inputs, seconds)

    def each(data: bytes) -> None:
        run.one(data)
        if run.done:
            written(run)
            sys.stdout.flush()
            os._exit(0)  # libFuzzer knows no other way to stop at a number of inputs

    options = (f"-seed={seed}", f"-max_len={one.max_bytes}", "-timeout=120", "-rss_limit_mb=4096")
    folders = [str(corpus), str(seeds), str(CORPUS / name)]
    atheris.Setup(
        [sys.argv[0], *options, *(path for path in folders if Path(path).is_dir())],
        each,
        # Looked up when it is called: `Fuzz` puts another function there.
        custom_mutator=_mutator(one, lambda data, size: bytes(atheris.Mutate(data, size))),
    )
    atheris.Fuzz()


def _others() -> list[str]:
    """Modules that are not to guide the search: atheris takes packages whole."""
    names = []
    for package in ("moe_serve", "placement"):
        for file in (ROOT / package).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not any(name == known or name.startswith(f"{known}.") for known in INSTRUMENTED):
                names.append(name)
    return names


def _warm(one: Any) -> None:
    for data in one.seeds():
        one.run(data)


def _mutator(one: Any, by_bytes: Callable[[bytes, int], bytes]) -> Callable[..., bytes]:
    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() > OWN_CHANGES:
            return by_bytes(data, max_size)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = one.mutate(data, rng)[:max_size]
        return bytes(data)

    return mutate


def _own(run: Run, one: Any, pool: list[bytes], seed: int) -> None:
    rng = random.Random(seed)
    while not run.done:
        data = rng.choice(pool)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = one.mutate(data, rng)[: one.max_bytes]
        if run.one(data) and rng.random() < 0.05:
            if len(pool) < POOL_MAX:
                pool.append(data)
            else:
                pool[rng.randrange(POOL_MAX)] = data


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    del sys.argv[1:]
    search(
        given["name"],
        engine=given["engine"],
        seed=given["seed"],
        inputs=given["inputs"],
        seconds=given["seconds"],
        work=Path(given["work"]),
        out=Path(given["out"]),
    )
