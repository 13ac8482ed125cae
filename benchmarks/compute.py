"""Compute backends against a plain loop over experts and against the measured peak, on one thread.

    python -m benchmarks.compute --json FILE

Responsible for the table and the file; exits 1 when a backend's output is wrong. About a minute.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.environment import record, use_one_thread, write_json

if TYPE_CHECKING:
    from benchmarks.compute_variants import Case, Result

PEAK_SIZE = 1024
SIZES = (
    (1, 1024, 512, 16, 4),
    (8, 1024, 512, 16, 4),
    (64, 1024, 512, 16, 4),
    (512, 1024, 512, 16, 4),
    (64, 256, 512, 64, 8),
    (8, 2048, 1408, 16, 2),
)
HEADER = (
    f"{'T,H,F,E,K':>20} {'variant':<21} {'speed-up':>8} {'quartiles':>13} "
    f"{'best ms':>9} {'GFLOP/s':>8} {'of peak':>8} {'error':>8}"
)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the JSON file if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compute", description=__doc__)
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="measuring time, all sizes")
    options = parser.parse_args(arguments)

    use_one_thread()  # before anything below imports numpy
    from benchmarks.compute_variants import Case, measure, measure_peak

    environment = record("compute", options.seed)
    _say(*environment.lines())
    peak = measure_peak(PEAK_SIZE)
    _say(
        f"  peak of a {PEAK_SIZE}^3 float32 product: "
        + ", ".join(f"{name} {figure:.1f} GFLOP/s" for name, figure in peak.items()),
        "  speed-up = plain loop / variant, thread time, median of interleaved rounds",
        HEADER,
    )
    document = []
    for sizes in SIZES:
        case = Case(*sizes)
        try:
            results = measure(case, options.seed, max(peak.values()), options.seconds / len(SIZES))
        except AssertionError as wrong:
            _say(f"wrong output: {wrong}")
            return 1
        _say(*(_row(case, result) for result in results))
        document.append({"case": asdict(case), "results": [asdict(r) for r in results]})
    if options.json is not None:
        write_json(options.json, environment, {"peak_gflop_per_s": peak, "cases": document})
        _say(f"written: {options.json}")
    return 0


def _row(case: Case, result: Result) -> str:
    quartiles = f"{result.speedup_low:.2f}..{result.speedup_high:.2f}"
    return (
        f"{case.label:>20} {result.variant:<21} {result.speedup:>7.2f}x {quartiles:>13} "
        f"{result.best_s * 1e3:>9.3f} {result.gflop_per_s:>8.1f} {result.share_of_peak:>7.0%} "
        f"{result.error:>8.0e}"
    )


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
