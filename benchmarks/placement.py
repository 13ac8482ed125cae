"""Our planner beside published ones, on recorded traffic: balance out of sample, writes, CPU.

    python -m benchmarks.placement [--seeds 0-9] [--cases deepseek8,gptoss8] [--json FILE] [--docs]

Responsible for the order of the runs, the printed tables and the files. A missed bar is printed
and written, and the program still exits 0. `--quick`: one seed of a small case, a minute. Cases
whose trace is not here are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.environment import ROOT, Environment, record, use_one_thread

if TYPE_CHECKING:
    from benchmarks.placement_runs import Row, Variant

CURVE_CASES: Final = ("deepseek8", "deepseek16", "gptoss8")
CURVE_ORDERS: Final = ("mixed", "blocks")
"""Where ours runs at every budget; elsewhere at the table's only."""
QUICK_CASES: Final = "gptoss8"
PAGE: Final = ROOT / "docs" / "benchmarks" / "placement.md"
PICTURE: Final = ROOT / "docs" / "images" / "placement.svg"


class Job(NamedTuple):
    """Arguments of `run_timeline`."""

    case: str
    order: str
    seed: int
    variant: Variant


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the files asked for."""
    options = _options(arguments)
    use_one_thread()  # before anything below imports numpy
    from benchmarks.placement_peers import find_peers, peers_folder
    from benchmarks.placement_report import bar_lines, case_lines, document, summarise
    from benchmarks.placement_runs import Row

    if options.read is not None:
        stored = json.loads(options.read.read_text(encoding="utf-8"))
        environment = Environment(**stored["environment"])
        rows = [Row(**row) for row in stored["rows"]]
        sources, command = stored["peers"], stored["command"]
    else:
        environment = record("placement", min(options.seeds))
        _say(*environment.lines())
        peers = find_peers(peers_folder())
        sources = [f"{p.name}: {p.source}" for p in peers.found] + [
            f"absent: {line}" for line in peers.absent
        ]
        _say(*(f"  {line}" for line in sources))
        command = public_command(sys.argv[1:] if arguments is None else arguments)
        rows = []
        for found in _run(_jobs(options), options.jobs):
            rows += found
            if options.json is not None:  # a long run that is stopped leaves what it has
                _write(options.json, environment, sources, command, rows)
    table = summarise(rows)
    for key, summaries in table.items():
        _say("", *case_lines(key, summaries))
    _say("", *bar_lines(table))
    if options.docs:
        from benchmarks.placement_plot import picture

        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(document(rows, environment, sources, command), encoding="utf-8")
        PICTURE.write_text(picture(table), encoding="utf-8")
        _say("", f"written: {PAGE.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}")
    return 0


def seed_range(text: str) -> list[int]:
    """`0-9` or `1,4,7` as numbers.

    >>> seed_range("0-3"), seed_range("7"), seed_range("1,4")
    ([0, 1, 2, 3], [7], [1, 4])
    """
    seeds: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        seeds.extend(range(int(low), int(high or low) + 1))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} names no seed; write 0-9")
    return seeds


def public_command(words: Sequence[str]) -> str:
    """The command without the files it writes: those are of one machine.

    >>> public_command(["--seeds", "0-2", "--json", "/x/y.json", "--docs"])
    'python -m benchmarks.placement --seeds 0-2 --docs'
    """
    kept = [
        word
        for at, word in enumerate(words)
        if not word.startswith("--json") and (at == 0 or words[at - 1] != "--json")
    ]
    return " ".join(["python -m benchmarks.placement", *kept])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--seeds", type=seed_range, default=seed_range("0-9"))
    parser.add_argument("--cases", default="", help="names, comma separated; default: all")
    parser.add_argument("--orders", default="", help="the same of orders")
    parser.add_argument("--few", action="store_true", help="ours at the table's budget only")
    parser.add_argument("--engine", action="store_true", help="also through the engine's gate")
    parser.add_argument("--balance-enough", type=float, help="of our policy; default: production's")
    parser.add_argument("--passes", type=int, default=1, help="times the requests are gone through")
    parser.add_argument("--quick", action="store_true", help="one seed of a small case")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 1 for CPU figures")
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument("--read", type=Path, help="measure nothing, read rows of such a file")
    parser.add_argument("--docs", action="store_true", help="write page and picture in docs/")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.few = options.seeds[:1], True
        options.cases = options.cases or QUICK_CASES
    return options


def _jobs(options: argparse.Namespace) -> list[Job]:
    from benchmarks.placement_runs import Variant
    from benchmarks.placement_traces import CASES, TracesMissing, load_case, orders_of

    cases = []
    for name in options.cases.split(",") if options.cases else list(CASES):
        try:
            cases.append(load_case(name))
        except TracesMissing as missing:
            _say(f"left out: {name}: {missing}")
    jobs = []
    # Seed by seed, recorded before made-up: a run that is stopped has few seeds, not few cases.
    for made_up in (False, True):
        for seed in options.seeds:
            for case in cases:
                if made_up != (not case.file):
                    continue
                for order in options.orders.split(",") if options.orders else orders_of(case):
                    curve = case.name in CURVE_CASES and order in CURVE_ORDERS
                    variant = Variant(
                        options.few or not curve,
                        options.engine,
                        options.balance_enough,
                        options.passes,
                    )
                    jobs.append(Job(case.name, order, seed, variant))
    return jobs


def _run(jobs: Sequence[Job], processes: int) -> Iterator[list[Row]]:
    if processes == 1:
        yield from map(_one, jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_one, jobs)


def _one(job: Job) -> list[Row]:
    from benchmarks.placement_runs import run_timeline

    rows = run_timeline(*job)
    _say(f"  done: {job.case} {job.order} seed {job.seed}")
    return rows


def _write(
    path: Path, environment: Environment, peers: Sequence[str], command: str, rows: Sequence[Row]
) -> None:
    import msgspec

    from benchmarks.environment import write_json

    results = {
        "command": command,
        "peers": list(peers),
        "load_average_at_end": os.getloadavg(),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }
    write_json(path, environment, results)


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
