"""Placement policies against each other: a race on recorded traffic, a sudden shift, a competitive
ratio, a learned policy in and out of its distribution, and what a perfect forecast would give.

    python -m benchmarks.policies --json FILE [--part race] [--seeds 5] [--docs PAGE]
    python -m benchmarks.policies --read FILE [--read FILE] --docs PAGE

Recorded traffic needs MOE_SERVE_DATA (the folder that holds expert_traces/); parts that need it
are refused without. All figures are simulated: nothing is copied, a plan is in place when the next
window begins. `--read` makes the page from files of earlier runs and measures nothing.

Responsible for the command line, the JSON file and the page. Minutes a seed for all parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import record, use_one_thread, write_json

PARTS = ("ratio", "swap", "learned", "race", "clairvoyant")
NEEDS_TRACES = ("learned", "race", "clairvoyant")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and write what is asked for."""
    options = _parser().parse_args(arguments)
    use_one_thread()  # before anything below imports numpy
    from benchmarks.placement_traces import TracesMissing
    from benchmarks.policies_report import lines_of, page

    parts: dict[str, dict[str, Any]] = {}
    for path in options.read or ():
        document = json.loads(path.read_text(encoding="utf-8"))
        for name, rows in document["parts"].items():
            parts[name] = {"environment": document["environment"], "rows": rows}
    if not options.read:
        environment = record("policies", options.seed)
        _say(environment.lines())
        seeds = range(options.seed, options.seed + options.seeds)
        for name in options.part or PARTS:
            try:
                rows = [asdict(row) for row in measured(name, seeds, options)]
            except TracesMissing as missing:
                _say([f"{name}: left out: {missing}"])
                continue
            parts[name] = {"environment": environment.as_dict(), "rows": rows}
            _say(lines_of(name, rows))
        if options.json is not None:
            write_json(
                options.json, environment, {"parts": {n: p["rows"] for n, p in parts.items()}}
            )
    if options.docs is not None:
        options.docs.parent.mkdir(parents=True, exist_ok=True)
        options.docs.write_text(page(parts), encoding="utf-8")
    return 0 if parts else 1


def measured(part: str, seeds: Sequence[int], options: argparse.Namespace) -> list[Any]:
    """Rows of a part: dataclass instances, one a runner and seed."""
    from benchmarks import policies_race as races
    from benchmarks import policies_ratio as ratios
    from benchmarks import policies_swap as swaps

    match part:
        case "ratio":
            return [
                row
                for traffic in options.traffic or ratios.TRAFFIC
                for seed in seeds
                for row in ratios.measure(traffic, seed)
            ]
        case "swap":
            return [
                row
                for skew in swaps.SKEWS
                for price in swaps.PRICES
                for seed in seeds
                for row in swaps.measure(skew, price, seed, swaps.runners_at(price))
            ]
        case "learned":
            return races.learning(races.all_networks(options.seed), seeds)
        case "race":
            return races.race(races.TESTS, seeds, races.all_networks(options.seed))
        case "clairvoyant":
            cases = options.case or races.REFERENCE_CASES
            return races.clairvoyant(cases, ("mixed", "blocks", "shifting"), seeds)
    raise ValueError(f"part {part!r} is not one of {', '.join(PARTS)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--docs", type=Path, help="write the page to this file")
    parser.add_argument("--read", type=Path, action="append", help="results of an earlier run")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--case", action="append", help="clairvoyant: cases of the benchmark")
    parser.add_argument("--traffic", action="append", help="ratio: kinds of traffic")
    return parser


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
